"""Shares of images that are answered right: top-1 and top-5, with Wilson's interval, and Tango's for the change."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from dyno.analysis.metrics.accuracy import MOST_IMAGES, UNDECIDED, matching, same_photographs, side
from dyno.analysis.metrics.metric import Change, Metric, MetricValue
from dyno.analysis.records.results import TrialResult
from dyno.analysis.stats import Interval, paired_difference, wilson


@dataclass(frozen=True)
class PairedChange(Change):
    """Of the same images `gained` only the trial has right, and `lost` only the reference; Tango's interval."""

    gained: int
    lost: int

    def enough(self, limit: float) -> int | None:
        """Estimate as `Change.enough` does, but with the interval itself, which isn't symmetric."""

        def is_settled(count: int) -> bool:
            scale = count / self.images
            return side(paired_difference(self.gained * scale, self.lost * scale, count), limit) != UNDECIDED

        low = high = self.images
        while not is_settled(high):
            if high > MOST_IMAGES:
                return None
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if is_settled(middle) else (middle, high)
        return high


class HitShare(Metric):
    """The share of images that `hits` says are answered right."""

    by = "Wilson's 95 % interval"
    change_by = "Tango's 95 % interval"

    @abstractmethod
    def hits(self, trial: TrialResult) -> np.ndarray | None:
        """Return whether each image is answered right, bool [N] in the order of `sample`; None where it isn't known."""

    def of(self, trial: TrialResult) -> MetricValue | None:
        hits = self.hits(trial)
        return None if hits is None else MetricValue(wilson(int(hits.sum()), len(hits)), len(hits))

    def change(self, trial: TrialResult, reference: TrialResult) -> PairedChange | None:
        own, other = self.hits(trial), self.hits(reference)
        if own is None or other is None or not same_photographs(trial, reference):
            return None
        here, there = matching(trial.answers, reference.answers)
        own, other = own[here], other[there]
        if not len(own):
            return None
        gained, lost = int((own & ~other).sum()), int((other & ~own).sum())
        return PairedChange(len(own), paired_difference(gained, lost, len(own)), gained, lost)

    def unchanged(self, images: int) -> Interval:
        return paired_difference(0, 0, images)


class TopK(HitShare):
    """The label is among the first k answers of a classifier."""

    def __init__(self, k: int) -> None:
        self.k = k

    def hits(self, trial: TrialResult) -> np.ndarray | None:
        return correct(trial.answers, self.k)


class Top1(TopK):
    """The first answer is the label."""

    name = column = "top1"
    label = "top-1"
    meaning = "share of images whose first answer is right"
    place = 1


class Top5(TopK):
    """The label is among the first five answers; there is none with fewer than five classes."""

    name = column = "top5"
    label = "top-5"
    meaning = "share of images with the right answer among the first five"
    printed = ()
    place = 3


def correct(answers: dict[str, np.ndarray], k: int) -> np.ndarray | None:
    """Check whether each image's label is among the first k answers, bool [N]; None without labels or k answers."""
    index, label = answers.get("topk_index"), answers.get("label")
    if index is None or label is None or not len(label) or index.shape[1] < k or len(index) != len(label):
        return None
    if label.max() < 0:  # images without labels
        return None
    return np.asarray((index[:, :k] == label[:, None]).any(axis=1))


TOP1, TOP5 = Top1(1), Top5(5)
