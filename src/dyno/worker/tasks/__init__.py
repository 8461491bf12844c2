"""Tasks of networks: their data, their outputs' layouts, and the stored answers."""

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
    """Return the task of that name; raise a `UserError` with the nearest spelling for an unknown one."""
    check_known("task", name, list_tasks())
    return _load_tasks()[name]


def list_tasks() -> list[str]:
    """Return the names of the tasks."""
    return list(_load_tasks())


def list_metrics() -> list[str]:
    """Return all tasks' metrics, usable in budgets, by their names in `results/metrics`."""
    return list(dict.fromkeys(metric for task in _load_tasks().values() for metric in task.metrics))


@cache
def _load_tasks() -> dict[str, Task]:
    return plugins.list_declared(sys.modules[__name__], Task, ENTRY_POINT_GROUP)  # type: ignore[type-abstract]


Arrays = Mapping[str, "np.ndarray"]
Shape = Sequence[Any]  # a number per fixed axis, text for a free one


@dataclass(frozen=True)
class OutputShapes:
    """A network's output shapes by name, and its image's height and width ((0, 0) without an image)."""

    shapes: Mapping[str, Shape]
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class EvaluationInputs:
    """The inputs of an evaluation: `count` inputs in batches of `batch`.

    For real images, `samples` are their positions in the data set and `input_size` the session's height and width.
    """

    trial: Trial
    batch: int
    count: int
    samples: np.ndarray | None = None
    input_size: tuple[int, int] = (0, 0)


class Collector:
    """A collector of each batch's answers for outputs.npz; the base class collects none."""

    def __init__(self, evaluated: EvaluationInputs) -> None:
        self.evaluated = evaluated

    def images(self, index: int) -> int:
        """Return the number of real images in the batch; the rest is padding."""
        return min(self.evaluated.batch, self.evaluated.count - index * self.evaluated.batch)

    def cut(self, index: int, outputs: Arrays) -> Arrays:
        """Return the outputs of the batch's real images."""
        batch, count = self.evaluated.batch, self.images(index)
        return {name: a[:count] if a.ndim and a.shape[0] == batch else a for name, a in outputs.items()}

    def collect(self, index: int, outputs: Arrays) -> Any:
        """Return the answers of one batch; called from several threads in parallel."""
        return None

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return all batches joined, by array names in outputs.npz."""
        return {}

    def oddities(self, batches: Sequence[Any]) -> list[str]:
        """Return warnings on the answers."""
        return []


class Task(ABC):
    """The purpose of a network.

    `labels` is the required kind of labels: the images' `classes`, or the `objects` in them; `needs` is a further
    requirement of every object in addition to boxes ("" for none). `metrics` names the accuracy measures in
    `results/metrics`, also for budgets, the default first; `least_outputs` is the least number of outputs for a
    meaningful metric. `coco` is COCO's name of its average precision. `size` is the default height and width.
    """

    name: str = ""
    labels: str = "classes"
    needs: str = ""
    metrics: tuple[str, ...] = ()
    least_outputs: Mapping[str, int] = MappingProxyType({})
    coco: str = ""
    size: tuple[int, int] = (640, 640)
    note: str = ""  # on raw outputs, for exported scripts

    @abstractmethod
    def preprocess(self, channels: int) -> Preprocess:
        """Return the default preprocessing of images."""

    @abstractmethod
    def layout(self, model: ModelSpec, metadata: Purpose, outputs: OutputShapes) -> Purpose:
        """Return `classes` and `keypoints` from the file's metadata and the outputs' shapes.

        Raise a `UserError` for a misfit.
        """

    @abstractmethod
    def collector(self, evaluated: EvaluationInputs) -> Collector:
        """Return the collector of the answers."""
