"""Summaries of samples: of one process, and of several, each of which counts the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

CUT = 0.1  # share cut at each end by the trimmed mean (R34)


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


def summary(samples: np.ndarray) -> Summary:
    """Summarise raw samples; percentiles interpolate linearly, trimmed values lack the fastest and slowest 10 %.

    ValueError without samples.
    """
    if not len(samples):
        raise ValueError("no samples to summarise")
    x = np.sort(samples)
    n, cut = len(x), int(len(x) * CUT)
    kept = x[cut : n - cut]
    median, p90, p95, p99 = (at(x, q) for q in (0.5, 0.9, 0.95, 0.99))
    means = float(x.mean()), median, p90, p95, p99, float(x[-1])
    return Summary(n, *means, deviation(x), float(kept.mean()), deviation(kept))


def over_rounds(rounds: Sequence[np.ndarray]) -> Summary:
    """Summarise several processes' samples: the geometric mean of each statistic, as `center` does for the medians.

    So every process counts the same, however many samples it took, and ratios of medians are the speed-ups. `count` is
    the sum, and `max` the largest of all.
    """
    if len(rounds) == 1:
        return summary(rounds[0])
    each = np.array([astuple(summary(samples)) for samples in rounds])
    with np.errstate(divide="ignore"):  # a deviation may be 0, and is then
        means = Summary(*np.exp(np.log(each).mean(axis=0)).tolist())
    return replace(means, count=sum(map(len, rounds)), max=max(float(samples.max()) for samples in rounds))


def over_units(values: Sequence[tuple[Hashable, float]]) -> list[float]:
    """Return the mean of each unit's values, in the order in which units first appear.

    A unit is the largest thing that was drawn anew, such as the build of an engine: its values share the effect of that
    draw, so only their mean is an independent observation.
    """
    units: dict[Hashable, list[float]] = {}
    for unit, value in values:
        units.setdefault(unit, []).append(value)
    return [float(np.mean(each)) for each in units.values()]


def at(ordered: np.ndarray, q: float) -> float:
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def deviation(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0
