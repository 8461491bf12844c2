"""What a classifier answers: the best classes of each image, ranked alike for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec, Preprocess
from dyno.worker.tasks.task import Arrays, Collector, EvaluationInputs, OutputShapes, Task

TOP = 10
UNSCORED = "no accuracy was measured: the first output has no row of class scores for each image (N x C)"
LEAST_PARTED = 4  # times as many classes as are ranked; with fewer a full sort is as quick


def classes_of(shape: Sequence[int | str]) -> int:
    """Return the number of classes in an output of that shape: N x C or, as SqueezeNet's, N x C x 1 x 1.

    Return 0 for other shapes and for an unknown number.
    """
    if len(shape) < 2 or any(n != 1 for n in shape[2:]) or not isinstance(shape[1], int):
        return 0
    return shape[1] if shape[1] > 1 else 0


class TopKCollector(Collector):
    """The best classes of each image."""

    def of(self, turn: int, fetched: Arrays) -> Any:
        """Return index and score of the best classes, None if the first output has no row of classes for each image."""
        first = next(iter(self.cut(turn, fetched).values()))
        if not classes_of(first.shape) or len(first) != self.images(turn):
            return None
        return ranked(first.astype(np.float32).reshape(first.shape[:2]), TOP)

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return `topk_index` and `topk_score`; nothing if a batch has none: a single box looks like classes."""
        if not batches or any(ranks is None for ranks in batches):
            return {}
        return {
            name: np.concatenate(parts)
            for name, parts in zip(("topk_index", "topk_score"), zip(*batches, strict=True), strict=True)
        }


class Classify(Task):
    """One class for each image, by the highest score."""

    name = "classify"
    metrics = ("top1", "top5")
    least_outputs = MappingProxyType({"top5": 5})
    size = (224, 224)

    def preprocess(self, channels: int) -> Preprocess:
        return Preprocess((0.0,) * channels, (1.0,) * channels, resize=1.0)

    def layout(self, model: ModelSpec, metadata: Purpose, outputs: OutputShapes) -> Purpose:
        return Purpose()

    def collector(self, evaluated: EvaluationInputs) -> Collector:
        return TopKCollector(evaluated)


CLASSIFY = Classify()


def ranked(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return index (int32) and score of each row's k best, best first; ties by lower index, NaN last.

    The order is that of a stable sort of the whole row, which runs only for the few rows with a tie at the k-th score.
    """
    k = min(k, scores.shape[1])
    falling = -scores
    if scores.shape[1] <= LEAST_PARTED * k:
        index = np.argsort(falling, axis=1, kind="stable")[:, :k]
    else:
        index = _partition_scores(falling, k)
    return index.astype(np.int32), np.take_along_axis(scores, index, axis=1)


def _partition_scores(falling: np.ndarray, k: int) -> np.ndarray:
    best = falling <= np.partition(falling, k - 1, axis=1)[:, k - 1 : k]
    clear = np.count_nonzero(best, axis=1) == k
    index = np.empty((len(falling), k), np.int64)
    chosen = np.nonzero(best[clear])[1].reshape(-1, k)  # rising, so that a stable sort keeps the tie rule
    order = np.argsort(np.take_along_axis(falling[clear], chosen, axis=1), axis=1, kind="stable")
    index[clear] = np.take_along_axis(chosen, order, axis=1)
    index[~clear] = np.argsort(falling[~clear], axis=1, kind="stable")[:, :k]
    return index
