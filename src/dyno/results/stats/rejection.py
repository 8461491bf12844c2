"""Summaries of rounds without disturbed rounds, and critical values that allow for the rejection.

Rounds far from the median are left out, and t is formed from the rest. Leaving out the farthest makes the rest look
more alike than they are, so the critical values come from simulated normal rounds (benchmarks/critical_values.py),
separately for each number of rejected rounds. A tenth of the error is spent on studies with a rejection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np

from dyno.results.stats.intervals import CONFIDENCE, Interval, t_quantile
from dyno.results.stats.summaries import Summary, compute_std, summarise

REJECTION_DEVIATIONS = 10.0  # robust standard deviations from the median
MAD_TO_DEVIATION = 1.4826  # standard deviation over median absolute deviation of normal values
MIN_ROUNDS, MAX_TABLED_ROUNDS = 4, 16  # fewest rounds that allow a rejection, and most rounds in the table
REJECTION_ERROR_SHARE = 0.1  # error share of studies with a rejection
PLAIN_ERROR_SHARE = 1 - REJECTION_ERROR_SHARE  # error share of studies without a rejection
T_GRID = tuple(2.0**k for k in range(14))  # tabled values of |t|


def most_rejected(count: int) -> int:
    """Return the largest number of rounds to reject of `count`: a quarter, but at least one of four or more."""
    return max(1, count // 4) if count >= MIN_ROUNDS else 0


def keep_undisturbed(values: np.ndarray) -> np.ndarray:
    """Return the values that aren't rejected, in their order; float64 [rounds]."""
    rejected = find_rejected(values)
    return np.delete(values, rejected) if rejected else values


def find_rejected(values: np.ndarray) -> list[int]:
    """Return the indices of rejected values."""
    floats = values.tolist()
    middle = median(floats)
    distances = [abs(value - middle) for value in floats]
    limit = REJECTION_DEVIATIONS * MAD_TO_DEVIATION * median(distances)
    far_indices = [k for k, distance in enumerate(distances) if distance > limit]
    return sorted(far_indices, key=lambda k: -distances[k])[: most_rejected(len(floats))]


def judge_studies(values: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return each study's mean without rejected rounds, and half the width of its interval.

    `values` is float64 [studies, rounds] with at least two rounds; both results are float64 [studies]. `level` is the
    error of an interval.
    """
    means, errors, rejected = _summarise_studies(values)
    count = values.shape[1]
    critical = np.array([critical_value(count, k, level) for k in range(most_rejected(count) + 1)])
    return means, critical[rejected] * errors


def judge_apart(values: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return each study's difference between two uninterleaved trials, and half the width of its interval.

    `values` is float64 [2, studies, rounds] with at least two rounds; results are as in `judge_studies`. Disturbed
    rounds of each trial are rejected; the interval is that of `evidence.collect_evidence`.
    """
    from scipy.special import stdtrit

    means, errors, rejected = (np.array(each) for each in zip(*map(_summarise_studies, values), strict=True))
    count = values.shape[2]
    rejected_counts = range(most_rejected(count) + 1)
    factors = np.array([critical_value(count, k, level) / t_quantile(count - k - 1, level) for k in rejected_counts])
    has_rejected = rejected.any(axis=0)
    variances = (errors * np.where(has_rejected, factors[rejected], 1.0)) ** 2
    total = variances.sum(axis=0)
    with np.errstate(invalid="ignore"):
        freedom = np.nan_to_num(total**2 / (variances**2 / (count - rejected - 1)).sum(axis=0), nan=1.0)
    spent_level = level * np.where(has_rejected, 1.0, PLAIN_ERROR_SHARE if count >= MIN_ROUNDS else 1.0)
    return means[0] - means[1], stdtrit(freedom, 1 - spent_level / 2) * np.sqrt(total)


def _summarise_studies(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean, its standard error and the number of rejected rounds of each study, each [studies]."""
    count = values.shape[1]
    distances = np.abs(values - np.median(values, axis=1, keepdims=True))
    limits = REJECTION_DEVIATIONS * MAD_TO_DEVIATION * np.median(distances, axis=1, keepdims=True)
    order = np.argsort(-distances, axis=1, kind="stable")
    is_far = np.take_along_axis(distances > limits, order, axis=1)
    is_far[:, most_rejected(count) :] = False
    rejected = is_far.sum(axis=1)
    sorted_values = np.take_along_axis(values, order, axis=1)
    errors = sorted_values.std(axis=1, ddof=1, where=~is_far) / np.sqrt(count - rejected)
    return sorted_values.mean(axis=1, where=~is_far), errors, rejected


def find_center(values: Sequence[float], medians: Sequence[float] = ()) -> Interval:
    """Return the geometric mean of positive values, one per process, without disturbed ones, and its 95 % interval.

    Disturbed processes are found by `medians`, one per process, as in `over_rounds`; without them, by the values. One
    process gives NaN limits: its own samples tell nothing about the next process.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    kept_logs = np.delete(np.log(values), find_rejected(np.log(medians or values)))
    mean = float(kept_logs.mean())
    if len(kept_logs) < 2:
        return Interval(math.exp(mean), math.nan, math.nan)
    critical = critical_value(len(values), len(values) - len(kept_logs), 1 - CONFIDENCE)
    half = critical * compute_std(kept_logs) / math.sqrt(len(kept_logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def over_rounds(rounds: Sequence[np.ndarray]) -> Summary:
    """Summarise the samples of several processes: each statistic's geometric mean over undisturbed processes.

    Processes are rejected by their medians, as in `find_center`; the others have equal weight. `count` is the sum and
    `max` the largest over all processes. A deviation that is 0 in any process is 0.
    """
    if len(rounds) == 1:
        return summarise(rounds[0])
    summaries = np.array([astuple(summarise(samples)) for samples in rounds])
    rejected = find_rejected(np.log([np.median(samples) for samples in rounds]))
    kept_summaries = np.delete(summaries, rejected, axis=0)
    with np.errstate(divide="ignore"):  # a deviation may be 0
        means = Summary(*np.exp(np.log(kept_summaries).mean(axis=0)).tolist())
    return replace(means, count=sum(map(len, rounds)), max=max(float(samples.max()) for samples in rounds))


def p_value(t: float, count: int, rejected: int) -> float:
    """Return the two-sided p-value of |t| over `count` rounds, `rejected` of them left out."""
    plain_p = student_p(t, count - rejected - 1)
    if count < MIN_ROUNDS:
        return plain_p
    if not rejected:
        return min(1.0, plain_p / PLAIN_ERROR_SHARE)
    chance, factor = _after_rejection(t, count, rejected)
    share = REJECTION_ERROR_SHARE / most_rejected(count)
    return min(1.0, max(plain_p, min(plain_p * factor / (PLAIN_ERROR_SHARE + share / chance), chance / share)))


@lru_cache(maxsize=4096)
def critical_value(count: int, rejected: int, level: float) -> float:
    """Return the |t| whose p-value is `level`."""
    from scipy.optimize import brentq

    low = t_quantile(count - rejected - 1, level) / 2
    high = low
    while p_value(high, count, rejected) > level:
        high *= 2
    return float(brentq(lambda t: p_value(t, count, rejected) - level, low, high, xtol=1e-6 * low))


def student_p(t: float, freedom: float) -> float:
    """Return the two-sided p-value of Student's t."""
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(t)))


def _after_rejection(t: float, count: int, rejected: int) -> tuple[float, float]:
    """Return the probability of rejecting `rejected` of `count` undisturbed rounds, and the factor on the tail of |t|.

    The factor is how much likelier a larger |t| is than by Student's t. It is interpolated between tabled values and,
    beyond them, towards Bonferroni's bound over the choices of rejected rounds, which it never exceeds.
    """
    row = _read_table()[count if count <= MAX_TABLED_ROUNDS else MAX_TABLED_ROUNDS - (MAX_TABLED_ROUNDS - count) % 2]
    chance, factors = row[min(rejected, len(row)) - 1]
    bound = math.comb(count, rejected) / chance
    log_grid = np.log(T_GRID[: len(factors) + 1])
    log_factors = np.log(np.minimum([*factors, bound], bound))
    return chance, math.exp(np.interp(math.log(max(abs(t), 1e-300)), log_grid, log_factors))


@lru_cache(maxsize=1)
def _read_table() -> dict[int, list[tuple[float, list[float]]]]:
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return {int(n): [(each["chance"], each["factors"]) for each in row] for n, row in json.loads(text).items()}
