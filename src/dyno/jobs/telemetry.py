"""Telemetry of the machine during a job, sampled from outside the job so that it survives the job."""

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

# RAPL's energy counters of the processors, below /sys/class/powercap; often readable by root only.

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Package:
    """One socket's counter: its file, its range and last value (in uJ), and the number of its overflows."""

    file: Path
    size: int
    last: int
    overflows: int = 0

    def joules(self) -> float:
        """Return the counter's value in joules, corrected for overflows (at most one between two calls)."""
        value = int(self.file.read_text())
        self.overflows += value < self.last
        self.last = value
        return 1e-6 * (value + self.overflows * self.size)


class Rapl:
    """Sum of all sockets' counters, without memory and graphics cards."""

    def __init__(self, packages: list[Package]) -> None:
        self._packages = packages

    def joules(self) -> float:
        """Return the joules since some moment in the past; NaN without a readable counter."""
        try:
            return sum(package.joules() for package in self._packages) if self._packages else math.nan
        except (OSError, ValueError):
            return math.nan


def find_rapl(root: Path | None = None) -> Rapl:
    """Find the sockets' counters if all are readable: a part would be taken for the whole.

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
SHUTDOWN_TIMEOUT_S = 5.0  # limit for the last sample, as a hanging driver must not block the study


class Telemetry:
    """Sampler of a job's process tree, the whole machine and the job's GPU, from `watch` to `stop`.

    Columns: `at` (s since `epoch`, which is CLOCK_MONOTONIC's), `rss` (B, the tree's), `cpu` (processors kept busy by
    the tree), `others` (processors kept busy by everything else), `frequency` (MHz), `cpu_energy` (J of all processors
    since some moment). A job on `cuda:N` adds `nvml.NVML_COLUMNS` and, from before the job began, `gpu_before_memory`,
    `gpu_before_util` and `gpu_before_processes`. Unreported values are NaN.
    """

    def __init__(
        self,
        device: str = "cpu",
        environment: Mapping[str, str] | None = None,
        mates: Collection[int] = (),
        read_stage: Callable[[], str] = str,
    ) -> None:
        """Prepare for a job with this `environment`, before its start, so that the GPU is seen without it.

        `mates` are the processes interleaved with the job: frozen while it runs, they don't count as others. If more of
        them start later, the GPU's memory is no longer the job's alone and becomes NaN. `read_stage` returns the job's
        stage: in QUIET_STAGES new children aren't searched for, which would disturb the measurement.
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
        self._stopped, self._frozen = threading.Event(), threading.Event()
        self._is_uninterrupted = True  # whether the job has run without a pause since the last sample
        self._importing = 0  # samples before the job began to load, if known
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Start sampling the process and its children."""
        self._epoch = time.monotonic()
        self._thread = threading.Thread(target=self._sample_process, args=(pid,), daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop sampling while the job is frozen: it is idle, and others are measured."""
        self._frozen.set()
        self._is_uninterrupted = False

    def resume(self) -> None:
        """Resume sampling; the load since the last sample can't be attributed and becomes NaN."""
        self._frozen.clear()

    def note_loading(self) -> None:
        """Note that the frozen job has imported its libraries and loads next; sample the GPU's state before that.

        The GPU's memory until then becomes NaN, as the job did not use it.
        """
        self._importing, self._mates_before = len(self._rows), frozenset(self._mates)
        self._before = self._gpu.sample(()) if self._gpu else ()

    def stop(self, path: Path) -> None:
        """Stop sampling and store the columns as an npz file."""
        self._stopped.set()
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
        values = dict(zip(nvml.NVML_COLUMNS, self._before, strict=True))
        state = {f"gpu_before_{name}": np.asarray(values[f"gpu_{name}"]) for name in ("memory", "util", "processes")}
        return {**state, "gpu_name": np.asarray(self._gpu.name), "gpu_uuid": np.asarray(self._gpu.uuid)}

    def _sample_process(self, pid: int) -> None:
        before, tree = self._epoch, ProcessTree(pid)
        tree.find_children()
        total_cpu, tree_cpu = _busy_seconds(), tree.measure()[1]
        while not self._stopped.wait(self._period):
            if self._frozen.is_set():
                continue
            now, total_cpu_now = time.monotonic(), _busy_seconds()
            if not self._read_stage().startswith(QUIET_STAGES):
                tree.find_children()
            rss, tree_cpu_now, pids = tree.measure()
            rss = rss or float("nan")  # unknown for a process that has just ended
            span = now - before
            cpu = max(0.0, tree_cpu_now - tree_cpu) / span
            others = max(0.0, (total_cpu_now - total_cpu) / span - cpu)
            if not self._is_uninterrupted:
                cpu = others = float("nan")
            gpu = self._look_at_gpu(pids)
            self._rows.append((now - self._epoch, rss, cpu, others, _read_frequency(), self._rapl.joules(), *gpu))
            before, total_cpu, tree_cpu = now, total_cpu_now, tree_cpu_now
            self._is_uninterrupted = not self._frozen.is_set()

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
    # Guests are counted in user and nice already.
    return float(sum(times) - sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")))


def count_busy(seconds: float) -> float:
    """Return the mean number of busy processors over `seconds`, among those that this process may use."""
    shares: list[float] = psutil.cpu_percent(seconds, percpu=True)
    return sum(shares[n] for n in os.sched_getaffinity(0) if n < len(shares)) / 100


class ProcessTree:
    """A process and its children; only those found by the last `find_children` are measured."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._processes: list[psutil.Process] = []

    def find_children(self) -> None:
        """Find the current children. It reads all of /proc: 5 ms of a processor with 130 processes."""
        with suppress(psutil.Error):
            root = psutil.Process(self._pid)
            self._processes = [root, *root.children(recursive=True)]

    def measure(self) -> tuple[float, float, set[int]]:
        """Return resident bytes, processor seconds and ids; 0 and an empty set for an ended process."""
        rss = cpu = 0.0
        pids: set[int] = set()
        for process in self._processes:
            with suppress(psutil.Error), process.oneshot():
                times, resident = process.cpu_times(), process.memory_info().rss
                rss, cpu = rss + resident, cpu + times.user + times.system
                pids.add(process.pid)
        return rss, cpu, pids


def _read_frequency() -> float:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return float("nan")
    return float(frequency.current) if frequency else float("nan")
