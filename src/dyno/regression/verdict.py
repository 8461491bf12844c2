"""The verdict of a comparison of two runs, or of two sides: in sentences, and as an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from dyno.formatting import bullet, counting, plain, points
from dyno.regression.compare_table import RATIO_SHOWN, floored, verdict
from dyno.regression.rules import LESS_ACCURATE, POWER, SLOWER, STATUS, WRONG_OUTPUTS, slowdown
from dyno.report.export import export
from dyno.results import stats
from dyno.results.correctness import INCOMPARABLE, WRONG
from dyno.results.ranking import configuration_of
from dyno.table import Row, Table, missing
from dyno.worker.record import write_text
from dyno.worker.spec import plain as drop_controls

GOOD, REGRESSION, UNDECIDED = 0, 1, 3  # exit codes
APART = (
    "Two stored runs: they were not interleaved, so what the machine did between them is in the ratio; "
    "--again measures both here in turns."
)


def list_comparison(table: Table, stored: bool = True) -> list[str]:
    """Describe the comparison: wrong outputs, counts of verdicts, and each failed trial with the reason.

    Then how it was measured (`stored`: as two runs), and the smallest slow-down that it would have caught.
    """
    rows = table.rows
    counts = Counter(verdict(r).partition(":")[0] for r in rows)
    lines = [f"{describe_where(r)}: {r['verdict']}; not judged, whatever the speed."
             for r in rows if r["verdict"].startswith(WRONG)]  # fmt: skip
    verdicts = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    lines += [f"{counting(len(rows), 'shared trial' if stored else 'pair')}: {verdicts}."]
    lines += [f"failed: {describe_where(r)}: {failure(r)}" for r in rows if r["failed"]]
    lines += [f"undecided: {describe_where(r)}: {r['undecided']}" for r in rows if r["undecided"]]
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


def describe_where(r: Row) -> str:
    """Return the trial of a row, in a few words."""
    return f"{plain(r['model'])} {plain(configuration_of(r))} b{r['batch']} {r['size']}"


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


# A comparison for a build server: JUnit's XML and a Markdown summary for a pull request.
#
# Both are small enough for the standard library: JUnit's format is a dozen lines of `xml.etree` here.

HEADINGS = {GOOD: "no regression", REGRESSION: "regression"}


def outcome(table: Table) -> str:
    """Return the comparison's outcome in one or two words."""
    return HEADINGS.get(exit_code(table), "undecided")


def format_junit(table: Table, sentences: Sequence[str], path: Path) -> None:
    """Write a test case for each row: a failure for a regression, an error for an undecided one."""
    rows = table.rows
    counts = {"failures": sum(bool(r["failed"]) for r in rows),
              "errors": sum(bool(not r["failed"] and undecided(r)) for r in rows)}  # fmt: skip
    attributes = {"name": "dyno compare", "tests": str(len(rows)), **{name: str(n) for name, n in counts.items()}}
    suites = Xml.Element("testsuites", attributes)
    suite = Xml.SubElement(suites, "testsuite", attributes)
    for r in rows:
        seconds = "0" if missing(r["latency_b_ms"]) else f"{r['latency_b_ms'] / 1e3:.9f}"
        about = {"classname": "dyno.compare", "name": describe_where(r), "time": seconds}
        case = Xml.SubElement(suite, "testcase", about)
        if r["failed"]:
            Xml.SubElement(case, "failure", {"type": r["failed"], "message": drop_controls(failure(r))})
        elif reason := undecided(r):
            Xml.SubElement(case, "error", {"type": "undecided", "message": drop_controls(reason)})
        ratio = "" if missing(r["ratio"]) else f"{RATIO_SHOWN.text(r)} the latency, "
        Xml.SubElement(case, "system-out").text = drop_controls(f"{ratio}{verdict(r)}")
    Xml.SubElement(suite, "system-out").text = "\n".join(map(drop_controls, sentences))
    Xml.indent(suites)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, Xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n")


def format_summary(table: Table, sentences: Sequence[str], path: Path) -> None:
    """Append the comparison in Markdown, as `$GITHUB_STEP_SUMMARY` takes it."""
    title = f"### Dyno: {outcome(table)} in {counting(len(table.rows), 'pair')}"
    text = "\n".join([title, "", export([table], "markdown").strip(), "", *map(bullet, sentences), "", ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:  # other steps of the same build have written there
        file.write(text)
