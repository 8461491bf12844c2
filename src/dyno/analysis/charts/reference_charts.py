"""The charts that published comparisons draw: bars for all models, speed-up against size, TFLOPS under the peak.

Throughput and FPS against batch and size are `series.scaling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno.analysis.charts import series
from dyno.analysis.charts.charts import UNCERTAIN, compared, times
from dyno.analysis.charts.series import LONGEST
from dyno.analysis.formatting import short, significant, sized
from dyno.analysis.presentation.chart import Chart
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.records.run_data import RunData
from dyno.analysis.style import HATCHES, INK, LINES, WIDTH, color, logarithmic, styled

if TYPE_CHECKING:
    import pandas as pd

FEW, MANY = 12, 30  # bars of a panel up to which their numbers lie flat, and stand


def inference_time(run: RunData) -> Any:
    """Draw grouped bars of the latency of every model on a log axis, one panel per size and batch (R15).

    Panels with one model are left out; None without any panel.
    """
    from matplotlib.patches import Patch

    rows = series.configurations(frontier.usable(run.frame).dropna(subset=[LATENCY]))
    groups = [
        (f"{sized(size, 'size ')}, batch {batch}".lstrip(", "), group)
        for (size, batch), group in rows.groupby(["size", "batch"], sort=False)
        if group["model"].nunique() > 1
    ]
    panels, left = groups[: series.MOST_PANELS], max(0, len(groups) - series.MOST_PANELS)
    if not panels:
        return None
    with styled() as figure_class:
        figure = figure_class((WIDTH, 2.7 * len(panels) + 0.7), layout="constrained")
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, group) in zip(grid, panels, strict=True):
            _draw_bars(axes, group)
            axes.set_title(title)
        handles = [
            Patch(label=short(r["configuration"], LONGEST), **_choose_fill(r)) for r in series.one_of_each(panels)
        ]
        series.place_legend(figure, handles, left)
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


def speedup(run: RunData, axis: str) -> Any:
    """Draw the speed-up over the reference against the image size or the batch, with its intervals (R35).

    Speed-ups without a bound are not drawn.
    """
    rows = compared(frontier.usable(run.frame).dropna(subset=["speedup"]))
    rows = rows.loc[[times(r) != UNCERTAIN for _, r in rows.iterrows()]]
    figure = series.lines(rows, axis, "speedup", "times as fast as the reference")
    for axes in figure.axes if figure else ():
        axes.axhline(1, color=INK, lw=0.9, zorder=1)
    return figure


def tflops(run: RunData, axis: str) -> Any:
    """Draw the achieved TFLOPS against batch or size, under the peaks measured on the device (R36)."""
    rows = frontier.usable(run.frame).dropna(subset=["tflops"])
    figure = series.lines(rows, axis, "tflops", "TFLOPS achieved")
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
    lambda run: speedup(run, "size"),
    9,
)
SPEEDUP_BATCH = Chart(
    "speedup-batch",
    "Speed-up over the reference of the same batch, against the batch; shaded: 95 % interval.",
    lambda run: speedup(run, "batch"),
    10,
)
TFLOPS_BATCH = Chart(
    "tflops-batch",
    "Operations per second against the batch, under the peaks that were measured; logarithmic axis.",
    lambda run: tflops(run, "batch"),
    11,
)
TFLOPS_SIZE = Chart(
    "tflops-size",
    "Operations per second against the image size, under the peaks; logarithmic axis.",
    lambda run: tflops(run, "size"),
    12,
)
