"""Which images a folder of class folders holds, their labels, and which of them are for calibration."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dyno.worker.spec import UserError

EXTENSIONS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm"}
CALIBRATION_SHARE = 5  # at most one image in five is taken from the test images


@dataclass(frozen=True)
class Photo:
    """One image file: `name` is its printable path below the data folder, `label` its class's index or -1."""

    path: Path
    name: str
    label: int
    split: str


@dataclass(frozen=True)
class Listing:
    """Test images in class order, then calibration images; `own_calibration`: those came from a folder of their own."""

    classes: list[str]
    photos: list[Photo]
    own_calibration: bool = False


def scan(folder: Path, calibration: int | Path, seed: int, train: bool = False) -> Listing:
    """List the folder's images; raises `UserError` when it is missing, or has no class folders or an empty one."""
    if not folder.is_dir():
        raise UserError(f"no data folder {folder}" if not folder.exists() else f"{folder} is not a folder")
    if isinstance(calibration, int) and calibration < 0:
        raise UserError(f"the number of calibration images can't be {calibration}")
    try:
        test_root, train_root = _roots(folder)
        classes = _folders(train_root or test_root)
        test = _photos(folder, test_root, classes, "test")
        if train and train_root is None:
            raise UserError(f"{folder} has no train/; put the images to learn from there and the others into test/")
        if isinstance(calibration, Path):
            return Listing(classes, test + _loose(calibration), own_calibration=True)
        if train_root is None:
            return Listing(classes, _carve(test, calibration, seed))
        learnt = _photos(folder, train_root, classes, "calibration")
    except PermissionError as e:
        raise UserError(f"{e.filename} can't be listed: permission denied") from e
    order = spread(np.array([photo.label for photo in learnt]), seed)
    tuned = set(order[:calibration].tolist())
    others = [replace(photo, split="train") for i, photo in enumerate(learnt) if train and i not in tuned]
    return Listing(classes, test + [learnt[i] for i in sorted(tuned)] + others)


def spread(labels: np.ndarray, seed: int) -> np.ndarray:
    """A seeded order in which any beginning holds the classes in their proportions (systematic sampling by class)."""
    rng = np.random.default_rng(seed)
    values, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(inverse[shuffled], kind="stable")]
    firsts = np.cumsum(counts) - counts
    place = np.empty(len(labels))
    place[by_class] = np.arange(len(labels)) - np.repeat(firsts, counts)
    quota: np.ndarray = (place + rng.random(len(values))[inverse]) / counts[inverse]
    return np.argsort(quota, kind="stable")


def printable(name: str) -> str:
    """The name on one line of valid Unicode: file names may hold line breaks and bytes of no encoding."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _name(path: Path, folder: Path) -> str:
    return printable(path.relative_to(folder).as_posix())


def _roots(folder: Path) -> tuple[Path, Path | None]:
    """The folders that hold the class folders of the test and of the training images."""
    train = folder / "train"
    for name in ("test", "val"):
        if _folders(folder / name):
            return folder / name, train if _folders(train) else None
    if _folders(train):
        raise UserError(f"{folder} has train/ but neither test/ nor val/ with class folders; add one, or give {train}")
    return folder, None


def _folders(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _photos(folder: Path, root: Path, classes: list[str], split: str) -> list[Photo]:
    present = _folders(root)
    if not present:
        raise UserError(f"no class folders in {root}; put the images of each class into a folder named after it")
    if strange := sorted(set(present) - set(classes)):
        raise UserError(f"class {strange[0]!r} is in {root} but not in {root.parent / 'train'}")
    label = {name: i for i, name in enumerate(classes)}
    found = {name: _images(root / name) for name in present}
    if not any(found.values()):
        raise UserError(f"no images in {root}; known formats: {', '.join(sorted(EXTENSIONS))}")
    if empty := [name for name in present if not found[name]]:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise UserError(f"class {empty[0]!r} has no images in {root}{more}; add some or remove the folder")
    return [Photo(path, _name(path, folder), label[name], split) for name in present for path in found[name]]


def _images(root: Path) -> list[Path]:
    """Image files below the folder at any depth, in order; hidden files and folders are left out."""
    found = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".") and _is_image(name)]
    return sorted(found)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in EXTENSIONS


def _carve(test: list[Photo], wanted: int, seed: int) -> list[Photo]:
    """Take some of the test images for calibration, no class's only image among them; test images come first."""
    labels = np.array([photo.label for photo in test])
    only = np.bincount(labels)[labels] == 1
    order = [i for i in spread(labels, seed) if not only[i]]
    taken = sorted(order[: min(wanted, len(test) // CALIBRATION_SHARE)])
    moved = [Photo(test[i].path, test[i].name, test[i].label, "calibration") for i in taken]
    gone = set(taken)
    return [photo for i, photo in enumerate(test) if i not in gone] + moved


def _loose(folder: Path) -> list[Photo]:
    """All images of a calibration folder, in class folders or not; their labels don't matter."""
    if not folder.is_dir():
        raise UserError(f"no calibration folder {folder}")
    paths = _images(folder.resolve())
    if not paths:
        raise UserError(f"no images in the calibration folder {folder}; known formats: {', '.join(sorted(EXTENSIONS))}")
    base = folder.resolve().parent
    return [Photo(path, _name(path, base), -1, "calibration") for path in paths]
