"""Accuracy, paired differences and the budget, on answers with known counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synthetic
from dyno.results.metrics import accuracy
from dyno.results.metrics.accuracy import (
    TOP1,
    TOP5,
    Budget,
    BudgetDecision,
    PairedChange,
    correct,
    decide_accuracy,
    make_budgets,
)
from dyno.results.stats import paired_difference
from dyno.results.trial_result import Results, load_run
from dyno.worker.spec import UserError
from synthetic import Way


def pair(gained: int, lost: int, count: int) -> PairedChange:
    return PairedChange(count, paired_difference(gained, lost, count), gained, lost)


def test_top1_and_top5_count_the_first_answers() -> None:
    index = np.array([[1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]], np.int32)
    answers = {"topk_index": index, "label": np.array([1, 4, 4])}
    assert correct(answers, 1).tolist() == [True, False, False]
    assert correct(answers, 5).tolist() == [True, True, False]
    assert correct(answers, 7) is None
    assert correct({"topk_index": index}, 1) is None


def test_accuracy_of_a_stored_trial(demo: Results) -> None:
    found, five = TOP1.of(demo.trials[0]), TOP5.of(demo.trials[0])
    hits = correct(demo.trials[0].answers, 1)
    assert found.images == 360
    assert found.interval.value == hits.mean()
    assert found.interval.low < found.interval.value < found.interval.high
    assert five.interval.value >= found.interval.value


def test_no_labels_no_accuracy(tmp_path: Path) -> None:
    ways = [Way("pytorch", labelled=False), Way("openvino", labelled=False)]
    a, b = load_run(synthetic.write_run(tmp_path / "r", ways, samples=5, count=20)).trials
    assert TOP1.of(a) is None
    assert TOP1.change(a, b) is None


def test_pairs_are_matched_by_image(demo: Results) -> None:
    own = {"topk_index": np.zeros((4, 1)), "sample": np.array([7, 3, 5, 9])}
    other = {"topk_index": np.zeros((3, 1)), "sample": np.array([9, 7, 1])}
    here, there = accuracy.match_images(own, other)
    assert own["sample"][here].tolist() == other["sample"][there].tolist() == [7, 9]


def test_paired_counts_are_those_of_the_answers(demo: Results) -> None:
    reference = demo.trials[0]
    int8 = next(t for t in demo if t.configuration == "onnxruntime int8")
    a, b = correct(int8.answers, 1), correct(reference.answers, 1)
    found = TOP1.change(int8, reference)
    assert (found.gained, found.lost) == (int((a & ~b).sum()), int((b & ~a).sum()))
    assert found.difference.value == pytest.approx(a.mean() - b.mean())


@pytest.mark.parametrize(
    ("found", "points", "verdict"),
    [(pair(0, 0, 2000), 0.5, "within"), (pair(0, 0, 360), 0.5, "undecided"), (pair(0, 40, 1000), 0.5, "over"),
     (pair(2, 3, 5000), 0.5, "within"), (pair(0, 3, 360), 0.5, "undecided"), (pair(0, 0, 360), 0.0, "undecided")],
)  # fmt: skip
def test_decisions(found: PairedChange, points: float, verdict: str) -> None:
    assert decide_accuracy(found, Budget("top1", points)).verdict == verdict


@given(st.integers(0, 12), st.integers(0, 12), st.floats(0.2, 3.0))
def test_the_promised_images_settle_it(gained: int, lost: int, points: float) -> None:
    budget = Budget("top1", points)
    decision = decide_accuracy(pair(gained, lost, 360), budget)
    if decision.verdict != "undecided" or decision.more is None:
        return
    scale = (360 + 1.05 * decision.more) / 360
    later = PairedChange(360, paired_difference(gained * scale, lost * scale, 360 * scale), gained, lost)
    assert decide_accuracy(later, budget).verdict != "undecided"


def test_a_loss_that_is_the_budget_is_never_settled() -> None:
    assert decide_accuracy(pair(0, 2, 400), Budget("top1", 0.5)) == BudgetDecision("undecided", None)


def test_budgets_are_read_from_a_table() -> None:
    assert make_budgets({"top1": 0.5, "top5": 1}) == (Budget("top1", 0.5), Budget("top5", 1.0))
    assert make_budgets({}) == ()


@pytest.mark.parametrize(("metric", "points"), [("map", 1.0), ("", 1.0), ("top1", -1.0), ("top1", float("nan"))])
def test_a_bad_budget_is_one_line(metric: str, points: float) -> None:
    with pytest.raises(UserError, match=r"unknown budget|must be between 0 and 100 points"):
        make_budgets({metric: points})
