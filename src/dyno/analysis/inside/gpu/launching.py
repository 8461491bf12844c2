"""Whether a GPU works or waits for the host while one run of a model goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dyno.analysis.formatting import show
from dyno.analysis.presentation.table import COUNT, PERCENT, Column, Row
from dyno.analysis.records.gpu_remarks import Launch

IDLE, WORKING = 0.5, 0.2  # shares of the latency without any work: from here on launch-bound, up to here not at all
COLUMNS = (
    Column("queueing_ms", "median time of the host inside run()", "ms", title="queueing, ms", rank=4),
    Column("busy_ms", "median time in which the GPU ran a kernel or a copy", "ms", title="GPU busy, ms", rank=1),
    Column("idle", "share of the latency in which it ran none, at least 0", "%", PERCENT, title="GPU idle, %", rank=1),
    Column("kernels", "kernels of one watched run", kind=COUNT, rank=2),
    Column("calls_ms", "median time of the host in calls of CUDA, waits excluded, in a watched run", "ms",
           title="calls of CUDA, ms", rank=5),
)  # fmt: skip


@dataclass(frozen=True)
class LaunchTimes:
    """Launch times of one form, in seconds per run.

    Without profiling: `latency` by the GPU's clock, and `enqueue` of the host inside `run`. With profiling: `busy` of
    the GPU, `calls` of the host in CUDA's functions, and the number of kernels (empty if the engine doesn't report it).
    """

    latency: np.ndarray
    enqueue: np.ndarray
    busy: np.ndarray
    calls: np.ndarray
    kernels: np.ndarray

    def idle(self, latency: float) -> float:
        """Return the share of the latency (seconds) in which the GPU did no work; a watched run's clock may differ."""
        return max(0.0, 1 - float(np.median(self.busy)) / latency)

    def cells(self, latency: float) -> Row:
        """Return the cells of COLUMNS."""
        cells: Row = {"queueing_ms": 1e3 * float(np.median(self.enqueue))} if self.enqueue.size else {}
        if self.busy.size:
            cells |= {
                "busy_ms": 1e3 * float(np.median(self.busy)), "idle": 100 * self.idle(latency),
                "kernels": int(np.median(self.kernels)), "calls_ms": 1e3 * float(np.median(self.calls)),
            }  # fmt: skip
        return cells

    def sentence(self, latency: float) -> str:
        """Describe whether the run is launch-bound; without a record of the kernels the two clocks alone decide."""
        if self.busy.size:
            return self._by_kernels(latency)
        if not self.latency.size:
            return ""
        enqueue = float(np.median(self.enqueue)) if self.enqueue.size else None
        found = Launch(latency, float(np.median(self.latency)), enqueue)
        return found.sentence or (
            f"not launch-bound: of {show(latency, 'duration')} the GPU needs {show(found.gpu, 'duration')} from its "
            "first kernel to its last"
        )

    def _by_kernels(self, latency: float) -> str:
        idle = self.idle(latency)
        waits = f"the GPU ran no kernel in {100 * idle:.0f} % of the latency"
        if idle >= IDLE:
            return f"launch-bound: {waits}; it waits for the host between {int(np.median(self.kernels))} kernels"
        if idle > WORKING:
            return f"launch-bound in part: {waits}"
        return f"compute-bound: the GPU ran kernels in {100 * (1 - idle):.0f} % of the latency"


def of_samples(samples: dict[str, np.ndarray]) -> LaunchTimes | None:
    """Build the GPU's part from the arrays of a job of kind `profile`; None for one on a CPU."""
    names = ("unprofiled_model_gpu", "enqueue", "gpu_busy", "cuda_calls", "kernels")
    if not any(name in samples for name in names):
        return None
    return LaunchTimes(*(samples.get(name, np.empty(0)) for name in names))
