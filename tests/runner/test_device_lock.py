"""Timing jobs have a GPU to themselves among all of a user's studies."""

import errno
import os
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.jobs.progress import Progress
from dyno.runner import device_lock
from dyno.runner.device_lock import launch_in_turn, processors_held
from dyno.store import cache_dir
from dyno.study.plan import expand
from dyno.worker.record import Record, lock
from dyno.worker.spec import Job, Runtime
from waiting import until

CUDA = Runtime(threads=1, device="cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock's file of a GPU that jobs know only by its lock."""
    card = types.SimpleNamespace(uuid="GPU-of-a-test", close=lambda: None)
    monkeypatch.setattr(device_lock, "find_gpu", lambda device, environment: card if device == "cuda:0" else None)
    return cache_dir() / "gpus" / "GPU-of-a-test.lock"


def never(owner: str) -> None:
    raise AssertionError(f"process {owner} has the GPU")


def test_a_job_waits_for_a_locked_gpu_and_reports_it(fake_trial: Any, tmp_path: Path, gpu: Path) -> None:
    trial, on_the_cpu = fake_trial(runtime=CUDA), fake_trial()
    progress = Progress(quiet=True)
    ended: list[Record] = []

    def second() -> None:
        ended.append(launch_in_turn(Job("run", trial.runtime, trial), tmp_path / "gpu", 1200.0, progress))

    thread = threading.Thread(target=second)
    with lock(gpu, never):
        thread.start()
        job = Job("run", on_the_cpu.runtime, on_the_cpu)
        assert launch_in_turn(job, tmp_path / "cpu", 1200.0, Progress(quiet=True)).status == "ok"
        assert until(lambda: progress.stage) == f"waiting for process {os.getpid()}, another dyno on this device"
        assert not ended and not (tmp_path / "gpu").exists()
    thread.join()
    assert ended[0].status == "ok"
    with lock(gpu, never):
        pass


def test_a_killed_job_releases_the_gpu(fake_trial: Any, tmp_path: Path, gpu: Path) -> None:
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


# Holds the processors for blocks of a twentieth of a second and records when.
HOLDER = """
import sys, time
from dyno.runner.device_lock import processors_held
from dyno.worker.spec import Runtime

said = []
for _ in range(10):
    with processors_held(Runtime(device="cpu"), said.append):
        begin = time.monotonic()
        time.sleep(0.05)
        print(begin, time.monotonic(), flush=True)
print(*{*said})
"""


def test_two_studies_measure_in_turns_on_the_same_processors() -> None:
    holders = [subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [holder.communicate(timeout=600)[0].splitlines() for holder in holders]
    spans = sorted((*map(float, line.split()), number) for number, lines in enumerate(ended) for line in lines[:-1])
    assert len(spans) == 20
    assert all(first[1] <= second[0] for first, second in pairwise(spans)), "no two at once"
    begins = [max(float(lines[0].split()[0]) for lines in ended), min(float(lines[-2].split()[1]) for lines in ended)]
    both = [number for begin, end, number in spans if begin >= begins[0] and end <= begins[1]]
    assert all(a != b for a, b in pairwise(both)), "the one that waits is next"
    for lines, other in zip(ended, reversed(holders), strict=True):
        assert lines[-1] in (str(other.pid), ""), "the process that is waited for"
    if begins[0] < begins[1]:  # else a busy machine let one end before the other began
        assert any(lines[-1] for lines in ended)


def test_studies_on_different_processors_do_not_wait() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two processors")
    waited: list[str] = []
    apart = HOLDER.replace("said = []", f"said = []\nimport os\nos.sched_setaffinity(0, [{cores[1]}])")
    try:
        os.sched_setaffinity(0, cores[:1])
        with processors_held(Runtime(device="cpu"), waited.append):
            done = subprocess.run([sys.executable, "-c", apart], capture_output=True, text=True, timeout=600)
    finally:
        os.sched_setaffinity(0, cores)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 11 and not done.stdout.splitlines()[-1]


def test_an_interrupt_while_waiting_leaves_no_lock() -> None:
    code = HOLDER.replace("range(10)", "range(1)").replace("0.05", "600")
    holder = subprocess.Popen([sys.executable, "-c", code + "\n"], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 600
        waited: list[str] = []

        def interrupt(owner: str) -> None:
            waited.append(owner)
            raise KeyboardInterrupt

        while not waited and time.monotonic() < deadline:
            with suppress(KeyboardInterrupt), processors_held(Runtime(device="cpu"), interrupt):
                time.sleep(0.01)
        assert waited == [str(holder.pid)]
    finally:
        holder.kill()
        holder.wait()
    done = subprocess.run([sys.executable, "-c", HOLDER], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "", "the queue is empty"


def test_jobs_run_unlocked_where_file_locks_fail(
    monkeypatch: pytest.MonkeyPatch, fake_trial: Any, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(device_lock.fcntl, "lockf", refuse)
    trial = fake_trial()
    record = launch_in_turn(Job("run", trial.runtime, trial), tmp_path / "job", 600.0, Progress(quiet=True))
    assert record.status == "ok", record.reason
