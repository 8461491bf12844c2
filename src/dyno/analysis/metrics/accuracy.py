"""Task accuracy from stored answers: top-1 and top-5, the paired difference to a reference, and the budget decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.analysis.metrics import detection
from dyno.analysis.records.results import TrialResult
from dyno.analysis.stats import Interval, paired_difference, wilson
from dyno.worker.spec import UserError, check_known

WITHIN, OVER, UNDECIDED = "within", "over", "undecided"
METRICS = {"top1": 1, "top5": 5}
MEAN_AP = "mAP"  # of detectors: points of mAP50-95
MOST_IMAGES = 10_000_000  # beyond this "more images" is no advice


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 of one trial as shares with Wilson intervals; `top5` is None with fewer than five answers."""

    count: int
    top1: Interval
    top5: Interval | None


@dataclass(frozen=True)
class Paired:
    """A trial and its reference on the same images: `gained` only the trial has right, `lost` only the reference.

    `difference` is trial minus reference as a share, with Tango's interval.
    """

    count: int
    gained: int
    lost: int
    difference: Interval


@dataclass(frozen=True)
class Budget:
    """Points (percent) of a metric that a trial may lie below the reference."""

    metric: str
    points: float

    def __str__(self) -> str:
        return f"{self.metric}={self.points:g}"


@dataclass(frozen=True)
class Decision:
    """`within`, `over` or `undecided`; `more` is roughly how many more images would settle it (None: none would)."""

    verdict: str
    more: int | None = None


def budgets(wanted: Mapping[str, float]) -> tuple[Budget, ...]:
    """Budgets from a study's table: `{"top1": 0.5}` is at most half a point below the reference.

    UserError for a metric that is none, and for points outside 0 to 100.
    """
    for metric, points in wanted.items():
        check_known("budget", metric, (*METRICS, MEAN_AP))
        if not 0 <= points <= 100:
            raise UserError(f"budget {metric}={points:g} must be between 0 and 100 points, e.g. {metric}=0.5")
    return tuple(Budget(metric, points) for metric, points in wanted.items())


def correct(answers: dict[str, np.ndarray], k: int) -> np.ndarray | None:
    """Whether each image's label is among the first k answers, bool [N]; None without labels or with fewer than k."""
    index, label = answers.get("topk_index"), answers.get("label")
    if index is None or label is None or not len(label) or index.shape[1] < k or len(index) != len(label):
        return None
    if label.max() < 0:  # images without labels
        return None
    return np.asarray((index[:, :k] == label[:, None]).any(axis=1))


def of(trial: TrialResult) -> Accuracy | None:
    """Accuracy of the trial, None when it isn't a classifier on labelled images."""
    top1 = correct(trial.answers, 1)
    if top1 is None:
        return None
    top5 = correct(trial.answers, 5)
    return Accuracy(len(top1), _share(top1), None if top5 is None else _share(top5))


def judged(trial: TrialResult) -> bool:
    """Whether the trial has an accuracy: of a classifier on labelled images, or of a detector on known objects."""
    return correct(trial.answers, 1) is not None or detection.of(trial) is not None


def set_aside(trial: TrialResult) -> int:
    """How many images of the trial's data were not tested on because calibration has them."""
    return int((trial.facts.get("data") or {}).get("set_aside") or 0)


def _share(hits: np.ndarray) -> Interval:
    return wilson(int(hits.sum()), len(hits))


def paired(trial: TrialResult, reference: TrialResult, metric: str = "top1") -> Paired | None:
    """The trial against the reference on the images both have answered, None when there are none."""
    own, other = (correct(t.answers, METRICS[metric]) for t in (trial, reference))
    if own is None or other is None or not same_photographs(trial, reference):
        return None
    here, there = matching(trial.answers, reference.answers)
    own, other = own[here], other[there]
    if not len(own):
        return None
    gained, lost = int((own & ~other).sum()), int((other & ~own).sum())
    return Paired(len(own), gained, lost, paired_difference(gained, lost, len(own)))


def mean_ap_change(trial: TrialResult, reference: TrialResult) -> Interval | None:
    """mAP50-95 of the trial less the reference's as a share, None where they didn't see the same photographs."""
    own, other = detection.of(trial), detection.of(reference)
    if own is None or other is None or not same_photographs(trial, reference):
        return None
    return detection.difference(own, other)


def same_photographs(trial: TrialResult, other: TrialResult) -> bool:
    """Whether both answered the same photographs under the same numbers, perhaps decoded to two sizes.

    By the hash over the photographs that the decoded data set has; where one is missing, by the data's name and labels.
    """
    own, their = (t.facts.get("data") or {} for t in (trial, other))
    if (mine := own.get("photographs")) and (theirs := their.get("photographs")):
        return bool(mine == theirs)
    if trial.size == other.size:
        return True
    label, others = (t.answers.get("label") for t in (trial, other))
    if label is None or others is None or own.get("name") != their.get("name"):
        return False
    here, there = matching(trial.answers, other.answers)
    return np.array_equal(label[here], others[there])


def matching(own: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the same images in two trials' answers, by `sample`; by position where that is not stored."""
    if "sample" in own and "sample" in other and not np.array_equal(own["sample"], other["sample"]):
        _, here, there = np.intersect1d(own["sample"], other["sample"], return_indices=True)
        return here, there
    same = np.arange(min(len(own["topk_index"]), len(other["topk_index"])))
    return same, same


def decide(pair: Paired, budget: Budget) -> Decision:
    """Whether the loss against the reference stays within the budget, with confidence.

    `within` and `over` only when the whole 95 % interval of the paired difference lies on that side of the budget.
    Otherwise `undecided`, with the number of further images after which the same rates of gained and lost images would
    settle it.
    """
    verdict = _verdict(pair.difference, budget)
    if verdict != UNDECIDED:
        return Decision(verdict)
    count = _enough(pair, budget)
    return Decision(UNDECIDED, None if count is None else _round_up(count - pair.count))


def decide_all(trial: TrialResult, reference: TrialResult, limits: Sequence[Budget]) -> Decision | None:
    """The strictest decision over several budgets: over before undecided before within; None when none applies."""
    decisions = [d for limit in limits if (d := _decision(trial, reference, limit))]
    order = (WITHIN, UNDECIDED, OVER)
    return max(decisions, key=lambda d: (order.index(d.verdict), d.more or 0), default=None)


def _decision(trial: TrialResult, reference: TrialResult, limit: Budget) -> Decision | None:
    if limit.metric == MEAN_AP:
        own, found = detection.of(trial), mean_ap_change(trial, reference)
        return decide_mean_ap(found, own.own.images, limit) if own and found else None
    pair = paired(trial, reference, limit.metric)
    return decide(pair, limit) if pair else None


def decide_mean_ap(difference: Interval, images: int, budget: Budget) -> Decision:
    """As `decide`, by the jackknife's interval, whose width falls with the square root of the images."""
    if math.isnan(difference.low):
        return Decision(UNDECIDED)
    verdict = _verdict(difference, budget)
    gap = abs(difference.value + budget.points / 100)
    if verdict != UNDECIDED or not gap:
        return Decision(verdict)
    count = images * ((difference.value - difference.low) / gap) ** 2
    return Decision(UNDECIDED, _round_up(math.ceil(count - images)) if count < MOST_IMAGES else None)


def _verdict(difference: Interval, budget: Budget) -> str:
    limit = -budget.points / 100
    return WITHIN if difference.low >= limit else OVER if difference.high < limit else UNDECIDED


def _enough(pair: Paired, budget: Budget) -> int | None:
    def settled(count: int) -> bool:
        scale = count / pair.count
        return _verdict(paired_difference(pair.gained * scale, pair.lost * scale, count), budget) != UNDECIDED

    low = high = pair.count
    while not settled(high):
        if high > MOST_IMAGES:
            return None
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if settled(middle) else (middle, high)
    return high


def _round_up(count: int) -> int:
    """To two leading digits: it is an estimate and should look like one."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step
