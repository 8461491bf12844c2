"""One way in which a data set lies on disk: how it is known, and which images, labels and objects it lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dyno.datasets.photos import CALIBRATION, Listing
from dyno.worker import plugins
from dyno.worker.spec import UserError

GROUP = "dyno.datasets"


@dataclass(frozen=True)
class Wanted:
    """What is asked of a data set.

    `calibration` is how many images there are to be to calibrate on, or a folder of them; `train`: training images too.
    The model finds `objects`, with what it `needs` besides boxes (masks, keypoints), or tells classes apart, `outputs`
    of them (0: not known). `set_aside`: test images will serve for calibration where there are none to train on.
    """

    calibration: int | Path = CALIBRATION
    seed: int = 0
    train: bool = False
    objects: bool = False
    needs: str = ""
    outputs: int = 0
    set_aside: bool = False


class DataFormat(ABC):
    """A format of data sets.

    `described` is what messages call it, and `suffixes` are of files that may be given in place of the folder. `labels`
    is what it says of its images: their `classes`, the `objects` in them, or nothing (""). A `fallback` is taken only
    where no other format fits.
    """

    name: str = ""
    described: str = ""
    suffixes: tuple[str, ...] = ()
    labels: str = ""
    fallback: bool = False

    @abstractmethod
    def fits(self, path: Path) -> bool:
        """Whether a data set of this format lies there: a folder, or a file with one of the suffixes."""

    @abstractmethod
    def scan(self, path: Path, wanted: Wanted) -> Listing:
        """List its images; raises `UserError`, one line."""


@cache
def formats() -> dict[str, DataFormat]:
    """Every format of data sets by its name."""
    from dyno import datasets

    return plugins.declared(datasets, DataFormat, GROUP)  # type: ignore[type-abstract]


def format_of(path: Path) -> DataFormat:
    """The format of the data set at the path; raises `UserError` when two fit, or none."""
    path, known = Path(path), formats().values()
    if not path.exists():
        raise UserError(f"no data folder {path}")
    try:
        fitting = [each for each in known if each.fits(path)]
    except PermissionError as e:
        raise UserError(f"{e.filename} can't be listed: permission denied") from e
    fitting = [each for each in fitting if not each.fallback] or fitting
    if not fitting:
        files = ", ".join(f"a file in {each.described} ({each.suffixes[0]})" for each in known if each.suffixes)
        raise UserError(f"{path} is not a folder, nor {files}")
    if len(fitting) > 1:
        both, files = (
            " and ".join(words) for words in zip(*((f.described, f.suffixes[0]) for f in fitting), strict=True)
        )
        raise UserError(f"{path} is in {both}; give the file of the one to use ({files})")
    return fitting[0]
