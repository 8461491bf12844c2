"""The stress test finds outputs that depend on the batch, and memory growth; the peak is measured in every type."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dyno.jobs.launcher import launch
from dyno.runner import stress as runner_stress
from dyno.worker.backend import Session
from dyno.worker.facts.job import PeakOfType
from dyno.worker.jobs import stress as stress_job
from dyno.worker.jobs.stress import stress
from dyno.worker.record import Record
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Runtime, Tensor, Trial, Unavailable
from refusals import refuses

TRIAL = Trial(ModelSpec("net", "fake:net", channels=1), "fake", "fp32", Dims(0, 4, 4), data=DataSpec(count=1))


class Doubler(Session):
    """y = 2 x, wrong by `error` at batch `bad`; every run leaks `leak` bytes of device memory."""

    inputs = (Tensor("input", "float32", ("batch", 1, 4, 4)),)
    outputs = (Tensor("output", "float32", ("batch", 1, 4, 4)),)

    def __init__(self, bad: int = 0, error: float = 0.0, leak: int = 0, limits: Any = (1, 2, 8)) -> None:
        self.bad, self.error, self.leak, self.lost, self.limits = bad, error, leak, 0, limits
        self.shapes: list[int] = []
        self.ends = Counter[int]()  # where each batch ends in the memory of all images

    @property
    def batches(self) -> Any:
        return self.limits

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes.append(shapes["input"][0])

    def bind(self, feeds: Mapping[str, np.ndarray], slot: int = 0) -> None:
        self.x = feeds["input"]
        self.ends[self.x.ctypes.data + self.x.nbytes] += 1

    def run(self, slot: int = 0) -> None:
        self.lost += self.leak

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return {"output": 2 * self.x + (self.error if len(self.x) == self.bad else 0.0)}

    def device_memory(self) -> int:
        return self.lost


def test_a_correct_engine_passes_the_stress_test() -> None:
    session = Doubler()
    found = list(stress(session, TRIAL, ["min", "opt", "max", "random", "3"], 40))
    assert [name for name, *_ in found] == ["min", "opt", "max", "random", "3"]
    assert [phase.batches for *_, phase in found] == [(1, 1), (2, 2), (8, 8), (1, 8), (3, 3)]
    assert all(len(seconds) == 40 and (seconds > 0).all() for _, seconds, _ in found)
    assert all((phase.wrong, phase.iterations, phase.tolerance, phase.ok) == (0, 40, 1e-4, True) for *_, phase in found)
    assert len(set(session.shapes[-400:])) == 8, "random means every size between min and max"
    assert session.ends[max(session.ends)] > 1, "batches reach the last image, and not only the reference"


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_an_output_that_depends_on_the_batch_is_found(error: float) -> None:
    good, bad = (phase for *_, phase in stress(Doubler(bad=8, error=error), TRIAL, ["opt", "max"], 10))
    assert good.wrong == 0 and bad.wrong == 10 and not bad.ok


@pytest.mark.parametrize(("changed", "share"), [(0, 0.0), (1, 0.0), (3, 2 / 128)])
def test_label_error_is_the_share_that_differs_beyond_one(changed: int, share: float) -> None:
    class Labels(Doubler):
        def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
            labels = (10 * self.x).astype(np.int64)
            labels.reshape(-1)[: changed * (len(labels) == self.bad)] += 1
            return {"output": labels}

    good, bad = (phase for *_, phase in stress(Labels(bad=8), TRIAL, ["min", "max"], 3))
    assert (good.worst, bad.worst) == (0, pytest.approx(share)) and bool(bad.wrong) == bool(share)


@pytest.mark.parametrize(("leak", "ok"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_memory_that_grows_by_more_than_8_mib_is_found(leak: int, ok: bool) -> None:
    ((_, _, found),) = stress(Doubler(leak=leak), TRIAL, ["opt"], 8)
    assert found.wrong == 0 and found.device_growth == 8 * leak and found.ok == ok


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 1e-4), ("tf32", 2e-3), ("fp16", 1e-2), ("bf16", 0.05), ("int8", 0.05), ("fp8", 0.1), ("int4", 0.05)],
)
def test_a_batch_may_change_outputs_by_the_rounding_of_the_precision(precision: str, tolerance: float) -> None:
    class Ones(Doubler):
        def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
            return {"output": np.full((len(self.x), 3), 1 + self.error * (len(self.x) == self.bad))}

    trial = replace(TRIAL, precision=precision)
    errors = (0.999 * tolerance, 1.001 * tolerance)
    found = [[phase.wrong for *_, phase in stress(Ones(8, error), trial, ["min", "max"], 3)] for error in errors]
    assert found == [[0, 0], [0, 3]]


@pytest.mark.parametrize(("iterations", "limit_s"), [(10, 1200), (1000, 2000)])
def test_a_job_has_a_second_for_each_batch(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int, limit_s: float
) -> None:
    limits = list[float]()

    def launch(job: Job, folder: Path, timeout: float, progress: Any) -> Record:
        limits.append(timeout)
        return Record("ok")

    monkeypatch.setattr(runner_stress, "launch_in_turn", launch)
    (found,) = runner_stress.run(fake_study(timeout=1200), ["min", "max"], iterations, tmp_path)
    assert found.exit_code == 0
    assert limits == [limit_s]


def test_a_batch_outside_the_profile_is_refused() -> None:
    refuses("batch 9 is outside the engine's profile, 1 to 8", list, stress(Doubler(), TRIAL, ["9"], 1))


@pytest.mark.parametrize(
    ("phases", "batches"),
    [
        (["min", "opt", "max", "random"], [(1, 1), (4, 4), (8, 8), (1, 8)]),
        (["2", "6", "random"], [(2, 2), (6, 6), (2, 6)]),
    ],
)
def test_a_file_without_a_profile_gets_default_batches(phases: list[str], batches: list[tuple[int, int]]) -> None:
    assert [phase.batches for *_, phase in stress(Doubler(limits=None), TRIAL, phases, 1)] == batches


def test_every_type_of_a_cpu_has_a_peak_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stress_job.PRODUCT_SIDES, "cpu", (32, 64))
    began = time.monotonic()
    found = dict(stress_job.measure_peak(Runtime(threads=1), 0.02))
    assert set(found) == {"fp32", "fp16", "bf16", "int8"}, "a CPU has no TF32"
    for one in found.values():
        assert one.missing or one.flops_per_s == max(one.sides.values()) == one.sides[str(one.side)]
    fp32 = found["fp32"]
    assert fp32.flops_per_s > 1e7
    assert began <= fp32.window[0] < fp32.window[1] <= time.monotonic()
    assert [name for name, _ in stress_job.measure_peak(Runtime(threads=1), 0.01, ["bf16", "tf32"])] == ["bf16"]


def test_a_slow_type_skips_sizes_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {16: 1e6, 32: 1e6, 4096: 1e6}
    monkeypatch.setitem(stress_job.PRODUCT_SIDES, "cpu", tuple(rates))
    monkeypatch.setattr(stress_job, "_measure_side", lambda torch, device, name, side, seconds: rates[side])
    assert all(set(one.sides) == {"16", "32"} for _, one in stress_job.measure_peak(Runtime(threads=1), 1.0))


def test_a_type_without_a_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for int8 here\nmore")

    monkeypatch.setitem(stress_job.PRODUCT_SIDES, "cpu", (16,))
    monkeypatch.setattr(torch, "_int_mm", refuse)
    assert dict(stress_job.measure_peak(Runtime(threads=1), 0.01))["int8"] == PeakOfType(
        missing="no kernel for int8 here"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_a_missing_gpu_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="finds no NVIDIA GPU"):
        dict(stress_job.measure_peak(Runtime(device="cuda:0")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_a_skipped_peak_job_records_its_reason(tmp_path: Path) -> None:
    record = launch(Job("peak", Runtime(device="cuda:0")), tmp_path / "peak", 1200)
    assert (record.status, record.stage) == ("skipped", "peak")
    assert "NVIDIA GPU" in record.reason


def test_the_copy_rate_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress_job.system, "last_cache", lambda: 1 << 19)
    monkeypatch.setitem(stress_job.MIN_COPIED_B, "cpu", 1 << 20)
    with monkeypatch.context() as timed:
        timed.setattr(stress_job, "_time_repetitions", lambda torch, device, action, seconds: [2e-3, 1e-3, 3e-3])
        found = stress_job.copy(Runtime(threads=1), 0.01)
    assert (found.bytes, found.cache) == (1 << 22, 1 << 19), "many times the cache"
    assert found.bytes_per_s == 2 * (1 << 22) / 1e-3, "the fastest"
    assert stress_job.copy(Runtime(threads=1), 0.01).bytes_per_s > 1e7


def test_gpu_times_are_between_events_around_the_action() -> None:
    log = list[str]()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 2.5 if end is not self else 0.0  # ms

    time_on_gpu = stress_job._make_gpu_timer(SimpleNamespace(cuda=SimpleNamespace(Event=Event)))
    assert time_on_gpu(lambda: log.append("act")) == 0.0025 and log == ["record", "act", "record", "wait"]
