"""Whether a GPU works or waits for the host while one run of a model goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.formatting import show
from dyno.report.table_kind import TableKind
from dyno.results.remarks import Launch
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.worker.facts.job import Function

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


# Functions of the host and the GPU by their share of a run's critical path, as a table and a sentence.

PATH = TableKind("critical-path", "Critical path",
                 "What each function of the host and the GPU contributes to the end of a watched run.",
                 command="dyno profile --device cuda:0")  # fmt: skip
PATH_COLUMNS = (
    Column("form", "which engine", kind=TEXT),
    Column("where", "the host outside of CUDA, a call of CUDA, or the GPU", kind=TEXT),
    Column("function", "its name, or what lies between two", kind=TEXT),
    Column("calls", "how often it ran", "1"),
    Column("time_us", "its time", "µs", title="time, µs"),
    Column("path_us", "its time on the critical path", "µs", title="on the path, µs"),
    Column("share", "share of the path", "%", PERCENT, title="share, %"),
    Column("waiting_us", "of a call: for the GPU; of a kernel: after its launch", "µs", title="waiting, µs", rank=1),
)
NOTE = (
    "A mean over the watched runs. On the critical path is what would end "
    "the run earlier if it were faster: the host where the GPU waits for it, and the GPU where work is queued."
)


SLOWED = 1.1  # times as long as an unwatched run: from here on a watched run's path is not that of the others
IN_WORDS = {"host": "the host outside of CUDA", "CUDA call": "calls of CUDA", "GPU": "the GPU"}


@dataclass(frozen=True)
class Path:
    """The functions of a form's watched runs, how many times as long those took as the others, and the share of an
    unwatched run in which the GPU did no work."""

    functions: Sequence[Function]
    slowed: float = 1.0
    idle: float = 0.0

    @property
    def sentences(self) -> list[str]:
        """How the path is divided; where watching made the runs longer, what that leaves open of the host's share."""
        shares: dict[str, float] = {}
        whole = sum(one.path for one in self.functions) or 1.0
        for one in self.functions:
            shares[one.where] = shares.get(one.where, 0.0) + one.path / whole
        parts = [
            f"{100 * share:.0f} % {IN_WORDS.get(where, where)}"
            for where, share in sorted(shares.items(), key=lambda item: -item[1])
        ]
        told = ["the critical path is " + ", ".join(parts)]
        if self.slowed > SLOWED:
            most = sum(share for where, share in shares.items() if where != "GPU")
            told.append(
                f"watching made the run {self.slowed:.1f} times as long: unwatched, the host with its calls has at "
                f"least {100 * min(self.idle, most):.0f} % of the path, the share in which the GPU is idle, and at "
                f"most {100 * most:.0f} %"
            )
        return told


def make_path_table(paths: Mapping[str, Path], top: int) -> Table:
    """Build rows for the `top` functions (0: all) of each form by the time on its path, and one for the rest."""
    rows: list[Row] = []
    for form, path in paths.items():
        each = path.functions
        whole = sum(one.path for one in each) or 1.0
        shown = each if not top or len(each) <= top + 1 else each[:top]
        rest = each[len(shown) :]
        rows += [{"form": form, "where": one.where, "function": one.name, "calls": one.calls or None,
                  "time_us": 1e6 * one.time, "path_us": 1e6 * one.path, "share": 100 * one.path / whole,
                  "waiting_us": 1e6 * one.waiting or None} for one in shown]  # fmt: skip
        if rest:
            on_path = sum(one.path for one in rest)
            rows.append({"form": form, "function": f"{len(rest)} more functions", "path_us": 1e6 * on_path,
                         "time_us": 1e6 * sum(one.time for one in rest), "share": 100 * on_path / whole})  # fmt: skip
    sentences = (f"{form}: {sentence}." for form, path in paths.items() for sentence in path.sentences)
    return PATH.of(PATH_COLUMNS, rows, notes=(NOTE, *sentences), group=("form",))
