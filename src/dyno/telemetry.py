"""What the machine did while a job ran, sampled from outside the job so that it survives the job."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import psutil

from dyno.worker.record import save_arrays

PERIOD_S = 0.25


class Telemetry:
    """Samples a process tree and the whole machine every quarter of a second until `stop`.

    Columns: `at` (s since start), `rss` (B, the tree's), `cpu` (processors the tree kept busy), `others` (processors
    kept busy by everything else), `frequency` (MHz; NaN where the system does not tell).
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._rows: list[tuple[float, ...]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self, path: Path) -> None:
        """End the sampling and store the columns as an npz file."""
        self._ended.set()
        self._thread.join()
        columns = np.asarray(self._rows, np.float64).reshape(-1, 5)
        names = ("at", "rss", "cpu", "others", "frequency")
        save_arrays(path, {name: columns[:, i] for i, name in enumerate(names)})

    def _sample(self) -> None:
        begin = before = time.monotonic()
        busy, own = _busy_seconds(), _tree(self._pid)[1]
        while not self._ended.wait(PERIOD_S):
            now, busy_now = time.monotonic(), _busy_seconds()
            rss, own_now = _tree(self._pid)
            span = now - before
            cpu = max(0.0, own_now - own) / span
            others = max(0.0, (busy_now - busy) / span - cpu)
            self._rows.append((now - begin, rss, cpu, others, _frequency()))
            before, busy, own = now, busy_now, own_now


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _tree(pid: int) -> tuple[float, float]:
    """Resident bytes and processor seconds of the process and its children; zeros once it is gone."""
    rss = cpu = 0.0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with process.oneshot():
                rss += process.memory_info().rss
                used = process.cpu_times()
                cpu += used.user + used.system
    except psutil.Error:
        pass  # it ended between two looks: what was summed so far is all there is to know
    return rss, cpu


def _frequency() -> float:
    try:
        found = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return float("nan")
    return float(found.current) if found else float("nan")
