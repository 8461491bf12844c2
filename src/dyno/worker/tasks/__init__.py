"""Tasks of networks: their data, the layout of their outputs, and the answers that are kept."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dyno.worker import plugins
from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec, Preprocess, Trial, check_known

if TYPE_CHECKING:
    import numpy as np

ENTRY_POINT_GROUP = "dyno.tasks"


def find_task(name: str) -> Task:
    """Return the task of that name; raise a `UserError` with the nearest for an unknown one."""
    check_known("task", name, list_tasks())
    return _load_tasks()[name]


def list_tasks() -> list[str]:
    """Return the names of the tasks."""
    return list(_load_tasks())


def list_metrics() -> list[str]:
    """Return the metrics for budgets: each task's, by the names of their objects in `results/metrics`."""
    return list(dict.fromkeys(metric for task in _load_tasks().values() for metric in task.metrics))


@cache
def _load_tasks() -> dict[str, Task]:
    return plugins.list_declared(sys.modules[__name__], Task, ENTRY_POINT_GROUP)  # type: ignore[type-abstract]


Arrays = Mapping[str, "np.ndarray"]
Shape = Sequence[Any]  # a number per fixed axis, text for a free one


@dataclass(frozen=True)
class OutputShapes:
    """A network's outputs as an inspection knows them: shapes by name, and the height and width of its image, (0, 0)
    without one."""

    shapes: Mapping[str, Shape]
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class EvaluationInputs:
    """The inputs of an evaluation: `count` in batches; of real images also their places in the data set
    (`samples`) and the height and width that the session takes."""

    trial: Trial
    batch: int
    count: int
    samples: np.ndarray | None = None
    input_size: tuple[int, int] = (0, 0)


class Collector:
    """Collects the answers of each batch, and in the end the arrays for outputs.npz; the base class collects none."""

    def __init__(self, evaluated: EvaluationInputs) -> None:
        self.evaluated = evaluated

    def images(self, turn: int) -> int:
        """Return the number of the batch's images that count; the others only fill it."""
        return min(self.evaluated.batch, self.evaluated.count - turn * self.evaluated.batch)

    def cut(self, turn: int, fetched: Arrays) -> Arrays:
        """Return the outputs of the images that count."""
        batch, valid = self.evaluated.batch, self.images(turn)
        return {name: a[:valid] if a.ndim and a.shape[0] == batch else a for name, a in fetched.items()}

    def of(self, turn: int, fetched: Arrays) -> Any:
        """Return the answers of one batch; called from several threads in parallel."""
        return None

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return all batches together, by their names in outputs.npz."""
        return {}

    def oddities(self, batches: Sequence[Any]) -> list[str]:
        """Return warnings on the answers."""
        return []


class Task(ABC):
    """The purpose of a network.

    `labels` are those that its data must have: the `classes` of images, or the `objects` in them, all of which have
    `needs` besides boxes ("" for nothing). `metrics` names the objects of `results/metrics` that measure its accuracy
    and that budgets may use, the usual one first; `least_outputs` is the least number of outputs for which one is
    meaningful. `coco` is COCO's name of its average precision. `size` is the default height and width.
    """

    name: str = ""
    labels: str = "classes"
    needs: str = ""
    metrics: tuple[str, ...] = ()
    least_outputs: Mapping[str, int] = MappingProxyType({})
    coco: str = ""
    size: tuple[int, int] = (640, 640)
    note: str = ""  # on the outputs, for a script that runs the network alone

    @abstractmethod
    def preprocess(self, channels: int) -> Preprocess:
        """Return the default preprocessing of images."""

    @abstractmethod
    def layout(self, model: ModelSpec, metadata: Purpose, outputs: OutputShapes) -> Purpose:
        """Return `classes` and `keypoints` from the file's metadata and the outputs' shapes.

        Raises a `UserError` for a misfit.
        """

    @abstractmethod
    def collector(self, evaluated: EvaluationInputs) -> Collector:
        """Return the collector of the answers."""
