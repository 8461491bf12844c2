"""Drawn shapes with known boxes, masks and keypoints, as images and as labels of either format, and random pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from dyno.worker.spec import DataSpec

SIZES = [(64, 96), (80, 60), (50, 50), (97, 61), (64, 96), (33, 120)]  # height, width
NAMES = ["disc", "triangle"]


def shape(number: int) -> tuple[int, tuple[float, float, float, float], list[float]]:
    """Return class, box (x, y, width, height) and outline of the shape in image `number`, in pixels."""
    height, width = SIZES[number % len(SIZES)]
    w, h = 0.4 * width, 0.5 * height
    x, y = 0.1 * width + number % 3, 0.2 * height
    if number % 2:
        return 1, (x, y, w, h), [x + w / 2, y, x + w, y + h, x, y + h]
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    ring = np.stack([x + w / 2 + w / 2 * np.cos(angles), y + h / 2 + h / 2 * np.sin(angles)], 1)
    return 0, (x, y, w, h), ring.ravel().tolist()


def draw(path: Path, number: int) -> None:
    """Draw image `number`: one shape on a background."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = SIZES[number % len(SIZES)]
    image = Image.new("RGB", (width, height), (40 + number, 90, 160))
    ImageDraw.Draw(image).polygon(shape(number)[2], fill=(220, 200, 40 + number))
    image.save(path, quality=95)


def shares(values: Any, number: int) -> list[float]:
    """Return pixels x, y, x, y… as shares of the image's width and height."""
    height, width = SIZES[number % len(SIZES)]
    return [v / (height if i % 2 else width) for i, v in enumerate(values)]


def line(number: int, kind: str) -> str:
    """Return YOLO's label of image `number`: box, polygon or pose."""
    label, (x, y, w, h), outline = shape(number)
    box = shares((x + w / 2, y + h / 2, w, h), number)
    points = [v for i in range(0, 6, 2) for v in (*shares(outline[i : i + 2], number), 2 if i else 0)]
    values = {"box": box, "polygon": shares(outline, number), "pose": [*box, *points]}[kind]
    return f"{label} " + " ".join(f"{v:.6f}" for v in values) + "\n"


def coco_file(count: int, keypoints: bool = False) -> dict[str, Any]:
    """Return COCO's tables of the first `count` images; category ids are neither dense nor in order."""
    images, annotations = [], []
    for number in range(count):
        height, width = SIZES[number % len(SIZES)]
        images.append({"id": 100 + number, "file_name": f"{number:03}.jpg", "height": height, "width": width})
        label, box, outline = shape(number)
        one = {"id": number, "image_id": 100 + number, "category_id": (7, 90)[label], "bbox": list(box), "iscrowd": 0}
        one |= {"segmentation": [outline], "area": 0.5 * box[2] * box[3]}
        if keypoints:
            one |= {"keypoints": [*outline[:2], 2, *outline[2:4], 1, 0, 0, 0], "num_keypoints": 2}
        annotations.append(one)
    points = {"keypoints": ["a", "b", "c"], "skeleton": []} if keypoints else {}
    categories = [{"id": 90, "name": "triangle", **points}, {"id": 7, "name": "disc", **points}]
    return {"images": images, "annotations": annotations, "categories": categories}


def truth(data: DataSpec) -> dict[str, Any]:
    """Return COCO's ground truth of a decoded data set."""
    found: dict[str, Any] = json.loads(Path(data.folder, "truth.json").read_text())
    return found


def photographs(
    folder: Path, *classes: str, count: int = 3, height: int = 20, width: int = 30, block: int = 1, suffix: str = ".png"
) -> Path:
    """Write random pictures, in squares of `block` pixels, into a folder per class, or `folder` without classes."""
    rng = np.random.default_rng(0)
    for name in classes or ("",):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.kron(rng.integers(0, 256, (height // block, width // block, 3)), np.ones((block, block, 1)))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}{suffix}")
    return folder
