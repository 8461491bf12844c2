"""Class folders: their images, the labels, and the choice of calibration images."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.data.data_format import DataFormat, ScanRequest, list_folders, warn_labels
from dyno.data.photos import (
    DEFAULT_COUNT,
    EXTENSIONS,
    Listing,
    are_known_synsets,
    clean_name,
    describe_synset,
    find_images,
    is_image,
    is_system,
    list_calibration_photos,
    list_synsets,
    name_below,
    stratified_order,
    warn_number_order,
    warn_unread_formats,
)
from dyno.data.photos import Photo as Photo
from dyno.worker.spec import UserError, make_absolute

TEST_SPLITS = ("test", "testing", "val", "valid", "validation")  # test splits, in any letter case
TRAINING_SPLITS = ("train", "training")
SPLIT_NAME = re.compile(r"(^|[^a-z])(train|test|val|valid|validation|fold|split)(ing)?(?![a-z])", re.IGNORECASE)


class ClassFolders(DataFormat):
    """`DIR/<class>/…` or `DIR/{train,test|val|valid|validation}/<class>/…` (the first of these).

    A label is the class folder's index in Unicode code point order, in train/ if it exists. If the model has 1,000
    classes and all folders are named by synsets of ImageNet's 1,000 classes, it is the index among those.
    """

    name = "classes"
    described = "class folders"
    labels = "classes"
    fallback = True

    def fits(self, path: Path) -> bool:
        return path.is_dir() and not UNLABELLED_IMAGES.fits(path)

    def scan(self, path: Path, request: ScanRequest) -> Listing:
        return scan_folder(path, request)


class UnlabelledImages(DataFormat):
    """Images without class folders or annotations: for timing and comparing outputs; accuracy can't be measured."""

    name = "images"
    described = "images alone"
    fallback = True

    def fits(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        folders = any(inner.is_dir() and not is_system(inner.name) for inner in path.iterdir())
        return not folders and bool(find_images(path))

    def scan(self, path: Path, request: ScanRequest) -> Listing:
        return replace(scan_folder(path, request), sized=request.objects)


CLASS_FOLDERS = ClassFolders()
UNLABELLED_IMAGES = UnlabelledImages()


def scan_folder(folder: Path, request: ScanRequest) -> Listing:
    """List the images of an existing folder, by class folder if it has any; raise `UserError` for an empty one.

    With `wanted.train` all images of train/ are listed, and those for calibration are marked among them.
    """
    try:
        test_root, train_root = _find_roots(folder)
        if request.train and train_root is None:
            raise UserError(f"{folder} has no train/; put the training images there and the others into test/")
        classes = list_folders(train_root or test_root)
        if not classes and find_images(test_root):
            photos = [Photo(path, name_below(path, folder), -1, "test") for path in find_images(folder)]
            return Listing(clean_name(folder.name), [], photos, metadata=_describe_labels("none", folder))
        is_imagenet = request.outputs == DEFAULT_COUNT and are_known_synsets(classes)
        test = _list_photos(folder, test_root, classes, "test")
        training = _list_photos(folder, train_root, classes, "train") if train_root and request.train else []
        if train_root is None or not request.calibration:
            return _list_labelled(folder, classes, is_imagenet, test + training)
        training = training or _list_photos(folder, train_root, classes, "calibration")
    except PermissionError as e:
        raise UserError(f"{e.filename} can't be listed: permission denied") from e
    order = stratified_order(np.array([photo.label for photo in training]), request.seed)
    indices = set(order[: request.calibration].tolist())
    marked_photos = [replace(photo, calibrates=i in indices) for i, photo in enumerate(training)]
    kept_photos = [photo for photo in marked_photos if request.train or photo.calibrates]
    return _list_labelled(folder, classes, is_imagenet, test + kept_photos)


def list_calibration_folder(folder: Path) -> Listing:
    """List the images of a calibration folder as test images too, for lack of other images."""
    photos = [replace(photo, split="test", calibrates=True) for photo in list_calibration_photos(folder)]
    warning = "outputs are compared on the calibration images themselves; give --data for others"
    return Listing(
        clean_name(make_absolute(folder).name), [], photos, metadata={"label_source": "none", "warnings": [warning]}
    )


def _list_labelled(folder: Path, classes: list[str], is_imagenet: bool, photos: list[Photo]) -> Listing:
    """List the photos with labels by folder order, or by index among ImageNet's classes if `is_imagenet`."""
    name, meta = clean_name(folder.name), _describe_labels("imagenet1k" if is_imagenet else "folders", folder)
    if not is_imagenet:
        if order_warnings := warn_number_order(classes):
            meta["warnings"] = [*meta.get("warnings", []), *order_warnings]
        return Listing(name, [clean_name(class_name) for class_name in classes], photos, metadata=meta)
    order = list(list_synsets())
    indices = [order.index(synset) for synset in classes]
    photos = [replace(photo, label=indices[photo.label] if photo.label >= 0 else -1) for photo in photos]
    return Listing(name, [describe_synset(synset) for synset in order], photos, metadata=meta)


def _describe_labels(labels: str, folder: Path) -> dict[str, Any]:
    warnings = warn_unread_formats(folder)
    warnings += [*warn_labels(folder), *_warn_loose(folder)] if labels != "none" else []
    return {"label_source": labels, **({"warnings": warnings} if warnings else {})}


def _warn_loose(folder: Path) -> list[str]:
    """Return a warning if images lie outside the class folders."""
    files = [path for root in {folder, *filter(None, _find_roots(folder))} for path in root.iterdir()]
    files = sorted(path for path in files if is_image(path.name) and not is_system(path.name) and path.is_file())
    clause = "1 image is left out: it is" if len(files) == 1 else f"{len(files):,} images are left out: they are"
    return [f"{clause} in no class folder, e.g. {name_below(files[0], folder)}"] if files else []


def _find_roots(folder: Path) -> tuple[Path, Path | None]:
    """Return the parent folders of the class folders of test images and of training images (None: no train/)."""
    names = list_folders(folder)
    split_folders = {name.casefold(): folder / name for name in names if list_folders(folder / name)}
    train = next((split_folders[name] for name in TRAINING_SPLITS if name in split_folders), None)
    for name in TEST_SPLITS:
        if name in split_folders:
            return split_folders[name], train
    if train is not None:
        raise UserError(
            f"{folder} has {train.name}/ but neither test/ nor val/ with class folders; add one, or give {train}"
        )
    if len(names) == len(split_folders) and names and all(map(SPLIT_NAME.search, names)):
        raise UserError(
            f"{folder} has {', '.join(names[:4])}, which hold class folders and seem to be parts of a data set; name "
            f"the test set test, or give its folder alone"
        )
    return folder, None


def _list_photos(folder: Path, root: Path, classes: list[str], split: str) -> list[Photo]:
    names = list_folders(root)
    if not names:
        raise UserError(f"no class folders in {root}; put the images of each class into a folder named after it")
    if unknown_names := sorted(set(names) - set(classes)):
        raise UserError(f"class {unknown_names[0]!r} is in {root} but not in the folder of the training images")
    index_of = {name: i for i, name in enumerate(classes)}
    images_of = {name: find_images(root / name) for name in names}
    if not any(images_of.values()):
        raise UserError(f"no images in {root}; known formats: {', '.join(sorted(EXTENSIONS))}")
    if empty_names := [name for name in names if not images_of[name]]:
        more = f" (and {len(empty_names) - 1} more)" if len(empty_names) > 1 else ""
        raise UserError(f"class {empty_names[0]!r} has no images in {root}{more}; add some or remove the folder")
    return [Photo(path, name_below(path, folder), index_of[name], split) for name in names for path in images_of[name]]
