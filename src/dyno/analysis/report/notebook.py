"""A run as a notebook shows it: the decisions, the trials and one chart, as plain HTML that needs no script."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from importlib.util import find_spec

from dyno.analysis import charts, style
from dyno.analysis.presentation.table import Table
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables.trial_table import TRIALS
from dyno.analysis.verdict import verdict

MOST_GROUPS = 6  # models and sizes in the first chart
HEADLINES = ("speedup", "latency")  # charts of which the first that can be drawn stands above


def leading(run: RunData) -> RunData:
    """The run with what its first chart shows: the smallest batch of each model and size, of which the verdict speaks
    first, and no more of these than can be seen at once."""
    groups = run.frame.groupby(["model", "size", "device"], sort=False)
    first = (run.frame["batch"] == groups["batch"].transform("min")) & (groups.ngroup() < MOST_GROUPS)
    return replace(run, frame=run.frame[first])


def cell(run: RunData) -> str:
    """A fragment of a page, with everything from the run escaped; without matplotlib it has no chart."""
    return "\n".join([*_decisions(run), *_chart(run), *_trials(TRIALS.table(run))])


def _decisions(run: RunData) -> Iterator[str]:
    read = verdict.read(run)
    for finding in read.wrong:
        yield f"<p><strong>Wrong: {escape(finding.text)}</strong></p>"
    for decision in read.decisions:
        text = decision.text[:1].upper() + decision.text[1:]
        answers = "".join(f"<br>{escape(name)}: {escape(answer)}" for name, answer in decision.answers)
        yield f"<p>{escape(decision.where)}<br><strong>{escape(text)}</strong>{answers}</p>"


def _chart(run: RunData) -> Iterator[str]:
    if find_spec("matplotlib") is None:
        return
    by_name = {chart.name: chart for chart in charts.kinds()}
    first = leading(run)
    figure = next((drawn for name in HEADLINES if (drawn := by_name[name].draw(first)) is not None), None)
    if figure is not None:
        drawing = base64.b64encode(style.svg(figure, "cell", style.laid_out(figure), on_paper=True).encode()).decode()
        shown = "width: 100%; max-width: 860px; background: #fff"
        yield f'<img style="{shown}" alt="{HEADLINES[0]}" src="data:image/svg+xml;base64,{drawing}">'


def _trials(table: Table) -> Iterator[str]:
    import pandas as pd

    for part in table.parts():
        cells = [[column.text(row) for column in part.columns] for row in part.rows]
        if part.title:
            yield f"<p>{escape(part.title)}</p>"
        yield pd.DataFrame(cells, columns=[c.heading for c in part.columns]).to_html(index=False, border=0)
        yield from (f"<p><small>{escape(note)}</small></p>" for note in part.notes)
