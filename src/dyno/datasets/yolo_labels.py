"""A line of a YOLO label file: a class and a box, a polygon, or a box and keypoints, as shares of the image's sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dyno.datasets.boxes import TOLERANCE, Annotation, Labels, checked_box, checked_polygon, polygon_area
from dyno.datasets.photos import Annotations, Photo, Sizes, name_below
from dyno.worker.spec import UserError

MOST_CLASSES = 9_999  # in label files without a list of names
BODY = 0.53  # of a person's box is body: the mean in COCO, by which keypoints are judged where there are no masks


def label_file(image: Path) -> Path:
    """Return the path of an image's label file: labels/ instead of the last images/ above it, else beside it.

    For a link, the label file of its target is tried too.
    """
    label = _label_place(image)
    if not label.is_file() and (real := _label_place(image.resolve())).is_file():
        return real
    return label


def _label_place(image: Path) -> Path:
    parts = list(image.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "images":
            parts[i] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def read_labels(
    photos: list[Photo],
    sizes: Sizes,
    classes: list[str],
    keypoints: tuple[int, ...],
    folder: Path,
    warnings: Sequence[str],
) -> Annotations:
    """Read the label files of the test images; an image without one is background. `warnings` come before its own."""
    names = [f"point {i}" for i in range(keypoints[0])] if keypoints else []
    labels = Labels(photos, sizes, classes, keypoints, names, warnings=list(warnings))
    kinds: dict[str, str] = {}
    without, twice = 0, 0
    for row, photo in enumerate(photos):
        size, file = sizes[row], label_file(photo.path)
        if photo.split != "test" or size is None:
            continue
        if not file.is_file():
            without += 1
            continue
        lines = _read_lines(file)
        once = {line: number for number, line in reversed(lines)}
        twice += len(lines) - len(once)
        for line, number in sorted(once.items(), key=lambda item: item[1]):
            where = f"{name_below(file, folder)}, line {number}"
            kind, annotation = _parse_object(line, labels, size, where)
            labels.add(row, annotation)
            if kinds.setdefault(kind, where) and len(kinds) > 1:
                raise UserError(f"boxes and polygons are mixed: {kinds['box']} is a box, {kinds['polygon']} a polygon")
    if without:
        labels.warnings.append(f"{without} images have no label file and count as background")
    if twice:
        labels.warnings.append(f"{twice} lines are duplicates within their file and count once")
    return labels.done()


def classes_used(files: list[Path]) -> int:
    """Return one more than the highest class in the files; errors in them are reported when they are read."""
    firsts = ((file, line.split()[0]) for file in files for _, line in _read_lines(file))
    highest, file = max(((int(first), file) for file, first in firsts if first.isdecimal()), default=(0, Path()))
    if highest > MOST_CLASSES:
        raise UserError(f"{file} has an object of class {highest}; where there are so many, a data.yaml must name them")
    return highest + 1


def _read_lines(file: Path) -> list[tuple[int, str]]:
    lines = file.read_text("utf-8-sig", "replace").splitlines()
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_object(line: str, labels: Labels, size: tuple[int, int], where: str) -> tuple[str, Annotation]:
    try:
        first, *rest = (float(number) for number in line.split())
    except ValueError:
        raise UserError(f"{where}: {line[:60]!r} is not a row of numbers") from None
    if not first.is_integer() or not 0 <= first < len(labels.classes):
        raise UserError(f"{where}: there is no class {first:g}; the {len(labels.classes)} classes are numbered from 0")
    annotation: Annotation = {"category_id": int(first), "iscrowd": 0}
    height, width = size
    if labels.keypoints:
        return "box", annotation | _parse_pose(rest, labels.keypoints, size, where)
    if len(rest) == 4:
        box = _parse_box(rest, size, where)
        return "box", annotation | {"bbox": box, "area": box[2] * box[3]}
    polygon = checked_polygon([v * (height if i % 2 else width) for i, v in enumerate(rest)], size, where)
    xs, ys = polygon[::2], polygon[1::2]
    box = checked_box((min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)), size, where)
    return "polygon", annotation | {"bbox": box, "area": polygon_area(polygon), "segmentation": [polygon]}


def _parse_box(shares: list[float], size: tuple[int, int], where: str) -> list[float]:
    x, y, w, h = shares
    height, width = size
    return checked_box(((x - w / 2) * width, (y - h / 2) * height, w * width, h * height), size, where)


def _parse_pose(rest: list[float], shape: tuple[int, ...], size: tuple[int, int], where: str) -> Annotation:
    """Parse box and keypoints; a point with two values is visible unless it lies left of or above the image."""
    points, values = shape
    if len(rest) != 4 + points * values:
        raise UserError(
            f"{where}: {len(rest) - 4} values after the box; {points} keypoints of {values} are needed; "
            "correct the line, or kpt_shape in data.yaml"
        )
    height, width = size
    box, placed = _parse_box(rest[:4], size, where), []
    for start in range(4, len(rest), values):
        x, y = rest[start], rest[start + 1]
        visible = rest[start + 2] if values == 3 else 2.0 * (x >= 0 and y >= 0)
        outside = not all(map(math.isfinite, (x, y, visible)))
        outside = outside or x * width > width + TOLERANCE or y * height > height + TOLERANCE
        if outside or (visible and (x * width < -TOLERANCE or y * height < -TOLERANCE)):
            raise UserError(f"{where}: keypoint {(start - 4) // values} at ({x:g}, {y:g}) lies outside the image")
        placed += [x * width, y * height, int(visible)] if visible else [0.0, 0.0, 0]
    visible_points = sum(1 for visible in placed[2::3] if visible > 0)
    area = box[2] * box[3] * BODY
    return {"bbox": box, "area": area, "keypoints": placed, "num_keypoints": visible_points}
