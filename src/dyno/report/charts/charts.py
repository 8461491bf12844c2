"""Charts of a run's trials: latency, speed-up, accuracy, throughput against batch and size, rounds, confusion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.formatting import (
    NO_IMAGE,
    format_limits,
    format_number,
    format_ratio,
    format_size,
    is_bounded,
    name_items,
    short_bound,
    shorten_text,
    show,
)
from dyno.report.style import (
    HATCHES,
    INK,
    LINES,
    PAPER,
    WIDTH,
    Chart,
    add_tooltip,
    apply_style,
    choose_color,
    choose_marker,
    make_logarithmic,
)
from dyno.results import ranking
from dyno.results.limits import Limit
from dyno.results.metrics import accuracy, agreement
from dyno.results.metrics.accuracy import Confusion
from dyno.results.metrics.metric import Metric
from dyno.results.ranking import LATENCY, THROUGHPUT, configuration_of, list_winners, rank_goals
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.worker.tasks.postprocess import ImagePlacement

if TYPE_CHECKING:
    import pandas as pd

# Lines over batch or image size: a panel per combination of the other keys, a line per configuration.

MAX_PANELS = 12
MAX_CONFIGURATIONS = 12  # distinguishable lines or bars of one panel
MAX_NAME_LENGTH = 44  # characters of a name on an axis

Panel = tuple[str, "pd.DataFrame"]


def scaling_series(run: RunData, axis: str) -> Any:
    """Draw throughput, and FPS from latency, over batch or image size (R35); None without a panel."""
    rows = ranking.list_usable(run.frame).dropna(subset=[LATENCY])
    unit = f"{name_items(*rows['size'])}/s"
    columns = {THROUGHPUT: f"throughput, {unit}", "fps": f"FPS, batch after batch, {unit}"}
    return draw_lines(rows.assign(fps=ranking.read_fps(rows)), axis, columns)


def draw_lines(rows: pd.DataFrame, axis: str, columns: Mapping[str, str]) -> Any:
    """Draw labelled columns of the rows over the axis; None with nothing to draw.

    Panels are in two columns: two columns of one group, or two groups, are side by side.
    """
    panels, omitted_count = panels_of(list_configurations(rows), axis)
    if not panels:
        return None
    plots = [(title, group, column) for title, group in panels for column in columns]
    column_count = min(2, len(plots))
    row_count = math.ceil(len(plots) / column_count)
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, 2.9 * row_count + 0.8), layout="constrained")
        grid = figure.subplots(row_count, column_count, squeeze=False).ravel()
        for axes, (title, group, column) in zip(grid, plots, strict=False):
            draw(axes, group, axis, column)
            axes.set_ylabel(columns[column])
            axes.set_title(title if column == next(iter(columns)) else "")
            axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}" if v >= 10 else f"{v:g}")
        for axes in grid[len(plots) :]:
            axes.remove()
        draw_legend(figure, panels, omitted_count)
    return figure


def panels_of(rows: pd.DataFrame, axis: str) -> tuple[list[Panel], int]:
    """Return title and rows of each panel with at least two values on the axis, and the number of panels left out."""
    rows = rows.assign(place=[place_of(v) for v in rows[axis]])
    keys = [k for k in ("model", "size", "batch", "device") if k != axis]
    panels = [(title_of(keys, v), g) for v, g in rows.groupby(keys, sort=False) if g["place"].nunique() > 1]
    return panels[:MAX_PANELS], max(0, len(panels) - MAX_PANELS)


def draw(axes: Any, group: pd.DataFrame, axis: str, column: str) -> None:
    """Draw a line per configuration on an axis from 0, with a shaded interval if the column has one."""
    for _, series in group.groupby("configuration", sort=False):
        first, points = series.iloc[0], series.dropna(subset=[column]).sort_values("place")
        axes.plot(points["place"], points[column], **choose_stroke(first))
        if f"{column}_low" in series:
            bounded_rows = points.dropna(subset=[f"{column}_low"])
            limits = bounded_rows[f"{column}_low"], bounded_rows[f"{column}_high"]
            is_narrow = [is_bounded(*pair) for pair in zip(*limits, strict=True)]
            axes.fill_between(
                bounded_rows["place"], *limits, where=is_narrow, color=choose_color(first["backend"]), alpha=0.1, lw=0
            )
    ticks = sorted(set(group["place"]))
    names = {place_of(v): str(v) for v in group[axis]}
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [names[t] for t in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("batch" if axis == "batch" else "image size, pixels")
    # A wide interval must not squeeze the lines.
    axes.set_ylim(0, min(axes.get_ylim()[1], 2 * group[column].max()))


def list_configurations(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of the first MAX_CONFIGURATIONS, with `configuration` and `twin`, its index among look-alikes."""
    rows = rows.assign(configuration=[configuration_of(r) for _, r in rows.iterrows()])
    rows = rows[rows["configuration"].isin(list(dict.fromkeys(rows["configuration"]))[:MAX_CONFIGURATIONS])]
    twin_indices: dict[tuple[str, str], dict[str, int]] = {}
    keys = list(zip(rows["configuration"], rows["backend"], rows["precision"], strict=True))
    for name, *kind in keys:
        names = twin_indices.setdefault((kind[0], kind[1]), {})
        names.setdefault(name, len(names))
    return rows.assign(twin=[twin_indices[backend, precision][name] for name, backend, precision in keys])


def choose_stroke(row: Any) -> dict[str, Any]:
    """Return a configuration's line style; of two that differ only in options, the second has hollow markers."""
    color = choose_color(row["backend"])
    fill = {"mfc": "white", "mec": color, "mew": 1.3} if row["twin"] else {"mec": "white", "mew": 0.6}
    line_style = {
        "color": color,
        "marker": choose_marker(row["precision"]),
        "ls": LINES.get(row["precision"], "-"),
        "lw": 1.6,
        "ms": 6,
    }
    return line_style | fill


def draw_legend(figure: Any, panels: list[Panel], omitted_count: int = 0) -> None:
    """Draw one legend below all panels, with the number of panels left out."""
    from matplotlib.lines import Line2D

    rows = one_of_each(panels)
    place_legend(
        figure,
        [Line2D([], [], label=shorten_text(r["configuration"], MAX_NAME_LENGTH), **choose_stroke(r)) for r in rows],
        omitted_count,
    )


def one_of_each(panels: list[Panel]) -> list[Any]:
    """Return one row of each drawn configuration, in order."""
    first_rows: dict[str, Any] = {}
    for _, group in panels:
        for _, r in group.iterrows():
            first_rows.setdefault(r["configuration"], r)
    return list(first_rows.values())


def place_legend(figure: Any, handles: list[Any], omitted_count: int) -> None:
    """Place the handles below the figure, in as many columns as their names allow."""
    columns = 4 if max(len(h.get_label()) for h in handles) < 22 else 2
    title = f"{omitted_count} more panels are left out; their numbers are in tables.md" if omitted_count else None
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.6, title=title)


def title_of(keys: list[str], values: tuple[Any, ...]) -> str:
    """Return a panel's title from the values common to its rows."""
    fields = dict(zip(keys, values, strict=True))
    parts = [shorten_text(fields["model"], MAX_NAME_LENGTH)] + [
        f"{k} {fields[k]}" for k in ("size", "batch") if k in fields and (k, fields[k]) != ("size", NO_IMAGE)
    ]
    return ", ".join(parts + ([fields["device"]] if fields["device"] != "cpu" else []))


def place_of(value: Any) -> float:
    """Return the axis position of a batch or a size; for a non-square size, the square root of its area."""
    height, _, width = str(value).partition("x")
    return math.sqrt(float(height) * float(width)) if width else float(height)


MAX_BARS = 80  # rows in one figure; results.csv has all
MAX_ACCURACY_PANELS = 6
MAX_NAMED = 4
ROW_HEIGHT = 0.27  # inches per bar
LOG_AXIS_RATIO = 10  # largest ratio of values on a linear axis

SPEED_LIMITS = {LATENCY: ("latency_ms_low", "latency_ms_high"), THROUGHPUT: ("throughput_low", "throughput_high")}


def draw_latency(run: RunData) -> Any:
    """Draw bars of latency per batch with intervals between processes, a panel per model, size and batch (R15)."""
    rows = run.frame.dropna(subset=[LATENCY])
    number_column = "latency", lambda r: show(r[LATENCY] * 1e-3, "duration")
    return rows_figure(run, rows, _latency_panel, "latency per batch, ms", *number_column)


def draw_speedup(run: RunData) -> Any:
    """Draw speed-ups over the reference with their intervals.

    One panel per model, size and batch with a bounded speed-up; None without such a panel.
    """
    rows = keep_compared(run.frame.dropna(subset=["speedup"]))
    title = "times as fast as the reference"
    return rows_figure(run, rows, _speedup_panel, title, "speed-up", format_speedup) if len(rows) else None


def keep_compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of every reference with at least one bounded speed-up against it."""
    references = [r["reference"] for _, r in rows.iterrows() if r["verdict"] != "reference" and is_sure(r)]
    return rows[rows["reference"].isin(references)]


def is_sure(row: pd.Series) -> bool:
    """Return whether the speed-up is known within a factor of two, or has no interval."""
    return bool(row["speedup_low"] != row["speedup_low"] or is_bounded(row["speedup_low"], row["speedup_high"]))


def format_speedup(row: pd.Series) -> str:
    """Return the speed-up as text, or the useful limit of a wide interval."""
    return f"{row['speedup']:.2f}x" if is_sure(row) else short_bound(row["speedup_low"], row["speedup_high"])


def _latency_panel(axes: Any, rows: pd.DataFrame) -> None:
    limit = set_scale(axes, rows[LATENCY], rows["latency_ms_high"].max())
    is_logarithmic = axes.get_xscale() == "log"
    for y, (_, row) in enumerate(rows.iterrows()):
        if is_logarithmic:  # the length of a bar means nothing on a logarithmic axis
            _plot_point(axes, row, row[LATENCY], y)
        else:
            hatch = HATCHES.get(row["precision"], "")
            (bar,) = axes.barh(
                y, row[LATENCY], 0.72, color=choose_color(row["backend"]), hatch=hatch, edgecolor="white", lw=0
            )
            add_tooltip(bar, _describe_row(row))
        _draw_whisker(axes, row["latency_ms_low"], row["latency_ms_high"], y, limit)


def _speedup_panel(axes: Any, rows: pd.DataFrame) -> None:
    axes.axvline(1, color=INK, lw=1)
    sure_rows = [r for _, r in rows.iterrows() if is_sure(r)]  # a wild estimate must not squeeze the others
    intervals = [r["speedup_high"] for r in sure_rows if is_bounded(r["speedup_low"], r["speedup_high"])]
    limit = set_scale(axes, [*(r["speedup"] for r in sure_rows), 1], max(intervals, default=float("nan")))
    for y, (_, r) in enumerate(rows.iterrows()):
        marker_style = {} if is_sure(r) else {"mfc": "white", "mec": choose_color(r["backend"]), "mew": 1.3}
        _plot_point(axes, r, r["speedup"], y, **marker_style)
        _draw_whisker(axes, r["speedup_low"], r["speedup_high"], y, limit)


def _plot_point(axes: Any, r: pd.Series, x: float, y: float, **style: Any) -> None:
    style = {"mec": "white", "mew": 0.7, "ms": 9} | style
    add_tooltip(
        axes.plot(x, y, choose_marker(r["precision"]), color=choose_color(r["backend"]), **style)[0], _describe_row(r)
    )


def _describe_row(row: pd.Series) -> str:
    """Describe a row: its configuration with latency, images per second and speed-up."""
    interval = format_limits(row["latency_ms_low"], row["latency_ms_high"], lambda v: show(v * 1e-3, "duration"))
    parts = [f"{configuration_of(row)}, batch {row['batch']}: {show(row[LATENCY] * 1e-3, 'duration')}{interval}"]
    if row[THROUGHPUT] == row[THROUGHPUT]:
        parts.append(f"{format_number(row[THROUGHPUT])} {name_items(row['size'])}/s")
    if row["speedup"] == row["speedup"] and row["verdict"] != "reference":
        parts.append(f"{format_ratio(row['speedup'], row['speedup_low'], row['speedup_high'])}, {row['verdict']}")
    return "; ".join(parts)


def set_scale(axes: Any, values: Iterable[float], interval_end: float) -> float:
    """Scale the horizontal axis for the values and return its end; `interval_end` ends the widest interval (NaN: none).

    It starts at 0, or is logarithmic if values differ by more than a factor of LOG_AXIS_RATIO.
    """
    low, high = min(values), max(values)
    limit = _choose_axis_end(high, interval_end)
    if high > LOG_AXIS_RATIO * low > 0:
        limit *= 1.2
        make_logarithmic(axes, "x", low / 1.6, limit)
    else:
        axes.set_xlim(0, limit)
    return limit


def _choose_axis_end(value: float, high: float) -> float:
    """Return the end of an axis: beyond the widest interval, but without squeezing the values."""
    return float(min(max(1.2 * value, 1.05 * high) if high == high else 1.2 * value, 2 * value))


def _draw_whisker(axes: Any, low: float, high: float, y: float, limit: float) -> None:
    if low != low:
        return
    left = axes.get_xlim()[0]
    begin, end = (min(max(each, left), limit) for each in (low, high))
    axes.plot([begin, end], [y, y], color=INK, lw=1.1)
    # An arrow marks an interval that continues beyond the axis; a plain end would be read as its limit.
    for x, value in ((begin, low), (end, high)):
        shape = "<" if value < left else ">" if value > limit else "|"
        axes.plot([x], [y], shape, color=INK, ms=5, mew=1.1, clip_on=False)


def rows_figure(run: RunData, rows: pd.DataFrame, draw_panel: Any, label: str, heading: str, format_value: Any) -> Any:
    """Draw panels of rows in the order of the trials' table: names on the left, numbers with a heading on the right.

    None without rows.
    """
    keys = ["model", "size", "batch", "device"]
    groups, left_out = _choose_groups([(title_of(keys, v), g) for v, g in rows.groupby(keys, sort=False)])
    if not groups:
        return None
    heights = [max(len(g), 2) * ROW_HEIGHT for _, g in groups]
    height = sum(heights) + 0.62 * len(groups) + 0.35
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, height))
        grid = figure.add_gridspec(
            len(groups), 1, height_ratios=heights, hspace=0.62 / (sum(heights) / len(heights)),
            left=0.3, right=0.88, top=1 - 0.3 / height, bottom=0.5 / height,
        )  # fmt: skip
        for i, (title, group) in enumerate(groups):
            group_rows = ranking.order_frame(group, run.trials)
            axes = figure.add_subplot(grid[i])
            draw_panel(axes, group_rows)
            _name_rows(axes, group_rows, format_value)
            text_style = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
            axes.annotate(heading, (1.015, 0), (0, -3), **text_style)  # above it would overlap the title
            axes.set_title(title, x=0 if len(title) < 60 else -0.4)
        axes.set_xlabel(label)
        if left_out:
            figure.text(0.88, 0, f"{left_out} more groups are in results.csv", ha="right", va="bottom", fontsize=8)
    return figure


def _name_rows(axes: Any, rows: pd.DataFrame, format_value: Any) -> None:
    axes.set_yticks(range(len(rows)), [shorten_text(configuration_of(r), MAX_NAME_LENGTH) for _, r in rows.iterrows()])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    for y, (_, r) in enumerate(rows.iterrows()):
        axes.text(1.015, y, format_value(r), transform=axes.get_yaxis_transform(), va="center", fontweight="bold")


def draw_accuracy(run: RunData, speed: str = LATENCY) -> Any:
    """Draw accuracy over latency or throughput with 95 % intervals on both axes and the frontier.

    Sizes share a panel if a budget lets them compete; batches share one if images per second are compared. None without
    a panel of at least two accuracies.
    """
    panels = [*_accuracy_panels(run, speed)][:MAX_ACCURACY_PANELS]
    if not panels:
        return None
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, 3.9 * len(panels) + 0.5), layout="constrained")
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, group, metric) in zip(grid, panels, strict=True):
            frontier = ranking.find_pareto(group, speed, metric.column)
            _accuracy_panel(axes, group, frontier, speed, metric)
            _draw_limits(axes, run.limits if speed == LATENCY else ())
            axes.set_title(title, pad=20)
            axes.text(0, 1.03, _named_frontier(frontier, group), transform=axes.transAxes, fontsize=8.5)
        _add_legend(figure, ranking.list_usable(run.frame).dropna(subset=[speed]))
    return figure


def _accuracy_panels(run: RunData, speed: str) -> Iterator[tuple[str, pd.DataFrame, Metric]]:
    for contest in rank_goals(run):
        metric = contest.metric
        if metric.column not in contest.group:
            continue
        rows = ranking.list_usable(contest.group).dropna(subset=[speed, metric.column])
        keys = ["model", *([] if contest.sizes else ["size"]), *(["batch"] if speed == LATENCY else []), "device"]
        for values, group in rows.groupby(keys, sort=False):
            if group[metric.column].nunique() > 1:  # equal accuracies need no chart
                yield title_of(keys, values), group, metric


def _named_frontier(frontier: pd.DataFrame, group: pd.DataFrame) -> str:
    """List the frontier's names, which would cover crowded points."""
    keys = [k for k in ("size", "batch") if group[k].nunique() > 1]
    names = [
        " ".join([shorten_text(configuration_of(r), MAX_NAME_LENGTH), *(f"{k} {r[k]}" for k in keys)])
        for _, r in frontier.iterrows()
    ]
    rest = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return "frontier (ringed), fastest first: " + ", ".join(names[:MAX_NAMED]) + rest


def _accuracy_panel(axes: Any, group: pd.DataFrame, frontier: pd.DataFrame, speed: str, metric: Metric) -> None:
    drawstyle = "steps-post" if speed == LATENCY else "steps-pre"
    axes.plot(frontier[speed], frontier[metric.column], drawstyle=drawstyle, color=INK, lw=1, ls=(0, (4, 2)), zorder=1)
    ids = set(frontier["trial"])
    limit = set_scale(axes, group[speed], group[SPEED_LIMITS[speed][1]].max())
    for _, row in group.iterrows():
        color, value = choose_color(row["backend"]), row[metric.column]
        low, high = (row[name] for name in SPEED_LIMITS[speed])
        if is_bounded(low, high):
            axes.plot([low, min(high, limit)], [value] * 2, color=color, lw=1.1, alpha=0.8)
            if high > limit:  # a plain end would be read as the interval's limit
                axes.plot([limit], [value], ">", color=color, ms=5)
        axes.plot([row[speed]] * 2, metric.interval(row), color=color, lw=1.1, alpha=0.8)
        ring = {"mec": INK, "mew": 1.6, "ms": 11} if row["trial"] in ids else {"mec": "white", "mew": 0.8, "ms": 9}
        _plot_point(axes, row, row[speed], value, zorder=4 if row["trial"] in ids else 3, **ring)
    axes.margins(y=0.12)
    if axes.get_xscale() == "linear":
        axes.set_xlim(left=max(0.0, 1.1 * group[speed].min() - 0.1 * limit))
    label = "latency per batch, ms" if speed == LATENCY else f"{name_items(*group['size'])} per second"
    axes.set_xlabel(f"{label} (95 % interval between processes)")
    axes.set_ylabel(f"{metric.label}, % (95 % interval)")


def _draw_limits(axes: Any, limits: Sequence[Limit]) -> None:
    """Draw the limit on the median latency as a line, if it is on the axis."""
    for limit in (each for each in limits if each.name == "p50"):
        x = 1e3 * limit.maximum
        left, right = axes.get_xlim()
        if left < x < right:
            axes.axvline(x, color=INK, lw=1, ls=":", zorder=1)
            axes.text(x, 0.99, f" limit {limit}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)


def _add_legend(figure: Any, rows: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    configurations = dict.fromkeys(zip(rows["backend"], rows["precision"], strict=True))
    handles = [Line2D([], [], color=choose_color(b), marker=choose_marker(p), ls="", mec="white", ms=8,
                      label=f"{b} {p}") for b, p in configurations]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=1.2)


def _choose_groups(groups: list[Panel]) -> tuple[list[Panel], int]:
    panels: list[Panel] = []
    bars = 0
    for title, group in groups:
        if bars + len(group) > MAX_BARS and panels:
            break
        panels.append((title, group.nsmallest(MAX_BARS, LATENCY)))
        bars += len(group)
    return panels, len(groups) - len(panels)


LATENCIES = Chart(
    "latency",
    "Latency per batch over the rounds; whiskers are the 95 % interval between processes; an arrow marks one that "
    "continues.",
    draw_latency,
    1,
)
SPEEDUP = Chart(
    "speedup",
    "Speed-up over the reference of the same model, size and batch, with its 95 % interval; an arrow marks one that "
    "leaves the axis. Hollow: uncertain by more than a factor of two.",
    draw_speedup,
    2,
)
ACCURACY_LATENCY = Chart(
    "accuracy-latency",
    "Accuracy against latency, with 95 % intervals on both axes. Ringed: no trial is both faster and more accurate.",
    draw_accuracy,
    4,
)
ACCURACY_THROUGHPUT = Chart(
    "accuracy-throughput", "Accuracy against throughput at every batch, with 95 % intervals on both axes.",
    lambda run: draw_accuracy(run, THROUGHPUT), 5,
)  # fmt: skip
THROUGHPUT_BATCH = Chart(
    "throughput-batch", "Throughput (batches overlap) and FPS (one batch after another) against the batch.",
    lambda run: scaling_series(run, "batch"), 6,
)  # fmt: skip
THROUGHPUT_SIZE = Chart(
    "throughput-size", "Throughput and FPS against the image size.", lambda run: scaling_series(run, "size"), 7
)


# Charts as in published comparisons: bars for all models, speed-up over size, TFLOPS under the peak.

FLAT_LABEL_BARS, UPRIGHT_LABEL_BARS = 12, 30  # most bars of a panel with horizontal and with vertical numbers


def inference_time(run: RunData) -> Any:
    """Draw grouped bars of every model's latency on a log axis, one panel per size and batch (R15).

    Panels with a single model are left out; None without any panel.
    """
    from matplotlib.patches import Patch

    rows = list_configurations(ranking.list_usable(run.frame).dropna(subset=[LATENCY]))
    groups = [
        (f"{format_size(size, 'size ')}, batch {batch}".lstrip(", "), group)
        for (size, batch), group in rows.groupby(["size", "batch"], sort=False)
        if group["model"].nunique() > 1
    ]
    panels, omitted_count = groups[:MAX_PANELS], max(0, len(groups) - MAX_PANELS)
    if not panels:
        return None
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, 2.7 * len(panels) + 0.7), layout="constrained")
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, group) in zip(grid, panels, strict=True):
            _draw_bars(axes, group)
            axes.set_title(title)
        handles = [
            Patch(label=shorten_text(r["configuration"], MAX_NAME_LENGTH), **_choose_fill(r))
            for r in one_of_each(panels)
        ]
        place_legend(figure, handles, omitted_count)
    return figure


def _draw_bars(axes: Any, group: pd.DataFrame) -> None:
    models, configurations = list(dict.fromkeys(group["model"])), list(dict.fromkeys(group["configuration"]))
    width, count = 0.84 / len(configurations), len(models) * len(configurations)
    for index, name in enumerate(configurations):
        for _, row in group[group["configuration"] == name].iterrows():
            x = models.index(row["model"]) + (index - (len(configurations) - 1) / 2) * width
            axes.bar(x, row[LATENCY], 0.92 * width, **_choose_fill(row))
            if count <= UPRIGHT_LABEL_BARS:
                axes.annotate(
                    format_number(row[LATENCY]), (x, row[LATENCY]), (0, 2), textcoords="offset points", ha="center",
                    va="bottom", fontsize=7, rotation=90 if count > FLAT_LABEL_BARS else 0,
                )  # fmt: skip
    low, high = group[LATENCY].min(), group[LATENCY].max()
    make_logarithmic(axes, "y", low / 2, high * (4 if FLAT_LABEL_BARS < count <= UPRIGHT_LABEL_BARS else 1.6))
    axes.set_ylabel("latency per batch, ms")
    label_style = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, models)) > 70 else {}
    axes.set_xticks(range(len(models)), [shorten_text(m, MAX_NAME_LENGTH) for m in models], **label_style)
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")


def draw_speedups(run: RunData, axis: str) -> Any:
    """Draw the speed-up over the reference by image size or batch, with its intervals (R35).

    Unbounded speed-ups are left out.
    """
    rows = keep_compared(ranking.list_usable(run.frame).dropna(subset=["speedup"]))
    rows = rows.loc[[is_sure(r) for _, r in rows.iterrows()]]
    figure = draw_lines(rows, axis, {"speedup": "times as fast as the reference"})
    for axes in figure.axes if figure else ():
        axes.axhline(1, color=INK, lw=0.9, zorder=1)
    return figure


def draw_tflops(run: RunData, axis: str) -> Any:
    """Draw the achieved TFLOPS over batch or size, under the device's measured peaks (R36)."""
    rows = ranking.list_usable(run.frame).dropna(subset=["tflops"])
    figure = draw_lines(rows, axis, {"tflops": "TFLOPS achieved"})
    if figure is None:
        return None
    peaks = {kind: value for kind, value in zip(map(_find_main_type, rows["ran_as"]), rows["peak_tflops"], strict=True)
             if value == value}  # fmt: skip
    low, high = rows["tflops"].min(), max(rows["tflops"].max(), *peaks.values(), 0.0)
    for axes in figure.axes:
        for kind, value in peaks.items():
            axes.axhline(value, color=INK, lw=0.9, ls=LINES.get(kind, "-"), zorder=1)
            axes.annotate(
                f"peak\n{kind}", (1, value), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                va="center", fontsize=8,
            )  # fmt: skip
        make_logarithmic(axes, "y", low / 1.5, high * 2)
    return figure


def _find_main_type(types: str) -> str:
    """Return the type of most arithmetic, from `21 fp32, 3 fp16` or `21 fp32 (94%), 3 fp16 (6%)`."""
    return types.split(",")[0].split()[1] if types else ""


def _choose_fill(row: Any) -> dict[str, Any]:
    hatch = HATCHES.get(row["precision"], "")
    return {"facecolor": choose_color(row["backend"]), "hatch": hatch, "edgecolor": "white", "linewidth": 0,
            "alpha": 0.55 if row["twin"] else 1.0}  # fmt: skip


INFERENCE_TIME = Chart("inference-time", "Latency per batch of all models, on a logarithmic axis.", inference_time, 8)
SPEEDUP_SIZE = Chart(
    "speedup-size", "Speed-up over the reference of the same size, against the image size; shaded: 95 % interval.",
    lambda run: draw_speedups(run, "size"), 9,
)  # fmt: skip
SPEEDUP_BATCH = Chart(
    "speedup-batch", "Speed-up over the reference of the same batch, against the batch; shaded: 95 % interval.",
    lambda run: draw_speedups(run, "batch"), 10,
)  # fmt: skip
TFLOPS_BATCH = Chart(
    "tflops-batch",
    "Operations per second against the batch, under the peaks that were measured; logarithmic axis.",
    lambda run: draw_tflops(run, "batch"),
    11,
)
TFLOPS_SIZE = Chart(
    "tflops-size", "Operations per second against the image size, under the peaks; logarithmic axis.",
    lambda run: draw_tflops(run, "size"), 12,
)  # fmt: skip


# Rounds of every trial: the spread of fresh processes behind the interval.

ROUND_SPREAD = 0.5  # part of a row's height for its rounds, in time order


def draw_rounds(run: RunData) -> Any:
    """Draw a dot for each round's median latency, a row per trial; None if no trial has several rounds."""
    rows = run.frame[run.frame["rounds"] > 1].dropna(subset=[LATENCY])
    draw_panel = partial(_draw_panel, trials=run.trials)
    number_column = "slowest over fastest", partial(_format_range, trials=run.trials)
    return rows_figure(run, rows, draw_panel, "median latency of each round, ms", *number_column)


def _draw_panel(axes: Any, rows: pd.DataFrame, trials: dict[str, TrialResult]) -> None:
    medians = [_find_medians(r, trials) for _, r in rows.iterrows()]
    values = [value for trial_medians in medians for value in trial_medians.values()]
    set_scale(axes, values, max(values))
    for y, ((_, r), trial_medians) in enumerate(zip(rows.iterrows(), medians, strict=True)):
        axes.plot([r[LATENCY]] * 2, [y - 0.4, y + 0.4], color=INK, lw=1)
        for index, (name, value) in enumerate(trial_medians.items()):
            dot_y = y + ROUND_SPREAD * (index / max(1, len(trial_medians) - 1) - 0.5)
            (dot,) = axes.plot(value, dot_y, "o", color=choose_color(r["backend"]), mec="white", mew=0.4, ms=5)
            add_tooltip(dot, f"{name.removeprefix('r')}. round: {show(value * 1e-3, 'duration')}")


def _find_medians(row: pd.Series, trials: dict[str, TrialResult]) -> dict[str, float]:
    """Return each round's median latency in ms, by folder name."""
    medians = trials[row["trial"]].round_medians(str(row["boundary"]), str(row["clock"]))
    return {name: 1e3 * seconds for name, seconds in medians.items()}


def _format_range(row: pd.Series, trials: dict[str, TrialResult]) -> str:
    """Format the percentage by which the slowest round exceeds the fastest."""
    medians = _find_medians(row, trials).values()
    return show(max(medians) / min(medians) - 1, "percentage", 2)


ROUNDS = Chart(
    "rounds",
    "Median latency of each round, a fresh process, from the top in execution order; the line is the trial's latency, "
    "the number how much the slowest round exceeds the fastest.",
    draw_rounds,
    3,
)


# Confusion matrices as pictures.

MAX_DRAWN = 4  # matrices drawn; all are stored as CSV
MAX_NUMBERED = 20  # most classes for numbers in cells
MAX_LABELLED = 60
MAX_VECTOR_CELLS = 30  # most classes for vector cells; more make a bitmap
MAX_CLASS_LENGTH = 24
MATRIX_COLOUR, MATRIX_TEXT_COLOUR = "#0072B2", "#fdfdfd"  # text colour: pure white would be dark in a dark theme


def draw_matrices(run: RunData) -> Any:
    """Draw the first MAX_DRAWN distinct matrices, the winners' first, shaded by the share of each label's images.

    None without a matrix.
    """
    matrices = list(_find_distinct(run))[:MAX_DRAWN]
    if not matrices:
        return None
    heights = [min(WIDTH, max(3.2, 1.6 + 0.32 * len(matrix.classes))) for _, matrix in matrices]
    with apply_style() as figure_class:
        figure = figure_class(figsize=(max(heights), sum(heights)), layout="constrained")
        grid = figure.subplots(len(matrices), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (label, matrix) in zip(grid, matrices, strict=True):
            axes.set_title(label, fontsize=9)
            _draw_matrix(axes, matrix)
    return figure


def _find_distinct(run: RunData) -> Iterator[tuple[str, Confusion]]:
    """Yield each distinct matrix with a title that counts further configurations with it."""
    winners = {run.trials[id].configuration for _, id in list_winners(run)}
    labels: dict[tuple[str, str, bytes], list[str]] = {}
    matrices: dict[tuple[str, str, bytes], Confusion] = {}
    for t in sorted(accuracy.choose_trials(run.records), key=lambda t: t.configuration not in winners):
        matrix = accuracy.read_confusion(t)
        if matrix and len(matrix.classes) > 1:
            key = t.model, t.size, matrix.classes.tobytes() + matrix.counts.tobytes()
            labels.setdefault(key, []).append(shorten_text(t.label, 2 * MAX_CLASS_LENGTH))
            matrices.setdefault(key, matrix)
    for key, (first, *rest) in labels.items():
        suffix = f", and {len(rest)} more with the same matrix" if rest else ""
        yield first + suffix, matrices[key]


def _draw_matrix(axes: Any, matrix: Confusion) -> None:
    total = np.maximum(matrix.counts.sum(axis=1, keepdims=True), 1)
    count = len(matrix.classes)
    axes.grid(False)
    axes.pcolormesh(matrix.counts / total, cmap=_make_colormap(), vmin=0, vmax=1, rasterized=count > MAX_VECTOR_CELLS)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    suffix = "" if count <= MAX_LABELLED else f", {count:,} classes in the order of the CSV file"
    axes.set_xlabel("answer" + suffix)
    axes.set_ylabel("label")
    ticks = range(count) if count <= MAX_LABELLED else []
    names = [shorten_text(name, MAX_CLASS_LENGTH) for name in matrix.names]
    positions = [tick + 0.5 for tick in ticks]
    axes.set_xticks(positions, names if ticks else [], rotation=90, fontsize=8)
    axes.set_yticks(positions, names if ticks else [], fontsize=8)
    if count <= MAX_NUMBERED:
        _write_counts(axes, matrix.counts, matrix.counts / total)


def _make_colormap() -> Any:
    """Return a colour map from transparent to opaque, so that a white or dark background shows through."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    return LinearSegmentedColormap.from_list("shares", [to_rgba(MATRIX_COLOUR, 0), to_rgba(MATRIX_COLOUR, 1)])


def _write_counts(axes: Any, counts: np.ndarray, shares: np.ndarray) -> None:
    for i, j in zip(*np.nonzero(counts), strict=True):
        color = MATRIX_TEXT_COLOUR if shares[i, j] > 0.5 else INK
        axes.text(j + 0.5, i + 0.5, f"{counts[i, j]:,}", ha="center", va="center", fontsize=7, color=color)


CONFUSION = Chart(
    "confusion",
    "Confusion matrices that differ, the winner's first: rows are the labels, columns the answers, shades the share of "
    "the label's images.",
    draw_matrices,
    14,
)


# Images that flip, as pictures.

MAX_STRIPS, MAX_PICTURES = 4, 8  # configurations, and images of each
PICTURE_SIDE = 96  # most pixels, to keep the page small
MAX_ANSWER_LENGTH = 14
BOX_COLOUR = "#ff9d00"  # visible on dark and on light pictures


@dataclass(frozen=True)
class FlipPicture:
    """An image, uint8 [H, W, C], with text above and below it, and unmatched boxes (n x 4) in its pixels.

    `boxes` are those of the reference alone, then of the configuration alone.
    """

    pixels: np.ndarray
    above: str
    below: str
    boxes: tuple[np.ndarray, ...] = ()


def draw_flips(run: RunData) -> Any:
    """Draw the first images that each configuration lost or gained against its reference; None without any."""
    strips = [*_find_strips(run), *_find_box_strips(run)][:MAX_STRIPS]
    if not strips:
        return None
    with apply_style() as figure_class:
        figure = figure_class(figsize=(WIDTH, 1.85 * len(strips)), layout="constrained")
        for subfigure, (title, pictures) in zip(
            np.atleast_1d(figure.subfigures(len(strips), 1, squeeze=True)), strips, strict=True
        ):
            subfigure.suptitle(title, fontsize=9)
            grid = subfigure.subplots(1, MAX_PICTURES)
            for axes, picture in zip(grid, pictures, strict=False):
                _draw_picture(axes, picture)
            for axes in grid[len(pictures) :]:
                axes.remove()
    return figure


def _find_strips(run: RunData) -> Iterator[tuple[str, list[FlipPicture]]]:
    """Yield a title and the pictures of each classifier with flips in the cache."""
    for trial in accuracy.choose_trials(run.records):
        reference = run.references.get(trial.id)
        flips = accuracy.list_flips(trial, reference) if reference is not None and reference is not trial else []
        photographs = accuracy.open_photographs(trial) if flips else None
        if photographs is None or reference is None:
            continue
        lost = sum(flip.is_lost for flip in flips)
        selection = [*flips[: min(lost, max(MAX_PICTURES // 2, MAX_PICTURES - (len(flips) - lost)))], *flips[lost:]]
        pictures = []
        for flip in selection[:MAX_PICTURES]:
            before, after = (shorten_text(name, MAX_ANSWER_LENGTH) for name in (flip.reference, flip.answer))
            if flip.image < len(photographs.pixels):
                pixels = photographs.pixels[flip.image].transpose(1, 2, 0)
                pictures.append(FlipPicture(pixels, "lost" if flip.is_lost else "gained", f"{before}\n→ {after}"))
        if pictures:
            title = f"{shorten_text(trial.label, 2 * MAX_CLASS_LENGTH)}: {lost} lost, {len(flips) - lost} gained"
            yield f"{title} against {reference.configuration}", pictures


def _find_box_strips(run: RunData) -> Iterator[tuple[str, list[FlipPicture]]]:
    """Yield a title and the pictures of each detector with images in the cache."""
    for t in accuracy.choose_trials(run.records, "objects"):
        reference = run.references.get(t.id)
        box_flips = agreement.list_box_flips(t, reference) if reference is not None and reference is not t else None
        photographs = accuracy.open_photographs(t) if box_flips and box_flips.flips else None
        if box_flips is None or photographs is None or reference is None or photographs.sizes is None:
            continue
        pictures = []
        for flip in box_flips.flips[:MAX_PICTURES]:
            if flip.image < min(len(photographs.pixels), len(photographs.sizes)):
                pixels = photographs.pixels[flip.image].transpose(1, 2, 0)
                place = ImagePlacement(*photographs.sizes[flip.image].tolist(), *pixels.shape[:2])
                scale, margin = np.tile([place.across, place.down], 2), np.tile([place.left, place.top], 2)
                boxes = tuple(each * scale + margin for each in (flip.reference, flip.own))
                counts = (flip.lost, "lost"), (flip.gained, "gained"), (flip.renamed, "other class")
                below = "\n".join(f"{count} {name}" for count, name in counts if count)
                name = shorten_text(photographs.name(flip.image).rpartition("/")[2], MAX_ANSWER_LENGTH)
                pictures.append(FlipPicture(pixels, name, below, boxes))
        if pictures:
            label, reference_name = (shorten_text(name, MAX_NAME_LENGTH) for name in (t.label, reference.configuration))
            title = f"{label} against {reference_name}"
            yield f"{title}:\n{box_flips.describe()}", pictures


def _draw_picture(axes: Any, picture: FlipPicture) -> None:
    step = max(1, math.ceil(max(picture.pixels.shape[:2]) / PICTURE_SIDE))
    pixels = picture.pixels[::step, ::step]
    is_grey = pixels.shape[2] != 3
    axes.imshow(pixels[..., 0] if is_grey else pixels, cmap="gray" if is_grey else None, vmin=0, vmax=255)
    for boxes, color, line_style in zip(picture.boxes, (PAPER, BOX_COLOUR), ("-", "--"), strict=False):
        for left, top, right, bottom in ((boxes / step) - 0.5).tolist():
            corners = [left, right, right, left, left], [top, top, bottom, bottom, top]
            axes.plot(*corners, color=color, linestyle=line_style, linewidth=1.2)
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(picture.above, fontsize=7)
    axes.set_xlabel(picture.below, fontsize=6)


FLIPS = Chart(
    "flips",
    "Images that flip: lost if only the reference is right, gained if only the configuration is. Below each: the "
    "reference's answer, then the configuration's. For detectors, the images that differ most: boxes found only by "
    "the reference are solid and white, those found only by the configuration dashed and orange.",
    draw_flips,
    15,
)
