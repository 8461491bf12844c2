"""Every round of every trial: how far fresh processes lie apart, which an interval only sums up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dyno.analysis.charts.charts import rows_figure, set_scale
from dyno.analysis.formatting import show
from dyno.analysis.presentation.chart import Chart
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.style import INK, color, tip

if TYPE_CHECKING:
    import pandas as pd

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
