"""Boxes with keypoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.spec import ModelSpec
from dyno.worker.tasks import Shape
from dyno.worker.tasks.detect import Detect, join_arrays
from dyno.worker.tasks.postprocess import Detections, KeptRows


class Pose(Detect):
    """Objects with boxes and keypoints."""

    name = "pose"
    needs = "keypoints"
    metrics = ("mAP", "mAP50", "box_mAP", "box_mAP50")
    coco = "keypoints"

    def extra(self, shapes: Mapping[str, Shape], keypoints: Sequence[int]) -> int | None:
        """Return two or three values per keypoint; None if their number is unknown."""
        return math.prod(keypoints) if keypoints else None

    def read(self, rows: KeptRows) -> dict[str, Any]:
        points = rows.extra_values.reshape(len(rows.extra_values), *rows.keypoints)
        return {"keypoints": rows.placement.points(rows.form.convert_points(points, rows.placement.input))}

    def arrays(self, detections: Sequence[Detections], model: ModelSpec) -> dict[str, np.ndarray]:
        points = [d.keypoints for d in detections if d.keypoints is not None]
        shape = next((array.shape[1:] for array in points if len(array)), model.keypoints or (0, 3))
        return {"detection_keypoints": join_arrays([array for array in points if len(array)], np.float32, *shape)}


POSE = Pose()
