"""Image files with labels and splits, for any folder layout, and their decoding into a data set."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dyno.data import cache as store
from dyno.data.decode import Progress, Transform, decode_images, find_library_version, read_sizes, warn_left_out
from dyno.worker.extras import install
from dyno.worker.spec import TEXT_ORDER, DataSpec, Unavailable, UserError, make_absolute

EXTENSIONS = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm"}
# Suffixes of image formats that aren't read.
UNREADABLE_SUFFIXES = {
    ".gif", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".dng", ".dcm", ".tga", ".exr", ".hdr", ".psd", ".pbm",
}  # fmt: skip
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found", "__pycache__"}
SAMPLED_IMAGES = 20  # images sampled to find their common folder
MAX_OTHER_FILES, MAX_OTHERS_PER_IMAGE = 50_000, 10  # limits of a folder of images, both exceeded by a whole disk
WORD = re.compile(r"[a-z]{2,}")
CALIBRATION_IMAGES = 128
CALIBRATION_DIVISOR = 5  # at most one test image in five calibrates

TRUTH_FILE = "truth.json"
OnUnreadable = Literal["refuse", "skip"]


@dataclass(frozen=True)
class Photo:
    """One image file: `name` is its printable path below the data folder, `label` its class index or -1.

    `split` is test, train or calibration; `calibrates` marks a training image that also serves for calibration.
    """

    path: Path
    name: str
    label: int
    split: str
    calibrates: bool = False


@dataclass(frozen=True)
class Annotations:
    """Objects in the images: `metadata` goes into meta.json, `truth` makes truth.json from the kept rows."""

    metadata: dict[str, Any]
    truth: Callable[[np.ndarray], dict[str, Any]]


Sizes = list[tuple[int, int] | None]  # height and width of each image; None: unreadable


@dataclass(frozen=True)
class Listing:
    """Images with their splits; `own_calibration`: calibration images come from a separate folder.

    `classes` are printable names, one per label. `metadata` goes into meta.json. `annotate` reads labels other than one
    class per image, from the files `sources`. `sized`: sizes of the originals are kept even without annotations.
    """

    name: str
    classes: list[str]
    photos: list[Photo]
    own_calibration: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)
    annotate: Callable[[list[Photo], Sizes], Annotations] | None = None
    sized: bool = False


@dataclass(frozen=True)
class DecodeOptions:
    """Settings of decoding, and the cache folder of the decoded images.

    `set_aside` is the largest number of test images for calibration if the listing has no calibration images.
    """

    cache: Path
    transform: Transform
    on_unreadable: OnUnreadable = "refuse"
    progress: Progress | None = None
    seed: int = 0
    set_aside: int = 0


def decode_listing(listing: Listing, folder: Path, options: DecodeOptions) -> DataSpec:
    """Decode the listed images below the folder, unless the cache has them already."""
    made_by = {"pillow": find_library_version("pillow")}
    listing = _with_calibration(listing, options.set_aside, options.seed)
    files = [*(photo.path for photo in listing.photos), *listing.sources]
    hashes = store.hash_contents(files, options.cache, folder)
    count = len(listing.photos)
    listing, shas = _without_test_copies(listing, hashes[:count])
    identity = [(p.split, p.name, p.label, p.calibrates, sha) for p, sha in zip(listing.photos, shas, strict=True)]
    set_aside = listing.metadata.get("set_aside", 0)
    # Added only if present, so that other data sets keep their key.
    marks = [*([set_aside] if set_aside else []), *listing.metadata.get("warnings", [])]
    key = store.make_key(
        listing.classes,
        identity,
        hashes[count:],
        options.transform.identity,
        made_by,
        options.seed,
        store.hash_code(),
        *marks,
    )
    data_folder = store.find_folder(options.cache, key)
    if data_folder is None:
        meta_fields = {
            "name": listing.name,
            "classes": listing.classes,
            "made_by": made_by,
            **options.transform.identity,
        }
        # Equal with and without images set aside, so that results on the common test images can be compared.
        test_identity = [("test" if set_aside else split, *rest) for split, *rest in identity]
        meta_fields["photographs"] = store.make_key(listing.classes, test_identity)
        data_folder = store.write_folder(
            options.cache, key, _build_content(listing, {**meta_fields, **listing.metadata}, options)
        )
    if options.on_unreadable == "refuse":
        _refuse_unreadable(store.read_meta(data_folder)["unreadable"], len(listing.photos))
    return make_spec(listing.name, data_folder)


def make_spec(name: str, folder: Path) -> DataSpec:
    """Return the test split of the decoded data set in the folder."""
    meta = store.read_meta(folder)
    return DataSpec(name, str(folder.resolve()), meta["sha256"], "test", meta["splits"]["test"])


def stratified_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return a seeded order in which any prefix holds the classes in proportion (systematic sampling by class)."""
    rng = np.random.default_rng(seed)
    values, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(inverse[shuffled], kind="stable")]
    firsts = np.cumsum(counts) - counts
    position = np.empty(len(labels))
    position[by_class] = np.arange(len(labels)) - np.repeat(firsts, counts)
    quota: np.ndarray = (position + rng.random(len(values))[inverse]) / counts[inverse]
    return np.argsort(quota, kind="stable")


def clean_name(name: str) -> str:
    """Return the name on one line of valid Unicode: file names may hold line breaks and undecodable bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def name_below(path: Path, folder: Path) -> str:
    """Return the path for messages: relative to the folder if it is inside."""
    if not path.is_relative_to(folder):
        return clean_name(path.as_posix())
    return clean_name(path.relative_to(folder).as_posix())


def find_images(root: Path) -> list[Path]:
    """Find image files below the folder at any depth, in order; hidden and system files are left out.

    Raise `UserError` early for a whole disk or home folder, which would be read for minutes.
    """
    paths, others = list[Path](), 0
    parents = {os.fspath(root): {path.resolve() for path in (root, *root.parents)}}  # each folder's resolved ancestors
    for parent, folders, files in os.walk(root, followlinks=True):
        ancestors = parents.pop(parent)
        resolved = {name: Path(parent, name).resolve() for name in folders if not is_system(name)}
        folders[:] = [name for name, path in resolved.items() if path not in ancestors]  # a link may lead back
        parents |= {os.fspath(Path(parent, name)): ancestors | {resolved[name]} for name in folders}
        images = [Path(parent, name) for name in files if not is_system(name) and is_image(name)]
        paths += images
        others += len(files) - len(images)
        if others > (limit := max(MAX_OTHER_FILES, MAX_OTHERS_PER_IMAGE * len(paths))):
            raise UserError(
                f"{root} holds more than {limit:,} files that are not images; give the folder of the images"
            )
    return sorted(paths)


def warn_unread_formats(root: Path) -> list[str]:
    """Return a warning if images of unsupported formats lie below the folder."""
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in UNREADABLE_SUFFIXES and path.is_file())
    if not files:
        return []
    formats = ", ".join(sorted({path.suffix.lower() for path in files}))
    clause = "1 image is" if len(files) == 1 else f"{len(files):,} images are"
    return [f"{clause} left out: unsupported formats ({formats}), e.g. {name_below(files[0], root)}"]


def warn_number_order(names: list[str]) -> list[str]:
    """Return a warning if class names are numbers sorted as text: timm, for example, sorts them as numbers."""
    if not all(name.isdecimal() for name in names) or names == sorted(names, key=int):
        return []
    k = next(k for k, name in enumerate(sorted(names, key=int)) if name != names[k])
    return [
        f"{TEXT_ORDER}, so class {k} is {names[k]!r}; for a network that was trained in the order of their numbers "
        "give names of one length (01, 02, 10), or a table of path,label"
    ]


def is_image(name: str) -> bool:
    """Return whether the file's suffix is one of the supported formats."""
    return Path(name).suffix.lower() in EXTENSIONS


def is_system(name: str) -> bool:
    """Return whether a file or folder is hidden, or left by an operating system or an archive."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


class AmbiguousImages(UserError):
    """Error: a file of labels names images that exist in several places."""


def find_image_folder(file: Path, names: list[str]) -> tuple[Path, str]:
    """Return the folder with most of the first images in a file of labels, and the suffix that the names lack.

    Usual places take precedence. Among other folders next to the file with equal numbers, one that shares a word with
    the file's name is taken (train.csv, train_images/). Raises `AmbiguousImages` if that doesn't decide.
    """
    split = file.stem.rpartition("_")[2]
    defaults = [base / inner for base in (file.parent, file.parent.parent) for inner in ("", "images", "data", split)]
    defaults.append(file.parent.parent / "images" / split)
    siblings = sorted(inner for inner in file.parent.iterdir() if inner.is_dir() and not is_system(inner.name))[
        :SAMPLED_IMAGES
    ]
    bases = list(dict.fromkeys([*defaults, *siblings]))
    sample, suffixes = names[:SAMPLED_IMAGES], [""]
    if not any(map(is_image, sample)):
        suffixes += [case for suffix in sorted(EXTENSIONS) for case in (suffix, suffix.upper())]
    hits = {
        (base, suffix): sum((base / (name + suffix)).is_file() for name in sample)
        for suffix in suffixes
        for base in bases
    }
    max_hits = max(hits.values())
    if not max_hits:
        raise UserError(f"image {names[0]} of {file.name} is not in any of {', '.join(map(str, bases))}")
    candidates = [hit for hit, count in hits.items() if count == max_hits]
    if choice := next((hit for hit in candidates if hit[0] in defaults), None):
        candidates = [hit for hit in candidates if hit[0] == choice[0]]
    elif len(candidates) > 1:
        words = set(WORD.findall(file.stem.lower()))
        candidates = [hit for hit in candidates if words & set(WORD.findall(hit[0].name.lower()))] or candidates
    name = next(name for name in sample if any((base / (name + suffix)).is_file() for base, suffix in candidates))
    files = [path for base, suffix in candidates if (path := base / (name + suffix)).is_file()]
    other_files = [path for path in files if not path.samefile(files[0])]  # the file system may ignore case
    if other_files:
        pair = " and ".join(name_below(path, file.parent) for path in (files[0], other_files[0]))
        raise AmbiguousImages(f"image {name} of {file.name} may be {pair}; write it in {file.name} as one of them")
    return candidates[0]


def without_missing(photos: list[Photo], folder: Path, file: Path, skip: bool) -> tuple[list[Photo], str]:
    """Return the existing images and a warning on missing ones; raise `UserError` unless these may be skipped."""
    names = [photo.name for photo in photos if not photo.path.is_file()]
    if not names:
        return photos, ""
    warning = f"{len(names)} of {len(photos)} images of {file.name} are not in {folder}, e.g. {names[0]}"
    photos = [photo for photo in photos if photo.path.is_file()]
    if not (skip and photos):
        remedy = "leave them out with --unreadable skip" if photos else "put them there"
        raise UserError(f"{warning}; {remedy}")
    return photos, f"{warning}; they were left out"


def _with_calibration(listing: Listing, max_count: int, seed: int) -> Listing:
    """Set test images aside for calibration if there are no others: at most a fifth, no class's only image."""
    test = listing.photos
    if listing.own_calibration or any(photo.split != "test" for photo in test):
        return listing
    labels = np.array([photo.label for photo in test])
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    is_single = counts[inverse] == 1
    order = [i for i in stratified_order(labels, seed).tolist() if not is_single[i]]
    indices = set(order[: min(max_count, len(test) // CALIBRATION_DIVISOR)])
    if not indices:
        return listing
    photos = [replace(photo, split="calibration") if i in indices else photo for i, photo in enumerate(test)]
    return replace(listing, photos=photos, metadata={**listing.metadata, "set_aside": len(indices)})


def list_calibration_photos(folder: Path) -> list[Photo]:
    """List all images of a calibration folder, in class folders or not, without labels."""
    if not folder.is_dir():
        raise UserError(f"no calibration folder {folder}")
    paths = find_images(make_absolute(folder))
    if not paths:
        raise UserError(f"no images in the calibration folder {folder}; known formats: {', '.join(sorted(EXTENSIONS))}")
    base = make_absolute(folder).parent
    return [Photo(path, name_below(path, base), -1, "calibration") for path in paths]


def sample_calibration(paths: list[Path], folder: Path, count: int, seed: int) -> list[Photo]:
    """Choose `count` training images at random for calibration, without labels."""
    order = np.random.default_rng(seed).permutation(len(paths))[:count]
    return [Photo(paths[i], name_below(paths[i], folder), -1, "calibration") for i in sorted(order)]


def calibrate_on(listing: Listing, folder: Path) -> Listing:
    """Return the listing with all images of the folder as its only calibration images."""
    photos = [photo for photo in listing.photos if photo.split != "calibration"]
    return replace(listing, photos=photos + list_calibration_photos(folder), own_calibration=True)


def _without_test_copies(listing: Listing, hashes: list[str]) -> tuple[Listing, list[str]]:
    """Leave out copies of test images from other splits, so that test images are not trained or calibrated on."""
    photos = listing.photos
    test_hashes = {sha for photo, sha in zip(photos, hashes, strict=True) if photo.split == "test" and sha}
    indices = [i for i, photo in enumerate(photos) if photo.split == "test" or hashes[i] not in test_hashes]
    without_copies = replace(listing, photos=[photos[i] for i in indices])
    splits = {photo.split for photo in without_copies.photos}
    if listing.own_calibration and "calibration" not in splits:
        raise UserError("every calibration image is also a test image; give a folder with other images")
    if any(photo.split == "train" for photo in photos) and "train" not in splits:
        raise UserError("every training image is also a test image; give others")
    return without_copies, [hashes[i] for i in indices]


def _build_content(listing: Listing, meta: dict[str, Any], options: DecodeOptions) -> store.Content:
    photos = listing.photos
    paths = [photo.path for photo in photos]
    columns = {"labels": np.array([photo.label for photo in photos], np.int64)}
    annotations = None
    if listing.annotate or listing.sized:
        sizes = read_sizes(paths, options.transform)
        columns["sizes"] = np.array([size or (0, 0) for size in sizes], np.int32)
    if listing.annotate:
        annotations = listing.annotate(photos, sizes)
        meta = {**meta, **annotations.metadata, "truth": TRUTH_FILE}
    if warnings := warn_left_out(paths):
        meta = {**meta, "warnings": [*meta.get("warnings", ()), *warnings]}

    def further_files(kept_rows: np.ndarray) -> dict[str, Any]:
        return {TRUTH_FILE: annotations.truth(kept_rows)} if annotations else {}

    def check_unreadable(unreadable: dict[int, str]) -> list[str]:
        lines = [f"{photos[i].name} ({reason})" for i, reason in unreadable.items()]
        if options.on_unreadable == "refuse":
            _refuse_unreadable(lines, len(photos))
        _check_classes(listing, unreadable, lines[0])
        return lines

    return store.Content(
        partial(decode_images, paths, options.transform, options.progress),
        options.transform.shape,
        columns,
        _split_photos(photos, options.seed),
        meta,
        check_unreadable,
        further_files,
        tuple(photo.name for photo in photos),
    )


def _split_photos(photos: list[Photo], seed: int) -> dict[str, np.ndarray]:
    labels = np.array([photo.label for photo in photos], np.int64)
    splits = {}
    for split in ("test", "train", "calibration"):
        is_in_split = [photo.split == split or (photo.calibrates and split == "calibration") for photo in photos]
        if len(indices := np.flatnonzero(is_in_split)):
            splits[split] = indices[stratified_order(labels[indices], seed)]
    return splits


def _check_classes(listing: Listing, unreadable: dict[int, str], example: str) -> None:
    """Refuse a split with a class that is entirely unreadable."""
    for split in ("test", "train"):
        labels = {photo.label for photo in listing.photos if photo.split == split}
        readable = [photo for i, photo in enumerate(listing.photos) if i not in unreadable]
        for label in sorted(labels - {photo.label for photo in readable if photo.split == split}):
            class_text = f" of class {listing.classes[label]!r}" if label >= 0 else ""
            raise UserError(f"no {split} image{class_text} can be read, e.g. {example}")


def _refuse_unreadable(unreadable: list[str], count: int) -> None:
    if unreadable:
        examples = ", ".join(unreadable[:3]) + (", …" if len(unreadable) > 3 else "")
        raise UserError(
            f"{len(unreadable)} of {count} images can't be read: {examples}; "
            "remove them, or leave them out with --unreadable skip"
        )


# The 1,000 classes of ImageNet in their usual order: sorted by synset, as torchvision and timm number them.

DEFAULT_COUNT = 1000
SYNSET = re.compile(r"n\d{8}")


@lru_cache(maxsize=1)
def list_synsets() -> dict[str, str]:
    """Return the first name of each of ImageNet's 1,000 classes by synset, in order; raise `Unavailable` without timm.

    timm's lists are read as files: importing timm would load torch.
    """
    spec = importlib.util.find_spec("timm")
    folders = [Path(path) / "data" / "_info" for path in (spec.submodule_search_locations or [])] if spec else []
    lists = next((folder for folder in folders if (folder / "imagenet_synsets.txt").is_file()), None)
    if lists is None:
        raise Unavailable(f"ImageNet's list of classes comes with timm; {install('timm')}")
    lemmas = (lists / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    names = dict(line.split("\t", 1) for line in lemmas if "\t" in line)
    order = (lists / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    return {synset: names.get(synset, synset).split(",")[0] for synset in order}


def are_known_synsets(names: list[str]) -> bool:
    """Return whether all names are synsets of ImageNet's classes; the list is read only if they look like synsets."""
    return bool(names) and all(SYNSET.fullmatch(name) for name in names) and set(names) <= list_synsets().keys()


def describe_synset(synset: str) -> str:
    """Return the class's name with its synset: two of the 1,000 are called crane."""
    return f"{list_synsets()[synset]} ({synset})"
