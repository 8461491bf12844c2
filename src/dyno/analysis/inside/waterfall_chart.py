"""The waterfall from A to B as a chart: both latencies, and between them a bar for each cause."""

from __future__ import annotations

from typing import Any

from dyno.analysis.formatting import short
from dyno.analysis.inside.waterfall import Waterfall
from dyno.analysis.inside.waterfall_tables import signed
from dyno.analysis.style import INK, WIDTH, styled

ROW, EDGE = 0.34, 0.9  # inches of a bar, and of what is above and below the bars
LONGEST = 52  # characters of a name on the axis
LESS, MORE, REST = "#009E73", "#D55E00", "#8A8A8A"  # shorter, longer, and time outside the layers


def draw(waterfall: Waterfall) -> Any:
    """Draw a matplotlib Figure: microseconds from A's latency (above) to B's, green where B takes less.

    Hatched steps aren't layers of the model; whiskers are the 95 % intervals of a step's own difference.
    """
    steps = [step for step in waterfall.causes if step.a or step.b]
    with styled() as figure_class:
        figure = figure_class((WIDTH, ROW * (len(steps) + 2) + EDGE), layout="constrained")
        axes = figure.add_subplot()
        names = [
            f"A: {waterfall.pair.titles[0]}",
            *(step.cause.title for step in steps),
            f"B: {waterfall.pair.titles[1]}",
        ]
        texts = [_draw_whole(axes, 0, waterfall.gap.a)]
        reached = 1e6 * waterfall.gap.a
        corners = [reached]
        for y, step in enumerate(steps, 1):
            value = 1e6 * step.difference.value
            tone = REST if not step.cause.region else LESS if value < 0 else MORE
            hatch = "" if step.cause.region else "//"
            axes.barh(y, value, 0.66, left=reached, color=tone, hatch=hatch, edgecolor="white", linewidth=0)
            limits = [reached + 1e6 * end for end in (step.difference.low, step.difference.high)]
            axes.plot(limits, [y, y], color=INK, lw=1.1, marker="|", ms=5)
            axes.plot([reached, reached], [y - 1, y], color=INK, lw=0.6)
            texts.append(signed(value))
            reached += value
            corners.append(reached)
        axes.plot([reached, reached], [len(steps), len(steps) + 1], color=INK, lw=0.6)
        texts.append(_draw_whole(axes, len(steps) + 1, waterfall.gap.b))
        axes.set_yticks(range(len(names)), [short(name, LONGEST) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlim(min(0.0, *corners), 1.02 * max(corners))  # a wide interval must not squeeze the bars
        for y, text in enumerate(texts):
            axes.text(1.015, y, text, transform=axes.get_yaxis_transform(), va="center", fontweight="bold")
        axes.set_xlabel("latency, µs")
    return figure


def _draw_whole(axes: Any, y: float, seconds: float) -> str:
    axes.barh(y, 1e6 * seconds, 0.66, color=INK)
    return signed(1e6 * seconds).removeprefix("+")
