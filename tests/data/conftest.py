"""Small data sets of drawn shapes with known boxes, masks and keypoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawn import coco_file, draw, line
from dyno import data
from dyno.worker.spec import DataSpec, Preprocess


@pytest.fixture
def yolo(tmp_path: Path) -> Callable[..., Path]:
    """Factory of data sets in YOLO's format; arguments: kind of label, with or without data.yaml, images per split."""

    def made(kind: str = "box", yaml: bool = True, **splits: int) -> Path:
        folder, number = tmp_path / "shapes", 0
        for split, count in (splits or {"val": 6, "train": 8}).items():
            for _ in range(count):
                draw(folder / "images" / split / f"{number:03}.jpg", number)
                label = folder / "labels" / split / f"{number:03}.txt"
                label.parent.mkdir(parents=True, exist_ok=True)
                label.write_text(line(number, kind))
                number += 1
        text = f"path: {folder}\nval: images/val\ntrain: images/train\nnames: {{0: disc, 1: triangle}}\n"
        if yaml:
            (folder / "data.yaml").write_text(text + ("kpt_shape: [3, 3]\n" if kind == "pose" else ""))
        return folder

    return made


@pytest.fixture
def coco(tmp_path: Path) -> Callable[..., Path]:
    """Factory of data sets in COCO's format; `changes` replace tables of the file, `train` is a number of images."""

    def made(
        count: int = 6, keypoints: bool = False, train: int = 8, name: str = "instances_val2017", **changes
    ) -> Path:
        folder = tmp_path / "coco"
        for number in range(count):
            draw(folder / "val2017" / f"{number:03}.jpg", number)
        for number in range(count, count + train):
            draw(folder / "train2017" / f"{number:03}.jpg", number)
        (folder / "annotations").mkdir(exist_ok=True)
        tables = {**coco_file(count, keypoints), **changes}
        (folder / "annotations" / f"{name}.json").write_text(json.dumps(tables))
        return folder

    return made


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Load annotated images as a data set."""

    def made(folder: Path, size: tuple[int, int] = (64, 64), **more: Any) -> DataSpec:
        return data.load(folder, tmp_path / "cache", size, Preprocess(letterbox=True), objects=True, **more)

    return made
