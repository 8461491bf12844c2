"""Self-tests of simulated machines with known noise, and the reality of the reported power."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.report import self_test as report_self_test
from dyno.report.self_test import make_tables
from dyno.results import self_test, stats
from dyno.results.rounds import Round
from dyno.results.self_test import ProcessPair, SelfTest, StoredSelfTest, TestRound, find_smallest, find_visible, read
from dyno.results.trial_result import Results, TrialResult
from dyno.worker.facts.job import Facts, Turns
from dyno.worker.record import Record
from dyno.worker.spec import Dims, ModelSpec, Plan, Trial, to_json

SLOWED = (0.0, 0.01, 0.02, 0.05)


def simulated(
    rounds: int = 60, process: float = 0.004, block: float = 0.0, drift: float = 0.1, blocks: int = 9, bias: float = 0,
    wrong: float = 0.0, seed: int = 0, **more: Any,
) -> SelfTest:  # fmt: skip
    """Simulate a machine by the standard deviations of its noise: process, block, and the machine between rounds.

    `bias` slows down every second process; `wrong` is the relative error of a slow-down.
    """
    rng = np.random.default_rng(seed)
    found = []
    for level in rng.normal(0, drift, rounds):
        own = rng.normal(0, process, len(SLOWED) + 1)
        pairs = [
            ProcessPair(share, tuple((own[0] - own[i + 1]) - math.log1p(share * (1 + wrong)) - bias
                              + rng.normal(0, block, blocks) - rng.normal(0, block, blocks)))
            for i, share in enumerate(SLOWED)
        ]  # fmt: skip
        found.append(TestRound(math.exp(level + own[0]) / 1e3, tuple(pairs), **more))
    return SelfTest(
        StoredSelfTest("2026-11-23T10:00:00+00:00", "1", {"cores": 2}, "cpu", "net", 1, 0.9, 0.1, 3, tuple(found))
    )


def test_noise_is_attributed_to_its_levels() -> None:
    quiet = simulated(rounds=200)
    assert quiet.spread.value == pytest.approx(0.004 * math.sqrt(2), rel=0.1)
    assert quiet.spread.low < 0.004 * math.sqrt(2) < quiet.spread.high
    assert quiet.levels.block == 0 and quiet.bound_by == "process"
    assert quiet.apart == pytest.approx(0.1 * math.sqrt(2), rel=0.15), "what turns take out of the comparison"
    both = simulated(rounds=300, process=0.002, block=0.02)
    # A median of nine has 1.57 / 9 of a single value's variance.
    assert both.levels.block == pytest.approx(2 * 0.02**2 * 1.57 / 9, rel=0.35)
    assert both.levels.process < both.levels.block
    assert both.bound_by == "block"
    assert simulated(process=0.001, block=0.02, others=0.5).bound_by == "neighbours"
    assert simulated(process=0.001, block=0.02, steal=0.05).bound_by == "neighbours"
    assert simulated(process=0.001, block=0.02, clock=(2000.0, 2100.0)).bound_by == "clocks"
    assert simulated(process=0.001, block=0.02, clock=(2000.0, 2060.0)).bound_by == "block"
    assert simulated(rounds=1, clock=(2000.0,)).clock_spread == 0


@pytest.mark.parametrize(
    ("smallest", "grade"), [(0.01, "A"), (0.0101, "B"), (0.0201, "C"), (0.05, "C"), (0.1, "D"), (0.1001, "E")]
)
def test_the_grade_follows_the_smallest_visible_difference(
    smallest: float, grade: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelfTest, "find_visible", lambda *_: stats.Interval(smallest, smallest, smallest))
    assert simulated(rounds=2).grade == grade


def test_studies_on_a_steady_machine_keep_their_promises() -> None:
    found = simulated(rounds=900)
    assert found.false_alarms(3).count == 300 and found.false_alarms(10).count == 90
    assert found.false_alarms(3).interval.low <= 0.05 <= found.false_alarms(3).interval.high
    assert found.coverage.interval.value == pytest.approx(0.95, abs=0.02)
    assert found.equal.low < 1 < found.equal.high
    for one in found.verdicts:
        if one.slowdown:
            assert one.slower.interval.value == pytest.approx(one.predicted, abs=0.08), one
    assert report_self_test._describe_surprises(found) == []


def test_outliers_are_not_modelled_as_normal_noise() -> None:
    """A far-off round in ten hides less than its variance suggests."""
    calm = simulated(rounds=300, process=0.002).stored
    rounds = [
        replace(one, pairs=tuple(replace(pair, logs=tuple(x + 0.3 for x in pair.logs)) for pair in one.pairs))
        if number % 10 == 0 else one
        for number, one in enumerate(calm.rounds)
    ]  # fmt: skip
    found = SelfTest(replace(calm, rounds=tuple(rounds)))
    (seen,) = [one for one in found.verdicts if (one.slowdown, one.rounds) == (0.05, 3)]
    assert seen.slower.interval.low < seen.predicted < seen.slower.interval.high
    assert seen.predicted > 0.6
    assert find_smallest(np.random.default_rng(0).normal(0, found.spread.value, 4000), 3) > 0.3, (
        "as normal noise, hopeless"
    )


@pytest.mark.parametrize(
    ("spread", "grade"), [(0.002, "A"), (0.005, "B"), (0.01, "C"), (0.02, "D"), (0.04, "E")],
)  # fmt: skip
def test_the_grade_is_the_difference_visible_in_three_rounds(spread: float, grade: str) -> None:
    found = simulated(process=spread / math.sqrt(2), rounds=400)
    # Factors of the noncentral t distribution for normal noise.
    assert found.find_visible(3).value == pytest.approx(math.expm1(3.264 * spread), rel=0.15)
    assert found.find_visible(3).low < found.find_visible(3).value < found.find_visible(3).high
    assert found.grade == grade
    assert report_self_test.grade_self_test(found).startswith(f"Grade {grade} (")
    assert found.find_visible(10).value < found.find_visible(5).value < found.find_visible(3).value


def test_broken_promises_are_reported() -> None:
    biased = report_self_test._describe_surprises(simulated(bias=0.05, rounds=90))
    assert any("not to be trusted" in line for line in biased)
    unseen = report_self_test._describe_surprises(simulated(wrong=-1.0, rounds=90))
    assert any("depend on each other" in line for line in unseen)


def test_shorter_runs_detect_only_larger_differences() -> None:
    whole = simulated(rounds=300, process=0.002, block=0.01)
    known = whole.summary()
    usual = find_visible(known, 3, known.seconds, True)
    assert usual == whole.find_visible(3).value
    assert find_visible(known, 3, known.seconds / 3, True) > usual
    assert find_visible(known, 3, known.seconds * 9, True) == usual, "more than was tested is not promised"
    assert find_visible(known, 10, known.seconds, True) < usual < find_visible(known, 3, known.seconds, False)
    assert math.isinf(find_visible(known, 1, 1.0, True))
    stricter = find_visible(known, 5, 9.0, True, 0.05 / 6) / find_visible(known, 5, 9.0, True)
    assert stricter == pytest.approx(_find_reach(4, 0.05 / 6) / _find_reach(4, 0.05), rel=1e-3)
    assert find_visible(known, 80, 9.0, True) == pytest.approx(find_visible(known, 20, 9.0, True) / 2)
    assert math.isnan(find_visible(replace(known, apart={}), 3, 1.0, False))


def test_runs_describe_their_visible_difference() -> None:
    def said(rounds: int, spread: float) -> str:
        results = Results(Path("run"), [], self_test=simulated(process=spread).summary())
        trial = Trial(ModelSpec("net", "torchvision"), "pytorch", "fp32", Dims(1, 8, 8), plan=Plan(seconds=0.9))
        record = Record("ok", facts=Facts(turns=Turns("x", 0)))
        results.trials = [TrialResult("id", trial, [Round(Path("r"), n, record) for n in range(rounds)])]
        return report_self_test.of_run(results)

    assert "differences of ≥ 1" in said(3, 0.003) and "(3 rounds in turns, 80 % power; self-test of" in said(3, 0.003)
    assert "no difference below a factor of two" in said(2, 0.1)
    assert "it has one round" in said(1, 0.003)
    assert report_self_test.of_run(Results(Path("run"), [])) == ""


def test_stored_self_tests_are_read_back_or_rejected() -> None:
    stored = simulated(rounds=4).stored
    content = to_json(stored)
    assert read(content) == stored
    assert read({**content, "rounds": []}) is None
    assert read({**content, "schema": 99}) is None
    assert read({**content, "more": 1}) is None
    assert read({**content, "rounds": [{"first_s": "x", "pairs": []}]}) is None
    rounds = content["rounds"]
    assert read({**content, "rounds": rounds[:1]}) is None, "one round has no spread"
    less, other = copy.deepcopy(rounds[0]), copy.deepcopy(rounds[0])
    less["pairs"] = less["pairs"][1:]
    other["pairs"][0]["logs"][0] = 1e308
    for damaged in (less, other):
        assert read({**content, "rounds": [damaged, *rounds[1:]]}) is None


def test_each_kind_of_study_needs_its_rounds() -> None:
    few = simulated(rounds=4)
    assert {one.rounds for one in few.verdicts} == {3}
    visible_table, verdicts = make_tables(few)
    assert [row["rounds"] for row in visible_table.rows] == [3, 5, 10]
    assert [row["studies"] for row in verdicts.rows] == [1] * len(SLOWED)
    assert math.isnan(few.find_visible(3).low), "too few rounds for limits"


def _find_reach(freedom: int, level: float) -> float:
    """Return the noncentrality at which Student's t exceeds its critical value in 80 % of draws, by scipy.stats."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    wall = t.ppf(1 - level / 2, freedom)
    return float(brentq(lambda away: nct.sf(wall, freedom, away) - 0.8, 0.1, 50))


STUDIES = 3000
NORMAL = {3: 3.264, 5: 1.682, 10: 0.996}  # spreads visible with 80 % power, by the noncentral t distribution


@pytest.mark.parametrize("rounds", [3, 5, 10])
@pytest.mark.parametrize("tails", ["normal", "heavy", "bursts"])
@pytest.mark.parametrize("paired", [True, False])
def test_four_of_five_studies_detect_the_smallest_difference(rounds: int, paired: bool, tails: str) -> None:
    rng = np.random.default_rng(rounds)
    noise = 0.01 * (rng.standard_t(3, 4000) if tails == "heavy" else rng.normal(0, 1, 4000))
    if tails == "bursts":  # other programs slow a process down in 4 % of the rounds, which a study leaves out
        noise += (rng.random(4000) < 0.04) * rng.exponential(0.8, 4000)
    found = self_test.Studies(noise, rounds, paired)
    noise = np.concatenate([noise, -noise])
    difference = math.log1p(found.smallest)
    assert found.detection_rate(difference) == pytest.approx(self_test.TARGET_POWER, abs=0.01)
    if paired:
        said = [stats.paired_speedup(logs - difference) for logs in rng.choice(noise, (STUDIES, rounds))]
        if tails == "normal":
            assert difference == pytest.approx(0.01 * NORMAL[rounds], rel=0.06)
    else:
        sides = np.exp(rng.choice(noise / math.sqrt(2), (2, STUDIES, rounds)))
        said = [stats.decide_apart([*a * math.exp(difference)], [*b]) for a, b in zip(*sides, strict=True)]
    if tails == "bursts" and rounds > 3:
        assert difference < 0.02 * NORMAL[rounds], "with the disturbed rounds it would be tens of percent"
    share = sum(one.verdict == stats.SLOWER for one in said) / STUDIES
    assert share == pytest.approx(self_test.TARGET_POWER, abs=0.04)
    assert 0.01 < found.false_alarms < 0.07  # heavy tails make a t test conservative


def test_limits_cover_the_true_smallest_difference() -> None:
    rng = np.random.default_rng(0)
    truth = math.expm1(0.01 * NORMAL[3])
    found = [self_test.smallest_with_limits(rng.normal(0, 0.01, (25, 4)), 3) for _ in range(20)]
    assert sum(one.low <= truth <= one.high for one in found) >= 16
    assert math.isnan(self_test.smallest_with_limits(rng.normal(0, 0.01, (9, 4)), 3).low)
    assert self_test.find_smallest(np.ones(4), 1) == math.inf and math.isnan(self_test.find_smallest(np.ones(1), 3))


def test_the_interval_of_a_spread_covers_it() -> None:
    rng = np.random.default_rng(0)
    found = [self_test.spread_interval(float(x.std(ddof=1)), 9) for x in rng.normal(0, 0.02, (2000, 10))]
    assert sum(one.low <= 0.02 <= one.high for one in found) / 2000 == pytest.approx(0.95, abs=0.02)
    assert math.isnan(self_test.spread_interval(0.0, 0).low)


def test_the_upper_limit_of_a_share_holds_at_any_count() -> None:
    assert self_test.at_most(20, 400) == pytest.approx(0.0718, abs=1e-4)
    assert self_test.at_most(0, 20) == pytest.approx(1 - 0.05 ** (1 / 20))
    assert self_test.at_most(3, 3) == 1
