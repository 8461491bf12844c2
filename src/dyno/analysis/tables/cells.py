"""A table as plain data: titled, with cells that know their text and what they are sorted by."""

from __future__ import annotations

from dataclasses import dataclass, field

from dyno.analysis.formatting import significant


@dataclass(frozen=True)
class Cell:
    """Text of a table cell and what it is sorted by; `number` right-aligns it."""

    text: str
    sort: str = ""
    number: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table; `notes` are printed below it."""

    title: str
    head: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)


def text(value: object) -> Cell:
    """A cell of text, sorted by that text."""
    return Cell(str(value), str(value))


def number(value: float | None, shown: str | None = None) -> Cell:
    """A cell of a number, sorted by it; empty for None and NaN."""
    if value is None or value != value:
        return Cell("", "", True)
    return Cell(significant(value) if shown is None else shown, repr(float(value)), True)
