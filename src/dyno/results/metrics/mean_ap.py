"""Mean average precision as metrics: by the task's own measure and by boxes, with the jackknife's intervals."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from dyno.results.files import read_npz
from dyno.results.metrics.accuracy import Confusion, count_confusions, read_confusion, same_photographs
from dyno.results.metrics.metric import Change, Metric, MetricValue
from dyno.results.stats import Interval, t_quantile
from dyno.results.trial_result import TrialResult
from dyno.worker.extras import load_library
from dyno.worker.record import parse_json, save_arrays
from dyno.worker.spec import UserError
from dyno.worker.system import cache_dir

# Average precision from matches: COCOeval's accumulation on arrays, repeatable without some images.


@dataclass(frozen=True)
class Matches:
    """All detections of one class in descending order of score: `right` and `ignored` bool [thresholds, n].

    `group` [n] is the image group of each detection, `object_counts` the objects per image group, and `score` float64
    [n].
    """

    right: np.ndarray
    ignored: np.ndarray
    group: np.ndarray
    object_counts: np.ndarray
    score: np.ndarray


def collect_matches(
    evaluations: Iterable[dict[str, Any] | None], groups: dict[int, int], count: int, thresholds: int
) -> Matches:
    """Collect one class's entries of `COCOeval.evalImgs`; `groups` maps an image's id to one of `count` groups."""
    entries = [e for e in evaluations if e is not None]
    scores = np.concatenate([np.empty(0), *(np.asarray(e["dtScores"], np.float64) for e in entries)])
    order = np.argsort(-scores, kind="mergesort")  # stable like COCOeval, so that ties rank alike
    object_counts = np.zeros(count, np.int64)
    for e in entries:
        object_counts[groups[e["image_id"]]] += int(np.count_nonzero(np.asarray(e["gtIgnore"]) == 0))
    entry_groups = [np.full(len(e["dtScores"]), groups[e["image_id"]], np.int64) for e in entries]
    empty = np.empty((thresholds, 0))
    is_matched = np.concatenate([empty, *(e["dtMatches"] for e in entries)], axis=1)[:, order] != 0
    ignored = np.concatenate([empty, *(e["dtIgnore"] for e in entries)], axis=1)[:, order] != 0
    group = np.concatenate([np.empty(0, np.int64), *entry_groups])[order]
    return Matches(is_matched & ~ignored, ignored, group, object_counts, scores[order])


def compute_average_precision(matches: Matches, recalls: np.ndarray, without: int | None = None) -> np.ndarray:
    """Compute average precision at each threshold, optionally `without` one image group; NaN if no object is left.

    The mean over `recalls` of the best precision at that recall or a higher one (Everingham et al. 2010, with COCO's
    101 points). `ignored` detections count neither as right nor as wrong.
    """
    object_count = matches.object_counts.sum() - (matches.object_counts[without] if without is not None else 0)
    right, ignored = matches.right, matches.ignored
    if object_count == 0:
        return np.full(len(right), np.nan)
    if without is not None:
        keep = matches.group != without
        right, ignored = right[:, keep], ignored[:, keep]
    hits = np.cumsum(right, axis=1, dtype=np.float64)
    detections = np.cumsum(~ignored, axis=1, dtype=np.float64)
    precision = hits / np.maximum(detections, np.spacing(1))
    best_precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    averages = np.zeros(len(right))
    for i, recall in enumerate(hits / object_count):
        positions = np.searchsorted(recall, recalls, side="left")
        averages[i] = best_precision[i, positions[positions < recall.size]].sum() / len(recalls)
    return averages


SCORE_THRESHOLDS = np.arange(1, 20) / 20  # thresholds of precision, recall and F1


def count_matches(matches: Matches) -> np.ndarray:
    """Count right and wrong detections above each of SCORE_THRESHOLDS, and objects, by image group.

    At the first overlap; float64 [scores, groups, 3]. A match depends only on detections with higher scores, so leaving
    out lower scores changes no match.
    """
    counts = np.zeros((len(SCORE_THRESHOLDS), len(matches.object_counts), 3))
    right, wrong = matches.right[0], ~matches.right[0] & ~matches.ignored[0]
    for row, threshold in zip(counts, SCORE_THRESHOLDS, strict=True):
        mask = matches.score >= threshold
        row[:, 0], row[:, 1] = (np.bincount(matches.group[each & mask], minlength=len(row)) for each in (right, wrong))
    counts[:, :, 2] = matches.object_counts
    return counts


# Accuracy of detectors from stored detections: mAP50 and mAP50-95 for boxes, masks and keypoints, with intervals.
# Matching is pycocotools' COCOeval. Intervals are by a delete-a-group jackknife over images (Kott 2001, "The
# Delete-a-Group Jackknife", Journal of Official Statistics 17): matches are accumulated again without each group, but
# not matched again.

KIND_WORDS = {"bbox": "boxes", "segm": "masks", "keypoints": "keypoints"}
JACKKNIFE_GROUPS = 20  # image groups of the jackknife
CONFUSED_MAP50, MIN_OVERLAP = (0.5, 0.5)  # mAP50 below which class numbers are suspect; overlap of a match
SCORES_VERSION = 2  # version of the stored scores
DETECTION_ARRAYS = ("detection_image", "detection_box", "detection_score", "detection_class", "mask_counts",
                    "mask_lengths", "detection_keypoints", "sample")  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """Average precision of one trial: `precisions` [1 + groups, classes, thresholds], for all images, then less each
    group.

    Shares; NaN for a class without objects. `counts` is the sum of `count_matches` over classes.
    """

    precisions: np.ndarray
    names: tuple[str, ...]
    images: int
    counts: np.ndarray

    @cached_property
    def map50_95(self) -> np.ndarray:
        """Mean over classes and thresholds, [1 + groups]."""
        return _compute_mean(self.precisions)

    @cached_property
    def map50(self) -> np.ndarray:
        """Mean over classes at an overlap of 0.5, [1 + groups]."""
        return _compute_mean(self.precisions[:, :, :1])

    @cached_property
    def rates(self) -> dict[str, np.ndarray]:
        """Precision, recall and F1 at an overlap of 0.5, over all objects, [SCORE_THRESHOLDS, 1 + groups]."""
        total = self.counts.sum(axis=1, keepdims=True)
        right, wrong, wanted = np.moveaxis(np.concatenate([total, total - self.counts], axis=1), 2, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {"precision": right / (right + wrong), "recall": right / wanted,
                    "f1": 2 * right / (right + wrong + wanted)}  # fmt: skip

    def by_class(self) -> list[tuple[str, float, float]]:
        """Return name, AP50 and AP50-95 of each class that has objects."""
        precisions = self.precisions[0]
        return [(n, float(a[0]), float(a.mean())) for n, a in zip(self.names, precisions, strict=True) if a[0] == a[0]]


def _compute_mean(values: np.ndarray) -> np.ndarray:
    is_valid = ~np.isnan(values)
    total = np.where(is_valid, values, 0).sum(axis=(1, 2))
    return np.asarray(total / np.maximum(is_valid.sum(axis=(1, 2)), 1))


@dataclass(frozen=True)
class MeanAP:
    """mAP of one trial: `own` by the task's own measure (boxes, masks or keypoints), `boxes` by its boxes."""

    kind: str
    own: Scores
    boxes: Scores


def jackknife_ap(values: np.ndarray) -> Interval:
    """Return the first value with its 95 % interval (Student's t) from those without each group; NaN for one group."""
    value, partials = float(values[0]), values[1:]
    if len(partials) < 2:
        return Interval(value, math.nan, math.nan)
    error = math.sqrt((len(partials) - 1) / len(partials) * float(((partials - value) ** 2).sum()))
    reach = t_quantile(len(partials) - 1) * error
    return Interval(value, value - reach, value + reach)


def read_detections(trial: TrialResult) -> MeanAP | None:
    """Return the trial's mAP; None for a classifier, without detections, or without ground truth in the run folder."""
    if "mean_ap" not in trial.computed:
        trial.computed["mean_ap"] = _mean_ap(trial)
    return cast("MeanAP | None", trial.computed["mean_ap"])


def _mean_ap(trial: TrialResult) -> MeanAP | None:
    kind = trial.task.coco  # "" for a classifier
    first_round = next((r for r in trial.good if r.round_index == 0), None) if kind else None
    truth = truth_file(first_round.folder, trial) if first_round else None
    if first_round is None or truth is None or not truth.is_file():
        return None
    arrays = first_round.read_arrays("outputs.npz", DETECTION_ARRAYS)
    if "detection_image" not in arrays:
        return None
    cache = _ScoreCache(arrays, truth)
    scores = cache.scores(kind)
    if np.isnan(scores.precisions).all():  # no object
        return None
    return MeanAP(kind, scores, scores if kind == "bbox" else cache.scores("bbox"))


def read_any_confusion(trial: TrialResult) -> Confusion | None:
    """Return the trial's confusion matrix over images, or over objects for a detector; None without labels."""
    return read_object_confusion(trial) if trial.task.coco else read_confusion(trial)


def read_object_confusion(trial: TrialResult) -> Confusion | None:
    """Return the class confusions of detected objects.

    None without detections or ground truth, if most objects aren't found, or if mAP50 is high.
    """
    result = read_detections(trial)
    first_round = next((r for r in trial.good if r.round_index == 0), None)
    truth = truth_file(first_round.folder, trial) if first_round else None
    if result is None or result.boxes.map50[0] >= CONFUSED_MAP50 or first_round is None or truth is None:
        return None
    return confuse_objects(first_round.read_arrays("outputs.npz", DETECTION_ARRAYS), _parse_truth(truth.read_bytes()))


def confuse_objects(arrays: Mapping[str, np.ndarray], truth: Mapping[str, Any]) -> Confusion | None:
    """Count object classes against the classes of the best detections that overlap them by half.

    None if most objects have no such detection.
    """
    mask = load_library("pycocotools.mask", "mAP")
    image_ids = {int(i) for i in arrays["sample"]}
    annotations = [a for a in truth["annotations"] if not a.get("iscrowd") and a["image_id"] in image_ids]
    by_image = {image: [*group] for image, group in groupby(sorted(annotations, key=_image_of), _image_of)}
    pairs = list[tuple[int, int]]()
    for image, objects in by_image.items():
        rows = np.flatnonzero(arrays["detection_image"] == image)
        rows = rows[np.argsort(-arrays["detection_score"][rows], kind="stable")]
        boxes = arrays["detection_box"][rows].astype(np.float64)
        boxes[:, 2:] -= boxes[:, :2]
        if not len(rows):
            continue
        is_near = mask.iou(boxes, np.array([a["bbox"] for a in objects], np.float64), [0] * len(objects)) >= MIN_OVERLAP
        pairs += [(a["category_id"], int(arrays["detection_class"][rows[each.argmax()]]))
                  for a, each in zip(objects, is_near.T, strict=True) if each.any()]  # fmt: skip
    if 2 * len(pairs) < len(annotations) or not pairs:
        return None
    label, answer = np.array(pairs, np.int64).T
    names = {c["id"]: str(c.get("name", c["id"])) for c in truth["categories"]}
    return count_confusions(label, answer, [names.get(k, f"class {k}") for k in range(1 + max(names))], "objects")


def _image_of(annotation: Mapping[str, Any]) -> int:
    return int(annotation["image_id"])


def truth_file(round_folder: Path, trial: TrialResult) -> Path | None:
    """Return the path of the data's ground truth in the run folder; None without a data set."""
    sha = trial.spec.data.sha256
    return round_folder.parents[2] / "truth" / f"{sha[:12]}.json" if sha else None


class _ScoreCache:
    """Scores in the cache, keyed by the content of detections and ground truth."""

    def __init__(self, arrays: Mapping[str, np.ndarray], truth: Path) -> None:
        self._arrays, self._truth = arrays, truth.read_bytes()

    def scores(self, kind: str) -> Scores:
        path = cache_dir() / "map" / f"{self._make_key(kind)}.npz"
        try:
            stored = read_npz(path)
            return Scores(stored["each"], tuple(map(str, stored["names"])), int(stored["images"]), stored["counts"])
        except (OSError, ValueError, KeyError, TypeError):
            computed = score_detections(self._arrays, _parse_truth(self._truth), kind)
        # Same memory order as from the cache, so that sums are rounded alike.
        computed = replace(computed, precisions=np.ascontiguousarray(computed.precisions))
        with contextlib.suppress(OSError):  # without a cache, compute
            path.parent.mkdir(parents=True, exist_ok=True)
            names = np.array(computed.names, dtype=np.str_)
            arrays = {"each": computed.precisions, "names": names, "images": computed.images, "counts": computed.counts}
            save_arrays(path, arrays)
        return computed

    def _make_key(self, kind: str) -> str:
        hasher = hashlib.sha256(f"{SCORES_VERSION} {JACKKNIFE_GROUPS} {kind}".encode() + self._truth)
        for name in DETECTION_ARRAYS:
            if name in self._arrays:
                hasher.update(name.encode() + np.ascontiguousarray(self._arrays[name]).tobytes())
        return hasher.hexdigest()[:24]


def _parse_truth(content: bytes) -> dict[str, Any]:
    try:
        return parse_json(content)
    except ValueError as e:
        raise UserError(f"the images' annotations (truth/) are damaged: {e}") from e


def score_detections(arrays: Mapping[str, np.ndarray], truth: Mapping[str, Any], kind: str) -> Scores:
    """Compute average precision by COCOeval's matching.

    Overlap 0.50 to 0.95, objects of all sizes, the 100 best detections of each class in an image (20 for keypoints).
    `arrays` as in outputs.npz, `truth` in COCO's format, `kind` bbox, segm or keypoints. Keypoints other than COCO's 17
    have a tolerance of 1/K each, as in ultralytics.
    """
    images = [int(i) for i in arrays["sample"]]
    evaluation = _evaluate_detections(arrays, truth, kind, images)
    parameters = evaluation.params
    count = min(JACKKNIFE_GROUPS, len(images))
    # A fixed shuffle keeps patterns in the images' order out of the groups.
    order = np.random.default_rng(0).permutation(len(images))
    groups = {image: int(position % count) for image, position in zip(sorted(images), order, strict=True)}
    by_class, counts = [], np.zeros((len(SCORE_THRESHOLDS), count, 3))
    for k in range(len(parameters.catIds)):
        entries = evaluation.evalImgs[k * len(images) : (k + 1) * len(images)]
        matches = collect_matches(entries, groups, count, len(parameters.iouThrs))
        counts += count_matches(matches)
        by_class.append(
            [compute_average_precision(matches, parameters.recThrs, without) for without in (None, *range(count))]
        )
    names = {c["id"]: str(c.get("name", c["id"])) for c in truth["categories"]}
    by_group = np.asarray(by_class, np.float64).transpose(1, 0, 2)
    return Scores(by_group, tuple(names[i] for i in parameters.catIds), len(images), counts)


def _evaluate_detections(
    arrays: Mapping[str, np.ndarray], truth: Mapping[str, Any], kind: str, images: list[int]
) -> Any:
    """Return a COCOeval after matching all detections."""
    COCO = load_library("pycocotools.coco", "mAP").COCO
    COCOeval = load_library("pycocotools.cocoeval").COCOeval
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        ground_truth, detections = COCO(), COCO()
        ground_truth.dataset = _number_objects(truth, kind)
        ground_truth.createIndex()
        sizes = {image["id"]: (int(image["height"]), int(image["width"])) for image in truth["images"]}
        detections.dataset = {**ground_truth.dataset, "annotations": _list_detections(arrays, kind, sizes)}
        detections.createIndex()
        evaluation = COCOeval(ground_truth, detections, kind)
        parameters = evaluation.params
        parameters.imgIds, parameters.maxDets = sorted(images), parameters.maxDets[-1:]
        parameters.areaRng, parameters.areaRngLbl = [[0, 1e10]], ["all"]
        if kind == "keypoints" and (points := _count_points(truth)) != len(parameters.kpt_oks_sigmas):
            parameters.kpt_oks_sigmas = np.full(points, 1 / points)
        evaluation.evaluate()
    return evaluation


def _count_points(truth: Mapping[str, Any]) -> int:
    """Return the number of keypoints per object; UserError if objects differ."""
    lengths = {len(a["keypoints"]) // 3 for a in truth["annotations"] if a.get("keypoints")}
    if len(lengths) != 1:
        raise UserError(f"the ground truth's objects have {sorted(lengths) or 'no'} keypoints; they need one number")
    return lengths.pop()


def _number_objects(truth: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the ground truth with ids from 1, because COCOeval ignores matches with object 0."""
    objects = [{"iscrowd": 0, **a, "id": n} for n, a in enumerate(truth["annotations"], 1)]
    if kind == "keypoints":
        objects = [a for a in objects if a.get("keypoints")]
    if kind == "segm":
        objects = [a for a in objects if a.get("segmentation")]
    return {"images": list(truth["images"]), "categories": list(truth["categories"]), "annotations": objects}


def _list_detections(
    arrays: Mapping[str, np.ndarray], kind: str, sizes: Mapping[int, tuple[int, int]]
) -> list[dict[str, Any]]:
    boxes = arrays["detection_box"].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    columns = (arrays[f"detection_{name}"].tolist() for name in ("image", "class", "score"))
    detections = [
        {"id": n, "image_id": i, "category_id": c, "score": s, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for n, (i, c, s, box) in enumerate(zip(*columns, boxes.tolist(), strict=True), 1)
    ]
    if kind == "segm":
        ends = np.cumsum(arrays["mask_lengths"])
        for detection, counts in zip(detections, np.split(arrays["mask_counts"], ends)[:-1], strict=True):
            detection["segmentation"] = {"size": list(sizes[detection["image_id"]]), "counts": counts.tolist()}
    if kind == "keypoints":
        points = arrays["detection_keypoints"].astype(np.float64)
        if points.shape[2:] == (2,):
            points = np.concatenate([points, np.ones((*points.shape[:2], 1))], axis=2)
        for detection, keypoints in zip(detections, points, strict=True):
            detection["keypoints"] = keypoints.reshape(-1).tolist()
    return detections


def compute_f1_changes(trial: TrialResult, reference: TrialResult) -> list[Interval] | None:
    """Compute the change of F1 at each of SCORE_THRESHOLDS, paired: both lose the same images in each group."""
    actual, expected = read_detections(trial), read_detections(reference)
    if actual is None or expected is None or actual.kind != expected.kind or not same_photographs(trial, reference):
        return None
    if actual.own.images != expected.own.images:
        return None
    return [jackknife_ap(values) for values in actual.own.rates["f1"] - expected.own.rates["f1"]]


class JackknifedChange(Change):
    """Change of mAP with the jackknife's interval, which is too narrow below about 300 images."""

    least_images = 300


class MeanAveragePrecision(Metric):
    """mAP over overlaps from 0.5 to 0.95, by masks or keypoints if the task has them."""

    name = "mAP"
    label = "mAP50-95"
    column = "map50_95"
    meaning = "mean of mAP over overlaps from 0.5 to 0.95"
    interval_text = "the jackknife's 95 % interval"
    change_interval_text = "the jackknife's 95 % interval"
    position = 2

    def scores(self, result: MeanAP) -> Scores:
        """Return the scores to average."""
        return result.own

    def average_scores(self, scores: Scores) -> np.ndarray:
        """Return the value from all images, then without each image group, [1 + groups]."""
        return scores.map50_95

    def compute(self, trial: TrialResult) -> MetricValue | None:
        result = read_detections(trial)
        if result is None:
            return None
        scores = self.scores(result)
        share = jackknife_ap(self.average_scores(scores))
        low, high = (float(np.clip(limit, 0, 1)) for limit in (share.low, share.high))
        return MetricValue(Interval(share.value, low, high), scores.images, KIND_WORDS[result.kind])

    def change(self, trial: TrialResult, reference: TrialResult) -> Change | None:
        """Compute the paired change: both lose the same images in each group."""
        actual, expected = read_detections(trial), read_detections(reference)
        if actual is None or expected is None or actual.kind != expected.kind or not same_photographs(trial, reference):
            return None
        a, b = self.scores(actual), self.scores(expected)
        if a.images != b.images or a.precisions.shape != b.precisions.shape:
            return None
        return JackknifedChange(a.images, jackknife_ap(self.average_scores(a) - self.average_scores(b)))


class MeanAveragePrecision50(MeanAveragePrecision):
    """mAP at an overlap of 0.5."""

    name = "mAP50"
    label = "mAP50"
    column = "map50"
    meaning = "mAP at an overlap of 0.5"
    printed = ("",)
    rank = 4
    position = 4

    def average_scores(self, scores: Scores) -> np.ndarray:
        return scores.map50


class BoxMeanAveragePrecision(MeanAveragePrecision):
    """mAP of the boxes of a task with masks or keypoints."""

    name = "box_mAP"
    label = "boxes' mAP50-95"
    column = "box_map50_95"
    meaning = "map50_95 of the boxes"
    printed = ()
    position = 5

    def scores(self, result: MeanAP) -> Scores:
        return result.boxes

    def compute(self, trial: TrialResult) -> MetricValue | None:
        result = super().compute(trial)
        return None if result is None else MetricValue(result.interval, result.images)


class BoxMeanAveragePrecision50(BoxMeanAveragePrecision):
    """mAP of the boxes of a task with masks or keypoints, at an overlap of 0.5."""

    name = "box_mAP50"
    label = "boxes' mAP50"
    column = "box_map50"
    meaning = "map50 of the boxes"
    position = 6

    def average_scores(self, scores: Scores) -> np.ndarray:
        return scores.map50


MAP, MAP50, BOX_MAP, BOX_MAP50 = (
    MeanAveragePrecision(),
    MeanAveragePrecision50(),
    BoxMeanAveragePrecision(),
    BoxMeanAveragePrecision50(),
)
