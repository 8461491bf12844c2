"""The verdict of a comparison of two runs, or of two sides: in sentences, and as an exit code."""

from __future__ import annotations

from collections import Counter

from dyno.analysis import stats
from dyno.analysis.formatting import counting, plain, points
from dyno.analysis.gate.power import POWER
from dyno.analysis.gate.rules import LESS_ACCURATE, SLOWER, STATUS, WRONG_OUTPUTS, slowdown
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
    """Describe the comparison: wrong outputs, counts of verdicts, and each failed trial with the reason.

    Then how it was measured (`stored`: as two runs), and the smallest slow-down that it would have caught.
    """
    rows = table.rows
    counts = Counter(verdict(r).partition(":")[0] for r in rows)
    lines = [f"{where(r)}: {r['verdict']}; not judged, whatever the speed."
             for r in rows if r["verdict"].startswith(WRONG)]  # fmt: skip
    verdicts = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    lines += [f"{counting(len(rows), 'shared trial' if stored else 'pair')}: {verdicts}."]
    lines += [f"failed: {where(r)}: {failure(r)}" for r in rows if r["failed"]]
    lines += [f"undecided: {where(r)}: {r['undecided']}" for r in rows if r["undecided"]]
    if counts[stats.ONE_ROUND]:
        lines.append("One round can't show that a difference is real: measure both with two rounds or more.")
    return [*lines, *_describe_method(rows, stored), *_describe_power(rows)]


def _describe_method(rows: list[Row], stored: bool) -> list[str]:
    methods = {r["measured"] for r in rows if r["measured"]}
    if not methods:
        return []
    rounds = max((min(r["rounds_a"], r["rounds_b"]) for r in rows), default=0)
    sentences = [APART if stored else f"Measured {' or '.join(sorted(methods))}, {counting(rounds, 'round')}."]
    builds = [int(r["builds"]) for r in rows if not missing(r["builds"])]
    if 1 in builds:
        sentences.append("Of one build of an engine that is tuned by timing: another may differ; see --builds.")
    elif builds:
        sentences.append(f"Over {min(builds)} builds of each engine that is tuned by timing.")
    if (count := sum(1 for r in rows if not missing(r["p_value"]))) > 1:
        sentences.append(f"The {count} pairs are one family (Holm): all verdicts together hold in 95 % of comparisons.")
    return sentences


def _describe_power(rows: list[Row]) -> list[str]:
    smallest = [r["smallest"] for r in rows if not missing(r["smallest"])]
    if not smallest:
        return []
    least, most = slowdown(min(smallest) / 100), slowdown(max(smallest) / 100)
    span = least if least == most else f"{least.removesuffix(' %')} to {most}"
    return [f"With these rounds and this spread, a slow-down of {span} is caught in {100 * POWER:g} % of comparisons."]


def where(r: Row) -> str:
    """Return the trial of a row, in a few words."""
    return f"{plain(r['model'])} {plain(configuration(r))} b{r['batch']} {r['size']}"


def failure(r: Row) -> str:
    """Return the reason why a row fails."""
    return "; ".join(_explain_failure(condition, r) for condition in r["failed"].split(", "))


def _explain_failure(condition: str, r: Row) -> str:
    if condition == SLOWER:
        return f"slower, {RATIO_SHOWN.text(r)} the latency"
    if condition == LESS_ACCURATE:
        low, value, high = (points(r[f"{r['judged_by']}{x}"] / 100) for x in ("_low", "", "_high"))
        return f"less accurate, {value} points [{low}, {high}] on the same images"
    if condition == STATUS:
        return f"was ok, now {r['status']}: {plain(r['reason'])}"
    if condition == WRONG_OUTPUTS:
        return str(r["verdict"])
    return "no outputs to compare with A's" if missing(r["close"]) else f"only {floored(r['close'])} % of values agree"


def undecided(r: Row) -> str:
    """Return the reason why a row is undecided, "" if it isn't."""
    reason = r["verdict"] if r["verdict"].startswith((INCOMPARABLE, WRONG)) else ""
    return str(r["undecided"] or reason)


def exit_code(table: Table) -> int:
    """Return 1 where a condition failed, else 3 where a row is undecided, not comparable or wrong, else 0."""
    if any(r["failed"] for r in table.rows):
        return REGRESSION
    return UNDECIDED if any(map(undecided, table.rows)) else GOOD
