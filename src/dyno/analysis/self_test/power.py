"""How likely a difference is seen, and which difference is likely to be: the power of the tests behind "faster".

It is worked out for the noise as it was seen, by drawing studies from it (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 25): on a shared machine a few rounds are far off, and a power from their variance alone, as
for normal noise, would be several times too low. Heavy parts of scipy are not imported: `scipy.special` is enough.
"""

from __future__ import annotations

import math

import numpy as np

from dyno.analysis.stats import CONFIDENCE, Interval, t_quantile

POWER = 0.8  # chance with which the smallest difference that counts as visible is seen (the usual one; Cohen 1988)
DRAWS, SETS, SET_DRAWS = 4000, 200, 1000  # studies; for limits: sets of rounds, and studies of each
LEAST_FOR_LIMITS = 10  # rounds; drawn from fewer, sets of rounds are too much alike


class Studies:
    """Studies drawn from a noise: what each of them needs of a true difference to call it by its name.

    `noise` holds log ratios less their true ones, of which either sign is as likely: which of two equal processes is
    the first means nothing. With `paired` a study draws `rounds` of them and is judged by Student's t interval of their
    mean; else two groups of so many processes, whose difference the noise is, by Welch's.
    """

    def __init__(self, noise: np.ndarray, rounds: int, paired: bool = True, draws: int = DRAWS, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        noise = np.concatenate([noise, -noise])
        if paired:
            each = draw.choice(noise, (draws, rounds))
            mean, half = each.mean(axis=1), t_quantile(rounds - 1) * each.std(axis=1, ddof=1) / math.sqrt(rounds)
        else:
            sides = draw.choice(noise / math.sqrt(2), (2, draws, rounds))
            a, b = sides.var(axis=2, ddof=1) / rounds
            mean, half = sides[0].mean(axis=1) - sides[1].mean(axis=1), _compute_welch(a, b, rounds)
        self._seen_from, self._called_below = np.sort(half - mean), np.sort(-half - mean)

    def seen(self, difference: float) -> float:
        """Return the share of studies that call a true difference of the logs slower."""
        return float(np.searchsorted(self._seen_from, difference) / len(self._seen_from))

    @property
    def false_alarms(self) -> float:
        """The share that calls equal processes faster or slower."""
        return self.seen(0.0) + 1 - float(np.searchsorted(self._called_below, 0.0) / len(self._called_below))

    @property
    def smallest(self) -> float:
        """The smallest slow-down, as a share (0.02 is 2 %), that four studies of five see; never below 0."""
        return max(0.0, math.expm1(float(np.quantile(self._seen_from, POWER))))


def _compute_welch(a: np.ndarray, b: np.ndarray, rounds: int) -> np.ndarray:
    """Return half the width of Welch's interval, by the two means' variances."""
    from scipy.special import stdtrit

    total = a + b
    with np.errstate(invalid="ignore"):
        freedom = np.nan_to_num(total**2 / ((a**2 + b**2) / (rounds - 1)), nan=1.0)
    return np.asarray(stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(total))


def smallest(noise: np.ndarray, rounds: int, paired: bool = True) -> float:
    """Return the smallest slow-down that `rounds` rounds see; see `Studies`.

    Infinite with one round, NaN with little noise.
    """
    if rounds < 2:
        return math.inf
    return Studies(noise, rounds, paired).smallest if len(noise) > 1 else math.nan


def smallest_with_limits(noise: np.ndarray, rounds: int) -> Interval:
    """Return the same in turns, with the 95 % interval of sets drawn from the self-test's rounds (rows of `noise`).

    NaN limits with few rounds.
    """
    value = smallest(noise.ravel(), rounds)
    if len(noise) < LEAST_FOR_LIMITS:
        return Interval(value, math.nan, math.nan)
    draw = np.random.default_rng(1)
    sets = (noise[draw.integers(len(noise), size=len(noise))].ravel() for _ in range(SETS))
    each = [Studies(one, rounds, draws=SET_DRAWS, seed=number).smallest for number, one in enumerate(sets)]
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(np.quantile(each, share)) for share in (tail, 1 - tail))
    return Interval(value, min(low, value), max(high, value))


def spread_interval(spread: float, freedom: int) -> Interval:
    """Return a standard deviation with its 95 % interval, from the chi-square distribution, as for normal values."""
    from scipy.special import chdtri

    tail = (1 - CONFIDENCE) / 2
    if freedom < 1:
        return Interval(spread, math.nan, math.nan)
    low, high = (spread * math.sqrt(freedom / float(chdtri(freedom, p))) for p in (tail, 1 - tail))
    return Interval(spread, low, high)


def at_most(hits: int, count: int) -> float:
    """Return the one-sided upper 95 % limit of a share (Clopper and Pearson 1934); it holds at any number."""
    from scipy.special import betaincinv

    return 1.0 if hits >= count else float(betaincinv(hits + 1, count - hits, CONFIDENCE))
