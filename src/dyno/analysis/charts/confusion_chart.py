"""Which classes a classifier takes for which, as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dyno.analysis.formatting import short
from dyno.analysis.metrics import confusion
from dyno.analysis.metrics.confusion import Confusion
from dyno.analysis.presentation.chart import Chart
from dyno.analysis.ranking.rankings import winners
from dyno.analysis.records.run_data import RunData
from dyno.analysis.style import INK, WIDTH, styled

MOST_DRAWN = 4  # matrices; every one is stored as CSV
MOST_NUMBERED = 20  # classes up to which the picture has the numbers in it
MOST_LABELLED = 60
MOST_SQUARES = 30  # classes up to which each cell is a separate shape in the page; above it is a picture
LONGEST = 24
SHADE, ON_SHADE = "#0072B2", "#fdfdfd"  # the second isn't the page's own white, which is dark on a dark screen


def matrices(run: RunData) -> Any:
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
    for t in sorted(confusion.chosen(run.records), key=lambda t: t.configuration not in best):
        matrix = confusion.of(t)
        if matrix and len(matrix.classes) > 1:
            key = t.model, t.size, matrix.classes.tobytes() + matrix.counts.tobytes()
            alike.setdefault(key, []).append(short(t.label, 2 * LONGEST))
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
    names = [short(name, LONGEST) for name in matrix.names]
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
    matrices,
    14,
)
