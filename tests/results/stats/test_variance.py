"""Where the spread comes from: known components are found again, and the advice is the cheapest way to a width."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dyno.results import stats

TRUTH = 0.02, 0.01, 0.05  # deviations: rounds, blocks, samples


def nested(rng: np.random.Generator, rounds: int, blocks: int, samples: int) -> list[list[np.ndarray]]:
    """Log values with those deviations; blocks differ in how many samples they hold."""
    made = []
    for each in TRUTH[0] * rng.standard_normal(rounds):
        sizes = rng.integers(samples // 2, 2 * samples, blocks)
        made.append([each + TRUTH[1] * rng.standard_normal() + TRUTH[2] * rng.standard_normal(n) for n in sizes])
    return made


def test_components_are_found_again() -> None:
    rng = np.random.default_rng(0)
    found = [stats.levels(nested(rng, 5, 8, 20)) for _ in range(300)]
    for name, deviation in zip(("rounds", "blocks", "samples"), TRUTH, strict=True):
        assert np.mean([getattr(f, name) for f in found]) == pytest.approx(deviation**2, rel=0.12)
    assert found[0] is not None and found[0].counts[:2] == (5, 8)


def test_builds_are_a_level_where_each_has_rounds() -> None:
    rng, drawn, rounds = np.random.default_rng(2), 0.03, 12
    builds = [number % 4 for number in range(rounds)]
    found = []
    for _ in range(300):
        of_build = drawn * rng.standard_normal(4)
        logs = [
            [block + of_build[k] for block in each] for k, each in zip(builds, nested(rng, rounds, 4, 20), strict=True)
        ]
        found.append(stats.levels(logs, builds))
    assert np.mean([f.builds for f in found]) == pytest.approx(drawn**2, rel=0.12)
    assert np.mean([f.rounds for f in found]) == pytest.approx(TRUTH[0] ** 2, rel=0.12)
    assert found[0].parts[0] == found[0].builds
    assert stats.levels(logs, range(rounds)).builds is None and stats.levels(logs).builds is None


def test_one_block_a_round_has_nothing_between_blocks() -> None:
    rng = np.random.default_rng(1)
    found = stats.levels([[rng.standard_normal(50)] for _ in range(4)])
    assert found is not None and found.blocks == 0 and found.samples == pytest.approx(1, rel=0.3)
    assert stats.levels([[rng.standard_normal(50)]]) is None and stats.levels([[], []]) is None


def test_the_best_length_of_a_round_is_the_best() -> None:
    """Against a search: the variance of the mean for a given time over every number of blocks."""
    found = stats.VarianceComponents(4e-4, 1e-4, 25e-4, (5, 10.0, 20.0))
    start, block = 2.0, 0.1
    best = found.best_blocks(start, block)
    within = found.blocks + found.samples / 20

    def cost(blocks: float) -> float:  # variance of a round's mean times its seconds
        return (found.rounds + within / blocks) * (start + block * blocks)

    assert best == pytest.approx(min(np.linspace(1, 60, 2000), key=cost), abs=0.05)
    assert math.isinf(stats.VarianceComponents(0.0, 1e-4, 0.0, (2, 5.0, 1.0)).best_blocks(start, block))
