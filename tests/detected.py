"""Ground truth of drawn objects and detections of them, as arrays of outputs.npz and as run folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.facts.job import Facts
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Plan, Trial, from_json, to_json

NAMES = ("circle", "square", "star")
SIZE = 100
SHA = "e" * 64
Truth = dict[str, Any]
Arrays = dict[str, np.ndarray]


def truth(images: int = 24, points: int = 4, seed: int = 0) -> Truth:
    """Return one to three objects per image: a box, its mask (an ellipse) and points on it."""
    rng = np.random.default_rng(seed)
    objects = []
    for image in range(images):
        for corner in rng.choice(4, size=int(rng.integers(1, 4)), replace=False).tolist():
            x, y = 5 + 50 * (corner % 2), 5 + 50 * (corner // 2)
            w, h = rng.integers(20, 40, 2).tolist()
            angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
            ellipse = np.stack([x + w / 2 * (1 + np.cos(angle)), y + h / 2 * (1 + np.sin(angle))], axis=1)
            places = ellipse[:: 24 // points][:points]
            objects.append({
                "id": len(objects), "image_id": image, "category_id": int(rng.integers(len(NAMES))),
                "bbox": [x, y, w, h], "area": w * h * np.pi / 4, "iscrowd": 0,
                "segmentation": [ellipse.reshape(-1).tolist()], "num_keypoints": points,
                "keypoints": np.c_[places, np.full(points, 2)].reshape(-1).tolist(),
            })  # fmt: skip
    return {
        "images": [{"id": i, "width": SIZE, "height": SIZE, "file_name": f"{i}.png"} for i in range(images)],
        "annotations": objects,
        "categories": [{"id": k, "name": name} for k, name in enumerate(NAMES)],
    }


def found(truth: Truth, *, shift: float = 0.0, missed: float = 0.0, seed: int = 0) -> Arrays:
    """Return detections of the objects, `shift` of a box's width to the right, with a share `missed`."""
    from pycocotools import mask

    rng = np.random.default_rng(seed)
    seen = [a for a in truth["annotations"] if rng.random() >= missed]
    boxes = np.array([a["bbox"] for a in seen], np.float64).reshape(-1, 4)
    move = shift * boxes[:, 2]
    corners = np.c_[boxes[:, 0] + move, boxes[:, 1], boxes[:, 0] + move + boxes[:, 2], boxes[:, 1] + boxes[:, 3]]
    counts = []
    for a, by in zip(seen, move.tolist(), strict=True):
        outline = np.add(np.reshape(a["segmentation"][0], (-1, 2)), [by, 0])
        whole = mask.decode(mask.merge(mask.frPyObjects([outline.reshape(-1).tolist()], SIZE, SIZE)))
        counts.append(run_lengths(whole))
    points = np.array([a["keypoints"] for a in seen], np.float32).reshape(len(seen), -1, 3)
    points[:, :, 0] += move[:, None]
    return {
        "sample": np.arange(len(truth["images"])),
        "detection_image": np.array([a["image_id"] for a in seen], np.int64),
        "detection_box": corners.astype(np.float32),
        "detection_score": rng.uniform(0.5, 1, len(seen)).astype(np.float32),
        "detection_class": np.array([a["category_id"] for a in seen], np.int32),
        "mask_counts": np.concatenate([np.empty(0, np.uint32), *counts]).astype(np.uint32),
        "mask_lengths": np.array([len(c) for c in counts], np.int64),
        "detection_keypoints": points,
    }


def run_lengths(mask: np.ndarray) -> np.ndarray:
    """Return COCO's uncompressed run lengths of a mask, column by column, zeros first."""
    ends = np.flatnonzero(np.diff(np.r_[0, mask.reshape(-1, order="F"), 2]))
    return np.diff(np.r_[0, ends]) if mask.any() else np.array([mask.size])


def write_run(folder: Path, task: str, ways: dict[str, Arrays], objects: Truth, size: int = 64) -> Path:
    """Write a run folder: one trial per backend name, one round with its detections. A second call adds a size."""
    for name, arrays in ways.items():
        model = ModelSpec("net", "ultralytics:net.yaml", classes=len(NAMES), task=task, keypoints=(4, 3))
        trial = Trial(
            model, name, "fp32", Dims(1, size, size), data=DataSpec("shapes", sha256=SHA), plan=Plan(rounds=1)
        )
        path = folder / "trials" / trial.id / "r0"
        path.mkdir(parents=True)
        write_json(path / "job.json", to_json(Job("run", trial.runtime, trial)))
        np.savez(path / "samples.npz", latency_model=np.full(10, 0.01), preprocess=np.full(3, 1e-3))
        np.savez(path / "outputs.npz", **arrays)  # type: ignore[arg-type]
        measured = (
            Measurement("latency", "s", "duration", None, "latency_model", "model", "host"),
            Measurement("preprocess", "s", "duration", None, "preprocess", "", "host"),
            Measurement("pipeline", "1/s", "rate", 123.0, clock="host"),
        )
        facts = {"weights_sha256": "a" * 64, "inputs_sha256": f"{size:064}", "data": {"photographs": "shapes"}}
        write_record(path, Record("ok", "done", trial=trial.id, measurements=measured, facts=from_json(Facts, facts)))
    (folder / "truth").mkdir(exist_ok=True)
    (folder / "truth" / f"{SHA[:12]}.json").write_text(json.dumps(objects))
    (folder / "study.toml").write_text('models = ["net"]\n')
    return folder
