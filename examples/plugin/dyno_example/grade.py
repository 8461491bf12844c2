"""A task: one number for each image, which should be its class's place among the classes, as of ripeness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec, Preprocess, UserError
from dyno.worker.tasks import Arrays, Collector, EvaluationInputs, OutputShapes, Task


class Grades(Collector):
    """The number of each image."""

    def collect(self, turn: int, fetched: Arrays) -> Any:
        """Those of one batch."""
        first = next(iter(self.cut(turn, fetched).values()))
        return first.reshape(len(first)).astype(np.float32)

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        """`grade`, in the order of the images."""
        return {"grade": np.concatenate(batches)}


class Grade(Task):
    """Networks with one output, batch x 1."""

    name = "grade"
    labels = "classes"
    metrics = ("nearest",)
    size = (224, 224)

    def preprocess(self, channels: int) -> Preprocess:
        """Pixels in 0..1."""
        return Preprocess((0.0,) * channels, (1.0,) * channels, resize=1.0)

    def layout(self, model: ModelSpec, metadata: Purpose, outputs: OutputShapes) -> Purpose:
        """Nothing to be said, but the outputs must be right."""
        shapes = [list(shape) for shape in outputs.shapes.values()]
        if len(shapes) != 1 or shapes[0][1:] != [1]:
            raise UserError(f"{model.name} gives {shapes}; a network for grade gives batch x 1")
        return Purpose()

    def collector(self, evaluated: EvaluationInputs) -> Collector:
        """The same with random inputs."""
        return Grades(evaluated)


GRADE = Grade()
