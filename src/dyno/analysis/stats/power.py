"""How many more rounds would settle what is undecided."""

from __future__ import annotations

import math
from bisect import bisect_left

from dyno.analysis.stats import rejection
from dyno.analysis.stats.evidence import Evidence
from dyno.analysis.stats.intervals import t_quantile
from dyno.analysis.stats.sequential import share

POWER = 0.8
MOST_ROUNDS = 100  # more rounds than that aren't advice
FARTHEST = 50.0  # standard errors from 0, beyond which every difference is seen


def more_rounds(evidence: Evidence, reach: float, level: float, first: int) -> int:
    """Return how many more rounds decide the pair with 80 % power, if its true difference and spread are those seen.

    At most MOST_ROUNDS, and MOST_ROUNDS + 1 where those are not enough.

    `reach` is the log ratio up to which speeds are equivalent, `level` the error of the pair's claim over all looks,
    `first` as in `sequential.share`.
    """

    def compute_power(more: int) -> float:
        return power(evidence, evidence.rounds + more, reach, level, first)

    return 1 + bisect_left(range(1, MOST_ROUNDS + 1), POWER, key=compute_power)


def power(evidence: Evidence, rounds: int, reach: float, level: float, first: int) -> float:
    """Return the probability that `rounds` in all decide the pair, if its true difference and spread are those seen.

    It covers the t test and the two one-sided ones, by the noncentral t distribution. Both succeed together only where
    the interval is so narrow that one of them always does.
    """
    from scipy.special import nctdtr

    freedom = evidence.parts * (rounds - 1)
    error = max(evidence.spread, 1e-9) / math.sqrt(rounds)
    looked = rounds + evidence.looked - evidence.rounds
    reserved = 0.0 if evidence.rejected is None else rejection.RESERVE
    wall = t_quantile(freedom, level * share(looked, first) * (1 - reserved))

    def compute_chance(difference: float, limit: float) -> float:
        return float(nctdtr(freedom, min(FARTHEST, max(-FARTHEST, difference / error)), limit))

    away = abs(evidence.difference)
    apart = 1 - compute_chance(away, wall)
    if away >= reach or apart >= POWER:
        return apart
    return min(1.0, apart + max(0.0, compute_chance(away - reach, -wall) - compute_chance(away + reach, wall)))
