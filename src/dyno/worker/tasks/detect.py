"""Boxes: the layout of a detector's outputs, and its detections in pixels of the original image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec, Preprocess, UserError
from dyno.worker.tasks.postprocess import Detections, Place, best, corners
from dyno.worker.tasks.task import Arrays, Collector, Evaluated, Shape, Task

COORDINATES = 4


class Detect(Task):
    """Objects with boxes, as YOLO networks give them: predictions, batch x values x anchors.

    The values are centre, width and height in input pixels, a score from 0 to 1 for each class, and what a derived
    task adds (`extra`, `read`, `arrays`).
    """

    name = "detect"
    labels = "objects"
    metrics: tuple[str, ...] = ("mAP", "mAP50")
    coco = "bbox"
    note = "The outputs are the network's own, before non-maximum suppression."
    besides = ""  # outputs besides the predictions, for messages

    def extra(self, shapes: Sequence[Shape], keypoints: Sequence[int]) -> int:
        """How many values a prediction has behind the scores."""
        return 0

    def extra_shown(self, extra: int) -> str:
        """The same for messages."""
        return ""

    def fits(self, shapes: Sequence[Shape]) -> bool:
        """Whether there are as many outputs of as many axes as the task has."""
        return bool(shapes) and len(shapes[0]) == 3

    def keypoints(self, model: ModelSpec, metadata: Purpose, values: Any, classes: int) -> tuple[int, ...]:
        """How many keypoints there are and how many values each has, () for none."""
        return ()

    def read(self, rest: np.ndarray, outputs: Sequence[np.ndarray], image: int, boxes: np.ndarray, place: Place,
             keypoints: tuple[int, ...]) -> dict[str, Any]:  # fmt: skip
        """Fields of `Detections` besides the boxes, from the `rest` of the predictions that survived."""
        return {}

    def arrays(self, detections: Sequence[Detections], model: ModelSpec) -> dict[str, np.ndarray]:
        """Arrays for outputs.npz besides the boxes'."""
        return {}

    def preprocess(self, channels: int) -> Preprocess:
        return Preprocess((0.0,) * channels, (1.0,) * channels, letterbox=True)

    def layout(self, model: ModelSpec, metadata: Purpose, outputs: Sequence[Shape]) -> Purpose:
        """From the metadata and the length of a prediction."""
        if not self.fits(outputs):
            raise UserError(
                f"{model.name} gives {shown(outputs)}; a network for {self.name} gives predictions, "
                f"batch x values x anchors{self.besides}"
            )
        values, classes = outputs[0][1], model.classes or metadata.classes or 0
        keypoints = self.keypoints(model, metadata, values, classes)
        if isinstance(values, int):
            extra = self.extra(outputs, keypoints)
            classes = classes or values - COORDINATES - extra
            if classes < 1 or values != COORDINATES + classes + extra:
                raise UserError(
                    f"{model.name} has {values} values for each anchor, which is not 4 + {classes} classes + {extra} "
                    f"more for {self.name}; check --task and --classes"
                )
        elif not classes or (self.needs == "keypoints" and not keypoints):
            raise UserError(f"{model.name} doesn't say how long its predictions are; give --classes")
        return Purpose(classes=classes, keypoints=tuple(keypoints))

    def collector(self, evaluated: Evaluated) -> Collector:
        return Collector(evaluated) if evaluated.samples is None else DetectionCollector(self, evaluated)

    def detections(
        self,
        outputs: Sequence[np.ndarray],
        sizes: np.ndarray,
        input_size: tuple[int, int],
        *,
        classes: int,
        keypoints: tuple[int, ...] = (),
        confidence: float = 0.001,
        iou: float = 0.7,
        most: int = 300,
        aspects: Sequence[float] = (),
    ) -> list[Detections]:
        """Detections of each image of a batch, by the same code for every backend.

        `sizes` is B x 2, height and width of the original images; `input_size` those of the network's input. `aspects`
        are the widths of each image's pixels over their heights (default: 1). Raises `UserError` where the outputs
        aren't those of such a network.
        """
        predictions = np.asarray(outputs[0])
        extra = self.extra([np.shape(output) for output in outputs], keypoints)
        values = COORDINATES + classes + extra
        if predictions.ndim != 3 or predictions.shape[1] != values:
            raise UserError(
                f"the predictions are {shown([predictions.shape])}; for task {self.name} they are batch x {values} x "
                f"anchors (4 + {classes} classes{self.extra_shown(extra)}); check --task and --classes"
            )
        detections_ = []
        for k, (height, width) in enumerate(np.asarray(sizes).tolist()):
            rows, labels, scores = best(predictions[k], classes, confidence, iou, most)
            place = Place(height, width, *input_size, aspects[k] if aspects else 1.0)
            boxes = place.boxes(corners(rows[:, :COORDINATES]))
            fields = self.read(rows[:, COORDINATES + classes :], outputs, k, boxes, place, keypoints)
            detections_.append(Detections(boxes, scores, labels, **fields))
        return detections_


DETECT = Detect()


class DetectionCollector(Collector):
    """Detections of each image by the task's post-processing, which all backends share."""

    def __init__(self, task: Detect, evaluated: Evaluated) -> None:
        super().__init__(evaluated)
        assert evaluated.samples is not None
        self._task, self._model, self._samples = task, evaluated.trial.model, evaluated.samples
        data = evaluated.trial.data
        try:
            self._sizes = np.load(Path(data.folder) / "sizes.npy")
        except (OSError, ValueError) as e:
            raise UserError(
                f"the data set {data.name} was decoded without the images' sizes, which a {task.name} model needs; "
                f"give a data set with boxes ({e})"
            ) from e

    def of(self, turn: int, fetched: Arrays) -> Any:
        cut = list(self.cut(turn, fetched).values())
        first = turn * self.evaluated.batch
        samples = self._samples[first : first + len(cut[0])]
        sizes, model = self._sizes[samples], self._model
        detections = self._task.detections(
            cut, sizes, self.evaluated.input_size, classes=model.classes or 0, keypoints=model.keypoints
        )
        return list(zip(samples.tolist(), detections, strict=True))

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        pairs = [pair for batch in batches for pair in batch]
        detections = [detections for _, detections in pairs]
        image = np.repeat([sample for sample, _ in pairs], [len(d.scores) for d in detections])
        return {
            "detection_image": image.astype(np.int64),
            "detection_box": joined([d.boxes for d in detections], np.float32, 4),
            "detection_score": joined([d.scores for d in detections], np.float32),
            "detection_class": joined([d.classes for d in detections], np.int32),
            **self._task.arrays(detections, self._model),
        }


def joined(parts: list[np.ndarray], dtype: Any, *shape: int) -> np.ndarray:
    """The parts one after the other, of which there may be none."""
    return np.concatenate([np.empty((0, *shape), dtype), *(part.reshape(-1, *shape) for part in parts)]).astype(dtype)


def shown(shapes: Sequence[Shape]) -> str:
    """Shapes for messages: 1x84x8400, 1x32x160x160."""
    return ", ".join("x".join(map(str, shape)) for shape in shapes)
