"""Functions of the host and the GPU by their share of a run's critical path, as a table and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dyno.analysis.presentation.table import PERCENT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.worker.facts.job import Function

PATH = TableKind("critical-path", "Critical path",
                 "What each function of the host and the GPU contributes to the end of a watched run.",
                 command="dyno profile --device cuda:0")  # fmt: skip
COLUMNS = (
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


def table(paths: Mapping[str, Path], top: int) -> Table:
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
    return PATH.of(COLUMNS, rows, notes=(NOTE, *sentences), group=("form",))
