"""A chart that there can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dyno.analysis.records.run_data import RunData


@dataclass(frozen=True)
class Chart:
    """A chart, declared at the top of a module of `analysis/charts` or by an entry point of the group `dyno.charts`.

    It has its file's `name`, the `caption` below it, and `draw`, which gives a matplotlib Figure, or None where the run
    has nothing to draw.
    The report draws all that apply, in the order of `place`.
    """

    name: str
    caption: str
    draw: Callable[[RunData], Any]
    place: int = 100
