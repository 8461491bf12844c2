"""A table as plain data: columns that know their unit, kind and meaning, rows of plain values, and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dyno.formatting import (
    NO_IMAGE,
    clean_text,
    format_limits,
    format_number,
    format_points,
    is_bounded,
    short_bound,
    show,
)
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import pandas as pd

    from dyno.results.stats import Interval, Speedup

TEXT, NUMBER, COUNT, PERCENT, POINTS, RATIO, FINE = KINDS = (
    "text", "number", "count", "percent", "points", "ratio", "fine ratio",
)  # fmt: skip
TITLE_COLUMNS = ("model", "form", "statistic", "label", "title")  # columns with values that need no label in a heading
MAX_SUGGESTIONS = 3  # columns suggested for a misspelt one

# Further keys of a row: its printed position, bold print, and the link of its first cell.
RANK_KEY, FIRST_KEY, LINK_KEY = "#rank", "#first", "#link"
CELL_KEY, BELOW_KEY = "#cell ", "#below"  # keys of a pickled row: printed cells, and notes below
ALL_COLUMNS = "all"  # name for all columns meant to be read

Row = dict[str, Any]


def is_missing(value: Any) -> bool:
    """Return whether a value is missing: None, NaN or pandas' NA."""
    # pandas' NA compares as NA, so its type is checked; NaN is the only value that doesn't equal itself.
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))


KIND_FORMATS: dict[str, Callable[[float], str]] = {
    NUMBER: lambda v: format_number(float(v)),
    COUNT: lambda v: f"{v:,.0f}" if float(v).is_integer() else format_number(v),
    PERCENT: lambda v: f"{v:.2f}",
    POINTS: lambda v: format_points(v / 100),
    RATIO: lambda v: f"{v:.2f}x",
    FINE: lambda v: f"{v:.3f}x",
}


@dataclass(frozen=True)
class Column:
    """One column: its `name` in CSV and JSON, its `title` for people, one of KINDS, the unit, and its meaning.

    An `identity` is part of a row's name, printed if rows differ in it. An `interval` is printed after the value, from
    the row's NAME_low and NAME_high. A narrow terminal omits columns of the highest `rank` first, and never those of
    rank 0. With a `hint` the number is formatted by `formatting.show`; `cell` formats the printed text from the whole
    row instead.
    """

    name: str
    meaning: str = ""
    unit: str = ""
    kind: str = NUMBER
    title: str = ""
    rank: int = 0
    interval: bool = False
    identity: bool = False
    hint: str = ""
    cell: Callable[[Row], str] | None = None

    @property
    def heading(self) -> str:
        """Title, or the name with its unit."""
        return self.title or (f"{self.name}, {self.unit}" if self.unit else self.name)

    @property
    def right(self) -> bool:
        """Whether its cells are aligned to the right, like numbers."""
        return self.kind != TEXT

    def text(self, row: Row) -> str:
        """Return the printed cell of a row; "" for a missing value."""
        if self.cell is not None:
            return self.cell(row)
        value: Any = row.get(self.name)
        if is_missing(value):
            return ""
        if self.kind == TEXT:
            return str(value)
        format_value = (lambda v: show(v, self.hint)) if self.hint else KIND_FORMATS[self.kind]
        low: Any = row.get(f"{self.name}_low")
        high: Any = row.get(f"{self.name}_high")
        if not self.interval or is_missing(low) or is_missing(high) or (self.hint and math.isinf(high)):
            return format_value(value)
        if self.kind in (PERCENT, POINTS):
            return f"{format_value(value)} [{format_value(low)}, {format_value(high)}]"
        if self.kind in (RATIO, FINE) and not is_bounded(low, high):
            return short_bound(low, high)
        return format_value(value) + format_limits(low, high, lambda v: format_value(v).removesuffix("x"))


@dataclass(frozen=True)
class TablePart:
    """One printed table: a heading, the non-empty columns, the rows, and its own notes."""

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str]


@dataclass(frozen=True, repr=False)
class Table:
    """A table with its content.

    CSV and JSON hold every column. A terminal shows the columns in `printed` (empty: all), up to `max_columns` (0: no
    limit), in one part per combination of values in the `group` columns. `below` makes the notes of a part; `notes`
    follow the last part. A row may hold further values for its cells, and under RANK_KEY a printed position that
    differs from the order in CSV and JSON.
    """

    name: str
    title: str
    description: str
    columns: tuple[Column, ...] = ()
    rows: list[Row] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    printed: tuple[str, ...] = ()
    below: Callable[[list[Row]], list[str]] | None = None
    max_columns: int = 0

    def __repr__(self) -> str:
        return f"Table({self.name!r}, {len(self.rows)} rows)"

    def _repr_html_(self) -> str:
        """Return the printed columns for a notebook."""
        frame = self.to_pandas()
        return str(frame[list(self.printed or frame)].to_html(index=False))

    def parts(self, by: str | Sequence[str] = (), subset: str = "") -> Iterator[TablePart]:
        """Yield the parts to print, grouped by the columns in `by` (comma-separated or a sequence), if any.

        `subset` names the columns to print, with commas; "" and ALL_COLUMNS are those in `printed`. Raises `UserError`
        for an unknown column.
        """
        requested = [k.strip() for k in by.split(",")] if isinstance(by, str) and by else list(by)
        keys = requested or list(self.group)
        self._check_columns(keys)
        groups = self._group_rows(keys)
        shown = self.find_columns(subset) or self._choose_columns(
            keys, {column.name: column for column in self.columns}
        )
        for index, (values, rows) in enumerate(groups.items(), 1):
            columns = [c for c in shown if c.identity or any(c.text(r) for r in rows)]
            notes = [*(self.below(rows) if self.below else ()), *(self.notes if index == len(groups) else ())]
            yield TablePart(_make_title(keys, values), columns, rows, notes)

    def find_columns(self, subset: str) -> list[Column]:
        """Return the columns named in `subset`, with commas; [] for "" and ALL_COLUMNS."""
        names = [k.strip() for k in subset.split(",")] if subset and subset != ALL_COLUMNS else []
        self._check_columns(names)
        return [column for name in names for column in self.columns if column.name == name]

    def _check_columns(self, names: Sequence[str]) -> None:
        column_names = [column.name for column in self.columns]
        if unknown := [name for name in names if name not in column_names]:
            raise UserError(_no_column(unknown[0], column_names))

    def _group_rows(self, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row.get(k) for k in keys), []).append(row)
        return {values: sorted(rows, key=lambda row: row.get(RANK_KEY, 0)) for values, rows in groups.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields with the results of functions in their place: most are closures, which can't be pickled."""
        columns = tuple(replace(c, cell=itemgetter(CELL_KEY + c.name)) if c.cell else c for c in self.columns)
        rows = [row | {CELL_KEY + c.name: c.text(row) for c in self.columns if c.cell} for row in self.rows]
        if self.below:
            for part in replace(self, rows=rows)._group_rows(self.group).values():
                notes = self.below(part)
                for row in part:
                    row[BELOW_KEY] = notes
        return vars(self) | {"columns": columns, "rows": rows, "below": self.below and _read_notes}

    def _choose_columns(self, keys: list[str], by_name: Mapping[str, Column]) -> list[Column]:
        """Return the printed columns, without the grouping ones, and without identities equal in all rows."""
        candidates = [by_name[name] for name in self.printed or by_name if name not in keys]
        columns = [c for c in candidates if not c.identity or len({str(r.get(c.name)) for r in self.rows}) > 1]
        return columns if any(c.identity or c.kind == TEXT for c in columns) else candidates

    def to_pandas(self) -> pd.DataFrame:
        """Return every column as a DataFrame: counts as Int64, text as objects, all others as float."""
        import pandas as pd

        frame = pd.DataFrame(self.rows, columns=[c.name for c in self.columns], dtype=object)
        kinds = {c.name: "Int64" if c.kind == COUNT else object if c.kind == TEXT else float for c in self.columns}
        return frame.astype(kinds)


def _read_notes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(note for row in rows for note in row.get(BELOW_KEY, ())))


def _make_title(keys: Sequence[str], values: Sequence[Any]) -> str:
    pairs = [(k, v) for k, v in zip(keys, values, strict=True) if (k, v) != ("size", NO_IMAGE)]
    return ", ".join(clean_text(v) if k in TITLE_COLUMNS else f"{k} {clean_text(v)}" for k, v in pairs)


def _no_column(name: str, columns: list[str]) -> str:
    near = list(dict.fromkeys([*get_close_matches(name, columns, MAX_SUGGESTIONS), *(c for c in columns if name in c)]))
    hint = f"did you mean {' or '.join(near[:MAX_SUGGESTIONS])}? " if near and name else ""
    return f"there is no column {name!r}; {hint}the first line of --format csv names all columns"


def join_tables(tables: Sequence[Table]) -> Table:
    """Join the rows of several tables of one kind into one table."""
    first = tables[0]
    return Table(**{**vars(first), "rows": [row for table in tables for row in table.rows]})


# Numbers with the limits of their interval as columns and cells of a row: NAME, NAME_low and NAME_high.


def limit_cells(name: str, interval: Interval | Speedup | None, scale: float = 1.0) -> Row:
    """Return the cells of a number and its limits, multiplied by `scale`; {} for None."""
    if interval is None:
        return {}
    values = {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: scale * value for key, value in values.items()}


def limits_of(name: str, unit: str, kind: str = NUMBER) -> tuple[Column, Column]:
    """Return the columns of a number's limits."""
    return (Column(f"{name}_low", "its lower limit", unit, kind=kind),
            Column(f"{name}_high", "its upper limit", unit, kind=kind))  # fmt: skip


def with_limits(column: Column) -> tuple[Column, ...]:
    """Return the column, with its interval printed, and the columns of its limits."""
    return replace(column, interval=True), *limits_of(column.name, column.unit, column.kind)


# Columns of tables with a row for each trial.
LABEL_COLUMN = Column("label", "model, backend with its options, precision, batch, size", kind=TEXT, title="trial")
TRIAL_COLUMN = Column("trial", "the trial's id", kind=TEXT)


def compare_cells(speedup: Speedup | None, is_reference: bool) -> Row:
    """Return the cells of a speed-up and its verdict: 1 for the reference itself, {} if unknown."""
    if is_reference:
        return {"speedup": 1.0, "verdict": "reference"}
    return {**limit_cells("speedup", speedup), "verdict": speedup.verdict} if speedup else {}


def duration_column(name: str, meaning: str, title: str = "", rank: int = 0) -> Column:
    """Return a column of seconds, printed as a duration with its limits, if known."""
    return Column(name, meaning, "s", NUMBER, title or name.removesuffix("_s"), rank, interval=True, hint="duration")


def keep_printed(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the columns for people: without limits, which follow their value, and without the trial's id."""
    return tuple(c.name for c in columns if not c.name.endswith(("_low", "_high")) and c.name != "trial")
