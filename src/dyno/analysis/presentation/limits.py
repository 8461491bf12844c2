"""Numbers with the limits of their interval as columns and cells of a row: NAME, NAME_low and NAME_high."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dyno.analysis.formatting import limits, show
from dyno.analysis.presentation.table import NUMBER, Column, Row

if TYPE_CHECKING:
    from dyno.analysis.stats import Interval, Speedup


def limited(name: str, interval: Interval | Speedup | None) -> Row:
    """Return the cells of a number and its limits; {} for None."""
    if interval is None:
        return {}
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def limits_of(name: str, unit: str, kind: str = NUMBER) -> tuple[Column, Column]:
    """Return the columns of a number's limits."""
    return (Column(f"{name}_low", "its lower limit", unit, kind=kind),
            Column(f"{name}_high", "its upper limit", unit, kind=kind))  # fmt: skip


def duration(name: str, meaning: str, title: str = "", rank: int = 0) -> Column:
    """Return a column of seconds that prints a duration, and the limits behind it where they are known."""

    def format_cell(row: Row) -> str:
        value, low, high = row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")
        text = show(value, "duration")
        if value is None or low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
            return text
        return text + limits(low, high, lambda v: show(v, "duration"))

    return Column(name, meaning, "s", title=title or name.removesuffix("_s"), cell=format_cell, rank=rank)


def printed(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the columns for people: without limits, which stand behind their value, and without the trial's id."""
    return tuple(c.name for c in columns if not c.name.endswith(("_low", "_high")) and c.name != "trial")
