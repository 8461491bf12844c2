"""The images of a training: their layout, which are held out for testing, decoded with room to crop."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from dyno import datasets
from dyno.datasets.folders import Photo, scan
from dyno.planning.images import decoding, prepared, warn_unreadable
from dyno.store import cache_dir
from dyno.study import Study
from dyno.worker.spec import DataSpec, ModelSpec, UserError
from dyno.worker.training.options import TrainOptions

HOLDOUT = 0.2
ROOM = 8 / 7  # 256 pixels for a crop of 224, as is usual; a model that resizes further has that much
CROPPING = ("light", "standard")


def source(data: str, holdout: float | None, out: Path, seed: int) -> str:
    """Return a folder with train/ and test/ (or val/): the given one, or one of links to its images below `out`.

    A folder of classes alone is split class by class, `holdout` of each for testing; the same images and seed give the
    same split. `digits` stays as it is. Raises `UserError`.
    """
    folder = Path(data)
    if data == "digits":
        if holdout is not None:
            raise UserError("the digits already have test images; omit --holdout")
        return data
    if not folder.is_dir():
        raise UserError(f"no data folder {folder}" if not folder.exists() else f"{folder} is not a folder")
    if (kind := datasets.format_of(folder)).labels == "objects":
        raise UserError(f"{folder} is in {kind.described}; only classifiers are trained here, give class folders")
    if kind.suffixes:
        raise UserError(f"{folder} is in {kind.described}; training needs class folders")
    tested = any(_has_classes(folder / name) for name in ("test", "val"))
    has_training = _has_classes(folder / "train")
    if tested and not has_training:
        raise UserError(f"{folder} has no train/; put the training images there")
    if tested:
        if holdout is not None:
            raise UserError(f"{folder} already has test images; omit --holdout")
        return data
    root = folder / "train" if has_training else folder
    share = HOLDOUT if holdout is None else holdout
    if not 0 < share < 1:
        raise UserError(f"--holdout is {share:g}; it is a share of the images between 0 and 1, e.g. 0.2")
    return str(_link_folder(_split_images(root.resolve(), share, seed), out / "data" / folder.resolve().name, out))


def _has_classes(root: Path) -> bool:
    return root.is_dir() and any(p.is_dir() and not p.name.startswith(".") for p in root.iterdir())


def _split_images(root: Path, share: float, seed: int) -> dict[str, Path]:
    """Return every image by its path in the split folder: `train/CLASS/…` or `test/CLASS/…`."""
    listing = scan(root, 0, seed)
    rng = np.random.default_rng(seed)
    placed: dict[str, Path] = {}
    for label, name in enumerate(listing.classes):
        photos = [photo for photo in listing.photos if photo.label == label]
        if len(photos) < 2:
            raise UserError(f"class {name!r} has one image; it needs two, one to train on and one to test on")
        held = min(max(1, round(share * len(photos))), len(photos) - 1)
        tested = set(rng.permutation(len(photos))[:held].tolist())
        placed |= {_name_copy(photo, root, i in tested): photo.path for i, photo in enumerate(photos)}
    return placed


def _name_copy(photo: Photo, root: Path, tested: bool) -> str:
    return f"{'test' if tested else 'train'}/{photo.path.relative_to(root).as_posix()}"


def _link_folder(split: dict[str, Path], where: Path, out: Path) -> Path:
    """Return the folder of links, created if missing; refuse a different one under a training that has begun."""
    wanted = {place: os.fspath(path) for place, path in split.items()}
    if where.is_dir():
        links = [path for path in where.rglob("*") if path.is_symlink()]
        if {path.relative_to(where).as_posix(): os.fspath(path.readlink()) for path in links} == wanted:
            return where
        if (out / "state.pt").exists():
            raise UserError(
                f"the training in {out} began with another split of the images (they, --holdout or --seed changed); "
                "give another --out, or remove that folder to start over"
            )
        shutil.rmtree(where)
    part = where.with_name(where.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for place, target in wanted.items():
        (part / place).parent.mkdir(parents=True, exist_ok=True)
        (part / place).symlink_to(target)
    part.rename(where)
    return where


def decoded(
    study: Study, model: ModelSpec, size: tuple[int, int], options: TrainOptions, console: Console | None = None
) -> tuple[DataSpec, DataSpec]:
    """Decode the training images, larger than `size` (height, width) if the augmentation crops, and the test images.

    The test images are decoded as for any other command, so that accuracies can be compared; after the others, which
    are read together with them, so that all unreadable images are named together.
    """
    if study.data == "digits":
        test = prepared(study, model, size, console=console)
        return replace(test, split="train"), test
    larger, preprocess, channels = size, model.preprocess, model.channels
    if options.augment in CROPPING:
        room = max(ROOM, preprocess.resize)
        larger = (round(size[0] * room), round(size[1] * room))
        preprocess = replace(preprocess, resize=1.0 if preprocess.resize else 0.0)
    on_unreadable: datasets.OnUnreadable = "skip" if study.unreadable == "skip" else "refuse"
    images, cache = Path(study.data), cache_dir() / "datasets"
    with decoding(console) as progress:
        data = datasets.load(images, cache, larger, preprocess, 0, on_unreadable, progress, channels, train=True)
    warn_unreadable(datasets.meta(data), console)
    training = replace(data, split="train", count=datasets.meta(data)["splits"].get("train", 0))
    if not training.count:
        raise UserError(f"every training image in {study.data} is also a test image; give other images")
    return training, prepared(study, model, size, console=console)


def classes(training: DataSpec) -> list[str]:
    """Return the names of the classes; raise `UserError` if there is only one."""
    names: list[str] = datasets.meta(training)["classes"]
    if len(names) < 2:
        raise UserError(f"there is a single class, {names[0]!r}; a classifier needs two or more")
    return names
