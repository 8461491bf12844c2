"""The cross-check as `dyno time --trtexec` uses it; trtexec itself is a script that prints a log made by hand."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path

import pytest

import engine_run
from dyno.runner import device_lock
from dyno.store import cache_dir, lock
from dyno.trtexec import cross_check
from dyno.worker.spec import UserError

LOGS = Path(__file__).parent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and a PATH with nothing on it."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    engine_run.write(tmp_path / "run", engine_run.MEDIANS)
    return tmp_path / "run"


def tool(run: Path, script: str) -> Path:
    """Put a `trtexec` on the PATH; what it was called with is kept in the file `words` beside the run."""
    path = run.parent / "bin" / "trtexec"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{run.parent}/words"\n{script}\n', encoding="utf-8")
    path.chmod(0o755)
    return run.parent / "words"


def test_a_log_is_held_against_the_run(run: Path) -> None:
    text = "\n".join(cross_check.cross_check(run, LOGS / "8.6.log"))
    assert "In trtexec's terms" in text
    assert "--loadEngine=/cache/net b8.engine" in text
    assert "CUDA graph −0.040 ms (only Dyno used one)" in text
    assert "not on the PATH" not in text


def test_trial_results_are_taken_as_well(run: Path) -> None:
    from dyno.results.trial_result import load_run

    trial = load_run(run).trials[0]
    assert cross_check.cross_check(trial, LOGS / "10.log") == cross_check.cross_check([trial], LOGS / "10.log")


def test_without_trtexec_the_command_is_printed(run: Path) -> None:
    *_, first, second, last = cross_check.cross_check(run)
    assert first.startswith("  trtexec ") and first.endswith("# for latency/model")
    assert second.endswith("# for latency/all") and "--noDataTransfers" not in second
    assert last.startswith("trtexec is not on the PATH")


def test_trtexec_on_the_path_is_run_for_each_boundary_and_read(run: Path) -> None:
    log = LOGS / "10.log"
    words = tool(run, f'while IFS= read -r line; do echo "$line"; done < "{log}"')
    text = cross_check.cross_check(run)
    assert "trtexec was run for latency/model:" in text and "trtexec was run for latency/all:" in text
    assert any("trtexec 0.170 ms: +0.0010 ms (+0.6 %); they agree" in line for line in text)
    called = words.read_text().splitlines()
    assert called.count("--loadEngine=/cache/net b8.engine") == 2  # one word, its blank and all
    assert called.count("--noDataTransfers") == 1


def test_trtexec_waits_for_a_gpu_that_another_dyno_has(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = types.SimpleNamespace(uuid="GPU-of-a-test", close=lambda: None)
    monkeypatch.setattr(device_lock, "find_gpu", lambda device, environment: card)
    words, said = tool(run, "exit 0"), ""
    thread = threading.Thread(target=cross_check.cross_check, args=(run,))
    with lock(cache_dir() / "gpus" / "GPU-of-a-test.lock", pytest.fail):
        thread.start()
        deadline = time.monotonic() + 600
        while "waiting for process" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert "trtexec is waiting for process" in said and not words.exists()
    thread.join()
    assert words.exists()


def test_a_run_can_be_declined(run: Path) -> None:
    words = tool(run, "exit 0")
    cross_check.cross_check(run, run=False)
    assert not words.exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo "&&&& FAILED x"; echo "[01/02/2026-03:04:05] [E] no such file"; exit 1', "failed: no such file"),
        ("echo nothing useful", "neither a trtexec log"),
        ("printf '\\377\\376'", "neither a trtexec log"),
    ],
)
def test_a_trtexec_that_fails_costs_only_its_comparison(run: Path, script: str, reason: str) -> None:
    tool(run, script)
    text = cross_check.cross_check(run)
    assert "In trtexec's terms" in text[0]
    assert [line for line in text if reason in line]


def test_a_trtexec_that_hangs_is_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(run, "while :; do :; done")
    monkeypatch.setattr(cross_check, "LOAD_S", -5.5)  # 2 x (1 s of warm-up + 2 s) - 5.5 s
    assert [line for line in cross_check.cross_check(run) if "was stopped: not finished after 0 s" in line]


def test_an_unreadable_file_is_an_error(run: Path) -> None:
    with pytest.raises(UserError, match="neither a trtexec log"):
        cross_check.cross_check(run, Path(__file__))


def test_a_run_without_a_tensorrt_trial_is_an_error(tmp_path: Path) -> None:
    engine_run.write(tmp_path / "run", engine_run.MEDIANS, backend="onnxruntime", format="onnx")
    with pytest.raises(UserError, match="no TensorRT trial"):
        cross_check.cross_check(tmp_path / "run")


def test_only_measured_boundaries_are_repeated(tmp_path: Path) -> None:
    trial = engine_run.trial(tmp_path / "run", boundaries=("model",))
    assert cross_check.boundaries(trial) == ["model"]
