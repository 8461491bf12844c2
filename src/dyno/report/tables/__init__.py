"""Tables of a run or of two, each an object in a module, and found by its name."""

from __future__ import annotations

import sys

from dyno.report.table_kind import TableKind
from dyno.results.run_data import RunData
from dyno.table import TEXT, Column, Table
from dyno.worker import plugins
from dyno.worker.spec import check_known

GROUP = "dyno.tables"
# modules of other rooms that declare tables of a run
ABILITIES = ("dyno.videos.tables", "dyno.serving.tables", "dyno.regression.compare_table")
SECTIONS = ("tables", "accuracy", "side", "")  # of the report, in its order


def kinds() -> list[TableKind]:
    """Return every available table in the report's order: Dyno's own, then those of installed distributions."""
    declared = plugins.declared((sys.modules[__name__], *ABILITIES), TableKind, GROUP).values()
    return sorted(declared, key=lambda kind: (SECTIONS.index(kind.section), kind.place, kind.name))


def named(run: RunData, name: str) -> list[Table]:
    """Return the run's table of that name, or for `all` every one with rows; UserError for an unknown name."""
    by_name = {kind.name: kind for kind in kinds()}
    if name != "all":
        check_known("table", name, (*by_name, "all"))
        return [by_name[name].table(run)]
    return [table for kind in by_name.values() if kind.make and (table := kind.table(run)).rows]


def leading(run: RunData) -> tuple[list[Table], list[str]]:
    """Return the tables with rows that lead where the run isn't of a study, and their sentences; empty for a study."""
    leaders = [(kind, table) for kind in kinds() if kind.leads and (table := kind.table(run)).rows]
    return [table for _, table in leaders], [
        line for kind, _ in leaders if kind.sentences for line in kind.sentences(run)
    ]


def nothing(name: str) -> str:
    """Return the reason why the table of that name may be empty."""
    return next((kind.nothing for kind in kinds() if kind.name == name), "this run has no table with rows")


def listed() -> Table:
    """List the available tables as a table."""
    rows = [
        {"name": kind.name, "holds": kind.description, "command": kind.command or f"dyno show RUN --table {kind.name}"}
        for kind in kinds()
    ]
    return LIST.of(COLUMNS, rows)


COLUMNS = (
    Column("name", "for --table", kind=TEXT),
    Column("holds", "in a sentence", kind=TEXT),
    Column("command", "that prints it", kind=TEXT, rank=1),
)
LIST = TableKind("tables", "Tables", "The tables there are.")
