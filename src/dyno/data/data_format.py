"""A format of data sets on disk: how it is recognised, and which images, labels and objects it lists."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dyno.data.label_files import refuse_labels
from dyno.data.photos import CALIBRATION, Listing
from dyno.worker import plugins
from dyno.worker.spec import UserError

GROUP = "dyno.data"


@dataclass(frozen=True)
class ScanRequest:
    """What a scan should list.

    `calibration` is the number of calibration images, or a folder of them; `train`: training images too. The model
    detects `objects` and `needs` masks or keypoints besides boxes, or it classifies into `outputs` classes (0: not
    known). `set_aside`: test images will serve for calibration where there are no training images. `skip_missing`:
    images that are listed and not there are left out, with a warning.
    """

    calibration: int | Path = CALIBRATION
    seed: int = 0
    train: bool = False
    objects: bool = False
    needs: str = ""
    outputs: int = 0
    set_aside: bool = False
    skip_missing: bool = False


class DataFormat(ABC):
    """A format of data sets.

    `described` is its name in messages, and `suffixes` are of files that may be given in place of the folder. `labels`
    is what its labels are: `classes` of images, `objects` in them, or none (""). A `fallback` is used only where no
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

    @abstractmethod
    def scan(self, path: Path, wanted: ScanRequest) -> Listing:
        """List its images; raises `UserError`, one line."""


@cache
def formats() -> dict[str, DataFormat]:
    """Return every format of data sets by its name."""
    return plugins.declared(sys.modules[__package__], DataFormat, GROUP)  # type: ignore[type-abstract]


def format_of(path: Path) -> DataFormat:
    """Return the format of the data set at the path: a plug-in's before Dyno's own.

    Raises `UserError` when two fit, or none, or when only a format fits that would overlook labels.
    """
    path, every_format = Path(path), formats().values()
    if not path.exists():
        raise UserError(f"no data folder {path}")
    try:
        fitting = [f for f in every_format if f.fits(path)]
        fitting = [f for f in fitting if not f.fallback] or fitting
        fitting = [f for f in fitting if not type(f).__module__.startswith("dyno.")] or fitting
        if fitting and fitting[0].fallback:
            refuse_labels(path, is_class_folders=fitting[0].labels == "classes")
    except PermissionError as e:
        raise UserError(f"{e.filename} can't be listed: permission denied") from e
    if not fitting:
        files = ", ".join(f"a file in {f.described} ({f.suffixes[0]})" for f in every_format if f.suffixes)
        raise UserError(f"{path} is not a folder, nor {files}")
    if len(fitting) > 1:
        both, files = (
            " and ".join(parts) for parts in zip(*((f.described, f.suffixes[0]) for f in fitting), strict=True)
        )
        raise UserError(f"{path} is in {both}; give the file of the one to use ({files})")
    return fitting[0]
