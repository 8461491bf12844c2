"""Boxes are read from each layout of detectors: boxes laid out by NumPy come back unchanged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dyno.worker.tasks.detect import DETECT, BoxReader, numbered_as
from dyno.worker.tasks.layouts import UnreadBoxes, list_fits
from dyno.worker.tasks.pose import POSE
from dyno.worker.tasks.segment import SEGMENT

SIZE, CLASSES, FOUND = (48, 64), 5, 6  # height and width; number of classes; boxes of each of two images
ANCHORS = 6 * 8 + 3 * 4 + 2 * 2  # cells of strides 8, 16 and 32
Arrays = dict[str, np.ndarray]


class Truth:
    """Two images with non-overlapping boxes in a grid: corners in pixels, falling scores, classes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        places = np.stack(np.meshgrid(np.arange(3) * 20.0, np.arange(2) * 20.0), -1).reshape(-1, 2)
        low = np.stack([places, places[::-1]]) + rng.uniform(1, 5, (2, FOUND, 2))
        self.boxes = np.concatenate([low, low + rng.uniform(5, 14, low.shape)], 2)
        self.scores = np.sort(rng.uniform(0.3, 0.95, (2, FOUND)))[:, ::-1]
        self.labels = np.stack([rng.permutation(FOUND) % CLASSES for _ in range(2)])

    @property
    def centres(self) -> np.ndarray:
        low, high = self.boxes[..., :2], self.boxes[..., 2:]
        return np.concatenate([(low + high) / 2, high - low], 2)

    @property
    def every_class(self) -> np.ndarray:
        """Scores [images, boxes, classes]: each box's score at its class, 0 elsewhere."""
        return np.eye(CLASSES)[self.labels] * self.scores[..., None]

    def rows(self, *columns: str) -> np.ndarray:
        parts = {"box": self.boxes, "score": self.scores[..., None], "class": self.labels[..., None],
                 "image": np.arange(2)[:, None, None] + np.zeros((2, FOUND, 1))}  # fmt: skip
        return np.concatenate([parts[name] for name in columns], 2)


T = Truth()
SHARES = np.array([SIZE[1], SIZE[0]] * 2)


def anchors(table: np.ndarray, count: int = ANCHORS) -> np.ndarray:
    """Hide the rows among others with small boxes all over the image and no score."""
    rng = np.random.default_rng(5)
    others = np.concatenate([rng.uniform(8, 40, (2, count - FOUND, 2)), rng.uniform(2, 8, (2, count - FOUND, 2)),
                             np.zeros((2, count - FOUND, table.shape[2] - 4))], 2)  # fmt: skip
    return np.concatenate([table, others], 1)[:, rng.permutation(count)]


def objects_first(sure: float) -> np.ndarray:
    """Return box, objectness, then each class's probability given an object."""
    objectness = np.full((2, FOUND, 1), sure) if sure == 1 else (T.scores[..., None] + 1) / 2
    return np.concatenate([T.centres, objectness, T.every_class / objectness], 2)


def of_all_ones(table: np.ndarray) -> np.ndarray:
    table[..., 4] = 1
    return table


def padded(array: np.ndarray, value: float) -> np.ndarray:
    """Append four rows to each image, beyond the rows counted by the network."""
    return np.concatenate([array, np.full((2, 4, *array.shape[2:]), value, array.dtype)], 1)


def logits(table: np.ndarray) -> np.ndarray:
    return np.log(table.clip(1e-4, 1 - 1e-4)) - np.log1p(-table.clip(1e-4, 1 - 1e-4))


def with_none(last: bool) -> np.ndarray:
    """Return probabilities of the classes and of "no class" that add up to 1."""
    nothing = 1 - T.every_class.sum(-1, keepdims=True)
    return np.concatenate([T.every_class, nothing] if last else [nothing, T.every_class], 2)


def many_without(table: np.ndarray, last: bool) -> np.ndarray:
    """Append rows without a class, three times the number of the others."""
    return np.concatenate([table, np.eye(CLASSES + 1)[np.full((2, 3 * FOUND), -1 if last else 0)]], 1)


def many_boxes(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes, np.tile(boxes, (1, 3, 1))], 1)


def offsets(decoded: bool) -> np.ndarray:
    """Return anchors row by row: boxes before (offset in cells, log of size) or after decoding."""
    rng = np.random.default_rng(7)
    cells = [(x, y, stride) for stride in (8, 16, 32) for y in range(-(-48 // stride)) for x in range(64 // stride)]
    x, y, stride = np.array(cells, np.float64).T
    dx, dy, width, height = rng.normal(0.5, 1.2, (4, 2, ANCHORS))
    raw = [(dx + x) * stride, (dy + y) * stride, np.exp(width) * stride, np.exp(height) * stride]
    table = np.stack(raw if decoded else [dx, dy, width, height], -1)
    return np.concatenate([table, rng.uniform(0.3, 0.9, (2, ANCHORS, 1 + CLASSES))], 2)


def selected() -> Arrays:
    images, boxes = np.divmod(np.arange(2 * FOUND), FOUND)
    indices = np.stack([images, T.labels[images, boxes], boxes], 1)
    return {"boxes": T.boxes, "scores": T.every_class.swapaxes(1, 2), "selected": indices.astype(np.int64)}


LAYOUTS: dict[str, Callable[[], Arrays]] = {
    "v8": lambda: {"output0": anchors(np.concatenate([T.centres, T.every_class], 2)).swapaxes(1, 2)},
    "v8, anchors first": lambda: {"output0": anchors(np.concatenate([T.centres, T.every_class], 2))},
    "v8 in shares": lambda: {
        "output0": anchors(np.concatenate([T.centres, T.every_class], 2)).swapaxes(1, 2)
        / np.array([*SHARES, *[1] * CLASSES])[:, None]
    },
    "v5": lambda: {"output": anchors(objects_first(0.5), 3 * ANCHORS)},
    "v6": lambda: {"outputs": of_all_ones(anchors(objects_first(1)))},
    "end to end": lambda: {"output0": T.rows("box", "score", "class")},
    "end to end, filled with -1": lambda: {"output0": padded(T.rows("box", "score", "class"), -1)},
    "end to end in shares": lambda: {"output0": T.rows("box", "score", "class") / [*SHARES, 1, 1]},
    "end to end, class first": lambda: {"output0": T.rows("box", "class", "score")},
    "end to end, centres": lambda: {"o": np.concatenate([T.centres / SHARES, T.rows("score", "class")], 2)},
    "end to end, sides": lambda: {
        "o": np.concatenate([T.boxes[..., :2], T.centres[..., 2:], T.rows("score", "class")], 2)
    },
    "rows of several images": lambda: {"o": T.rows("image", "box", "class", "score").reshape(-1, 7)},
    "Caffe's SSD": lambda: {"o": T.rows("image", "class", "score", "box").reshape(1, 1, -1, 7) / [1, 1, 1, *SHARES]},
    "lists": lambda: {"labels": T.labels, "boxes": T.boxes, "scores": T.scores},
    "lists without names": lambda: {"a": T.scores[..., None], "b": T.boxes / SHARES, "c": T.labels[..., None]},
    "lists of like names": lambda: {"boxes": T.boxes, "class_scores": T.scores, "class_ids": T.labels},
    "scores behind boxes, a column of classes": lambda: {"dets": T.rows("box", "score"), "labels": T.labels[..., None]},
    "MMDetection": lambda: {"dets": padded(T.rows("box", "score"), 0.0), "labels": padded(T.labels, 0)},
    "EfficientNMS": lambda: {
        "num_dets": np.full((2, 1), FOUND, np.int32), "det_boxes": padded(T.boxes, 7.0),
        "det_scores": padded(T.scores, 0.9), "det_classes": padded(T.labels, 1).astype(np.int32),
    },
    "TensorFlow": lambda: {
        "detection_boxes": (T.boxes / SHARES)[..., [1, 0, 3, 2]], "detection_classes": T.labels.astype(np.float32),
        "detection_scores": T.scores, "num_detections": np.full(2, FOUND, np.float32),
    },
    "selected": selected,
    "DETR, sigmoid": lambda: {"pred_logits": logits(T.every_class), "pred_boxes": T.centres / SHARES},
    "DETR, softmax": lambda: {
        "logits": np.log(many_without(with_none(last=True), last=True).clip(1e-6)),
        "pred_boxes": many_boxes(T.centres / SHARES),
    },
    "boxes and scores": lambda: {"boxes": T.boxes, "scores": T.every_class},
    "boxes and scores, classes first": lambda: {"a": T.boxes, "b": T.every_class.swapaxes(1, 2)},
    "with a background": lambda: {
        "scores": many_without(with_none(last=False), last=False), "boxes": many_boxes(T.boxes / SHARES),
    },
}  # fmt: skip


def check(found: Any, image: int, atol: float = 1e-3) -> None:
    order = np.argsort(-T.scores[image], kind="stable")
    np.testing.assert_allclose(found.boxes, T.boxes[image][order], atol=atol * 64)
    np.testing.assert_allclose(found.scores, T.scores[image][order], atol=atol)
    np.testing.assert_array_equal(found.classes, T.labels[image][order])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_of_every_layout_are_read(layout: str, dtype: type) -> None:
    arrays = {name: a if a.dtype.kind in "iu" else a.astype(dtype) for name, a in LAYOUTS[layout]().items()}
    known = CLASSES if layout in ("v8, anchors first", "selected") else 0
    read = BoxReader(DETECT, known, confidence=0.1).read_detections(arrays, np.array([SIZE, SIZE]), SIZE)
    for image, found in enumerate(read):
        check(found, image, 1e-3 if dtype == np.float32 else 6e-3)


def test_zeros_of_a_single_class_are_not_scores() -> None:
    """The columns are class, then score: in reverse order no box would have a score."""
    rows = T.rows("box", "class", "score") * [1, 1, 1, 1, 0, 1]
    for image, found in enumerate(BoxReader(DETECT, 1).read_detections({"o": rows}, np.array([SIZE, SIZE]), SIZE)):
        np.testing.assert_allclose(found.boxes, T.boxes[image], atol=1e-3)
        np.testing.assert_allclose(found.scores, T.scores[image], atol=1e-6)
    swapped = {"o": rows[..., [0, 1, 2, 3, 4, 4]] + np.eye(6)[5]}  # scores of 0 and class 1 in every row
    assert not any(len(one.scores) for one in BoxReader(DETECT).read_detections(swapped, np.array([SIZE, SIZE]), SIZE))


@pytest.mark.parametrize("known", [{"classes": 2}, {"likely": (2, ())}])
def test_the_number_of_classes_tells_whether_a_column_is_background(known: Any) -> None:
    """The second of two independent classes is higher for most queries, like "no object"."""
    scores = np.concatenate(
        [np.eye(2)[T.labels % 2] * T.scores[..., None], np.full((2, 3 * FOUND, 2), [0.01, 0.05])], 1
    )
    arrays = {"logits": logits(scores), "pred_boxes": many_boxes(T.centres / SHARES)}
    for image, found in enumerate(
        BoxReader(DETECT, confidence=0.1, **known).read_detections(arrays, np.array([SIZE, SIZE]), SIZE)
    ):
        np.testing.assert_allclose(found.scores, T.scores[image], atol=1e-6)
        np.testing.assert_array_equal(found.classes, T.labels[image] % 2)


@pytest.mark.parametrize("known", [{"classes": 3}, {"likely": (3, ())}, {}])
def test_logits_of_four_classes_are_not_boxes(known: Any) -> None:
    """Three classes and "no object", in outputs without names."""
    labels = T.labels % 3
    sure = np.concatenate([np.eye(3)[labels] * T.scores[..., None], 1 - T.scores[..., None]], 2)
    queries = np.concatenate([sure, np.eye(4)[np.full((2, 3 * FOUND), 3)]], 1)
    arrays = {"output": np.log(queries.clip(1e-6)), "output_1": many_boxes(T.centres / SHARES)}
    for image, found in enumerate(
        BoxReader(DETECT, confidence=0.1, **known).read_detections(arrays, np.array([SIZE, SIZE]), SIZE)
    ):
        np.testing.assert_allclose(found.boxes, T.boxes[image], atol=1e-3)
        np.testing.assert_array_equal(found.classes, labels[image])


def test_an_output_of_counts_assigns_rows_to_images() -> None:
    """As in PaddleDetection: bbox is M x 6, and bbox_num holds each image's number of rows."""
    rows, counts = T.rows("class", "score", "box"), np.array([FOUND, 2, 0], np.int32)
    arrays = {"bbox": np.concatenate([rows[0], rows[1][:2]]).astype(np.float32), "bbox_num": counts}
    first, second, third = BoxReader(DETECT, confidence=0.1).read_detections(arrays, np.array([SIZE] * 3), SIZE)
    check(first, 0)
    np.testing.assert_allclose(second.scores, T.scores[1][:2], atol=1e-6)
    np.testing.assert_allclose(second.boxes, T.boxes[1][:2], atol=1e-3)
    np.testing.assert_array_equal(second.classes, T.labels[1][:2])
    assert not len(third.scores)
    (alone,) = BoxReader(DETECT, confidence=0.1).read_detections(arrays, np.array([SIZE]), SIZE)
    check(alone, 0)  # the other images only fill the batch
    for other in (counts + 1, np.ones(FOUND + 2, np.int32)):
        with pytest.raises(UnreadBoxes, match="no known layout"):
            BoxReader(DETECT).read_detections({**arrays, "bbox_num": other}, np.array([SIZE] * 3), SIZE)


def test_torchvision_lists_belong_to_one_image() -> None:
    arrays = {"output": T.boxes[0].astype(np.float32), "output_1": T.labels[0], "output_2": T.scores[0]}
    (found,) = BoxReader(DETECT, confidence=0.1).read_detections(arrays, np.array([SIZE]), SIZE)
    check(found, 0)
    none = {name: array[:0] for name, array in arrays.items()}
    assert len(BoxReader(DETECT).read_detections(none, np.array([SIZE]), SIZE)[0].scores) == 0


def test_masks_and_keypoints_are_read_for_the_kept_boxes() -> None:
    """Each prototype is 1 in one quarter: a mask is the box's part in its quarter."""
    prototypes = np.full((2, 4, 12, 16), -1.0)
    prototypes[:, 0, :6, :8] = prototypes[:, 1, :6, 8:] = prototypes[:, 2, 6:, :8] = prototypes[:, 3, 6:, 8:] = 1
    middle = T.centres[..., :2] / [64, 48] > 0.5
    coefficients = np.eye(4)[middle[..., 0] + 2 * middle[..., 1]]
    rows = np.concatenate([T.rows("box", "score", "class"), coefficients], 2)
    sizes = np.array([SIZE, SIZE])
    for found in BoxReader(SEGMENT, confidence=0.1).read_detections(
        {"output0": rows, "output1": prototypes}, sizes, SIZE
    ):
        assert len(found.masks or ()) == FOUND
        for box, counts in zip(found.boxes, found.masks or (), strict=True):
            area = float(np.prod(np.floor(box[2:]) - np.ceil(box[:2])))
            assert 0.25 * area < counts[1::2].sum() <= np.prod(box[2:] - box[:2] + 1)
    points = np.stack([T.centres[..., 0], T.centres[..., 1], np.full((2, FOUND), 0.5)], 2)
    rows = np.concatenate([T.rows("box", "score", "class"), points, points], 2) / [*SHARES, 1, 1, 64, 48, 1, 64, 48, 1]
    for image, one in enumerate(BoxReader(POSE, confidence=0.1).read_detections({"output0": rows}, sizes, SIZE)):
        assert one.keypoints is not None
        assert one.keypoints.shape == (FOUND, 2, 3)
        np.testing.assert_allclose(one.keypoints[:, 1, :2], T.centres[image][:, :2], atol=1e-3)


@pytest.mark.parametrize(
    ("arrays", "classes", "reason"),
    [
        ({"o": np.zeros((2, 1000))}, 0, "no known layout has these shapes"),
        ({"o": anchors(np.concatenate([T.centres, T.every_class * 20 - 9], 2))}, 5, "scores go from -1.1 to 8.3"),
        ({"o": T.rows("box", "score", "class") + np.eye(6)[5] / 2}, 0, "not whole numbers"),
        ({"o": T.rows("box", "score", "class") + 900 * np.eye(6)[:4].sum(0)}, 0, "outside the image"),
        ({"o": anchors(np.concatenate([T.centres, T.every_class], 2))}, 0, "of 4 or 5 classes; .* --classes"),
        ({"o": T.rows("box", "score", "class")}, 3, "a box is of class 4, and there are 3"),
        ({"o": offsets(decoded=False)}, 5, "don't follow the cells of the grid: decode the boxes in the file"),
        (
            {"boxes": T.boxes, "scores": np.eye(CLASSES)[T.labels], "object": T.scores[..., None]},
            5,
            "object has one value per box besides its class scores: multiply the scores by it in the file",
        ),
    ],
    ids=["shape", "logits", "classes", "outside", "objectness or not", "too few classes", "not decoded", "objectness"],
)
def test_unknown_layouts_are_refused_in_one_line(arrays: Arrays, classes: int, reason: str) -> None:
    with pytest.raises(UnreadBoxes, match=reason) as raised:
        BoxReader(DETECT, classes).read_detections(arrays, np.array([SIZE, SIZE]), SIZE)
    assert "understood are batch x (4 + classes) x anchors" in str(raised.value) and "\n" not in str(raised.value)


def test_a_pose_network_with_unknown_classes_asks_for_them() -> None:
    shapes = {"o": (1, 4 + 3 + 17 * 3, 8400)}
    with pytest.raises(UnreadBoxes, match="for more than one class give --classes"):
        list_fits(POSE.observe(shapes, SIZE, 0, ()))
    assert list_fits(POSE.observe(shapes, SIZE, 3, ()))[0].extra == 17 * 3
    table = anchors(np.concatenate([T.centres, np.full((2, FOUND, 1 + 17 * 3), 0.5)], 2))  # or with objectness
    with pytest.raises(UnreadBoxes, match="more than one layout fits; say how many classes"):
        BoxReader(POSE).read_detections({"o": table}, np.array([SIZE, SIZE]), SIZE)


def test_decoded_boxes_are_read() -> None:
    """The test above's offsets, decoded by NumPy: a box for each anchor above the threshold."""
    table = offsets(decoded=True)
    reader = BoxReader(DETECT, CLASSES, confidence=0.05, iou=1.0)
    (first, _) = reader.read_detections({"o": table}, np.array([SIZE, SIZE]), SIZE)
    assert len(first.scores) >= ANCHORS / 2
    np.testing.assert_allclose(first.scores[0], (table[0, :, 4] * table[0, :, 5:].max(-1)).max(), rtol=1e-5)


def test_classes_are_renumbered_to_match_the_data() -> None:
    coco = np.array([*range(1, 12), *range(13, 26), 27, 28, *range(31, 45), *range(46, 66), 67, 70, *range(72, 83),
                     *range(84, 91)], np.int32)  # fmt: skip  # pycocotools' ids of its 80 categories
    labels, note = numbered_as(coco, 80)
    np.testing.assert_array_equal(labels, np.arange(80))
    assert "COCO's numbers" in note
    labels, note = numbered_as(np.array([1, 3, 2]), 3)
    np.testing.assert_array_equal(labels, [0, 2, 1])
    assert "count from 1" in note
    assert numbered_as(np.array([0, 2]), 3)[1] == ""
    for wrong in ([0, 3], [1, 4]):
        labels, note = numbered_as(np.array(wrong), 3)
        assert labels is None
        assert "the data has 3 classes" in note
