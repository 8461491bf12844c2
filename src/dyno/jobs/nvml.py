"""NVML's readings of a job's GPU, from outside the job; settings of the GPU are never changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

Query = Callable[[], float]

# PCIe throughput is left out: NVML blocks the caller for 20 ms per direction to measure it.
NVML_COLUMNS = (
    "gpu_memory", "gpu_util", "gpu_clock", "gpu_memory_clock", "gpu_power", "gpu_energy", "gpu_temperature",
    "gpu_throttle", "gpu_processes", "gpu_own",
)  # fmt: skip


class Gpu:
    """One NVML device; `sample` reads it, with NaN for unreported values."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.name = _read_text(partial(nvml.nvmlDeviceGetName, handle), nvml)
        self.driver = _read_text(nvml.nvmlSystemGetDriverVersion, nvml)
        self.uuid = _read_text(partial(nvml.nvmlDeviceGetUUID, handle), nvml)
        self._queries: tuple[Query, ...] = (
            self._choose_query(
                # Version 2 excludes memory reserved by the driver; old drivers have only version 1.
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used,
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            ),
            lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            self._choose_query(
                lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # its name before driver 535
            ),
        )

    def sample(self, job_pids: Collection[int]) -> tuple[float, ...]:
        """Return the current values of NVML_COLUMNS.

        The units are B, %, MHz, MHz, W, J since the driver was loaded, degrees C, NVML's bit mask of reasons, number of
        compute processes, and number of those among `job_pids`.
        """
        return (*(self._query_value(query) for query in self._queries), *self._count_processes(job_pids))

    def free(self) -> float:
        """Return the free bytes of the GPU's memory; NaN if unreported."""
        return self._query_value(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    def close(self) -> None:
        """Shut NVML down."""
        self._query_value(self._nvml.nvmlShutdown)

    def _count_processes(self, job_pids: Collection[int]) -> tuple[float, float]:
        try:
            pids = {p.pid for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except self._nvml.NVMLError:
            return math.nan, math.nan
        return float(len(pids)), float(len(pids.intersection(job_pids)))

    def _query_value(self, query: Callable[[], Any]) -> float:
        try:
            return float(query() or 0)
        except self._nvml.NVMLError:
            return math.nan

    def _choose_query(self, *queries: Query) -> Query:
        """Return the first query that is answered; chosen once, so that a column has one meaning."""
        return next((query for query in queries if not math.isnan(self._query_value(query))), queries[-1])


def find_gpu(device: str, environment: Mapping[str, str]) -> Gpu | None:
    """Find the GPU that a job with this environment knows as `cuda:N`; None for a CPU, or without NVML or the GPU.

    CUDA_VISIBLE_DEVICES is honoured (numbers, UUIDs and prefixes of UUIDs). Numbers follow the PCI bus, as in NVML;
    CUDA counts the fastest first, which differs if GPUs of several kinds are mixed.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return Gpu(pynvml, _find_handle(pynvml, int(index or 0), environment.get("CUDA_VISIBLE_DEVICES")))
    except (LookupError, pynvml.NVMLError):
        pynvml.nvmlShutdown()
        return None


def _find_handle(nvml: Any, index: int, visible: str | None) -> Any:
    """Return NVML's handle of the job's device; raise LookupError if the job can't see it."""
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    device = visible.split(",")[index].strip()
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    if device.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(device)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    matches = [h for h in handles if device and _read_text(partial(nvml.nvmlDeviceGetUUID, h), nvml).startswith(device)]
    if len(matches) != 1:
        raise LookupError(device)
    return matches[0]


def _read_text(query: Callable[[], Any], nvml: Any) -> str:
    try:
        text = query()
    except nvml.NVMLError:
        return ""
    return text.decode() if isinstance(text, bytes) else str(text)


# Memory for new processes.

HEADROOM = 1.5  # free memory needed to start another process, as a multiple of the largest so far
DEFAULT_PROCESS_B = 1 << 30  # assumed need of a process before any was measured


def read_available() -> int:
    """Return the bytes available to new processes: the machine's, or the rest of the container's limit."""
    free_bytes = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used_bytes = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free_bytes
    return free_bytes if limit == "max" else min(free_bytes, max(0, int(limit) - used_bytes))
