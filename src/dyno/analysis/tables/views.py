"""Other tables of a run than that of its trials: the frontier, and when a preparation pays off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyno.analysis.records.results import Results
from dyno.analysis.tables import breakeven, frontier_table
from dyno.analysis.tables.render import Column

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class View:
    """A table: its heading in the report, how it is made, what of it is printed, and the columns that group it."""

    title: str
    table: Callable[[Results, pd.DataFrame], pd.DataFrame]
    printed: Sequence[Column]
    by: str
    nothing: str
    notes: tuple[str, ...] = ()


VIEWS = {
    "frontier": View(
        "Frontier",
        lambda _, frame: frontier_table.table(frame),
        frontier_table.PRINTED,
        "model,device",
        "there is no frontier: no trial has both an accuracy and a speed",
        (
            "Nothing is both faster and more accurate: by latency among the smallest batch, by images/s among all. "
            "Intervals of speed are between processes; neighbours whose intervals overlap may belong the other way "
            "round.",
        ),
    ),
    "break-even": View(
        "When the preparation pays off",
        breakeven.table,
        breakeven.PRINTED,
        "model,size,batch",
        "nothing to pay off: no trial has a reference to gain on",
        (
            "Export, ranking of layers, conversion with its calibration, engine and compilation, less what the "
            "reference needs, over what an image gains. The interval is the speed-up's.",
        ),
    ),
}


def view(name: str) -> View:
    """The view of that name, one of VIEWS."""
    return VIEWS[name]
