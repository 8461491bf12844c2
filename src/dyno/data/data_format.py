"""Formats of data sets on disk: how they are detected, and how they list images, labels and objects."""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dyno.data.photos import CALIBRATION_IMAGES, Listing, is_image, is_system, name_below
from dyno.worker import plugins
from dyno.worker.spec import UserError

# Detection of label files among images, in supported and unsupported layouts, so that labels aren't overlooked.

HEAD_BYTES, FIRST_KEY_BYTES = 1 << 18, 1 << 12  # bytes read per file; bytes that contain a JSON file's first key
MAX_SUBFOLDERS = 20  # subfolders searched per folder
MAX_DEPTH = 3  # levels searched below the data folder
COCO_KEYS = re.compile(r'\s*\{\s*"(info|licenses|images|annotations|categories|type)"\s*:')
TOKEN_SEPARATORS = re.compile(r"[\s,;:\"'\[\]{}/\\]+")
LABEL_NAME = re.compile(r"label|annot|target|truth|ground", re.IGNORECASE)
DOCUMENT_NAME = re.compile(r"readme|licen[sc]e|copying|requirements", re.IGNORECASE)
TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xml")
ARRAY_SUFFIXES = (".mat", ".npy", ".npz", ".parquet", ".tfrecord", ".record")
# Names of folders for parts of a data set, not classes, such as `train`, `trainannot` or `SegmentationClass`.
SPLIT_NAME = re.compile(
    r"((train(ing)?|val(id|idation)?|test(ing)?|ima?ge?s?|jpe?g|png|data|labels?|annot(ation)?s?|masks?|gts?"
    r"|ground_?truth|segmentation(class|object)?s?)[ _-]?)+",
    re.IGNORECASE,
)
TRUTH_NAME = re.compile("label|annot|mask|gt|truth|segm", re.IGNORECASE)
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test", "testing")


@dataclass(frozen=True)
class LabelFile:
    """A file of labels, a description of its content, and whether it labels objects in the images."""

    path: Path
    description: str
    objects: bool


def find_labels(folder: Path) -> LabelFile | None:
    """Return a label file in the folder or near its top, preferably of objects; None without one.

    Large folders are searched in part.
    """
    files_by_folder = _list_files(folder)
    names = {name for files in files_by_folder.values() for name in files if is_image(name)}
    tokens = names | {stem for name in names if len(stem := Path(name).stem) >= 4 or not stem.isdecimal()}
    label_files: list[LabelFile] = []
    for parent, files in files_by_folder.items():
        stems = {Path(name).stem for name in files if is_image(name)}
        for name in files:
            if Path(name).suffix.lower() in (*TEXT_SUFFIXES, *ARRAY_SUFFIXES) and not DOCUMENT_NAME.match(name):
                labels = _recognise_file(parent / name, stems, tokens, len(names))
                if labels is not None and labels.objects:
                    return labels
                label_files += [labels] if labels is not None else []
    return label_files[0] if label_files else None


def is_coco(file: Path) -> bool:
    """Return whether a JSON file begins as COCO's do."""
    return bool(COCO_KEYS.match(_read_head(file, FIRST_KEY_BYTES)))


def is_yolo(file: Path) -> bool:
    """Return whether the file's first line is a class and four or more numbers."""
    fields = next((line.split() for line in _read_head(file).splitlines() if line.strip()), [])
    try:
        return len([float(field) for field in fields]) >= 5 and fields[0].isdecimal()
    except ValueError:
        return False


def refuse_labels(folder: Path, is_class_folders: bool) -> None:
    """Refuse a folder with labels that would be ignored, or with parts that would be read as classes."""
    labels = find_labels(folder)
    parts = list_folders(folder)
    has_splits = is_class_folders and bool(parts) and all(map(SPLIT_NAME.fullmatch, parts)) and not _has_classes(folder)
    if labels is not None and (has_splits or labels.objects or not is_class_folders):
        raise UserError(
            f"{folder} holds labels that can't be read there: {name_below(labels.path, folder)} "
            f"({labels.description}); {_suggest_remedy(labels)}, or give a folder of the images alone to measure "
            "without accuracy"
        )
    if has_splits and len(parts) > 1:
        choice = min(
            parts,
            key=lambda part: (bool(TRUTH_NAME.search(part)), part.lower().startswith("train"), part not in SPLIT_NAMES),
        )
        raise UserError(
            f"{folder} has {', '.join(parts)}, which are parts of a data set, not classes; put class folders into "
            f"them, or give one of them, such as {folder / choice}, to measure without accuracy"
        )


def _suggest_remedy(labels: LabelFile) -> str:
    if labels.path.name.startswith(("ILSVRC", "LOC_")):
        return "sort ImageNet's images into class folders with dyno data imagenet-val"
    if labels.path.suffix == ".txt" and labels.objects:
        return "put the images into images/ and their label files into labels/"
    if labels.objects:
        return "convert them to COCO's or YOLO's format"
    is_table = labels.path.suffix.lower() in (".csv", ".tsv")
    return "give that file" if is_table else "write them as a table of path,label (.csv)"


def warn_labels(folder: Path) -> list[str]:
    """Return a warning if a label file lies among class folders: the folders' names are the labels."""
    labels = find_labels(folder)
    if labels is None:
        return []
    return [f"labels are the folders' names; {name_below(labels.path, folder)} ({labels.description}) is not read"]


def _has_classes(folder: Path) -> bool:
    """Return whether the folder's splits contain folders that may be classes."""
    splits = [folder_name for folder_name in list_folders(folder) if folder_name.lower() in SPLIT_NAMES]
    return any(not SPLIT_NAME.fullmatch(name) for split in splits for name in list_folders(folder / split))


def list_folders(folder: Path) -> list[str]:
    """Return the names of the folder's subfolders, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_system(entry.name))


def _list_files(folder: Path) -> dict[Path, list[str]]:
    """Return the names of the files in each folder, nearest to the top first."""
    files_by_folder: dict[Path, list[str]] = {}
    level = [folder]
    for _ in range(MAX_DEPTH):
        subfolders: list[Path] = []
        for parent in level:
            with os.scandir(parent) as entries:
                children = sorted((entry.name, entry.is_dir()) for entry in entries if not is_system(entry.name))
            files_by_folder[parent] = [name for name, is_folder in children if not is_folder]
            subfolders += [parent / name for name, is_folder in children if is_folder][:MAX_SUBFOLDERS]
        level = subfolders
    return files_by_folder


def _recognise_file(file: Path, stems: set[str], tokens: set[str], images: int) -> LabelFile | None:
    """Return the file if it has labels. `stems` are of images next to it, `tokens` names and stems of all `images`."""
    suffix = file.suffix.lower()
    if suffix in ARRAY_SUFFIXES:
        return (
            LabelFile(file, f"labels in {suffix}", False) if suffix == ".mat" or LABEL_NAME.search(file.stem) else None
        )
    head = _read_head(file)
    if suffix == ".json" and COCO_KEYS.match(head):
        return LabelFile(file, "COCO's format", True)
    if suffix == ".xml" and "<annotation" in head:
        return LabelFile(file, "Pascal VOC's or CVAT's format", True)
    if suffix == ".txt" and (file.stem in stems or file.parent.name == "labels"):
        is_boxes = is_yolo(file)
        return LabelFile(file, "YOLO's format" if is_boxes else "a text for each image", is_boxes)
    lines = [line for line in head.splitlines() if line.strip()]
    if suffix == ".txt" and images > 1 and len(lines) == images and all(len(line.split()) == 1 for line in lines):
        is_list = not tokens.isdisjoint(Path(line).name for line in lines)
        return None if is_list else LabelFile(file, "a label for each image", False)
    if suffix == ".json" and (file.stem in stems or "createml" in file.name):
        return LabelFile(file, "labels of one image" if file.stem in stems else "CreateML's format", True)
    mentions = sum(not tokens.isdisjoint(TOKEN_SEPARATORS.split(line)) for line in lines)
    if not mentions or (suffix == ".txt" and all(len(line.split()) == 1 and "," not in line for line in lines)):
        return None
    has_boxes = bool(lines) and {"xmin", "bbox"} & set(TOKEN_SEPARATORS.split(lines[0].lower()))
    return LabelFile(file, "a table of boxes" if has_boxes else "a table that names the images", bool(has_boxes))


def _read_head(file: Path, count: int = HEAD_BYTES) -> str:
    if not file.is_file():  # reading a pipe would block
        return ""
    try:
        with file.open("rb") as stream:
            return stream.read(count).decode("utf-8-sig", "replace")
    except OSError:
        return ""


ENTRY_POINT_GROUP = "dyno.data"


@dataclass(frozen=True)
class ScanRequest:
    """A request for a listing of images.

    `calibration` is the number of calibration images to choose. With `train` training images are listed too. The model
    detects `objects` and `needs` masks or keypoints as well as boxes, or it classifies into `outputs` classes (0:
    unknown). `set_aside`: test images may serve for calibration if there are no training images. `skip_missing`: images
    that are listed but missing are left out, with a warning.
    """

    calibration: int = CALIBRATION_IMAGES
    seed: int = 0
    train: bool = False
    objects: bool = False
    needs: str = ""
    outputs: int = 0
    set_aside: bool = False
    skip_missing: bool = False


class DataFormat(ABC):
    """A format of data sets.

    `described` is its name in messages. `suffixes` are those of files accepted in place of a folder. `labels` is the
    kind of its labels: `classes` of images, `objects` in them, or "" without labels. A `fallback` is used only if no
    other format fits.
    """

    name: str = ""
    described: str = ""
    suffixes: tuple[str, ...] = ()
    labels: str = ""
    fallback: bool = False

    @abstractmethod
    def fits(self, path: Path) -> bool:
        """Return whether the path is a data set of this format: a folder, or a file with one of the suffixes."""

    def describe(self, path: Path) -> str:
        """Return words after "is" on a path that `fits`: of a file only the suffix was looked at."""
        return f"read in {self.described} as a {path.suffix} file" if path.is_file() else f"in {self.described}"

    @abstractmethod
    def scan(self, path: Path, request: ScanRequest) -> Listing:
        """List its images; raise `UserError` with one line."""


@cache
def list_formats() -> dict[str, DataFormat]:
    """Return all formats of data sets by name."""
    return plugins.list_declared(sys.modules[__package__], DataFormat, ENTRY_POINT_GROUP)  # type: ignore[type-abstract]


def format_of(path: Path) -> DataFormat:
    """Return the format of the data set at the path; plug-ins take precedence over Dyno's own.

    Raises `UserError` if two formats fit, if no format fits, or if only a format fits that would overlook labels.
    """
    path, every_format = Path(path), list_formats().values()
    if not path.exists():
        raise UserError(f"no data folder {path}")
    try:
        matches = [f for f in every_format if f.fits(path)]
        matches = [f for f in matches if not f.fallback] or matches
        matches = [f for f in matches if not type(f).__module__.startswith("dyno.")] or matches
        if matches and matches[0].fallback:
            refuse_labels(path, is_class_folders=matches[0].labels == "classes")
    except PermissionError as e:
        raise UserError(f"{e.filename} can't be listed: permission denied") from e
    if not matches:
        files = ", ".join(f"a file in {f.described} ({f.suffixes[0]})" for f in every_format if f.suffixes)
        raise UserError(f"{path} is not a folder, nor {files}")
    if len(matches) > 1:
        descriptions, files = (
            " and ".join(parts) for parts in zip(*((f.described, f.suffixes[0]) for f in matches), strict=True)
        )
        raise UserError(f"{path} is in {descriptions}; give the file of the one to use ({files})")
    return matches[0]
