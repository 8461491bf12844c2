"""Mean average precision as metrics: by the task's own measure and by boxes, with the jackknife's intervals."""

from __future__ import annotations

import numpy as np

from dyno.analysis.metrics import detection
from dyno.analysis.metrics.accuracy import same_photographs
from dyno.analysis.metrics.detection import WORDS, MeanAP, Scores
from dyno.analysis.metrics.metric import Change, Metric, MetricValue
from dyno.analysis.records.results import TrialResult
from dyno.analysis.stats import Interval


class MeanAveragePrecision(Metric):
    """mAP over overlaps from 0.5 to 0.95, by masks or keypoints where the task is about those."""

    name = "mAP"
    label = "mAP50-95"
    column = "map50_95"
    meaning = "mean of mAP over overlaps from 0.5 to 0.95"
    by = "the jackknife's 95 % interval"
    change_by = "the jackknife's 95 % interval"
    place = 2

    def scores(self, result: MeanAP) -> Scores:
        """Return the scores that the value is the mean of."""
        return result.own

    def mean(self, scores: Scores) -> np.ndarray:
        """Return the value from all images, then without each group of them, [1 + groups]."""
        return scores.map50_95

    def of(self, trial: TrialResult) -> MetricValue | None:
        result = detection.of(trial)
        if result is None:
            return None
        scores = self.scores(result)
        share = detection.jackknife(self.mean(scores))
        low, high = (float(np.clip(limit, 0, 1)) for limit in (share.low, share.high))
        return MetricValue(Interval(share.value, low, high), scores.images, WORDS[result.kind])

    def change(self, trial: TrialResult, reference: TrialResult) -> Change | None:
        """Compute the paired change: both lose the same images in each group."""
        own, other = detection.of(trial), detection.of(reference)
        if own is None or other is None or own.kind != other.kind or not same_photographs(trial, reference):
            return None
        mine, theirs = self.scores(own), self.scores(other)
        if mine.images != theirs.images or mine.each.shape != theirs.each.shape:
            return None
        return Change(mine.images, detection.jackknife(self.mean(mine) - self.mean(theirs)))


class MeanAveragePrecision50(MeanAveragePrecision):
    """mAP at an overlap of 0.5."""

    name = "mAP50"
    label = "mAP50"
    column = "map50"
    meaning = "mAP at an overlap of 0.5"
    printed = ("",)
    rank = 4
    place = 4

    def mean(self, scores: Scores) -> np.ndarray:
        return scores.map50


class BoxMeanAveragePrecision(MeanAveragePrecision):
    """mAP of the boxes that belong to masks or keypoints."""

    name = "box_mAP"
    label = "boxes' mAP50-95"
    column = "box_map50_95"
    meaning = "map50_95 of the boxes"
    printed = ()
    place = 5

    def scores(self, result: MeanAP) -> Scores:
        return result.boxes

    def of(self, trial: TrialResult) -> MetricValue | None:
        result = super().of(trial)
        return None if result is None else MetricValue(result.interval, result.images)


class BoxMeanAveragePrecision50(BoxMeanAveragePrecision):
    """The same at an overlap of 0.5."""

    name = "box_mAP50"
    label = "boxes' mAP50"
    column = "box_map50"
    meaning = "map50 of the boxes"
    place = 6

    def mean(self, scores: Scores) -> np.ndarray:
        return scores.map50


MAP, MAP50, BOX_MAP, BOX_MAP50 = (
    MeanAveragePrecision(),
    MeanAveragePrecision50(),
    BoxMeanAveragePrecision(),
    BoxMeanAveragePrecision50(),
)
