"""The GPU over time: memory and utilisation while each job ran, several configurations beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dyno.formatting import short, sized
from dyno.report.style import FAINT, INK, WIDTH, Chart, color, styled
from dyno.results import timeline as gpu_trace
from dyno.results.ranking import LATENCY
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult

BESIDE = 4  # configurations in one row of panels
MOST_ROWS = 6
LONGEST = 26  # characters of a panel's title

Shown = tuple[TrialResult, Round, gpu_trace.Trace]


def draw_timeline(run: RunData) -> Any:
    """Draw memory and SM utilisation over time (R13), a row per model and size (its largest batch), a column per trial.

    The reference stands first, then the fastest; the shaded stretches were timed. None without any.
    """
    rows = list(_group_trials(run))[:MOST_ROWS]
    if not rows:
        return None
    with styled() as figure_class:
        figure = figure_class((WIDTH, 3.1 * len(rows)), layout="constrained")
        parts = np.atleast_1d(figure.subfigures(len(rows), 1))
        for part, (title, shown) in zip(parts, rows, strict=True):
            part.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10.5)
            panels = part.subplots(2, len(shown), squeeze=False, sharex=True, sharey="row")
            for column, each in zip(panels.T, shown, strict=True):
                _draw_panel(column, *each)
            panels[0, 0].set_ylabel("memory, GB")
            panels[1, 0].set_ylabel("utilisation, %")
            panels[1, 0].set_ylim(0, 105)
            panels[0, 0].set_ylim(bottom=0)
            part.supxlabel("seconds since the job began", fontsize=9)
    return figure


def _group_trials(run: RunData) -> Iterator[tuple[str, list[Shown]]]:
    known = {t.id: found for t in run.records if (found := _find_trace(t)) is not None}
    table = run.frame[run.frame["trial"].isin(list(known))].dropna(subset=[LATENCY])
    for (model, size, device), group in table.groupby(["model", "size", "device"], sort=False):
        last = group[group["batch"] == group["batch"].max()]
        order = last.assign(first=last["verdict"] != "reference").sort_values(["first", LATENCY], kind="stable")
        more = f" ({len(order) - BESIDE} more in results.csv)" if len(order) > BESIDE else ""
        title = f"{short(model, 60)}{sized(size)}, batch {last['batch'].iloc[0]}, {device}{more}"
        yield title, [known[i] for i in order["trial"][:BESIDE]]


def _find_trace(t: TrialResult) -> Shown | None:
    return next(((t, r, r.trace) for r in t.good if r.trace is not None and len(r.trace.at)), None)


def _draw_panel(column: Any, t: TrialResult, r: Round, trace: gpu_trace.Trace) -> None:
    seconds = trace.at - trace.epoch
    lines = ((trace.column("memory") - trace.before_memory) * 1e-9, trace.column("util"))
    for axes, values in zip(column, lines, strict=True):
        for begin, end in r.facts.timed.values():
            axes.axvspan(begin - trace.epoch, end - trace.epoch, color=FAINT, lw=0)
        axes.plot(seconds, values, color=color(t.backend), lw=1.4)
        axes.set_xlim(left=0)
    column[0].set_title(short(t.configuration, LONGEST), fontsize=9, color=INK)


GPU = Chart(
    "gpu",
    "The GPU while each job ran (its first round), from outside the job: memory above what was used before, and SM "
    "utilisation. Shaded: timing.",
    draw_timeline,
    13,
)
