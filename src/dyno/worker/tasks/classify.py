"""Classification: each image's best classes, ranked alike for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from dyno.worker.inputs import input_data
from dyno.worker.inspection import Purpose
from dyno.worker.spec import ModelSpec, Preprocess
from dyno.worker.tasks import Arrays, Collector, EvaluationInputs, OutputShapes, Task

RANKED_CLASSES = 10
NO_ACCURACY = "no accuracy was measured"
NO_SCORES = f"{NO_ACCURACY}: no output has a row of class scores for each image (N x C)"
SORTED_SCORES = f"{NO_ACCURACY}: the scores are sorted inside the network (top-k), and not in the order of its classes"
AMBIGUOUS_SCORES = f"{NO_ACCURACY}: class scores may be any of the outputs"
SCORE_NAMES = ("logit", "score", "prob", "softmax", "predict")  # words in names of class scores; first match wins
NON_SCORE_NAMES = ("prelogit", "pre_logit", "aux", "feat", "embed", "hidden")  # words in names of other outputs
MIN_PARTITION_FACTOR = 4  # multiple of the ranked classes; with fewer classes a full sort is as fast


def classes_of(shape: Sequence[int | str]) -> int:
    """Return the number of classes in an output of that shape: N x C or, as SqueezeNet's, N x C x 1 x 1.

    Return 0 for other shapes and for an unknown number.
    """
    if len(shape) < 2 or any(n != 1 for n in shape[2:]) or not isinstance(shape[1], int):
        return 0
    return shape[1] if shape[1] > 1 else 0


def find_scores(shapes: Mapping[str, Sequence[int | str]], classes: int = 0) -> list[str]:
    """Return the possible outputs of class scores; one if the number of classes (0: unknown) or a name decides."""
    names = [name for name, shape in shapes.items() if classes_of(shape)]
    names = [name for name in names if classes_of(shapes[name]) == classes] or names
    names = [name for name in names if not any(word in name.lower() for word in NON_SCORE_NAMES)] or names
    for word in SCORE_NAMES if len(names) > 1 else ():
        matches = [name for name in names if word in name.lower()]
        if matches:
            return matches
    return names


class TopKCollector(Collector):
    """The best classes of each image."""

    def __init__(self, evaluated: EvaluationInputs) -> None:
        super().__init__(evaluated)
        self.labelled = len(input_data.read_metadata(evaluated.trial.data).get("classes") or ())
        self.ambiguous: tuple[str, ...] = ()
        self.is_sorted = False

    def collect(self, index: int, outputs: Arrays) -> Any:
        """Return index and score of the best classes; None without a clear output of class scores.

        It needs a row of classes per image. Several candidates are ambiguous for images with labels; else the first
        counts.
        """
        arrays = {name: a for name, a in self.cut(index, outputs).items() if a.ndim and len(a) == self.images(index)}
        integers = {name: a for name, a in arrays.items() if a.dtype.kind in "iu"}
        arrays = {name: a for name, a in arrays.items() if a.dtype.kind not in "biu"} or arrays
        classes = self.labelled or self.evaluated.trial.model.classes or 0
        names = find_scores({name: a.shape for name, a in arrays.items()}, classes)
        if len(names) > 1 and self.labelled:
            self.ambiguous = tuple(names)
        if not names or self.ambiguous:
            return None
        scores = arrays[names[0]]
        if self.labelled and any(_are_indices(a, scores) for name, a in integers.items() if name != names[0]):
            self.is_sorted = True
            return None
        return rank_classes(scores.astype(np.float32).reshape(scores.shape[:2]), RANKED_CLASSES)

    def oddities(self, batches: Sequence[Any]) -> list[str]:
        """Return the reason why labelled images have no answers."""
        if self.ambiguous:
            names = " and ".join(self.ambiguous)
            return [f"{AMBIGUOUS_SCORES} {names}; rename that one logits in the file, or export it alone"]
        if self.labelled and self.is_sorted:
            return [SORTED_SCORES]
        return [NO_SCORES] if self.labelled and not self.arrays(batches) else []

    def arrays(self, batches: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return `topk_index` and `topk_score`; {} if a batch has none: a single box looks like classes."""
        if not batches or any(ranks is None for ranks in batches):
            return {}
        return {
            name: np.concatenate(values)
            for name, values in zip(("topk_index", "topk_score"), zip(*batches, strict=True), strict=True)
        }


def _are_indices(integers: np.ndarray, scores: np.ndarray) -> bool:
    """Return whether whole numbers are class indices of scores sorted in descending order, as by top-k."""
    if integers.shape != scores.shape or not integers.size:
        return False
    is_descending = bool(np.all(scores[:, :-1] >= scores[:, 1:]))
    sorted_indices = np.sort(integers, axis=1)
    return is_descending and bool(np.all(sorted_indices[:, 1:] != sorted_indices[:, :-1]))


class Classify(Task):
    """One class per image, by the highest score."""

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


def rank_classes(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return index (int32) and score of each row's k best, best first; ties by lower index, NaN last.

    The order equals a stable sort of the whole row, which runs only for rows with a tie at the k-th score.
    """
    k = min(k, scores.shape[1])
    sort_keys = -scores
    if scores.shape[1] <= MIN_PARTITION_FACTOR * k:
        index = np.argsort(sort_keys, axis=1, kind="stable")[:, :k]
    else:
        index = _partition_scores(sort_keys, k)
    return index.astype(np.int32), np.take_along_axis(scores, index, axis=1)


def _partition_scores(sort_keys: np.ndarray, k: int) -> np.ndarray:
    is_best = sort_keys <= np.partition(sort_keys, k - 1, axis=1)[:, k - 1 : k]
    is_clear = np.count_nonzero(is_best, axis=1) == k
    index = np.empty((len(sort_keys), k), np.int64)
    top_classes = np.nonzero(is_best[is_clear])[1].reshape(-1, k)  # ascending, for the tie rule of a stable sort
    order = np.argsort(np.take_along_axis(sort_keys[is_clear], top_classes, axis=1), axis=1, kind="stable")
    index[is_clear] = np.take_along_axis(top_classes, order, axis=1)
    index[~is_clear] = np.argsort(sort_keys[~is_clear], axis=1, kind="stable")[:, :k]
    return index
