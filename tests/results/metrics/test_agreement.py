"""Agreement of outputs and of boxes: the isclose share, errors, values that are not finite, objects in any order."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import detected
import synthetic
from dyno.results.correctness import check_correctness
from dyno.results.metrics import agreement
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.worker.spec import UserError

VALUES = arrays(np.float32, (4, 3), elements=st.floats(-1e4, 1e4, width=32))


@given(VALUES, VALUES)
def test_the_close_share_matches_numpy_isclose(a: np.ndarray, b: np.ndarray) -> None:
    found = agreement.judge_agreement({"o": a}, {"o": b})
    x, y = a.astype(float), b.astype(float)
    assert found.close == pytest.approx(np.isclose(x, y, rtol=1e-3, atol=1e-8).mean())
    assert found.max_abs == pytest.approx(np.abs(x - y).max())
    assert found.count == 12


def ranked(scores: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """Return the first k classes of each row, as the worker stores them."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
    return {"topk_index": order, "topk_score": np.take_along_axis(scores, order, axis=1)}


def test_errors_of_known_values() -> None:
    found = agreement.judge_agreement({"o": np.array([[1.0, 2.2, 0.5]])}, {"o": np.array([[1.0, 2.0, 0.0]])})
    assert found.close == pytest.approx(1 / 3)
    assert found.max_abs == 0.5
    assert found.max_rel == pytest.approx(0.1)  # the zero has no relative error
    assert found.mean_abs == pytest.approx(0.7 / 3)


def test_non_finite_values_are_counted() -> None:
    a = np.array([[np.nan, np.inf, 1.0, np.inf]])
    found = agreement.judge_agreement({"o": a}, {"o": np.array([[1.0, np.inf, 1.0, -np.inf]])})
    assert found.nonfinite == 2
    assert found.reference_nonfinite == 2
    assert found.close == 0.5  # equal are the ones and the infinities
    assert np.isfinite([found.max_abs, found.mean_abs, found.max_rel]).all()


def test_several_outputs_are_pooled_over_the_shorter_run() -> None:
    own = {"a": np.ones((3, 2)), "b": np.zeros((3, 4))}
    found = agreement.judge_agreement(own, {"a": np.ones((5, 2)), "b": np.ones((5, 4))})
    assert (found.count, found.samples) == (18, 3)
    assert found.close == pytest.approx(6 / 18)


def test_mismatched_outputs_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="differ in name"):
        agreement.judge_agreement({"a": np.ones((1, 1))}, {"b": np.ones((1, 1))})
    with pytest.raises(UserError, match=r"differs in shape: \[1, 2\] against \[1, 3\]"):
        agreement.judge_agreement({"a": np.ones((1, 2))}, {"a": np.ones((1, 3))})


def test_ranks_match_hand_computed_values() -> None:
    reference = ranked(np.array([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1]]), 3)
    own = ranked(np.array([[0.6, 0.9, 0.5], [0.3, 0.2, 0.1]]), 3)
    assert reference["topk_index"].tolist() == [[1, 2, 0], [0, 1, 2]]
    first, second, third = agreement.compare_ranks(own, reference)
    assert (first.mae, first.disagreement) == (0, 0)
    assert second.mae == pytest.approx(0.05)  # 0.6 instead of 0.5, in one of two inputs
    assert second.disagreement == third.disagreement == 0.5
    assert agreement.compare_ranks({}, reference) == []
    odd = {"topk_index": np.zeros((1, 3), np.int32), "topk_score": np.array([[np.inf, 1, np.nan]])}
    assert [rank.mae for rank in agreement.compare_ranks(odd, odd)] == [0, 0, 0]


def test_stored_trials(demo: Results) -> None:
    reference = demo.trials[0]
    same = next(t for t in demo if t.configuration == "openvino fp32")
    far = next(t for t in demo if t.configuration == "onnxruntime int8")
    assert agreement.read_agreement(same, reference).close > 0.9 > agreement.read_agreement(far, reference).close
    assert len(agreement.compare_ranks(far.answers, reference.answers)) == 10
    assert agreement.read_agreement(next(t for t in demo if not t.good), reference) is None


@pytest.mark.parametrize("scale", [1e-29, 1e-8, 1.0, 1e20])
def test_the_default_tolerance_scales_with_small_outputs(tmp_path: Path, scale: float) -> None:
    ways = [synthetic.Way("pytorch"), synthetic.Way("onnxruntime"), synthetic.Way("openvino")]
    trials = load_run(synthetic.write_run(tmp_path / "run", ways, samples=5)).trials
    values = np.random.default_rng(0).uniform(0.5, 1.0, (6, 4))
    for trial, factor in zip(trials, (1.0, 1.0001, -1.0), strict=True):
        for path in (tmp_path / "run/trials" / trial.id).glob("r*/outputs.npz"):
            np.savez(path, **{"output:y": values * scale * factor, "sample": np.arange(6)})
    reference, near, opposite = load_run(tmp_path / "run").trials
    assert agreement.read_agreement(near, reference).close == 1
    assert agreement.read_agreement(opposite, reference).close == 0
    assert (agreement.read_agreement(opposite, reference, atol=1e-7).close == 1) == (scale < 1e-7)


@pytest.mark.parametrize("classes", range(2, 12))
def test_classifier_scores_are_not_boxes(tmp_path: Path, classes: int) -> None:
    ways = [synthetic.Way("pytorch"), synthetic.Way("onnxruntime")]
    trials = load_run(synthetic.write_run(tmp_path / "run", ways, samples=5)).trials
    values = np.random.default_rng(0).uniform(-0.3, 0.3, (32, classes)).astype(np.float32)
    for trial, factor in zip(trials, (1.0, 1.00001), strict=True):
        for path in (tmp_path / "run/trials" / trial.id).glob("r*/outputs.npz"):
            np.savez(path, **{"output:scores": values * factor, "sample": np.arange(32)})
    reference, near = load_run(tmp_path / "run").trials
    assert agreement.pair_rows(near, reference) is None
    assert agreement.read_agreement(near, reference).close == 1


Arrays = dict[str, np.ndarray]


def detection_arrays(*found: tuple[int, int, float, tuple[float, float, float, float]], images: int = 3) -> Arrays:
    """Build detections from image, class, score and box (left, top, right, bottom)."""
    return {
        "detection_image": np.array([f[0] for f in found], np.int64),
        "detection_class": np.array([f[1] for f in found], np.int32),
        "detection_score": np.array([f[2] for f in found], np.float32),
        "detection_box": np.array([f[3] for f in found], np.float32).reshape(-1, 4),
        "sample": np.arange(images),
    }


BOX = (10.0, 10.0, 50.0, 50.0)
FAR = (60.0, 60.0, 90.0, 90.0)


def test_reordered_detections_agree_entirely() -> None:
    truth = detected.truth()
    found = detected.found(truth)
    order = np.random.default_rng(1).permutation(len(found["detection_score"]))
    mixed = {name: a[order] if name.startswith("detection") else a for name, a in found.items()}
    both = agreement.judge_boxes(mixed, found)
    assert both is not None
    assert both.expected == both.matched == both.own == both.confirmed == len(truth["annotations"])
    assert both.share == both.own_share == 1


def test_missed_objects_lower_only_the_reference_share() -> None:
    truth = detected.truth()
    whole, fewer = detected.found(truth), detected.found(truth, missed=0.4)
    both = agreement.judge_boxes(fewer, whole)
    assert both is not None
    assert both.matched == both.confirmed == both.own == len(fewer["detection_score"]) < both.expected
    assert both.share == pytest.approx(both.own / both.expected) and both.own_share == 1


@pytest.mark.parametrize(("shift", "share"), [(0.2, 1.0), (0.4, 0.0)])
def test_a_box_must_overlap_by_half(shift: float, share: float) -> None:
    """A box shifted by a fifth of its width has an IoU of 0.8 / 1.2 with the original, by two fifths 0.6 / 1.4."""
    truth = detected.truth()
    both = agreement.judge_boxes(detected.found(truth, shift=shift), detected.found(truth))
    assert both is not None and both.share == both.own_share == share


def test_boxes_match_only_in_class_and_image_and_with_an_area() -> None:
    reference, flat, thin = (0, 1, 0.9, BOX), *((0, 0, 0.9, (10.0, 10.0, right, 50.0)) for right in (10.0, 10.25))
    for own, other in (
        ([(0, 2, 0.9, BOX)], reference),
        ([(1, 1, 0.9, BOX)], reference),
        ([], reference),
        ([flat], flat),
        ([thin], thin),
    ):
        both = agreement.judge_boxes(detection_arrays(*own), detection_arrays(other))
        assert both is not None and both.share == (other is thin)


def test_each_detection_is_matched_once() -> None:
    both = agreement.judge_boxes(
        detection_arrays((0, 0, 0.9, BOX)), detection_arrays((0, 0, 0.9, BOX), (0, 0, 0.8, BOX))
    )
    assert both is not None and (both.expected, both.matched, both.own, both.confirmed) == (2, 1, 1, 1)


def test_a_score_just_below_the_threshold_still_matches() -> None:
    reference = detection_arrays((0, 0, 0.26, BOX))
    near, faint = (agreement.judge_boxes(detection_arrays((0, 0, s, BOX)), reference) for s in (0.24, 0.05))
    assert near is not None and near.share == 1 and near.own == 0 and near.own_share is None
    assert faint is not None and faint.share == 0


def test_a_reference_without_confident_detections_gives_no_share() -> None:
    assert agreement.judge_boxes(detection_arrays((0, 0, 0.9, BOX)), detection_arrays((0, 0, 0.2, BOX))) is None
    assert agreement.judge_boxes(detection_arrays(), detection_arrays()) is None


def test_only_common_images_count() -> None:
    reference, other = (
        detection_arrays((0, 0, 0.9, BOX), (2, 0, 0.9, FAR)),
        detection_arrays((0, 0, 0.9, BOX), images=2),
    )
    both = agreement.judge_boxes(other, reference)
    assert both is not None and (both.expected, both.share) == (1, 1.0)


def test_stored_trials_are_compared(tmp_path: Path) -> None:
    """Of detectors whose raw outputs are no boxes, the share of changed boxes counts, of the one or of the other."""
    truth = detected.truth()
    outputs = np.random.default_rng(0).normal(size=(2, len(truth["images"]), 3, 5))
    ways = [
        {**detected.found(truth, missed=missed), "output:y": y} for missed, y in zip((0, 0.5), outputs, strict=True)
    ]
    detected.write_run(tmp_path, "detect", dict(zip(("pytorch", "onnxruntime"), ways, strict=True)), truth)
    first, second = sorted(load_run(tmp_path), key=lambda t: t.backend, reverse=True)
    both = agreement.compare_boxes(second, first)
    assert both is not None and 0 < both.share < 1 and both.own_share == 1
    flips = agreement.list_box_flips(second, first)
    assert flips is not None and flips.images == len(truth["images"])
    lost = [flip.lost for flip in flips.flips]
    assert lost == sorted(lost, reverse=True) and sum(lost) == both.expected - both.matched
    assert not any(flip.gained or flip.renamed for flip in flips.flips)
    whole, fewer = (len(way["detection_score"]) for way in ways)
    for own, reference in ((second, first), (first, second)):
        held = check_correctness(own, reference)
        assert held is not None and held.changed == pytest.approx(1 - fewer / whole) and held.answers == whole


def stored_pair(folder: Path, own: Arrays, reference: Arrays, task: str = "") -> list[TrialResult]:
    """Return two trials with these raw outputs."""
    trials = load_run(synthetic.write_run(folder, [synthetic.Way("pytorch"), synthetic.Way("onnxruntime")])).trials
    for trial, outputs in zip(trials, (reference, own), strict=True):
        for stored in trial.rounds:
            np.savez(stored.folder / "outputs.npz", **outputs)
    return [
        replace(t, spec=replace(t.spec, model=replace(t.spec.model, task=task or t.spec.model.task)))
        for t in reversed(load_run(folder).trials)
    ]


def paired(folder: Path, own: Arrays, reference: Arrays, task: str = "") -> agreement.PairedRows | None:
    return agreement.pair_rows(*stored_pair(folder, own, reference, task))


def raw(*rows: int, **lists: np.ndarray) -> Arrays:
    """Return these rows of an image's raw outputs, of which each image has another number."""
    outputs = {f"output:{name}": array[[*rows]] for name, array in lists.items()}
    return outputs | {f"rows:{name}": np.array([len(rows)]) for name in lists}


LISTS = {
    "boxes": np.array([[0, 0, 0, 20], [10, 10, 50, 30], [5, 40, 25, 60], [60, 10, 60.5, 50]], np.float32),
    "labels": np.array([1, 0, 0, 0]), "scores": np.array([0.9, 0.8, 0.7, 0.6], np.float32),
    "masks": np.tile(np.float32([3, 4]), (4, 1)),
}  # fmt: skip
SCORED = {"dets": np.c_[LISTS["boxes"], LISTS["scores"]], "labels": LISTS["labels"]}
QUERIES = {"pred_boxes": np.linspace(0.1, 0.9, 16, dtype=np.float32).reshape(4, 4),
           "pred_logits": np.linspace(-9, 2, 12, dtype=np.float32).reshape(4, 3)}  # fmt: skip
KEYPOINTS = {"rows": np.c_[LISTS["boxes"], LISTS["scores"], LISTS["labels"], np.full((4, 6), 0.5)].astype(np.float32)}


def test_raw_boxes_have_the_largest_error_of_box_score_and_other_values(tmp_path: Path) -> None:
    """Boxes cut off at the edge have no area; the third has no partner."""
    own = LISTS | {"boxes": LISTS["boxes"] + np.float32([[0], [2], [50], [0]])}
    own |= {"scores": np.float32([0.81, 0.8, 0.7, 0.6]), "masks": LISTS["masks"] + np.float32([[0, 0]] * 3 + [[0, 2]])}
    found = paired(tmp_path, raw(*range(4), **own), raw(*range(4), **LISTS))
    assert found is not None and found.images == 1
    # Of the longer side, of the norm, and of the highest score.
    assert found.errors == pytest.approx([2 / 40, 2 / 5, 0.1, 1, 1])
    np.testing.assert_allclose(found.own["2"][:, 0], [0.8, 0.6, 0.81, np.nan, 0.7])
    np.testing.assert_allclose(found.reference["2"][:, 0], [0.8, 0.6, 0.9, 0.7, np.nan])
    own |= {"masks": LISTS["masks"] * np.nan}
    found = paired(tmp_path / "nan", raw(*range(4), **own), raw(*range(4), **LISTS))
    assert found is not None and found.errors.tolist() == [1] * 5


@pytest.mark.parametrize("lists", [LISTS, SCORED, KEYPOINTS], ids=["lists", "scored", "keypoints"])
def test_raw_boxes_agree_in_any_order_and_lack_partners_in_an_empty_image(tmp_path: Path, lists: Arrays) -> None:
    task = "pose" if lists is KEYPOINTS else ""
    for name, own, errors in (("order", (2, 0, 3, 1), [0] * 4), ("lost", (), [1] * 3)):  # not the lowest score
        for swap in (False, True):
            both = [raw(*rows, **lists) for rows in (own, range(4))]
            found = paired(tmp_path / f"{name}{swap}", *(both[::-1] if swap else both), task=task)
            assert found is not None and found.errors.tolist() == errors, (name, swap)


def test_the_last_of_the_most_boxes_an_image_has_may_lack_a_partner(tmp_path: Path) -> None:
    """A limit may have cut it: of four and three boxes the fourth and the seventh, the lowest score of all."""
    lists = {"boxes": np.tile(SCORED["dets"][:, :4], (2, 1))[:7], "labels": np.arange(7)}
    lists["scores"] = np.linspace(0.9, 0.3, 7, dtype=np.float32)
    reference = raw(*range(7), **lists) | {f"rows:{name}": np.array([4, 3]) for name in lists}
    for lost, errors in ((3, [0] * 6), (2, [0] * 6 + [1]), (6, [0] * 6), (5, [0] * 6 + [1])):
        kept = np.delete(np.arange(7), lost)
        own = raw(*kept, **lists) | {f"rows:{name}": np.array([4 - (lost < 4), 3 - (lost >= 4)]) for name in lists}
        found = paired(tmp_path / str(lost), own, reference)
        assert found is not None and found.errors.tolist() == errors, lost


@pytest.mark.parametrize("lists", [SCORED, QUERIES], ids=["scored", "queries"])
def test_a_fixed_number_of_boxes_agrees_in_any_order(tmp_path: Path, lists: Arrays) -> None:
    own, reference = ({f"output:{name}": np.stack([a[rows]] * 2) for name, a in lists.items()}
                      for rows in ([2, 0, 1, 3], [*range(4)]))  # fmt: skip
    found = paired(tmp_path, own, reference, task="detect")
    assert found is not None and (found.images, found.errors.tolist()) == (2, [0] * 8)


def test_outputs_with_row_counts_and_without_are_paired_per_batch(tmp_path: Path) -> None:
    values = np.arange(5.0)
    own, reference = stored_pair(
        tmp_path, {"output:y": values, "rows:y": np.array([1, 1, 1, 1, 1])}, {"output:y": values}
    )
    (a,), (b,), omitted = agreement.paired_outputs(own, reference)
    assert (a.tolist(), b.tolist(), omitted) == (values.tolist(), values.tolist(), 0)
