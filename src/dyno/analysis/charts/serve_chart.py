"""Latency against the rate of requests: where an engine's queue begins to grow."""

from __future__ import annotations

from typing import Any

from dyno.analysis.formatting import show, significant
from dyno.analysis.presentation.chart import Chart
from dyno.analysis.ranking.correctness import WRONG
from dyno.analysis.records.run_data import RunData
from dyno.analysis.serve import runs
from dyno.analysis.serve.figures import RateMeasurement
from dyno.analysis.serve.runs import ServingRun
from dyno.analysis.style import EDGE, LINES, WIDTH, color, logarithmic, marker, styled, tip

HEIGHT = 3.8  # inches
PALE = 0.35  # how opaque a median is
MEDIAN = "p50"


def latency_by_rate(run: RunData) -> Any:
    """Draw a line for the bounded percentile of each trial and a pale one for its median; None without any.

    Each stable rate of each round is a point.
    """
    served = [each for each in runs.of_run(run) if _find_points(each, MEDIAN)]
    if not served:
        return None
    with styled() as figure_class:
        figure = figure_class(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        for number, each in enumerate(served):
            kinds = [(e.trial.backend, e.trial.precision) for e in served[: number + 1]]
            hollow = kinds.count(kinds[-1]) > 1  # it differs from an earlier one by an option alone
            if each.bounded != MEDIAN:
                _draw_line(axes, each, MEDIAN, PALE, hollow)
            _draw_line(axes, each, each.bounded, 1.0, hollow)
        if bound := served[0].facts[0].bound_s:
            axes.axhline(1e3 * bound, color=EDGE, linestyle="--", linewidth=1)
        axes.set(yscale="log", xlabel="requests/s", ylabel="latency, ms", xlim=(0, None))
        logarithmic(axes, "y", *axes.get_ylim())
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def _find_points(served: ServingRun, name: str) -> list[tuple[RateMeasurement, float]]:
    """Return the stable rates that have the percentile, each with its value in seconds, by ascending rate."""
    found = [(t, t.percentile(name)) for t in served.tried if not t.step.unstable]
    return sorted(((t, p.value) for t, p in found if p), key=lambda pair: pair[0].step.rate)


def _draw_line(axes: Any, served: ServingRun, name: str, alpha: float, hollow: bool) -> None:
    """Draw a line for each round, and a point for each rate."""
    points, trial = _find_points(served, name), served.trial
    style = {"color": color(trial.backend), "alpha": alpha, "marker": marker(trial.precision), "markersize": 4,
             "fillstyle": "none" if hollow else "full"}  # fmt: skip
    for number in sorted({t.round for t, _ in points}):
        own = [(t.step.rate, 1e3 * value) for t, value in points if t.round == number]
        wrong = f", {WRONG}" if served.outputs.wrong else ""
        label = None if number else f"{trial.label}, {name}{wrong}"
        axes.plot(
            *zip(*own, strict=True), linestyle=LINES.get(trial.precision, "-"), label=label, linewidth=1.2, **style
        )
    for tried, value in points:
        (point,) = axes.plot(tried.step.rate, 1e3 * value, **style)
        tip(point, f"{trial.label}: {significant(tried.step.rate)} requests/s, {name} {show(value, 'duration')}")


LATENCY_BY_RATE = Chart(
    "serve-latency",
    "Latency of requests against their rate: the bounded percentile, its median pale, the bound dashed. Rates at which "
    "the queue grew without end have no point.",
    latency_by_rate,
    19,
)
