"""Tables of labels: CSV files with a row per image, its path and its class."""

from __future__ import annotations

import csv
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.data.data_format import SPLIT_NAME, DataFormat, ScanRequest
from dyno.data.photos import (
    DEFAULT_COUNT,
    AmbiguousImages,
    Listing,
    Photo,
    are_known_synsets,
    clean_name,
    describe_synset,
    find_image_folder,
    is_image,
    is_system,
    list_synsets,
    stratified_order,
    without_missing,
)
from dyno.worker.spec import UserError, add_noun

# Normalised names of columns: lower case, without spaces, dots, dashes and underscores.
PATH_COLUMNS = (
    "path", "filepath", "imagepath", "imgpath", "relativepath", "filename", "file", "image", "img", "imagename",
    "imgname", "imageid", "name", "id",
)  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "class", "classid", "labelid", "category", "categoryid", "target", "classname",
                 "labelname", "categoryname", "y")  # fmt: skip
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
BOX_COLUMNS = {"xmin", "x1", "bbox", "boxes", "xcenter", "predictionstring"}
TEST_SPLITS, TRAINING_SPLITS = ("test", "val", "valid", "validation"), ("train", "training")
MAX_CLASSES = 100_000  # a larger number is an identity, not a class
SAMPLED_ROWS = 20  # rows sampled to classify a column
CLASS_NUMBER = re.compile(r"\d+(\.0+)?")
DECIMAL_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)  # also of a regression's target
NO_VALUES = ("nan", "na", "n/a", "none", "null", "-")  # programs write these for a missing number


class LabelTable(DataFormat):
    """A CSV file of `path,label` with or without a header, or a folder of images with one such file.

    Integer labels are the network's classes; names are numbered in sorted order, like class folders.
    """

    name = "table"
    described = "the format path,label"
    suffixes = (".csv", ".tsv")
    labels = "classes"

    def fits(self, path: Path) -> bool:
        """Return whether the path is a table, or a folder with one.

        The folder must have no class folders, or all images of the table must lie in one folder.
        """
        if not path.is_dir():
            return path.suffix.lower() in self.suffixes
        folders = [inner.name for inner in path.iterdir() if inner.is_dir() and not is_system(inner.name)]
        return any(all(map(SPLIT_NAME.fullmatch, folders)) or _are_in_one_folder(table) for table in _find_tables(path))

    def scan(self, path: Path, request: ScanRequest) -> Listing:
        file = path
        if path.is_dir():
            file, *other_files = _find_tables(path)
            if other_files:
                names = ", ".join(table.name for table in (file, *other_files))
                raise UserError(f"{path} has several tables of labels ({names}); give the path of the one to use")
        if request.train:
            raise UserError(f"{file} is a table of labels; training needs class folders, train/<class>/… and test/…")
        table = _read_table(file)
        labels, classes, is_imagenet = _number_labels(file, table, request.outputs)
        folder, suffix = find_image_folder(file, table.names)
        rows = zip(table.names, labels, table.splits, strict=True)
        photos = [Photo(folder / (name + suffix), clean_name(name), label, split) for name, label, split in rows]
        paths = Counter(photo.path for photo in photos)  # ./a.png is a.png
        if repeat := next((photo.name for photo in reversed(photos) if paths[photo.path] > 1), ""):
            raise UserError(f"{file} lists {repeat} twice; each image needs one row with one class")
        photos, missing_warning = without_missing(photos, folder, file, request.skip_missing)
        warnings = [missing_warning, _warn_unlisted(photos, folder, file), _warn_count_from_one(file, table)]
        meta: dict[str, Any] = {"label_source": "imagenet1k" if is_imagenet else "table"}
        if any(warnings):
            meta["warnings"] = [*filter(None, warnings)]
        return Listing(clean_name(file.stem), classes, _split_photos(photos, request), metadata=meta)


LABEL_TABLE = LabelTable()


@dataclass(frozen=True)
class _LabelRows:
    """Name, label and split of each image. `classes` are the names of one-hot columns, in order; `texts` are names of
    numeric labels, from another column."""

    names: list[str]
    labels: list[str]
    splits: list[str]
    classes: list[str]
    texts: list[str]


def _are_in_one_folder(file: Path) -> bool:
    """Return whether all images of the table lie in one folder next to it, which is no class folder.

    It may be a class folder if the table's paths contain it and there is only one label.
    """
    table = _read_table(file)
    folder, suffix = find_image_folder(file, table.names)
    images = [folder / (name + suffix) for name in table.names]
    if {image.parent.parent for image in images} != {file.parent} or len({image.parent for image in images}) > 1:
        return False
    return all(map(Path.is_file, images)) and (folder != file.parent or len(set(table.labels)) > 1)


def _warn_unlisted(photos: list[Photo], folder: Path, file: Path) -> str:
    known_paths = {photo.path for photo in photos}
    paths = [path for path in folder.iterdir() if is_image(path.name) and path not in known_paths]
    clause = "1 image is" if len(paths) == 1 else f"{len(paths):,} images are"
    return f"{clause} not in {file.name} and left out, e.g. {clean_name(min(paths).name)}" if paths else ""


def _warn_count_from_one(file: Path, table: _LabelRows) -> str:
    """Return a warning on numbers that begin with 1: the network's classes begin with 0."""
    is_numbered = not table.classes and all(map(CLASS_NUMBER.fullmatch, table.labels))
    if not is_numbered or min(map(float, table.labels)) != 1:
        return ""
    return f"{file.name} has class 1 but not class 0: if it counts from 1, its accuracy is wrong: subtract 1"


def _find_tables(folder: Path) -> list[Path]:
    """Return the folder's tables that name images with a label each."""
    tables = []
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in LabelTable.suffixes or is_system(file.name):
            continue
        try:
            names = _read_table(file).names
            find_image_folder(file, names)
        except AmbiguousImages:
            raise
        except UserError:
            continue
        tables.append(file)
    return tables


def _read_table(file: Path) -> _LabelRows:
    """Read the table; its columns are recognised by name or content."""
    try:
        content = file.read_bytes()
        text = content.decode("utf-16" if content[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the table {file} can't be read: {getattr(e, 'strerror', None) or 'it is not UTF-8'}") from e
    first_line = text.split("\n", 1)[0]
    delimiter = max("\t;,|", key=first_line.count)
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), delimiter=delimiter) if any(row)]
    if not rows or len(rows[0]) < 2:
        raise UserError(f"{file} is not a table of labels; it needs a row of path,label for each image")
    header = [re.sub(r"[\s._-]", "", cell.lower()) for cell in rows[0]]
    is_header = not any(map(is_image, rows[0])) and (not {*header}.isdisjoint(PATH_COLUMNS) or _is_path(rows[1:], None))
    if not is_header:
        header, start = ["path", "label"] if len(rows[0]) == 2 else [""] * len(rows[0]), 0
    else:
        start = 1
    body = rows[start:]
    if bad_row := next((n for n, row in enumerate(body, start + 1) if len(row) != len(header)), 0):
        raise UserError(f"{file}, row {bad_row} has {len(rows[bad_row - 1])} cells, not {len(header)}")
    if not {*header}.isdisjoint(BOX_COLUMNS) or not body:
        problem = "holds boxes, which are read only in COCO's or YOLO's format" if body else "has no rows"
        raise UserError(f"{file} {problem}; give a table of path,label")
    return _choose_columns(file, header, rows[0] if is_header else header, body, start)


def _is_path(rows: list[list[str]], column: int | None) -> bool:
    """Return whether the first rows have names of images: in this column, or in any (None)."""
    cells = [row if column is None else row[column : column + 1] for row in rows[:SAMPLED_ROWS]]
    return bool(cells) and all(any(map(is_image, row)) for row in cells)


def _choose_columns(file: Path, header: list[str], titles: list[str], body: list[list[str]], start: int) -> _LabelRows:
    """Choose the columns of paths, labels and splits; several columns of 0 and 1 are one-hot classes."""
    columns = [header.index(name) for name in PATH_COLUMNS if name in header]
    path = next((c for c in [*columns, *range(len(header))] if _is_path(body, c)), columns[0] if columns else None)
    if path is None:
        raise UserError(f"{file} has no column of image files; name one path, and one label")
    split = next((header.index(name) for name in SPLIT_COLUMNS if name in header), None)
    rest = [c for c in range(len(header)) if c not in (path, split) and header[c]]
    label = next((header.index(name) for name in LABEL_COLUMNS if name in header and header.index(name) in rest), None)
    label = rest[0] if label is None and len(rest) == 1 else label
    classes: list[str] = []
    texts: list[str] = []
    if label is not None:
        labels, texts = _find_numbers(body, label, [c for c in rest if header[c] in LABEL_COLUMNS])
    elif all(row[c] in ("0", "1", "0.0", "1.0") for row in body for c in rest) and rest:
        classes = [clean_name(titles[c]) for c in rest]
        marks = [[k for k, c in enumerate(rest) if float(row[c])] for row in body]
        if bad_row := next((n for n, mark in enumerate(marks, start + 1) if len(mark) != 1), 0):
            raise UserError(
                f"{file}, row {bad_row}: {len(marks[bad_row - start - 1])} classes are 1; each image needs one"
            )
        labels = [str(mark[0]) for mark in marks]
    elif not any(titles):
        raise UserError(
            f"{file} has {len(titles)} columns without names; add a first row that names them, such as path,label,split"
        )
    else:
        raise UserError(f"{file} has no column called label or class, only {', '.join(titles)}; name it label")
    names = [row[path].replace("\\", "/") for row in body]
    if bad_row := next((n for n, cells in enumerate(zip(names, labels, strict=True), start + 1) if not all(cells)), 0):
        raise UserError(f"{file}, row {bad_row} has no {'label' if names[bad_row - start - 1] else 'path'}")
    splits = ["test"] * len(body) if split is None else [row[split].lower() for row in body]
    return _LabelRows(names, labels, splits, classes, texts)


def _find_numbers(body: list[list[str]], label: int, columns: list[int]) -> tuple[list[str], list[str]]:
    """Return each row's label, and its name: of two columns that match one to one, the numbers are the labels."""
    labels = [row[label] for row in body]
    is_number = all(map(CLASS_NUMBER.fullmatch, labels))
    for values in ([row[c] for row in body] for c in columns if c != label):
        pairs = {*zip(labels, values, strict=True)}
        if len(pairs) == len({*labels}) == len({*values}) and is_number != all(map(CLASS_NUMBER.fullmatch, values)):
            return (labels, values) if is_number else (values, labels)
    return labels, []


def _number_labels(file: Path, table: _LabelRows, outputs: int) -> tuple[list[int], list[str], bool]:
    """Return each image's class index, the class names, and whether they are ImageNet's 1,000 classes."""
    labels, classes = table.labels, table.classes
    if all(re.fullmatch(r"-?\d+(\.0+)?", label) for label in labels) and (negative := min(labels, key=float))[0] == "-":
        raise UserError(f"{file} has class {negative}; classes are numbered from 0: leave out rows without a class")
    if not all(map(CLASS_NUMBER.fullmatch, labels)):
        other_labels = {label for label in labels if not CLASS_NUMBER.fullmatch(label)}
        if len(other_labels) < len({*labels}) and all(label.casefold() in NO_VALUES for label in other_labels):
            label = min(other_labels)
            raise UserError(f"{file} has the label {label}, which is not a class; leave out rows without a class")
        if all(map(DECIMAL_NUMBER.fullmatch, labels)):
            label = next(label for label in labels if not CLASS_NUMBER.fullmatch(label))
            advice = "labels are names or whole numbers; to measure no accuracy, give a folder of the images alone"
            raise UserError(f"{file} has the label {label}, which is not a class; {advice}")
        order = sorted(set(labels))
        if outputs == DEFAULT_COUNT and are_known_synsets(order):
            synsets = list(list_synsets())
            return [synsets.index(label) for label in labels], [describe_synset(synset) for synset in synsets], True
        index_of = {label: k for k, label in enumerate(order)}
        return [index_of[label] for label in labels], [clean_name(label) for label in order], False
    numbers = [int(float(label)) for label in labels]
    highest, count = max(numbers), len(classes) or outputs
    if highest >= (count or MAX_CLASSES):
        range_text = (
            f"the network has {add_noun(count, 'class', 'classes')}, 0 to {count - 1}" if count else "no class is so"
        )
        hint = "; the table counts from 1, subtract 1" if min(numbers) == 1 and highest == count else ""
        raise UserError(f"{file} has class {highest}, but {range_text}{hint}")
    texts = dict(zip(numbers, table.texts, strict=False))
    return numbers, classes or [clean_name(texts.get(k, str(k))) for k in range(count or highest + 1)], False


def _split_photos(photos: list[Photo], request: ScanRequest) -> list[Photo]:
    """Return the test images, of one split, and the calibration images, from the training split."""
    test_split = next((split for split in TEST_SPLITS if any(photo.split == split for photo in photos)), None)
    if test_split is None:
        raise UserError(
            f"no row of the table belongs to the split {', '.join(TEST_SPLITS)}; mark the test rows as test"
        )
    test = [Photo(p.path, p.name, p.label, "test") for p in photos if p.split == test_split]
    training = [Photo(p.path, p.name, p.label, "calibration") for p in photos if p.split in TRAINING_SPLITS]
    if not training:
        return test
    order = stratified_order(np.array([p.label for p in training]), request.seed)[: request.calibration]
    return test + [training[i] for i in sorted(order.tolist())]
