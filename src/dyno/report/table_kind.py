"""A kind of table: its name, what it holds, and how it is filled from a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dyno.results.run_data import RunData
from dyno.table import Column, Row, Table
from dyno.worker.spec import UserError


@dataclass(frozen=True)
class TableKind:
    """A kind of table, declared at the top of a module of `report/tables` or by an entry point of the group
    `dyno.tables`: its name in `dyno show --table`, a title, and a sentence on what it holds.

    `make` fills it from a run, or returns None where the run has no data for it, which `nothing` says. A table that is
    not of a run has no `make`; `command` prints it. The report shows it in its `section`, in the order of `place`.
    `leads` marks the main table of a run that isn't a study, such as a video: `dyno show` prints its tables and the
    `sentences` on them in place of the trials' and the verdict.
    """

    name: str
    title: str
    description: str
    make: Callable[[RunData], Table | None] | None = None
    nothing: str = "this run has nothing for it"
    section: str = ""
    place: int = 100
    command: str = ""
    leads: bool = False
    sentences: Callable[[RunData], Sequence[str]] | None = None

    def of(self, columns: Sequence[Column], rows: Sequence[Row], **more: Any) -> Table:
        """Build the table with this content; `more` are fields of `Table`."""
        return Table(self.name, self.title, self.description, tuple(columns), list(rows), **more)

    def table(self, run: RunData) -> Table:
        """Return the run's table, which may be empty; UserError for a table that is not of a run."""
        if self.make is None:
            raise UserError(f"the table {self.name} is not of a run; `{self.command}` prints it")
        return self.make(run) or self.of((), ())
