"""Do two configurations of a detector find the same objects: how many of one's confident detections the other has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyno.analysis.metrics.accuracy import same_photographs
from dyno.analysis.records import box_rows
from dyno.analysis.records.box_rows import BoxRows
from dyno.analysis.records.results import TrialResult

SURE = 0.25  # the score from which a detection is usually shown
DOUBTFUL = SURE / 2  # the other's score may be lower by so much: one just below the line isn't a lost object
OVERLAP = 0.5  # intersection over union from which two boxes are of one object
LEAST_SIDE = 0.01  # of the farthest edge of any box
EDGE = 1.01  # times the lowest score that was kept: whether a row of up to that is kept, rounding decides
ARRAYS = ("detection_image", "detection_box", "detection_score", "detection_class", "sample")


@dataclass(frozen=True)
class BoxAgreement:
    """Sure detections of a trial and of its reference on the images that both have seen, and how many the other has.

    `matched` of the reference's `expected` are found again by the trial, `confirmed` of the trial's `own` by the
    reference.
    """

    expected: int
    matched: int
    own: int
    confirmed: int

    @property
    def share(self) -> float:
        """Share of the reference's detections that the trial finds again."""
        return self.matched / self.expected

    @property
    def own_share(self) -> float | None:
        """Share of the trial's detections that the reference has too; None where the trial has none."""
        return self.confirmed / self.own if self.own else None


def agree(own: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> BoxAgreement | None:
    """Match the `detection_*` arrays of two trials; None where the reference has no sure detection.

    Found again is a detection of score >= 0.25 for which the other has one of score >= 0.125, of the same class in the
    same image, with an intersection over union >= 0.5. Each counts once: the surest choose first, the nearest box.
    """
    images = _list_images(own, reference)
    a, b = _choose_confident(own, images), _choose_confident(reference, images)
    expected, own_sure = int((b.scores >= SURE).sum()), int((a.scores >= SURE).sum())
    if not expected:
        return None
    return BoxAgreement(expected, _matched_count(b, a), own_sure, _matched_count(a, b))


def of(trial: TrialResult, reference: TrialResult) -> BoxAgreement | None:
    """Return `agree` of two stored trials; None as well without detections (classifiers), and on other photographs."""
    own, other = _read_detections(trial), _read_detections(reference)
    return agree(own, other) if own and other and same_photographs(trial, reference) else None


def _read_detections(trial: TrialResult) -> dict[str, np.ndarray]:
    """Return the detections of the first good round that has any."""
    rounds = (place.arrays("outputs.npz", ARRAYS) for place in trial.good)
    return next((arrays for arrays in rounds if "detection_image" in arrays), {})


@dataclass(frozen=True)
class _ConfidentDetections:
    """The surest first; `places` tells image and class apart."""

    places: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray


def _list_images(own: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the numbers of the images that both have seen: `sample`, or those with a detection where it is missing."""
    one, other = (a.get("sample") for a in (own, reference))
    if one is not None and other is not None:
        return np.intersect1d(one, other)
    return np.union1d(own["detection_image"], reference["detection_image"])


def _choose_confident(arrays: Mapping[str, np.ndarray], images: np.ndarray) -> _ConfidentDetections:
    keep = np.isin(arrays["detection_image"], images) & (arrays["detection_score"] >= DOUBTFUL)
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(-arrays["detection_score"][rows], kind="stable")]
    places = np.stack([arrays["detection_image"][rows], arrays["detection_class"][rows]], axis=1).astype(np.int64)
    return _ConfidentDetections(
        places, arrays["detection_box"][rows].astype(np.float64), arrays["detection_score"][rows]
    )


def _matched_count(detections: _ConfidentDetections, others: _ConfidentDetections) -> int:
    """Count the sure detections that the other has too."""
    free: dict[tuple[int, ...], list[int]] = {}
    for row, place in enumerate(map(tuple, others.places.tolist())):
        free.setdefault(place, []).append(row)
    count = 0
    for row in np.flatnonzero(detections.scores >= SURE).tolist():
        candidates = free.get(tuple(detections.places[row].tolist()))
        if not candidates:
            continue
        overlaps = _compute_overlap(detections.boxes[row], others.boxes[candidates])
        best = int(overlaps.argmax())
        if overlaps[best] >= OVERLAP:
            candidates.pop(best)
            count += 1
    return count


def _compute_overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute the IoU of a box (left, top, right, bottom) with each of `others`; 0 where neither has an area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = sides.clip(0).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).clip(0).prod(axis=1) + (box[2:] - box[:2]).clip(0).prod()
    ratios: np.ndarray = shared / np.maximum(areas - shared, np.finfo(np.float64).tiny)
    return ratios


@dataclass(frozen=True)
class PairedRows:
    """Rows of boxes that two networks with non-maximum suppression inside left, paired whatever their order.

    `own` and `reference` have each output by its position: the pairs, then rows that only the reference has, then rows
    that only the trial has, with NaN for what isn't there. `errors` has a number per row that counts: how far its box
    (as a share of its longer side), its score (of the highest) and its other values (2-norm) are apart, and 1 without
    a partner.
    """

    images: int
    own: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    errors: np.ndarray


def pair_rows(trial: TrialResult, reference: TrialResult) -> PairedRows | None:
    """Pair the boxes of two trials' raw outputs, None where those aren't boxes after suppression.

    They are a set: an engine may return boxes of equal scores in any order. Partners have one label in one image and
    overlap by half, so that the sum of overlaps is maximal (Kuhn, 1955). A row without a partner doesn't count where
    its score is within 1 % of the lowest that was kept.
    """
    own, other = box_rows.of(trial), box_rows.of(reference)
    if own is None or other is None:
        return None
    widths = [[values.shape[1] for values in rows.values.values()] for rows in (own, other)]
    if widths[0] != widths[1]:
        return None
    a, b = _pair_boxes(own, other)
    extra, lost = np.setdiff1d(np.arange(len(own.scores)), a), np.setdiff1d(np.arange(len(other.scores)), b)
    alone = np.ones(_count_unpaired(own, extra, other) + _count_unpaired(other, lost, own))
    return PairedRows(
        max(len(own.counts), len(other.counts)),
        {name: np.concatenate([v[a], np.full((len(lost), v.shape[1]), np.nan), v[extra]])
         for name, v in own.values.items()},
        {name: np.concatenate([v[b], v[lost], np.full((len(extra), v.shape[1]), np.nan)])
         for name, v in other.values.items()},
        np.concatenate([_row_errors(own, a, other, b), alone]),
    )  # fmt: skip


def _pair_boxes(own: BoxRows, other: BoxRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers of the pairs in each."""
    from scipy.optimize import linear_sum_assignment

    margin = _least_side(other) * np.array([-1, -1, 1, 1])  # boxes cut off at the image's edge may have no area
    ours, theirs = own.boxes + margin, other.boxes + margin
    pairs: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for image, label in np.unique(np.stack([other.images, other.labels], axis=1), axis=0).tolist():
        a, b = (np.flatnonzero((rows.images == image) & (rows.labels == label)) for rows in (own, other))
        overlaps = np.stack([_compute_overlap(box, ours[a]) for box in theirs[b]])
        # Of boxes that lie on each other the scores say which is which.
        nearness = 1 - np.abs(other.scores[b][:, None] - own.scores[a][None, :])
        there, here = linear_sum_assignment(np.nan_to_num(overlaps + 1e-3 * nearness), maximize=True)
        overlapping = overlaps[there, here] >= OVERLAP
        pairs.append((a[here[overlapping]], b[there[overlapping]]))
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


def _least_side(rows: BoxRows) -> float:
    """Return the least length that a box's side counts as, in the boxes' own unit: pixels, or shares of the image."""
    return float(max(LEAST_SIDE * np.abs(rows.boxes).max(initial=0), np.finfo(np.float64).tiny))


def _row_errors(own: BoxRows, a: np.ndarray, other: BoxRows, b: np.ndarray) -> np.ndarray:
    """Compute the largest error of each pair, every value as a share of its size."""
    boxes = other.boxes[b]
    side = np.maximum((boxes[:, 2:] - boxes[:, :2]).max(axis=1, initial=0), _least_side(other))
    errors = [
        np.abs(own.boxes[a] - boxes).max(axis=1, initial=0) / side,
        np.abs(own.scores[a] - other.scores[b]) / other.scores.max(initial=np.finfo(np.float64).tiny),
    ]
    for mine, values in zip(own.rest, other.rest, strict=True):
        if len(values):
            apart = np.linalg.norm(mine[a] - values[b], axis=1)
            errors.append(apart / max(float(np.sqrt(np.mean(np.square(np.linalg.norm(values, axis=1))))), 1e-30))
    worst: np.ndarray = np.max(errors, axis=0)
    return np.where(np.isnan(worst), 1.0, worst)


def _count_unpaired(rows: BoxRows, alone: np.ndarray, others: BoxRows) -> int:
    """Count the rows without a partner, except those whose score is at the edge of the scores that either kept.

    The edge is the lowest score of all; in images with the largest number of rows, which a limit may have cut, their
    own lowest one. Where most rows would lie at it, all count.
    """
    if not len(alone):
        return 0
    edge = np.full(len(rows.counts), min(rows.scores.min(initial=1), others.scores.min(initial=1)))
    for image in np.flatnonzero(rows.counts == rows.counts.max(initial=0)):
        edge[image] = max(edge[image], rows.scores[rows.images == image].min(initial=1))
    edge_rows = rows.scores <= EDGE * edge[rows.images]
    return len(alone) if edge_rows.mean() > 0.5 else int((~edge_rows[alone]).sum())
