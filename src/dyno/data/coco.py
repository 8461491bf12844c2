"""COCO's format: one JSON file with images, categories and annotations, next to the folder of the images.

The format is https://cocodataset.org/#format-data; categories become classes in the order of their ids.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from dyno.data.boxes import Annotation, Labels, check_box, check_keypoints, check_polygon, compute_polygon_area
from dyno.data.data_format import DataFormat, ScanRequest, is_coco
from dyno.data.photos import (
    Annotations,
    Listing,
    Photo,
    Sizes,
    clean_name,
    find_image_folder,
    find_images,
    is_system,
    name_below,
    sample_calibration,
    without_missing,
)
from dyno.worker.spec import UserError

TEST_SPLITS = ("val", "test")  # splits with annotations; COCO's own test images have none
SPLIT_FOLDERS = ("validation", "valid", "val", "test")
BACKGROUND_NAMES = ("background", "__background__", "_background_")
OTHER_ANNOTATIONS = ("captions", "image_info", "panoptic", "stuff")  # COCO files without objects
INSTANCES_PREFIX, KEYPOINTS_PREFIX = "instances", "person_keypoints"  # prefixes of file names
ID_FIELDS = ("id", "image_id", "category_id")
MAX_COORDINATE = 1e12  # larger values are corrupt


class Coco(DataFormat):
    """An annotation file, or a folder that contains such files or annotations/; `needs` chooses between two files."""

    name = "coco"
    described = "COCO's format"
    suffixes = (".json",)
    labels = "objects"

    def fits(self, path: Path) -> bool:
        return bool(_find_files(path)) if path.is_dir() else path.suffix in self.suffixes

    def scan(self, path: Path, wanted: ScanRequest) -> Listing:
        file = path if path.is_file() else choose_file(path, wanted.needs)
        about = _read_file(file)
        about.leave_out_roots(wanted.outputs)
        names = [image["file_name"] for image in about.images]
        folder, _ = find_image_folder(file, names)
        shown = path if path.is_dir() else folder
        photos = [Photo(folder / name, clean_name(name), -1, "test") for name in names]
        photos, missing = without_missing(photos, folder, file, wanted.skip_missing)
        about.notes += [missing] * bool(missing)
        photos += _choose_calibration(folder, shown, wanted.calibration, wanted.seed)
        name = clean_name(path.name if path.is_dir() else path.stem)
        return Listing(name, about.classes, photos, sources=[file], annotate=about.annotate)


COCO = Coco()


def _find_files(folder: Path) -> list[Path]:
    """Return the files in annotations/, under any name, else files with COCO's names or content.

    The latter are in the folder itself, or one in each split's folder, as from Roboflow.
    """
    for places in (("annotations",), ("",), (*SPLIT_FOLDERS, "train")):
        every = sorted(file for place in places for file in (folder / place).glob("*.json"))
        named = (INSTANCES_PREFIX, KEYPOINTS_PREFIX) if places != ("annotations",) else ""
        found = [file for file in every if not is_system(file.name) and (file.name.startswith(named) or is_coco(file))]
        if found:
            return found
    return []


def choose_file(folder: Path, needs: str) -> Path:
    """Choose the folder's annotation file for the task; raise `UserError` if several fit, or if no file has objects."""
    every = _find_files(folder)
    files = [file for file in every if not file.name.startswith(OTHER_ANNOTATIONS)]
    if not files:
        raise UserError(f"{every[0].parent} has no file with objects, only {every[0].name}; give the file to use")
    if len(files) == 1:
        return files[0]
    for split in TEST_SPLITS:
        here = [file for file in files if split in file.stem or file.parent.name.startswith(split)]
        first = KEYPOINTS_PREFIX if needs == "keypoints" else INSTANCES_PREFIX
        fitting = [file for file in here if file.name.startswith(first)] or here
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            files = fitting
            break
    named = ", ".join(name_below(file, files[0].parent) for file in files[:4])
    raise UserError(f"{files[0].parent} has several files ({named}); give the path of the one to use")


@dataclass
class _File:
    """An annotation file with checked tables."""

    path: Path
    images: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        return [clean_name(str(category["name"])) for category in self.categories]

    def leave_out_roots(self, outputs: int) -> None:
        """Leave out unannotated categories that only group others or are the background.

        This applies only if the network has one class for each remaining category. Any other category keeps its number,
        even if it is in no image.
        """
        used = {annotation.get("category_id") for annotation in self.annotations}
        groups = Counter(str(category.get("supercategory")) for category in self.categories)
        roots = [c for c in self.categories if c["id"] not in used and
                 (c["name"] in BACKGROUND_NAMES or
                  groups[c["name"]] > (c["name"] == c.get("supercategory")))]  # fmt: skip
        if roots and len(self.categories) - len(roots) == outputs:
            self.categories = [category for category in self.categories if category not in roots]
            named = ", ".join(repr(clean_name(str(category["name"]))) for category in roots)
            self.notes.append(
                f"{named} of {self.path.name} is left out: it has no annotation, and the network "
                f"has a class for each of the others"
            )

    def annotate(self, photos: list[Photo], sizes: Sizes) -> Annotations:
        rows = {photo.name: row for row, photo in enumerate(photos) if photo.split == "test"}
        row_of = {image["id"]: rows.get(clean_name(image["file_name"])) for image in self.images}
        class_of = {category["id"]: i for i, category in enumerate(self.categories)}
        self._check_sizes(rows, sizes)
        self._check_coordinates()
        names = self._find_keypoints()
        labels = Labels(photos, sizes, self.classes, (len(names), 3) if names else (), names)
        labels.warnings += self.notes
        described = [json.dumps({**a, "id": 0}, sort_keys=True) for a in self.annotations]
        if copies := len(described) - len(set(described)):
            labels.warnings.append(f"{copies} of {len(described)} annotations are duplicates, and each counts")
        for number, annotation in enumerate(self.annotations):
            where = f"{self.path.name}, annotation {annotation.get('id', number)}"
            row = _find_by_id(row_of, annotation, "image_id", "image", where)
            category = _find_by_id(class_of, annotation, "category_id", "category", where)
            if row is not None and (size := sizes[row]) is not None:
                where = f"{where} of {photos[row].name}"
                labels.add(row, _check_object(annotation, category, size, names, where))
        return labels.decide_kinds()

    def _check_sizes(self, rows: dict[str, int], sizes: Sizes) -> None:
        for image in self.images:
            row = rows.get(clean_name(image["file_name"]))
            size = sizes[row] if row is not None else None
            declared = (image.get("height"), image.get("width"))
            if size is not None and None not in declared and declared != size:
                real = f"{image['file_name']} is {size[1]} x {size[0]} pixels"
                turned = "; its EXIF orientation turns it, but labels must fit the upright image"
                raise UserError(
                    f"{real}, but {self.path.name} says {declared[1]} x {declared[0]}"
                    f"{turned if declared == size[::-1] else ''}"
                )

    def _check_coordinates(self) -> None:
        """Refuse boxes given as shares of the image or as two corners."""
        boxed = [a for a in self.annotations if _is_number_list(a.get("bbox")) and len(a["bbox"]) == 4]
        if boxed and all(min(a["bbox"]) >= 0 and max(a["bbox"]) <= 1 for a in boxed):
            raise UserError(f"{self.path.name}: all boxes lie within 0 and 1, as shares of the image; give pixels")
        plain = [a for a in boxed if not a.get("segmentation") and _is_number_list([a.get("area")])]
        if not plain:
            return
        x, y, third, fourth = np.array([a["bbox"] for a in plain], float).T
        areas = np.array([a["area"] for a in plain], float)
        by_corners = (third > x) & (fourth > y) & np.isclose(areas, (third - x) * (fourth - y), rtol=0.01)
        if by_corners.all() and not np.isclose(areas, third * fourth, rtol=0.01).any():
            raise UserError(f"{self.path.name}: by their areas all boxes are two corners; give [x, y, width, height]")

    def _find_keypoints(self) -> list[str]:
        """Return the first category's keypoint names; raise `UserError` if other categories have more or fewer."""
        used = {annotation.get("category_id") for annotation in self.annotations if annotation.get("keypoints")}
        named = {c["name"]: [str(n) for n in c["keypoints"]] for c in self.categories if c.get("keypoints")}
        named = {c["name"]: named[c["name"]] for c in self.categories if c["id"] in used and c["name"] in named}
        if len({len(points) for points in named.values()}) > 1:
            shown = ", ".join(f"{name}: {len(points)}" for name, points in named.items())
            raise UserError(f"{self.path.name}: classes have different numbers of keypoints ({shown})")
        return next(iter(named.values()), [])


def _read_file(file: Path) -> _File:
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise UserError(f"annotation file {file} is not a regular file; give a file")
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no annotation file {file}") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON: {e}") from e
    parts: dict[str, list[dict[str, Any]]] = {}
    for part, needed in (("images", ("id", "file_name")), ("categories", ("id", "name")), ("annotations", ())):
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise UserError(f"{file} is not in COCO's format: it has no list {part!r}")
        parts[part] = entries
        for number, item in enumerate(entries):
            if not isinstance(item, dict) or any(key not in item for key in needed):
                raise UserError(f"{file}: entry {number} of {part!r} lacks {' or '.join(needed) or 'its fields'}")
            # pandas writes integers as 1.0 in columns with gaps.
            item.update({k: int(v) for k in ID_FIELDS if isinstance(v := item.get(k), float) and v.is_integer()})
    if not parts["images"] or not parts["categories"]:
        raise UserError(f"{file} lists no {'images' if not parts['images'] else 'categories'}")
    for part in ("images", "categories"):
        ids = [item["id"] for item in parts[part]]
        if {type(id) for id in ids} not in ({int}, {str}):
            raise UserError(f"{file}: the ids of {part} are neither all numbers nor all strings")
        if len(set(ids)) < len(ids):
            raise UserError(f"{file}: two {part} have the same id")
    if not all(isinstance(image["file_name"], str) for image in parts["images"]):
        raise UserError(f"{file}: a file_name among its images is not a string")
    for image in parts["images"]:
        image["file_name"] = Path(image["file_name"].replace("\\", "/")).as_posix()  # ./a.png is a.png
    names = [image["file_name"] for image in parts["images"]]
    if twice := next((name for name, count in Counter(names).items() if count > 1), ""):
        raise UserError(f"{file} lists {twice} twice; list each image once, with one image_id for all its annotations")
    if any(not isinstance(category.get("keypoints", []), list) for category in parts["categories"]):
        raise UserError(f"{file}: the keypoints of a category are not a list of names")
    # Images are sorted by id too, as pycocotools ranks detections of equal score by it.
    images, categories = (sorted(parts[part], key=lambda item: item["id"]) for part in ("images", "categories"))
    return _File(file, images, categories, parts["annotations"])


def _choose_calibration(folder: Path, shown: Path, wanted: int, seed: int) -> list[Photo]:
    """Take calibration images from the training folder next to `folder`; annotations aren't needed."""
    for split in SPLIT_FOLDERS:
        beside = folder.with_name(folder.name.replace(split, "train"))
        if split in folder.name and beside.is_dir() and (paths := find_images(beside)):
            return sample_calibration(paths, shown, wanted, seed)
    return []


def _find_by_id(table: dict[Any, Any], annotation: Annotation, key: str, what: str, where: str) -> Any:
    value = annotation.get(key)
    if not isinstance(value, (int, str)) or value not in table:
        raise UserError(f"{where}: there is no {what} with id {value!r}")
    return table[value]


def _check_object(
    annotation: Annotation, category: int, size: tuple[int, int], names: list[str], where: str
) -> Annotation:
    box = annotation.get("bbox")
    if not _is_number_list(box) or len(box) != 4:
        raise UserError(f"{where}: bbox is {box!r}, not [x, y, width, height]")
    checked: Annotation = {"category_id": category, "bbox": check_box(box, size, where)}
    if (iscrowd := annotation.get("iscrowd") or 0) not in (0, 1):
        raise UserError(f"{where}: iscrowd is {iscrowd!r}, not 0 or 1")
    checked["iscrowd"] = int(iscrowd)
    mask = annotation.get("segmentation")
    if mask:
        checked["segmentation"] = _check_mask(mask, size, where)
    area = annotation.get("area")
    if area is not None and not (_is_number_list([area]) and area >= 0):
        raise UserError(f"{where}: area is {str(area)[:30]}, not a number of square pixels")
    checked["area"] = _compute_area(checked) if area is None else float(area)
    if names:
        points = annotation.get("keypoints") or [0] * (3 * len(names))
        if not _is_number_list(points) or len(points) != 3 * len(names):
            raise UserError(
                f"{where}: keypoints has {len(points)} values; {len(names)} keypoints need {3 * len(names)}"
            )
        checked["keypoints"] = check_keypoints(points, size, where)
        checked["num_keypoints"] = sum(1 for visible in points[2::3] if visible > 0)
    return checked


def _check_mask(mask: Any, size: tuple[int, int], where: str) -> Any:
    """Return the mask: polygons, or a run-length encoding of the image's size; raise `UserError` for others."""
    if isinstance(mask, dict):
        counts = mask.get("counts")
        runs = _unpack_runs(counts) if isinstance(counts, str) else counts if isinstance(counts, list) else []
        whole = all(type(run) is int and run >= 0 for run in runs) and sum(runs) == size[0] * size[1]
        if mask.get("size") != list(size) or not whole:
            raise UserError(f"{where}: the mask's run lengths don't fit an image of {size[1]} x {size[0]} pixels")
        return mask
    if not isinstance(mask, list) or not all(_is_number_list(points) for points in mask):
        raise UserError(f"{where}: segmentation is neither a list of polygons nor a run-length encoding")
    return [check_polygon(points, size, where) for points in mask]


def _unpack_runs(text: str) -> list[int]:
    """Unpack the run lengths of COCO's packed text; [-1] if invalid, as such a text made an evaluation hang.

    Each letter has five bits and a continuation bit. From the fourth length on, the difference from the second last
    length is stored.
    """
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - ord("0")
        if not 0 <= bits < 64:
            return [-1]
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        value -= (1 << shift) if bits & 16 else 0
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return [-1] if shift else runs


def _compute_area(annotation: Annotation) -> float:
    """Return the object's area in square pixels, for files without areas.

    It is the area of polygons or of run lengths; of the box for packed run lengths or without a mask.
    """
    mask = annotation.get("segmentation")
    if isinstance(mask, list):
        return sum(compute_polygon_area(points) for points in mask)
    if mask and isinstance(mask["counts"], list):
        return float(sum(mask["counts"][1::2]))
    return float(annotation["bbox"][2] * annotation["bbox"][3])


def _is_number_list(values: Any) -> TypeGuard[list[float]]:
    """Return whether these are finite numbers of a plausible size."""
    return isinstance(values, list) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < MAX_COORDINATE for v in values
    )
