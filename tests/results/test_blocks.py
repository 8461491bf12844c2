"""Ratios of interleaved trials: drift within rounds, and sustained load against short turns, by independent figures."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dyno.results import blocks
from dyno.results.blocks import RoundRatios
from dyno.results.trial_result import TrialResult, load_run
from synthetic import Way, write_run


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> TrialResult:
    (result,) = load_run(write_run(Path(tmp_path_factory.mktemp("run")), [Way("pytorch")]))
    return result


def plant(patch: pytest.MonkeyPatch, rounds: list[list[float]], sustained: tuple[list[float], ...] = ()) -> None:
    """Give two trials these log ratios: per block of each round in turns, and under sustained load."""

    def ratios(*args: object, settled: bool = False) -> list[RoundRatios]:
        return [RoundRatios(None, np.array(logs), True, True) for logs in (sustained if settled else rounds)]

    patch.setattr(blocks, "block_ratios", ratios)


def test_drift_is_the_slope_over_the_blocks_with_an_interval_over_the_rounds(
    trial: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    slopes = (0.01, 0.02, 0.03)
    plant(monkeypatch, [[slope * k for k in range(5)] for slope in slopes] + [[0.0, 9.0, 0.0]])  # three blocks: none
    drift = blocks.find_drift(trial, trial, "model")
    assert drift is not None
    changes = [4 * slope for slope in slopes]  # from the first block to the fifth
    low, high = stats.t.interval(0.99, 2, np.mean(changes), stats.sem(changes))
    assert (drift.value, drift.low, drift.high) == pytest.approx(np.expm1([0.08, low, high]))
    plant(monkeypatch, [[0.01 * k for k in range(5)]] * 2)
    assert blocks.find_drift(trial, trial, "model") is None


@pytest.mark.parametrize(("shift", "has_moved"), [(0.10, True), (-0.10, True), (0.02, False), (0.07, False)])
def test_sustained_load_moves_a_ratio_outside_the_prediction_interval_of_a_round(
    trial: TrialResult, monkeypatch: pytest.MonkeyPatch, shift: float, has_moved: bool
) -> None:
    short = [0.48, 0.50, 0.52]
    plant(monkeypatch, [[log] for log in short], ([0.5 + shift] * 3,))
    moved = blocks.compare_sustained(trial, trial, "model", "", margin=0.03)
    assert moved is not None
    assert (moved.value, moved.short) == pytest.approx((math.exp(0.5 + shift), math.exp(0.5)))
    # One round's spread and that of the mean of three: 0.02 * sqrt(1 + 1/3) * t = 0.099.
    assert moved.has_moved is has_moved is bool(abs(shift) > stats.t.ppf(0.975, 2) * 0.02 * math.sqrt(4 / 3))


def test_a_spread_smaller_than_the_margin_leaves_the_margin_to_decide(
    trial: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, [[0.5]] * 3, ([0.54],))
    results = [blocks.compare_sustained(trial, trial, "model", "", margin) for margin in (0.03, 0.05)]
    assert [each is not None and each.has_moved for each in results] == [True, False]
    plant(monkeypatch, [[0.5]], ([0.54],))
    assert blocks.compare_sustained(trial, trial, "model", "", 0.03) is None


def test_sustained_load_counts_the_second_half_of_each_block(
    trial: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = trial.rounds[0]
    monkeypatch.setattr(type(each), "block_samples", lambda *args, **keywords: {0: np.arange(9.0), 1: np.arange(4.0)})
    assert each.block_medians("latency", "all") == {0: 4.0, 1: 1.5}
    assert each.block_medians("latency", "all", settled=True) == {0: 6.0, 1: 2.5}
