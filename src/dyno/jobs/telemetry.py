"""Telemetry of the machine while a job runs, sampled from outside the job so that it survives the job."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from dyno.jobs import nvml
from dyno.worker.record import save_arrays

# RAPL's counters of the processors' energy, below /sys/class/powercap; often root alone may read them.

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Package:
    """One socket's counter: its file, where it starts again, its last value (all in uJ), and how often it started."""

    file: Path
    size: int
    last: int
    overflows: int = 0

    def joules(self) -> float:
        """Return the counter's value in joules, corrected for overflows, of which one may happen between two calls."""
        now = int(self.file.read_text())
        self.overflows += now < self.last
        self.last = now
        return 1e-6 * (now + self.overflows * self.size)


class Rapl:
    """The counters of all sockets together; memory is not in them, nor is a graphics card."""

    def __init__(self, packages: list[Package]) -> None:
        self._packages = packages

    def joules(self) -> float:
        """Return the joules since some moment in the past; NaN without a counter, or if one can no longer be read."""
        try:
            return sum(package.joules() for package in self._packages) if self._packages else math.nan
        except (OSError, ValueError):
            return math.nan


def find_rapl(root: Path | None = None) -> Rapl:
    """Find the sockets' counters that this process may read: all or none, because a part would pass for the whole.

    Processors of Intel and AMD have the same files.
    """
    try:
        zones = sorted((root or POWERCAP).glob("intel-rapl:*"))
        sockets = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
        return Rapl([_read_package(zone) for zone in sockets])
    except (OSError, ValueError):
        return Rapl([])


def _read_package(zone: Path) -> Package:
    file = zone / "energy_uj"
    return Package(file, int((zone / "max_energy_range_uj").read_text()), int(file.read_text()))


PERIOD_S, GPU_PERIOD_S = 0.25, 0.1
HOST_COLUMNS = ("at", "rss", "cpu", "others", "frequency", "cpu_energy")
QUIET_STAGES = ("time", "run for the energy")  # prefixes of stages that measure on a quiet machine
SHUTDOWN_TIMEOUT_S = 5.0  # limit for the last sample: a driver that hangs must not block the study


class Telemetry:
    """Samples a job's process tree, the whole machine and the job's GPU from `watch` until `stop`.

    Columns: `at` (s since `epoch`, which is CLOCK_MONOTONIC's), `rss` (B, the tree's), `cpu` (processors the tree kept
    busy), `others` (processors kept busy by everything else), `frequency` (MHz), `cpu_energy` (J of the whole
    processors since some moment). A job on `cuda:N` adds `nvml.COLUMNS` and, from before the job began,
    `gpu_before_memory`, `gpu_before_util` and `gpu_before_processes`. What the system doesn't report is NaN.
    """

    def __init__(
        self,
        device: str = "cpu",
        environment: Mapping[str, str] | None = None,
        mates: Collection[int] = (),
        read_stage: Callable[[], str] = str,
    ) -> None:
        """`environment` is the job's; made before the job is started, so that the GPU is seen without it.

        `mates` are the processes that take turns with the job: frozen while it runs, they aren't others. More of them
        may come meanwhile, and from then on the GPU's memory isn't the job's alone: it is NaN. `read_stage` returns
        the job's stage: in TIMED_STAGES no new children are looked for, which would disturb what is measured.
        """
        self._mates, self._mates_before = mates, frozenset(mates)
        self._read_stage = read_stage
        self._gpu = nvml.find_gpu(device, os.environ if environment is None else environment)
        self._rapl = find_rapl()
        self._names = HOST_COLUMNS + (nvml.NVML_COLUMNS if self._gpu else ())
        self._before = self._gpu.sample(()) if self._gpu else ()
        self._period = GPU_PERIOD_S if self._gpu else PERIOD_S
        self._epoch = time.monotonic()
        self._rows: list[tuple[float, ...]] = []
        self._ended, self._frozen = threading.Event(), threading.Event()
        self._whole = True  # whether the job ran all the time since the last look
        self._importing = 0  # samples before the job began to load, if that is known
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Begin to sample the process and its children."""
        self._epoch = time.monotonic()
        self._thread = threading.Thread(target=self._sample_process, args=(pid,), daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop sampling while the job is frozen: it is idle, and others are measured meanwhile."""
        self._frozen.set()
        self._whole = False

    def resume(self) -> None:
        """Resume sampling; the load since the last sample can't be attributed and becomes NaN."""
        self._frozen.clear()

    def note_loading(self) -> None:
        """Note that the frozen job has imported its libraries and loads next; store the GPU's state before that.

        The GPU's memory until then, which the job did not use, becomes NaN.
        """
        self._importing, self._mates_before = len(self._rows), frozenset(self._mates)
        self._before = self._gpu.sample(()) if self._gpu else ()

    def stop(self, path: Path) -> None:
        """End the sampling and store the columns as an npz file."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(SHUTDOWN_TIMEOUT_S)
        columns = np.asarray(self._rows, np.float64).reshape(-1, len(self._names))
        arrays = {name: columns[:, i] for i, name in enumerate(self._names)}
        if self._gpu:
            arrays["gpu_memory"][: self._importing] = np.nan
        save_arrays(path, {**arrays, "epoch": np.float64(self._epoch), **self._gpu_facts()})
        if self._gpu and not (self._thread and self._thread.is_alive()):
            self._gpu.close()

    def _gpu_facts(self) -> dict[str, np.ndarray]:
        """Return the GPU's name and UUID, and its state before the job."""
        if self._gpu is None:
            return {}
        before = dict(zip(nvml.NVML_COLUMNS, self._before, strict=True))
        state = {f"gpu_before_{name}": np.asarray(before[f"gpu_{name}"]) for name in ("memory", "util", "processes")}
        return {**state, "gpu_name": np.asarray(self._gpu.name), "gpu_uuid": np.asarray(self._gpu.uuid)}

    def _sample_process(self, pid: int) -> None:
        before, tree = self._epoch, ProcessTree(pid)
        tree.find_children()
        busy, own = _busy_seconds(), tree.measure()[1]
        while not self._ended.wait(self._period):
            if self._frozen.is_set():
                continue
            now, busy_now = time.monotonic(), _busy_seconds()
            if not self._read_stage().startswith(QUIET_STAGES):
                tree.find_children()
            rss, own_now, pids = tree.measure()
            rss = rss or float("nan")  # unknown for a process that has just ended
            span = now - before
            cpu = max(0.0, own_now - own) / span
            others = max(0.0, (busy_now - busy) / span - cpu)
            if not self._whole:
                cpu = others = float("nan")
            gpu = self._look_at_gpu(pids)
            self._rows.append((now - self._epoch, rss, cpu, others, _read_frequency(), self._rapl.joules(), *gpu))
            before, busy, own = now, busy_now, own_now
            self._whole = not self._frozen.is_set()

    def _look_at_gpu(self, pids: set[int]) -> tuple[float, ...]:
        if self._gpu is None:
            return ()
        sample = self._gpu.sample(pids.union(self._mates))
        if not set(self._mates) - self._mates_before - pids:
            return sample
        return tuple(
            float("nan") if name == "gpu_memory" else x for name, x in zip(nvml.NVML_COLUMNS, sample, strict=True)
        )


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def count_busy(seconds: float) -> float:
    """Return the mean number of busy processors over `seconds`, of those that this process may use."""
    shares: list[float] = psutil.cpu_percent(seconds, percpu=True)
    return sum(shares[n] for n in os.sched_getaffinity(0) if n < len(shares)) / 100


class ProcessTree:
    """A process and its children, of which only those found by the last `find_children` are measured."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._known: list[psutil.Process] = []

    def find_children(self) -> None:
        """Find the children there are now. It reads all of /proc: 5 ms of a processor with 130 processes."""
        with suppress(psutil.Error):
            root = psutil.Process(self._pid)
            self._known = [root, *root.children(recursive=True)]

    def measure(self) -> tuple[float, float, set[int]]:
        """Return the resident bytes, processor seconds and ids; 0 and an empty set for a process that has ended."""
        rss = cpu = 0.0
        pids: set[int] = set()
        for process in self._known:
            with suppress(psutil.Error), process.oneshot():
                used, resident = process.cpu_times(), process.memory_info().rss
                rss, cpu = rss + resident, cpu + used.user + used.system
                pids.add(process.pid)
        return rss, cpu, pids


def _read_frequency() -> float:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return float("nan")
    return float(frequency.current) if frequency else float("nan")
