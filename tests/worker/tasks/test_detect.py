"""Tasks of classifiers and detectors: reading of outputs, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dyno.worker.backend import Session
from dyno.worker.evaluation.evaluate import evaluate
from dyno.worker.inputs.specs import fit_geometry
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Preprocess, Tensor, Trial, UserError
from dyno.worker.tasks import EvaluationInputs
from dyno.worker.tasks.classify import (
    AMBIGUOUS_SCORES,
    MIN_PARTITION_FACTOR,
    RANKED_CLASSES,
    TopKCollector,
    classes_of,
    find_scores,
    rank_classes,
)
from dyno.worker.tasks.detect import DETECT


def sorted_whole(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


# Few distinct values, so most rows tie at the k-th place.
SCORES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(2, 70)),
    elements=st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]), st.floats(-3, 3, width=32).map(np.round)
    ),
)


@settings(max_examples=60)
@given(SCORES, st.integers(1, 12))
def test_class_ranking_equals_a_stable_sort(scores: np.ndarray, k: int) -> None:
    index, best = rank_classes(scores, k)
    expected = sorted_whole(scores, k)
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, expected, axis=1))
    assert index.dtype == np.int32


@pytest.mark.parametrize(
    "classes", [MIN_PARTITION_FACTOR * RANKED_CLASSES, MIN_PARTITION_FACTOR * RANKED_CLASSES + 1, 1000]
)
def test_class_ranking_is_correct_at_real_sizes(classes: int) -> None:
    scores = np.random.default_rng(0).standard_normal((256, classes)).astype(np.float32)
    scores[::7] = scores[::7].round(1)  # makes ties in some rows
    np.testing.assert_array_equal(rank_classes(scores, RANKED_CLASSES)[0], sorted_whole(scores, RANKED_CLASSES))


def test_without_answers_no_arrays_are_returned() -> None:
    fed = EvaluationInputs(Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(2, 4, 4)), 2, 4)
    assert TopKCollector(fed).arrays([None, None]) == {}


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        (("N", 10), 10),
        ((8, 10, 1, 1), 10),
        ((8, 1), 0),
        ((8, 1, 10), 0),
        ((8, 10, 7, 7), 0),
        (("N", "C"), 0),
        ((8,), 0),
    ],
)
def test_class_scores_are_recognised_by_shape(shape: tuple[int | str, ...], classes: int) -> None:
    assert classes_of(shape) == classes


SIZES = [(40, 80), (64, 48), (50, 50), (30, 64), (64, 64)]
SIDE, CLASSES, ANCHORS = 64, 3, 6


class Knowing(Session):
    """A detector that reads the image's number from its first pixel and returns the known boxes."""

    def __init__(self, batch: int, boxes: list[list[tuple[int, list[float]]]], shift: float = 0.0) -> None:
        self.inputs = (Tensor("images", "float32", (batch, 3, SIDE, SIDE)),)
        self.boxes, self.shift = boxes, shift

    def bind(self, feeds, slot=0):
        self.bound = feeds["images"]

    def run(self, slot=0):
        self.result = np.zeros((len(self.bound), 4 + CLASSES, ANCHORS), np.float32)
        for row, image in zip(self.result, np.rint(self.bound[:, 0, 0, 0] * 255).astype(int), strict=True):
            scale, _, _, top, left = fit_geometry(*SIZES[image], SIDE, SIDE)
            for a, (label, (x, y, w, h)) in enumerate(self.boxes[image]):
                middle = [(x + w * (0.5 + self.shift)) * scale + left, (y + h / 2) * scale + top]
                row[:4, a] = [*middle, w * scale, h * scale]
                row[4 + label, a] = 0.9 - 0.1 * a

    def fetch(self, slot=0):
        return {"output0": self.result}


@pytest.fixture
def boxes() -> list[list[tuple[int, list[float]]]]:
    rng = np.random.default_rng(0)
    return [
        [
            (int(rng.integers(CLASSES)), [2.0, 2.0, w / 2 - 4, h / 2]),
            (k % CLASSES, [w / 2, h / 2, w / 2 - 4, h / 2 - 4]),
        ]
        for k, (h, w) in enumerate(SIZES)
    ]


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    images = np.zeros((len(SIZES), 3, SIDE, SIDE), np.uint8)
    images[:] = np.arange(len(SIZES), dtype=np.uint8).reshape(-1, 1, 1, 1)
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", np.full(len(SIZES), -1))
    np.save(tmp_path / "sizes.npy", np.array(SIZES, np.int32))
    np.save(tmp_path / "test.npy", np.array([2, 0, 4, 1, 3]))
    return DataSpec("shapes", str(tmp_path), count=5)


def trial(data: DataSpec, batch: int, task: str = "detect") -> Trial:
    model = ModelSpec("net", "fake:net", classes=CLASSES, task=task, preprocess=Preprocess((0.0,), (1.0,)))
    return Trial(model, "fake", "fp32", Dims(batch, SIDE, SIDE), data=data)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_boxes_are_in_the_coordinates_of_the_original_images(data: DataSpec, boxes, batch: int) -> None:
    found = evaluate(Knowing(batch, boxes), trial(data, batch), timed=False).arrays
    assert found["sample"].tolist() == [2, 0, 4, 1, 3]
    assert found["detection_image"].tolist() == [2, 2, 0, 0, 4, 4, 1, 1, 3, 3]
    assert found["detection_image"].dtype == np.int64 and found["detection_class"].dtype == np.int32
    expected = [each for image in (2, 0, 4, 1, 3) for each in boxes[image]]
    assert found["detection_class"].tolist() == [label for label, _ in expected]
    corners = [[x, y, x + w, y + h] for _, (x, y, w, h) in expected]
    np.testing.assert_allclose(found["detection_box"], corners, atol=1.0)  # sides are rounded to whole pixels
    assert found["output:output0"].shape == (5, 4 + CLASSES, ANCHORS)


def test_mean_ap_depends_on_box_overlap(data: DataSpec, boxes) -> None:
    from dyno.results.metrics import mean_ap

    truth = {
        "images": [{"id": i, "height": h, "width": w} for i, (h, w) in enumerate(SIZES)],
        "annotations": [{"image_id": i, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
                        for i, each in enumerate(boxes) for label, box in each],
        "categories": [{"id": k, "name": str(k)} for k in range(CLASSES)],
    }  # fmt: skip
    truth = json.loads(json.dumps(truth))
    right = evaluate(Knowing(2, boxes), trial(data, 2), timed=False).arrays
    shifted = evaluate(Knowing(2, boxes, shift=0.25), trial(data, 2), timed=False).arrays
    assert mean_ap.score_detections(right, truth, "bbox").map50[0] == pytest.approx(1)
    assert mean_ap.score_detections(right, truth, "bbox").map50_95[0] > 0.9
    assert 0.1 <= mean_ap.score_detections(shifted, truth, "bbox").map50_95[0] <= 0.5, (
        "a quarter aside shares 0.75 / 1.25"
    )


def test_images_without_detections_are_not_an_error(data: DataSpec) -> None:
    found = evaluate(Knowing(2, [[] for _ in SIZES]), trial(data, 2), timed=False).arrays
    assert found["detection_box"].shape == (0, 4) and found["detection_image"].dtype == np.int64


def test_a_data_set_without_image_sizes_is_refused(data: DataSpec, boxes) -> None:
    (Path(data.folder) / "sizes.npy").unlink()
    with pytest.raises(UserError, match="decoded without the images' sizes"):
        evaluate(Knowing(2, boxes), trial(data, 2), timed=False)


@pytest.mark.parametrize(
    ("shapes", "classes", "found"),
    [
        ({"feat": 64, "y": 10}, 10, "y"),
        ({"a": 10, "b": 10}, 10, "a b"),
        ({"a": 10, "logits": 10}, 10, "logits"),
        ({"pre_logits": 10, "out": 10}, 0, "out"),
        ({"a": 64, "b": 10}, 0, "a b"),
        ({"probabilities": 10, "logits": 10}, 0, "logits"),
        ({"a": 64, "b": 128}, 10, "a b"),
    ],
)
def test_class_scores_are_found_by_number_of_classes_and_name(shapes: dict[str, int], classes: int, found: str) -> None:
    assert find_scores({name: ("N", n) for name, n in shapes.items()}, classes) == found.split()


def test_features_are_never_scored_as_class_scores(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"classes": [str(k) for k in range(10)]}))
    data = DataSpec("digits", folder=str(tmp_path), count=4)
    trial = Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(4, 4, 4), data=data)
    rng = np.random.default_rng(0)
    features, scores, more = (rng.standard_normal((4, n)).astype(np.float32) for n in (64, 10, 10))
    collector = TopKCollector(EvaluationInputs(trial, 4, 4))
    answers = collector.arrays([collector.collect(0, {"feat": features, "y": scores})])
    np.testing.assert_array_equal(answers["topk_index"][:, 0], scores.argmax(axis=1))
    assert collector.oddities([]) != [] and collector.collect(0, {"a": scores, "b": more}) is None
    (line,) = collector.oddities([None])
    assert line.startswith(f"{AMBIGUOUS_SCORES} a and b; rename that one logits")
    order = np.argsort(-scores, axis=1)
    top = {"values": np.take_along_axis(scores, order, axis=1), "indices": order}
    collector = TopKCollector(EvaluationInputs(trial, 4, 4))
    assert collector.collect(0, top) is None and "sorted inside the network" in collector.oddities([None])[0]
    assert collector.collect(0, {"scores": scores, "indices": order}) is not None, "in the order of the classes"
    falling = np.arange(40, 0, -1).reshape(4, 10)
    assert collector.collect(0, {"scores": falling}) is not None, "whole numbers may be the scores themselves"


@pytest.mark.parametrize(
    ("classes", "labels", "truth", "found", "note"),
    [
        (80, [1, 3, 44], [0, 2, 39], [0, 2, 39], "COCO's numbers up to 90"),
        (80, [1, 3, 80], [0, 2, 70], [0, 2, 70], "COCO's numbers up to 90"),
        (80, [1, 3, 80], [0, 2, 79], [0, 2, 79], "count from 1"),
        (80, [0, 0, 0, 15, 43], [0, 0, 0, 14, 39], [0, 0, 0, 14, 39], "COCO's numbers up to 90, less one, and"),
        (80, [0, 0, 0, 15, 43], [0, 0, 0, 15, 43], [0, 0, 0, 15, 43], ""),
        (80, [0, 89], [0, 79], [0, 79], "COCO's numbers up to 90, less one, and"),
        (4, [1, 2, 2], [0, 1, 1], [0, 1, 1], "count from 1"),
        (4, [1, 2, 2], [1, 2, 2], [1, 2, 2], ""),
        (4, [1, 2, 2], [3, 3, 3], [1, 2, 2], ""),
        (4, [0, 2, 2], [0, 1, 1], [0, 2, 2], ""),
    ],
)
def test_class_numbering_is_detected_from_annotated_objects(
    tmp_path: Path, classes: int, labels: list[int], truth: list[int], found: list[int], note: str
) -> None:
    """Three images with one object each; by the network's own count its box has the class `labels`."""
    count = len(labels)
    (tmp_path / "meta.json").write_text(json.dumps({"classes": [str(k) for k in range(classes)]}))
    objects = [{"image_id": k, "category_id": kind, "bbox": [8, 8, 32, 40]} for k, kind in enumerate(truth)]
    (tmp_path / "truth.json").write_text(json.dumps({"annotations": objects}))
    np.save(tmp_path / "sizes.npy", np.full((count, 2), 64, np.int32))
    data = DataSpec("d", folder=str(tmp_path), count=count)
    trial = Trial(ModelSpec("net", "fake:net", task="detect"), "fake", "fp32", Dims(count, 64, 64), data=data)
    inputs = EvaluationInputs(trial, count, count, np.arange(count), (64, 64))
    outputs = {
        "boxes": np.tile(np.float32([8, 8, 40, 48]), (count, 1, 1)),
        "scores": np.full((count, 1), 0.9, np.float32),
        "labels": np.array(labels, np.int64)[:, None],
    }
    collector = DETECT.collector(inputs)
    answers = [collector.collect(0, outputs)]
    assert collector.arrays(answers)["detection_class"].tolist() == found
    notes = collector.oddities(answers)
    assert note in notes[0] if note else notes == []


@pytest.mark.parametrize(
    ("box", "found", "read", "note"),
    [
        ([8, 8, 32, 40], [8, 8, 40, 48], [8, 8, 40, 48], ""),
        ([20, 2, 40, 8], [2, 20, 10, 60], [20, 2, 60, 10], "read as top, left, bottom and right, which places them on"),
        ([4, 2, 56, 60], [32, 32, 56, 60], [4, 2, 60, 62], "read as centre, width and height, which places them on"),
        ([8, 8, 32, 40], [44, 44, 63, 63], [44, 44, 63, 63], "hardly overlap the annotated objects"),
    ],
    ids=["as they are", "y first", "large, by its centre", "elsewhere"],
)
def test_box_format_is_detected_from_annotated_objects(
    tmp_path: Path, box: list[int], found: list[int], read: list[int], note: str
) -> None:
    """Read as corners, all boxes lie inside the image."""
    (tmp_path / "meta.json").write_text('{"classes": ["a"]}')
    (tmp_path / "truth.json").write_text(json.dumps({"annotations": [{"image_id": 0, "category_id": 0, "bbox": box}]}))
    np.save(tmp_path / "sizes.npy", np.full((1, 2), 64, np.int32))
    data = DataSpec("d", folder=str(tmp_path), count=1)
    trial = Trial(ModelSpec("net", "fake:net", task="detect"), "fake", "fp32", Dims(1, 64, 64), data=data)
    collector = DETECT.collector(EvaluationInputs(trial, 1, 1, np.arange(1), (64, 64)))
    answers = [collector.collect(0, {"boxes": np.float32([[found]]), "scores": np.float32([[0.9]]),
                                "labels": np.array([[0]])})]  # fmt: skip
    assert collector.arrays(answers)["detection_box"].tolist() == [read]
    notes = collector.oddities(answers)
    assert note in notes[0] if note else notes == []


def test_boxes_with_another_number_of_classes_cause_a_warning(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"classes": ["a", "b", "c"]}')
    np.save(tmp_path / "sizes.npy", np.full((1, 2), 64, np.int32))
    data = DataSpec("d", folder=str(tmp_path), count=1)
    trial = Trial(ModelSpec("net", "fake:net", task="detect"), "fake", "fp32", Dims(1, 64, 64), data=data)
    table = np.full((1, 6, 84), 0.01, np.float32)
    table[:, :4], table[0, 4, 0] = 20, 0.9
    for classes, notes in ((2, ["the boxes are of 2 classes, and the data has 3"]), (3, [])):
        collector = DETECT.collector(EvaluationInputs(trial, 1, 1, np.arange(1), (64, 64)))
        answers = [collector.collect(0, {"output0": np.pad(table, ((0, 0), (0, classes - 2), (0, 0)))})]
        assert collector.oddities(answers) == notes
