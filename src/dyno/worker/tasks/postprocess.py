"""Steps from a detector's raw boxes to detections in the original image.

Non-maximum suppression is greedy, per class (Girshick et al., 2014), over every pair of an anchor and a class with a
score above the threshold, as COCO's metric expects; masks are sums of prototypes (Bolya et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.worker.inputs.specs import fit_geometry

MAX_CANDIDATES = 30_000  # limit of pairs of anchor and class for suppression, best first


@dataclass(frozen=True)
class Detections:
    """The detections in one image, by descending score; coordinates are pixels of the original image.

    `boxes` float32 n x 4 (left, top, right, bottom), `scores` float32 n, `classes` int32 n, `masks` one uncompressed
    column-major COCO run-length encoding (uint32 counts) per detection, `keypoints` float32 n x K x D. `own` are the
    network's numbers of the boxes, if another box form is possible.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    masks: list[np.ndarray] | None = None
    keypoints: np.ndarray | None = None
    own: np.ndarray | None = None


@dataclass(frozen=True)
class BoxForm:
    """The meaning of a box's numbers: their `order`, in pixels of the input or as `shares` of its sides."""

    order: str
    shares: bool = False

    def convert_boxes(self, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return left, top, right and bottom in pixels of an input of that height and width."""
        height, width = size
        if self.shares:
            scale = [height, width] if self.order == CORNERS_Y_FIRST.order else [width, height]
            boxes = boxes * np.array(scale * 2, np.float32)
        if self.order == CORNERS_Y_FIRST.order:
            return boxes[:, [1, 0, 3, 2]]
        if self.order == CORNERS.order:
            return boxes
        if self.order == SIDES.order:
            return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        half = boxes[:, 2:] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)

    def convert_points(self, points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return points (x, y, ...) in pixels of the input."""
        scale = np.ones(points.shape[-1], np.float32)
        scale[:2] = (size[1], size[0]) if self.shares else 1
        return points * scale


CENTRES, CORNERS = BoxForm("centre, width and height"), BoxForm("left, top, right and bottom")
SIDES, CORNERS_Y_FIRST = BoxForm("left, top, width and height"), BoxForm("top, left, bottom and right")
MAX_OUTSIDE_SHARE = 0.05  # tolerated excess of boxes, as a share of the input's sides


def valid_share(boxes: np.ndarray, form: BoxForm, size: tuple[int, int], loose: bool = False) -> float:
    """Return the share of boxes with valid sides inside the input; `loose`: with centres near it.

    A random network's boxes are much too large, but still centred on places in the image.
    """
    corners = form.convert_boxes(boxes, size)
    limit = np.array([size[1], size[0]] * 2, np.float32)
    is_ordered = (corners[:, 2:] >= corners[:, :2]).all(1)
    if loose:
        centres = (corners[:, :2] + corners[:, 2:]) / 2
        return float((is_ordered & (np.abs(centres / limit[:2] - 0.5) <= 1).all(1)).mean())
    return float((is_ordered & (np.abs(corners / limit - 0.5) <= 0.5 + MAX_OUTSIDE_SHARE).all(1)).mean())


@dataclass(frozen=True)
class Candidates:
    """Boxes of one image in the network's own form: `boxes` 4 x n, and further values in `extra_values` (values x n).

    `scores` are classes x n, or n if each box has one class in `labels` (n).
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray | None = None
    extra_values: np.ndarray | None = None

    def best_scores(self) -> np.ndarray:
        """Return the highest score of each box."""
        return (self.scores if self.labels is not None else self.scores.max(0)).astype(np.float32)


@dataclass(frozen=True)
class KeptRows:
    """The rows of one image left by suppression.

    `extra_values` are the values after box and scores, `referred` the output that boxes refer to, `boxes` the boxes in
    the image, `placement` the image's place in the input, and `form` that of the coordinates.
    """

    extra_values: np.ndarray
    referred: np.ndarray
    boxes: np.ndarray
    placement: ImagePlacement
    form: BoxForm
    keypoints: Sequence[int]


def suppress_overlaps(boxes: np.ndarray, labels: np.ndarray, iou: float, max_detections: int) -> np.ndarray:
    """Return the rows of the kept boxes, at most `max_detections`.

    `boxes` (left, top, right, bottom) and `labels` are sorted by descending score. A box is dropped if its intersection
    over union with a kept box of its class is above `iou`.
    """
    order = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    rest = {int(labels[rows[0]]): rows for rows in np.split(order, ends) if len(rows)}
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    is_pending = np.ones(len(boxes), bool)
    kept_rows: list[int] = []
    row = 0
    while len(kept_rows) < max_detections and is_pending[row:].any():
        row += int(is_pending[row:].argmax())
        kept_rows.append(row)
        class_rows = rest[int(labels[row])]
        class_rows = class_rows[np.searchsorted(class_rows, row, "right") :]
        overlap = _compute_overlap(boxes[row], boxes[class_rows])
        with np.errstate(divide="ignore", invalid="ignore"):  # empty boxes overlap nothing
            is_suppressed = overlap / (areas[row] + areas[class_rows] - overlap) > iou
        is_pending[class_rows[is_suppressed]] = False
        rest[int(labels[row])] = class_rows[~is_suppressed]
        row += 1
    return np.array(kept_rows, np.int64)


def overlap_by_half(boxes: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """Return for each box (left, top, right, bottom) whether it overlaps another by half or more."""
    low, high = np.maximum(boxes[:, None, :2], objects[:, :2]), np.minimum(boxes[:, None, 2:], objects[:, 2:])
    overlap = (high - low).clip(0).prod(2)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(1)[:, None] + (objects[:, 2:] - objects[:, :2]).prod(1) - overlap
    has_overlap: np.ndarray = (2 * overlap >= union.clip(1e-9)).any(1)
    return has_overlap


def encode_mask(mask: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    """Return the run lengths of a mask at (top, left) in an image that is empty elsewhere.

    The encoding is COCO's uncompressed one: down the columns, zeros and ones in turn, zeros first (uint32).
    """
    columns = np.zeros((mask.shape[1], mask.shape[0] + 2), np.int8)
    columns[:, 1:-1] = mask.T
    edges = np.diff(columns, axis=1)
    column, starts = np.nonzero(edges == 1)
    offset = (left + column) * height + top
    starts, ends = offset + starts, offset + np.nonzero(edges == -1)[1]
    is_separate = starts[1:] != ends[:-1]  # runs may continue in the next column
    starts, ends = (
        starts[np.r_[True, is_separate]] if len(starts) else starts,
        ends[np.r_[is_separate, True]] if len(ends) else ends,
    )
    boundaries = np.concatenate([[0], np.stack([starts, ends], 1).reshape(-1), [height * width]])
    counts = np.diff(boundaries)
    return (counts[:-1] if len(counts) > 1 and counts[-1] == 0 else counts).astype(np.uint32)


class ImagePlacement:
    """The place of one image in the network's input, and the inverse mapping.

    `aspect` is the pixel aspect ratio, width over height: the image is letterboxed by its displayed shape.
    """

    def __init__(self, height: int, width: int, to_height: int, to_width: int, aspect: float = 1.0) -> None:
        self.height, self.width = height, width
        self.input = (to_height, to_width)
        geometry = fit_geometry(height, width * aspect, to_height, to_width)
        _, self.new_height, self.new_width, self.top, self.left = geometry
        # Sides are rounded to whole pixels, so each maps back by its own scale.
        self.down, self.across = self.new_height / height, self.new_width / width

    def points(self, points: np.ndarray) -> np.ndarray:
        """Return points (x, y, ...) of the input as points of the image, clipped to it."""
        image_points = points.astype(np.float32)
        image_points[..., 0] = ((image_points[..., 0] - self.left) / self.across).clip(0, self.width)
        image_points[..., 1] = ((image_points[..., 1] - self.top) / self.down).clip(0, self.height)
        return image_points

    def place_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Return boxes (left, top, right, bottom) of the input as boxes of the image, clipped to it."""
        return self.points(boxes.reshape(-1, 2, 2)).reshape(-1, 4)

    def rows(self, first: int, last: int, count: int) -> _Taps:
        """Return the positions of the image's rows among `count` prototype rows."""
        centres = (np.arange(first, last) + 0.5) * self.down
        return _compute_taps(centres, self.top, self.new_height, count / self.input[0], count)

    def find_columns(self, first: int, last: int, count: int) -> _Taps:
        """Return the positions of the image's columns among `count` prototype columns."""
        centres = (np.arange(first, last) + 0.5) * self.across
        return _compute_taps(centres, self.left, self.new_width, count / self.input[1], count)


_Taps = tuple[np.ndarray, np.ndarray, np.ndarray]


def _compute_taps(centres: np.ndarray, margin: int, length: int, ratio: float, count: int) -> _Taps:
    """Return the two neighbouring coarse cells of each image position, and the weight of the second.

    Cells in the letterbox's grey are left out.
    """
    centres = ((centres + margin) * ratio - 0.5).clip(margin * ratio, (margin + length) * ratio - 1).clip(0, count - 1)
    low = centres.astype(np.int64)
    return low, np.minimum(low + 1, count - 1), (centres - low).astype(np.float32)


def select_best(
    candidates: Candidates, to_corners: Callable[[np.ndarray], np.ndarray], confidence: float, iou: float | None,
    max_detections: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the remaining boxes' numbers by descending score, with their classes and scores.

    Boxes below `confidence` are dropped, and boxes that overlap by more than `iou` are suppressed (None: the network
    did it).
    """
    if candidates.labels is None:
        scored_anchors = np.flatnonzero((candidates.scores > confidence).any(0))  # most anchors stop here
        scores = np.ascontiguousarray(candidates.scores[:, scored_anchors].T)
        pairs = np.flatnonzero(scores > confidence)
        values = scores.reshape(-1)[pairs].astype(np.float32)
        anchors, labels = np.divmod(pairs, max(1, scores.shape[1]))
        anchors = scored_anchors[anchors]
    else:
        anchors = np.flatnonzero(candidates.scores > confidence)
        values, labels = candidates.scores[anchors].astype(np.float32), candidates.labels[anchors]
    if len(values) > MAX_CANDIDATES:
        top_pairs = np.sort(np.argpartition(-values, MAX_CANDIDATES)[:MAX_CANDIDATES])
        anchors, labels, values = anchors[top_pairs], labels[top_pairs], values[top_pairs]
    order = np.argsort(-values, kind="stable")
    anchors, labels, values = anchors[order], labels[order], values[order]
    boxes = candidates.boxes[:, anchors].T.astype(np.float32)
    is_finite = np.isfinite(boxes).all(1)
    if not is_finite.all():
        anchors, labels, values, boxes = anchors[is_finite], labels[is_finite], values[is_finite], boxes[is_finite]
    rows = slice(max_detections) if iou is None else suppress_overlaps(to_corners(boxes), labels, iou, max_detections)
    return anchors[rows], labels[rows].astype(np.int32), values[rows]


def _compute_overlap(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the area shared by a box with each of the others."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    area: np.ndarray = sides.clip(0).prod(1)
    return area
