"""YOLO's format: a text file of labels per image, in labels/ for an image in images/.

data.yaml has the names of the classes and the places of the images; see https://docs.ultralytics.com/datasets/. Without
it, folders named images and labels are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dyno.data.boxes import MAX_OVERHANG_PX, Annotation, Labels, check_box, check_polygon, compute_polygon_area
from dyno.data.data_format import DataFormat, ScanRequest, is_yolo
from dyno.data.photos import (
    Annotations,
    Listing,
    Photo,
    Sizes,
    clean_name,
    find_images,
    is_image,
    is_system,
    name_below,
    sample_calibration,
)
from dyno.worker.extras import load_library
from dyno.worker.spec import UserError, add_noun, make_absolute

# A line of a YOLO label file: a class and a box, a polygon, or a box and keypoints, as shares of the image's sides.

MAX_CLASSES = 9_999  # largest class number in label files without a list of names
BODY_SHARE = 0.53  # a body's mean share of its box in COCO: scales the area of keypoints without masks


def find_label_file(image: Path) -> Path:
    """Return the path of an image's label file: labels/ in place of the last images/, else next to the image.

    For a link, the target's label file is tried too.
    """
    label = _label_place(image)
    if not label.is_file() and (real := _label_place(image.resolve())).is_file():
        return real
    return label


def _label_place(image: Path) -> Path:
    parts = list(image.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "images":
            parts[i] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def read_labels(
    photos: list[Photo],
    sizes: Sizes,
    classes: list[str],
    keypoints: tuple[int, ...],
    folder: Path,
    warnings: Sequence[str],
) -> Annotations:
    """Read the label files of the test images; an image without one is background. `warnings` precede new ones."""
    names = [f"point {i}" for i in range(keypoints[0])] if keypoints else []
    labels = Labels(photos, sizes, classes, keypoints, names, warnings=list(warnings))
    kinds: dict[str, str] = {}
    without, twice = 0, 0
    for row, photo in enumerate(photos):
        size, file = sizes[row], find_label_file(photo.path)
        if photo.split != "test" or size is None:
            continue
        if not file.is_file():
            without += 1
            continue
        lines = _read_lines(file)
        once = {line: number for number, line in reversed(lines)}
        twice += len(lines) - len(once)
        for line, number in sorted(once.items(), key=lambda item: item[1]):
            where = f"{name_below(file, folder)}, line {number}"
            kind, annotation = _parse_object(line, labels, size, where)
            labels.add(row, annotation)
            if kinds.setdefault(kind, where) and len(kinds) > 1:
                raise UserError(f"boxes and polygons are mixed: {kinds['box']} is a box, {kinds['polygon']} a polygon")
    if without:
        are = "1 image without a label file counts" if without == 1 else f"{without} images without a label file count"
        labels.warnings.append(f"{are} as background")
    if twice:
        are = "1 line is a duplicate" if twice == 1 else f"{twice} lines are duplicates"
        labels.warnings.append(f"{are} within a file: each counts once")
    return labels.decide_kinds()


def count_classes(files: list[Path]) -> int:
    """Return the highest class in the files plus one; invalid lines are reported when they are read."""
    firsts = ((file, line.split()[0]) for file in files for _, line in _read_lines(file))
    highest, file = max(((int(first), file) for file, first in firsts if first.isdecimal()), default=(0, Path()))
    if highest > MAX_CLASSES:
        raise UserError(f"{file} has an object of class {highest}; name that many classes in a data.yaml")
    return highest + 1


def _read_lines(file: Path) -> list[tuple[int, str]]:
    lines = file.read_text("utf-8-sig", "replace").splitlines()
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_object(line: str, labels: Labels, size: tuple[int, int], where: str) -> tuple[str, Annotation]:
    try:
        first, *rest = (float(number) for number in line.split())
    except ValueError:
        raise UserError(f"{where}: {line[:60]!r} is not a row of numbers") from None
    if not first.is_integer() or not 0 <= first < len(labels.classes):
        raise UserError(f"{where}: there is no class {first:g}; the {len(labels.classes)} classes are numbered from 0")
    annotation: Annotation = {"category_id": int(first), "iscrowd": 0}
    height, width = size
    if labels.keypoints:
        return "box", annotation | _parse_pose(rest, labels.keypoints, size, where)
    if len(rest) == 4:
        box = _parse_box(rest, size, where)
        return "box", annotation | {"bbox": box, "area": box[2] * box[3]}
    if len(rest) == 5:
        raise UserError(f"{where}: 6 numbers are a prediction with its confidence, not a label; give a class and a box")
    polygon = check_polygon([v * (height if i % 2 else width) for i, v in enumerate(rest)], size, where)
    xs, ys = polygon[::2], polygon[1::2]
    box = check_box((min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)), size, where)
    return "polygon", annotation | {"bbox": box, "area": compute_polygon_area(polygon), "segmentation": [polygon]}


def _parse_box(shares: list[float], size: tuple[int, int], where: str) -> list[float]:
    x, y, w, h = shares
    height, width = size
    return check_box(((x - w / 2) * width, (y - h / 2) * height, w * width, h * height), size, where)


def _parse_pose(rest: list[float], shape: tuple[int, ...], size: tuple[int, int], where: str) -> Annotation:
    """Parse box and keypoints; a point with two values is visible unless it lies left of or above the image."""
    points, values = shape
    if len(rest) != 4 + points * values:
        raise UserError(
            f"{where}: {len(rest) - 4} values after the box; {points} keypoints of {values} are needed; "
            "correct the line, or kpt_shape in data.yaml"
        )
    height, width = size
    box, placed = _parse_box(rest[:4], size, where), []
    for start in range(4, len(rest), values):
        x, y = rest[start], rest[start + 1]
        visible = rest[start + 2] if values == 3 else 2.0 * (x >= 0 and y >= 0)
        outside = not all(map(math.isfinite, (x, y, visible)))
        outside = outside or x * width > width + MAX_OVERHANG_PX or y * height > height + MAX_OVERHANG_PX
        if outside or (visible and (x * width < -MAX_OVERHANG_PX or y * height < -MAX_OVERHANG_PX)):
            raise UserError(f"{where}: keypoint {(start - 4) // values} at ({x:g}, {y:g}) lies outside the image")
        placed += [x * width, y * height, int(visible)] if visible else [0.0, 0.0, 0]
    visible_points = sum(1 for visible in placed[2::3] if visible > 0)
    area = box[2] * box[3] * BODY_SHARE
    return {"bbox": box, "area": area, "keypoints": placed, "num_keypoints": visible_points}


TEST_SPLITS = ("val", "valid", "validation", "test")  # splits with test images
SAMPLED_IMAGES = 20  # images per folder checked for label files
NON_LABEL_FILES = ("classes.txt",)  # files that labelling tools store with the labels


@dataclass(frozen=True)
class _Description:
    """A data set's description: by data.yaml, or by its folders."""

    folder: Path
    names: list[str] = field(default_factory=list)
    keypoints: tuple[int, ...] = ()
    test: list[Path] = field(default_factory=list)
    train: list[Path] = field(default_factory=list)
    sources: list[Path] = field(default_factory=list)
    calibration_warning: str = ""  # warning that training images can't calibrate
    folder_warning: str = ""  # warning that data.yaml's folder is missing


class Yolo(DataFormat):
    """A data set described by data.yaml, or by a folder with images/ and labels/."""

    name = "yolo"
    described = "YOLO's format"
    suffixes = (".yaml", ".yml")
    labels = "objects"

    def fits(self, path: Path) -> bool:
        """Return whether there is a data.yaml, or label files in YOLO's places (also next to images alone)."""
        if not path.is_dir():
            return path.suffix in self.suffixes
        if any(path.glob("data.y*ml")):
            return True
        beside = [path / "labels", *(path / split / "labels" for split in (*TEST_SPLITS, "train"))]
        first_labels = (next(labels.rglob("*.txt"), None) for labels in beside if (labels.parent / "images").is_dir())
        return any(file is not None for file in first_labels) or _has_labels(path)

    def scan(self, path: Path, wanted: ScanRequest) -> Listing:
        """List its images; missing training images are a warning if calibration images are requested."""
        description = (
            _from_folders(path) if path.is_dir() and _find_yaml(path) is None else _from_yaml(_find_yaml(path) or path)
        )
        test = [Photo(file, name_below(file, description.folder), -1, "test") for file in description.test]
        labels = {photo.path: find_label_file(photo.path) for photo in test}
        present = [label for label in labels.values() if label.is_file()]
        if not present:
            raise UserError(f"the {len(test)} images in {path} have no label files, e.g. {labels[test[0].path]}")
        _check_orphans(description.folder, labels)
        photos = test + sample_calibration(description.train, description.folder, wanted.calibration, wanted.seed)
        if not description.names:
            count = max(wanted.outputs, count_classes(present))
            beside = dict.fromkeys([description.folder, *(label.parent for label in present)])
            listed, found = _read_names([folder / name for folder in beside for name in NON_LABEL_FILES], count)
            description = dataclasses.replace(description, names=listed, sources=found)
        name = clean_name(path.name if path.is_dir() else path.parent.name)

        def annotate_photos(photos: list[Photo], sizes: Sizes) -> Annotations:
            return read_labels(photos, sizes, description.names, description.keypoints, description.folder, warnings)

        sources = [*description.sources, *present]
        warnings = [description.folder_warning] if description.folder_warning else []
        if description.calibration_warning and wanted.calibration and (description.train or wanted.set_aside):
            warnings.append(description.calibration_warning)
        return Listing(name, description.names, photos, sources=sources, annotate=annotate_photos)


YOLO = Yolo()


def _read_names(files: list[Path], count: int) -> tuple[list[str], list[Path]]:
    """Return `count` class names and their file: the first one with `count` lines; else numbers and no file."""
    for file in filter(Path.is_file, files):
        names = [clean_name(line.strip()) for line in file.read_text("utf-8-sig", "replace").splitlines()]
        names = [name for name in names if name]
        if len(names) == count:
            return names, [file]
    return [str(i) for i in range(count)], []


def _has_labels(folder: Path) -> bool:
    """Return whether one of the first images directly in the folder has a label file."""
    first = sorted(file for file in folder.iterdir() if is_image(file.name) and not is_system(file.name))[
        :SAMPLED_IMAGES
    ]
    return any(is_yolo(find_label_file(file)) for file in first)


def _find_yaml(path: Path) -> Path | None:
    """Return the folder's data.yaml, or its only YAML file."""
    if path.is_file():
        return path
    files = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
    named = [file for file in files if file.stem == "data"]
    return (named or files)[0] if named or len(files) == 1 else None


def _from_yaml(file: Path) -> _Description:
    yaml = load_library("yaml", "YOLO's format")
    try:
        about = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {file}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # invalid dates; unbalanced brackets
        raise UserError(f"{file} is not valid YAML: {' '.join(str(e).split())}") from e
    if isinstance(about, dict) and about.get("names") is None and type(about.get("nc")) is int:
        about["names"] = [str(i) for i in range(about["nc"])]
    if not isinstance(about, dict) or not about.get("names"):
        raise UserError(f"{file} names no classes; write names: [one, two]")
    names = about["names"]
    if isinstance(names, dict):
        # ultralytics reads numbers in quotes, too.
        names = {int(key) if str(key).isdecimal() else key: name for key, name in names.items()}
        if set(names) != set(range(len(names))):
            raise UserError(f"{file}: the classes in names are not numbered from 0 to {len(names) - 1}")
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list):
        raise UserError(f"{file}: names is {names!r}, not a list of classes; write names: [one, two]")
    if (count := about.get("nc", len(names))) != len(names):
        raise UserError(f"{file}: nc is {count!r}, but names has {add_noun(len(names), 'class', 'classes')}")
    root, moved = _find_root(file, about)
    split = next((split for split in TEST_SPLITS if about.get(split)), None)
    if split is None:
        raise UserError(f"{file} has neither val nor test; add the folder of the test images as val")
    test, wrong = _list_split(root, about[split])
    if wrong:
        raise UserError(f"{file}: {wrong}")
    train, lost = _list_split(root, about["train"]) if about.get("train") else ([], "")
    train = sorted(set(train) - set(test))
    if lost:
        taken = "" if train else "; calibration images are taken from the test images"
        lost = f"{file.name}, train: {lost}{taken}"
    classes = [clean_name(str(name)) for name in names]
    return _Description(
        make_absolute(file.parent), classes, _parse_shape(file, about), test, train, [file], lost, moved
    )


def _parse_shape(file: Path, about: dict[str, Any]) -> tuple[int, ...]:
    shape = about.get("kpt_shape") or ()
    whole = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    if shape and not (whole and shape[0] > 0 and shape[1] in (2, 3)):
        raise UserError(f"{file}: kpt_shape is {shape!r}, not [number of keypoints, 2 or 3]")
    return tuple(int(n) for n in shape)


def _find_root(file: Path, about: dict[str, Any]) -> tuple[Path, str]:
    """Return the base of the paths in data.yaml, and a warning if the folder in its `path` is missing.

    `path` may be relative to the file's folder or, as in ultralytics, to the working directory. If it is missing, as in
    a moved data set, the file's folder is the base.
    """
    own, path = make_absolute(file.parent), about.get("path")
    if not path:
        return own, ""
    names = str(path), str(path).replace("\\", "/")
    root = next((place for name in names for place in (own / name, Path.cwd() / name) if place.is_dir()), None)
    if root is not None:
        return make_absolute(root), ""
    return own, f"{file.name}: there is no folder {path} (path); the images are taken from the file's folder"


def _list_split(root: Path, entries: Any) -> tuple[list[Path], str]:
    """List the images of a split: a folder, a text file that lists them, or several of these.

    The second value is the problem if an entry or all images are missing, else "".
    """
    paths: list[Path] = []
    entries, wrong = entries if isinstance(entries, list) else [entries], ""
    for entry in entries:
        # Some tools write ../valid/images or NAME/valid/images for images in the folder NAME, or backslashes (Windows).
        names = [str(entry), str(entry).replace("\\", "/")]
        names += [name.removeprefix(above) for name in names for above in ("../", f"{root.name}/")]
        places = [root / name for name in names]
        place = next((make_absolute(place) for place in places if place.exists()), None)
        if place is not None:
            paths += find_images(place) if place.is_dir() else _in_text(place, root)
        else:
            wrong = wrong or f"there is no {places[0]}"
    if not paths:
        wrong = wrong or f"no images in {', '.join(map(str, entries))}"
    return sorted(set(paths)), wrong


def _in_text(file: Path, root: Path) -> list[Path]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        raise UserError(f"{file} is not a list of images; it needs one file name per line, in UTF-8") from e
    lines = [line.replace("\\", "/") for line in lines]
    bases = file.parent, root, Path.cwd()
    paths = [next((base / line for base in bases if (base / line).is_file()), root / line) for line in lines]
    if lost := [path for path in paths if not path.is_file() or not is_image(path.name)]:
        raise UserError(f"{len(lost)} of {len(paths)} images in {file} are missing, e.g. {lost[0]}")
    return [make_absolute(path) for path in paths]


def _from_folders(folder: Path) -> _Description:
    """Find the images in images/val or val/images, with labels in parallel; in images/ if there are no splits."""
    folder = make_absolute(folder)

    def images_of(*splits: str) -> list[Path]:
        for split in splits:
            for place in (folder / "images" / split, folder / split / "images"):
                if place.is_dir() and (paths := find_images(place)):
                    return paths
        return []

    test, train = images_of(*TEST_SPLITS), images_of("train")
    if not test and train:
        raise UserError(f"{folder} has training images but no test images; add images/val and labels/val")
    test = test or find_images(folder / "images") or (find_images(folder) if _has_labels(folder) else [])
    if not test:
        raise UserError(f"no images in {folder / 'images'}")
    return _Description(folder, test=test, train=train)


def _check_orphans(folder: Path, labels: dict[Path, Path]) -> None:
    """Refuse label files without an image; `labels` has the label file of each image."""
    places = {label.parent: image.parent for image, label in labels.items() if "labels" in label.parts}
    for place, beside in sorted(places.items()):
        pictured = {image.stem for image in beside.iterdir() if is_image(image.name)}
        files = sorted(file for file in place.glob("*.txt") if not is_system(file.name))
        orphans = [file for file in files if file.stem not in pictured and file.name not in NON_LABEL_FILES]
        if orphans:
            more = f" (and {len(orphans) - 1} more)" if len(orphans) > 1 else ""
            raise UserError(f"there is no image for the label file {name_below(orphans[0], folder)}{more}")
