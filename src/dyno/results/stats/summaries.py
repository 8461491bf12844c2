"""Summaries of samples: of one process, and of several processes with equal weight."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

TRIMMED_SHARE = 0.1  # share cut at each end by the trimmed mean (R34)


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


def summarise(samples: np.ndarray) -> Summary:
    """Summarise raw samples; percentiles interpolate linearly, trimmed values lack the fastest and slowest 10 %.

    ValueError without samples.
    """
    if not len(samples):
        raise ValueError("no samples to summarise")
    x = np.sort(samples)
    n, cut = len(x), int(len(x) * TRIMMED_SHARE)
    kept = x[cut : n - cut]
    median, p90, p95, p99 = (take_quantile(x, q) for q in (0.5, 0.9, 0.95, 0.99))
    means = float(x.mean()), median, p90, p95, p99, float(x[-1])
    return Summary(n, *means, compute_std(x), float(kept.mean()), compute_std(kept))


def over_units(values: Sequence[tuple[Hashable, float]]) -> list[float]:
    """Return the mean of each unit's values, in order of first appearance.

    A unit is the highest level drawn independently, such as the build of an engine: its values share the effect of that
    draw, so only their mean is an independent observation.
    """
    units: dict[Hashable, list[float]] = {}
    for unit, value in values:
        units.setdefault(unit, []).append(value)
    return [float(np.mean(each)) for each in units.values()]


def take_quantile(ordered: np.ndarray, q: float) -> float:
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def compute_std(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0


# Sources of the spread: rounds (processes), blocks within a round, samples within a block.


@dataclass(frozen=True)
class VarianceComponents:
    """Variances of log values between rounds, between blocks of a round and between samples of a block.

    A level that adds nothing is 0. `counts` are rounds, blocks per round and samples per block. `builds` is the
    variance between builds, None unless every build has several rounds.
    """

    rounds: float
    blocks: float
    samples: float
    counts: tuple[int, float, float]
    builds: float | None = None

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Shares of builds, rounds, blocks and samples in the variance of a round's mean."""
        _, blocks, samples = self.counts
        return self.builds or 0.0, self.rounds, self.blocks / blocks, self.samples / (blocks * samples)

    def best_blocks(self, round_cost: float, block_cost: float) -> float:
        """Return the number of blocks per round that gives the narrowest interval in a given time.

        `round_cost` and `block_cost` are the seconds to start a round and a block. Infinite if rounds themselves don't
        differ (Kalibera and Jones 2013, arXiv 2007.10899: the root of the ratio of costs times that of variances).
        """
        within = self.blocks + self.samples / self.counts[2]
        if not self.rounds:
            return math.inf if within else 1.0
        return max(1.0, math.sqrt(round_cost / block_cost * within / self.rounds))


def estimate_levels(logs: Sequence[Sequence[np.ndarray]], builds: Sequence[Hashable] = ()) -> VarianceComponents | None:
    """Estimate variance components of nested data, by analysis of variance.

    `logs` holds the samples of each block per round, `builds` the build of each round. Builds are a level if there are
    at least two, with at least two rounds each. A component is its level's mean square less the contribution of lower
    levels, at least 0 (Searle, Casella and McCulloch 1992). None with fewer than two rounds. Rounds of one block add
    nothing between blocks.
    """
    if len(logs) < 2 or not all(len(each) and all(b.size for b in each) for each in logs):
        return None
    sizes = [np.array([len(b) for b in each], np.float64) for each in logs]
    blocks = [np.array([b.mean() for b in each]) for each in logs]
    means = np.array([each.mean() for each in blocks])
    samples = _pool_variance([b for each in logs for b in each])
    seen = [float((1 / n).mean()) for n in sizes]  # variance of one sample within the block mean
    many = [i for i, each in enumerate(blocks) if len(each) > 1]
    weight = np.array([len(blocks[i]) - 1.0 for i in many])
    below = float(np.average([seen[i] for i in many], weights=weight)) if many else 0.0
    between = max(0.0, _pool_variance([blocks[i] for i in many]) - samples * below)
    inside = float(np.mean([(between + samples * s) / len(b) for s, b in zip(seen, blocks, strict=True)]))
    groups = [means[[b == build for b in builds]] for build in dict.fromkeys(builds)]
    drawn = None
    if nested := len(groups) > 1 and min(map(len, groups)) > 1:
        centres = np.array([group.mean() for group in groups])
        drawn = max(
            0.0, float(centres.var(ddof=1)) - _pool_variance(groups) * float(np.mean([1 / len(g) for g in groups]))
        )
    rounds = max(0.0, (_pool_variance(groups) if nested else float(means.var(ddof=1))) - inside)
    count = float(np.mean([len(each) for each in blocks]))
    return VarianceComponents(
        rounds, between, samples, (len(logs), count, float(np.mean(np.concatenate(sizes)))), drawn
    )


def _pool_variance(groups: Sequence[np.ndarray]) -> float:
    """Return the variance within groups; 0 if no group has two values."""
    free = sum(len(g) - 1 for g in groups)
    return float(sum(((g - g.mean()) ** 2).sum() for g in groups)) / free if free else 0.0
