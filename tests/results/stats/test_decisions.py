"""The four verdicts and their promises on simulated studies: processes differ, and the machine drifts between rounds, a
drift that both members of a pair share when they measure in turns."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from dyno.results import stats
from dyno.results.stats import rejection
from dyno.results.stats.decisions import more_rounds, share_error

MEDIANS = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6)
DRIFT, PROCESS = 0.06, 0.02  # standard deviations of logs: the machine between jobs, a process
RULE = stats.Rule()
DIFFERENT = stats.FASTER, stats.SLOWER
STUDIES = 2000
NOISE = 3 * math.sqrt(0.05 * 0.95 / STUDIES)  # three standard errors of a share of 5 % in STUDIES studies


def in_turns(seed: int, studies: int, rounds: int, *speedups: float, process: float = PROCESS) -> np.ndarray:
    """Return log ratios [studies, trials, rounds] of trials with given speed-ups over the reference. All include the
    reference's process, none the machine's drift."""
    rng = np.random.default_rng(seed)
    drift = DRIFT * rng.standard_normal((studies, 1, rounds))
    processes = process * rng.standard_normal((studies, len(speedups) + 1, rounds))
    seconds = drift + processes - np.log([1.0, *speedups])[None, :, None]
    return np.asarray(seconds[:, :1] - seconds[:, 1:])


def share_of(verdicts: list[str], *which: str) -> float:
    return float(np.mean([v in which for v in verdicts]))


@given(MEDIANS, MEDIANS)
def test_the_speedup_interval_matches_welch(own: list[float], reference: list[float]) -> None:
    found = stats.decide_apart(own, reference)
    a, b = np.log(own), np.log(reference)
    assume(a.var(ddof=1) > 1e-9 and b.var(ddof=1) > 1e-9)
    assume(not found.rejected)
    # One of four or more rounds might have been rejected; a tenth of the error is reserved for that.
    spent = 0.9 if max(len(own), len(reference)) >= 4 else 1.0
    expected = scipy_stats.ttest_ind(b, a, equal_var=False)
    limits = expected.confidence_interval(1 - 0.05 * spent)
    assume(max(abs(x) for x in limits) < 600)
    assert (found.low, found.high) == pytest.approx(np.exp(limits), rel=1e-6)
    assert found.p == pytest.approx(min(1.0, expected.pvalue / spent), rel=1e-6)
    if len(own) == len(reference):  # each round of both adds to the degrees of freedom
        evidence = stats.collect_evidence(own, reference)
        assert evidence is not None and evidence.parts * (len(own) - 1) == pytest.approx(expected.df)


def test_a_disturbed_round_of_separately_measured_trials_is_left_out() -> None:
    own, reference = [1.0, 1.01, 0.99, 1.02, 0.98], [2.0, 2.02, 1.98, 2.03, 30.0]
    found, undisturbed = stats.decide_apart(own, reference), stats.decide_apart(own, reference[:4])
    assert found.rejected == 1 and found.verdict == stats.FASTER
    assert found.value == pytest.approx(undisturbed.value)
    assert found.unfiltered == pytest.approx(np.exp(np.log(reference).mean() - np.log(own).mean()))
    assert found.low < undisturbed.low < undisturbed.high < found.high, "what was left out is uncertain too"
    still = stats.decide_apart([1.0] * 5, reference)  # only the reference is uncertain, as in one sample
    half = scipy_stats.sem(np.log(reference[:4])) * rejection.critical_value(5, 1, 0.05)
    assert math.log(still.high / still.low) / 2 == pytest.approx(half)
    assert stats.decide_apart(own, [2.0, 2.02, 1.98]).rejected == 0, (
        "three rounds don't tell which is far from the others"
    )
    for count, are_rounds in ((3, True), (4, False)):  # without rejection the test is Welch's
        logs = np.log(own[:count]), np.log(reference[:count])
        evidence = stats.collect_evidence(own[:count], reference[:count], are_rounds)
        assert evidence is not None
        assert evidence.p_value == pytest.approx(scipy_stats.ttest_ind(*logs, equal_var=False).pvalue)


@pytest.mark.parametrize(("rounds", "disturbed"), [((4, 4), 0.0), ((5, 5), 0.1), ((7, 5), 0.1), ((10, 10), 0.1)])
def test_equal_separately_measured_trials_rarely_get_a_direction(rounds: tuple[int, int], disturbed: float) -> None:
    rng = np.random.default_rng(sum(rounds))
    wrong, widths, by_welch = 0, list[float](), list[float]()
    for _ in range(STUDIES):
        one, two = (
            0.02 * rng.standard_normal(n) + (rng.random(n) < disturbed) * rng.exponential(0.8, n) for n in rounds
        )
        found = stats.decide_apart(np.exp(one).tolist(), np.exp(two).tolist())
        wrong += found.verdict in DIFFERENT
        assert (found.p <= 0.05) == (found.verdict in DIFFERENT)
        widths.append(math.log(found.high / found.low))
        by_welch.append(float(np.ptp(scipy_stats.ttest_ind(one, two, equal_var=False).confidence_interval(0.95))))
    assert wrong / STUDIES <= 0.05 + NOISE
    if disturbed:
        assert np.median(widths) < np.median(by_welch) / 2


@given(MEDIANS, MEDIANS)
def test_the_reversed_speedup_is_the_inverse(a: list[float], b: list[float]) -> None:
    there, back = stats.decide_apart(a, b), stats.decide_apart(b, a)
    assert there.value * back.value == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)
    opposite = {stats.FASTER: stats.SLOWER, stats.SLOWER: stats.FASTER}
    assert opposite.get(there.verdict, there.verdict) == back.verdict and there.more == back.more


def test_verdicts() -> None:
    slow, fast, noisy = [0.010, 0.0101, 0.0099], [0.005, 0.0051, 0.0049], [0.005, 0.010, 0.020]
    assert stats.decide_apart(fast, slow).verdict == "faster"
    assert stats.decide_apart(slow, fast).verdict == "slower"
    found = stats.decide_apart(noisy, slow)
    assert (found.verdict, found.more) == ("undecided", stats.MAX_ROUNDS + 1)
    alike = stats.paired_speedup([0.001, -0.002, 0.002])
    assert (alike.verdict, alike.more) == ("equivalent", None)
    assert stats.paired_speedup([0.001, -0.002, 0.002], stats.Rule(margin=0.001)).verdict == "undecided"
    one = stats.decide_apart([0.005], slow)
    assert one.verdict == stats.paired_speedup([0.5]).verdict == "one round only"
    assert one.value == pytest.approx(2, rel=0.01)
    assert math.isnan(one.low)
    assert stats.decide_apart([], slow).verdict == stats.paired_speedup([]).verdict == ""
    same = stats.paired_speedup([0.1, 0.1])
    assert (same.verdict, same.measured, same.value) == (stats.FASTER, stats.IN_TURNS, pytest.approx(np.exp(0.1)))
    assert stats.paired_speedup([0.0, 0.0]).verdict == stats.EQUIVALENT


LOGS = st.floats(-0.2, 0.2).map(lambda log: round(log, 15))  # not 5e-210: real latencies never have that ratio


@given(
    st.lists(st.lists(LOGS, min_size=1, max_size=6), min_size=1, max_size=7),
    st.sampled_from([RULE, stats.Rule(0.05, first=2)]),
)
def test_no_verdict_contradicts_its_interval(family: list[list[float]], rule: stats.Rule) -> None:
    found = stats.decide_family([stats.pair_evidence(logs) for logs in family], rule)
    for logs, s in zip(family, found, strict=True):
        if len(logs) < 2:
            assert s.verdict == stats.ONE_ROUND
            continue
        assume(np.std(logs) > 1e-6)
        within = s.low * (1 + rule.margin) >= 1 - 1e-12 and s.high <= 1 + rule.margin + 1e-12
        above, below = s.low > 1, s.high < 1
        expected = stats.FASTER if above else stats.SLOWER if below else stats.EQUIVALENT if within else stats.UNDECIDED
        assert s.verdict == expected
        assert (s.p <= stats.ALPHA) == (above or below)
        alone = stats.decide(stats.pair_evidence(logs), rule)
        assert s.low <= alone.low * (1 + 1e-12) and s.high >= alone.high * (1 - 1e-12), "never narrower than alone"


def test_holm_matches_statsmodels_and_spares_clear_rows() -> None:
    clear, close = [0.5, 0.51, 0.49], [0.02, 0.01, 0.015]
    alone = stats.paired_speedup(close)
    first, second = stats.decide_family([stats.pair_evidence(clear), stats.pair_evidence(close)])
    assert second == alone, "the last step has the whole error"
    assert first.p == pytest.approx(2 * stats.paired_speedup(clear).p)
    missing = stats.decide_family([None, stats.pair_evidence([0.1]), stats.pair_evidence(close)])
    assert [s.verdict for s in missing] == ["", stats.ONE_ROUND, alone.verdict] and missing[2] == alone


def test_intervals_keep_their_coverage() -> None:
    logs = in_turns(0, STUDIES, 4, 1.03)[:, 0]
    found = [stats.paired_speedup(each) for each in logs]
    assert 0.93 < np.mean([s.low < 1.03 < s.high for s in found]) < 0.97
    family = in_turns(1, STUDIES, 4, 1.0, 1.01, 1.04, 1.1)
    rows = [stats.decide_family([stats.pair_evidence(row) for row in study]) for study in family]
    for place, truth in enumerate((1.0, 1.01, 1.04, 1.1)):
        assert np.mean([row[place].low < truth < row[place].high for row in rows]) > 0.95 - NOISE


def test_equal_trials_of_a_table_are_seldom_called_different() -> None:
    """Over a family of eight, two of them really faster: any false claim counts."""
    truths = (1.0,) * 6 + (1.2, 1.5)
    studies = in_turns(2, STUDIES, 5, *truths)
    rows = [[s.verdict for s in stats.decide_family([stats.pair_evidence(row) for row in study])] for study in studies]
    assert np.mean([any(v in DIFFERENT for v in row[:6]) for row in rows]) <= 0.05 + NOISE
    assert np.mean([row[7] == stats.FASTER for row in rows]) > 0.99
    apart = np.exp(np.random.default_rng(3).normal(-5, 0.06, (STUDIES, 2, 3)))
    assert share_of([stats.decide_apart(a, b).verdict for a, b in apart], *DIFFERENT) <= 0.05 + NOISE


@pytest.mark.parametrize("process", [0.004, 0.008, 0.02])
def test_trials_at_the_margin_are_seldom_called_equivalent(process: float) -> None:
    studies = in_turns(4, STUDIES, 6, 1.02, 1 / 1.02, 1.02, process=process)
    rows = [[s.verdict for s in stats.decide_family([stats.pair_evidence(row) for row in study])] for study in studies]
    assert np.mean([stats.EQUIVALENT in row for row in rows]) <= 0.05 + NOISE
    alone = [stats.paired_speedup(study[0]).verdict for study in studies]
    assert share_of(alone, stats.EQUIVALENT) <= 0.05 + NOISE


def until_decided(studies: np.ndarray, first: int, rule: stats.Rule) -> list[tuple[str, int]]:
    """Return each study's verdict and rounds; it looks after `first` rounds and after every further one."""
    found = []
    for logs in studies:
        looks = ((stats.paired_speedup(logs[:n], rule), n) for n in range(first, len(logs) + 1))
        s, n = next((each for each in looks if each[0].decided), (stats.paired_speedup(logs, rule), len(logs)))
        found.append((s.verdict, n))
    return found


@pytest.mark.parametrize("first", [2, 3, 5])
def test_twenty_looks_keep_the_error(first: int) -> None:
    rule = stats.Rule(margin=1e-6, first=first)  # no study ends as equivalent
    same = in_turns(5, 800, first + 19, 1.0)[:, 0]
    wrong = share_of([v for v, _ in until_decided(same, first, rule)], *DIFFERENT)
    noise = 3 * math.sqrt(0.05 * 0.95 / 800)
    assert wrong <= 0.05 + noise
    peeking = stats.Rule(margin=1e-6)  # spends the whole 5 % at each look
    assert share_of([v for v, _ in until_decided(same, first, peeking)], *DIFFERENT) > 0.1, "what it is there for"


def test_twenty_looks_keep_the_error_of_equivalences_and_families() -> None:
    margin = in_turns(6, 600, 22, 1.02, process=0.008)[:, 0]
    noise = 3 * math.sqrt(0.05 * 0.95 / 600)
    rule = stats.Rule(first=3)
    assert share_of([v for v, _ in until_decided(margin, 3, rule)], stats.EQUIVALENT) <= 0.05 + noise
    wrong = 0
    for study in in_turns(7, 300, 15, 1.0, 1.0, 1.0, 1.1, process=0.01):
        left, rounds = [True] * 4, [3] * 4  # a decided study stops, the others continue
        while any(left) and max(rounds) < 15:
            rows = stats.decide_family(
                [stats.pair_evidence(row[:n]) for row, n in zip(study, rounds, strict=True)], rule
            )
            assert all(s.decided for s, on in zip(rows, left, strict=True) if not on), "what is decided stays so"
            left = [not s.decided for s in rows]
            rounds = [n + on for n, on in zip(rounds, left, strict=True)]
        wrong += any(s.verdict in DIFFERENT for s in rows[:3])
    assert wrong / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.parametrize("first", [3, 5, 20])
@pytest.mark.parametrize("level", [0.05, 0.005])
def test_all_looks_together_spend_almost_the_whole_error(first: int, level: float) -> None:
    """Compare Student's t of normal rounds at each of 60 looks with scipy's quantiles; 60,000 studies."""
    rounds = np.random.default_rng(first).standard_normal((60_000, first + 60))
    crossed = np.zeros(len(rounds), bool)
    for n in range(first, first + 61):
        t, limit = (
            scipy_stats.ttest_1samp(rounds[:, :n], 0, axis=1).statistic,
            scipy_stats.t.isf(level * share_error(n, first) / 2, n - 1),
        )
        crossed |= np.abs(t) > limit
    noise = 3 * math.sqrt(level / len(rounds))
    assert 0.6 * level < crossed.mean() <= level + noise


def test_the_first_look_spends_half_the_error_and_a_single_look_all() -> None:
    assert [share_error(n, 0) for n in (1, 9)] == [1, 1] and share_error(1, 3) == share_error(3, 3) == 0.5
    later = [share_error(n, 3) for n in range(3, 100)]
    assert later == sorted(later, reverse=True)


@pytest.mark.parametrize(
    ("difference", "first"), [(0.03, 0), (0.015, 0), (0.0, 0), (0.03, 4), (0.0, 4)], ids=lambda v: str(v)
)
def test_the_advised_rounds_have_the_promised_power(difference: float, first: int) -> None:
    """With the true difference and spread, the advised number of rounds decides about 80 % of studies."""
    spread = PROCESS * math.sqrt(2)
    seen = stats.Evidence(difference, spread / 2, 3, 4, stats.IN_TURNS, spread, rejected=0)
    more = more_rounds(seen, RULE.reach, stats.ALPHA, first)
    assert 1 <= more <= stats.MAX_ROUNDS
    rule = replace(RULE, first=first)

    def power(rounds: int) -> float:
        studies = in_turns(8, 1200, rounds, math.exp(difference))[:, 0]
        return float(np.mean([stats.paired_speedup(each, rule).decided for each in studies]))

    assert 0.77 < power(4 + more) < 0.9
    assert power(4 + more - max(2, more // 3)) < 0.8


def test_more_than_a_hundred_rounds_are_not_advised() -> None:
    seen = stats.Evidence(0.019, 0.05, 3, 4, stats.IN_TURNS, 0.1)
    assert more_rounds(seen, RULE.reach, stats.ALPHA, 0) == stats.MAX_ROUNDS + 1


def power_of(count: int, effect: float, studies: int = 200) -> tuple[float, float]:
    """Return the share of studies with `count` rounds that find a log speed-up of `effect`: by Welch, in turns."""
    rng = np.random.default_rng(count)
    process, drift = (s * rng.standard_normal((2, studies, count)) for s in (PROCESS, DRIFT))
    own, reference = np.exp(process + drift - [[[effect]], [[0.0]]])
    welch = [stats.decide_apart(a, b).verdict == stats.FASTER for a, b in zip(own, reference, strict=True)]
    turns = [stats.paired_speedup(r).verdict == stats.FASTER for r in process[1] - process[0] + effect]
    return float(np.mean(welch)), float(np.mean(turns))


@pytest.mark.parametrize("count", [3, 5])
def test_interleaving_detects_differences_hidden_by_drift(count: int) -> None:
    found = {effect: power_of(count, effect) for effect in np.geomspace(0.02, 0.6, 14)}
    alone, turns = (min(effect for effect, each in found.items() if each[i] >= 0.8) for i in (0, 1))
    assert turns < 0.65 * alone
    assert found[turns][0] < 0.5


@pytest.mark.parametrize("sessions", [3, 5, 10])
def test_two_equally_fast_sessions_rarely_get_a_direction(sessions: int) -> None:
    """Sessions spread by 1 %, rounds by 0.3 %: five rounds each; self-tests have ten rounds in other sessions."""
    rng = np.random.default_rng(sessions)

    def measure(count: int, rounds: int) -> np.ndarray:
        return np.asarray(0.01 * rng.standard_normal((count, 1)) + 0.003 * rng.standard_normal((count, rounds)))

    by_rounds, by_sessions, larger = list[str](), list[str](), list[str]()
    for _ in range(STUDIES):
        a, b = np.exp(measure(2, 5))
        spread = float(measure(sessions, 10).mean(axis=1).std(ddof=1))
        for found, own in ((by_sessions, a), (larger, a * 1.15)):
            evidence = stats.between_sessions(stats.collect_evidence(own, b), sessions, spread)
            found.append(stats.decide(evidence).verdict)
        by_rounds.append(stats.decide_apart(a, b).verdict)
    assert share_of(by_rounds, *DIFFERENT) > 0.5, "rounds don't know what differs between sessions"
    assert share_of(by_sessions, *DIFFERENT) <= 0.05 + NOISE
    assert share_of(larger, stats.SLOWER) > 0.9 and stats.FASTER not in larger


def test_fewer_than_three_sessions_decide_nothing() -> None:
    evidence = stats.collect_evidence([1.0, 1.01], [2.0, 2.01])
    assert evidence is not None
    for sessions, spread in ((0, 0.0), (2, 0.01), (3, 0.0)):
        assert stats.between_sessions(evidence, sessions, spread).single


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("spread", [0.01, 0.1, 0.3])
def test_equal_engines_with_few_undisturbed_rounds_rarely_differ(rounds: int, spread: float) -> None:
    """Two or three rounds are also tested with a usual spread: false claims stay within the promise."""
    studies = np.random.default_rng(3).normal(0, spread, (4000, rounds))
    found = [replace(stats.pair_evidence(logs), undisturbed=True).p_value for logs in studies]  # type: ignore[type-var]
    for level in (0.05, 0.01):
        assert np.mean(np.array(found) < level) <= level + 3 * np.sqrt(level / len(studies))


def test_two_undisturbed_rounds_reveal_a_large_difference() -> None:
    """At 14-fold, as eager PyTorch beside a compiler, Student's t of two rounds alone gives no bound."""
    logs = [2.56, 2.71]
    alone = stats.pair_evidence(logs)
    assert alone is not None
    both = replace(alone, undisturbed=True)
    deviation = np.sqrt((np.var(logs, ddof=1) + 2 * 0.2**2) / 3)
    usual = scipy_stats.t.sf(np.mean(logs) / (deviation / np.sqrt(2)), 3) * 2
    own = scipy_stats.ttest_1samp(logs, 0).pvalue
    assert own > 0.01 > both.p_value
    assert both.p_value == pytest.approx(min(own / 0.5, usual / 0.5))
    level = 0.05 / 13
    widths = (scipy_stats.t.isf(level / 4, 3) * deviation, scipy_stats.t.isf(level / 4, 1) * np.std(logs, ddof=1))
    assert both.half_width(level) == pytest.approx(min(widths) / np.sqrt(2))
    assert both.half_width(level) < alone.half_width(level) / 5
    four = stats.pair_evidence([2.56, 2.71, 2.6, 2.65])
    assert four is not None and replace(four, undisturbed=True).p_value == four.p_value, (
        "more rounds speak for themselves"
    )
