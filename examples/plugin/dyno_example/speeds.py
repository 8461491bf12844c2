"""A table and a chart of one's own: how many images a second each trial would take, one batch after another."""

from __future__ import annotations

from typing import Any

from dyno.report.style import Chart
from dyno.report.tables import TableKind
from dyno.results.run_data import RunData
from dyno.table import TEXT, Column, Table

COLUMNS = (
    Column("trial", "model, configuration, batch and size", kind=TEXT),
    Column("fps", "the batch over the median latency", "images/s"),
)


def speeds(run: RunData) -> Table:
    """A row per trial that has a latency."""
    timed = [(t, t.medians("model")) for t in run.records]
    rows = [{"trial": t.label, "fps": t.batch / min(seconds)} for t, seconds in timed if seconds]
    return SPEEDS.build(COLUMNS, rows, notes=("By the fastest round.",))


def drawn(run: RunData) -> Any:
    """Bars of the same numbers; None where there is none."""
    from matplotlib.figure import Figure

    rows = speeds(run).rows
    if not rows:
        return None
    figure = Figure((6, 1 + 0.3 * len(rows)), layout="constrained")
    figure.subplots().barh([row["trial"] for row in rows], [row["fps"] for row in rows])
    return figure


SPEEDS = TableKind(
    "speeds", "Images per second of each trial", "A row per trial: images per second.", speeds, section="tables"
)
SPEEDS_CHART = Chart("speeds", "Images per second of each trial, one batch after another.", drawn)
