"""What is common to all metrics of accuracy: which images two trials share, budgets, and the budget's decision."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.results.metrics import known, measured
from dyno.results.metrics.metric import Change, Metric, MetricValue
from dyno.results.stats import Interval, paired_difference, wilson
from dyno.results.trial_result import TrialResult
from dyno.worker.facts.job import AnsweredImages
from dyno.worker.spec import UserError, check_known

WITHIN, OVER, UNDECIDED = "within", "over", "undecided"
MOST_IMAGES = 10_000_000  # beyond this "more images" isn't advice


@dataclass(frozen=True)
class Budget:
    """Points (percent) of a metric that a trial may lie below the reference."""

    metric: str
    points: float

    @property
    def limit(self) -> float:
        """The lowest change that is within it, as a share."""
        return -self.points / 100

    def __str__(self) -> str:
        return f"{self.metric}={self.points:g}"


@dataclass(frozen=True)
class BudgetDecision:
    """`within`, `over` or `undecided`; `more` is roughly how many more images would settle it (None: none would)."""

    verdict: str
    more: int | None = None


def make_budgets(wanted: Mapping[str, float]) -> tuple[Budget, ...]:
    """Build budgets from a study's table: `{"top1": 0.5}` is at most half a point below the reference.

    UserError for an unknown metric, and for points outside 0 to 100.
    """
    for metric, points in wanted.items():
        check_known("budget", metric, list(known()))
        if not 0 <= points <= 100:
            raise UserError(f"budget {metric}={points:g} must be between 0 and 100 points, e.g. {metric}=0.5")
    return tuple(Budget(metric, points) for metric, points in wanted.items())


def judged(trial: TrialResult) -> bool:
    """Return whether the trial has an accuracy, by any metric of its task."""
    return bool(measured(trial))


def set_aside(trial: TrialResult) -> int:
    """Return the number of images of the trial's data that were not tested on because calibration has them."""
    return trial.facts.data.set_aside if trial.facts.data else 0


def same_photographs(trial: TrialResult, other: TrialResult) -> bool:
    """Return whether both answered the same photographs under the same numbers, perhaps decoded to two sizes.

    By the hash over the photographs that the decoded data set has; where one is missing, by the data's name and labels.
    """
    own, their = (t.facts.data or AnsweredImages() for t in (trial, other))
    if own.photographs and their.photographs:
        return own.photographs == their.photographs
    if trial.size == other.size:
        return True
    label, others = (t.answers.get("label") for t in (trial, other))
    if label is None or others is None or own.name != their.name:
        return False
    here, there = match_images(trial.answers, other.answers)
    return np.array_equal(label[here], others[there])


def match_images(own: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of the same images in two trials' answers, by `sample`; by position where that is not stored."""
    if "sample" in own and "sample" in other and not np.array_equal(own["sample"], other["sample"]):
        _, here, there = np.intersect1d(own["sample"], other["sample"], return_indices=True)
        return here, there
    names = ("sample", "label", "topk_index")
    same = np.arange(min(len(next(a[name] for name in names if name in a)) for a in (own, other)))
    return same, same


def decide_accuracy(change: Change, budget: Budget) -> BudgetDecision:
    """Decide whether the loss against the reference stays within the budget, with confidence.

    `within` and `over` only when the whole 95 % interval of the change lies on that side of the budget. Otherwise
    `undecided`, with the number of further images after which the same rates would settle it. A loss is `within` only
    from the metric's least number of images on, unless nothing changed at all.
    """
    verdict, found = side(change.difference, budget.limit), change.difference
    if verdict == WITHIN and change.images < change.least_images and not found.low == found.value == found.high == 0:
        return BudgetDecision(UNDECIDED, change.least_images - change.images)
    if verdict != UNDECIDED:
        return BudgetDecision(verdict)
    count = change.enough(budget.limit)
    return BudgetDecision(UNDECIDED, None if count is None or count > MOST_IMAGES else _round_up(count - change.images))


def decide_all(changes: Mapping[str, Change], budgets: Sequence[Budget]) -> BudgetDecision | None:
    """Return the strictest decision over several budgets: over before undecided before within; None when none applies.

    `changes` are a trial's by the metric's name.
    """
    decisions = [decide_accuracy(changes[budget.metric], budget) for budget in budgets if budget.metric in changes]
    order = (WITHIN, UNDECIDED, OVER)
    return max(decisions, key=lambda d: (order.index(d.verdict), d.more or 0), default=None)


def side(difference: Interval, limit: float) -> str:
    """Return WITHIN where the whole interval is above the limit (a share), OVER where it is below, else UNDECIDED."""
    return WITHIN if difference.low >= limit else OVER if difference.high < limit else UNDECIDED


def _round_up(count: int) -> int:
    """Round up to two leading digits: it is an estimate and should look like one."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


# Shares of images that are answered right: top-1 and top-5, with Wilson's interval, and Tango's for the change.


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
        here, there = match_images(trial.answers, reference.answers)
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
