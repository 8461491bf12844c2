"""Statistics as pure functions over samples: summaries, intervals, and whether A is faster than B.

Heavy parts of scipy are not imported: `scipy.special` holds every distribution that is needed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
CUT = 0.1  # share cut at each end by the trimmed mean (R34)

ALONE, TURNS = "one after the other", "in turns"
FASTER, SLOWER, SAME, ONE_ROUND = "faster", "slower", "not distinguishable", "one round only"


@dataclass(frozen=True)
class Summary:
    """Statistics of one array of samples, in the samples' own unit; `std` is the sample standard deviation (n - 1)."""

    count: int
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float
    std: float
    trimmed: float
    trimmed_std: float


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval; `low` and `high` are NaN where the data can't give one."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Speedup(Interval):
    """How many times faster A is than B (reference seconds / own seconds), that in words, and how the two measured."""

    verdict: str
    measured: str = ALONE


def summary(samples: np.ndarray) -> Summary:
    """Summary of raw samples; percentiles interpolate linearly, trimmed values lack the fastest and slowest 10 %."""
    if not len(samples):
        raise ValueError("no samples to summarise")
    x = np.sort(samples)
    n, cut = len(x), int(len(x) * CUT)
    kept = x[cut : n - cut]
    median, p90, p95, p99 = (_at(x, q) for q in (0.5, 0.9, 0.95, 0.99))
    return Summary(n, float(x.mean()), median, p90, p95, p99, float(x[-1]), _std(x), float(kept.mean()), _std(kept))


def over_rounds(rounds: Sequence[np.ndarray]) -> Summary:
    """Summary of several processes' samples: the geometric mean of each statistic, as `center` has it of the medians.

    So every process counts the same, however many samples it took, and ratios of medians are the speed-ups. `count` is
    the sum, and `max` the largest of all.
    """
    if len(rounds) == 1:
        return summary(rounds[0])
    each = np.array([astuple(summary(samples)) for samples in rounds])
    with np.errstate(divide="ignore"):  # a deviation may be 0, and is then
        means = Summary(*np.exp(np.log(each).mean(axis=0)).tolist())
    return replace(means, count=sum(map(len, rounds)), max=max(float(samples.max()) for samples in rounds))


def _at(ordered: np.ndarray, q: float) -> float:
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _std(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0


def median_interval(samples: np.ndarray) -> Interval:
    """Percentile bootstrap interval of the median within one process, computed exactly instead of by resampling.

    The chance that a resample's median is at most the k-th smallest sample is a binomial tail (Maritz and Jarrett
    1978), so the limit of endless resamples costs one pass. Needs three samples; fewer give NaN limits.
    """
    from scipy.special import bdtr

    x = np.sort(samples)
    n = len(x)
    if n < 3:
        return Interval(float(np.median(x)) if n else math.nan, math.nan, math.nan)
    k = np.arange(1, n + 1)
    # This many of the resample at or below x[k-1] put its median there; of an even count's two middle ones the lower
    # serves the lower limit and the upper the upper, so that the interval is no narrower than asked.
    lower, upper = (1.0 - bdtr(need - 1, n, k / n) for need in ((n + 1) // 2, n // 2 + 1))
    tail = (1 - CONFIDENCE) / 2
    low, high = int(np.searchsorted(lower, tail)), int(np.searchsorted(upper, 1 - tail))
    return Interval(_at(x, 0.5), float(x[low]), float(x[min(high, n - 1)]))


def center(medians: Sequence[float]) -> Interval:
    """Latency over several processes: the geometric mean of their medians with Student's t interval on the logs.

    `medians` holds one median per process, in seconds. One process gives NaN limits: its own samples say nothing about
    how the next process will do.
    """
    if not medians:
        return Interval(math.nan, math.nan, math.nan)
    logs = np.log(medians)
    mean, n = float(logs.mean()), len(logs)
    if n < 2:
        return Interval(math.exp(mean), math.nan, math.nan)
    half = t_quantile(n - 1) * _std(logs) / math.sqrt(n)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def speedup(own: Sequence[float], reference: Sequence[float]) -> Speedup:
    """How many times faster A is than the reference, from the spread *between processes*.

    Both arguments hold one median latency per round, in seconds. The interval is Welch's t interval (1947) of the
    difference of mean logs, turned back into a ratio. With one round on either side there is a ratio but no verdict.
    """
    if not own or not reference:
        return Speedup(math.nan, math.nan, math.nan, "")
    a, b = np.log(own), np.log(reference)
    difference = float(b.mean() - a.mean())
    if min(len(a), len(b)) < 2:
        return Speedup(math.exp(difference), math.nan, math.nan, ONE_ROUND)
    va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    half = 0.0
    if va + vb > 0:
        freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
        half = t_quantile(freedom) * math.sqrt(va + vb)
    return _judged(difference, half)


def paired_speedup(logs: Sequence[float]) -> Speedup:
    """The same for two trials that measured in turns, from the spread of their ratio *between rounds*.

    `logs` holds for each round (a fresh process of each) the median over blocks of log(reference / own seconds). The
    interval is Student's t interval of their mean: what a round's machine did to both is in neither.
    """
    if not len(logs):
        return Speedup(math.nan, math.nan, math.nan, "", TURNS)
    each = np.asarray(logs, np.float64)
    if len(each) < 2:
        return Speedup(math.exp(each[0]), math.nan, math.nan, ONE_ROUND, TURNS)
    half = t_quantile(len(each) - 1) * _std(each) / math.sqrt(len(each))
    return _judged(float(each.mean()), half, TURNS)


def _judged(difference: float, half: float, measured: str = ALONE) -> Speedup:
    low, high = difference - half, difference + half
    verdict = FASTER if low > 0 else SLOWER if high < 0 else SAME
    return Speedup(math.exp(difference), math.exp(low), math.exp(high), verdict, measured)


def wilson(hits: int, count: int) -> Interval:
    """Share of hits with Wilson's score interval (1927), which stays inside 0…1 and never has zero width."""
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    z2 = _z() ** 2
    share = hits / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def paired_difference(gained: float, lost: float, count: float) -> Interval:
    """Difference of two shares over the same samples, with Tango's score interval (1998).

    `gained` samples are right in A only, `lost` in the reference only, of `count`; the value is
    (gained - lost) / count. The limits are the differences whose score test, with the nuisance parameter at its
    restricted maximum likelihood, is not rejected. Unlike Wald's interval it keeps its coverage when few pairs differ,
    and when none does its width is that of the evidence (z^2 / (n + z^2) to each side) instead of zero.
    """
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    z = _z()
    value = (gained - lost) / count
    if not gained and not lost:
        bound = z * z / (count + z * z)
        return Interval(0.0, -bound, bound)
    low = _solve(lambda d: _tango(gained, lost, count, d) - z, -1.0, value)
    high = _solve(lambda d: _tango(gained, lost, count, d) + z, value, 1.0)
    return Interval(value, low, high)


def _tango(gained: float, lost: float, count: float, difference: float) -> float:
    """Score statistic of the hypothesis that the difference of shares is `difference`; falls as that grows."""
    a = 2 * count
    b = -gained - lost + (2 * count - gained + lost) * difference
    c = -lost * difference * (1 - difference)
    share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = count * (2 * share + difference * (1 - difference))
    score = gained - lost - count * difference
    if variance <= 0:
        return math.copysign(math.inf, score) if score else 0.0
    return score / math.sqrt(variance)


def _solve(falling: Callable[[float], float], low: float, high: float) -> float:
    """Root of a falling function by bisection to 1e-7, finer than any share of countable images."""
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


@lru_cache
def _z() -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + CONFIDENCE) / 2))


@lru_cache
def t_quantile(freedom: float) -> float:
    """Standard errors to either side of a mean that hold 95 % of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
