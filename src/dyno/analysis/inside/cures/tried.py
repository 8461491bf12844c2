"""What came of prescriptions, as a table and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyno.analysis.formatting import counting, ratio
from dyno.analysis.inside.cures.prescriptions import IndicatedPrescription
from dyno.analysis.presentation.limits import limited
from dyno.analysis.presentation.table import RATIO, TEXT, Column, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.stats import FASTER, Speedup

TRIED = TableKind("prescriptions", "Prescriptions", "What was tried to make B faster, and what came of it.",
                  command="dyno explain MODEL A B --try")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A prescription as `--backends` has its engine, how many times as fast as B it was (None: not measured), what is
    known of its outputs, whether they are right, and why it has no speed."""

    called: IndicatedPrescription
    engine: str
    speedup: Speedup | None
    outputs: str
    right: bool
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Whether it is proven: faster than B, and right."""
        return self.speedup is not None and self.speedup.verdict == FASTER and self.right

    @property
    def verdict(self) -> str:
        """What is known of it, in a few words."""
        return self.reason or (self.speedup.verdict if self.speedup else "")


COLUMNS = (
    Column("prescription", "what was changed", kind=TEXT),
    Column("called_by", "the cause that costs B most of those that it may cure", kind=TEXT, title="called for by"),
    Column("cost_us", "what that costs B", "µs", title="costs, µs"),
    Column("engine", "for --backends", kind=TEXT, rank=3),
    Column("speedup", "latency of B over its own", kind=RATIO, interval=True, title="times as fast"),
    Column("speedup_low", "its lower limit", kind=RATIO, cell=lambda row: ""),
    Column("speedup_high", "its upper limit", kind=RATIO, cell=lambda row: ""),
    Column("verdict", "faster, slower, equivalent or undecided; or why it has no speed", kind=TEXT),
    Column("outputs", "against those of the study's reference", kind=TEXT, rank=1),
    Column("kept", "where it is proven faster, with the right outputs", kind=TEXT),
)


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Build a row for each prescription that B, `title`, was tried with."""
    rows = []
    for one in outcomes:
        rows.append({"prescription": one.called.prescription.text, "called_by": one.called.cause.title,
                     "cost_us": 1e6 * one.called.seconds, "engine": one.engine, **limited("speedup", one.speedup),
                     "verdict": one.verdict, "outputs": one.outputs, "kept": "yes" if one.kept else "no"})  # fmt: skip
    note = (
        f"Each is a trial beside {title}, in turns, all of them as one family (Holm); a profiled run is not among them."
    )
    return TRIED.of(COLUMNS, rows, notes=(note,) if rows else ())


def sentences(outcomes: Sequence[Outcome], title: str) -> list[str]:
    """Return sentences on the number of prescriptions that helped and on the best one."""
    if not outcomes:
        return [f"Nothing of what costs {title} time calls for a prescription."]
    kept = sorted((one for one in outcomes if one.kept), key=lambda one: -_find_speedup(one))
    told = [f"{len(kept) or 'None'} of {counting(len(outcomes), 'prescription')} helped."]
    for one in kept[:1]:
        found = one.speedup
        assert found is not None
        gain = ratio(found.value, found.low, found.high)
        told.append(f"The best is {one.called.prescription.text}: {gain} as fast, by --backends {one.engine}.")
    return told


def _find_speedup(one: Outcome) -> float:
    return one.speedup.value if one.speedup else 0.0
