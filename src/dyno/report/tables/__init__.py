"""Tables of a run or of two, each an object in a module, and found by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dyno.formatting import name_items
from dyno.results.run_data import RunData
from dyno.table import TEXT, Column, Row, Table
from dyno.worker import plugins
from dyno.worker.spec import UserError, check_known

ENTRY_POINT_GROUP = "dyno.tables"
# modules of other packages that declare tables of a run
TABLE_MODULES = (
    "dyno.video.tables",
    "dyno.serving.tables",
    "dyno.serving.application",
    "dyno.regression.compare_table",
    "dyno.regression.history",
)
REPORT_SECTIONS = ("tables", "accuracy", "side", "")  # sections of the report, in order


def list_kinds() -> list[TableKind]:
    """Return every available table in the report's order: Dyno's own, then those of plug-ins."""
    kinds = plugins.list_declared((sys.modules[__name__], *TABLE_MODULES), TableKind, ENTRY_POINT_GROUP).values()
    return sorted(kinds, key=lambda kind: (REPORT_SECTIONS.index(kind.section), kind.position, kind.name))


def make_tables(run: RunData, name: str) -> list[Table]:
    """Return the run's table of that name, or for `all` every table with rows; UserError for an unknown name."""
    by_name = {kind.name: kind for kind in list_kinds()}
    if name != "all":
        check_known("table", name, (*by_name, "all"))
        return [by_name[name].table(run)]
    return [table for kind in by_name.values() if kind.make and (table := kind.table(run)).rows]


def list_leading(run: RunData) -> tuple[list[Table], list[str]]:
    """Return the leading tables with rows of a run that isn't a study, and their sentences; empty for a study."""
    leaders = [(kind, table) for kind in list_kinds() if kind.leads and (table := kind.table(run)).rows]
    return [table for _, table in leaders], [
        line for kind, _ in leaders if kind.sentences for line in kind.sentences(run)
    ]


def explain_absence(name: str) -> str:
    """Return why the table of that name may be empty."""
    return next((kind.nothing for kind in list_kinds() if kind.name == name), "this run has no table with rows")


def list_tables() -> Table:
    """List the available tables as a table."""
    rows = [
        {"name": kind.name, "holds": kind.description, "command": kind.command or f"dyno show RUN --table {kind.name}"}
        for kind in list_kinds()
    ]
    return TABLE_LIST.build(COLUMNS, rows)


RUN_COLUMNS = tuple(
    Column(name, meaning, kind=TEXT)
    for name, meaning in {
        "run": "the run folder", "models": "of its trials", "trials": "their number by status",
        "measured": "when it began", "fastest": "of its first ranking: the winner, or the first candidate",
    }.items()
)  # fmt: skip


def list_runs(folder: str, runs: Sequence[Sequence[str]]) -> Table:
    """List the run folders below `folder` as a table; each run has the cells of RUN_COLUMNS."""
    rows: list[Row] = [{c.name: cell for c, cell in zip(RUN_COLUMNS, run, strict=True)} for run in runs]
    return Table("runs", f"Runs below {folder}", "Run folders with their winners.", RUN_COLUMNS, rows)


@dataclass(frozen=True)
class TableKind:
    """A kind of table, declared at the top of a module of `report/tables` or by an entry point (group `dyno.tables`).

    `name` is for `dyno show --table`; title and description say what it holds. `make` fills it from a run, or returns
    None without data; `nothing` then gives the reason. Tables that are not of a run have no `make`; `command` prints
    them. The report shows it in its `section`, in the order of `position`. `leads` marks the main table of a run that
    isn't a study, such as a video: `dyno show` then prints it and its `sentences` instead of the trials and the
    verdict.
    """

    name: str
    title: str
    description: str
    make: Callable[[RunData], Table | None] | None = None
    nothing: str = "this run has nothing for it"
    section: str = ""
    position: int = 100
    command: str = ""
    leads: bool = False
    sentences: Callable[[RunData], Sequence[str]] | None = None

    def build(self, columns: Sequence[Column], rows: Sequence[Row], **fields: Any) -> Table:
        """Build the table with this content; `fields` are fields of `Table`."""
        return Table(self.name, self.title, self.description, tuple(columns), list(rows), **fields)

    def table(self, run: RunData) -> Table:
        """Return the run's table, which may be empty; UserError for a table that is not of a run."""
        if self.make is None:
            raise UserError(f"the table {self.name} is not of a run; `{self.command}` prints it")
        table = self.make(run) or self.build((), ())
        if name_items(*run.frame["size"]) == "images":
            return table
        return replace(table, columns=tuple(map(_count_inputs, table.columns)))


def _count_inputs(column: Column) -> Column:
    """Replace "image" with "input" in a column's texts, for runs whose inputs are not all images."""
    texts = {name: getattr(column, name).replace("image", "input") for name in ("unit", "title", "meaning")}
    return replace(column, **texts)


COLUMNS = (
    Column("name", "for --table", kind=TEXT),
    Column("holds", "in a sentence", kind=TEXT),
    Column("command", "that prints it", kind=TEXT, rank=1),
)
TABLE_LIST = TableKind("tables", "Tables", "The tables there are.")
