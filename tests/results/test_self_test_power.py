"""The power that a self-test tells is the one that simulated studies have, by the verdicts of real runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dyno.results import self_test, stats

STUDIES = 3000
NORMAL = {3: 3.264, 5: 1.682, 10: 0.996}  # spreads that are seen with 80 % power, by the noncentral t distribution


@pytest.mark.parametrize("rounds", [3, 5, 10])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("paired", [True, False])
def test_the_smallest_difference_is_seen_by_four_studies_of_five(rounds: int, paired: bool, heavy: bool) -> None:
    rng = np.random.default_rng(rounds)
    noise = 0.01 * (rng.standard_t(3, 4000) if heavy else rng.normal(0, 1, 4000))
    found = self_test.Studies(noise, rounds, paired)
    noise = np.concatenate([noise, -noise])
    difference = math.log1p(found.smallest)
    assert found.seen(difference) == pytest.approx(self_test.POWER, abs=0.01)
    if paired:
        said = [stats.paired_speedup(logs - difference) for logs in rng.choice(noise, (STUDIES, rounds))]
        if not heavy:
            assert difference == pytest.approx(0.01 * NORMAL[rounds], rel=0.06)
    else:
        sides = np.exp(rng.choice(noise / math.sqrt(2), (2, STUDIES, rounds)))
        said = [stats.speedup([*a * math.exp(difference)], [*b]) for a, b in zip(*sides, strict=True)]
    share = sum(one.verdict == stats.SLOWER for one in said) / STUDIES
    assert share == pytest.approx(self_test.POWER, abs=0.04)
    assert 0.01 < found.false_alarms < 0.07  # heavy tails make a t test timid


def test_limits_hold_what_more_rounds_would_find() -> None:
    rng = np.random.default_rng(0)
    truth = math.expm1(0.01 * NORMAL[3])
    found = [self_test.smallest_with_limits(rng.normal(0, 0.01, (25, 4)), 3) for _ in range(20)]
    assert sum(one.low <= truth <= one.high for one in found) >= 16
    assert math.isnan(self_test.smallest_with_limits(rng.normal(0, 0.01, (9, 4)), 3).low)
    assert self_test.find_smallest(np.ones(4), 1) == math.inf and math.isnan(self_test.find_smallest(np.ones(1), 3))


def test_the_interval_of_a_spread_holds_it() -> None:
    rng = np.random.default_rng(0)
    found = [self_test.spread_interval(float(x.std(ddof=1)), 9) for x in rng.normal(0, 0.02, (2000, 10))]
    assert sum(one.low <= 0.02 <= one.high for one in found) / 2000 == pytest.approx(0.95, abs=0.02)
    assert math.isnan(self_test.spread_interval(0.0, 0).low)


def test_the_upper_limit_of_a_share_holds_at_any_count() -> None:
    assert self_test.at_most(20, 400) == pytest.approx(0.0718, abs=1e-4)
    assert self_test.at_most(0, 20) == pytest.approx(1 - 0.05 ** (1 / 20))
    assert self_test.at_most(3, 3) == 1
