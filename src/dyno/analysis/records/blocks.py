"""Two trials that measured in turns: their ratio within each block, where both had the same machine."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dyno.analysis import stats
from dyno.analysis.records.results import TrialResult


def log_ratios(a: TrialResult, b: TrialResult, boundary: str, clock: str = "") -> list[float]:
    """One number for each set of fresh processes in which both took turns: the median of their `block_ratios`; where
    rounds go through builds of either engine, for each build the mean of those.

    A median, because a block in which others took the processor from one of the two is far off.
    """
    sets = enumerate(block_ratios(a, b, boundary, clock))
    return stats.over_units([(build or f"set {k}", float(np.median(each))) for k, (build, each) in sets])


def block_ratios(
    a: TrialResult, b: TrialResult, boundary: str, clock: str
) -> list[tuple[tuple[int, int] | None, np.ndarray]]:
    """log(a / b) of each block, float64 [blocks], for each set of fresh processes in which both took turns, with the
    builds of the two that ran; None where neither has several.

    a and b are the medians of a block's latencies at the boundary (images per second, where that is throughput).
    """
    tag = "throughput" if boundary == "throughput" else "latency"
    rounds_of_b = {r.turns: r for r in (*b.rounds, *b.companions) if r.ok and r.turns}
    pairs = [(r, rounds_of_b[r.turns]) for r in (*a.rounds, *a.companions) if r.ok and r.turns in rounds_of_b]
    sets = [
        (
            (x.build, y.build) if x.build or y.build else None,
            within(x.block_medians(tag, boundary, clock), y.block_medians(tag, boundary, clock)),
        )
        for x, y in pairs
    ]
    return [(builds, ratios) for builds, ratios in sets if ratios.size]


def within(a: Mapping[int, float], b: Mapping[int, float]) -> np.ndarray:
    """log(a / b) of each block that both have, float64 [blocks]."""
    return np.array([math.log(a[k] / b[k]) for k in sorted(a.keys() & b.keys())])
