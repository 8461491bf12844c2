"""Jobs that time something have a GPU for themselves among all of a user's studies."""

from __future__ import annotations

import os
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from dyno import Study
from dyno.engine import device_lock
from dyno.engine.device_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.planning.plan import expand
from dyno.store import cache_dir
from dyno.worker.record import Record, lock
from dyno.worker.spec import Job, Runtime, Trial

Trials = Callable[..., Trial]
CUDA = Runtime(threads=1, device="cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU that jobs are told of, as far as its lock; the file of that lock."""
    card = types.SimpleNamespace(uuid="GPU-of-a-test", close=lambda: None)
    monkeypatch.setattr(device_lock, "find_gpu", lambda device, environment: card if device == "cuda:0" else None)
    return cache_dir() / "gpus" / "GPU-of-a-test.lock"


def never(owner: str) -> None:
    raise AssertionError(f"process {owner} has the GPU")


def test_a_job_waits_for_another_s_gpu_and_says_so(fake_trial: Trials, tmp_path: Path, gpu: Path) -> None:
    trial, on_the_cpu = fake_trial(runtime=CUDA), fake_trial()
    progress = Progress(quiet=True)
    ended: list[Record] = []

    def second() -> None:
        job = Job("run", trial.runtime, trial)
        ended.append(launch_in_turn(job, tmp_path / "gpu", 1200.0, progress))

    thread = threading.Thread(target=second)
    with lock(gpu, never):
        thread.start()
        job = Job("run", on_the_cpu.runtime, on_the_cpu)
        assert launch_in_turn(job, tmp_path / "cpu", 1200.0, Progress(quiet=True)).status == "ok"
        deadline = time.monotonic() + 600
        while not progress.stage and time.monotonic() < deadline:
            time.sleep(0.01)
        assert progress.stage == f"waiting for process {os.getpid()}, another dyno on this GPU"
        assert not ended and not (tmp_path / "gpu").exists()
    thread.join()
    assert ended[0].status == "ok"
    with lock(gpu, never):
        pass


def test_a_killed_job_lets_go_of_the_gpu(fake_trial: Trials, tmp_path: Path, gpu: Path) -> None:
    trial = fake_trial(fail="hang", at="run", runtime=CUDA)
    assert launch_in_turn(Job("run", trial.runtime, trial), tmp_path, 1.5, Progress(quiet=True)).status == "timeout"
    with lock(gpu, never):
        pass


@pytest.mark.gpu
def test_two_jobs_are_not_timed_at_once(tmp_path: Path) -> None:
    study = Study(models=("dyno.worker.nets.digits:resnet18",), channels=1, sizes=("32",), backends=("pytorch",),
                  device="cuda:0", boundaries=("model",), rounds=1, seconds=0.5, warmup=0.1)  # fmt: skip
    (one,) = expand(study)
    ended: list[Record] = []

    def job(number: int) -> None:
        ended.append(
            launch_in_turn(
                Job("run", one.trial.runtime, one.trial), tmp_path / str(number), 120.0, Progress(quiet=True)
            )
        )

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.status for record in ended] == ["ok", "ok"], [record.reason for record in ended]
    (_, first_end), (second_begin, _) = sorted(record.facts.timed["model"] for record in ended)
    assert first_end < second_begin
