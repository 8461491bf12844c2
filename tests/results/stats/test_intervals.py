"""Summaries and intervals against scipy's and known answers, and their promised coverage."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats
from scipy.signal import lfilter

from dyno.results import stats
from dyno.results.stats import rejection

SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=80).map(np.array)
Z = scipy_stats.norm.ppf(0.975)


@given(SAMPLES)
def test_the_summary_matches_numpy_and_scipy(x: np.ndarray) -> None:
    s = stats.summarise(x)
    assert s.count == len(x)
    assert s.mean == pytest.approx(x.mean())
    assert s.max == x.max()
    assert (s.median, s.p90, s.p95, s.p99) == pytest.approx(tuple(np.percentile(x, [50, 90, 95, 99])))
    assert s.std == pytest.approx(x.std(ddof=1) if len(x) > 1 else 0.0)
    assert s.trimmed == pytest.approx(scipy_stats.trim_mean(x, 0.1))


def test_rounds_have_equal_weight_whatever_their_samples() -> None:
    fast, slow = np.full(1000, 1.0), np.full(30, 4.0)
    s = stats.over_rounds([fast, slow])
    assert (s.count, s.max, s.std) == (1030, 4.0, 0.0)
    assert (s.mean, s.median, s.p99, s.trimmed) == pytest.approx((2.0,) * 4)


@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_speed_ups_are_ratios_of_the_median_over_rounds(rounds: list[np.ndarray]) -> None:
    s = stats.over_rounds(rounds)
    assert s.median == pytest.approx(stats.find_center([float(np.median(x)) for x in rounds]).value)
    assert s.median <= s.p90 <= s.p95 <= s.p99 <= s.max * (1 + 1e-12)
    assert stats.over_rounds(rounds[:1]) == stats.summarise(rounds[0])


def test_trimmed_values_drop_a_tenth_at_each_end() -> None:
    s = stats.summarise(np.array([0.0, *[1.0, 2.0] * 4, 100.0]))
    assert s.trimmed == 1.5
    assert s.trimmed_std == pytest.approx(np.std([1.0, 2.0] * 4, ddof=1))
    assert s.std > 10


def test_a_summary_of_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.summarise(np.empty(0))


@pytest.mark.parametrize("n", [25, 60, 201])
def test_the_median_interval_matches_the_bootstrap(n: int) -> None:
    x = np.random.default_rng(n).exponential(1.0, n)
    drawn = scipy_stats.bootstrap(
        (x,), np.median, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    )
    found, order = stats.median_interval(x), np.sort(x)
    for limit, other in zip((found.low, found.high), drawn.confidence_interval, strict=True):
        # Resampling is noisy: the limits may differ by one order statistic, no more.
        assert abs(np.searchsorted(order, limit) - np.searchsorted(order, other)) <= 1
    assert found.low <= found.value <= found.high


def test_median_interval_needs_three_samples() -> None:
    assert math.isnan(stats.median_interval(np.array([1.0, 2.0])).low)
    assert math.isnan(stats.median_interval(np.empty(0)).value)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99])
def test_percentile_intervals_are_minimal_for_each_tail(q: float) -> None:
    n = 800
    x = 1.0 + np.argsort(np.argsort(np.arange(n) * (5**0.5 - 1) / 2 % 1))  # ranks, evenly spread so that all count
    found = stats.percentile_intervals(x, [q])[0]
    below = scipy_stats.binom(n, q)
    assert below.cdf(found.low - 1) <= 0.025 < below.cdf(found.low)
    assert below.sf(found.high - 1) <= 0.025 < below.sf(found.high - 2)
    assert found.value == pytest.approx(np.percentile(x, 100 * q))


def test_percentile_intervals_cover_skewed_samples() -> None:
    drawn = np.random.default_rng(2).exponential(1.0, (1500, 700))
    found = [stats.percentile_intervals(x, [0.99])[0] for x in drawn]
    assert 0.95 <= np.mean([i.low <= -math.log(0.01) <= i.high for i in found]) < 0.99


@pytest.mark.parametrize("block", [1, 100])
@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_intervals_cover_autocorrelated_samples(memory: float, block: int) -> None:
    """With autoregressive noise and shifts by block, intervals that assume independence hold 0 in 42 % and 29 %."""
    rng = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(300):
        x = lfilter([1], [1, -memory], rng.normal(size=2500))[500:]
        x += np.repeat(rng.normal(size=2000 // block), block) * (block > 1)
        both = stats.median_interval(x), stats.percentile_intervals(x, [0.5])[0]
        hits += [each.low <= 0 <= each.high for each in both]
    assert (hits >= 0.88 * 300).all() and (hits <= 0.99 * 300).all(), hits
    (one,), (mirrored,) = stats.percentile_intervals(x, [0.9]), stats.percentile_intervals(-x, [1 - 0.9])
    assert (one.low, one.high) == (-mirrored.high, -mirrored.low), "either limit as the other of what is mirrored"


def test_too_few_samples_give_no_percentile_bound() -> None:
    assert math.isnan(stats.percentile_intervals(np.arange(100.0), [0.99])[0].high)
    assert math.isnan(stats.percentile_intervals(np.empty(0), [0.9])[0].value)
    assert [stats.samples_for(q) for q in (0.9, 0.95, 0.99)] == [64, 130, 662], "MLPerf's 64 and 662"


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_wilson_interval_matches_scipy(counts: tuple[int, int]) -> None:
    hits, n = counts
    expected = scipy_stats.binomtest(hits, n).proportion_ci(method="wilson")
    found = stats.compute_wilson(hits, n)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert found.low <= found.value <= found.high
    assert found.high > found.low


def test_a_disturbed_round_does_not_shift_the_latency() -> None:
    """Eager PyTorch took 1.5 ms in six rounds, and 15.8 ms in a round while other programs held the processors."""
    medians = [1.52e-3, 1.50e-3, 15.8e-3, 1.53e-3, 1.51e-3, 1.49e-3, 1.52e-3]
    found = stats.find_center(medians)
    assert found.value == pytest.approx(statistics.geometric_mean(m for m in medians if m < 0.01))
    assert 1.45e-3 < found.low < found.value < found.high < 1.57e-3
    rounds = [median * np.array([0.9, 1.0, 1.2]) for median in medians]
    assert stats.over_rounds(rounds).median == found.value and stats.over_rounds(rounds).max == pytest.approx(
        1.2 * 15.8e-3
    )


def test_center_covers_the_true_latency() -> None:
    rng = np.random.default_rng(5)
    found = [stats.find_center(list(np.exp(rng.normal(math.log(0.004), 0.03, 3)))) for _ in range(500)]
    assert 0.91 < sum(i.low <= 0.004 <= i.high for i in found) / len(found) < 0.99
    assert math.isnan(stats.find_center([0.004]).low)


def score(gained: int, lost: int, n: int, d: float) -> float:
    """Return the score statistic; the nuisance parameter maximises the likelihood numerically."""

    def against(p: float) -> float:
        rest = 1 - 2 * p - d
        return -(gained * math.log(p + d) + lost * math.log(p) + (n - gained - lost) * math.log(rest))

    low, high = max(0.0, -d), (1 - d) / 2
    p = optimize.minimize_scalar(
        against, bounds=(low + 1e-12, high - 1e-12), method="bounded", options={"xatol": 1e-12}
    ).x
    return (gained - lost - n * d) / math.sqrt(n * (2 * p + d - d * d))


@pytest.mark.parametrize(("gained", "lost", "n"), [(3, 9, 120), (1, 4, 360), (12, 2, 50), (20, 25, 300)])
def test_tango_limits_invert_the_score_test(gained: int, lost: int, n: int) -> None:
    found = stats.paired_difference(gained, lost, n)
    assert score(gained, lost, n, found.low) == pytest.approx(Z, abs=2e-3)
    assert score(gained, lost, n, found.high) == pytest.approx(-Z, abs=2e-3)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(80, 5000))
def test_paired_difference_is_never_certain(gained: int, lost: int, n: int) -> None:
    found = stats.paired_difference(gained, lost, n)
    assert -1 <= found.low < found.value < found.high <= 1
    mirror = stats.paired_difference(lost, gained, n)
    assert (mirror.low, mirror.high) == pytest.approx((-found.high, -found.low), abs=1e-6)


def test_an_interval_without_discordant_pairs_has_a_width() -> None:
    found = stats.paired_difference(0, 0, 360)
    assert found.high == pytest.approx(Z**2 / (360 + Z**2))
    assert found.low == -found.high
    almost = stats.paired_difference(1e-6, 1e-6, 360)  # the closed form is the limit of the general one
    assert almost.high == pytest.approx(found.high, abs=1e-4)


@pytest.mark.parametrize(("gain", "loss"), [(0.002, 0.008), (0.0, 0.005), (0.02, 0.02)])
def test_paired_difference_covers_rare_differences(gain: float, loss: float) -> None:
    """Wald's interval fails here: a few discordant pairs in 360."""
    drawn = np.random.default_rng(7).multinomial(360, [gain, loss, 1 - gain - loss], 1500)
    found = [stats.paired_difference(int(g), int(lost), 360) for g, lost, _ in drawn]
    assert sum(i.low <= gain - loss <= i.high for i in found) / len(found) > 0.94


# Speed-ups of a demo on a machine in use (2026-11-26): openvino int8 at batch 1, pytorch bf16 at batch 8.
OPENVINO = (13.9, 12.5, 95.9, 13.2, 12.2, 12.9, 13.4)
BF16 = (1.05, 1.07, 1.40, 1.08, 1.05, 1.06, 1.05, 1.05)


def simulate(studies: int, rounds: int, chance: float, seed: int) -> np.ndarray:
    """Draw log ratios of equal speeds; disturbances all point in one direction and average 0.8."""
    rng = np.random.default_rng(seed)
    hits = rng.random((studies, rounds)) < chance
    return 0.02 * rng.standard_normal((studies, rounds)) + hits * rng.exponential(0.8, (studies, rounds))


@pytest.mark.parametrize("family", [1, 13])
def test_one_disturbed_round_of_seven_does_not_undo_six(family: int) -> None:
    """The evidence is the third look's, alone or with twelve more pairs."""
    evidence = [stats.pair_evidence(np.log(OPENVINO))] * family
    for speedup in stats.decide_family(evidence, stats.Rule(first=5)):
        assert speedup.verdict == stats.FASTER and speedup.rejected == 1
        assert 11 < speedup.low < speedup.value < speedup.high < 15.2
        assert speedup.value == pytest.approx(scipy_stats.gmean(np.delete(OPENVINO, 2)))
        assert speedup.unfiltered == pytest.approx(scipy_stats.gmean(OPENVINO))


def test_a_small_gain_is_decided_despite_a_disturbed_round() -> None:
    speedup = stats.paired_speedup(np.log(BF16), stats.Rule(first=5))
    assert (speedup.verdict, speedup.rejected) == (stats.FASTER, 1) and 1.02 < speedup.low < 1.06 < speedup.high < 1.10


def test_without_outliers_the_test_is_students_t_at_nine_tenths_alpha() -> None:
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
        found = stats.pair_evidence(study)
        assert found is not None
        alarms += found.p_value <= level
    assert scipy_stats.binomtest(alarms, studies, level, "greater").pvalue > 0.001, alarms / studies


def test_intervals_stay_narrow_with_a_tenth_of_rounds_disturbed() -> None:
    """Four of five are at most a fifth as wide in the logarithm as Student's, with seven rounds each."""
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


def test_at_most_a_quarter_of_the_rounds_is_rejected() -> None:
    assert len(rejection.keep_undisturbed(np.array([1.0, 1.01, 5.0]))) == 3
    assert [*rejection.keep_undisturbed(np.array([1.0, 5.0, 1.01, 1.02]))] == [1.0, 1.01, 1.02]
    assert len(rejection.keep_undisturbed(np.array([1.0, 5.0, 9.0, 1.01, 1.02, 1.0, 1.01]))) == 6, "a quarter at most"


def test_a_round_is_rejected_beyond_ten_robust_standard_deviations() -> None:
    values = np.array([-2.0, -1.0, -1.0, 0.0, 1.0, 1.0, 0.0])  # median 0, median absolute deviation 1
    limit = 10 / scipy_stats.norm.ppf(0.75)
    for values[-1], is_kept in ((0.999 * limit, True), (1.001 * limit, False)):
        assert (values[-1] in rejection.keep_undisturbed(values)) is is_kept
        (mean,), _ = stats.judge_studies(values[None], 0.05)
        assert mean == pytest.approx(values.mean() if is_kept else values[:-1].mean())


@pytest.mark.parametrize("rounds", [2, 3, 5, 12])
def test_vectorised_studies_are_judged_like_single_ones(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    logs = rng.normal(0.02, 0.01, (200, rounds)) + (rng.random((200, rounds)) < 0.1) * rng.exponential(0.8)
    means, halves = stats.judge_studies(logs, 0.01)
    each = [stats.pair_evidence(study) for study in logs]
    assert len({one.rejected for one in each if one}) == 1 + rejection.most_rejected(rounds)
    assert means == pytest.approx([one.difference for one in each if one])
    assert halves == pytest.approx([one.half_width(0.01) for one in each if one])
