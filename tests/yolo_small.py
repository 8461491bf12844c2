"""Drawn shapes with known boxes, outlines and keypoints, and a YOLO trained on them for less than a minute.

`shapes(folder, task)` draws a data set in YOLO's format; `trained(task, folder)` returns a network's weights,
ultralytics' own metrics and the data set. Training runs in a separate process, as the library writes its settings and
logs into the folder. `decoded` is the data set as in Dyno's cache, `coco_map` a mean average precision by pycocotools.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import DataSpec
from dyno.worker.tasks.postprocess import Detections

NAMES = ("circle", "square", "triangle")
KEYPOINTS = (4, 3)  # top, right, bottom and left corner of each shape, all visible
IMAGE_SIZES = ((96, 128), (128, 96), (112, 112), (80, 128))  # height and width
SIZE = 64
YAMLS = {
    "detect": "yolov8n.yaml",
    "segment": "yolov8n-seg.yaml",
    "pose": "yolov8n-pose.yaml",
    "classify": "yolov8n-cls.yaml",
}
COUNTS = {"train": 192, "val": 48}
EPOCHS = {"classify": 4, "detect": 10, "segment": 10, "pose": 14}


@dataclass(frozen=True)
class TrainedModel:
    """A trained network: its source and weights, its data (data.yaml or class folders), ultralytics' own metrics."""

    task: str
    source: str
    weights: Path
    checkpoint: Path
    data: Path
    metrics: dict[str, float]


def outline(kind: int, x: float, y: float, radius: float, turn: float) -> np.ndarray:
    """Return a shape's corners around (x, y): float n x 2."""
    corners = (24, 4, 3)[kind]
    angles = turn + 2 * math.pi * np.arange(corners) / corners
    return np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], 1)


def ends(points: np.ndarray) -> np.ndarray:
    """Return an outline's top, right, bottom and left corner: 4 x 2."""
    x, y = points.T
    return points[[y.argmin(), x.argmax(), y.argmax(), x.argmin()]]


def picture(rng: np.random.Generator, height: int, width: int) -> tuple[Any, list[tuple[int, np.ndarray]]]:
    """Draw an image with one to three shapes that don't overlap; return it with their kinds and outlines in pixels."""
    from PIL import Image, ImageDraw

    noise = rng.normal(rng.uniform(60, 120), 12, (height, width, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(noise)
    draw, placed, found = ImageDraw.Draw(image), [], []
    for _ in range(int(rng.integers(1, 4))):
        radius = rng.uniform(16, 28)
        x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        if any(math.hypot(x - a, y - b) < radius + c for a, b, c in placed):
            continue
        placed.append((x, y, radius))
        kind = int(rng.integers(3))
        points = outline(kind, x, y, radius, rng.uniform(-0.3, 0.3))
        colour = [int(rng.integers(0, 60)) for _ in range(3)]
        colour[kind] = int(rng.integers(180, 256))
        draw.polygon([tuple(p) for p in points.tolist()], fill=tuple(colour))
        found.append((kind, points))
    return image, found


def label(task: str, kind: int, points: np.ndarray, height: int, width: int) -> str:
    """Return a line of YOLO's label file."""
    unit = np.array([width, height])
    low, high = points.min(0) / unit, points.max(0) / unit
    box = [*((low + high) / 2), *(high - low)]
    if task == "segment":
        values = (points / unit).reshape(-1).tolist()
    elif task == "pose":
        values = [*box, *(v for x, y in (ends(points) / unit).tolist() for v in (x, y, 2))]
    else:
        values = box
    return " ".join([str(kind), *(f"{value:.6f}" for value in values)])


def shapes(folder: Path, task: str, seed: int = 0) -> Path:
    """Draw a data set; return its data.yaml, or for `classify` its folder of class folders."""
    rng = np.random.default_rng(seed)
    for split, count in COUNTS.items():
        for number in range(count):
            height, width = IMAGE_SIZES[number % len(IMAGE_SIZES)]
            image, found = picture(rng, height, width)
            name = f"{number:04}"
            if task == "classify":
                place = folder / split / NAMES[found[0][0]]
                place.mkdir(parents=True, exist_ok=True)
                x, y = found[0][1].mean(0)
                image.crop((int(x) - 28, int(y) - 28, int(x) + 28, int(y) + 28)).save(place / f"{name}.png")
                continue
            for kind in ("images", "labels"):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
            image.save(folder / "images" / split / f"{name}.png")
            lines = [label(task, kind, points, height, width) for kind, points in found]
            (folder / "labels" / split / f"{name}.txt").write_text("\n".join(lines) + "\n")
    if task == "classify":
        return folder
    more = f"kpt_shape: {list(KEYPOINTS)}\nflip_idx: [0, 3, 2, 1]\n" if task == "pose" else ""
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(NAMES))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\n{more}names:\n{names}")
    return folder / "data.yaml"


def trained(task: str, folder: Path) -> TrainedModel:
    """Draw, train and evaluate in that folder, or reuse its stored results."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "metrics.json"
    if not done.is_file():
        quiet = {"YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "False", "YOLO_CONFIG_DIR": str(folder)}
        words = [sys.executable, str(Path(__file__).resolve()), task, str(folder)]
        made = subprocess.run(words, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=1200)
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    data = folder / "data" if task == "classify" else folder / "data/data.yaml"
    metrics = json.loads(done.read_text())
    weights, checkpoint = folder / "weights.safetensors", folder / "run/weights/last.pt"
    return TrainedModel(task, f"ultralytics:{YAMLS[task]}", weights, checkpoint, data, metrics)


def decoded(folder: Path, task: str, size: int = SIZE) -> DataSpec:
    """Return the data set of `shapes`, letterboxed as by ultralytics: validation to test, training to calibrate."""
    import cv2
    from ultralytics.data.augment import LetterBox

    place, box = folder / "decoded", LetterBox((size, size), auto=False, scaleup=True)
    place.mkdir(exist_ok=True)
    files = [*sorted((folder / "images/val").glob("*.png")), *sorted((folder / "images/train").glob("*.png"))[:32]]
    images = [cv2.imread(str(file))[..., ::-1] for file in files]
    np.save(place / "images.npy", np.stack([box(image=image).transpose(2, 0, 1) for image in images]))
    np.save(place / "sizes.npy", np.array([image.shape[:2] for image in images], np.int32))
    np.save(place / "labels.npy", np.full(len(files), -1))
    np.save(place / "test.npy", np.arange(COUNTS["val"]))
    np.save(place / "calibration.npy", np.arange(COUNTS["val"], len(files)))
    (place / "truth.json").write_text(json.dumps(_truth(files[: COUNTS["val"]], images, task)))
    digest = hashlib.sha256((place / "images.npy").read_bytes()).hexdigest()
    return DataSpec("shapes", str(place), digest, count=COUNTS["val"])


def _truth(files: list[Path], images: list[np.ndarray], task: str) -> dict[str, Any]:
    """Return COCO's ground truth of the label files, in pixels."""
    found: list[dict[str, Any]] = []
    for number, file in enumerate(files):
        height, width = images[number].shape[:2]
        for line in (file.parents[2] / "labels" / file.parent.name / f"{file.stem}.txt").read_text().splitlines():
            kind, *values = map(float, line.split())
            entry: dict[str, Any] = {"id": len(found) + 1, "image_id": number, "category_id": int(kind), "iscrowd": 0}
            if task == "segment":
                points = np.array(values).reshape(-1, 2) * (width, height)
                (x, y), (w, h) = points.min(0), np.ptp(points, axis=0)
                entry["segmentation"] = [points.reshape(-1).tolist()]
            else:
                (x, y), (w, h) = np.array(values[:2]) * (width, height), np.array(values[2:4]) * (width, height)
                x, y = x - w / 2, y - h / 2
            if task == "pose":
                points = np.array(values[4:]).reshape(KEYPOINTS) * (width, height, 1)
                entry |= {"keypoints": points.reshape(-1).tolist(), "num_keypoints": len(points)}
            found.append({**entry, "bbox": [x, y, w, h], "area": w * h})
    sizes = [image.shape[:2] for image in images[: len(files)]]
    return {
        "images": [{"id": k, "height": h, "width": w, "file_name": files[k].name} for k, (h, w) in enumerate(sizes)],
        "annotations": found,
        "categories": [{"id": k, "name": name} for k, name in enumerate(NAMES)],
    }


def coco_map(data: DataSpec, found: list[Detections], kind: str = "bbox") -> tuple[float, float]:
    """Return mAP50 and mAP50-95 by pycocotools; `kind` is bbox, segm or keypoints. `found` has one item per image."""
    from pycocotools import mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(Path(data.folder) / "truth.json"))
        rows = []
        for number, one in enumerate(found):
            height, width = (truth.imgs[number][key] for key in ("height", "width"))
            for k, (left, top, right, bottom) in enumerate(one.boxes.tolist()):
                row = {"image_id": number, "category_id": int(one.classes[k]), "score": float(one.scores[k])}
                row["bbox"] = [left, top, right - left, bottom - top]
                if kind == "segm" and one.masks is not None:
                    counts = {"size": [height, width], "counts": one.masks[k].tolist()}
                    row["segmentation"] = mask.frPyObjects(counts, height, width)
                if kind == "keypoints" and one.keypoints is not None:
                    row["keypoints"] = one.keypoints[k].reshape(-1).tolist()
                rows.append(row)
        judge = COCOeval(truth, truth.loadRes(rows), kind)
        if kind == "keypoints":
            judge.params.kpt_oks_sigmas = np.full(KEYPOINTS[0], 1 / KEYPOINTS[0])
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return float(judge.stats[1]), float(judge.stats[0])


def main(task: str, folder: Path) -> None:
    """Train with ultralytics' public interface; write weights.safetensors and metrics.json."""
    import torch
    from safetensors.torch import save_file
    from ultralytics import YOLO

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    data = shapes(folder / "data", task)
    network = YOLO(YAMLS[task])
    same = {
        "imgsz": SIZE,
        "batch": 16,
        "nbs": 16,
        "workers": 0,
        "device": "cpu",
        "plots": False,
        "project": str(folder),
    }
    still = {"mosaic": 0, "hsv_h": 0, "hsv_s": 0, "hsv_v": 0, "scale": 0.2, "translate": 0.1, "erasing": 0}
    network.train(
        data=str(data), epochs=EPOCHS[task], name="run", val=False, amp=False, seed=0,
        optimizer="AdamW", lr0=0.003, lrf=0.05, warmup_epochs=0.5, exist_ok=True, auto_augment=None, **same, **still,
    )  # fmt: skip
    network = YOLO(str(folder / "run/weights/last.pt"))
    state = {key: value.float().contiguous() for key, value in network.model.state_dict().items()}
    save_file(state, folder / "weights.safetensors")
    found = network.val(data=str(data), name="val", exist_ok=True, rect=False, **same)
    (folder / "metrics.json").write_text(json.dumps({k: float(v) for k, v in found.results_dict.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
