"""The peak is measured on the device at hand, in each type that it has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dyno.jobs.launcher import launch
from dyno.worker.facts.job import PeakOfType
from dyno.worker.jobs import stress
from dyno.worker.spec import Job, Runtime, Unavailable


def test_every_type_of_a_cpu_has_a_peak_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stress.SIDES, "cpu", (32, 64))
    began = time.monotonic()
    found = dict(stress.measure_peak(Runtime(threads=1), 0.02))
    assert set(found) == {"fp32", "fp16", "bf16", "int8"}, "a CPU has no TF32"
    for one in found.values():
        assert one.missing or one.flops_per_s == max(one.sides.values()) == one.sides[str(one.side)]
    fp32 = found["fp32"]
    assert fp32.flops_per_s > 1e7
    assert began <= fp32.window[0] < fp32.window[1] <= time.monotonic()


def test_a_slow_type_is_not_tried_at_sizes_that_take_all_day(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {16: 1e6, 32: 1e6, 4096: 1e6}
    monkeypatch.setitem(stress.SIDES, "cpu", tuple(rates))
    monkeypatch.setattr(stress, "_measure_side", lambda torch, device, name, side, seconds: rates[side])
    assert all(set(one.sides) == {"16", "32"} for _, one in stress.measure_peak(Runtime(threads=1), 1.0))


def test_a_type_without_a_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for int8 here\nmore")

    monkeypatch.setitem(stress.SIDES, "cpu", (16,))
    monkeypatch.setattr(torch, "_int_mm", refuse)
    assert dict(stress.measure_peak(Runtime(threads=1), 0.01))["int8"] == PeakOfType(missing="no kernel for int8 here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_a_gpu_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="finds no NVIDIA GPU"):
        dict(stress.measure_peak(Runtime(device="cuda:0")))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_as_a_job_it_leaves_a_record_with_a_reason(tmp_path: Path) -> None:
    record = launch(Job("peak", Runtime(device="cuda:0")), tmp_path / "peak", 1200)
    assert (record.status, record.stage) == ("skipped", "peak")
    assert "NVIDIA GPU" in record.reason


def test_only_the_types_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stress.SIDES, "cpu", (16,))
    assert [name for name, _ in stress.measure_peak(Runtime(threads=1), 0.01, ["bf16", "tf32"])] == ["bf16"]


def test_a_copy_has_a_rate_that_counts_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress.system, "last_cache", lambda: 1 << 19)
    monkeypatch.setitem(stress.COPIED, "cpu", 1 << 20)
    with monkeypatch.context() as timed:
        timed.setattr(stress, "_time_repetitions", lambda torch, device, action, seconds: [2e-3, 1e-3, 3e-3])
        found = stress.copy(Runtime(threads=1), 0.01)
    assert (found.bytes, found.cache) == (1 << 22, 1 << 19), "many times the cache"
    assert found.bytes_per_s == 2 * (1 << 22) / 1e-3, "the fastest"
    assert stress.copy(Runtime(threads=1), 0.01).bytes_per_s > 1e7
