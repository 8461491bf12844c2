"""Statistics against scipy's own, against known answers, and by their promised coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats

from dyno.analysis import stats

SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=80).map(np.array)
MEDIANS = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6)
Z = scipy_stats.norm.ppf(0.975)


@given(SAMPLES)
def test_summary_is_numpys_and_scipys(x: np.ndarray) -> None:
    s = stats.summary(x)
    assert s.count == len(x)
    assert s.mean == pytest.approx(x.mean())
    assert s.max == x.max()
    assert (s.median, s.p90, s.p95, s.p99) == pytest.approx(tuple(np.percentile(x, [50, 90, 95, 99])))
    assert s.std == pytest.approx(x.std(ddof=1) if len(x) > 1 else 0.0)
    assert s.trimmed == pytest.approx(scipy_stats.trim_mean(x, 0.1))


def test_every_round_counts_the_same_however_many_samples_it_took() -> None:
    fast, slow = np.full(1000, 1.0), np.full(30, 4.0)
    s = stats.over_rounds([fast, slow])
    assert (s.count, s.max, s.std) == (1030, 4.0, 0.0)
    assert (s.mean, s.median, s.p99, s.trimmed) == pytest.approx((2.0,) * 4)


@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_the_median_over_rounds_is_what_speed_ups_are_ratios_of(rounds: list[np.ndarray]) -> None:
    s = stats.over_rounds(rounds)
    assert s.median == pytest.approx(stats.center([float(np.median(x)) for x in rounds]).value)
    assert s.median <= s.p90 <= s.p95 <= s.p99 <= s.max * (1 + 1e-12)
    assert stats.over_rounds(rounds[:1]) == stats.summary(rounds[0])


def test_trimmed_values_lack_a_tenth_at_each_end() -> None:
    x = np.array([0.0, *[1.0, 2.0] * 4, 100.0])
    s = stats.summary(x)
    assert s.trimmed == 1.5
    assert s.trimmed_std == pytest.approx(np.std([1.0, 2.0] * 4, ddof=1))
    assert s.std > 10


def test_summary_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.summary(np.empty(0))


@pytest.mark.parametrize("n", [25, 60, 201])
def test_median_interval_is_what_the_bootstrap_converges_to(n: int) -> None:
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


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts: tuple[int, int]) -> None:
    hits, n = counts
    expected = scipy_stats.binomtest(hits, n).proportion_ci(method="wilson")
    found = stats.wilson(hits, n)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert found.low <= found.value <= found.high
    assert found.high > found.low


@given(MEDIANS, MEDIANS)
def test_speedup_is_welchs_interval(own: list[float], reference: list[float]) -> None:
    found = stats.speedup(own, reference)
    a, b = np.log(own), np.log(reference)
    assume(min(a.var(ddof=1), b.var(ddof=1)) > 1e-9)  # scipy loses precision on nearly equal rounds
    expected = scipy_stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx(
        (expected.low, expected.high), rel=1e-6, abs=1e-9
    )
    verdict = {(True, True): stats.FASTER, (False, False): stats.SLOWER}.get(
        (found.low > 1, found.high > 1), stats.SAME
    )
    assert found.verdict == verdict


@given(MEDIANS, MEDIANS)
def test_speedup_turned_round_is_the_inverse(a: list[float], b: list[float]) -> None:
    there, back = stats.speedup(a, b), stats.speedup(b, a)
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


def test_verdicts() -> None:
    slow, fast, noisy = [0.010, 0.0101, 0.0099], [0.005, 0.0051, 0.0049], [0.005, 0.010, 0.020]
    assert stats.speedup(fast, slow).verdict == "faster"
    assert stats.speedup(slow, fast).verdict == "slower"
    assert stats.speedup(noisy, slow).verdict == "not distinguishable"
    one = stats.speedup([0.005], slow)
    assert one.verdict == "one round only"
    assert one.value == pytest.approx(2, rel=0.01)
    assert math.isnan(one.low)
    assert stats.speedup([], slow).verdict == ""


def test_equal_engines_are_seldom_called_different() -> None:
    rng = np.random.default_rng(3)
    rounds = np.exp(rng.normal(-5, 0.02, (600, 2, 3)))
    verdicts = [stats.speedup(list(a), list(b)).verdict for a, b in rounds]
    assert sum(v != stats.SAME for v in verdicts) / len(verdicts) < 0.08


def test_center_covers_the_true_latency() -> None:
    rng = np.random.default_rng(5)
    found = [stats.center(list(np.exp(rng.normal(math.log(0.004), 0.03, 3)))) for _ in range(500)]
    assert 0.91 < sum(i.low <= 0.004 <= i.high for i in found) / len(found) < 0.99
    assert math.isnan(stats.center([0.004]).low)


def score(gained: int, lost: int, n: int, d: float) -> float:
    """The score statistic with the nuisance parameter found by a numerical maximum of the likelihood."""

    def against(p: float) -> float:
        rest = 1 - 2 * p - d
        return -(gained * math.log(p + d) + lost * math.log(p) + (n - gained - lost) * math.log(rest))

    low, high = max(0.0, -d), (1 - d) / 2
    p = optimize.minimize_scalar(
        against, bounds=(low + 1e-12, high - 1e-12), method="bounded", options={"xatol": 1e-12}
    ).x
    return (gained - lost - n * d) / math.sqrt(n * (2 * p + d - d * d))


@pytest.mark.parametrize(("gained", "lost", "n"), [(3, 9, 120), (1, 4, 360), (12, 2, 50), (20, 25, 300)])
def test_tangos_limits_are_where_the_score_test_turns(gained: int, lost: int, n: int) -> None:
    found = stats.paired_difference(gained, lost, n)
    assert score(gained, lost, n, found.low) == pytest.approx(Z, abs=2e-3)
    assert score(gained, lost, n, found.high) == pytest.approx(-Z, abs=2e-3)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(80, 5000))
def test_paired_difference_is_never_certain(gained: int, lost: int, n: int) -> None:
    found = stats.paired_difference(gained, lost, n)
    assert -1 <= found.low < found.value < found.high <= 1
    mirror = stats.paired_difference(lost, gained, n)
    assert (mirror.low, mirror.high) == pytest.approx((-found.high, -found.low), abs=1e-6)


def test_no_discordant_pair_still_has_a_width() -> None:
    found = stats.paired_difference(0, 0, 360)
    assert found.high == pytest.approx(Z**2 / (360 + Z**2))
    assert found.low == -found.high
    almost = stats.paired_difference(1e-6, 1e-6, 360)  # the closed form is the limit of the general one
    assert almost.high == pytest.approx(found.high, abs=1e-4)


@pytest.mark.parametrize(("gain", "loss"), [(0.002, 0.008), (0.0, 0.005), (0.02, 0.02)])
def test_paired_difference_covers_rare_differences(gain: float, loss: float) -> None:
    """Where Wald's interval fails: a few discordant pairs in 360."""
    drawn = np.random.default_rng(7).multinomial(360, [gain, loss, 1 - gain - loss], 1500)
    found = [stats.paired_difference(int(g), int(lost), 360) for g, lost, _ in drawn]
    assert sum(i.low <= gain - loss <= i.high for i in found) / len(found) > 0.94


DRIFT, PROCESS = 0.06, 0.02  # standard deviations of logs: of the machine between jobs, and of a process


def rounds(rng: np.random.Generator, studies: int, count: int, effect: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Log medians [studies, count] of two trials one after the other, each in its own moment of the machine, and the
    log ratios of the same processes in turns."""
    process = PROCESS * rng.standard_normal((2, studies, count))
    drift = DRIFT * rng.standard_normal((2, studies, count))
    own, reference = process[0] - effect, process[1]
    return np.stack([own + drift[0], reference + drift[1]]), reference - own


def power(count: int, effect: float, studies: int = 200) -> tuple[float, float]:
    """How often a speed-up of that log is found in studies of so many rounds: by Welch, and in turns."""
    alone, paired = rounds(np.random.default_rng(count), studies, count, effect)
    welch = [stats.speedup(*np.exp(alone[:, i]).tolist()).verdict == stats.FASTER for i in range(studies)]
    turns = [stats.paired_speedup(paired[i]).verdict == stats.FASTER for i in range(studies)]
    return float(np.mean(welch)), float(np.mean(turns))


def test_intervals_in_turns_cover_what_they_should() -> None:
    _, paired = rounds(np.random.default_rng(0), 4000, 4, effect=0.03)
    found = [stats.paired_speedup(logs) for logs in paired]
    assert 0.93 < np.mean([s.low < np.exp(0.03) < s.high for s in found]) < 0.97
    _, same = rounds(np.random.default_rng(1), 4000, 4)
    assert np.mean([stats.paired_speedup(logs).verdict != stats.SAME for logs in same]) < 0.07


@pytest.mark.parametrize("count", [3, 5])
def test_turns_see_what_drift_hides(count: int) -> None:
    found = {effect: power(count, effect) for effect in np.geomspace(0.02, 0.6, 14)}
    alone, turns = (min(effect for effect, each in found.items() if each[i] >= 0.8) for i in (0, 1))
    assert turns < 0.65 * alone
    assert found[turns][0] < 0.5


def test_one_round_in_turns_is_no_verdict() -> None:
    assert stats.paired_speedup([0.5]).verdict == stats.ONE_ROUND
    assert stats.paired_speedup([]).verdict == ""
    found = stats.paired_speedup([0.1, 0.1])
    assert found.verdict == stats.FASTER and found.measured == stats.TURNS and found.value == pytest.approx(np.exp(0.1))
