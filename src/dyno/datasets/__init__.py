"""Data sets: images decoded once into a memory-mapped uint8 array that every backend reads.

A data set is a folder: images.npy (uint8, N x C x H x W), labels.npy (int64, -1 where there is none), one int64 index
array per split (test.npy, calibration.npy, train.npy as far as they exist) and meta.json. Every split is ordered so
that any beginning of it holds the classes in their proportions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dyno.datasets import cache as store
from dyno.datasets.decode import Progress, Transform, decoded, library_version
from dyno.datasets.folders import Listing, printable, scan, spread
from dyno.worker.spec import DataSpec, Preprocess, Unavailable, UserError

DIGITS = Preprocess(mean=(0.5,), std=(0.5,), resize=0.0)
DIGITS_TEST, DIGITS_CALIBRATION = 900, 128
CALIBRATION = 128

OnUnreadable = Literal["refuse", "skip"]


def digits(cache: Path, size: int = 64) -> DataSpec:
    """scikit-learn's 1,797 handwritten digits, enlarged to `size` (bilinear): 897 to train, 900 to test.

    One channel; 8 x 8 pixels in 17 shades before. 128 of the training images are the calibration split, and `DIGITS` is
    the preprocessing that goes with them. Raises `Unavailable` without scikit-learn or Pillow, `UserError` for a size
    below 8 or an unwritable cache.
    """
    if size < 8:
        raise UserError(f"digits can't be shrunk to {size} pixels; the smallest size is 8")
    made_by = {"scikit-learn": library_version("scikit-learn"), "pillow": library_version("pillow")}
    transform = Transform((size, size), DIGITS, channels=1)
    key = store.key_of("digits", transform.identity, made_by, DIGITS_TEST, DIGITS_CALIBRATION)
    if (found := store.find(cache, key)) is None:
        small, labels = _small_digits()
        order = spread(labels, seed=0)
        train = order[DIGITS_TEST:]
        splits = {"test": order[:DIGITS_TEST], "train": train, "calibration": train[:DIGITS_CALIBRATION]}
        about = {
            "name": "digits",
            "photographs": "digits",
            "classes": [str(n) for n in range(10)],
            "made_by": made_by,
            **transform.identity,
        }
        rows = (transform.pixels(image) for image in small)
        found = store.write(cache, key, store.Content(rows, transform.shape, labels, splits, about))
    return _spec("digits", found)


def class_folders(
    folder: Path,
    cache: Path,
    size: tuple[int, int],
    preprocess: Preprocess,
    calibration: int | Path = CALIBRATION,
    on_unreadable: OnUnreadable = "refuse",
    progress: Progress | None = None,
    channels: int = 3,
    seed: int = 0,
) -> DataSpec:
    """Images in class folders, decoded to `size` (height, width) as torchvision does it on PIL images.

    Layouts: `DIR/<class>/…` or `DIR/{train,test|val}/<class>/…` (test before val). A label is the class folder's place
    in the folders' order by Unicode code point; train/ decides the order where there is one. Calibration images are
    never test images: a number is taken from train/, or where there is none out of the test images (at most a fifth of
    them); a path is a folder of images of its own. `progress` is called with images done and in all.

    The shorter side becomes `size * preprocess.resize`, then the centre is cropped (resize 0: straight to the size),
    with antialiasing and without JPEG's reduced-scale decoding, which would change the pixels. As in torchvision's
    ImageFolder, EXIF orientation is not applied. Unlike there, 16-bit grey keeps its upper 8 bits and doesn't go white.

    The cache is found by the content of the images and the transform. Images that can't be read are refused together,
    counted and named; with "skip" they are left out and listed in meta.json. Raises `UserError`, one line each.
    """
    transform = Transform(size, preprocess, channels)
    made_by = {"pillow": library_version("pillow")}
    folder, cache = Path(folder).resolve(), Path(cache)
    listing = scan(folder, calibration, seed)
    hashes = store.content_hashes([photo.path for photo in listing.photos], cache, folder)
    listing, hashes = _without_test_copies(listing, hashes)
    identity = [(photo.split, photo.name, photo.label, sha) for photo, sha in zip(listing.photos, hashes, strict=True)]
    key = store.key_of(listing.classes, identity, transform.identity, made_by, seed)
    found = store.find(cache, key)
    if found is None:
        classes = [printable(name) for name in listing.classes]
        about = {"name": printable(folder.name), "classes": classes, "made_by": made_by, **transform.identity}
        about["photographs"] = store.key_of(listing.classes, identity)
        found = store.write(cache, key, _content(listing, transform, about, on_unreadable, progress, seed))
    elif on_unreadable == "refuse":
        _refuse(store.meta(found)["unreadable"], len(listing.photos))
    return _spec(printable(folder.name), found)


def meta(data: DataSpec) -> dict[str, Any]:
    """What meta.json says of a decoded data set: name, sha256, classes, size, count, splits, unreadable, preprocess."""
    return store.meta(Path(data.folder))


def _spec(name: str, folder: Path) -> DataSpec:
    found = store.meta(folder)
    return DataSpec(name, str(folder.resolve()), found["sha256"], "test", found["splits"]["test"])


def _small_digits() -> tuple[list[Any], np.ndarray]:
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise Unavailable(f"digits need {e.name}: pip install 'inference-dyno[data]'") from e
    pixels, labels = load_digits(return_X_y=True)
    shades = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return [Image.fromarray(image) for image in shades], labels.astype(np.int64)


def _without_test_copies(listing: Listing, hashes: list[str]) -> tuple[Listing, list[str]]:
    """Leave out calibration images that are copies of test images: nothing is tuned on what it is tested on."""
    tested = {sha for photo, sha in zip(listing.photos, hashes, strict=True) if photo.split == "test" and sha}
    keep = [i for i, p in enumerate(listing.photos) if p.split == "test" or hashes[i] not in tested]
    left = dataclasses.replace(listing, photos=[listing.photos[i] for i in keep])
    if listing.own_calibration and all(photo.split == "test" for photo in left.photos):
        raise UserError("every calibration image is also a test image; give a folder with other images")
    return left, [hashes[i] for i in keep]


def _content(
    listing: Listing,
    transform: Transform,
    about: dict[str, Any],
    on_unreadable: OnUnreadable,
    progress: Progress | None,
    seed: int,
) -> store.Content:
    photos = listing.photos
    labels = np.array([photo.label for photo in photos], np.int64)
    splits = {}
    for split in ("test", "calibration"):
        chosen = np.array([i for i, photo in enumerate(photos) if photo.split == split], np.int64)
        if len(chosen):
            splits[split] = chosen[spread(labels[chosen], seed)]

    def check(unreadable: dict[int, str]) -> list[str]:
        lines = [f"{photos[i].name} ({reason})" for i, reason in unreadable.items()]
        if on_unreadable == "refuse":
            _refuse(lines, len(photos))
        tested = {photo.label for photo in photos if photo.split == "test"}
        left = {photo.label for i, photo in enumerate(photos) if photo.split == "test" and i not in unreadable}
        for label in sorted(tested - left):
            raise UserError(f"no image of class {listing.classes[label]!r} can be read, e.g. {lines[0]}")
        return lines

    rows = decoded([photo.path for photo in photos], transform, progress)
    return store.Content(rows, transform.shape, labels, splits, about, check)


def _refuse(unreadable: list[str], count: int) -> None:
    if unreadable:
        named = ", ".join(unreadable[:3]) + (", …" if len(unreadable) > 3 else "")
        raise UserError(
            f"{len(unreadable)} of {count} images can't be read: {named}; remove them, or skip what is unreadable"
        )
