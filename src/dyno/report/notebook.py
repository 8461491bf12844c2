"""A run as a notebook shows it: the decisions, the trials and one chart, as plain HTML that needs no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from itertools import chain

from dyno.report import charts, style, tables
from dyno.report.tables.trial_table import TRIALS
from dyno.report.verdict import verdict
from dyno.results.run_data import RunData
from dyno.table import Table

MOST_GROUPS = 6  # models and sizes in the first chart
BATCHES = ("speedup", "latency")  # charts with a panel for each batch
HEADLINES = ("serve-latency", "video-timeline", *BATCHES)  # of which the first that can be drawn stands above


def leading(run: RunData) -> RunData:
    """Return the run with the rows of its first chart: the smallest batch of the first MOST_GROUPS groups.

    A group is a model, size and device; the verdict begins with its smallest batch. More can't be seen at once.
    """
    groups = run.frame.groupby(["model", "size", "device"], sort=False)
    first = (run.frame["batch"] == groups["batch"].transform("min")) & (groups.ngroup() < MOST_GROUPS)
    return replace(run, frame=run.frame[first])


def cell(run: RunData) -> str:
    """Return a fragment of a page, with everything from the run escaped; without matplotlib it has no chart."""
    leaders, said = tables.leading(run)
    if leaders:
        return "\n".join(
            [*(f"<p>{escape(line)}</p>" for line in said), *_write_chart(run), *chain(*map(_write_rows, leaders))]
        )
    return "\n".join([*_write_decisions(run), *_write_chart(run), *_write_rows(TRIALS.table(run))])


def _write_decisions(run: RunData) -> Iterator[str]:
    read = verdict.read_verdict(run)
    for finding in read.wrong:
        yield f"<p><strong>Wrong: {escape(finding.text)}</strong></p>"
    for decision in read.decisions:
        text = decision.text[:1].upper() + decision.text[1:]
        answers = "".join(f"<br>{escape(name)}: {escape(answer)}" for name, answer in decision.answers)
        yield f"<p>{escape(decision.where)}<br><strong>{escape(text)}</strong>{answers}</p>"


def _write_chart(run: RunData) -> Iterator[str]:
    if find_spec("matplotlib") is None:
        return
    by_name = {chart.name: chart for chart in charts.kinds()}
    first = leading(run)
    drawings = ((name, by_name[name].draw(first if name in BATCHES else run)) for name in HEADLINES)
    name, figure = next(((name, figure) for name, figure in drawings if figure is not None), ("", None))
    if figure is not None:
        drawing = base64.b64encode(style.svg(figure, "cell", style.laid_out(figure), on_paper=True).encode()).decode()
        shown = "width: 100%; max-width: 860px; background: #fff"
        yield f'<img style="{shown}" alt="{name}" src="data:image/svg+xml;base64,{drawing}">'


def _write_rows(table: Table) -> Iterator[str]:
    import pandas as pd

    for part in table.parts():
        cells = [[column.text(row) for column in part.columns] for row in part.rows]
        if part.title:
            yield f"<p>{escape(part.title)}</p>"
        yield pd.DataFrame(cells, columns=[c.heading for c in part.columns]).to_html(index=False, border=0)
        yield from (f"<p><small>{escape(note)}</small></p>" for note in part.notes)
