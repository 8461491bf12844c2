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
    trimmed = x[cut : n - cut]
    median, p90, p95, p99 = (take_quantile(x, q) for q in (0.5, 0.9, 0.95, 0.99))
    means = float(x.mean()), median, p90, p95, p99, float(x[-1])
    return Summary(n, *means, compute_std(x), float(trimmed.mean()), compute_std(trimmed))


def over_units(values: Sequence[tuple[Hashable, float]]) -> list[float]:
    """Return the mean of each unit's values, in order of first appearance.

    A unit is the highest level drawn independently, such as the build of an engine: its values share the effect of that
    draw, so only their mean is an independent observation.
    """
    units: dict[Hashable, list[float]] = {}
    for unit, value in values:
        units.setdefault(unit, []).append(value)
    return [float(np.mean(each)) for each in units.values()]


def take_quantile(values: np.ndarray, q: float) -> float:
    position = q * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return float(values[low] + (values[high] - values[low]) * (position - low))


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
        block_var = self.blocks + self.samples / self.counts[2]
        if not self.rounds:
            return math.inf if block_var else 1.0
        return max(1.0, math.sqrt(round_cost / block_cost * block_var / self.rounds))


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
    sample_var = _pool_variance([b for each in logs for b in each])
    inverses = [float((1 / n).mean()) for n in sizes]  # variance of one sample within the block mean
    multi_rounds = [i for i, each in enumerate(blocks) if len(each) > 1]
    weights = np.array([len(blocks[i]) - 1.0 for i in multi_rounds])
    mean_inverse = float(np.average([inverses[i] for i in multi_rounds], weights=weights)) if multi_rounds else 0.0
    block_var = max(0.0, _pool_variance([blocks[i] for i in multi_rounds]) - sample_var * mean_inverse)
    inner_var = float(np.mean([(block_var + sample_var * s) / len(b) for s, b in zip(inverses, blocks, strict=True)]))
    groups = [means[[b == build for b in builds]] for build in dict.fromkeys(builds)]
    build_var = None
    if has_builds := len(groups) > 1 and min(map(len, groups)) > 1:
        centres = np.array([group.mean() for group in groups])
        build_var = max(
            0.0, float(centres.var(ddof=1)) - _pool_variance(groups) * float(np.mean([1 / len(g) for g in groups]))
        )
    round_var = max(0.0, (_pool_variance(groups) if has_builds else float(means.var(ddof=1))) - inner_var)
    block_count = float(np.mean([len(each) for each in blocks]))
    return VarianceComponents(
        round_var, block_var, sample_var, (len(logs), block_count, float(np.mean(np.concatenate(sizes)))), build_var
    )


def _pool_variance(groups: Sequence[np.ndarray]) -> float:
    """Return the variance within groups; 0 if no group has two values."""
    freedom = sum(len(g) - 1 for g in groups)
    return float(sum(((g - g.mean()) ** 2).sum() for g in groups)) / freedom if freedom else 0.0
