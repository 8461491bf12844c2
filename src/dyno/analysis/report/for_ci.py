"""A comparison for a build server: JUnit's XML and a Markdown summary for a pull request.

Both are small enough for the standard library: JUnit's format is a dozen lines of `xml.etree` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from dyno.analysis.formatting import bullet, counting
from dyno.analysis.presentation.export import export
from dyno.analysis.presentation.table import Row, Table, missing
from dyno.analysis.tables.compare import RATIO_SHOWN, verdict
from dyno.analysis.verdict.comparison import GOOD, REGRESSION, exit_code, failure, undecided, where
from dyno.worker.record import write_text
from dyno.worker.spec import plain as drop_controls

HEADINGS = {GOOD: "no regression", REGRESSION: "regression"}


def outcome(table: Table) -> str:
    """Return the comparison's outcome in one or two words."""
    return HEADINGS.get(exit_code(table), "undecided")


def junit(table: Table, sentences: Sequence[str], path: Path) -> None:
    """Write a test case for each row: a failure for a regression, an error for an undecided one."""
    rows = table.rows
    counts = {"failures": sum(bool(r["failed"]) for r in rows),
              "errors": sum(bool(not r["failed"] and undecided(r)) for r in rows)}  # fmt: skip
    attributes = {"name": "dyno compare", "tests": str(len(rows)), **{name: str(n) for name, n in counts.items()}}
    suites = Xml.Element("testsuites", attributes)
    suite = Xml.SubElement(suites, "testsuite", attributes)
    for r in rows:
        case = Xml.SubElement(
            suite, "testcase", {"classname": "dyno.compare", "name": where(r), "time": _format_seconds(r)}
        )
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


def _format_seconds(r: Row) -> str:
    return "0" if missing(r["latency_b_ms"]) else f"{r['latency_b_ms'] / 1e3:.9f}"


def summary(table: Table, sentences: Sequence[str], path: Path) -> None:
    """Append the comparison in Markdown, as `$GITHUB_STEP_SUMMARY` takes it."""
    title = f"### Dyno: {outcome(table)} in {counting(len(table.rows), 'pair')}"
    text = "\n".join([title, "", export([table], "markdown").strip(), "", *map(bullet, sentences), "", ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:  # other steps of the same build have written there
        file.write(text)
