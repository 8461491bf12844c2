"""Sorting of ImageNet's validation images, downloaded into one folder, into class folders.

A file's label is the synset in its name, or comes from a table. Class numbers need care: the ids 1..1000 of the
challenge's development kit are in the order of its meta.mat, not of the synsets.
"""

from __future__ import annotations

import csv
import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dyno.data.photos import DEFAULT_COUNT, SYNSET, is_image, list_synsets
from dyno.worker.spec import UserError, check_known

Transfer = Literal["link", "copy", "move"]
CLASS_ORDERS = ("synset", "synset-0", "synset-1")  # numbering of sorted synsets: from 0 or 1 as detected, or as given
SYNSET_SUFFIX = re.compile(r"_(n\d{8})$")
PARTIAL_SUFFIX = ".part"


@dataclass
class SortCounts:
    """Counts of images placed, images already there and classes, and the names of images without a label."""

    placed: int = 0
    present: int = 0
    classes: int = 0
    unlabelled: list[str] = field(default_factory=list)

    @property
    def images(self) -> int:
        """Number of images in their class folder now."""
        return self.placed + self.present


def sort_images(
    folder: Path,
    out: Path,
    labels: Path | None = None,
    order: str = "",
    transfer: Transfer = "link",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SortCounts:
    """Put every image of the folder into `out/val/<synset>/`, as a hard link, a copy or moved there.

    Files already there stay as they are, so that an interrupted run can be resumed. Raises `UserError` for an unusable
    folder, table or file; images without a label are listed, not placed.
    """
    if order:
        check_known("order", order, CLASS_ORDERS)
    target = out / "val"
    before = {path.name: path.parent.name for path in target.glob("n*/*") if is_image(path.name)}
    names = sorted({*_list_images(folder), *before})  # images already moved count too, for labels by position
    if not names:
        raise UserError(f"no images in {folder}; give the folder that holds the .JPEG files themselves")
    label_of = _from_table(labels, names, order) if labels else {name: _from_name(name) for name in names}
    _check_labels(label_of, before, target)
    synsets = {name: label for name, label in label_of.items() if label}
    if not synsets:
        raise UserError(f"no image in {folder} has a synset in its name, e.g. {names[0]}; give --labels")
    counts = SortCounts(classes=len(set(synsets.values())), unlabelled=[name for name in names if name not in synsets])
    for count, (name, label) in enumerate(synsets.items(), 1):
        is_new = _place_file(folder / name, target / label / name, transfer)
        counts.placed, counts.present = counts.placed + is_new, counts.present + (not is_new)
        progress(count, len(synsets))
    return counts


def _list_images(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    return [entry.name for entry in os.scandir(folder) if entry.is_file() and is_image(entry.name)]


def _check_labels(label_of: dict[str, str], before: dict[str, str], target: Path) -> None:
    """Raise `UserError`, before placing anything, for a label that is no class or contradicts the target's files."""
    classes = list_synsets()
    for name, label in label_of.items():
        if label and label not in classes:
            raise UserError(f"{name}: {label} is not one of ImageNet's {DEFAULT_COUNT:,} classes")
        if before.get(name, label) != label:
            raise UserError(
                f"{name} lies in {target / before[name]} but its label is {label or 'unknown'}; correct one of them"
            )


def _from_name(name: str) -> str:
    match = SYNSET_SUFFIX.search(Path(name).stem)
    return match.group(1) if match else ""


def _from_table(file: Path, names: list[str], order: str) -> dict[str, str]:
    """Read each image's synset from a table: Kaggle's CSV, lines of name and synset, or one label per line in order."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the table of labels {file} can't be read: {getattr(e, 'strerror', None) or e}") from e
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"the table of labels {file} is empty")
    if lines[0][0].startswith("ImageId,"):
        if "PredictionString" not in text.splitlines()[0].split(","):
            raise UserError(f"{file} is not Kaggle's table: it has no column PredictionString")
        table = {
            row["ImageId"]: (row["PredictionString"] or "").split()[:1] for row in csv.DictReader(text.splitlines())
        }
        return _by_name(names, {name: first[0] for name, first in table.items() if first})
    bad_line = next((n for n, fields in enumerate(lines, 1) if len(fields) != len(lines[0]) or len(fields) > 2), 0)
    if bad_line:
        raise UserError(f"{file}, line {bad_line} is neither a name and a label nor a label alone, like the first line")
    synsets_of_lines = _synsets_of(file, [fields[-1] for fields in lines], order)
    if len(lines[0]) == 2:
        image_names = [fields[0] for fields in lines]
        if repeats := [name for name, count in Counter(image_names).items() if count > 1]:
            raise UserError(f"{file} has {repeats[0]} twice")
        return _by_name(names, dict(zip(image_names, synsets_of_lines, strict=True)))
    if len(lines) != len(names):
        raise UserError(
            f"{file} has {len(lines)} labels for {len(names)} images; without names it needs one for each image"
        )
    return dict(zip(names, synsets_of_lines, strict=True))


def _by_name(names: list[str], table: dict[str, str]) -> dict[str, str]:
    """Return each image's label by name; the table's names may lack the suffix."""
    stems = {Path(name).stem if is_image(name) else name: label for name, label in table.items()}
    return {name: stems.get(Path(name).stem, "") for name in names}


def _synsets_of(file: Path, labels: list[str], order: str) -> list[str]:
    """Return the labels as synsets, converted from class numbers if they are numbers."""
    bad_line = next((n for n, label in enumerate(labels, 1) if not (SYNSET.fullmatch(label) or label.isdecimal())), 0)
    if bad_line:
        raise UserError(f"{file}, line {bad_line}: {labels[bad_line - 1]!r} is neither a synset nor a number")
    if not any(label.isdecimal() for label in labels):
        return labels
    if not all(label.isdecimal() for label in labels):
        raise UserError(f"{file} mixes synsets and numbers")
    numbers, synsets = [int(label) for label in labels], list(list_synsets())
    first = _find_first_class(file, numbers, order)
    if outliers := [number for number in numbers if not first <= number < DEFAULT_COUNT + first]:
        raise UserError(
            f"{file}: there is no class {outliers[0]}; the numbers are {first} to {DEFAULT_COUNT - 1 + first}"
        )
    return [synsets[number - first] for number in numbers]


def _find_first_class(file: Path, numbers: list[int], order: str) -> int:
    """Return the number of the first class, 0 or 1; raise `UserError` if the numbers may be in another order."""
    if order in ("synset-0", "synset-1"):
        return int(order[-1])
    if 0 in numbers:
        return 0
    if order == "synset" and DEFAULT_COUNT in numbers:
        return 1
    if order == "synset":
        raise UserError(f"{file} has neither class 0 nor class {DEFAULT_COUNT}; give --order synset-0 or synset-1")
    raise UserError(
        f"{file} may hold the challenge's own ids 1 to {DEFAULT_COUNT}, which are in another order (meta.mat): give "
        "synsets, or --order synset if these numbers are in the order of the synsets"
    )


def _place_file(source: Path, target: Path, transfer: Transfer) -> bool:
    """Put the file in place, and return whether it was missing; a partial copy never has the target's name."""
    if target.exists():
        if source.exists() and not source.samefile(target):
            if source.stat().st_size != target.stat().st_size:
                raise UserError(f"{target} is another file than {source}; remove one of them")
            if transfer == "move":  # an earlier run stopped between copying and removing
                source.unlink()
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    if transfer == "link":
        try:
            target.hardlink_to(source)
        except OSError as e:
            if e.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise UserError(
                    f"{target.parent} can't hold hard links to {source.parent}; use --copy or --move"
                ) from e
            raise
        return True
    if transfer == "move":
        with suppress(OSError):
            source.rename(target)
            return True
    partial_file = target.with_name(target.name + PARTIAL_SUFFIX)
    shutil.copy2(source, partial_file)
    partial_file.replace(target)
    if transfer == "move":
        source.unlink()
    return True
