"""Intervals: of medians and percentiles within a process, and of shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dyno.results.stats.summaries import take_quantile

CONFIDENCE = 0.95
ROUNDING_ERROR = 1e-12
MAX_SAMPLES = 1_000_000  # no advice to take more samples than this
AUTOCORRELATION_WINDOW = 5  # lags beyond this multiple of the autocorrelation time are noise
FLOOR_CONFIDENCE = 0.99  # confidence of MLPerf's early stopping


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval; `low` and `high` are NaN if the data can't give one."""

    value: float
    low: float
    high: float


def median_interval(samples: np.ndarray) -> Interval:
    """Compute the percentile bootstrap interval of the median within one process, exactly instead of by resampling.

    `samples` are in time order; a resample has their effective size (`independent_counts`). The probability that its
    median is at most the k-th smallest sample is a binomial tail (Maritz and Jarrett 1978), so the limit of infinitely
    many resamples costs one pass. Fewer than three samples give NaN limits.
    """
    from scipy.special import bdtr

    x = np.sort(samples)
    n = len(x)
    if n < 3:
        return Interval(float(np.median(x)) if n else math.nan, math.nan, math.nan)
    [independent_count] = independent_counts(samples, [take_quantile(x, 0.5)])
    size = max(3, round(independent_count))
    k = np.arange(1, n + 1)
    # Number of resampled values at or below x[k-1] that put the median there. For an even count, the lower middle value
    # gives the lower limit and the upper one the upper, so that the interval is no narrower than requested.
    lower, upper = (1.0 - bdtr(need - 1, size, k / n) for need in ((size + 1) // 2, size // 2 + 1))
    tail = (1 - CONFIDENCE) / 2
    low, high = int(np.searchsorted(lower, tail)), int(np.searchsorted(upper, 1 - tail))
    return Interval(take_quantile(x, 0.5), float(x[low]), float(x[min(high, n - 1)]))


def percentile_intervals(samples: np.ndarray, shares: Collection[float]) -> list[Interval]:
    """Compute percentiles (0.99: the 99th) within one process, with intervals from two order statistics.

    `samples` are in time order. The number of independent samples below the true percentile is binomial for any
    distribution (David and Nagaraja 2003, 7.1); dependent samples count with their effective size. Limits are NaN if
    there are too few samples.
    """
    x = np.sort(samples)
    if not len(x):
        return [Interval(math.nan, math.nan, math.nan) for _ in shares]
    values = [take_quantile(x, q) for q in (0.5, *shares)]
    # slow blocks affect every percentile: its effective sample size is at most the median's
    median, *counts = independent_counts(samples, values)
    return [_bound_percentile(x, q, max(1, round(min(median, count)))) for q, count in zip(shares, counts, strict=True)]


def _bound_percentile(values: np.ndarray, q: float, count: int) -> Interval:
    low, high = _find_ranks(count, q)
    n, step = len(values), len(values) / count
    first, last = math.ceil(low * step), n - math.ceil((count + 1 - high) * step)
    lower = float(values[first - 1]) if low else math.nan
    return Interval(take_quantile(values, q), lower, float(values[last]) if high <= count else math.nan)


def independent_counts(samples: np.ndarray, limits: Sequence[float]) -> list[float]:
    """Return the effective sample size for the share of samples up to each limit; samples are in time order.

    It is n / tau, with tau the integrated autocorrelation time of being below the limit, summed up to the first lag of
    at least five tau (Sokal 1997, "Monte Carlo Methods in Statistical Mechanics", 3.3).
    """
    is_below = (samples <= np.asarray(limits)[:, None]).astype(float)
    is_below -= is_below.mean(axis=1, keepdims=True)
    is_varying, n = is_below.any(axis=1), len(samples)
    correlation = np.fft.irfft(np.abs(np.fft.rfft(is_below[is_varying], 2 * n)) ** 2)[:, :n]
    times = 2 * np.cumsum(correlation / correlation[:, :1], axis=1) - 1  # by the last lag of the sum
    is_enough = np.arange(n) >= AUTOCORRELATION_WINDOW * times
    ends = np.where(is_enough.any(axis=1), is_enough.argmax(axis=1), times.argmax(axis=1))
    counts = np.full(len(is_below), float(n))
    counts[is_varying] = n / np.maximum(1.0, np.take_along_axis(times, ends[:, None], axis=1)[:, 0])
    return counts.tolist()


@lru_cache(maxsize=1024)
def _find_ranks(n: int, q: float) -> tuple[int, int]:
    """Return the limits of a percentile as 1-based ranks among n ordered samples; 0 or n + 1: no limit."""
    from scipy.special import bdtr

    tail = (1 - CONFIDENCE) / 2
    probabilities = bdtr(np.arange(n), n, q)  # probability of at most k samples below the percentile
    return int(np.searchsorted(probabilities, tail, side="right")), int(np.searchsorted(probabilities, 1 - tail)) + 1


def percentile_of(samples: np.ndarray, q: float) -> float:
    """Return a percentile (q = 0.99: the 99th) of raw samples, by linear interpolation."""
    return take_quantile(np.sort(samples), q)


@lru_cache
def samples_for(q: float) -> int:
    """Return the fewest samples that bound a percentile: 64 for the 90th, 662 for the 99th.

    With 99 % confidence two of them lie beyond it: MLPerf Inference's floor for early stopping (its rules, "early
    stopping", with one query over the limit allowed).
    """
    from scipy.special import bdtr

    # with 7 samples expected beyond it, the probability of at most one is below 1 %
    counts = np.arange(2, math.ceil(7 / (1 - q)) + 2)
    return int(counts[np.argmax(bdtr(1, counts, 1 - q) <= 1 - FLOOR_CONFIDENCE)])


def compute_wilson(hits: int, count: int) -> Interval:
    """Compute a share of hits with Wilson's score interval (1927), which stays inside 0…1 and never has zero width."""
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    z2 = _compute_z() ** 2
    share = hits / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def exceeds(hits: int, count: int, share: float) -> bool:
    """Return whether more than a share are hits, with 95 % confidence, by Clopper and Pearson's lower limit (1934)."""
    from scipy.special import bdtrc

    # probability of at least `hits` hits if the share were true
    chance = float(bdtrc(hits - 1, count, share)) if hits else 1.0
    return hits > share * count and chance <= 1 - CONFIDENCE + ROUNDING_ERROR


def estimate_needed(hits: int, count: int, share: float) -> int:
    """Estimate the number of samples with this rate of hits that would prove more than the share."""
    low, high = count, 2 * count
    while not exceeds(round(high * hits / count), high, share):
        low, high = high, 2 * high
        if high > MAX_SAMPLES:
            return MAX_SAMPLES
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (low, middle) if exceeds(round(middle * hits / count), middle, share) else (middle, high)
    return high


def paired_difference(gained: float, lost: float, count: float) -> Interval:
    """Compute the difference of two shares over the same samples, with Tango's score interval (1998).

    Of `count` samples, `gained` are right in A only, `lost` in the reference only; the value is (gained - lost) /
    count. The limits are the differences whose score test, with the nuisance parameter at its restricted maximum
    likelihood, is not rejected. Unlike Wald's interval it keeps its coverage when few pairs differ. If no pair differs,
    it extends z^2 / (n + z^2) to each side instead of having width zero.
    """
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    z = _compute_z()
    value = (gained - lost) / count
    if not gained and not lost:
        bound = z * z / (count + z * z)
        return Interval(0.0, -bound, bound)
    low = _find_root(lambda d: _compute_tango(gained, lost, count, d) - z, -1.0, value)
    high = _find_root(lambda d: _compute_tango(gained, lost, count, d) + z, value, 1.0)
    return Interval(value, low, high)


def paired_chance(gained: float, lost: float, count: float, limit: float) -> float:
    """Return the probability of this loss or a smaller one if the difference were `limit`: Tango's one-sided p."""
    from scipy.special import ndtr

    return float(ndtr(-_compute_tango(gained, lost, count, limit)))


def _compute_tango(gained: float, lost: float, count: float, difference: float) -> float:
    """Compute the score statistic for the hypothesis that the shares differ by `difference`; decreasing in it."""
    a = 2 * count
    b = -gained - lost + (2 * count - gained + lost) * difference
    c = -lost * difference * (1 - difference)
    share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = count * (2 * share + difference * (1 - difference))
    score = gained - lost - count * difference
    if variance <= 0:
        return math.copysign(math.inf, score) if score else 0.0
    return score / math.sqrt(variance)


def _find_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Find the root of a decreasing function by bisection to 1e-7, finer than any share of countable images."""
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


@lru_cache
def _compute_z() -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + CONFIDENCE) / 2))


@lru_cache(maxsize=1024)
def t_quantile(freedom: float, error: float = 1 - CONFIDENCE) -> float:
    """Return the standard errors to either side of a mean that leave the share `error` of Student's t outside."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - error / 2))
