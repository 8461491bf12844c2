"""Lines against the batch or the image size: a panel for each of what is neither, a line for each configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dyno.analysis.formatting import NO_IMAGE, bounded, short
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT, configuration
from dyno.analysis.records.run_data import RunData
from dyno.analysis.style import LINES, WIDTH, color, marker, styled

if TYPE_CHECKING:
    import pandas as pd

MOST_PANELS = 12
MOST_CONFIGURATIONS = 12  # lines or bars of one panel that a reader can tell apart
LONGEST = 44  # characters of a name on an axis

Panel = tuple[str, "pd.DataFrame"]


def scaling(run: RunData, axis: str) -> Any:
    """Draw throughput, and FPS from latency, against batch or image size (R35); None without a panel."""
    rows = frontier.usable(run.frame).dropna(subset=[LATENCY])
    panels, left = panels_of(configurations(rows.assign(fps=frontier.fps(rows))), axis)
    if not panels:
        return None
    columns = ((THROUGHPUT, "throughput"), ("fps", "FPS, batch after batch"))
    with styled() as figure_class:
        figure = figure_class((WIDTH, 2.9 * len(panels) + 0.9), layout="constrained")
        for pair, (title, group) in zip(figure.subplots(len(panels), 2, squeeze=False), panels, strict=True):
            for axes, (column, what) in zip(pair, columns, strict=True):
                draw(axes, group, axis, column)
                axes.set_title(title if column == THROUGHPUT else "", loc="left")
                axes.set_ylabel(f"{what}, images/s")
                axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}" if v >= 10 else f"{v:g}")
        legend(figure, panels, left)
    return figure


def lines(rows: pd.DataFrame, axis: str, column: str, label: str) -> Any:
    """Draw one column of the rows against the axis, two panels side by side; None with nothing to draw."""
    panels, left = panels_of(configurations(rows), axis)
    if not panels:
        return None
    across = min(2, len(panels))
    down = math.ceil(len(panels) / across)
    with styled() as figure_class:
        figure = figure_class((WIDTH, 2.9 * down + 0.8), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False).ravel()
        for axes, (title, group) in zip(grid, panels, strict=False):
            draw(axes, group, axis, column)
            axes.set_ylabel(label)
            axes.set_title(title)
        for axes in grid[len(panels) :]:
            axes.remove()
        legend(figure, panels, left)
    return figure


def panels_of(rows: pd.DataFrame, axis: str) -> tuple[list[Panel], int]:
    """Return title and rows of each panel with two or more values on the axis, and the number of panels left out."""
    rows = rows.assign(place=[place_of(v) for v in rows[axis]])
    keys = [k for k in ("model", "size", "batch", "device") if k != axis]
    panels = [(title_of(keys, v), g) for v, g in rows.groupby(keys, sort=False) if g["place"].nunique() > 1]
    return panels[:MOST_PANELS], max(0, len(panels) - MOST_PANELS)


def draw(axes: Any, group: pd.DataFrame, axis: str, column: str) -> None:
    """Draw a line for each configuration on an axis that begins at 0, its interval shaded where the column has one."""
    for _, series in group.groupby("configuration", sort=False):
        first, ordered = series.iloc[0], series.dropna(subset=[column]).sort_values("place")
        axes.plot(ordered["place"], ordered[column], **stroke(first))
        if f"{column}_low" in series:
            bounded_rows = ordered.dropna(subset=[f"{column}_low"])
            limits = bounded_rows[f"{column}_low"], bounded_rows[f"{column}_high"]
            tight = [bounded(*pair) for pair in zip(*limits, strict=True)]
            axes.fill_between(
                bounded_rows["place"], *limits, where=tight, color=color(first["backend"]), alpha=0.1, lw=0
            )
    ticks = sorted(set(group["place"]))
    names = {place_of(v): str(v) for v in group[axis]}
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [names[t] for t in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("batch" if axis == "batch" else "image size, pixels")
    # A wide interval must not squeeze the lines.
    axes.set_ylim(0, min(axes.get_ylim()[1], 2 * group[column].max()))


def configurations(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first MOST_CONFIGURATIONS with `configuration` and `twin`, its index among look-alikes."""
    rows = rows.assign(configuration=[configuration(r) for _, r in rows.iterrows()])
    rows = rows[rows["configuration"].isin(list(dict.fromkeys(rows["configuration"]))[:MOST_CONFIGURATIONS])]
    alike: dict[tuple[str, str], dict[str, int]] = {}
    lines = list(zip(rows["configuration"], rows["backend"], rows["precision"], strict=True))
    for name, *kind in lines:
        names = alike.setdefault((kind[0], kind[1]), {})
        names.setdefault(name, len(names))
    return rows.assign(twin=[alike[backend, precision][name] for name, backend, precision in lines])


def stroke(r: Any) -> dict[str, Any]:
    """Return the line style of a configuration; of two that differ only by an option the second has hollow markers."""
    tone = color(r["backend"])
    inside = {"mfc": "white", "mec": tone, "mew": 1.3} if r["twin"] else {"mec": "white", "mew": 0.6}
    looks = {"color": tone, "marker": marker(r["precision"]), "ls": LINES.get(r["precision"], "-"), "lw": 1.6, "ms": 6}
    return looks | inside


def legend(figure: Any, panels: list[Panel], left: int = 0) -> None:
    """Draw one legend below all panels, with the number of panels left out."""
    from matplotlib.lines import Line2D

    rows = one_of_each(panels)
    place_legend(figure, [Line2D([], [], label=short(r["configuration"], LONGEST), **stroke(r)) for r in rows], left)


def one_of_each(panels: list[Panel]) -> list[Any]:
    """Return one row of each configuration drawn, in order."""
    first_rows: dict[str, Any] = {}
    for _, group in panels:
        for _, r in group.iterrows():
            first_rows.setdefault(r["configuration"], r)
    return list(first_rows.values())


def place_legend(figure: Any, handles: list[Any], left: int) -> None:
    """Place the handles below the figure, in as many columns as their names leave room for."""
    columns = 4 if max(len(h.get_label()) for h in handles) < 22 else 2
    title = f"{left} more panels are left out; their numbers are in tables.md" if left else None
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.6, title=title)


def title_of(keys: list[str], values: tuple[Any, ...]) -> str:
    """Return a panel's title from the values that all its rows share."""
    named = dict(zip(keys, values, strict=True))
    parts = [short(named["model"], LONGEST)] + [
        f"{k} {named[k]}" for k in ("size", "batch") if k in named and (k, named[k]) != ("size", NO_IMAGE)
    ]
    return ", ".join(parts + ([named["device"]] if named["device"] != "cpu" else []))


def place_of(value: Any) -> float:
    """Return the position of a batch or a size on its axis; a non-square size is at the square root of its area."""
    height, _, width = str(value).partition("x")
    return math.sqrt(float(height) * float(width)) if width else float(height)
