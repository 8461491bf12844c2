"""Components of variance, and the promises of verdicts over builds, on simulated studies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dyno.results import stats

TRUTH = 0.02, 0.01, 0.05  # standard deviations: rounds, blocks, samples


def nested(rng: np.random.Generator, rounds: int, blocks: int, samples: int) -> list[list[np.ndarray]]:
    """Draw log values with the deviations TRUTH; blocks hold different numbers of samples."""
    made = []
    for each in TRUTH[0] * rng.standard_normal(rounds):
        sizes = rng.integers(samples // 2, 2 * samples, blocks)
        made.append([each + TRUTH[1] * rng.standard_normal() + TRUTH[2] * rng.standard_normal(n) for n in sizes])
    return made


def test_variance_components_are_recovered() -> None:
    rng = np.random.default_rng(0)
    found = [stats.estimate_levels(nested(rng, 5, 8, 20)) for _ in range(300)]
    for name, deviation in zip(("rounds", "blocks", "samples"), TRUTH, strict=True):
        assert np.mean([getattr(f, name) for f in found]) == pytest.approx(deviation**2, rel=0.12)
    assert found[0] is not None and found[0].counts[:2] == (5, 8)


def test_builds_are_a_variance_level_with_rounds_each() -> None:
    rng, drawn, rounds = np.random.default_rng(2), 0.03, 12
    builds = [number % 4 for number in range(rounds)]
    found = []
    for _ in range(300):
        of_build = drawn * rng.standard_normal(4)
        logs = [
            [block + of_build[k] for block in each] for k, each in zip(builds, nested(rng, rounds, 4, 20), strict=True)
        ]
        found.append(stats.estimate_levels(logs, builds))
    assert np.mean([f.builds for f in found]) == pytest.approx(drawn**2, rel=0.12)
    assert np.mean([f.rounds for f in found]) == pytest.approx(TRUTH[0] ** 2, rel=0.12)
    assert found[0].parts[0] == found[0].builds
    assert stats.estimate_levels(logs, range(rounds)).builds is None and stats.estimate_levels(logs).builds is None


def test_one_block_per_round_gives_no_block_variance() -> None:
    rng = np.random.default_rng(1)
    found = stats.estimate_levels([[rng.standard_normal(50)] for _ in range(4)])
    assert found is not None and found.blocks == 0 and found.samples == pytest.approx(1, rel=0.3)
    assert stats.estimate_levels([[rng.standard_normal(50)]]) is None and stats.estimate_levels([[], []]) is None


def test_the_best_round_length_minimises_the_variance() -> None:
    """Compare with a search: the variance of the mean in a fixed time, over every number of blocks."""
    found = stats.VarianceComponents(4e-4, 1e-4, 25e-4, (5, 10.0, 20.0))
    start, block = 2.0, 0.1
    best = found.best_blocks(start, block)
    within = found.blocks + found.samples / 20

    def cost(blocks: float) -> float:  # variance of a round's mean times its seconds
        return (found.rounds + within / blocks) * (start + block * blocks)

    assert best == pytest.approx(min(np.linspace(1, 60, 2000), key=cost), abs=0.05)
    assert math.isinf(stats.VarianceComponents(0.0, 1e-4, 0.0, (2, 5.0, 1.0)).best_blocks(start, block))


BUILD, PROCESS = 0.03, 0.005  # standard deviations of logs: a build, and a process that runs it
STUDIES = 2000
NOISE = 3 * math.sqrt(0.05 * 0.95 / STUDIES)  # three standard errors of a share of 5 % in STUDIES studies
DIFFERENT = stats.FASTER, stats.SLOWER


def studies(seed: int, builds: int, rounds: int, speedup: float = 1.0, build: float = BUILD) -> np.ndarray:
    """Return log ratios [studies, rounds] of two engines; round r runs build r mod `builds` of both."""
    rng = np.random.default_rng(seed)
    drawn = build * rng.standard_normal((STUDIES, builds, 2))
    seconds = drawn[:, np.arange(rounds) % builds] + PROCESS * rng.standard_normal((STUDIES, rounds, 2))
    return np.asarray(seconds[..., 0] - seconds[..., 1] + math.log(speedup))


def over_builds(logs: Sequence[float], builds: int) -> stats.Evidence:
    """Return the rounds' evidence as `ranking.gather_evidence` builds it: each build is one observation."""
    found = stats.pair_evidence(stats.over_units([(number % builds, log) for number, log in enumerate(logs)]))
    assert found is not None
    return replace(found, rounds_seen=len(logs), builds=builds)


def share(logs: np.ndarray, judge: Callable[[np.ndarray], stats.Speedup], *which: str) -> float:
    return float(np.mean([judge(each).verdict in which for each in logs]))


@pytest.mark.parametrize(("builds", "rounds"), [(3, 12), (4, 10), (5, 5)])
def test_equal_engines_are_not_called_different(builds: int, rounds: int) -> None:
    logs = studies(builds, builds, rounds)
    assert share(logs, lambda each: stats.decide(over_builds(each, builds)), *DIFFERENT) <= 0.05 + NOISE
    if rounds > builds:  # treated as independent, the rounds of a build are overconfident
        assert share(logs, stats.paired_speedup, *DIFFERENT) > 0.1


def test_rounds_of_one_build_do_not_generalise_to_the_engine() -> None:
    assert share(studies(1, 1, 12), stats.paired_speedup, *DIFFERENT) > 0.8
    assert share(studies(2, 1, 12, build=0.0), stats.paired_speedup, *DIFFERENT) <= 0.05 + NOISE


@pytest.mark.parametrize(("builds", "rounds"), [(3, 9), (4, 10)])
def test_intervals_cover_the_truth(builds: int, rounds: int) -> None:
    found = [stats.decide(over_builds(each, builds)) for each in studies(7, builds, rounds, 1.05)]
    assert 0.93 <= np.mean([each.low <= 1.05 <= each.high for each in found]) <= 0.97


def test_repeated_looks_over_builds_keep_the_error() -> None:
    """Rounds add no build, but change the builds' means, so each look spends its share."""
    rule, first, most = stats.Rule(first=3), 3, 12

    def ever(logs: np.ndarray, rule: stats.Rule) -> float:
        return float(np.mean([
            any(stats.decide(over_builds(each[:k], 3), rule).verdict in DIFFERENT for k in range(first, most + 1))
            for each in logs
        ]))  # fmt: skip

    logs = studies(9, 3, most, build=0.002)[:500]
    assert ever(logs, rule) <= 0.05 + 2 * NOISE


def test_undecided_builds_need_more_builds() -> None:
    logs = [0.05, 0.01, 0.04] * 4
    found = stats.decide(over_builds(logs, 3))
    assert (found.verdict, found.builds) == (stats.UNDECIDED, 3) and found.more is not None and 0 < found.more < 10
    enough = [0.05, 0.01, 0.04] * (1 + found.more // 3 + 1)
    assert stats.decide(over_builds(enough, len(enough))).verdict == stats.FASTER
    assert stats.paired_speedup(logs).verdict == stats.FASTER, "were they rounds, they would be enough"
