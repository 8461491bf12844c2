"""Boxes with masks: sums of prototypes, which the network gives besides its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dyno.worker.spec import ModelSpec, UserError
from dyno.worker.tasks.detect import Detect, joined, shown
from dyno.worker.tasks.postprocess import Detections, Place, encode
from dyno.worker.tasks.task import Shape

USUAL = 32  # prototypes, where a file doesn't say


class Segment(Detect):
    """Objects with boxes and masks."""

    name = "segment"
    needs = "masks"
    metrics = ("mAP", "mAP50", "box_mAP", "box_mAP50")
    coco = "segm"
    besides = " and prototypes"

    def extra(self, shapes: Sequence[Shape], keypoints: Sequence[int]) -> int:
        """One coefficient for each prototype."""
        if not self.fits(shapes):
            raise UserError(f"a network that segments gives predictions and prototypes; this one has {shown(shapes)}")
        return shapes[1][1] if isinstance(shapes[1][1], int) else USUAL

    def extra_shown(self, extra: int) -> str:
        return f" + {extra} mask coefficients"

    def fits(self, shapes: Sequence[Shape]) -> bool:
        return super().fits(shapes) and len(shapes) > 1 and len(shapes[1]) == 4

    def read(self, rest: np.ndarray, outputs: Sequence[np.ndarray], image: int, boxes: np.ndarray, place: Place,
             keypoints: tuple[int, ...]) -> dict[str, Any]:  # fmt: skip
        return {"masks": _masks(rest, np.asarray(outputs[1])[image].astype(np.float32), boxes, place)}

    def arrays(self, detections: Sequence[Detections], model: ModelSpec) -> dict[str, np.ndarray]:
        masks = [mask for detection in detections for mask in detection.masks or ()]
        lengths = np.array([len(mask) for mask in masks], np.int64)
        return {"mask_counts": joined(masks, np.uint32), "mask_lengths": lengths}


SEGMENT = Segment()


def _masks(coefficients: np.ndarray, prototypes: np.ndarray, boxes: np.ndarray, place: Place) -> list[np.ndarray]:
    """Masks at the image's size: sums of prototypes, interpolated bilinearly inside the box, set where above 0."""
    count, height, width = prototypes.shape
    coarse = (coefficients @ prototypes.reshape(count, -1)).reshape(-1, height, width)
    masks = []
    for logits, box in zip(coarse, boxes, strict=True):
        left, top, right, bottom = np.ceil(box).astype(int).tolist()
        low, high, weight = place.rows(top, bottom, height)
        rows = logits[low] + (logits[high] - logits[low]) * weight[:, None]
        low, high, weight = place.columns(left, right, width)
        fine = rows[:, low] + (rows[:, high] - rows[:, low]) * weight
        masks.append(encode(fine > 0, top, left, place.height, place.width))
    return masks
