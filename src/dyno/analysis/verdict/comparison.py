"""What a comparison of two runs, or of two sides, says: in sentences, and as an exit code."""

from __future__ import annotations

from collections import Counter

from dyno.analysis import stats
from dyno.analysis.formatting import counting, plain, points
from dyno.analysis.gate.power import POWER
from dyno.analysis.gate.rules import LESS_ACCURATE, SLOWER, STATUS, WRONG_OUTPUTS
from dyno.analysis.presentation.table import Row, Table, missing
from dyno.analysis.ranking.correctness import WRONG
from dyno.analysis.ranking.frontier import configuration
from dyno.analysis.ranking.references import INCOMPARABLE
from dyno.analysis.tables.compare import RATIO_SHOWN, floored, verdict

GOOD, REGRESSION, UNDECIDED = 0, 1, 3  # exit codes
APART = (
    "Two stored runs: they were not interleaved, so what the machine did between them is in the ratio; "
    "--again measures both here in turns."
)


def sentences(table: Table, stored: bool = True) -> list[str]:
    """The comparison in sentences: wrong outputs, how many of what, each trial that failed and why, then how it was
    measured (`stored`: as two runs) and what it would have caught."""
    rows = table.rows
    counted = Counter(verdict(r).partition(":")[0] for r in rows)
    found = [f"{where(r)}: {r['verdict']}; not judged, whatever the speed."
             for r in rows if r["verdict"].startswith(WRONG)]  # fmt: skip
    each = ", ".join(f"{n} {words}" for words, n in counted.most_common())
    found += [f"{counting(len(rows), 'shared trial' if stored else 'pair')}: {each}."]
    found += [f"failed: {where(r)}: {failure(r)}" for r in rows if r["failed"]]
    found += [f"undecided: {where(r)}: {r['undecided']}" for r in rows if r["undecided"]]
    if counted[stats.ONE_ROUND]:
        found.append("One round proves nothing about speed: measure both with two rounds or more.")
    return [*found, *_measured(rows, stored), *_caught(rows)]


def _measured(rows: list[Row], stored: bool) -> list[str]:
    how = {r["measured"] for r in rows if r["measured"]}
    if stored:
        return [APART] if how else []
    rounds = max((min(r["rounds_a"], r["rounds_b"]) for r in rows), default=0)
    return [f"Measured {' or '.join(sorted(how))}, {counting(rounds, 'round')}."] if how else []


def _caught(rows: list[Row]) -> list[str]:
    smallest = [r["smallest"] for r in rows if not missing(r["smallest"])]
    if not smallest:
        return []
    span = f"{min(smallest):.1f}" + (f" to {max(smallest):.1f}" if len(smallest) > 1 else "")
    return [
        f"With these rounds and this spread, a slow-down of {span} % is caught in {100 * POWER:g} % of comparisons."
    ]


def where(r: Row) -> str:
    """The trial of a row, in a few words."""
    return f"{plain(r['model'])} {plain(configuration(r))} b{r['batch']} {r['size']}"


def failure(r: Row) -> str:
    """Why a row fails."""
    return "; ".join(_why(condition, r) for condition in r["failed"].split(", "))


def _why(condition: str, r: Row) -> str:
    if condition == SLOWER:
        return f"slower, {RATIO_SHOWN.text(r)} the latency"
    if condition == LESS_ACCURATE:
        low, value, high = (points(r[f"{r['judged_by']}{x}"] / 100) for x in ("_low", "", "_high"))
        return f"less accurate, {value} points [{low}, {high}] on the same images"
    if condition == STATUS:
        return f"was ok, now {r['status']}: {plain(r['reason'])}"
    if condition == WRONG_OUTPUTS:
        return str(r["verdict"])
    return "no outputs to hold against A's" if missing(r["close"]) else f"only {floored(r['close'])} % of values agree"


def undecided(r: Row) -> str:
    """Why nothing can be told of a row, "" where something can."""
    apart = r["verdict"] if r["verdict"].startswith((INCOMPARABLE, WRONG)) else ""
    return str(r["undecided"] or apart)


def exit_code(table: Table) -> int:
    """1 where a condition failed, else 3 where some row can't be told, compared, or has wrong outputs, else 0."""
    if any(r["failed"] for r in table.rows):
        return REGRESSION
    return UNDECIDED if any(map(undecided, table.rows)) else GOOD
