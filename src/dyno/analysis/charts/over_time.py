"""Trials over time on one axis: memory, utilisation, power and clock of the device while each job ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dyno.analysis.formatting import short, sized
from dyno.analysis.presentation.chart import Chart
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.style import INK, LINES, SPARE, WIDTH, color, styled
from dyno.analysis.telemetry.over_time import Series, quantities, read

GROUPS, LONGEST = 3, 60  # groups of trials in one chart, and characters of a title
PANEL, STRIP = 1.3, 0.22  # inches of a quantity's panel, and of a trial's row of what was timed

Shown = tuple[TrialResult, Series]


def over_time(run: RunData) -> Any:
    """Draw the reference and the fastest other trial of each model and size, in its largest batch; None without any."""
    found = groups(run)
    return draw(found) if found else None


def groups(run: RunData) -> list[tuple[str, list[Shown]]]:
    """Return the first GROUPS pairs of trials that were recorded, each with a title."""
    return [(title, shown) for title, trials in _group_trials(run) if len(shown := series_of(trials)) > 1][:GROUPS]


def series_of(trials: Sequence[TrialResult]) -> list[Shown]:
    """Return each trial with the series of its first good round that has one."""
    return [(t, found) for t in trials if (found := next(filter(None, map(read, t.good)), None)) is not None]


def draw(groups: Sequence[tuple[str, Sequence[Shown]]]) -> Any:
    """Draw a figure: for each group a panel per quantity with a line per trial, and the timed stretches below."""
    heights = [PANEL * len(quantities(s for _, s in shown)) + STRIP * len(shown) + 0.9 for _, shown in groups]
    with styled() as figure_class:
        figure = figure_class((WIDTH, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, (title, shown) in zip(parts, groups, strict=True):
            part.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10.5)
            _draw_group(part, shown)
    return figure


def _group_trials(run: RunData) -> Iterator[tuple[str, list[TrialResult]]]:
    rows = run.frame.dropna(subset=[LATENCY])
    for (model, size, device), group in rows.groupby(["model", "size", "device"], sort=False):
        last = group[group["batch"] == group["batch"].max()]
        order = last.assign(first=last["verdict"] != "reference").sort_values(["first", LATENCY], kind="stable")
        title = f"{short(model, LONGEST)}{sized(size)}, batch {last['batch'].iloc[0]}, {device}"
        yield title, [run.trials[id] for id in order["trial"][:2]]


def _draw_group(part: Any, shown: Sequence[Shown]) -> None:
    wanted = quantities(series for _, series in shown)
    heights = [*[PANEL] * len(wanted), STRIP * len(shown)]
    *panels, strip = part.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    tones = _choose_tones([t for t, _ in shown])
    for axes, quantity in zip(panels, wanted, strict=True):
        for (t, series), tone in zip(shown, tones, strict=True):
            if quantity in series.values:
                axes.plot(series.seconds, series.values[quantity], color=tone, ls=LINES.get(t.precision, "-"), lw=1.3,
                          label=t.configuration)  # fmt: skip
        axes.set_ylabel(quantity.title if quantity.unit else quantity.name, fontsize=8.5)
        axes.set_ylim(bottom=0)
    for row, ((_, series), tone) in enumerate(zip(shown, tones, strict=True)):
        for begin, end in series.timed.values():
            strip.barh(row, end - begin, 0.7, begin, color=tone)
    strip.set(ylim=(len(shown) - 0.4, -0.6), yticks=[], xlim=(0, None))
    strip.set_ylabel("timed", fontsize=8.5, rotation=0, ha="right", va="center")
    strip.grid(visible=False)
    paused = any(series.paused for _, series in shown)
    strip.set_xlabel("seconds since the job began" + (", pauses left out" if paused else ""), fontsize=9, color=INK)
    names = {handle.get_label(): handle for axes in panels for handle in axes.get_lines()}
    part.legend(list(names.values()), list(names), loc="outside upper right", ncols=2)


def _choose_tones(trials: Sequence[TrialResult]) -> list[str]:
    """Return a colour for each trial: its backend's, or a spare one where an earlier trial has taken that."""
    taken: list[str] = []
    for t in trials:
        spare = (tone for tone in (color(t.backend), *SPARE) if tone not in taken)
        taken.append(next(spare, INK))
    return taken


OVER_TIME = Chart(
    "over-time",
    "The reference and the fastest trial on one time axis, their first rounds, seen from outside the job: on a GPU its "
    "memory above what was used before, SM utilisation, power and clock; else memory, busy processors, power where it "
    "can be read, and clock. Bars below: timing.",
    over_time,
    14,
)
