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
    if not label.is_file() and (target := _label_place(image.resolve())).is_file():
        return target
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
    misses, repeats = 0, 0
    for row, photo in enumerate(photos):
        size, file = sizes[row], find_label_file(photo.path)
        if photo.split != "test" or size is None:
            continue
        if not file.is_file():
            misses += 1
            continue
        lines = _read_lines(file)
        line_numbers = {line: number for number, line in reversed(lines)}
        repeats += len(lines) - len(line_numbers)
        for line, number in sorted(line_numbers.items(), key=lambda item: item[1]):
            origin = f"{name_below(file, folder)}, line {number}"
            kind, annotation = _parse_object(line, labels, size, origin)
            labels.add(row, annotation)
            if kinds.setdefault(kind, origin) and len(kinds) > 1:
                raise UserError(f"boxes and polygons are mixed: {kinds['box']} is a box, {kinds['polygon']} a polygon")
    if misses:
        clause = "1 image without a label file counts" if misses == 1 else f"{misses} images without a label file count"
        labels.warnings.append(f"{clause} as background")
    if repeats:
        clause = "1 line is a duplicate" if repeats == 1 else f"{repeats} lines are duplicates"
        labels.warnings.append(f"{clause} within a file: each counts once")
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


def _parse_object(line: str, labels: Labels, size: tuple[int, int], origin: str) -> tuple[str, Annotation]:
    try:
        first, *rest = (float(number) for number in line.split())
    except ValueError:
        raise UserError(f"{origin}: {line[:60]!r} is not a row of numbers") from None
    if not first.is_integer() or not 0 <= first < len(labels.classes):
        raise UserError(f"{origin}: there is no class {first:g}; the {len(labels.classes)} classes are numbered from 0")
    annotation: Annotation = {"category_id": int(first), "iscrowd": 0}
    height, width = size
    if labels.keypoints:
        return "box", annotation | _parse_pose(rest, labels.keypoints, size, origin)
    if len(rest) == 4:
        box = _parse_box(rest, size, origin)
        return "box", annotation | {"bbox": box, "area": box[2] * box[3]}
    if len(rest) == 5:
        raise UserError(
            f"{origin}: 6 numbers are a prediction with its confidence, not a label; give a class and a box"
        )
    polygon = check_polygon([v * (height if i % 2 else width) for i, v in enumerate(rest)], size, origin)
    xs, ys = polygon[::2], polygon[1::2]
    box = check_box((min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)), size, origin)
    return "polygon", annotation | {"bbox": box, "area": compute_polygon_area(polygon), "segmentation": [polygon]}


def _parse_box(shares: list[float], size: tuple[int, int], origin: str) -> list[float]:
    x, y, w, h = shares
    height, width = size
    return check_box(((x - w / 2) * width, (y - h / 2) * height, w * width, h * height), size, origin)


def _parse_pose(rest: list[float], shape: tuple[int, ...], size: tuple[int, int], origin: str) -> Annotation:
    """Parse box and keypoints; a point with two values is visible unless it lies left of or above the image."""
    points, values = shape
    if len(rest) != 4 + points * values:
        raise UserError(
            f"{origin}: {len(rest) - 4} values after the box; {points} keypoints of {values} are needed; "
            "correct the line, or kpt_shape in data.yaml"
        )
    height, width = size
    box, keypoints = _parse_box(rest[:4], size, origin), []
    for start in range(4, len(rest), values):
        x, y = rest[start], rest[start + 1]
        visibility = rest[start + 2] if values == 3 else 2.0 * (x >= 0 and y >= 0)
        is_outside = not all(map(math.isfinite, (x, y, visibility)))
        is_outside = is_outside or x * width > width + MAX_OVERHANG_PX or y * height > height + MAX_OVERHANG_PX
        if is_outside or (visibility and (x * width < -MAX_OVERHANG_PX or y * height < -MAX_OVERHANG_PX)):
            raise UserError(f"{origin}: keypoint {(start - 4) // values} at ({x:g}, {y:g}) lies outside the image")
        keypoints += [x * width, y * height, int(visibility)] if visibility else [0.0, 0.0, 0]
    visible_points = sum(1 for visibility in keypoints[2::3] if visibility > 0)
    area = box[2] * box[3] * BODY_SHARE
    return {"bbox": box, "area": area, "keypoints": keypoints, "num_keypoints": visible_points}


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
        folders = [path / "labels", *(path / split / "labels" for split in (*TEST_SPLITS, "train"))]
        first_labels = (next(labels.rglob("*.txt"), None) for labels in folders if (labels.parent / "images").is_dir())
        return any(file is not None for file in first_labels) or _has_labels(path)

    def scan(self, path: Path, request: ScanRequest) -> Listing:
        """List its images; missing training images are a warning if calibration images are requested."""
        description = (
            _from_folders(path) if path.is_dir() and _find_yaml(path) is None else _from_yaml(_find_yaml(path) or path)
        )
        test = [Photo(file, name_below(file, description.folder), -1, "test") for file in description.test]
        labels = {photo.path: find_label_file(photo.path) for photo in test}
        label_files = [label for label in labels.values() if label.is_file()]
        if not label_files:
            raise UserError(f"the {len(test)} images in {path} have no label files, e.g. {labels[test[0].path]}")
        _check_orphans(description.folder, labels)
        photos = test + sample_calibration(description.train, description.folder, request.calibration, request.seed)
        if not description.names:
            count = max(request.outputs, count_classes(label_files))
            folders = dict.fromkeys([description.folder, *(label.parent for label in label_files)])
            names, name_files = _read_names([folder / name for folder in folders for name in NON_LABEL_FILES], count)
            description = dataclasses.replace(description, names=names, sources=name_files)
        name = clean_name(path.name if path.is_dir() else path.parent.name)

        def annotate_photos(photos: list[Photo], sizes: Sizes) -> Annotations:
            return read_labels(photos, sizes, description.names, description.keypoints, description.folder, warnings)

        sources = [*description.sources, *label_files]
        warnings = [description.folder_warning] if description.folder_warning else []
        if description.calibration_warning and request.calibration and (description.train or request.set_aside):
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
    images = sorted(file for file in folder.iterdir() if is_image(file.name) and not is_system(file.name))[
        :SAMPLED_IMAGES
    ]
    return any(is_yolo(find_label_file(file)) for file in images)


def _find_yaml(path: Path) -> Path | None:
    """Return the folder's data.yaml, or its only YAML file."""
    if path.is_file():
        return path
    files = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
    data_files = [file for file in files if file.stem == "data"]
    return (data_files or files)[0] if data_files or len(files) == 1 else None


def _from_yaml(file: Path) -> _Description:
    yaml = load_library("yaml", "YOLO's format")
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {file}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # invalid dates; unbalanced brackets
        raise UserError(f"{file} is not valid YAML: {' '.join(str(e).split())}") from e
    if isinstance(config, dict) and config.get("names") is None and type(config.get("nc")) is int:
        config["names"] = [str(i) for i in range(config["nc"])]
    if not isinstance(config, dict) or not config.get("names"):
        raise UserError(f"{file} names no classes; write names: [one, two]")
    names = config["names"]
    if isinstance(names, dict):
        # ultralytics reads numbers in quotes, too.
        names = {int(key) if str(key).isdecimal() else key: name for key, name in names.items()}
        if set(names) != set(range(len(names))):
            raise UserError(f"{file}: the classes in names are not numbered from 0 to {len(names) - 1}")
        names = [names[i] for i in range(len(names))]
    if not isinstance(names, list):
        raise UserError(f"{file}: names is {names!r}, not a list of classes; write names: [one, two]")
    if (count := config.get("nc", len(names))) != len(names):
        raise UserError(f"{file}: nc is {count!r}, but names has {add_noun(len(names), 'class', 'classes')}")
    root, folder_warning = _find_root(file, config)
    split = next((split for split in TEST_SPLITS if config.get(split)), None)
    if split is None:
        raise UserError(f"{file} has neither val nor test; add the folder of the test images as val")
    test, problem = _list_split(root, config[split])
    if problem:
        raise UserError(f"{file}: {problem}")
    train, calibration_warning = _list_split(root, config["train"]) if config.get("train") else ([], "")
    train = sorted(set(train) - set(test))
    if calibration_warning:
        consequence = "" if train else "; calibration images are taken from the test images"
        calibration_warning = f"{file.name}, train: {calibration_warning}{consequence}"
    classes = [clean_name(str(name)) for name in names]
    return _Description(
        make_absolute(file.parent),
        classes,
        _parse_shape(file, config),
        test,
        train,
        [file],
        calibration_warning,
        folder_warning,
    )


def _parse_shape(file: Path, config: dict[str, Any]) -> tuple[int, ...]:
    shape = config.get("kpt_shape") or ()
    is_pair = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    if shape and not (is_pair and shape[0] > 0 and shape[1] in (2, 3)):
        raise UserError(f"{file}: kpt_shape is {shape!r}, not [number of keypoints, 2 or 3]")
    return tuple(int(n) for n in shape)


def _find_root(file: Path, config: dict[str, Any]) -> tuple[Path, str]:
    """Return the base of the paths in data.yaml, and a warning if the folder in its `path` is missing.

    `path` may be relative to the file's folder or, as in ultralytics, to the working directory. If it is missing, as in
    a moved data set, the file's folder is the base.
    """
    base, path = make_absolute(file.parent), config.get("path")
    if not path:
        return base, ""
    names = str(path), str(path).replace("\\", "/")
    root = next((folder for name in names for folder in (base / name, Path.cwd() / name) if folder.is_dir()), None)
    if root is not None:
        return make_absolute(root), ""
    return base, f"{file.name}: there is no folder {path} (path); the images are taken from the file's folder"


def _list_split(root: Path, entries: Any) -> tuple[list[Path], str]:
    """List the images of a split: a folder, a text file that lists them, or several of these.

    The second value is the problem if an entry or all images are missing, else "".
    """
    paths: list[Path] = []
    entries, problem = entries if isinstance(entries, list) else [entries], ""
    for entry in entries:
        # Some tools write ../valid/images or NAME/valid/images for images in the folder NAME, or backslashes (Windows).
        names = [str(entry), str(entry).replace("\\", "/")]
        names += [name.removeprefix(prefix) for name in names for prefix in ("../", f"{root.name}/")]
        candidates = [root / name for name in names]
        path = next((make_absolute(path) for path in candidates if path.exists()), None)
        if path is not None:
            paths += find_images(path) if path.is_dir() else _in_text(path, root)
        else:
            problem = problem or f"there is no {candidates[0]}"
    if not paths:
        problem = problem or f"no images in {', '.join(map(str, entries))}"
    return sorted(set(paths)), problem


def _in_text(file: Path, root: Path) -> list[Path]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        raise UserError(f"{file} is not a list of images; it needs one file name per line, in UTF-8") from e
    lines = [line.replace("\\", "/") for line in lines]
    bases = file.parent, root, Path.cwd()
    paths = [next((base / line for base in bases if (base / line).is_file()), root / line) for line in lines]
    if missing_paths := [path for path in paths if not path.is_file() or not is_image(path.name)]:
        raise UserError(f"{len(missing_paths)} of {len(paths)} images in {file} are missing, e.g. {missing_paths[0]}")
    return [make_absolute(path) for path in paths]


def _from_folders(folder: Path) -> _Description:
    """Find the images in images/val or val/images, with labels in parallel; in images/ if there are no splits."""
    folder = make_absolute(folder)

    def images_of(*splits: str) -> list[Path]:
        for split in splits:
            for root in (folder / "images" / split, folder / split / "images"):
                if root.is_dir() and (paths := find_images(root)):
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
    image_folders = {label.parent: image.parent for image, label in labels.items() if "labels" in label.parts}
    for label_folder, image_folder in sorted(image_folders.items()):
        image_stems = {image.stem for image in image_folder.iterdir() if is_image(image.name)}
        files = sorted(file for file in label_folder.glob("*.txt") if not is_system(file.name))
        orphans = [file for file in files if file.stem not in image_stems and file.name not in NON_LABEL_FILES]
        if orphans:
            more = f" (and {len(orphans) - 1} more)" if len(orphans) > 1 else ""
            raise UserError(f"there is no image for the label file {name_below(orphans[0], folder)}{more}")
