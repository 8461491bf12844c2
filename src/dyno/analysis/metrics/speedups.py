"""How many times faster one trial is than another: paired where they measured in turns, else between processes."""

from __future__ import annotations

from dyno.analysis import stats
from dyno.analysis.records.blocks import log_ratios
from dyno.analysis.records.results import TrialResult

LEAST_ROUNDS = 2  # that both took turns in; fewer have no spread


def speedup(own: TrialResult, reference: TrialResult, boundary: str, clock: str = "") -> stats.Speedup:
    """Reference latency over the own one at the boundary, by that clock, with its interval and verdict.

    Where both measured in turns in two rounds or more it is `stats.paired_speedup`, else `stats.speedup`.
    """
    medians = own.medians(boundary, clock), reference.medians(boundary, clock)
    paired = log_ratios(reference, own, boundary, clock)
    if len(paired) >= LEAST_ROUNDS or (paired and min(map(len, medians)) < LEAST_ROUNDS):
        return stats.paired_speedup(paired)
    return stats.speedup(*medians)
