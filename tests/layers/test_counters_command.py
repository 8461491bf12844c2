"""`dyno profile --counters`: our side of it, with a stand-in for ncu that writes what a real one did on an H200."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import counted_backend
import ncu_files
from dyno.jobs import launcher
from dyno.jobs.progress import Progress
from dyno.layers import counters
from dyno.study import defaults
from dyno.worker.record import Record
from dyno.worker.spec import Trial, UserError

TESTS = Path(counted_backend.__file__).parent
QUICK = ("--runs", 5, "--seconds", 0.02, "--warmup", 0.02)
REASONS = {
    "denied": "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root",
    "busy": "another program uses the GPU's counters, such as DCGM or another profiler; end it",
    "none": "ncu saw no kernel between the start and the stop of its profiling",
}
# The backend, in a process that takes it that the GPU is there.
ON_A_GPU = """
import sys
from counted_backend import COUNTED
if checks := sys.modules.get("dyno.study.defaults"):
    checks.missing_gpu = lambda device: False
"""
PART = 'ncu failed to profile "k" in process 7 (UnknownError); other programs may be using the GPU'


@pytest.fixture
def place(tmp_path: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a backend that has counters, and a stand-in for ncu on the PATH."""
    (tmp_path / "counted-1.dist-info").mkdir()
    (tmp_path / "counted-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: counted\nVersion: 1\n")
    (tmp_path / "counted-1.dist-info/entry_points.txt").write_text("[dyno.backends]\ncounted = on_a_gpu:COUNTED\n")
    (tmp_path / "on_a_gpu.py").write_text(ON_A_GPU)
    paths = [str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    (tmp_path / "bin").mkdir()
    ncu_files.stand_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def profile(dyno: Any, place: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: object) -> Any:
        return dyno("profile", "m.onnx", "counted", *QUICK, "--counters", *words, cwd=place)

    return run


def test_counters_stand_beside_the_times_of_layers(profile: Any, place: Path) -> None:
    done = profile("--device", "cuda:0", "--format", "json", "--top", 3, "--save", "p.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tables"]
    assert list(found) == ["profile", "reconciliation", "counters"]
    rows = found["counters"]["rows"]
    assert rows[0]["modules"] == "node_Conv_292 node_relu" and rows[0]["layer"] == "node_Conv_292 + node_relu"
    assert rows[0]["time_us"] == pytest.approx(288.608) and rows[0]["dram_mb"] == pytest.approx(95.26, abs=0.01)
    assert rows[0]["finding"] == "memory-bound: caches at 86 %, DRAM at 7 %"
    assert len(rows) == 4 and rows[3]["modules"] == "21 more kernels" and rows[3]["finding"] is None
    assert any("not a latency" in note for note in found["counters"]["notes"])
    (line,) = found["reconciliation"]["rows"]
    assert line["unprofiled_ms"] < 50, "of a job of its own, without ncu"
    page = (place / "p.html").read_text(encoding="utf-8")
    assert "Hardware counters" in page and "memory-bound: caches at 86 %" in page


@pytest.mark.parametrize("how", REASONS)
def test_no_counters_are_one_line(how: str, profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ncu_files.PRETEND, how)
    done = profile("--device", "cuda:0")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"dyno: no hardware counters: {REASONS[how]}")


def test_what_was_counted_before_ncu_failed_is_shown(profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ncu_files.PRETEND, "part")
    done = profile("--device", "cuda:0", "--format", "json", "--top", 0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tables"]["counters"]
    assert len(found["rows"]) == 20
    assert f"Counted 1: only the first 20 of its kernels were counted: {PART}." in found["notes"]


def test_a_cpu_has_no_counters_and_ncu_has_to_be_there(
    call: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call("profile", "torchvision:resnet18", "--counters")
    assert (code, out) == (2, "") and "add --device cuda:0" in err and len(err.splitlines()) == 1
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(defaults, "missing_gpu", lambda device: False)
    code, out, err = call("profile", "torchvision:resnet18", "--device", "cuda:0", "--counters")
    assert (code, out) == (2, "") and "there is no ncu on the PATH" in err and len(err.splitlines()) == 1


CRASHED = "The application returned an error code (11)."
ENDS = {
    CRASHED: "",
    'Failed to profile "k" in process 7': 'ncu failed to profile "k" in process 7; other programs may be using the GPU',
    "Failed to open/create lock file /tmp/nsight-compute-lock.": "",
}


@pytest.mark.parametrize(("error", "reason"), ENDS.items())
def test_only_what_ncu_could_not_count_is_missing(error: str, reason: str) -> None:
    report = counters.NcuReport((counters.Kernel("k"),), (error,))
    assert counters.counting_outcome(Record("ok"), report, 9.0).cut_short == reason


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [("crashed", CRASHED, "ncu says: The application returned"), ("crashed", "", "killed by SIGKILL"),
     ("failed", CRASHED, "killed by SIGKILL"), ("timeout", "", "ncu wasn't done after 9 s"),
     ("crashed", "InterprocessLockFailed", "set TMPDIR to a folder of your own")],
)  # fmt: skip
def test_without_kernels_the_reason_is_ncu_s_or_the_job_s(status: str, error: str, said: str) -> None:
    with pytest.raises(UserError, match="no hardware counters: ") as raised:
        counters.counting_outcome(
            Record(status, reason="killed by SIGKILL"), counters.NcuReport((), (error,) * bool(error)), 9.0
        )
    assert said in str(raised.value)


def count(place: Path, trial: Trial) -> counters.NcuReport:
    return counters.count_kernels(str(place / "bin/ncu"), trial, None, Progress(quiet=True))


def test_a_job_that_fails_says_why_itself(place: Path, fake_trial: Callable[..., Trial]) -> None:
    nothing = place / "nothing.csv"
    nothing.write_text('"ID"')
    ncu_files.stand_in(place / "bin", nothing)
    with pytest.raises(UserError, match="no hardware counters: RuntimeError: scripted failure"):
        count(place, fake_trial("counted_backend:Counted", fail="exception", at="load"))


def test_an_engine_whose_kernels_nobody_tells_apart(place: Path, fake_trial: Callable[..., Trial]) -> None:
    report = count(place, fake_trial("fake"))
    assert report.cut_short == "this engine's kernels can't be told apart for hardware counters"


class Seen(Progress):
    """Notes the stage that the job is in."""

    at = ""

    def tick(self, stage: str, elapsed: float) -> None:
        self.at = stage


def test_after_the_time_is_over_what_was_counted_is_kept_and_nothing_runs_on(
    place: Path, fake_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, progress = fake_trial("counted_backend:Counted"), Seen(quiet=True)
    trial = replace(trial, runtime=replace(trial.runtime, env={counted_backend.HANG: "1"}))
    monkeypatch.setattr(
        launcher, "time", SimpleNamespace(monotonic=lambda: 7.0 * (progress.at == "counters"), sleep=time.sleep)
    )
    report = counters.count_kernels(str(place / "bin/ncu"), trial, None, progress, timeout_s=6.0)
    assert report.cut_short == "ncu wasn't done after 6 s" and len(report.kernels) == 10
    running = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert not [words for words in running if "main.py" in words]
