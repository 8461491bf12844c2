"""Locks for one job at a time on a GPU or processor, among all studies of a user."""

from __future__ import annotations

import fcntl
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path

from dyno.jobs.launcher import launch
from dyno.jobs.nvml import find_gpu
from dyno.jobs.progress import Progress
from dyno.store import cache_dir
from dyno.worker.record import Record, lock
from dyno.worker.spec import Job, Runtime

NEXT_BYTE = 1 << 20  # byte that the next process locks, after those of all processors
FLOCK_FORMAT = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process
Waiting = Callable[[str], None]


def launch_in_turn(
    job: Job,
    folder: Path,
    timeout_s: float,
    progress: Progress,
    extra: Mapping[str, str] | None = None,
    tool: Sequence[str] = (),
) -> Record:
    """Run `launch` for a timed job while its GPU and processors are locked.

    Waiting for the locks doesn't count towards `timeout_s`.
    """
    with hold_device(job.runtime, progress.show_waiting), processors_held(job.runtime, progress.show_waiting):
        return launch(job, folder, timeout_s, progress.tick, extra, tool=tool)


@contextmanager
def hold_device(runtime: Runtime, on_wait: Waiting) -> Iterator[None]:
    """Hold the runtime's GPU during the block, after waiting for any other dyno that holds it.

    Parallel studies would slow each other down unevenly, and a builder that times its kernels beside a running job may
    pick the wrong ones. `on_wait` is called with the process that holds the GPU. Nothing is held for a CPU.
    """
    if not (uuid := _find_uuid(runtime)):
        yield
        return
    with lock(cache_dir() / "gpus" / f"{uuid}.lock", on_wait):
        yield


@contextmanager
def processors_held(runtime: Runtime, on_wait: Waiting) -> Iterator[None]:
    """Hold this process's processors during the block, after waiting for any other dyno on one of them.

    The next process has a place in a queue, so that two studies that hold them for short blocks alternate. `on_wait` is
    called with the process that holds one. Nothing is held for a job on a GPU, or if files can't be locked.
    """
    if runtime.device != "cpu":
        yield
        return
    try:
        processors = _processors(cache_dir() / "processors" / f"{platform.node()}.lock")
        processors.take(_list_ranges(os.sched_getaffinity(0)), on_wait)
    except OSError:  # such as ENOLCK on some network file systems
        yield
        return
    try:
        yield
    finally:
        processors.let_go()


class _Processors:
    """Lock file with a byte for each processor, locked by the measuring process; a lock ends with its process.

    Locks belong to the whole process: threads that measure at once belong to one study, on different processors.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._users = 0
        self._guard = threading.Lock()

    def take(self, ranges: Sequence[tuple[int, int]], on_wait: Waiting) -> None:
        """Lock the ranges of processors (first, count)."""
        with self._guard:
            if not self._users:
                try:
                    self._lock_ranges([(NEXT_BYTE, 1)], lambda owner: None)
                    self._lock_ranges(ranges, on_wait)
                except BaseException:  # an interrupt while waiting, in a process that may live on
                    fcntl.lockf(self._file, fcntl.LOCK_UN)
                    raise
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, NEXT_BYTE)
            self._users += 1

    def let_go(self) -> None:
        """Release the processors, unless another thread of this process still measures."""
        with self._guard:
            self._users -= 1
            if not self._users:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _lock_ranges(self, ranges: Sequence[tuple[int, int]], on_wait: Waiting) -> None:
        for first, count in ranges:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
            except (BlockingIOError, PermissionError):  # POSIX allows either for a locked range
                on_wait(self._find_owner(first, count))
                fcntl.lockf(self._file, fcntl.LOCK_EX, count, first)

    def _find_owner(self, first: int, count: int) -> str:
        """Return the process that holds part of the range; "unknown" once released, or for another container."""
        request = struct.pack(FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
        kind, *_, process = struct.unpack(FLOCK_FORMAT, fcntl.fcntl(self._file, fcntl.F_GETLK, request))
        return str(process) if kind != fcntl.F_UNLCK and process > 0 else "unknown"


_processors = cache(_Processors)


def _list_ranges(processors: set[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers as (first, count), ascending.

    A fixed order of several locks prevents deadlocks.
    """
    groups = groupby(enumerate(sorted(processors)), key=lambda pair: pair[1] - pair[0])
    runs = [[processor for _, processor in run] for _, run in groups]
    return [(run[0], len(run)) for run in runs]


def _find_uuid(runtime: Runtime) -> str:
    """Return the UUID of the job's GPU; "" for a CPU, or if NVML finds none."""
    gpu = find_gpu(runtime.device, {**os.environ, **runtime.env})
    if gpu is None:
        return ""
    gpu.close()
    return gpu.uuid
