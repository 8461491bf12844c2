"""The roofline chart: each layer's arithmetic against its operations per byte, under the measured ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dyno.analysis.inside.roofline.ceilings import Ceilings
from dyno.analysis.inside.roofline.work import LayerWork, counted
from dyno.analysis.inside.times import Times
from dyno.analysis.style import INK, LINES, WIDTH, color, logarithmic, marker, styled
from dyno.worker.facts.job import LayerGraph

ROOM = 2.0  # factor between the outermost layer and the edge
LARGEST, SMALLEST = 420.0, 6.0  # points² of a layer that takes all the time, and of one that takes none


def draw(
    forms: Sequence[LayerGraph], times: Mapping[int, Times], graph_of: Mapping[int, int], ceilings: Ceilings
) -> Any | None:
    """Draw the roofline as a matplotlib figure; None where no layer multiplies.

    A point's area is the layer's share of the time. Layers without products aren't in it: they have no operations.
    """
    work = {k: counted(forms, k, graph_of.get(k), each.precision) for k, each in times.items()}
    points = {k: found for k, each in times.items() if (found := _compute_points(each, work[k]))}
    if not points:
        return None
    every = np.array([point for found in points.values() for point in found])
    with styled() as figure_class:
        figure = figure_class((WIDTH, 5.2), layout="constrained")
        axes = figure.subplots()
        for k, found in points.items():
            x, y, share = np.array(found).T
            axes.scatter(x, y, s=SMALLEST + LARGEST * share, color=color(times[k].backend), alpha=0.6, linewidth=0.4,
                         edgecolor=INK, marker=marker(times[k].precision), label=forms[k].library)  # fmt: skip
        _draw_roofs(axes, ceilings, {one.kind for k in points for one in work[k] if one.flops}, every[:, 0])
        axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOPS")
        logarithmic(axes, "x", *axes.get_xlim())
        logarithmic(axes, "y", *axes.get_ylim())
        figure.legend(loc="outside lower center", ncols=3, markerscale=0.6)
    return figure


def _compute_points(each: Times, work: Sequence[LayerWork]) -> list[tuple[float, float, float]]:
    """Return operations per byte, TFLOPS and share of the time of each layer that multiplies."""
    seconds = np.median(each.layers, axis=0)
    return [
        (one.flops / one.bytes, one.flops / seconds[i] / 1e12, float(seconds[i] / seconds.sum()))
        for i, one in enumerate(work) if one.flops and one.bytes and seconds[i] > 0
    ]  # fmt: skip


def _draw_roofs(axes: Any, ceilings: Ceilings, kinds: set[str], intensities: np.ndarray) -> None:
    """Draw one roof for each type that some layer computes in: the copy's slope up to the product's level."""
    copy = ceilings.copy.bytes_per_s
    rates = {kind: rate for kind, rate in ceilings.rates.products.items() if kind in kinds}
    ridges = [rate / copy for rate in rates.values()]
    low = min([*intensities, *ridges]) / ROOM
    high = max([*intensities, *ridges]) * ROOM
    for kind, rate in rates.items():
        x = np.array([low, rate / copy, high])
        axes.plot(x, np.minimum(x * copy, rate) / 1e12, color=INK, lw=1.1, ls=LINES.get(kind, "-"))
        axes.annotate(f"{kind} {rate / 1e12:.3g} TFLOPS", (high, rate / 1e12), (-2, 3), textcoords="offset points",
                      ha="right", fontsize=8)  # fmt: skip
    axes.annotate(f"copy {copy / 1e9:.3g} GB/s", (low, low * copy / 1e12), (8, -2), textcoords="offset points",
                  fontsize=8)  # fmt: skip
