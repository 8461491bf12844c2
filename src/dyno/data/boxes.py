"""Boxes, masks and keypoints in original pixels, checked one by one: shared by COCO's and YOLO's formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyno.data.photos import Annotations, Photo, Sizes
from dyno.worker.spec import UserError

MAX_OVERHANG_PX = 1.0  # tolerance for boxes, masks and keypoints outside the image: labels are rounded
Annotation = dict[str, Any]


@dataclass
class Labels:
    """Annotations of a data set in COCO's form, by row; `keypoints`: their number and the number of values of each."""

    photos: list[Photo]
    sizes: Sizes
    classes: list[str]
    keypoints: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)  # names of the keypoints
    by_row: dict[int, list[Annotation]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, row: int, annotation: Annotation) -> None:
        """Add an annotation: category_id, bbox, area, iscrowd, and segmentation or keypoints if it has any."""
        self.by_row.setdefault(row, []).append(annotation)

    def decide_kinds(self) -> Annotations:
        """Return the annotations with their kinds: boxes, masks if every object has one, keypoints if declared."""
        annotations = [annotation for row_annotations in self.by_row.values() for annotation in row_annotations]
        if all(annotation.get("iscrowd") for annotation in annotations):  # mAP ignores crowds
            raise UserError(
                "no test image has an annotated object; give other images, or omit --data to measure speed alone"
            )
        kinds = ["boxes"]
        masked = [annotation for annotation in annotations if annotation.get("segmentation")]
        if len(masked) == len(annotations):
            kinds.append("masks")
        elif masked:
            line = f"{len(annotations) - len(masked)} of {len(annotations)} objects have no mask"
            self.warnings.append(f"{line}, so the masks of the others are not used")
            for annotation in annotations:
                annotation.pop("segmentation", None)
        if self.keypoints:
            kinds.append("keypoints")
        used_ids = {annotation["category_id"] for annotation in annotations}
        unused = [name for i, name in enumerate(self.classes) if i not in used_ids]
        if unused:
            more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
            self.warnings.append(f"class {unused[0]!r}{more} is in no image")
        meta: dict[str, Any] = {"has": kinds, "warnings": self.warnings, **({"unused": unused} if unused else {})}
        if self.keypoints:
            meta["keypoints"] = list(self.keypoints)
        return Annotations(meta, self._build_truth)

    def _build_truth(self, kept_rows: np.ndarray) -> dict[str, Any]:
        """Return COCO's ground truth of the test images; ids are rows of images and indices of classes."""
        images: list[Annotation] = []
        annotations: list[Annotation] = []
        for image_id, row in enumerate(kept_rows.tolist()):
            photo, size = self.photos[row], self.sizes[row]
            if photo.split != "test" or size is None:
                continue
            images.append({"id": image_id, "height": size[0], "width": size[1], "file_name": photo.name})
            for annotation in self.by_row.get(row, []):
                annotations.append({"id": len(annotations) + 1, "image_id": image_id, **annotation})
        points = {"keypoints": self.names, "skeleton": []} if self.keypoints else {}
        categories = [{"id": i, "name": name, **points} for i, name in enumerate(self.classes)]
        return {"images": images, "annotations": annotations, "categories": categories}


def check_box(box: Sequence[float], size: tuple[int, int], origin: str) -> list[float]:
    """Return the box (x, y, width, height in pixels); raise `UserError` if it has no area or leaves the image."""
    x, y, width, height = box
    text = ", ".join(f"{value:g}" for value in box)
    if not all(map(math.isfinite, box)) or width <= 0 or height <= 0:
        raise UserError(f"{origin}: the box [{text}] has no area (x, y, width, height in pixels); remove it")
    if (
        x < -MAX_OVERHANG_PX
        or y < -MAX_OVERHANG_PX
        or x + width > size[1] + MAX_OVERHANG_PX
        or y + height > size[0] + MAX_OVERHANG_PX
    ):
        raise UserError(
            f"{origin}: the box [{text}] lies outside its image of {size[1]} x {size[0]} pixels (x, y, width, height)"
        )
    return [float(value) for value in box]


def check_polygon(points: Sequence[float], size: tuple[int, int], origin: str) -> list[float]:
    """Return the polygon (x1, y1, x2, y2, … in pixels); raise `UserError` for too few points or points outside."""
    if len(points) < 6 or len(points) % 2:
        raise UserError(f"{origin}: a polygon has {len(points) / 2:g} points; it needs three or more, x and y of each")
    pairs = np.asarray(points, float).reshape(-1, 2)
    is_outside = (
        ~np.isfinite(pairs) | (pairs < -MAX_OVERHANG_PX) | (pairs > np.array([size[1], size[0]]) + MAX_OVERHANG_PX)
    )
    if is_outside.any():
        x, y = pairs[is_outside.any(axis=1)][0]
        raise UserError(f"{origin}: the polygon's point ({x:g}, {y:g}) lies outside its image of {size[1]} x {size[0]}")
    return [float(value) for value in points]


def check_keypoints(points: Sequence[float], size: tuple[int, int], origin: str) -> list[float]:
    """Return the keypoints (x, y, visibility 0 to 2 of each); raise `UserError` for a marked one outside the image."""
    for index, (x, y, visibility) in enumerate(zip(points[::3], points[1::3], points[2::3], strict=True)):
        if visibility not in (0, 1, 2):
            raise UserError(f"{origin}: keypoint {index} has visibility {visibility:g}; it is 0, 1 or 2")
        is_inside = (
            -MAX_OVERHANG_PX <= x <= size[1] + MAX_OVERHANG_PX and -MAX_OVERHANG_PX <= y <= size[0] + MAX_OVERHANG_PX
        )
        if visibility and not is_inside:
            raise UserError(
                f"{origin}: keypoint {index} at ({x:g}, {y:g}) lies outside its image of {size[1]} x {size[0]}"
            )
    return list(points)


def compute_polygon_area(points: Sequence[float]) -> float:
    """Return the area of a polygon in square pixels (the shoelace formula)."""
    x, y = np.asarray(points, float).reshape(-1, 2).T
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)
