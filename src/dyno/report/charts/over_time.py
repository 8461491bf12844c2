"""`dyno show RUN --over-time FILE`: trials of a run over time, as a chart or as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.formatting import format_size, shorten_text
from dyno.report import style
from dyno.report.export import export
from dyno.report.style import INK, LINES, SPARE_COLORS, WIDTH, Chart, apply_style, choose_color
from dyno.report.tables import TableKind
from dyno.results.files import read_numbers
from dyno.results.ranking import LATENCY
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.timeline import Window
from dyno.results.trial_result import TrialResult, find_trial
from dyno.table import COUNT, TEXT, Column, Row, Table
from dyno.worker.record import write_text
from dyno.worker.spec import UserError

# Telemetry of a round's job: telemetry.npz as series of quantities on one time axis.

MAX_GAP_STEPS = 2.0  # gaps longer than this multiple of the sampling interval are pauses


@dataclass(frozen=True)
class Quantity:
    """A drawn or exported telemetry column: its name, unit, source column and scale to the unit."""

    name: str
    unit: str
    column: str
    scale: float = 1.0

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}"


MEMORY_OF_GPU = Quantity("GPU memory", "GB", "gpu_memory", 1e-9)
ON_GPU = (MEMORY_OF_GPU, Quantity("SM utilisation", "%", "gpu_util"), Quantity("GPU power", "W", "gpu_power"),
          Quantity("SM clock", "MHz", "gpu_clock"))  # fmt: skip
ON_CPU = (Quantity("memory", "GB", "rss", 1e-9), Quantity("busy processors", "", "cpu"),
          Quantity("CPU power", "W", "cpu_power"), Quantity("CPU clock", "MHz", "frequency"))  # fmt: skip


@dataclass(frozen=True)
class Series:
    """A job over time: `seconds` since it began, without pauses for other jobs, float64 [samples].

    `values` by quantity have the same shape, NaN if unknown; `timed` windows by boundary are on that axis.
    """

    seconds: np.ndarray
    values: Mapping[Quantity, np.ndarray]
    timed: Mapping[str, Window]
    paused: bool


def read_over_time(r: Round) -> Series | None:
    """Read the round's series for the device it ran on; None if nothing was stored.

    GPU memory is relative to the use before the job.
    """
    try:
        arrays = read_numbers(r.folder / "telemetry.npz")
    except (OSError, ValueError):  # absent, truncated, or not an npz
        return None
    times = arrays.get("at", np.empty(0))
    if len(times) < 2 or "epoch" not in arrays:
        return None
    columns = {name: values for name, values in arrays.items() if values.shape == times.shape}
    if "gpu_memory" in columns:
        columns["gpu_memory"] = columns["gpu_memory"] - arrays.get("gpu_before_memory", 0.0)
    if "cpu_energy" in columns:
        columns["cpu_power"] = np.concatenate([[np.nan], np.diff(columns["cpu_energy"]) / np.diff(times)])
    steps = np.diff(times, prepend=0.0)
    max_step = MAX_GAP_STEPS * float(np.median(steps))
    seconds = np.cumsum(np.minimum(steps, max_step))
    quantities = ON_GPU if r.device.startswith("cuda") else ON_CPU
    values = {each: each.scale * columns[each.column] for each in quantities if each.column in columns}
    known_values = {each: samples for each, samples in values.items() if not np.isnan(samples).all()}
    windows = [(boundary, np.subtract(window, float(arrays["epoch"]))) for boundary, window in r.facts.timed.items()]
    timed = {boundary: tuple(np.interp(window, times, seconds).tolist()) for boundary, window in windows}
    return Series(seconds, known_values, timed, bool((steps[1:] > max_step).any())) if known_values else None


def list_quantities(series: Iterable[Series]) -> list[Quantity]:
    """Return the quantities of at least one of the series, in order."""
    union = {each for one in series for each in one.values}
    return [each for each in (*ON_GPU, *ON_CPU) if each in union]


# Trials over time on one axis: memory, utilisation, power and clock of the device while each job ran.

MAX_GROUPS, MAX_TRIALS, MAX_TITLE_LENGTH = 6, 4, 60  # groups in a chart, trials in a group, characters of a title
PANEL_HEIGHT, STRIP_HEIGHT = 1.3, 0.22  # inches of a quantity's panel, and of a trial's strip

Shown = tuple[TrialResult, Series]


def over_time(run: RunData) -> Any:
    """Draw memory, utilisation, power and clock over time (R13), for each model and size at its largest batch.

    The reference comes first, then the fastest others. None without any.
    """
    groups = group_over_time(run)
    return draw_over_time(groups) if groups else None


def group_over_time(run: RunData) -> list[tuple[str, list[Shown]]]:
    """Return the first MAX_GROUPS groups of recorded trials, each with a title; single trials only on a GPU."""
    groups = ((title, series_of(trials)) for title, trials in _group_trials(run))
    return [(title, pairs) for title, pairs in groups if len(pairs) > 1 or any(t.gpu for t, _ in pairs)][:MAX_GROUPS]


def series_of(trials: Sequence[TrialResult]) -> list[Shown]:
    """Return each recorded trial with the series of its first good round that has one."""
    return [
        (t, series) for t in trials if (series := next(filter(None, map(read_over_time, t.good)), None)) is not None
    ]


def draw_over_time(groups: Sequence[tuple[str, Sequence[Shown]]]) -> Any:
    """Draw a figure: for each group a panel per quantity with a line per trial, and the timed windows below."""
    heights = [
        PANEL_HEIGHT * len(list_quantities(s for _, s in pairs)) + STRIP_HEIGHT * len(pairs) + 0.9
        for _, pairs in groups
    ]
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, sum(heights)), layout="constrained")
        subfigures = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for subfigure, (title, pairs) in zip(subfigures, groups, strict=True):
            subfigure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10.5)
            _draw_group(subfigure, pairs)
    return figure


def _group_trials(run: RunData) -> Iterator[tuple[str, list[TrialResult]]]:
    rows = run.frame.dropna(subset=[LATENCY])
    for (model, size, device), group in rows.groupby(["model", "size", "device"], sort=False):
        last = group[group["batch"] == group["batch"].max()]
        order = last.assign(first=last["verdict"] != "reference").sort_values(["first", LATENCY], kind="stable")
        rest = f" ({len(order) - MAX_TRIALS} more in results.csv)" if len(order) > MAX_TRIALS else ""
        title = (
            f"{shorten_text(model, MAX_TITLE_LENGTH)}{format_size(size)}, batch {last['batch'].iloc[0]}, {device}{rest}"
        )
        yield title, [run.trials[id] for id in order["trial"][:MAX_TRIALS]]


def _draw_group(subfigure: Any, pairs: Sequence[Shown]) -> None:
    quantities = list_quantities(series for _, series in pairs)
    heights = [*[PANEL_HEIGHT] * len(quantities), STRIP_HEIGHT * len(pairs)]
    *panels, strip = subfigure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    colors = _choose_tones([t for t, _ in pairs])
    for axes, quantity in zip(panels, quantities, strict=True):
        for (t, series), color in zip(pairs, colors, strict=True):
            if quantity in series.values:
                axes.plot(series.seconds, series.values[quantity], color=color, ls=LINES.get(t.precision, "-"), lw=1.3,
                          label=t.configuration)  # fmt: skip
        axes.set_ylabel(quantity.title if quantity.unit else quantity.name, fontsize=8.5)
        axes.set_ylim(bottom=0)
    for row, ((_, series), color) in enumerate(zip(pairs, colors, strict=True)):
        for begin, end in series.timed.values():
            strip.barh(row, end - begin, 0.7, begin, color=color)
    strip.set(ylim=(len(pairs) - 0.4, -0.6), yticks=[], xlim=(0, None))
    strip.set_ylabel("timed", fontsize=8.5, rotation=0, ha="right", va="center")
    strip.grid(visible=False)
    is_paused = any(series.paused for _, series in pairs)
    strip.set_xlabel("seconds since the job began" + (", pauses left out" if is_paused else ""), fontsize=9, color=INK)
    names = {handle.get_label(): handle for axes in panels for handle in axes.get_lines()}
    subfigure.legend(list(names.values()), list(names), loc="outside upper right", ncols=2)


def _choose_tones(trials: Sequence[TrialResult]) -> list[str]:
    """Return a colour for each trial: its backend's, or a spare one if that is taken."""
    colors: list[str] = []
    for t in trials:
        choices = (color for color in (choose_color(t.backend), *SPARE_COLORS) if color not in colors)
        colors.append(next(choices, INK))
    return colors


OVER_TIME = Chart(
    "over-time",
    "The reference and the fastest trials on one time axis, their first rounds, seen from outside the job: on a GPU "
    "memory above the level before the job, SM utilisation, power and clock; else memory, busy processors, power where "
    "it can be read, and clock. Bars below: timing.",
    over_time,
    14,
)


SERIES = TableKind("over-time", "Over time", "A row for each look at a job: memory, utilisation, power and clock.",
                   command="dyno show RUN --over-time FILE.csv")  # fmt: skip
FILE_SUFFIXES = (".svg", ".png", ".csv")


def save(run: RunData, path: Path, choices: Sequence[str] = ()) -> Path:
    """Write the telemetry of the trials' first rounds on one time axis: drawn as .svg or .png, every sample as .csv.

    `choices` are trials by id or BACKEND/PRECISION; by default those of the report: the reference and the fastest
    others of each group. Raises `UserError` for a file that can't be written, and if nothing was recorded.
    """
    if path.suffix not in FILE_SUFFIXES:
        raise UserError(f"{path} is no chart's file name; give a name that ends in {', '.join(FILE_SUFFIXES)}")
    trials = [find_trial(run.records, choice) for choice in choices]
    if choices:
        title = ", ".join(dict.fromkeys(f"{t.model}{format_size(t.size)}, batch {t.batch}, {t.device}" for t in trials))
        groups = [(title, series_of(list({t.id: t for t in trials}.values())))]
    else:
        groups = group_over_time(run)
    missing_labels = [t.label for t in trials if t.id not in {shown.id for _, group in groups for shown, _ in group}]
    if missing_labels:
        raise UserError(f"nothing was recorded over time of {missing_labels[0]}; choose another trial")
    if not groups:
        raise UserError(f"{run.records.folder} has no two trials with a recording over time; choose some with --trials")
    if path.suffix == ".csv":
        write_text(path, export([make_table([shown for _, group in groups for shown in group])], "csv"))
    elif path.suffix == ".png":
        style.save(draw_over_time(groups), path)
    else:
        write_text(path, style.render_svg(draw_over_time(groups), "over-time", on_paper=True))
    return path


def make_table(pairs: Sequence[Shown]) -> Table:
    """Return a table with one row per telemetry sample of each trial, with the boundary timed at that moment."""
    quantities = list_quantities(series for _, series in pairs)
    columns = (
        Column("trial", "the id", kind=TEXT),
        Column("label", "of the trial", kind=TEXT),
        Column("look", "number, from 1", kind=COUNT),
        Column("seconds", "since the job began, without pauses", "s"),
        Column("timed", "the boundary that was timed then", kind=TEXT),
        *(Column(each.column, each.name, each.unit) for each in quantities),
    )
    rows: list[Row] = []
    for t, series in pairs:
        for k, seconds in enumerate(series.seconds.tolist()):
            timed = next((name for name, (begin, end) in series.timed.items() if begin <= seconds <= end), "")
            values = {each.column: float(samples[k]) for each, samples in series.values.items()}
            rows.append({"trial": t.id, "label": t.label, "look": k + 1, "seconds": seconds, "timed": timed, **values})
    return SERIES.build(columns, rows)
