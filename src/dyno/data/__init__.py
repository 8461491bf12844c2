"""Data sets: images decoded once into a memory-mapped uint8 array that every backend reads.

A data set is a folder: images.npy (uint8, N x C x H x W), labels.npy (int64, -1: no label), an int64 index array per
split (test.npy, calibration.npy, train.npy, if present) and meta.json. Any prefix of a split holds the classes in
proportion.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dyno.data import cache as store
from dyno.data.data_format import ScanRequest
from dyno.data.data_format import format_of as format_of
from dyno.data.data_format import list_formats as list_formats
from dyno.data.decode import Progress as Progress
from dyno.data.decode import Transform, find_library_version
from dyno.data.folders import list_calibration_folder
from dyno.data.photos import (
    CALIBRATION_IMAGES,
    DecodeOptions,
    calibrate_on,
    decode_listing,
    make_spec,
    stratified_order,
)
from dyno.data.photos import OnUnreadable as OnUnreadable
from dyno.data.rows import DecodedRow, seal_row
from dyno.worker.extras import load_library
from dyno.worker.spec import DataSpec, Preprocess, UserError, make_absolute

DIGITS_PREPROCESS = Preprocess(mean=(0.5,), std=(0.5,), resize=0.0)
DIGITS_TEST, DIGITS_CALIBRATION = 900, 128


def prepare_digits(cache: Path, size: int = 64) -> DataSpec:
    """Return scikit-learn's 1,797 handwritten digits, enlarged to `size` (bilinear): 897 to train, 900 to test.

    One channel; originally 8 x 8 pixels in 17 shades. 128 of the training images are the calibration split, and
    `DIGITS_PREPROCESS` is their preprocessing. Raises `Unavailable` without scikit-learn or Pillow,
    `UserError` for a size below 8 or an unwritable cache.
    """
    if size < 8:
        raise UserError(f"digits can't be shrunk to {size} pixels; the smallest size is 8")
    made_by = {"scikit-learn": find_library_version("scikit-learn"), "pillow": find_library_version("pillow")}
    transform = Transform((size, size), DIGITS_PREPROCESS, channels=1)
    key = store.make_key("digits", transform.identity, made_by, DIGITS_TEST, DIGITS_CALIBRATION)
    if (folder := store.find_folder(cache, key)) is None:
        images, labels = _small_digits()
        order = stratified_order(labels, seed=0)
        train = order[DIGITS_TEST:]
        splits = {"test": order[:DIGITS_TEST], "train": train, "calibration": train[:DIGITS_CALIBRATION]}
        meta = {"name": "digits", "photographs": "digits", "classes": [str(n) for n in range(10)], "made_by": made_by}
        meta |= transform.identity

        def rows(start: int) -> Iterator[DecodedRow]:
            for image in images[start:]:
                start_time = time.perf_counter()
                pixels = transform.pixels(image)
                yield seal_row(pixels, time.perf_counter() - start_time)

        folder = store.write_folder(cache, key, store.Content(rows, transform.shape, {"labels": labels}, splits, meta))
    return make_spec("digits", folder)


def load(
    path: Path,
    cache: Path,
    size: tuple[int, int],
    preprocess: Preprocess,
    calibration: int | Path = CALIBRATION_IMAGES,
    on_unreadable: OnUnreadable = "refuse",
    progress: Progress | None = None,
    channels: int = 3,
    seed: int = 0,
    train: bool = False,
    outputs: int = 0,
    set_aside: bool = False,
    objects: bool = False,
    needs: str = "",
) -> DataSpec:
    """Decode the images in a folder, in any known format, to `size` (height, width).

    For a classifier the shorter side is scaled to `size * preprocess.resize`, then the centre is cropped (resize 0:
    scaled straight to the size), as in torchvision on PIL images: with antialiasing and without JPEG's reduced-scale
    decoding, which would change pixels. As in torchvision's ImageFolder, EXIF orientation is not applied; unlike there,
    16-bit grey keeps its upper 8 bits and doesn't turn white. With `objects` (boxes, masks, keypoints) images are
    rotated by EXIF orientation and letterboxed like ultralytics' LetterBox, to within a grey level.

    Calibration images are never test images. A number of them is taken from the training images; without these, and
    only with `set_aside`, from the test images (at most a fifth; meta.json has the number as `set_aside`). A path is a
    folder of calibration images. With `train` all training images are decoded, including those for calibration, and
    listed in train.npy. Copies of test images are left out of both. `outputs` is the model's number of classes; `needs`
    (masks, keypoints) chooses between two annotation files of COCO. `progress` is called with the numbers of images
    done and in total.

    With objects sizes.npy has the height and width of the originals, and truth.json COCO's ground truth of the test
    images, in original pixels (not for images alone). Annotations are checked when images are decoded.

    The cache key depends on the images' content and the transform. Unreadable images raise one error with their number
    and names; with "skip" they are left out and listed in meta.json, and images that are listed but missing are left
    out with a warning. Raises `UserError`, one line each.
    """
    if isinstance(calibration, int) and calibration < 0:
        raise UserError(f"the number of calibration images can't be {calibration}")
    path = make_absolute(Path(path))
    data_format = format_of(path)
    if data_format.labels and (data_format.labels == "objects") != objects:
        label_text = "boxes, masks or keypoints" if objects else "class for each image"
        raise UserError(f"{path} is {data_format.describe(path)}, which has no {label_text}")
    preprocess = dataclasses.replace(preprocess, letterbox=True) if objects else preprocess
    count = calibration if isinstance(calibration, int) else 0
    transform = Transform(size, preprocess, channels, upright=objects)
    options = DecodeOptions(Path(cache), transform, on_unreadable, progress, seed, count * set_aside)
    skip = on_unreadable == "skip"
    listing = data_format.scan(path, ScanRequest(count, seed, train, objects, needs, outputs, set_aside, skip))
    listing = calibrate_on(listing, calibration) if isinstance(calibration, Path) else listing
    return decode_listing(listing, path, options)


def calibration_alone(
    folder: Path,
    cache: Path,
    size: tuple[int, int],
    preprocess: Preprocess,
    on_unreadable: OnUnreadable = "refuse",
    progress: Progress | None = None,
    channels: int = 3,
    objects: bool = False,
) -> DataSpec:
    """Decode all images below the folder, without labels, as both test and calibration images.

    They serve for calibration, timing and comparing outputs; accuracy can't be measured. Decoding is as in `load`;
    `objects` is for a network that detects objects.
    """
    preprocess = dataclasses.replace(preprocess, letterbox=True) if objects else preprocess
    transform = Transform(size, preprocess, channels, upright=objects)
    listing = dataclasses.replace(list_calibration_folder(folder), sized=objects)
    options = DecodeOptions(Path(cache), transform, on_unreadable, progress)
    return decode_listing(listing, make_absolute(Path(folder)), options)


def read_meta(data: DataSpec) -> dict[str, Any]:
    """Read a decoded data set's meta.json: name, sha256, classes, size, count, splits, unreadable, preprocess."""
    return store.read_meta(Path(data.folder))


def _small_digits() -> tuple[list[Any], np.ndarray]:
    image = load_library("PIL.Image", "the data set digits")
    pixels, labels = load_library("sklearn.datasets", "the data set digits").load_digits(return_X_y=True)
    shades = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return [image.fromarray(each) for each in shades], labels.astype(np.int64)
