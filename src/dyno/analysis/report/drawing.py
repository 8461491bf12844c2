"""A run's charts, drawn side by side: with many trials each takes matplotlib a second."""

from __future__ import annotations

import os
import re
import signal
import threading
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dyno.analysis import charts, style
from dyno.analysis.presentation.chart import Chart
from dyno.analysis.records.run_data import RunData
from dyno.analysis.report.notebook import BATCHES, HEADLINES, leading

SMALLEST = "At the smallest batch; the chart of all is among the charts below."
MANY = 12  # trials from which processes draw: of fewer, one has drawn all charts before others would have begun


_one: partial[ChartDrawing | None]  # in a process that draws: what draws the chart of a number


@dataclass(frozen=True)
class ChartDrawing:
    """A chart inside the page: its name, its caption, and the <svg> element, which matplotlib has escaped."""

    name: str
    caption: str
    svg: Any


def draw(run: RunData, folder: Path, prefix: str, name: str) -> list[ChartDrawing]:
    """Draw every chart for which the run has data, and write each to FOLDER as PNG.

    Ids of the drawings begin with `prefix`, and names of files with `name`, where it isn't empty.
    """
    one = partial(_draw_kind, run, folder, prefix, name)
    count = range(len(charts.kinds()))
    most = min(len(os.sched_getaffinity(0)), len(count))
    # Only the thread that forks goes on in a forked process: whatever lock another one held would stay locked there.
    if len(run.frame) >= MANY and most > 1 and threading.active_count() == 1:
        try:
            return _filter_present(_side_by_side(one, count, most))
        except BrokenProcessPool:  # one was killed, as for want of memory
            pass
    return _filter_present(map(one, count))


def headline(run: RunData, drawn: Sequence[ChartDrawing], prefix: str) -> ChartDrawing | None:
    """Return the chart for the top of the page: one of those drawn, or one of the rows that fit in view; else None."""
    first, kinds = leading(run), {kind.name: kind for kind in charts.kinds()}
    for found in (chart for wanted in HEADLINES for chart in drawn if chart.name == wanted):
        if found.name not in BATCHES or len(first.frame) == len(run.frame):
            return found
        caption = f"{found.caption} {SMALLEST}"
        if (chart := _draw_chart(first, kinds[found.name], f"{prefix}-first", caption)) is not None:
            return chart
    return None


def file_name(name: str) -> str:
    """Return the name with the characters replaced that not every file system allows."""
    return re.sub(r"[^\w.-]+", "_", name)


def _draw_kind(run: RunData, folder: Path, prefix: str, name: str, number: int) -> ChartDrawing | None:
    chart: Chart = charts.kinds()[number]
    file = folder / f"{file_name(f'{name}-{chart.name}' if name else chart.name)}.png"
    return _draw_chart(run, chart, prefix, chart.caption, file)


def _draw_chart(run: RunData, chart: Chart, prefix: str, caption: str, file: Path | None = None) -> ChartDrawing | None:
    from markupsafe import Markup

    figure = chart.draw(run)
    if figure is None:
        return None
    box = style.laid_out(figure)
    if file is not None:
        style.save(figure, file, box)
    svg = Markup(style.svg(figure, f"{prefix}-{chart.name}", box))
    return ChartDrawing(chart.name, caption, svg)


def _side_by_side(one: partial[ChartDrawing | None], count: range, most: int) -> list[ChartDrawing | None]:
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401 - imported once, here

    # What draws is inherited, not sent: before Python 3.11.5 the death of a process while a pipe is full ends nothing.
    with warnings.catch_warnings(), ProcessPoolExecutor(most, get_context("fork"), _prepare_process, (one,)) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries, which survive a fork
        return [*pool.map(_draw_inherited, count)]


def _prepare_process(one: partial[ChartDrawing | None]) -> None:
    """Prepare a process that draws.

    It ignores interrupts: they are for the command, which ends its processes; these would print a traceback.
    """
    global _one
    _one = one
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _draw_inherited(number: int) -> ChartDrawing | None:
    return _one(number)


def _filter_present(drawn: Iterable[ChartDrawing | None]) -> list[ChartDrawing]:
    return [each for each in drawn if each is not None]
