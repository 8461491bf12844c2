"""Detectors agree where they find the same objects, whatever their order, and not where one misses or moves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import detected
from dyno.results.metrics import agreement
from dyno.results.trial_result import load_run

Arrays = dict[str, np.ndarray]


def arrays(*found: tuple[int, int, float, tuple[float, float, float, float]], images: int = 3) -> Arrays:
    """Detections given as image, class, score and box (left, top, right, bottom)."""
    return {
        "detection_image": np.array([f[0] for f in found], np.int64),
        "detection_class": np.array([f[1] for f in found], np.int32),
        "detection_score": np.array([f[2] for f in found], np.float32),
        "detection_box": np.array([f[3] for f in found], np.float32).reshape(-1, 4),
        "sample": np.arange(images),
    }


BOX = (10.0, 10.0, 50.0, 50.0)
FAR = (60.0, 60.0, 90.0, 90.0)


def test_the_same_detections_in_another_order_agree_entirely() -> None:
    truth = detected.truth()
    found = detected.found(truth)
    order = np.random.default_rng(1).permutation(len(found["detection_score"]))
    mixed = {name: a[order] if name.startswith("detection") else a for name, a in found.items()}
    both = agreement.judge_boxes(mixed, found)
    assert both is not None
    assert both.expected == both.matched == both.own == both.confirmed == len(truth["annotations"])
    assert both.share == both.own_share == 1


def test_missed_objects_lower_the_share_and_not_the_own_share() -> None:
    truth = detected.truth()
    whole, fewer = detected.found(truth), detected.found(truth, missed=0.4)
    both = agreement.judge_boxes(fewer, whole)
    assert both is not None
    assert both.matched == both.confirmed == both.own == len(fewer["detection_score"]) < both.expected
    assert both.share == pytest.approx(both.own / both.expected) and both.own_share == 1


@pytest.mark.parametrize(("shift", "share"), [(0.2, 1.0), (0.4, 0.0)])
def test_a_box_must_overlap_by_half(shift: float, share: float) -> None:
    """Shifted by a fifth of its width a box shares 0.8 / 1.2 with what it was, by two fifths 0.6 / 1.4."""
    truth = detected.truth()
    both = agreement.judge_boxes(detected.found(truth, shift=shift), detected.found(truth))
    assert both is not None and both.share == both.own_share == share


def test_class_and_image_must_be_the_same() -> None:
    reference = arrays((0, 1, 0.9, BOX))
    for other in (arrays((0, 2, 0.9, BOX)), arrays((1, 1, 0.9, BOX)), arrays()):
        both = agreement.judge_boxes(other, reference)
        assert both is not None and both.share == 0


def test_each_detection_is_matched_once() -> None:
    both = agreement.judge_boxes(arrays((0, 0, 0.9, BOX)), arrays((0, 0, 0.9, BOX), (0, 0, 0.8, BOX)))
    assert both is not None and (both.expected, both.matched, both.own, both.confirmed) == (2, 1, 1, 1)


def test_a_score_just_below_the_line_loses_nothing_and_a_faint_one_does() -> None:
    reference = arrays((0, 0, 0.26, BOX))
    near, faint = (agreement.judge_boxes(arrays((0, 0, s, BOX)), reference) for s in (0.24, 0.05))
    assert near is not None and near.share == 1 and near.own == 0 and near.own_share is None
    assert faint is not None and faint.share == 0


def test_without_a_sure_detection_of_the_reference_there_is_no_share() -> None:
    assert agreement.judge_boxes(arrays((0, 0, 0.9, BOX)), arrays((0, 0, 0.2, BOX))) is None
    assert agreement.judge_boxes(arrays(), arrays()) is None


def test_only_images_that_both_have_seen_count() -> None:
    reference, other = arrays((0, 0, 0.9, BOX), (2, 0, 0.9, FAR)), arrays((0, 0, 0.9, BOX), images=2)
    both = agreement.judge_boxes(other, reference)
    assert both is not None and (both.expected, both.share) == (1, 1.0)


def test_boxes_without_an_area_overlap_nothing() -> None:
    flat = (10.0, 10.0, 10.0, 50.0)
    both = agreement.judge_boxes(arrays((0, 0, 0.9, flat)), arrays((0, 0, 0.9, flat)))
    assert both is not None and both.share == 0


def test_stored_trials_are_held_against_each_other(tmp_path: Path) -> None:
    truth = detected.truth()
    ways = {"pytorch": detected.found(truth), "onnxruntime": detected.found(truth, missed=0.5)}
    detected.write_run(tmp_path, "detect", ways, truth)
    first, second = sorted(load_run(tmp_path), key=lambda t: t.backend, reverse=True)
    both = agreement.compare_boxes(second, first)
    assert both is not None and 0 < both.share < 1 and both.own_share == 1
