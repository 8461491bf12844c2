"""COCO's format: one JSON file with images, categories and annotations, next to the folder of the images.

The format is https://cocodataset.org/#format-data; categories become classes in the order of their ids.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
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

    def scan(self, path: Path, request: ScanRequest) -> Listing:
        file = path if path.is_file() else choose_file(path, request.needs)
        coco_file = _read_file(file)
        coco_file.leave_out_roots(request.outputs)
        names = [image["file_name"] for image in coco_file.images]
        folder, _ = find_image_folder(file, names)
        base = path if path.is_dir() else folder
        photos = [Photo(folder / name, clean_name(name), -1, "test") for name in names]
        photos, warning = without_missing(photos, folder, file, request.skip_missing)
        coco_file.notes += [warning] * bool(warning)
        photos += _choose_calibration(folder, base, request.calibration, request.seed)
        name = clean_name(path.name if path.is_dir() else path.stem)
        return Listing(name, coco_file.classes, photos, sources=[file], annotate=coco_file.annotate)


COCO = Coco()


def _find_files(folder: Path) -> list[Path]:
    """Return the files in annotations/, under any name, else files with COCO's names or content.

    The latter are in the folder itself, or one in each split's folder, as from Roboflow.
    """
    for folder_names in (("annotations",), ("",), (*SPLIT_FOLDERS, "train")):
        files = sorted(file for folder_name in folder_names for file in (folder / folder_name).glob("*.json"))
        prefix = (INSTANCES_PREFIX, KEYPOINTS_PREFIX) if folder_names != ("annotations",) else ""
        hits = [file for file in files if not is_system(file.name) and (file.name.startswith(prefix) or is_coco(file))]
        if hits:
            return hits
    return []


def choose_file(folder: Path, needs: str) -> Path:
    """Choose the folder's annotation file for the task; raise `UserError` if several fit, or if no file has objects."""
    paths = _find_files(folder)
    files = [file for file in paths if not file.name.startswith(OTHER_ANNOTATIONS)]
    if not files:
        raise UserError(f"{paths[0].parent} has no file with objects, only {paths[0].name}; give the file to use")
    if len(files) == 1:
        return files[0]
    for split in TEST_SPLITS:
        split_files = [file for file in files if split in file.stem or file.parent.name.startswith(split)]
        prefix = KEYPOINTS_PREFIX if needs == "keypoints" else INSTANCES_PREFIX
        matches = [file for file in split_files if file.name.startswith(prefix)] or split_files
        if len(matches) == 1:
            return matches[0]
        if matches:
            files = matches
            break
    names = ", ".join(name_below(file, files[0].parent) for file in files[:4])
    raise UserError(f"{files[0].parent} has several files ({names}); give the path of the one to use")


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
        used_ids = _list_categories(self.annotations)
        groups = Counter(str(category.get("supercategory")) for category in self.categories)
        roots = [c for c in self.categories if c["id"] not in used_ids and
                 (c["name"] in BACKGROUND_NAMES or
                  groups[c["name"]] > (c["name"] == c.get("supercategory")))]  # fmt: skip
        if roots and len(self.categories) - len(roots) == outputs:
            self.categories = [category for category in self.categories if category not in roots]
            names = ", ".join(repr(clean_name(str(category["name"]))) for category in roots)
            self.notes.append(
                f"{names} of {self.path.name} is left out: it has no annotation, and the network "
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
        texts = [json.dumps({**a, "id": 0}, sort_keys=True) for a in self.annotations]
        if copies := len(texts) - len(set(texts)):
            labels.warnings.append(f"{copies} of {len(texts)} annotations are duplicates, and each counts")
        for index, annotation in enumerate(self.annotations):
            origin = f"{self.path.name}, annotation {annotation.get('id', index)}"
            row = _find_by_id(row_of, annotation, "image_id", "image", origin)
            category = _find_by_id(class_of, annotation, "category_id", "category", origin)
            if row is not None and (size := sizes[row]) is not None:
                origin = f"{origin} of {photos[row].name}"
                labels.add(row, _check_object(annotation, category, size, names, origin))
        return labels.decide_kinds()

    def _check_sizes(self, rows: dict[str, int], sizes: Sizes) -> None:
        for image in self.images:
            row = rows.get(clean_name(image["file_name"]))
            size = sizes[row] if row is not None else None
            declared = (image.get("height"), image.get("width"))
            if None not in declared and not _is_number_list([*declared]):
                sides = " x ".join(repr(side)[:30] for side in reversed(declared))
                raise UserError(
                    f"{self.path.name}: the size of {image['file_name']} is {sides}; give numbers of pixels"
                )
            if size is not None and None not in declared and declared != size:
                actual = f"{image['file_name']} is {size[1]} x {size[0]} pixels"
                orientation_note = "; its EXIF orientation turns it, but labels must fit the upright image"
                raise UserError(
                    f"{actual}, but {self.path.name} says {declared[1]} x {declared[0]}"
                    f"{orientation_note if declared == size[::-1] else ''}"
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
        is_corners = (third > x) & (fourth > y) & np.isclose(areas, (third - x) * (fourth - y), rtol=0.01)
        if is_corners.all() and not np.isclose(areas, third * fourth, rtol=0.01).any():
            raise UserError(f"{self.path.name}: by their areas all boxes are two corners; give [x, y, width, height]")

    def _find_keypoints(self) -> list[str]:
        """Return the first category's keypoint names; raise `UserError` if other categories have more or fewer."""
        used_ids = _list_categories(annotation for annotation in self.annotations if annotation.get("keypoints"))
        names = {c["name"]: [str(n) for n in c["keypoints"]] for c in self.categories if c.get("keypoints")}
        names = {c["name"]: names[c["name"]] for c in self.categories if c["id"] in used_ids and c["name"] in names}
        if len({len(points) for points in names.values()}) > 1:
            text = ", ".join(f"{name}: {len(points)}" for name, points in names.items())
            raise UserError(f"{self.path.name}: classes have different numbers of keypoints ({text})")
        return next(iter(names.values()), [])


def _read_file(file: Path) -> _File:
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise UserError(f"annotation file {file} is not a regular file; give a file")
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no annotation file {file}") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON: {e}") from e
    tables: dict[str, list[dict[str, Any]]] = {}
    for table, keys in (("images", ("id", "file_name")), ("categories", ("id", "name")), ("annotations", ())):
        entries = content.get(table) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise UserError(f"{file} is not in COCO's format: it has no list {table!r}")
        tables[table] = entries
        for index, item in enumerate(entries):
            if not isinstance(item, dict) or any(key not in item for key in keys):
                raise UserError(f"{file}: entry {index} of {table!r} lacks {' or '.join(keys) or 'its fields'}")
            # pandas writes integers as 1.0 in columns with gaps.
            item.update({k: int(v) for k in ID_FIELDS if isinstance(v := item.get(k), float) and v.is_integer()})
    if not tables["images"] or not tables["categories"]:
        raise UserError(f"{file} lists no {'images' if not tables['images'] else 'categories'}")
    if not all(isinstance(category["name"], (str, int, float)) for category in tables["categories"]):
        raise UserError(f"{file}: a name among its categories is not a string")
    for table in ("images", "categories"):
        ids = [item["id"] for item in tables[table]]
        if {type(id) for id in ids} not in ({int}, {str}):
            raise UserError(f"{file}: the ids of {table} are neither all numbers nor all strings")
        if len(set(ids)) < len(ids):
            raise UserError(f"{file}: two {table} have the same id")
    if not all(isinstance(image["file_name"], str) for image in tables["images"]):
        raise UserError(f"{file}: a file_name among its images is not a string")
    for image in tables["images"]:
        image["file_name"] = Path(image["file_name"].replace("\\", "/")).as_posix()  # ./a.png is a.png
    names = [image["file_name"] for image in tables["images"]]
    if repeat := next((name for name, count in Counter(names).items() if count > 1), ""):
        raise UserError(f"{file} lists {repeat} twice; list each image once, with one image_id for all its annotations")
    if any(not isinstance(category.get("keypoints", []), list) for category in tables["categories"]):
        raise UserError(f"{file}: the keypoints of a category are not a list of names")
    # Images are sorted by id too, as pycocotools ranks detections of equal score by it.
    images, categories = (sorted(tables[table], key=lambda item: item["id"]) for table in ("images", "categories"))
    return _File(file, images, categories, tables["annotations"])


def _choose_calibration(folder: Path, base: Path, count: int, seed: int) -> list[Photo]:
    """Take calibration images from the training folder next to `folder`; annotations aren't needed."""
    for split in SPLIT_FOLDERS:
        train_folder = folder.with_name(folder.name.replace(split, "train"))
        if split in folder.name and train_folder.is_dir() and (paths := find_images(train_folder)):
            return sample_calibration(paths, base, count, seed)
    return []


def _list_categories(annotations: Iterable[Annotation]) -> set[int | str]:
    """Return the ids of the categories that the annotations name; invalid ones are reported for each annotation."""
    return {id for annotation in annotations if isinstance(id := annotation.get("category_id"), (int, str))}


def _find_by_id(table: dict[Any, Any], annotation: Annotation, key: str, kind: str, origin: str) -> Any:
    value = annotation.get(key)
    if not isinstance(value, (int, str)) or value not in table:
        raise UserError(f"{origin}: there is no {kind} with id {value!r}")
    return table[value]


def _check_object(
    annotation: Annotation, category: int, size: tuple[int, int], names: list[str], origin: str
) -> Annotation:
    box = annotation.get("bbox")
    if not _is_number_list(box) or len(box) != 4:
        raise UserError(f"{origin}: bbox is {box!r}, not [x, y, width, height]")
    result: Annotation = {"category_id": category, "bbox": check_box(box, size, origin)}
    if (iscrowd := annotation.get("iscrowd") or 0) not in (0, 1):
        raise UserError(f"{origin}: iscrowd is {iscrowd!r}, not 0 or 1")
    result["iscrowd"] = int(iscrowd)
    mask = annotation.get("segmentation")
    if mask:
        result["segmentation"] = _check_mask(mask, size, origin)
    area = annotation.get("area")
    if area is not None and not (_is_number_list([area]) and area >= 0):
        raise UserError(f"{origin}: area is {str(area)[:30]}, not a number of square pixels")
    # Tools without areas write 0, beside which any distance between keypoints would be too large.
    result["area"] = float(area) if area else _compute_area(result)
    if names:
        points = annotation.get("keypoints") or [0] * (3 * len(names))
        if not _is_number_list(points) or len(points) != 3 * len(names):
            raise UserError(
                f"{origin}: keypoints has {len(points)} values; {len(names)} keypoints need {3 * len(names)}"
            )
        result["keypoints"] = check_keypoints(points, size, origin)
        result["num_keypoints"] = sum(1 for visibility in points[2::3] if visibility > 0)
    return result


def _check_mask(mask: Any, size: tuple[int, int], origin: str) -> Any:
    """Return the mask: polygons, or a run-length encoding of the image's size; raise `UserError` for others."""
    if isinstance(mask, dict):
        runs = _list_runs(mask.get("counts"))
        is_complete = all(type(run) is int and run >= 0 for run in runs) and sum(runs) == size[0] * size[1]
        if mask.get("size") != list(size) or not is_complete:
            raise UserError(f"{origin}: the mask's run lengths don't fit an image of {size[1]} x {size[0]} pixels")
        return mask
    if not isinstance(mask, list) or not all(_is_number_list(points) for points in mask):
        raise UserError(f"{origin}: segmentation is neither a list of polygons nor a run-length encoding")
    return [check_polygon(points, size, origin) for points in mask]


def _list_runs(counts: Any) -> list[Any]:
    return _unpack_runs(counts) if isinstance(counts, str) else counts if isinstance(counts, list) else []


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
    """Return the object's area in square pixels, for files without areas or with areas of 0.

    It is the area of polygons or of run lengths; of the box without a mask.
    """
    mask = annotation.get("segmentation")
    if isinstance(mask, list):
        return sum(compute_polygon_area(points) for points in mask)
    if mask:
        return float(sum(_list_runs(mask["counts"])[1::2]))
    return float(annotation["bbox"][2] * annotation["bbox"][3])


def _is_number_list(values: Any) -> TypeGuard[list[float]]:
    """Return whether these are finite numbers of a plausible size."""
    return isinstance(values, list) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < MAX_COORDINATE for v in values
    )
