"""Boxes with keypoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec
from dyno.worker.tasks.detect import COORDINATES, Detect, joined
from dyno.worker.tasks.postprocess import Detections, Place
from dyno.worker.tasks.task import Shape


class Pose(Detect):
    """Objects with boxes and keypoints."""

    name = "pose"
    needs = "keypoints"
    metrics = ("mAP", "mAP50", "box_mAP", "box_mAP50")
    coco = "keypoints"

    def extra(self, shapes: Sequence[Shape], keypoints: Sequence[int]) -> int:
        """Two or three values for each keypoint."""
        return math.prod(keypoints)

    def extra_shown(self, extra: int) -> str:
        return f" + {extra} keypoint values"

    def keypoints(self, model: ModelSpec, metadata: Purpose, values: Any, classes: int) -> tuple[int, ...]:
        """Those that the user or the file says, else as many as a prediction has room for."""
        declared = tuple(model.keypoints or metadata.keypoints)
        if declared or not isinstance(values, int):
            return declared
        rest = values - COORDINATES - (classes or 1)
        return (rest // 3, 3) if rest % 3 == 0 else (rest // 2, 2)

    def read(self, rest: np.ndarray, outputs: Sequence[np.ndarray], image: int, boxes: np.ndarray, place: Place,
             keypoints: tuple[int, ...]) -> dict[str, Any]:  # fmt: skip
        return {"keypoints": place.points(rest.reshape(-1, *keypoints))}

    def arrays(self, detections: Sequence[Detections], model: ModelSpec) -> dict[str, np.ndarray]:
        points = [detection.keypoints for detection in detections if detection.keypoints is not None]
        return {"detection_keypoints": joined(points, np.float32, *model.keypoints)}


POSE = Pose()
