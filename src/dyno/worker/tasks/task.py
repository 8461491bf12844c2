"""All that Dyno knows of a task, in one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec, Preprocess, Trial

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray"]
Shape = Sequence[Any]  # a number per fixed axis, text for a free one


@dataclass(frozen=True)
class Evaluated:
    """What goes through a session: `count` inputs in batches; of real images also their places in the data set
    (`samples`) and the height and width that the session takes."""

    trial: Trial
    batch: int
    count: int
    samples: np.ndarray | None = None
    input_size: tuple[int, int] = (0, 0)


class Collector:
    """Keeps of each batch what counts, and in the end the arrays for outputs.npz; by itself nothing."""

    def __init__(self, fed: Evaluated) -> None:
        self.fed = fed

    def images(self, turn: int) -> int:
        """How many of the batch's images are its own; the others only fill it."""
        return min(self.fed.batch, self.fed.count - turn * self.fed.batch)

    def cut(self, turn: int, fetched: Arrays) -> Arrays:
        """The outputs of the batch's own images, less those that only fill it."""
        batch, valid = self.fed.batch, self.images(turn)
        return {name: a[:valid] if a.ndim and a.shape[0] == batch else a for name, a in fetched.items()}

    def of(self, turn: int, fetched: Arrays) -> Any:
        """What is kept of one batch; called from several threads at once."""
        return None

    def arrays(self, made: Sequence[Any]) -> dict[str, np.ndarray]:
        """All batches together, by the names they have in outputs.npz."""
        return {}


class Task(ABC):
    """What a network is for.

    `labels` is what its data must say: the `classes` of images, or the `objects` in them, all of which have `needs`
    besides boxes ("" for nothing). `metrics` names the objects of `analysis/metrics` that its accuracy is measured by
    and a budget may be of, the usual one first; `least_outputs` says with how many outputs one begins to mean anything.
    `coco` is COCO's name of its average precision. `size` is height and width where nothing says them.
    """

    name: str = ""
    labels: str = "classes"
    needs: str = ""
    metrics: tuple[str, ...] = ()
    least_outputs: Mapping[str, int] = MappingProxyType({})
    coco: str = ""
    size: tuple[int, int] = (640, 640)
    note: str = ""  # on what the outputs are, for a script that runs the network alone

    @abstractmethod
    def preprocess(self, channels: int) -> Preprocess:
        """How images are prepared where nothing says it."""

    @abstractmethod
    def layout(self, model: ModelSpec, said: Purpose, outputs: Sequence[Shape]) -> Purpose:
        """`classes` and `keypoints` by what the file said and the outputs' shapes; a `UserError` for a misfit."""

    @abstractmethod
    def collector(self, fed: Evaluated) -> Collector:
        """What keeps the answers."""
