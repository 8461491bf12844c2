"""Charts beside the reference: speed-ups by round, accuracy, confusion."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.formatting import short, show, significant, sized
from dyno.report.charts import charts
from dyno.report.charts.charts import LONGEST, UNCERTAIN, compared, rows_figure, set_scale, times
from dyno.report.style import HATCHES, INK, LINES, WIDTH, Chart, color, logarithmic, styled, tip
from dyno.results import ranking
from dyno.results.metrics import accuracy
from dyno.results.metrics.accuracy import Confusion
from dyno.results.ranking import LATENCY, winners
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult

if TYPE_CHECKING:
    import pandas as pd

# The charts that published comparisons draw: bars for all models, speed-up against size, TFLOPS under the peak.
#
# Throughput and FPS against batch and size are `series.scaling`.

FEW, MANY = 12, 30  # bars of a panel up to which their numbers lie flat, and stand


def inference_time(run: RunData) -> Any:
    """Draw grouped bars of the latency of every model on a log axis, one panel per size and batch (R15).

    Panels with one model are left out; None without any panel.
    """
    from matplotlib.patches import Patch

    rows = charts.list_configurations(ranking.list_usable(run.frame).dropna(subset=[LATENCY]))
    groups = [
        (f"{sized(size, 'size ')}, batch {batch}".lstrip(", "), group)
        for (size, batch), group in rows.groupby(["size", "batch"], sort=False)
        if group["model"].nunique() > 1
    ]
    panels, left = groups[: charts.MOST_PANELS], max(0, len(groups) - charts.MOST_PANELS)
    if not panels:
        return None
    with styled() as figure_class:
        figure = figure_class((WIDTH, 2.7 * len(panels) + 0.7), layout="constrained")
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, group) in zip(grid, panels, strict=True):
            _draw_bars(axes, group)
            axes.set_title(title)
        handles = [
            Patch(label=short(r["configuration"], LONGEST), **_choose_fill(r)) for r in charts.one_of_each(panels)
        ]
        charts.place_legend(figure, handles, left)
    return figure


def _draw_bars(axes: Any, group: pd.DataFrame) -> None:
    models, configurations = list(dict.fromkeys(group["model"])), list(dict.fromkeys(group["configuration"]))
    width, count = 0.84 / len(configurations), len(models) * len(configurations)
    for place, name in enumerate(configurations):
        for _, r in group[group["configuration"] == name].iterrows():
            x = models.index(r["model"]) + (place - (len(configurations) - 1) / 2) * width
            axes.bar(x, r[LATENCY], 0.92 * width, **_choose_fill(r))
            if count <= MANY:
                axes.annotate(
                    significant(r[LATENCY]), (x, r[LATENCY]), (0, 2), textcoords="offset points", ha="center",
                    va="bottom", fontsize=7, rotation=90 if count > FEW else 0,
                )  # fmt: skip
    low, high = group[LATENCY].min(), group[LATENCY].max()
    logarithmic(axes, "y", low / 2, high * (4 if FEW < count <= MANY else 1.6))
    axes.set_ylabel("latency per batch, ms")
    tilted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, models)) > 70 else {}
    axes.set_xticks(range(len(models)), [short(m, LONGEST) for m in models], **tilted)
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")


def draw_speedups(run: RunData, axis: str) -> Any:
    """Draw the speed-up over the reference against the image size or the batch, with its intervals (R35).

    Speed-ups without a bound are not drawn.
    """
    rows = compared(ranking.list_usable(run.frame).dropna(subset=["speedup"]))
    rows = rows.loc[[times(r) != UNCERTAIN for _, r in rows.iterrows()]]
    figure = charts.draw_lines(rows, axis, {"speedup": "times as fast as the reference"})
    for axes in figure.axes if figure else ():
        axes.axhline(1, color=INK, lw=0.9, zorder=1)
    return figure


def draw_tflops(run: RunData, axis: str) -> Any:
    """Draw the achieved TFLOPS against batch or size, under the peaks measured on the device (R36)."""
    rows = ranking.list_usable(run.frame).dropna(subset=["tflops"])
    figure = charts.draw_lines(rows, axis, {"tflops": "TFLOPS achieved"})
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
        logarithmic(axes, "y", low / 1.5, high * 2)
    return figure


def _find_main_type(types: str) -> str:
    """Return the type that most layers ran in, from `21 fp32, 3 fp16`."""
    return types.split(",")[0].split()[-1] if types else ""


def _choose_fill(r: Any) -> dict[str, Any]:
    hatch = HATCHES.get(r["precision"], "")
    return {"facecolor": color(r["backend"]), "hatch": hatch, "edgecolor": "white", "linewidth": 0,
            "alpha": 0.55 if r["twin"] else 1.0}  # fmt: skip


INFERENCE_TIME = Chart("inference-time", "Latency per batch of all models, on a logarithmic axis.", inference_time, 8)
SPEEDUP_SIZE = Chart(
    "speedup-size",
    "Speed-up over the reference of the same size, against the image size; shaded: 95 % interval.",
    lambda run: draw_speedups(run, "size"),
    9,
)
SPEEDUP_BATCH = Chart(
    "speedup-batch",
    "Speed-up over the reference of the same batch, against the batch; shaded: 95 % interval.",
    lambda run: draw_speedups(run, "batch"),
    10,
)
TFLOPS_BATCH = Chart(
    "tflops-batch",
    "Operations per second against the batch, under the peaks that were measured; logarithmic axis.",
    lambda run: draw_tflops(run, "batch"),
    11,
)
TFLOPS_SIZE = Chart(
    "tflops-size",
    "Operations per second against the image size, under the peaks; logarithmic axis.",
    lambda run: draw_tflops(run, "size"),
    12,
)


# Every round of every trial: how far fresh processes lie apart, which an interval only sums up.

HEIGHT = 0.5  # of a row, over which its rounds are spread in the order in which they ran


def rounds(run: RunData) -> Any:
    """Draw a dot for the median latency of each round, a row for each trial; None where no trial has several rounds."""
    rows = run.frame[run.frame["rounds"] > 1].dropna(subset=[LATENCY])
    spread = partial(_draw_panel, trials=run.trials)
    return rows_figure(rows, spread, "median latency of each round, ms", partial(_format_range, trials=run.trials))


def _draw_panel(axes: Any, rows: pd.DataFrame, trials: dict[str, TrialResult]) -> None:
    medians = [_find_medians(r, trials) for _, r in rows.iterrows()]
    every = [value for own in medians for value in own.values()]
    set_scale(axes, every, max(every))
    for y, ((_, r), own) in enumerate(zip(rows.iterrows(), medians, strict=True)):
        axes.plot([r[LATENCY]] * 2, [y - 0.4, y + 0.4], color=INK, lw=1)
        for number, (name, value) in enumerate(own.items()):
            place = y + HEIGHT * (number / max(1, len(own) - 1) - 0.5)
            (dot,) = axes.plot(value, place, "o", color=color(r["backend"]), mec="white", mew=0.4, ms=5)
            tip(dot, f"{name.removeprefix('r')}. round: {show(value * 1e-3, 'duration')}")


def _find_medians(r: pd.Series, trials: dict[str, TrialResult]) -> dict[str, float]:
    """Return the median latency of each round in ms, by the name of the round's folder."""
    medians = trials[r["trial"]].round_medians(str(r["boundary"]), str(r["clock"]))
    return {name: 1e3 * seconds for name, seconds in medians.items()}


def _format_range(r: pd.Series, trials: dict[str, TrialResult]) -> str:
    """Return the percentage by which the slowest round exceeds the fastest, as text."""
    medians = _find_medians(r, trials).values()
    return show(max(medians) / min(medians) - 1, "percentage", 2)


ROUNDS = Chart(
    "rounds",
    "Each round's median latency, a fresh process each, from above in the order in which they ran; the line is the "
    "trial's latency, the number by how much the slowest round exceeds the fastest.",
    rounds,
    3,
)


# Which classes a classifier takes for which, as pictures.

MOST_DRAWN = 4  # matrices; every one is stored as CSV
MOST_NUMBERED = 20  # classes up to which the picture has the numbers in it
MOST_LABELLED = 60
MOST_SQUARES = 30  # classes up to which each cell is a separate shape in the page; above it is a picture
LONGEST_CLASS = 24
SHADE, ON_SHADE = "#0072B2", "#fdfdfd"  # the second isn't the page's own white, which is dark on a dark screen


def draw_matrices(run: RunData) -> Any:
    """Draw the first MOST_DRAWN distinct matrices, the winners' first, shaded by the share of each label's images.

    Return None without a matrix.
    """
    drawn = list(_find_distinct(run))[:MOST_DRAWN]
    if not drawn:
        return None
    sides = [min(WIDTH, max(3.2, 1.6 + 0.32 * len(matrix.classes))) for _, matrix in drawn]
    with styled() as figure_class:
        figure = figure_class(figsize=(max(sides), sum(sides)), layout="constrained")
        places = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=sides)[:, 0]
        for axes, (label, matrix) in zip(places, drawn, strict=True):
            axes.set_title(label, fontsize=9)
            _draw_matrix(axes, matrix)
    return figure


def _find_distinct(run: RunData) -> Iterator[tuple[str, Confusion]]:
    """Yield each distinct matrix with a title, which counts the configurations with the same one."""
    best = {run.trials[id].configuration for _, id in winners(run)}
    alike: dict[tuple[str, str, bytes], list[str]] = {}
    matrices: dict[tuple[str, str, bytes], Confusion] = {}
    for t in sorted(accuracy.choose_trials(run.records), key=lambda t: t.configuration not in best):
        matrix = accuracy.read_confusion(t)
        if matrix and len(matrix.classes) > 1:
            key = t.model, t.size, matrix.classes.tobytes() + matrix.counts.tobytes()
            alike.setdefault(key, []).append(short(t.label, 2 * LONGEST_CLASS))
            matrices.setdefault(key, matrix)
    for key, (first, *others) in alike.items():
        more = f", and {len(others)} more with the same matrix" if others else ""
        yield first + more, matrices[key]


def _draw_matrix(axes: Any, matrix: Confusion) -> None:
    total = np.maximum(matrix.counts.sum(axis=1, keepdims=True), 1)
    count = len(matrix.classes)
    axes.grid(False)
    axes.pcolormesh(matrix.counts / total, cmap=_make_colormap(), vmin=0, vmax=1, rasterized=count > MOST_SQUARES)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel("answer")
    axes.set_ylabel("label")
    ticks = range(count) if count <= MOST_LABELLED else []
    names = [short(name, LONGEST_CLASS) for name in matrix.names]
    middles = [place + 0.5 for place in ticks]
    axes.set_xticks(middles, names if ticks else [], rotation=90, fontsize=8)
    axes.set_yticks(middles, names if ticks else [], fontsize=8)
    if count <= MOST_NUMBERED:
        _write_counts(axes, matrix.counts, matrix.counts / total)


def _make_colormap() -> Any:
    """Return a colour map from transparent to the full colour, so that the background, white or dark, shows through."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    return LinearSegmentedColormap.from_list("shares", [to_rgba(SHADE, 0), to_rgba(SHADE, 1)])


def _write_counts(axes: Any, counts: np.ndarray, shares: np.ndarray) -> None:
    for i, j in zip(*np.nonzero(counts), strict=True):
        color = ON_SHADE if shares[i, j] > 0.5 else INK
        axes.text(j + 0.5, i + 0.5, f"{counts[i, j]:,}", ha="center", va="center", fontsize=7, color=color)


CONFUSION = Chart(
    "confusion",
    "Confusion matrices that differ, the winner's first: rows are the labels, columns the answers, shades the share of "
    "the label's images.",
    draw_matrices,
    14,
)
