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
    found = [name for name, shape in shapes.items() if classes_of(shape)]
    found = [name for name in found if classes_of(shapes[name]) == classes] or found
    found = [name for name in found if not any(word in name.lower() for word in NON_SCORE_NAMES)] or found
    for word in SCORE_NAMES if len(found) > 1 else ():
        named = [name for name in found if word in name.lower()]
        if named:
            return named
    return found


class TopKCollector(Collector):
    """The best classes of each image."""

    def __init__(self, evaluated: EvaluationInputs) -> None:
        super().__init__(evaluated)
        self.labelled = len(input_data.read_metadata(evaluated.trial.data).get("classes") or ())
        self.ambiguous: tuple[str, ...] = ()
        self.is_sorted = False

    def collect(self, turn: int, fetched: Arrays) -> Any:
        """Return index and score of the best classes; None without a clear output of class scores.

        It needs a row of classes per image. Several candidates are ambiguous for images with labels; else the first
        counts.
        """
        own = {name: a for name, a in self.cut(turn, fetched).items() if a.ndim and len(a) == self.images(turn)}
        numbers = {name: a for name, a in own.items() if a.dtype.kind in "iu"}
        own = {name: a for name, a in own.items() if a.dtype.kind not in "biu"} or own
        classes = self.labelled or self.evaluated.trial.model.classes or 0
        names = find_scores({name: a.shape for name, a in own.items()}, classes)
        if len(names) > 1 and self.labelled:
            self.ambiguous = tuple(names)
        if not names or self.ambiguous:
            return None
        scores = own[names[0]]
        if self.labelled and any(_are_indices(a, scores) for name, a in numbers.items() if name != names[0]):
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
            name: np.concatenate(parts)
            for name, parts in zip(("topk_index", "topk_score"), zip(*batches, strict=True), strict=True)
        }


def _are_indices(numbers: np.ndarray, scores: np.ndarray) -> bool:
    """Return whether whole numbers are class indices of scores sorted in descending order, as by top-k."""
    if numbers.shape != scores.shape or not numbers.size:
        return False
    falls = bool(np.all(scores[:, :-1] >= scores[:, 1:]))
    ordered = np.sort(numbers, axis=1)
    return falls and bool(np.all(ordered[:, 1:] != ordered[:, :-1]))


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
    falling = -scores
    if scores.shape[1] <= MIN_PARTITION_FACTOR * k:
        index = np.argsort(falling, axis=1, kind="stable")[:, :k]
    else:
        index = _partition_scores(falling, k)
    return index.astype(np.int32), np.take_along_axis(scores, index, axis=1)


def _partition_scores(falling: np.ndarray, k: int) -> np.ndarray:
    best = falling <= np.partition(falling, k - 1, axis=1)[:, k - 1 : k]
    clear = np.count_nonzero(best, axis=1) == k
    index = np.empty((len(falling), k), np.int64)
    chosen = np.nonzero(best[clear])[1].reshape(-1, k)  # ascending, for the tie rule of a stable sort
    order = np.argsort(np.take_along_axis(falling[clear], chosen, axis=1), axis=1, kind="stable")
    index[clear] = np.take_along_axis(chosen, order, axis=1)
    index[~clear] = np.argsort(falling[~clear], axis=1, kind="stable")[:, :k]
    return index
