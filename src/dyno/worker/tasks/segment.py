"""Boxes with masks: sums of prototypes, a further output of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.spec import ModelSpec
from dyno.worker.tasks import Shape
from dyno.worker.tasks.detect import Detect, join_arrays
from dyno.worker.tasks.postprocess import Detections, ImagePlacement, KeptRows, encode_mask

DEFAULT_PROTOTYPES = 32  # number of prototypes if unknown


class Segment(Detect):
    """Objects with boxes and masks."""

    name = "segment"
    needs = "masks"
    metrics = ("mAP", "mAP50", "box_mAP", "box_mAP50")
    coco = "segm"
    refers_to = "prototypes of masks"

    def extra(self, shapes: Mapping[str, Shape], keypoints: Sequence[int]) -> int | None:
        """Return one coefficient per prototype."""
        count = shapes[name][1] if (name := self.find_referred(shapes)) else DEFAULT_PROTOTYPES
        return count if isinstance(count, int) else DEFAULT_PROTOTYPES

    def find_referred(self, shapes: Mapping[str, Shape]) -> str:
        """Return the name of the prototypes' output."""
        return next((name for name, shape in shapes.items() if len(shape) == 4), "")

    def read(self, rows: KeptRows) -> dict[str, Any]:
        return {"masks": _build_masks(rows.extra_values, rows.referred, rows.boxes, rows.placement)}

    def arrays(self, detections: Sequence[Detections], model: ModelSpec) -> dict[str, np.ndarray]:
        masks = [mask for detection in detections for mask in detection.masks or ()]
        lengths = np.array([len(mask) for mask in masks], np.int64)
        return {"mask_counts": join_arrays(masks, np.uint32), "mask_lengths": lengths}


SEGMENT = Segment()


def _build_masks(
    coefficients: np.ndarray, prototypes: np.ndarray, boxes: np.ndarray, placement: ImagePlacement
) -> list[np.ndarray]:
    """Return masks at the image's size: sums of prototypes, bilinearly interpolated inside the box, set above 0."""
    count, height, width = prototypes.shape
    coarse_masks = (coefficients @ prototypes.reshape(count, -1)).reshape(-1, height, width)
    masks = []
    for logits, box in zip(coarse_masks, boxes, strict=True):
        left, top, right, bottom = np.ceil(box).astype(int).tolist()
        low, high, weight = placement.rows(top, bottom, height)
        rows = logits[low] + (logits[high] - logits[low]) * weight[:, None]
        low, high, weight = placement.find_columns(left, right, width)
        fine_mask = rows[:, low] + (rows[:, high] - rows[:, low]) * weight
        masks.append(encode_mask(fine_mask > 0, top, left, placement.height, placement.width))
    return masks
