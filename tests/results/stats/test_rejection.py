"""Disturbed rounds are left out of a mean, and intervals and p-values allow for that."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from dyno.results import stats
from dyno.results.stats import rejection

# Speed-ups of a demo on a machine in use (2026-11-26): openvino int8 at batch 1, pytorch bf16 at batch 8.
OPENVINO = (13.9, 12.5, 95.9, 13.2, 12.2, 12.9, 13.4)
BF16 = (1.05, 1.07, 1.40, 1.08, 1.05, 1.06, 1.05, 1.05)


def simulate(studies: int, rounds: int, chance: float, seed: int) -> np.ndarray:
    """Draw log ratios of equal speeds; some rounds are disturbed, all in one direction, by 0.8 in the mean."""
    rng = np.random.default_rng(seed)
    hits = rng.random((studies, rounds)) < chance
    return 0.02 * rng.standard_normal((studies, rounds)) + hits * rng.exponential(0.8, (studies, rounds))


@pytest.mark.parametrize("family", [1, 13])
def test_one_disturbed_round_of_seven_does_not_undo_six(family: int) -> None:
    """At the third look and beside twelve more pairs."""
    evidence = [stats.paired(np.log(OPENVINO))] * family
    for speedup in stats.decide_family(evidence, stats.Rule(first=5)):
        assert speedup.verdict == stats.FASTER and speedup.rejected == 1
        assert 11 < speedup.low < speedup.value < speedup.high < 15.2
        assert speedup.value == pytest.approx(scipy_stats.gmean(np.delete(OPENVINO, 2)))
        assert speedup.unfiltered == pytest.approx(scipy_stats.gmean(OPENVINO))


def test_a_small_gain_is_decided_beside_a_disturbed_round() -> None:
    speedup = stats.paired_speedup(np.log(BF16), stats.Rule(first=5))
    assert (speedup.verdict, speedup.rejected) == (stats.FASTER, 1) and 1.02 < speedup.low < 1.06 < speedup.high < 1.10


def test_without_a_far_round_it_is_students_t_at_nine_tenths_of_the_error() -> None:
    values = np.log([1.9, 2.0, 2.1, 2.05, 1.95])
    low, high = scipy_stats.t.interval(1 - 0.05 * 0.9, 4, values.mean(), scipy_stats.sem(values))
    speedup = stats.paired_speedup(values)
    assert (speedup.low, speedup.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert speedup.p == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue / 0.9)
    assert speedup.rejected == 0


@pytest.mark.parametrize(("rounds", "level"), [(4, 0.05), (5, 0.05), (5, 0.01), (7, 0.05), (10, 0.02), (20, 0.05)])
@pytest.mark.parametrize("chance", [0.0, 0.1])
def test_false_alarms_keep_their_level(rounds: int, level: float, chance: float) -> None:
    studies, alarms = 2000, 0
    for study in simulate(studies, rounds, chance, seed=rounds):
        found = stats.paired(study)
        assert found is not None
        alarms += found.p_value <= level
    assert scipy_stats.binomtest(alarms, studies, level, "greater").pvalue > 0.001, alarms / studies


def test_intervals_stay_narrow_where_a_tenth_of_rounds_is_disturbed() -> None:
    """Four of five are at most a fifth as wide in the logarithm as Student's, seven rounds each."""
    drawn = simulate(600, 7, 0.1, seed=3)
    own = [stats.paired_speedup(study) for study in drawn]
    plain = scipy_stats.sem(drawn, axis=1) * scipy_stats.t.ppf(0.975, 6)
    widths = [math.log(each.high / each.low) / 2 for each in own]
    assert np.quantile(widths, 0.8) < 0.2 * np.quantile(plain, 0.8)


def test_critical_values_and_p_values_belong_together() -> None:
    for rounds in (3, 4, 7, 16, 40):
        for rejected in range(rejection.most_rejected(rounds) + 1):
            values = [rejection.critical_value(rounds, rejected, level) for level in (0.05, 0.003, 1e-5)]
            assert values == sorted(values)
            assert rejection.p_value(values[1], rounds, rejected) == pytest.approx(0.003, rel=1e-3)
            assert values[0] >= scipy_stats.t.ppf(0.975, rounds - rejected - 1) * (1 - 1e-6)


def test_three_rounds_are_all_kept() -> None:
    assert len(rejection.keep_undisturbed(np.array([1.0, 1.01, 5.0]))) == 3
    assert [*rejection.keep_undisturbed(np.array([1.0, 5.0, 1.01, 1.02]))] == [1.0, 1.01, 1.02]
    assert len(rejection.keep_undisturbed(np.array([1.0, 5.0, 9.0, 1.01, 1.02, 1.0, 1.01]))) == 6, "a quarter at most"
