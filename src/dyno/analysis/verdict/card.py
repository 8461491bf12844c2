"""The figures on a decision's card: how fast, how much faster, how sure, how accurate, at what cost."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING, Any

from dyno.analysis.formatting import UNCLEAR, bounded, counting, limits, points, ratio, show, significant
from dyno.analysis.presentation.table import missing
from dyno.analysis.ranking.correctness import distance
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.ranking.rankings import Ranking
from dyno.analysis.records.run_data import RunData
from dyno.analysis.stats import EQUIVALENT, FASTER, ONE_ROUND, Speedup
from dyno.analysis.verdict.answers import reference_name
from dyno.analysis.verdict.findings import Figure, ms

if TYPE_CHECKING:
    import pandas as pd


def figures(ranking: Ranking, gain: Speedup | None, certainty: str, run: RunData) -> tuple[Figure, ...]:
    """Return the winner's figures.

    `gain` is its speed-up over its reference, None where it is the reference itself, and `certainty` how sure that is,
    in words.
    """
    winner = ranking.fastest.iloc[0]
    return (
        _make_latency_figure(winner),
        *_make_speedup_figure(ranking, winner, gain, run),
        _make_certainty_figure(winner, gain, certainty),
        *_make_accuracy_figure(ranking, winner),
        *_make_cost_figure(winner),
    )


def _make_latency_figure(winner: pd.Series) -> Figure:
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    below = [limits(low, high, ms).strip()] if bounded(low, high) else []
    rate = [] if missing(winner[THROUGHPUT]) else [f"{significant(winner[THROUGHPUT])} images/s"]
    return Figure("latency", ms(winner[LATENCY]), ", ".join([*below, f"batch {winner['batch']}", *rate]))


def _make_speedup_figure(ranking: Ranking, winner: pd.Series, gain: Speedup | None, run: RunData) -> Iterator[Figure]:
    reference = ranking.reference(winner)
    if gain is None or reference is None:
        return
    name = reference_name(ranking, reference)
    shown = ratio(gain.value, gain.low, gain.high)
    if gain.verdict == ONE_ROUND:
        yield Figure("speed-up", "unproven", f"over {name}: one round")
    elif shown == UNCLEAR or gain.verdict not in (FASTER, EQUIVALENT):
        yield Figure("speed-up", "undecided", f"against {name} ({shown})")
    elif not bounded(gain.low, gain.high):
        yield Figure("speed-up", shown, f"as fast as {name} (best estimate {significant(gain.value)}x)")
    else:
        value, _, interval = shown.partition(" ")
        yield Figure("speed-up", value, f"as fast as {name}{f' {interval}' if interval else ''}")


def _make_certainty_figure(winner: pd.Series, gain: Speedup | None, certainty: str) -> Figure:
    how = counting(int(winner["rounds"]), "round")
    return Figure("how sure", certainty, f"{how}, {gain.measured}" if gain else how)


def _make_accuracy_figure(ranking: Ranking, winner: pd.Series) -> Iterator[Figure]:
    value = winner.get(ranking.metric.column, float("nan"))
    if not isnan(value):
        low, change, high = (points(each / 100) for each in ranking.metric.change_in(winner))
        known = not isnan(ranking.metric.change_in(winner)[0])
        lost = f", {change} points [{low}, {high}] against the reference" if known else ""
        yield Figure("accuracy", f"{value:.2f} %", f"{ranking.metric.label}{lost}")
    elif winner["outputs"]:
        yield Figure("outputs", "agree", distance(winner["output_error"], winner["labels_changed"]))


def _make_cost_figure(winner: pd.Series) -> Iterator[Figure]:
    """Yield seconds to make it, and the size of its file and its memory, as far as each is known."""
    sizes: list[tuple[Any, str]] = [(winner["size_mb"], "MB file"), (winner["memory_mb"], "MB of memory")]
    below = ", ".join(f"{significant(value)} {what}" for value, what in sizes if not missing(value) and value)
    seconds = 0.0 if missing(winner["build_s"]) else float(winner["build_s"])
    if below or seconds:
        yield Figure("cost", f"{show(seconds, 'duration')} to make" if seconds else "nothing to make", below)
