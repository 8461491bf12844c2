"""Boxes: the layout of a detector's outputs, and detections in pixels of the original image."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs import input_data
from dyno.worker.inspection import Purpose
from dyno.worker.spec import AS_READ, ModelSpec, Preprocess, UserError, add_noun
from dyno.worker.tasks import Arrays, Collector, EvaluationInputs, OutputShapes, Shape, Task, layouts
from dyno.worker.tasks.layouts import Fit, ObservedOutputs, UnreadBoxes
from dyno.worker.tasks.postprocess import (
    CENTRES,
    CORNERS,
    CORNERS_Y_FIRST,
    SIDES,
    BoxForm,
    Detections,
    ImagePlacement,
    KeptRows,
    overlap_by_half,
    select_best,
)

COCO_CLASSES = 80
TRUTH_FILE = "truth.json"  # a decoded data set's annotations
EXAMINED_BOXES = 10  # boxes per image that decide the box form
# shares of squared scores on annotated objects: conclusive, and negligible
TELLING_SHARE, NEGLIGIBLE_SHARE = 0.25, 0.01
COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # numbers from 1 to 90 without a COCO class


class Detect(Task):
    """Objects with boxes and a derived task's additions (`extra`, `read`, `arrays`), in any layout of `layouts`."""

    name = "detect"
    labels = "objects"
    metrics: tuple[str, ...] = ("mAP", "mAP50")
    coco = "bbox"
    refers_to = ""  # reference of the box coordinates
    note = "The outputs are the network's own: nothing here decodes boxes or suppresses overlapping ones."

    def extra(self, shapes: Mapping[str, Shape], keypoints: Sequence[int]) -> int | None:
        """Return the number of values of a box in addition to scores; None for an unknown number of keypoints."""
        return 0

    def find_referred(self, shapes: Mapping[str, Shape]) -> str:
        """Return the name of the output that boxes refer to; "" if none."""
        return ""

    def read(self, rows: KeptRows) -> dict[str, Any]:
        """Return further fields of `Detections`."""
        return {}

    def arrays(self, detections: Sequence[Detections], model: ModelSpec) -> dict[str, np.ndarray]:
        """Return further arrays for outputs.npz."""
        return {}

    def preprocess(self, channels: int) -> Preprocess:
        return Preprocess((0.0,) * channels, (1.0,) * channels, letterbox=True)

    def layout(self, model: ModelSpec, metadata: Purpose, outputs: OutputShapes) -> Purpose:
        """Return classes and keypoints from the metadata and the likeliest layout.

        If none fits, return those in the metadata: the network can still be timed, and its trials report that no boxes
        are read.
        """
        purpose = replace(metadata, classes=model.classes or metadata.classes,
                        keypoints=tuple(model.keypoints or metadata.keypoints))  # fmt: skip
        try:
            fits = layouts.list_fits(
                self.observe(outputs.shapes, outputs.size, purpose.classes or 0, purpose.keypoints)
            )
        except UnreadBoxes:
            self._check_classes(model, outputs, purpose)
            return Purpose(classes=purpose.classes, keypoints=purpose.keypoints)
        keypoints = purpose.keypoints
        if self.needs == "keypoints" and fits[0].extra:
            keypoints = keypoints or layouts.keypoints_of(fits[0].extra) or ()
        return Purpose(classes=layouts.agreed_classes(fits) or purpose.classes, keypoints=keypoints)

    def _check_classes(self, model: ModelSpec, outputs: OutputShapes, purpose: Purpose) -> None:
        """Raise a `UserError` if the outputs would fit with another number of classes than the user's."""
        if not model.classes:
            return
        try:
            class_count = layouts.agreed_classes(
                layouts.list_fits(self.observe(outputs.shapes, outputs.size, 0, purpose.keypoints))
            )
        except UnreadBoxes:
            return
        classes = f"{class_count} classes" if class_count else "another number of classes"
        raise UserError(
            f"{model.name} gives {format_shapes(outputs.shapes.values())}, which has {classes} for {self.name}, not "
            f"{model.classes}; check --task and --classes"
        )

    def observe(
        self,
        shapes: Mapping[str, Shape],
        size: tuple[int, int],
        classes: int,
        keypoints: Sequence[int],
        images: int = 1,
    ) -> ObservedOutputs:
        """Return the outputs for fitting layouts; raise `UnreadBoxes` without an output that the task needs."""
        reference = self.find_referred(shapes)
        if self.refers_to and not reference:
            raise UnreadBoxes(shapes, f"there are no {self.refers_to}")
        boxes = {name: shape for name, shape in shapes.items() if name != reference}
        return ObservedOutputs(boxes, size, classes, self.extra(shapes, keypoints), images)

    def collector(self, evaluated: EvaluationInputs) -> Collector:
        return DetectionCollector(self, evaluated)


DETECT = Detect()


class BoxReader:
    """Detections of one network's batches, by the same code for every backend.

    The first batch with boxes decides the layout; several threads may read in parallel. `classes` is their number (0:
    unknown), `keypoints` the number of points and of values per point. `confidence` is the minimum score, `iou` the
    overlap above which the weaker of two boxes of a class is dropped, and `max_detections` the limit per image.
    `likely` are the data's classes and keypoints: they decide if the network's are unknown and these fit.
    """

    def __init__(
        self, task: Detect, classes: int = 0, keypoints: Sequence[int] = (), *,
        confidence: float = 0.001, iou: float = 0.7, max_detections: int = 300,
        likely: tuple[int, Sequence[int]] = (0, ()),
    ) -> None:  # fmt: skip
        self._task, self._classes, self._keypoints = task, classes, tuple(keypoints)
        self._likely = (classes or likely[0], self._keypoints or tuple(likely[1]))
        self.confidence, self._iou, self._max_detections = confidence, iou, max_detections
        self._best_fit: tuple[Fit, BoxForm] | None = None
        self._choosing = threading.Lock()

    @property
    def fit(self) -> Fit | None:
        """The fit of the chosen layout; None before a batch with boxes."""
        return self._best_fit[0] if self._best_fit else None

    @property
    def form(self) -> BoxForm:
        """The form of the boxes."""
        return self._best_fit[1] if self._best_fit else CORNERS

    def read_detections(
        self, outputs: Mapping[str, np.ndarray], sizes: np.ndarray, input_size: tuple[int, int],
        aspects: Sequence[float] = (),
    ) -> list[Detections]:  # fmt: skip
        """Return the detections of each image of a batch.

        `sizes` is B x 2, height and width of the original images, without padding; `input_size` those of the network's
        input. `aspects` are the images' pixel aspect ratios, width over height (default: 1). Raise `UnreadBoxes` if no
        layout fits.
        """
        if not len(sizes):
            return []
        choice = self._choose_layout(outputs, input_size, len(sizes))
        reference = self._task.find_referred(shapes_of(outputs))
        detections = []
        for image, (height, width) in enumerate(np.asarray(sizes).tolist()):
            placement = ImagePlacement(height, width, *input_size, aspects[image] if aspects else 1.0)
            values = np.asarray(outputs[reference])[image].astype(np.float32) if reference else np.empty(0, np.float32)
            detections.append(self._read_image(outputs, image, placement, values, choice))
        self._check_labels(detections, outputs)
        return detections

    def _choose_layout(
        self, outputs: Mapping[str, np.ndarray], size: tuple[int, int], images: int
    ) -> tuple[Fit, BoxForm] | None:
        with self._choosing:
            if self._best_fit is None:
                with contextlib.suppress(UnreadBoxes):
                    self._best_fit = self._fit_layout(outputs, size, images, *self._likely)
                    self._keypoints = self._likely[1] if self._best_fit else self._keypoints
                    return self._best_fit
                self._best_fit = self._fit_layout(outputs, size, images, self._classes, self._keypoints)
            return self._best_fit

    def _fit_layout(
        self, outputs: Mapping[str, np.ndarray], size: tuple[int, int], images: int, classes: int, points: Sequence[int]
    ) -> tuple[Fit, BoxForm] | None:
        observed = self._task.observe(shapes_of(outputs), size, classes, points, images)
        return layouts.choose_layout(replace(observed, values=outputs))

    def _read_image(
        self, outputs: Mapping[str, np.ndarray], image: int, placement: ImagePlacement, reference: np.ndarray,
        choice: tuple[Fit, BoxForm] | None,
    ) -> Detections:  # fmt: skip
        extra = (choice[0].extra if choice else self._task.extra(shapes_of(outputs), self._keypoints)) or 0
        rows, labels, scores = np.empty((0, 4 + extra), np.float32), np.empty(0, np.int32), np.empty(0, np.float32)
        form = choice[1] if choice else CORNERS
        if choice:
            fit = choice[0]
            candidates = fit.layout.decode(fit, outputs, image)
            iou = None if fit.layout.suppressed else self._iou
            indices, labels, scores = select_best(
                candidates,
                lambda boxes: form.convert_boxes(boxes, placement.input),
                self.confidence,
                iou,
                self._max_detections,
            )
            arrays = [candidates.boxes, *([candidates.extra_values] if candidates.extra_values is not None else [])]
            rows = np.concatenate([array[:, indices] for array in arrays]).T.astype(np.float32)
        boxes = placement.place_boxes(form.convert_boxes(rows[:, :4], placement.input))
        keypoints = self._keypoints or layouts.keypoints_of(extra) or (0, 3)
        fields = self._task.read(KeptRows(rows[:, 4:], reference, boxes, placement, form, keypoints))
        raw_boxes = rows if form.order == CORNERS.order and not extra else None
        return Detections(boxes, scores, labels, **fields, own=raw_boxes)

    def _check_labels(self, detections: Sequence[Detections], outputs: Mapping[str, np.ndarray]) -> None:
        """Raise `UnreadBoxes` for classes that the network can't have."""
        max_label = max((int(result.classes.max()) for result in detections if len(result.classes)), default=0)
        limit = max(COCO_GAPS[-1] + 7, self._classes) if self._classes == COCO_CLASSES else self._classes
        if self._classes and max_label > limit:
            raise UnreadBoxes(shapes_of(outputs), f"a box is of class {max_label}, and there are {self._classes}")


class DetectionCollector(Collector):
    """Each image's detections, by the task's post-processing for all backends.

    For random inputs none are kept; boxes are read only to find out whether that is possible.
    """

    def __init__(self, task: Detect, evaluated: EvaluationInputs) -> None:
        super().__init__(evaluated)
        self._task, self._model, self._samples = task, evaluated.trial.model, evaluated.samples
        data = evaluated.trial.data
        metadata = input_data.read_metadata(data)
        self._names = len(metadata.get("classes") or ())
        likely = (self._names, metadata.get("keypoints") or ())
        self._reader = BoxReader(task, self._model.classes or 0, self._model.keypoints, likely=likely)
        self._sizes = np.full((evaluated.count, 2), evaluated.input_size)
        if self._samples is None:
            return
        try:
            self._sizes = np.load(Path(data.folder) / "sizes.npy")
        except (OSError, ValueError) as e:
            raise UserError(
                f"the data set {data.name} was decoded without the images' sizes, which a {task.name} model needs; "
                f"give a data set with boxes ({e})"
            ) from e

    def collect(self, index: int, outputs: Arrays) -> Any:
        """Return a batch's samples with their detections, or the reason for a lack of detections."""
        first = index * self.evaluated.batch
        images = self.images(index)
        samples = self._samples[first : first + images] if self._samples is not None else np.arange(images)
        try:
            detections = self._reader.read_detections(outputs, self._sizes[samples], self.evaluated.input_size)
        except UnreadBoxes as e:
            return str(e)
        return list(zip(samples.tolist(), detections, strict=True)) if self._samples is not None else []

    def oddities(self, batches: Sequence[Any]) -> list[str]:
        reason = next((batch for batch in batches if isinstance(batch, str)), "")
        if reason or self._samples is None:
            return [reason] if reason else []
        pairs = [pair for batch in batches for pair in batch]
        (_, numbering), (_, placing), fit = self._number_classes(pairs), self._place_boxes(pairs), self._reader.fit
        if not numbering and fit and self._names and fit.classes not in (None, self._names):
            numbering = f"the boxes are of {add_noun(fit.classes, 'class', 'classes')}, and the data has {self._names}"
        return [note for note in (numbering, placing) if note]

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        if self._samples is None or any(isinstance(batch, str) for batch in batches):
            return {}
        pairs = [pair for batch in batches for pair in batch]
        detections = [detections for _, detections in pairs]
        labels, _ = self._number_classes(pairs)
        if labels is None:
            return {}
        image_ids = np.repeat([sample for sample, _ in pairs], [len(d.scores) for d in detections])
        return {
            "detection_image": image_ids.astype(np.int64),
            "detection_box": join_arrays(self._place_boxes(pairs)[0], np.float32, 4),
            "detection_score": join_arrays([d.scores for d in detections], np.float32),
            "detection_class": labels,
            **self._task.arrays(detections, self._model),
        }

    def _number_classes(self, pairs: Sequence[tuple[int, Detections]]) -> tuple[np.ndarray | None, str]:
        """Return all detections' classes by the data's numbering, and a note if the network's differs."""
        detections = [one for _, one in pairs]
        labels = join_arrays([one.classes for one in detections], np.int32)
        fit = self._reader.fit
        if fit is None or not fit.layout.numbers_classes or not self._names or not self._objects:
            return numbered_as(labels, self._names)
        is_present = np.zeros((len(self._sizes), self._names), bool)
        for one in self._objects:
            is_present[one["image_id"], one["category_id"]] = True
        images = np.repeat([sample for sample, _ in pairs], [len(one.scores) for one in detections]).astype(np.int64)
        weights = (
            join_arrays([one.scores for one in detections], np.float32) ** 2
        )  # discounts the many boxes of low scores

        def measure_share(classes: np.ndarray, mask: np.ndarray) -> float:
            hits = is_present[images[mask], classes[mask]]
            return float(weights[mask][hits].sum() / max(float(weights[mask].sum()), 1e-9))

        return numbered_as(labels, self._names, measure_share)

    @cached_property
    def _objects(self) -> list[dict[str, Any]]:
        """The annotated objects; empty for data without annotations."""
        truth = Path(self.evaluated.trial.data.folder, TRUTH_FILE)
        objects: list[dict[str, Any]] = json.loads(truth.read_text("utf-8"))["annotations"] if truth.is_file() else []
        return objects

    def _place_boxes(self, pairs: Sequence[tuple[int, Detections]]) -> tuple[list[np.ndarray], str]:
        """Return each image's boxes, and a note if the annotated objects imply another box form.

        Values alone don't show whether y precedes x, as in TensorFlow's networks, or, for large boxes, corners or
        centres.
        """
        boxes, form = [one.boxes for _, one in pairs], self._reader.form
        annotated: dict[int, list[list[float]]] = {}
        for one in self._objects:
            x, y, width, height = one["bbox"]
            annotated.setdefault(one["image_id"], []).append([x, y, x + width, y + height])
        objects = {image: np.array(corners) for image, corners in annotated.items()}
        images = [(k, image) for k, (image, one) in enumerate(pairs) if image in objects and len(one.scores)]
        if not images:
            return boxes, ""
        weights = np.concatenate([pairs[k][1].scores[:EXAMINED_BOXES].astype(np.float64) ** 2 for k, _ in images])

        def measure_share(placed: Sequence[np.ndarray]) -> float:
            hits = np.concatenate([overlap_by_half(placed[k][:EXAMINED_BOXES], objects[image]) for k, image in images])
            return float(weights[hits].sum() / weights.sum())

        share, other_forms = measure_share(boxes), self._list_other_forms(pairs)
        placed = [[self._place_own(image, one.own, other) for image, one in pairs] for other in other_forms]
        shares = [measure_share(one) for one in placed]
        if shares and max(shares) > max(TELLING_SHARE, 2 * share):
            best = int(np.argmax(shares))
            return placed[best], (
                f"the boxes were read as {other_forms[best].order}, which places them on the annotated objects, unlike "
                f"{form.order}"
            )
        if share < NEGLIGIBLE_SHARE:
            unit = "shares of the image" if form.shares else "pixels"
            return boxes, (
                f"{AS_READ} as {form.order} in {unit}, hardly overlap the annotated objects: the network wasn't "
                "trained on such, its images were prepared differently, or its boxes have another meaning"
            )
        return boxes, ""

    def _list_other_forms(self, pairs: Sequence[tuple[int, Detections]]) -> list[BoxForm]:
        """Return the box forms that values can't distinguish from the chosen one."""
        form, fit = self._reader.form, self._reader.fit
        if form.order != CORNERS.order or any(one.own is None for _, one in pairs):
            return []
        # Only for suppressed boxes: NMS in another form would have kept other boxes.
        suppressed_forms = (CENTRES, SIDES) if fit and fit.layout.suppressed else ()
        return [replace(other, shares=form.shares) for other in (CORNERS_Y_FIRST, *suppressed_forms)]

    def _place_own(self, image: int, raw_boxes: np.ndarray | None, form: BoxForm) -> np.ndarray:
        assert raw_boxes is not None
        height, width = self._sizes[image].tolist()
        size = self.evaluated.input_size
        return ImagePlacement(height, width, *size).place_boxes(form.convert_boxes(raw_boxes, size))


def numbered_as(
    labels: np.ndarray, classes: int, measure_share: Callable[[np.ndarray, np.ndarray], float] | None = None
) -> tuple[np.ndarray | None, str]:
    """Return labels by the data's numbering, from 0, and a note if the network's numbering differs.

    Networks with a background count from 1, and networks of COCO's 80 classes often use COCO's numbers up to 90. If the
    highest labels don't occur, several numberings fit; then `measure_share` decides: it returns the share of some
    detections' squared scores on classes that their images have. Among the labels that differ, another numbering must
    be true of most, and of twice the share. Return None if the labels are of other classes than the data's.
    """
    if not classes or not len(labels):
        return labels, ""
    numberings = _list_numberings(labels, classes)
    if numberings and measure_share is not None:
        numberings.sort(key=lambda numbering: -measure_share(numbering[0], labels >= 0))
    if labels.max() >= classes:
        reason = f"{layouts.NO_BOXES}: a box is of class {labels.max()}, and the data has {classes} classes"
        return numberings[0] if numberings else (None, reason)
    if not numberings or measure_share is None:
        return labels, ""
    is_changed = numberings[0][0] != labels
    is_other = measure_share(numberings[0][0], is_changed) > max(0.5, 2 * measure_share(labels, is_changed))
    return numberings[0] if is_other else (labels, "")


def _list_numberings(labels: np.ndarray, classes: int) -> list[tuple[np.ndarray, str]]:
    """Return the labels by each other numbering that fits, with a note."""
    numberings = []
    if labels.min() >= 1 and labels.max() <= classes:
        numberings.append((labels - 1, "the network's classes count from 1 (0 is the background) and were taken so"))
    for first in (1, 0) if classes == COCO_CLASSES else ():
        numbers = labels + (1 - first)  # COCO's own numbers
        if numbers.min() >= 1 and numbers.max() <= 90 and not np.isin(numbers, COCO_GAPS).any():
            ids = numbers - 1 - np.searchsorted(COCO_GAPS, numbers).astype(labels.dtype)
            note = "" if first else ", less one,"
            numberings.append((ids, f"the network's classes have COCO's numbers up to 90{note} and were taken so"))
    return numberings


def join_arrays(parts: list[np.ndarray], dtype: Any, *shape: int) -> np.ndarray:
    """Return the parts joined; there may be no parts."""
    return np.concatenate([np.empty((0, *shape), dtype), *(part.reshape(-1, *shape) for part in parts)]).astype(dtype)


def shapes_of(outputs: Mapping[str, np.ndarray]) -> dict[str, Shape]:
    """Return the shape of each output."""
    return {name: array.shape for name, array in outputs.items()}


def format_shapes(shapes: Iterable[Shape]) -> str:
    """Return shapes for messages: 1x84x8400, 1x32x160x160."""
    return ", ".join("x".join(map(str, shape)) for shape in shapes)
