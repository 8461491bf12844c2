"""Accuracy, paired differences and the budget on answers with known counts, and confused classes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synthetic
from dyno import evaluation
from dyno.report.charts import charts
from dyno.report.tables import trial_table
from dyno.results import stats
from dyno.results.metrics import accuracy
from dyno.results.metrics.accuracy import (
    TOP1,
    TOP5,
    Budget,
    BudgetDecision,
    PairedChange,
    decide_accuracy,
    make_budgets,
    mark_correct,
)
from dyno.results.stats import paired_difference
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.worker.record import Record, write_json, write_record
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Trial, UserError, to_json
from synthetic import Way


def pair(gained: int, lost: int, count: int) -> PairedChange:
    return PairedChange(count, paired_difference(gained, lost, count), gained, lost)


def test_top1_and_top5_count_the_first_answers() -> None:
    index = np.array([[1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]], np.int32)
    answers = {"topk_index": index, "label": np.array([1, 4, 4])}
    assert mark_correct(answers, 1).tolist() == [True, False, False]
    assert mark_correct(answers, 5).tolist() == [True, True, False]
    assert mark_correct(answers, 7) is None
    assert mark_correct({"topk_index": index}, 1) is None


def test_accuracy_of_a_stored_trial(demo: Results) -> None:
    found, five = TOP1.compute(demo.trials[0]), TOP5.compute(demo.trials[0])
    hits = mark_correct(demo.trials[0].answers, 1)
    assert found.images == 360
    assert found.interval.value == hits.mean()
    assert found.interval.low < found.interval.value < found.interval.high
    assert five.interval.value >= found.interval.value


def test_accuracy_needs_labels(tmp_path: Path) -> None:
    ways = [Way("pytorch", labelled=False), Way("openvino", labelled=False)]
    a, b = load_run(synthetic.write_run(tmp_path / "r", ways, samples=5, count=20)).trials
    assert TOP1.compute(a) is None
    assert TOP1.change(a, b) is None


def test_pairs_are_matched_by_image() -> None:
    own = {"topk_index": np.zeros((4, 1)), "sample": np.array([7, 3, 5, 9])}
    other = {"topk_index": np.zeros((3, 1)), "sample": np.array([9, 7, 1])}
    here, there = accuracy.match_images(own, other)
    assert own["sample"][here].tolist() == other["sample"][there].tolist() == [7, 9]


def test_paired_counts_match_the_answers(demo: Results) -> None:
    reference = demo.trials[0]
    int8 = next(t for t in demo if t.configuration == "onnxruntime int8")
    a, b = mark_correct(int8.answers, 1), mark_correct(reference.answers, 1)
    found = TOP1.change(int8, reference)
    assert (found.gained, found.lost) == (int((a & ~b).sum()), int((b & ~a).sum()))
    assert found.difference.value == pytest.approx(a.mean() - b.mean())


def test_flips_are_images_that_only_one_trial_answers_correctly(demo: Results) -> None:
    reference, int8 = demo.trials[0], next(t for t in demo if t.configuration == "onnxruntime int8")
    own, other = int8.answers, reference.answers
    first, others, label = own["topk_index"][:, 0], other["topk_index"][:, 0], own["label"]
    flips = accuracy.list_flips(int8, reference)
    lost = {flip.image for flip in flips if flip.is_lost}
    assert lost == {k for k in range(360) if others[k] == label[k] != first[k]} and lost
    assert {f.image for f in flips} - lost == {k for k in range(360) if first[k] == label[k] != others[k]}
    assert [flip.is_lost for flip in flips] == sorted((flip.is_lost for flip in flips), reverse=True)
    for flip in flips:
        k = flip.image
        assert (flip.label, flip.answer) == (f"class {label[k]}", f"class {first[k]}")
        assert flip.reference_score == other["topk_score"][k, 0] and flip.score == own["topk_score"][k, 0]
    assert accuracy.list_flips(reference, reference) == []


def test_the_shift_of_scores_is_paired(demo: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.stats import ttest_rel

    reference, int8 = demo.trials[0], next(t for t in demo if t.configuration == "onnxruntime int8")
    found = accuracy.compute_score_shift(int8, reference)
    own, other = (t.answers["topk_score"][:, 0].astype(float) for t in (int8, reference))
    expected = ttest_rel(own, other).confidence_interval(0.95)
    assert found is not None and found.value == pytest.approx(own.mean() - other.mean(), abs=1e-9)
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high])
    same = accuracy.compute_score_shift(reference, reference)
    assert same is not None and [same.low, same.value, same.high] == [0, 0, 0]
    scores = int8.answers["topk_score"].copy()
    scores[7, 0] = np.nan
    monkeypatch.setitem(int8.answers, "topk_score", scores)
    assert accuracy.compute_score_shift(int8, reference) is None


@pytest.mark.parametrize(
    ("found", "points", "verdict"),
    [(pair(0, 0, 2000), 0.5, "within"), (pair(0, 0, 360), 0.5, "undecided"), (pair(0, 40, 1000), 0.5, "over"),
     (pair(2, 3, 5000), 0.5, "within"), (pair(0, 3, 360), 0.5, "undecided"), (pair(0, 0, 360), 0.0, "undecided")],
)  # fmt: skip
def test_budgets_are_decided_by_paired_changes(found: PairedChange, points: float, verdict: str) -> None:
    assert decide_accuracy(found, Budget("top1", points)).verdict == verdict


@given(st.integers(0, 12), st.integers(0, 12), st.floats(0.2, 3.0))
def test_the_promised_number_of_images_decides(gained: int, lost: int, points: float) -> None:
    budget = Budget("top1", points)
    decision = decide_accuracy(pair(gained, lost, 360), budget)
    if decision.verdict != "undecided" or decision.more is None:
        return
    scale = (360 + 1.05 * decision.more) / 360
    later = PairedChange(360, paired_difference(gained * scale, lost * scale, 360 * scale), gained, lost)
    assert decide_accuracy(later, budget).verdict != "undecided"


@pytest.mark.parametrize("images", [32, 100, 300])
@pytest.mark.parametrize(("points", "both"), [(0.5, 0.02), (5, 0.02), (10, 0.05)])
def test_a_loss_equal_to_the_budget_is_rarely_decided(images: int, points: float, both: float) -> None:
    """At most 2.5 % of 4,000 studies reach either verdict; `both` of the images also change each way."""
    chances = [points / 100 + both, both, 1 - points / 100 - 2 * both]
    counts = np.random.default_rng(0).multinomial(images, chances, 4000)[:, :2]
    pairs, studies = np.unique(counts, axis=0, return_counts=True)
    verdicts = [decide_accuracy(pair(gained, lost, images), Budget("top1", points)).verdict
                for lost, gained in pairs.tolist()]  # fmt: skip
    for verdict in ("within", "over"):
        share = sum(n for n, each in zip(studies, verdicts, strict=True) if each == verdict) / 4000
        assert share <= 0.025 + (0.0075 if verdict == "within" else 0.015)


def test_candidates_of_one_search_share_the_error() -> None:
    """The k-th candidate may spend 1 / (k (1 + 1/2 + … + 1/10)) of 2.5 %: 0.85 %, 0.43 %, 0.28 %."""
    assert accuracy.confirm([0.0085, 0.0085, 0.0028, 0.0]) == [True, False, True, True]
    assert accuracy.confirm([0.00853]) == [True] and accuracy.confirm([0.00854]) == [False]
    assert sum(0.025 / (k * sum(1 / n for n in range(1, 11))) for k in range(1, 11)) == pytest.approx(0.025)


def test_a_loss_equal_to_the_budget_stays_undecided() -> None:
    decision = decide_accuracy(pair(0, 2, 400), Budget("top1", 0.5))
    assert decision == BudgetDecision("undecided", None, pytest.approx(0.5))


def test_budgets_are_read_from_a_table() -> None:
    assert make_budgets({"top1": 0.5, "top5": 1}) == (Budget("top1", 0.5), Budget("top5", 1.0))
    assert make_budgets({}) == ()


@pytest.mark.parametrize(("metric", "points"), [("map", 1.0), ("", 1.0), ("top1", -1.0), ("top1", float("nan"))])
def test_invalid_budgets_are_refused_in_one_line(metric: str, points: float) -> None:
    with pytest.raises(UserError, match=r"unknown budget|must be between 0 and 100 points"):
        make_budgets({metric: points})


LABELS = [0, 0, 0, 1, 1, 2]
ANSWERS = [0, 1, 1, 1, 7, 2]


def run(folder: Path, labels: list[int], answers: list[int], names: list[str] | None = None) -> Results:
    trial = Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(1, 8, 8), data=DataSpec("photos", sha256="d" * 64))
    path = folder / "run" / "trials" / trial.id / "r0"
    path.mkdir(parents=True)
    write_json(path / "job.json", to_json(Job("run", trial.runtime, trial)))
    write_record(path, Record("ok", "done", trial=trial.id))
    index = np.array(answers, np.int32).reshape(-1, 1)
    arrays = {
        "topk_index": index,
        "topk_score": index * 0.1,
        "label": np.array(labels),
        "sample": np.arange(len(labels)),
    }
    np.savez(path / "outputs.npz", **arrays, **({"classes": np.array(names)} if names else {}))  # type: ignore[arg-type]
    return load_run(folder / "run")


@pytest.fixture
def trial(tmp_path: Path) -> TrialResult:
    return run(tmp_path, LABELS, ANSWERS, ["cat", "dog", "лиса", "unseen"]).trials[0]


def test_the_confusion_matrix_counts_answers(trial: TrialResult) -> None:
    found = accuracy.read_confusion(trial)
    assert found is not None and found.names == ["cat", "dog", "лиса", "class 7"]
    assert found.counts.tolist() == [[1, 2, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert found.to_pandas().loc["cat", "dog"] == 2
    assert found.list_largest() == [("cat", "dog", 2, 3), ("dog", "class 7", 1, 2)]


def test_permuted_class_orders_are_reported() -> None:
    names = ["blue", "green", "red"]
    swapped = accuracy.Confusion(np.array([[0, 0, 6], [1, 5, 0], [6, 0, 0]]), np.arange(3), names)
    assert "renumbered, 94% of its answers would be right instead of 28% (it takes" in swapped.describe_other_order()
    for counts in (
        [[5, 1, 0], [0, 4, 2], [1, 1, 4]],
        [[2, 2, 2], [1, 2, 3], [2, 3, 1]],
        [[0, 2, 0], [2, 0, 0], [0, 0, 2]],
    ):
        assert accuracy.Confusion(np.array(counts), np.arange(3), names).describe_other_order() == ""


def test_poor_networks_are_not_taken_for_a_permuted_class_order() -> None:
    """A permutation often fits three classes' errors better: here two share an answer, and the order spoils one.

    A single class of many renumbered classes may be hard.
    """
    of_one_image = np.zeros((5, 5), int)
    of_one_image[[0, 1, 2, 3, 4], [1, 0, 2, 0, 0]] = 12, 12, 12, 1, 1
    for counts in ([[3, 0, 27], [9, 0, 21], [0, 29, 1]], [[11, 19, 0], [29, 1, 0], [29, 1, 0]], of_one_image):
        assert accuracy.Confusion(np.array(counts), np.arange(5), [*"abcde"]).describe_other_order() == ""
    counts = [[0, 12, 0, 0], [12, 0, 0, 0], [4, 4, 4, 0], [0, 0, 0, 1]]
    told = accuracy.Confusion(np.array(counts), np.arange(4), [*"abcd"]).describe_other_order()
    assert "renumbered, 78% of its answers would be right instead of 14%" in told, "one of four classes is hard"
    many = np.roll(6 * np.eye(20, dtype=int), 1, axis=1) + np.eye(20, dtype=int)
    many[3] = [7, *[0] * 19]
    told = accuracy.Confusion(many, np.arange(20), [str(k) for k in range(20)]).describe_other_order()
    assert "renumbered, 82% of its answers would be right instead of 14%" in told


def test_classes_have_intervals_and_the_worst_comes_first(trial: TrialResult) -> None:
    found = accuracy.read_confusion(trial)
    assert found is not None
    classes = found.per_class()
    assert classes["class"].tolist() == ["cat", "dog", "лиса"] and classes["images"].tolist() == [3, 2, 1]
    cat, share = classes.iloc[0], stats.compute_wilson(1, 3)
    assert (cat["top1"], cat["top1_low"], cat["top1_high"]) == tuple(
        100 * v for v in (share.value, share.low, share.high)
    )
    assert (cat["taken_for"], cat["times"]) == ("dog", 2) and classes.iloc[2]["taken_for"] == ""


def test_classes_with_equal_names_are_distinguished(tmp_path: Path) -> None:
    found = accuracy.read_confusion(run(tmp_path, [0, 1], [0, 1], ["crane", "crane"]).trials[0])
    assert found is not None and found.names == ["crane (0)", "crane (1)"]


def test_unlabelled_images_have_no_confusion_matrix(tmp_path: Path) -> None:
    assert accuracy.read_confusion(run(tmp_path, [-1, -1], [0, 1]).trials[0]) is None


def test_evaluation_files_and_figures_are_written(tmp_path: Path) -> None:
    results = run(tmp_path, LABELS, ANSWERS)
    matrix, classes = accuracy.write_confusion(results, tmp_path)
    assert matrix.read_text().splitlines()[0] == "label,class 0,class 1,class 2,class 7"
    assert len(classes.read_text().splitlines()) == 4
    (axes,) = charts.draw_matrices(trial_table.read_trials(results)).axes
    assert axes.get_title("left").startswith("net fake fp32")


def test_evaluations_are_described_in_words(trial: TrialResult) -> None:
    text = evaluation.describe_evaluation(trial)
    assert "worst classes: cat (33.3 % of 3); dog (50.0 % of 2)" in text
    assert "most common confusions: cat for dog (2 of 3)" in text
    assert "лиса" in evaluation.describe_evaluation(trial, per_class=True)
    assert "| cat | 3 | 33.33 |" in " ".join(evaluation.describe_evaluation(trial, "markdown", per_class=True).split())
