"""One job at a time on a GPU, among all studies of a user."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dyno.jobs.launcher import launch
from dyno.jobs.nvml import find_gpu
from dyno.jobs.progress import Progress
from dyno.store import cache_dir
from dyno.worker.record import Record, lock
from dyno.worker.spec import Job, Runtime


def launch_in_turn(
    job: Job,
    folder: Path,
    timeout_s: float,
    progress: Progress,
    extra: Mapping[str, str] | None = None,
    tool: Sequence[str] = (),
) -> Record:
    """`launch` for a job that times something, when its GPU is `held`; the wait doesn't count towards `timeout_s`."""
    with held(job.runtime, progress.waiting):
        return launch(job, folder, timeout_s, progress.tick, extra, tool=tool)


@contextmanager
def held(runtime: Runtime, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the runtime's GPU while the block runs, after a wait for any other dyno that holds it.

    Two studies side by side would slow each other down unevenly, and a builder that times its kernels beside a running
    job may pick the wrong ones. `waiting` is called with the process that holds the GPU. Nothing is held for a CPU.
    """
    if not (uuid := _uuid(runtime)):
        yield
        return
    with lock(cache_dir() / "gpus" / f"{uuid}.lock", waiting):
        yield


def _uuid(runtime: Runtime) -> str:
    """The job's GPU, "" for a CPU and where NVML has none."""
    gpu = find_gpu(runtime.device, {**os.environ, **runtime.env})
    if gpu is None:
        return ""
    gpu.close()
    return gpu.uuid
