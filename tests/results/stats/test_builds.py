"""What is promised of verdicts over builds, on simulated studies: builds of two engines that are drawn anew, and rounds
that go through them in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dyno.results import stats

BUILD, PROCESS = 0.03, 0.005  # standard deviations of logs: of a build, and of a process that runs it
STUDIES = 2000
NOISE = 3 * math.sqrt(0.05 * 0.95 / STUDIES)  # of a share of 5 % in so many studies, three standard errors
DIFFERENT = stats.FASTER, stats.SLOWER


def studies(seed: int, builds: int, rounds: int, speedup: float = 1.0, build: float = BUILD) -> np.ndarray:
    """Log ratios [studies, rounds] of two engines; round r runs build r mod builds of both."""
    rng = np.random.default_rng(seed)
    drawn = build * rng.standard_normal((STUDIES, builds, 2))
    seconds = drawn[:, np.arange(rounds) % builds] + PROCESS * rng.standard_normal((STUDIES, rounds, 2))
    return np.asarray(seconds[..., 0] - seconds[..., 1] + math.log(speedup))


def over_builds(logs: Sequence[float], builds: int) -> stats.Evidence:
    """What the rounds say, as `metrics.speedups.evidence` has it: a build is one observation."""
    found = stats.paired(stats.over_units([(number % builds, log) for number, log in enumerate(logs)]))
    assert found is not None
    return replace(found, seen=len(logs), builds=builds)


def share(logs: np.ndarray, judge: Callable[[np.ndarray], stats.Speedup], *which: str) -> float:
    return float(np.mean([judge(each).verdict in which for each in logs]))


@pytest.mark.parametrize(("builds", "rounds"), [(3, 12), (4, 10), (5, 5)])
def test_equal_engines_are_not_called_different(builds: int, rounds: int) -> None:
    logs = studies(builds, builds, rounds)
    assert share(logs, lambda each: stats.decide(over_builds(each, builds)), *DIFFERENT) <= 0.05 + NOISE
    if rounds > builds:  # taken for rounds of their own, the rounds of a build are too sure of themselves
        assert share(logs, stats.paired_speedup, *DIFFERENT) > 0.1


def test_rounds_of_one_build_tell_that_build_and_not_the_engine() -> None:
    assert share(studies(1, 1, 12), stats.paired_speedup, *DIFFERENT) > 0.8
    alike = studies(2, 1, 12, build=0.0)
    assert share(alike, stats.paired_speedup, *DIFFERENT) <= 0.05 + NOISE


@pytest.mark.parametrize(("builds", "rounds"), [(3, 9), (4, 10)])
def test_intervals_cover_the_truth(builds: int, rounds: int) -> None:
    found = [stats.decide(over_builds(each, builds)) for each in studies(7, builds, rounds, 1.05)]
    covered = np.mean([each.low <= 1.05 <= each.high for each in found])
    assert 0.93 <= covered <= 0.97


def test_looking_after_every_round_through_the_builds() -> None:
    """Rounds add none, but the means of builds change with each, so that each look spends its share."""
    rule, first, most = stats.Rule(first=3), 3, 12

    def ever(logs: np.ndarray, rule: stats.Rule) -> float:
        return float(np.mean([
            any(stats.decide(over_builds(each[:k], 3), rule).verdict in DIFFERENT for k in range(first, most + 1))
            for each in logs
        ]))  # fmt: skip

    logs = studies(9, 3, most, build=0.002)[:500]
    assert ever(logs, rule) <= 0.05 + 2 * NOISE


def test_more_builds_are_what_would_settle_it() -> None:
    logs = [0.05, 0.01, 0.04] * 4
    found = stats.decide(over_builds(logs, 3))
    assert (found.verdict, found.builds) == (stats.UNDECIDED, 3) and found.more is not None and 0 < found.more < 10
    enough = [0.05, 0.01, 0.04] * (1 + found.more // 3 + 1)
    assert stats.decide(over_builds(enough, len(enough))).verdict == stats.FASTER
    assert stats.paired_speedup(logs).verdict == stats.FASTER, "were they rounds, they would be enough"
