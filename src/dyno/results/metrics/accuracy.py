"""Common parts of all accuracy metrics: images shared by two trials, budgets, and the decision on a budget."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dyno.formatting import csv_cell
from dyno.results.metrics import list_measured, list_metrics
from dyno.results.metrics.metric import Change, Metric, MetricValue
from dyno.results.stats import CONFIDENCE, Interval, compute_wilson, paired_chance, paired_difference, t_quantile
from dyno.results.trial_result import Results, TrialResult
from dyno.worker.facts.job import AnsweredImages
from dyno.worker.record import read_json, write_text
from dyno.worker.spec import UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

WITHIN, OVER, UNDECIDED = "within", "over", "undecided"
KEEP_OPTION = "keep"  # option of mixed precision: number of layers in a higher precision
MAX_CANDIDATES = 10  # candidates of mixed precision for a trial
MAX_IMAGES = 10_000_000  # no advice to use more images beyond this


@dataclass(frozen=True)
class Budget:
    """Points (percent) of a metric that a trial may lose against the reference."""

    metric: str
    points: float

    @property
    def limit(self) -> float:
        """The largest permitted loss, as a (negative) share."""
        return -self.points / 100

    def __str__(self) -> str:
        return f"{self.metric}={self.points:g}"


@dataclass(frozen=True)
class BudgetDecision:
    """`within`, `over` or `undecided`; `chance` is the one-sided p-value of a loss beyond the budget.

    `more` is roughly the number of further images that would settle it, None if no number would.
    """

    verdict: str
    more: int | None = None
    chance: float = 1.0


def make_budgets(points_by_metric: Mapping[str, float]) -> tuple[Budget, ...]:
    """Build budgets from a study's table; `{"top1": 0.5}` allows a loss of half a point.

    UserError for an unknown metric, and for points outside 0 to 100.
    """
    for metric, points in points_by_metric.items():
        check_known("budget", metric, list(list_metrics()))
        if not 0 <= points <= 100:
            raise UserError(f"budget {metric}={points:g} must be between 0 and 100 points, e.g. {metric}=0.5")
    return tuple(Budget(metric, points) for metric, points in points_by_metric.items())


def make_series_key(trial: TrialResult) -> tuple[Any, ...]:
    """Return the key shared by the mixed precisions of one trial, except the batch."""
    options = tuple(sorted((k, str(v)) for k, v in trial.options.items() if k != KEEP_OPTION))
    return trial.model, trial.backend, trial.precision, trial.size, trial.device, trial.runtime, options


def has_accuracy(trial: TrialResult) -> bool:
    """Return whether the trial has a value of any metric of its task."""
    return bool(list_measured(trial))


def set_aside(trial: TrialResult) -> int:
    """Return the number of images reserved for calibration, and so not tested on."""
    return trial.facts.data.set_aside if trial.facts.data else 0


def same_photographs(trial: TrialResult, other: TrialResult) -> bool:
    """Return whether both trials answered the same photographs under the same numbers, at any decoded size.

    Compares the data sets' hash over photographs; if one is missing, the data's name and labels.
    """
    images, other_images = (t.facts.data or AnsweredImages() for t in (trial, other))
    if images.photographs and other_images.photographs:
        return images.photographs == other_images.photographs
    if trial.size == other.size:
        return True
    labels, other_labels = (t.answers.get("label") for t in (trial, other))
    if labels is None or other_labels is None or images.name != other_images.name:
        return False
    index, other_index = match_images(trial.answers, other.answers)
    return np.array_equal(labels[index], other_labels[other_index])


def match_images(answers: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of common images in both trials' answers: by `sample`, or by position if not stored."""
    if "sample" in answers and "sample" in reference and not np.array_equal(answers["sample"], reference["sample"]):
        _, index, reference_index = np.intersect1d(answers["sample"], reference["sample"], return_indices=True)
        return index, reference_index
    names = ("sample", "label", "topk_index")
    positions = np.arange(min(len(next(a[name] for name in names if name in a)) for a in (answers, reference)))
    return positions, positions


def decide_accuracy(change: Change, budget: Budget) -> BudgetDecision:
    """Decide with confidence whether the loss against the reference stays within the budget.

    `within` and `over` need the whole 95 % interval of the change on one side of the budget. Otherwise it is
    `undecided`, with the number of further images that would settle it at the same rates. With fewer images than the
    metric needs, `within` needs no change at all, and `over` an interval of twice the width.
    """
    verdict, interval = judge_difference(change.difference, budget.limit), change.difference
    is_unproven = verdict == WITHIN or judge_difference(change.cautious, budget.limit) != verdict
    if change.images < change.least_images and is_unproven and not interval.low == interval.value == interval.high == 0:
        return BudgetDecision(UNDECIDED, change.least_images - change.images)
    count = change.enough(budget.limit) if verdict == UNDECIDED else None
    is_settled = count is not None and count <= MAX_IMAGES
    more = _round_up(max(count or 0, change.least_images) - change.images) if is_settled else None
    return BudgetDecision(verdict, more, change.chance(budget.limit))


def decide_all(changes: Mapping[str, Change], budgets: Sequence[Budget]) -> BudgetDecision | None:
    """Return the strictest decision over several budgets (over, undecided, within); None if no budget applies.

    `changes` are a trial's changes by metric name.
    """
    decisions = [decide_accuracy(changes[budget.metric], budget) for budget in budgets if budget.metric in changes]
    order = (WITHIN, UNDECIDED, OVER)
    strictest = max(decisions, key=lambda d: (order.index(d.verdict), d.more or 0), default=None)
    return strictest and replace(strictest, chance=max(each.chance for each in decisions))


def confirm(chances: Sequence[float]) -> list[bool]:
    """Return whether each candidate is within a budget, from their `chance` in the order tried.

    The k-th candidate may spend the share 1 / (k (1 + 1/2 + … + 1/10)) of 2.5 %. Over MAX_CANDIDATES, the risk of
    accepting any with a larger loss is at most that of a single trial (Bonferroni's inequality).
    """
    total = sum(1 / k for k in range(1, MAX_CANDIDATES + 1))
    return [chance <= (1 - CONFIDENCE) / 2 / (k * total) for k, chance in enumerate(chances, 1)]


def judge_difference(difference: Interval, limit: float) -> str:
    """Return WITHIN if the whole interval is above the limit (a share), OVER if it is below, else UNDECIDED."""
    return WITHIN if difference.low >= limit else OVER if difference.high < limit else UNDECIDED


def _round_up(count: int) -> int:
    """Round an estimate up to two leading digits."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


# Shares of correctly answered images: top-1 and top-5, with Wilson's interval, and Tango's for the change.


@dataclass(frozen=True)
class PairedChange(Change):
    """Change over common images: `gained` are correct only in the trial, `lost` only in the reference."""

    gained: int
    lost: int

    def chance(self, limit: float) -> float:
        return paired_chance(self.gained, self.lost, self.images, limit)

    def enough(self, limit: float) -> int | None:
        """Estimate like `Change.enough`, but with the asymmetric interval itself."""

        def is_settled(count: int) -> bool:
            scale = count / self.images
            return (
                judge_difference(paired_difference(self.gained * scale, self.lost * scale, count), limit) != UNDECIDED
            )

        low = high = self.images
        while not is_settled(high):
            if high > MAX_IMAGES:
                return None
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if is_settled(middle) else (middle, high)
        return high


class HitShare(Metric):
    """Share of images that `hits` marks as correct."""

    interval_text = "Wilson's 95 % interval"
    change_interval_text = "Tango's 95 % interval"

    @abstractmethod
    def hits(self, trial: TrialResult) -> np.ndarray | None:
        """Return whether each image is answered correctly, bool [N] in the order of `sample`; None if unknown."""

    def compute(self, trial: TrialResult) -> MetricValue | None:
        hits = self.hits(trial)
        return None if hits is None else MetricValue(compute_wilson(int(hits.sum()), len(hits)), len(hits))

    def change(self, trial: TrialResult, reference: TrialResult) -> PairedChange | None:
        hits, reference_hits = self.hits(trial), self.hits(reference)
        if hits is None or reference_hits is None or not same_photographs(trial, reference):
            return None
        index, reference_index = match_images(trial.answers, reference.answers)
        hits, reference_hits = hits[index], reference_hits[reference_index]
        if not len(hits):
            return None
        gained, lost = int((hits & ~reference_hits).sum()), int((reference_hits & ~hits).sum())
        return PairedChange(len(hits), paired_difference(gained, lost, len(hits)), gained, lost)

    def unchanged(self, images: int) -> Interval:
        return paired_difference(0, 0, images)


class TopK(HitShare):
    """Share of images with the label among a classifier's first k answers."""

    def __init__(self, k: int) -> None:
        self.k = k

    def hits(self, trial: TrialResult) -> np.ndarray | None:
        return mark_correct(trial.answers, self.k)


class Top1(TopK):
    """Share of images with the label as first answer."""

    name = column = "top1"
    label = "top-1"
    meaning = "share of images whose first answer is right"
    position = 1


class Top5(TopK):
    """Share of images with the label among the first five answers; undefined below five classes."""

    name = column = "top5"
    label = "top-5"
    meaning = "share of images with the right answer among the first five"
    printed = ()
    position = 3


def mark_correct(answers: dict[str, np.ndarray], k: int) -> np.ndarray | None:
    """Return whether each image's label is among its first k answers, bool [N]; None without labels or k answers."""
    index, label = answers.get("topk_index"), answers.get("label")
    if index is None or label is None or not len(label) or index.shape[1] < k or len(index) != len(label):
        return None
    if label.max() < 0:  # images without labels
        return None
    return np.asarray((index[:, :k] == label[:, None]).any(axis=1))


TOP1, TOP5 = Top1(1), Top5(5)


# Images that flip between a trial and its reference, and the shift of first answers' scores.


@dataclass(frozen=True)
class Flip:
    """An image that only the reference (`is_lost`) or only the trial answers correctly.

    `image` is its row in the decoded data, `label` the name of its class; then the first answers with scores.
    """

    image: int
    label: str
    reference: str
    answer: str
    reference_score: float
    score: float
    is_lost: bool


def list_flips(trial: TrialResult, reference: TrialResult) -> list[Flip]:
    """Return the lost images, then the gained ones, each in descending order of the reference's score."""
    answers, reference_answers = trial.answers, reference.answers
    hits, reference_hits = mark_correct(answers, 1), mark_correct(reference_answers, 1)
    if hits is None or reference_hits is None or not same_photographs(trial, reference):
        return []
    rows, reference_rows = match_images(answers, reference_answers)
    hits, reference_hits = hits[rows], reference_hits[reference_rows]
    names = [str(name) for name in answers.get("classes", ())]

    def name_class(index: int) -> str:
        return names[index] if 0 <= index < len(names) else f"class {index}"

    flips = []
    for k in np.flatnonzero(hits != reference_hits).tolist():
        i, j = int(rows[k]), int(reference_rows[k])
        flips.append(Flip(
            int(answers["sample"][i]) if "sample" in answers else i, name_class(int(answers["label"][i])),
            name_class(int(reference_answers["topk_index"][j, 0])), name_class(int(answers["topk_index"][i, 0])),
            float(reference_answers["topk_score"][j, 0]), float(answers["topk_score"][i, 0]), bool(reference_hits[k]),
        ))  # fmt: skip
    return sorted(flips, key=lambda flip: (not flip.is_lost, -flip.reference_score))


def compute_score_shift(trial: TrialResult, reference: TrialResult) -> Interval | None:
    """Return the mean difference between first answers' scores in trial and reference, paired over images.

    In the network's own unit, with Student's t interval (NaN for one image); None if a score is missing.
    """
    answers, reference_answers = trial.answers, reference.answers
    if "topk_score" not in answers or "topk_score" not in reference_answers or not same_photographs(trial, reference):
        return None
    index, reference_index = match_images(answers, reference_answers)
    shifts = answers["topk_score"][index, 0].astype(np.float64) - reference_answers["topk_score"][reference_index, 0]
    if not len(shifts) or not np.isfinite(shifts).all():
        return None
    mean, reach = float(shifts.mean()), math.nan
    if len(shifts) > 1:
        reach = t_quantile(len(shifts) - 1) * float(shifts.std(ddof=1)) / math.sqrt(len(shifts))
    return Interval(mean, mean - reach, mean + reach)


class Photographs(NamedTuple):
    """Decoded images: `names` ([] if unknown), and `pixels`, uint8 [N, C, H, W].

    `sizes`, if they have objects: height and width of the originals before letterboxing, [N, 2].
    """

    names: list[str]
    pixels: np.ndarray
    sizes: np.ndarray | None

    def name(self, image: int) -> str:
        return self.names[image] if image < len(self.names) else ""


def open_photographs(trial: TrialResult) -> Photographs | None:
    """Return the images of the trial's decoded data.

    None if the cache no longer has it, or has other data in its place.
    """
    data = trial.spec.data
    folder = Path(data.folder)
    if not data.folder or not (folder / "meta.json").is_file():
        return None
    try:
        if read_json(folder / "meta.json").get("sha256") != data.sha256:
            return None
        names = read_json(folder / "names.json")["names"] if (folder / "names.json").is_file() else []
        pixels = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
        sizes = np.load(folder / "sizes.npy", allow_pickle=False) if (folder / "sizes.npy").is_file() else None
        return Photographs([*map(str, names)], pixels, sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Confusions of a classifier: the matrix, the accuracy of each class, and the largest confusions.


@dataclass(frozen=True)
class Confusion:
    """Confusion matrix: `counts[i, j]` images of class `classes[i]` were answered as `classes[j]`.

    Classes without any count are left out; `names` belong to `classes`. For a detector, `counted` is objects.
    """

    counts: np.ndarray
    classes: np.ndarray
    names: list[str]
    counted: str = "images"

    def to_pandas(self) -> pd.DataFrame:
        """Return the matrix with names on both sides: rows are the labels, columns the answers."""
        import pandas as pd

        return pd.DataFrame(self.counts, index=pd.Index(self.names, name="label"), columns=self.names)

    def per_class(self) -> pd.DataFrame:
        """Return a row for each class that has images, lowest accuracy first.

        Columns are `class`, `images`, `correct`, `top1`, `top1_low`, `top1_high` (percent, Wilson), and the most
        frequent wrong class (`taken_for`) with its count (`times`).
        """
        import pandas as pd

        rows = pd.DataFrame.from_records(
            [self._make_class_row(i) for i in np.flatnonzero(self.counts.sum(axis=1)).tolist()]
        )
        return rows.sort_values(["top1", "images"], ascending=[True, False], kind="stable", ignore_index=True)

    def _make_class_row(self, i: int) -> dict[str, Any]:
        images, correct = int(self.counts[i].sum()), int(self.counts[i, i])
        share = compute_wilson(correct, images)
        errors = self.counts[i].copy()
        errors[i] = 0
        wrong_class = int(errors.argmax())
        return {
            "class": self.names[i], "images": images, "correct": correct, "top1": 100 * share.value,
            "top1_low": 100 * share.low, "top1_high": 100 * share.high,
            "taken_for": self.names[wrong_class] if errors[wrong_class] else "", "times": int(errors[wrong_class]),
        }  # fmt: skip

    def list_largest(self, max_count: int = 5) -> list[tuple[str, str, int, int]]:
        """Return label, answer, count, and number of images with that label, most frequent first."""
        errors = self.counts.copy()
        np.fill_diagonal(errors, 0)
        order = np.argsort(-errors, axis=None, kind="stable")[:max_count]
        pairs = [divmod(int(k), errors.shape[1]) for k in order]
        return [(self.names[i], self.names[j], int(errors[i, j]), int(self.counts[i].sum())) for i, j in pairs
                if errors[i, j]]  # fmt: skip

    def describe_other_order(self) -> str:
        """Describe a class renumbering that makes significantly more answers correct; "" without one."""
        from scipy.optimize import linear_sum_assignment

        total, correct = int(self.counts.sum()), int(np.trace(self.counts))
        rows, columns = linear_sum_assignment(self.counts, maximize=True)
        renumbered = int(self.counts[rows, columns].sum())
        if 2 * renumbered < total or compute_wilson(correct, total).high >= compute_wilson(renumbered, total).low:
            return ""
        confusions = [(int(self.counts[i, j]), i, j) for i, j in zip(rows, columns, strict=True) if i != j]
        # A bad network's errors also fit some order, but it gives several classes few correct answers.
        has_images = self.counts.sum(axis=1) > 0
        is_scattered = has_images & (2 * self.counts[rows, columns] < self.counts.sum(axis=1))
        if 3 * is_scattered.sum() >= has_images.sum():
            return ""
        count, i, j = max(confusions)
        example = (
            f"it takes {self.names[i]} for {self.names[j]} in {count:,} of {int(self.counts[i].sum()):,} {self.counted}"
        )
        remedy = (
            "a table of path,label with its numbers as labels" if self.counted == "images" else
            "the categories or names the network's numbers"
        )  # fmt: skip
        return (
            "the network seems to number its classes differently from the data: renumbered, "
            f"{renumbered / total:.0%} of its answers would be right instead of {correct / total:.0%} ({example}); "
            f"give {remedy}"
        )


def read_confusion(trial: TrialResult) -> Confusion | None:
    """Return the confusion matrix of first answers; None unless the trial is a classifier on labelled images."""
    answers = trial.answers
    index, label = answers.get("topk_index"), answers.get("label")
    if index is None or label is None or not len(label) or len(index) != len(label) or (label < 0).any():
        return None
    return count_confusions(label, index[:, 0].astype(np.int64), [str(name) for name in answers.get("classes", ())])


def count_confusions(
    label: np.ndarray, answer: np.ndarray, class_names: Sequence[str], counted: str = "images"
) -> Confusion:
    """Count pairs of label and answer, one pair per image or object."""
    classes, positions = np.unique(np.concatenate([label, answer]), return_inverse=True)
    counts = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(counts, (positions[: len(label)], positions[len(label) :]), 1)
    names = [class_names[c] if 0 <= c < len(class_names) else f"class {c}" for c in classes.tolist()]
    return Confusion(counts, classes, _number_duplicates(names, classes), counted)


def _number_duplicates(names: list[str], classes: np.ndarray) -> list[str]:
    """Append the class number to names shared by two classes."""
    return [f"{n} ({c})" if names.count(n) > 1 else n for n, c in zip(names, classes.tolist(), strict=True)]


def choose_trials(results: Results, labels: str = "classes") -> list[TrialResult]:
    """Return one trial with labelled answers per configuration and size; batches have the same answers.

    `labels` is "classes" or "objects".
    """
    trials: dict[tuple[str, str, str], TrialResult] = {}
    for t in results:
        if t.good and ("label" in t.answers if labels == "classes" else t.task.labels == labels):
            trials.setdefault((t.model, t.size, t.configuration), t)
    return list(trials.values())


def write_confusion(results: Results, folder: Path) -> list[Path]:
    """Write FOLDER/confusion-ID.csv and FOLDER/classes-ID.csv of the chosen trials."""
    files = []
    for t in choose_trials(results):
        if matrix := read_confusion(t):
            files += [folder / f"confusion-{t.id}.csv", folder / f"classes-{t.id}.csv"]
            counts = matrix.to_pandas().rename(index=csv_cell, columns=csv_cell)
            write_text(files[-2], counts.to_csv())
            write_text(files[-1], matrix.per_class().map(csv_cell).to_csv(index=False))
    return files
