"""What kind of data lies at a path: class folders, COCO's format, YOLO's format, or images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dyno.datasets.photos import images
from dyno.worker.spec import UserError

Kind = Literal["classes", "coco", "yolo", "images"]


def kind(path: Path) -> Kind:
    """`classes`, `coco`, `yolo`, or `images` without labels; raises `UserError` when formats are mixed or none fits."""
    path = Path(path)
    if path.is_file():
        if path.suffix in (".json", ".yaml", ".yml"):
            return "coco" if path.suffix == ".json" else "yolo"
        raise UserError(f"{path} is not a folder, nor a COCO file (.json) or a YOLO file (.yaml)")
    if not path.is_dir():
        raise UserError(f"no data folder {path}")
    try:
        coco, yolo = any((path / "annotations").glob("*.json")), _yolo(path)
        folders = [inner.name for inner in path.iterdir() if inner.is_dir() and not inner.name.startswith(".")]
    except PermissionError as e:
        raise UserError(f"{e.filename} can't be listed: permission denied") from e
    if coco and yolo:
        raise UserError(
            f"{path} holds COCO annotations and YOLO labels; give the .json or .yaml file of the one to use"
        )
    if coco or yolo:
        return "coco" if coco else "yolo"
    if not folders and images(path):
        return "images"
    return "classes"


def _yolo(path: Path) -> bool:
    """Whether there is a data.yaml, or label files where YOLO looks for them."""
    if any(path.glob("data.y*ml")):
        return True
    beside = [path / "labels", *(path / split / "labels" for split in ("val", "valid", "test", "train"))]
    found = (next(labels.rglob("*.txt"), None) for labels in beside if (labels.parent / "images").is_dir())
    return any(file is not None for file in found)
