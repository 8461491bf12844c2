"""The layouts of boxes in detectors' outputs, one object each: how to recognise and decode them.

A layout is chosen by shapes and names, the number of classes if known, and the values: scores lie within 0 and 1,
classes are whole numbers, and boxes lie in the image. Values also decide between pixels and shares of the image, and
between corners and a centre with sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import numpy as np

from dyno.worker.spec import UserError
from dyno.worker.tasks import Shape
from dyno.worker.tasks.postprocess import CENTRES, CORNERS, CORNERS_Y_FIRST, SIDES, BoxForm, Candidates, valid_share

GRID_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))  # strides of grids with anchors
MAX_ROW_LENGTH = 512  # limit of values per box with an unknown number of keypoints
SCORE_SLACK = 0.01  # rounding of scores 0 and 1 in half precision and INT8
MAX_FILLER_SCORE = 0.001  # rows with lower scores are padding
EXAMINED_IMAGES = 4  # images examined for the layout
MAX_EXAMINED_BOXES = 1000  # of these, boxes with the highest scores
FARTHEST_OFFSET = 8.0  # largest distance in cells between an anchor and its box's centre
IN_STEP = 0.5  # threshold of the correlation of centres with cells: decoded about 1, undecoded about 0
NO_BOXES = "no boxes are read from the outputs"


class UnreadBoxes(UserError):
    """Outputs that fit no layout: their shapes by name, and the reason."""

    def __init__(self, shapes: Mapping[str, Shape], reason: str) -> None:
        shape_list = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        layouts = "; ".join(layout.description for layout in BOX_LAYOUTS if layout.description)
        super().__init__(f"{NO_BOXES} ({shape_list}): {reason}; understood are {layouts}")


@dataclass(frozen=True)
class ObservedOutputs:
    """Outputs as shapes by name and, after a run, values; with known facts on them.

    `size` is the height and width of the network's input, `classes` their number (0: unknown), and `extra` the number
    of a box's further values: mask coefficients or keypoints (None: unknown keypoints). `images` is the number of the
    batch's real images; the rest is padding.
    """

    shapes: Mapping[str, Shape]
    size: tuple[int, int] = (0, 0)
    classes: int = 0
    extra: int | None = 0
    images: int = 1
    values: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """Outputs that fit a layout.

    `names` are in the layout's order, `classes` is their number (None: unknown), `extra` the number of a box's further
    values; `rank` orders layouts that fit (lowest preferred).
    """

    layout: BoxLayout
    names: tuple[str, ...]
    classes: int | None = None
    extra: int = 0
    rank: float = 1


@dataclass(frozen=True)
class BoxLayout(ABC):
    """A layout of boxes in a network's outputs.

    `description` describes it in messages; `form` is the usual form of its boxes (`fixed_form`: the only one).
    `suppressed`: overlapping boxes are already removed. `free_order`: rounding may change the boxes' order.
    `numbers_classes`: a box has its class's number, by the network's numbering.
    """

    form: ClassVar[BoxForm] = CORNERS
    fixed_form = False
    suppressed = True
    free_order = True
    numbers_classes = False
    description: str = field(default="", compare=False, kw_only=True)

    @abstractmethod
    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        """Return the fit of the outputs; None if their shapes, names or classes don't match."""

    @abstractmethod
    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        """Return the boxes of one image of the batch."""

    def refute(self, fit: Fit, outputs: ObservedOutputs) -> str:
        """Return a contradiction to the layout in values other than scores, classes and boxes; "" if none."""
        return ""


@dataclass(frozen=True)
class AnchorTable(BoxLayout):
    """Predictions for every anchor, as by YOLO networks: a box, perhaps objectness, class scores, further values."""

    axis: int  # axis of the values: 1 or 2
    objectness: bool = False
    form = CENTRES
    suppressed = False
    free_order = False

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        name = next((name for name, shape in outputs.shapes.items() if len(shape) == 3), None)
        if name is None:
            return None
        length, anchors = outputs.shapes[name][self.axis], outputs.shapes[name][3 - self.axis]
        if not isinstance(length, int):
            return Fit(self, (name,), outputs.classes or None, outputs.extra or 0, rank=5) if self.axis == 1 else None
        head = 4 + self.objectness
        extra = outputs.extra if outputs.extra is not None else length - head - (outputs.classes or 1)
        classes = length - head - extra
        if (
            classes < 1
            or classes != (outputs.classes or classes)
            or (outputs.extra is None and keypoints_of(extra) is None)
        ):
            return None
        per_cell = anchors_per_cell(anchors, outputs.size)
        is_longer = not isinstance(anchors, int) or anchors >= length
        if not outputs.classes and ((not is_longer and not per_cell) or (self.objectness and self.axis == 1)):
            return None
        return Fit(self, (name,), classes, extra, self._rank_anchors(per_cell, bool(outputs.classes)))

    def _rank_anchors(self, per_cell: int, known: bool) -> float:
        """Return 0 if the number of anchors matches the image's cells; equal ranks are ambiguous."""
        if self.axis == 1:
            return 0 if per_cell else 0.9 if known else 3
        is_usual = per_cell == 3 if self.objectness else per_cell == 1
        return (
            (0 if is_usual and (known or self.objectness) else 0.5) if per_cell == 1 or is_usual else 2 if known else 4
        )

    def refute(self, fit: Fit, outputs: ObservedOutputs) -> str:
        table = np.moveaxis(outputs.values[fit.names[0]], self.axis, 0)
        constant = not self.objectness and (fit.classes or 0) > 1 and table[4].size > 1 and bool((table[4] == 1).all())
        if constant:
            return "the fifth value is 1 for every anchor"  # YOLOv6's objectness
        if not _follow_cells(table[:2, 0].astype(np.float64), outputs.size):
            return "the values read as box centres don't follow the cells of the grid: decode the boxes in the file"
        return ""

    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        table = values[fit.names[0]][image]
        table = table if self.axis == 1 else table.T
        first = 4 + self.objectness
        last = first + (fit.classes or 0)
        scores = table[first:last]
        if self.objectness:
            scores = scores.astype(np.float32) * table[4].astype(np.float32)
        return Candidates(table[:4], scores, None, table[last:])


BOX_COLUMNS = ("x1", "y1", "x2", "y2")
LAST_ROW = (*BOX_COLUMNS, "score", "class")
BATCH_ROW = ("image", *BOX_COLUMNS, "class", "score")


@dataclass(frozen=True)
class FinalRows(BoxLayout):
    """Final boxes, a row each: its `columns`, then mask coefficients or keypoints.

    With a column `image`, it is the row's image number in the batch. Rows of n x 6 may have the number of rows per
    image in another output, such as PaddleDetection's `bbox_num` for `bbox`.
    """

    numbers_classes = True
    columns: tuple[str, ...]
    rank: float = 1

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        for name, shape in outputs.shapes.items():
            counts = self._find_counts(outputs, name)
            extra = self._count_extra_values(outputs, shape, bool(counts))
            if extra is not None:
                return Fit(self, (name, *counts), outputs.classes or None, extra, self.rank)
        return None

    def _find_counts(self, outputs: ObservedOutputs, name: str) -> list[str]:
        """Return the output of whole numbers, one per image, that add up to the number of rows; [] without it.

        Numbers for each row are classes instead.
        """
        if len(outputs.shapes[name]) != 2 or "image" in self.columns or name not in outputs.values:
            return []
        lists = {
            n: a for n, a in outputs.values.items() if a.ndim == 1 and len(a) >= outputs.images and a.dtype.kind in "iu"
        }
        rows = len(outputs.values[name])
        return [n for n, a in lists.items() if len(a) != rows and a.min() >= 0 and a.sum() == rows][:1]

    def _count_extra_values(self, outputs: ObservedOutputs, shape: Shape, has_counts: bool) -> int | None:
        is_batched = has_counts or "image" in self.columns
        is_table = len(shape) == 3 or (len(shape) == 2 and (is_batched or outputs.images == 1))
        is_table |= is_batched and len(shape) == 4 and [*shape[:2]] == [1, 1]
        if not is_table or not isinstance(shape[-1], int):
            return None
        extra = shape[-1] - len(self.columns)
        if outputs.extra is None:
            return extra if extra > 0 and shape[-1] <= MAX_ROW_LENGTH and keypoints_of(extra) else None
        return extra if extra == outputs.extra else None

    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        array, *counts = (values[name] for name in fit.names)
        if counts:
            end = int(counts[0][: image + 1].sum())
            array = array[end - int(counts[0][image]) : end]
        if "image" in self.columns:
            array = array.reshape(-1, array.shape[-1])
            array = array[array[:, 0] == image]
        table = (array[image] if array.ndim == 3 else array).astype(np.float32).T
        column = {name: index for index, name in enumerate(self.columns)}
        table = table[:, table[column["class"]] != -1]  # padding rows
        boxes = table[column["x1"] : column["x1"] + 4]
        return Candidates(boxes, table[column["score"]], table[column["class"]], table[len(self.columns) :])


@dataclass(frozen=True)
class Lists(BoxLayout):
    """Final boxes with their scores and classes in separate outputs, and perhaps their number.

    Examples: torchvision's detectors, RT-DETR with its post-processing, TensorRT's EfficientNMS, TensorFlow's detection
    API.
    """

    numbers_classes = True

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        boxes = find_boxes(outputs)
        if boxes is None or outputs.extra:
            return None
        lead = outputs.shapes[boxes][:-1]
        if len(lead) == 1 and outputs.images != 1:
            return None
        columns = _list_single(outputs, lead)
        scores = find_named(columns, "score", "conf")
        labels = find_named([name for name in columns if name != scores], "class", "label", "cls", "categor")
        if not (scores and labels) and len(columns) == 2:
            order = sorted(columns, key=lambda name: _has_whole_numbers(outputs.values.get(name)))
            scores, labels = order if not (scores or labels) else (
                scores or next(n for n in columns if n != labels), labels or next(n for n in columns if n != scores)
            )  # fmt: skip
        if not (scores and labels) and not (len(columns) == 1 and len(lead) == 1):
            return None
        counts = [n for n in outputs.shapes if n not in columns and "num" in n.lower() and len(outputs.shapes[n]) <= 2]
        return Fit(self, (boxes, scores or columns[0], labels, *counts[:1]), outputs.classes or None, rank=0.5)

    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        boxes, scores, labels, *count = (values.get(name) for name in fit.names)
        assert boxes is not None and scores is not None
        rows = boxes[image] if boxes.ndim == 3 else boxes
        n = int(np.ravel(count[0])[image]) if count and count[0] is not None else len(rows)

        def read_column(array: np.ndarray) -> np.ndarray:
            column = array[image] if boxes.ndim == 3 else array
            return np.asarray(column).reshape(-1)[:n].astype(np.float32)

        classes = read_column(labels) if labels is not None else np.zeros(len(rows[:n]), np.float32)
        return Candidates(rows[:n].astype(np.float32).T, read_column(scores), classes)


@dataclass(frozen=True)
class ScoredLists(BoxLayout):
    """Final boxes with the score as the fifth value, and classes separately: MMDetection's `dets` and `labels`."""

    numbers_classes = True

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        boxes = next((name for name, shape in outputs.shapes.items() if len(shape) in (2, 3) and shape[-1] == 5), None)
        if boxes is None or outputs.extra:
            return None
        lead = outputs.shapes[boxes][:-1]
        labels = find_named(_list_single(outputs, lead), "label", "class", "cls", "categor")
        if not labels or (len(lead) == 1 and outputs.images != 1):
            return None
        return Fit(self, (boxes, labels), outputs.classes or None, rank=0.5)

    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        rows, labels = ((a[image] if values[fit.names[0]].ndim == 3 else a) for a in map(values.__getitem__, fit.names))
        table = rows.astype(np.float32).T
        return Candidates(table[:4], table[4], labels.reshape(-1).astype(np.float32))


@dataclass(frozen=True)
class TensorFlowLists(Lists):
    """`Lists` by the names of TensorFlow's detection API: y before x."""

    form = CORNERS_Y_FIRST
    fixed_form = True

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        fit = super().fits(outputs)
        return replace(fit, rank=0) if fit and "detection_boxes" in fit.names[0] else None


@dataclass(frozen=True)
class SelectedRows(BoxLayout):
    """All boxes and scores, with the rows (image, class, box) selected by ONNX's NonMaxSuppression."""

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        boxes = find_boxes(outputs)
        shapes = {name: shape for name, shape in outputs.shapes.items() if name != boxes}
        indices = [name for name, shape in shapes.items() if len(shape) in (2, 3) and shape[-1] == 3
                   and (name not in outputs.values or outputs.values[name].dtype.kind in "iu")]  # fmt: skip
        if boxes is None or outputs.extra or not indices:
            return None
        rows = outputs.shapes[boxes][1]
        scores = [
            n for n, shape in shapes.items() if n != indices[0] and len(shape) == 3 and can_be_same(shape[2:], [rows])
        ]
        classes = outputs.shapes[scores[0]][1] if scores else None
        if not scores or (outputs.classes and isinstance(classes, int) and classes != outputs.classes):
            return None
        class_count = classes if isinstance(classes, int) else outputs.classes or None
        return Fit(self, (boxes, scores[0], indices[0]), class_count, rank=0)

    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        boxes, scores, indices = (values[name] for name in fit.names)
        rows = indices.reshape(-1, 3)
        _, classes, anchors = rows[rows[:, 0] == image].T
        box_scores = scores[image][classes, anchors].astype(np.float32)
        return Candidates(boxes[image][anchors].astype(np.float32).T, box_scores, classes.astype(np.float32))


@dataclass(frozen=True)
class Pairs(BoxLayout):
    """Boxes, and the values of every class for each box, of the given `kind`.

    They are probabilities before suppression, perhaps including a background class.
    """

    kind: str
    suppressed = False
    free_order = False

    def fits(self, outputs: ObservedOutputs) -> Fit | None:
        boxes = find_boxes(outputs)
        if boxes is None or len(outputs.shapes[boxes]) != 3 or outputs.extra:
            return None
        rows = outputs.shapes[boxes][1]
        tables = {name: shape for name, shape in outputs.shapes.items() if name != boxes and len(shape) == 3}
        names = [n for n, shape in tables.items() if can_be_same(shape[1:2], [rows]) or can_be_same(shape[2:], [rows])]
        scores = find_named(names, "logit", "score", "conf", "class", "label", "cls") or (names[0] if names else "")
        if not scores:
            return None
        shape = outputs.shapes[scores]
        count = shape[2] if can_be_same(shape[1:2], [rows]) else shape[1]
        classes = (
            count - (self.kind in ("softmax", "first", "last")) if isinstance(count, int) else outputs.classes or None
        )
        if classes is not None and (classes < 1 or classes != (outputs.classes or classes)):
            return None
        return Fit(self, (boxes, scores), classes)

    def refute(self, fit: Fit, outputs: ObservedOutputs) -> str:
        table = self._read_table(fit, outputs.values, slice(None)).astype(np.float32)
        if factor := _find_factor(table, {n: a for n, a in outputs.values.items() if n not in fit.names}):
            return f"{factor} has one value per box besides its class scores: multiply the scores by it in the file"
        table = table[np.isfinite(table).all(-1)]
        has_logits = bool(table.size and (table.min() < -SCORE_SLACK or table.max() > 1 + SCORE_SLACK))
        count = table.shape[-1]
        has_background = count > 1 and bool(table.size) and float((table.argmax(-1) == count - 1).mean()) > 0.5
        is_distribution = count > 1 and bool(table.size and np.abs(table.sum(-1) - 1).max() < 2 * SCORE_SLACK)
        if outputs.classes:  # the number is more reliable than the values
            has_background = is_distribution = count > outputs.classes
        is_first = bool(table.size) and float(table[..., 0].mean()) > float(table[..., -1].mean())
        kind = ("softmax" if has_background else "sigmoid") if has_logits else "scores"
        if is_distribution and not has_logits:
            kind = "first" if is_first else "last"
        return "" if kind == self.kind else f"the values are {kind}"

    def _read_table(self, fit: Fit, values: Mapping[str, np.ndarray], image: int | slice) -> np.ndarray:
        boxes, scores = (values[name] for name in fit.names)
        return scores[image] if scores.shape[1] == boxes.shape[1] else np.swapaxes(scores, 1, 2)[image]

    def decode(self, fit: Fit, values: Mapping[str, np.ndarray], image: int) -> Candidates:
        table = self._read_table(fit, values, image).astype(np.float32)
        if self.kind == "sigmoid":
            table = 1 / (1 + np.exp(-table.clip(-80, 80)))
        elif self.kind == "softmax":
            powers = np.exp(table - table.max(-1, keepdims=True))
            table = powers / powers.sum(-1, keepdims=True)
        if self.kind in ("softmax", "last"):
            table = table[:, :-1]
        elif self.kind == "first":
            table = table[:, 1:]
        return Candidates(values[fit.names[0]][image].astype(np.float32).T, np.ascontiguousarray(table.T))


@dataclass(frozen=True)
class Queries(Pairs):
    """Boxes and logits of DETR and its successors: independent classes, or "no object" as the last class.

    They are trained to leave one box per object, and choose queries by score.
    """

    form = CENTRES
    suppressed = True
    free_order = True


BOX_LAYOUTS: tuple[BoxLayout, ...] = (
    AnchorTable(axis=1, description="batch x (4 + classes) x anchors, in either order (YOLOv8, v11)"),
    AnchorTable(axis=2),
    AnchorTable(axis=2, objectness=True, description="batch x anchors x (5 + classes) (YOLOv5, v7)"),
    AnchorTable(axis=1, objectness=True),
    FinalRows(LAST_ROW, description="rows of box, score and class (end to end)"),
    FinalRows((*BOX_COLUMNS, "class", "score"), rank=1.1),
    FinalRows(("class", "score", *BOX_COLUMNS), rank=1.2),
    FinalRows(BATCH_ROW),
    FinalRows(("image", *BOX_COLUMNS, "score", "class"), rank=1.1),
    FinalRows(("image", "class", "score", *BOX_COLUMNS), rank=1.2),
    Lists(description="boxes, scores and classes (torchvision, EfficientNMS)"),
    ScoredLists(),
    TensorFlowLists(),
    SelectedRows(description="boxes, scores and selected indices (ONNX's NonMaxSuppression)"),
    Queries("sigmoid", description="boxes and logits (DETR)"),
    Queries("softmax"),
    Pairs("scores", description="boxes and a score of each class"),
    Pairs("first"),
    Pairs("last"),
)


def list_fits(outputs: ObservedOutputs, kinds: tuple[type[BoxLayout], ...] = (BoxLayout,)) -> list[Fit]:
    """Return the fits of all possible layouts, the likeliest first; raise `UnreadBoxes` without any."""
    layouts = (layout for layout in BOX_LAYOUTS if isinstance(layout, kinds))
    fits = sorted((fit for layout in layouts if (fit := layout.fits(outputs))), key=lambda fit: fit.rank)
    if not fits:
        class_note = f" with {outputs.classes} classes" if outputs.classes else ""
        advice = "; for more than one class give --classes" if not outputs.classes and outputs.extra is None else ""
        raise UnreadBoxes(outputs.shapes, f"no known layout{class_note} has these shapes{advice}")
    return [fit for fit in fits if len(fit.names) > 1] or fits  # fits with several outputs are preferred


def choose_layout(
    outputs: ObservedOutputs, kinds: tuple[type[BoxLayout], ...] = (BoxLayout,)
) -> tuple[Fit, BoxForm] | None:
    """Return the layout (of `kinds`) and box form that fit the values too; raise `UnreadBoxes` if none fits.

    Return None if the values have no boxes.
    """
    reasons, is_empty = list[str](), False
    for _, fits in groupby(list_fits(outputs, kinds), key=lambda fit: fit.rank):
        # Zeros may be a single class rather than scores, if another column has scores.
        results = [(fit, _examine_boxes(fit, outputs, graded=is_empty)) for fit in fits]
        reasons += [result for _, result in results if isinstance(result, str)]
        matches = [(fit, result) for fit, result in results if isinstance(result, BoxForm)]
        if len(matches) > 1:
            counts = sorted({str(fit.classes) for fit, _ in matches})
            conflict = f"they are of {' or '.join(counts)} classes" if len(counts) > 1 else "more than one layout fits"
            raise UnreadBoxes(outputs.shapes, f"{conflict}; say how many classes there are with --classes")
        if matches:
            return matches[0]
        is_empty |= any(result is None for _, result in results)
    if is_empty:
        return None
    raise UnreadBoxes(outputs.shapes, reasons[0])


def _examine_boxes(fit: Fit, outputs: ObservedOutputs, graded: bool) -> BoxForm | str | None:
    """Return the form of the boxes, None without boxes, or a contradiction to the layout.

    If scores must be `graded`, whole numbers as scores are a contradiction.
    """
    if reason := fit.layout.refute(fit, outputs):
        return reason
    results = [fit.layout.decode(fit, outputs.values, image) for image in range(min(outputs.images, EXAMINED_IMAGES))]
    scores = np.concatenate([each.best_scores() for each in results])
    finite = scores[np.isfinite(scores)]
    if finite.size and (finite.min() < -SCORE_SLACK or finite.max() > 1 + SCORE_SLACK):
        return f"the values read as scores go from {finite.min():.3g} to {finite.max():.3g}"
    boxes = np.concatenate([each.boxes.T for each in results]).astype(np.float32)
    is_usable = np.isfinite(boxes).all(1) & boxes.any(1)
    rows = np.flatnonzero(is_usable & (scores > MAX_FILLER_SCORE))
    if not rows.size and not fit.layout.suppressed:
        rows = np.flatnonzero(is_usable)
    if not rows.size:
        return None
    if graded and _has_whole_numbers(scores[rows]):
        return "the values read as scores are whole numbers"
    if results[0].labels is not None:
        labels = np.concatenate([each.labels for each in results if each.labels is not None])[rows]
        if not (_has_whole_numbers(labels) and labels.min() >= 0):
            return "the values read as classes are not whole numbers from 0"
    rows = rows[np.argsort(-scores[rows], kind="stable")[:MAX_EXAMINED_BOXES]]
    form = _choose_form(boxes[rows], fit.layout, outputs.size)
    return form or "the values read as boxes lie outside the image"


def _choose_form(boxes: np.ndarray, layout: BoxLayout, size: tuple[int, int]) -> BoxForm | None:
    """Return the layout's usual form unless another fits clearly better; None if none fits."""
    default = replace(layout.form, shares=bool(np.abs(boxes).max() <= 2))
    share = valid_share(boxes, default, size)
    if share < 0.9 and not layout.fixed_form:
        forms = [replace(form, shares=default.shares) for form in (CORNERS, CENTRES, SIDES) if form != layout.form]
        shares = [valid_share(boxes, form, size) for form in forms]
        if max(shares) > max(0.95, share + 0.2):
            return forms[int(np.argmax(shares))]
    return default if valid_share(boxes, default, size, loose=True) >= 0.5 else None


def anchors_per_cell(anchors: object, size: tuple[int, int]) -> int:
    """Return 1 or 3 if the image's grid cells have that number of anchors; else 0."""
    if not all(size):
        return 0
    cells = {sum(rows * columns for rows, columns in _list_grids(strides, size)) for strides in GRID_STRIDES}
    return next((per_cell for per_cell in (1, 3) if any(anchors == per_cell * count for count in cells)), 0)


def _list_grids(strides: Sequence[int], size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return rows and columns of each stride's grid."""
    return [(-(-size[0] // stride), -(-size[1] // stride)) for stride in strides]


def _follow_cells(centres: np.ndarray, size: tuple[int, int]) -> bool:
    """Return whether each anchor's centre (x and y, 2 x anchors) follows its cell, in any usual order of anchors.

    Centres given as offsets from their cells, as by YOLOX without decoding, are small and not correlated with the
    cells. True for pixels and shares of the image, and for anchors that aren't a grid's.
    """
    per_cell = anchors_per_cell(centres.shape[1], size)
    is_finite = np.isfinite(centres).all(0)
    if not per_cell or not is_finite.any() or np.ptp(centres[:, is_finite], axis=1).min() == 0:
        return True
    extent = float(np.quantile(np.abs(centres[:, is_finite]), 0.99))
    if extent <= 1 + SCORE_SLACK or extent > FARTHEST_OFFSET:  # shares of the image, or pixels
        return True
    best = 0.0
    for strides in (order for grid_strides in GRID_STRIDES for order in (grid_strides, grid_strides[::-1])):
        for is_outer in (True, False):  # order: anchor by anchor, or cell by cell
            cells = np.concatenate(
                [_list_cells(grid, per_cell, is_outer) for grid in _list_grids(strides, size)], axis=1
            )
            if cells.shape == centres.shape:
                pairs = zip(cells[:, is_finite], centres[:, is_finite], strict=True)
                best = max(best, min(float(np.corrcoef(cell, centre)[0, 1]) for cell, centre in pairs))
    return best > IN_STEP


def _list_cells(grid: tuple[int, int], per_cell: int, is_outer: bool) -> np.ndarray:
    """Return x and y of each anchor's cell as shares of the image, 2 x anchors, row by row."""
    y, x = (axis.ravel() for axis in np.mgrid[: grid[0], : grid[1]])
    centres = np.stack([(x + 0.5) / grid[1], (y + 0.5) / grid[0]])
    return np.tile(centres, per_cell) if is_outer else np.repeat(centres, per_cell, axis=1)


def keypoints_of(values: int) -> tuple[int, int] | None:
    """Return the number of keypoints in this number of values, and of values per point; None for other numbers."""
    per_point = next((n for n in (3, 2) if values > 0 and values % n == 0), 0)
    return (values // per_point, per_point) if per_point else None


def _find_factor(table: np.ndarray, arrays: Mapping[str, np.ndarray]) -> str:
    """Return an output with one number per box, such as objectness, that is neither its class nor its top score."""
    for name, array in arrays.items():
        values = array.reshape(array.shape[:2]) if array.ndim == 3 and array.shape[2] == 1 else array
        if values.shape != table.shape[:2] or not values.size or _has_whole_numbers(values):
            continue
        if not np.allclose(values, table.max(-1), atol=SCORE_SLACK):
            return name
    return ""


def find_boxes(outputs: ObservedOutputs) -> str | None:
    """Return the output with boxes, rows of four values; logits of four classes have negative ones."""
    names = [name for name, shape in outputs.shapes.items() if len(shape) in (2, 3) and shape[-1] == 4]
    negative = {name: np.count_nonzero(a < 0) > 0.1 * a.size for name, a in outputs.values.items() if name in names}
    names.sort(key=lambda name: negative.get(name, False))
    return next((n for n in names if "box" in n.lower() and "raw" not in n.lower()), names[0] if names else None)


def _list_single(outputs: ObservedOutputs, lead: Shape) -> list[str]:
    """Return the names of the outputs with one value per box."""
    return [
        name for name, shape in outputs.shapes.items() if can_be_same(shape, lead) or can_be_same(shape, (*lead, 1))
    ]


def find_named(names: Sequence[str], *words: str) -> str:
    """Return the first name that contains one of the words; "" if none."""
    return next((name for name in names if any(word in name.lower() for word in words)), "")


def can_be_same(shape: Shape, other: Shape) -> bool:
    """Return whether shapes may be equal: a free axis may have any length."""
    return len(shape) == len(other) and all(
        a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(shape, other, strict=True)
    )


def _has_whole_numbers(values: np.ndarray | None) -> bool:
    return values is not None and bool(np.all(values == np.round(values)))


def agreed_classes(fits: Sequence[Fit]) -> int | None:
    """Return the number of classes of the likeliest layouts; None if they differ."""
    counts = {fit.classes for fit in fits if fit.rank == fits[0].rank}
    return counts.pop() if len(counts) == 1 else None
