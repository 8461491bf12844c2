"""Do two configurations of a detector find the same objects: how many of one's confident detections the other has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyno.analysis.metrics.accuracy import same_photographs
from dyno.analysis.records.results import TrialResult

SURE = 0.25  # the score from which a detection is usually shown
DOUBTFUL = SURE / 2  # the other's score may be lower by so much: one just below the line is no lost object
OVERLAP = 0.5  # intersection over union from which two boxes are of one object
ARRAYS = ("detection_image", "detection_box", "detection_score", "detection_class", "sample")


@dataclass(frozen=True)
class BoxAgreement:
    """Sure detections of a trial and of its reference on the images that both have seen, and how many the other has.

    `matched` of the reference's `expected` are found again by the trial, `confirmed` of the trial's `own` by the
    reference.
    """

    images: int
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
    """Hold the `detection_*` arrays of two trials against each other; None where the reference has no sure detection.

    Found again is a detection of score >= 0.25 for which the other has one of score >= 0.125, of the same class in the
    same image, with an intersection over union >= 0.5. Each counts once: the surest choose first, the nearest box.
    """
    images = _images(own, reference)
    a, b = _confident(own, images), _confident(reference, images)
    expected, own_sure = int((b.scores >= SURE).sum()), int((a.scores >= SURE).sum())
    if not expected:
        return None
    return BoxAgreement(len(images), expected, _matched_count(b, a), own_sure, _matched_count(a, b))


def of(trial: TrialResult, reference: TrialResult) -> BoxAgreement | None:
    """`agree` of two stored trials; None as well without detections (classifiers), and on other photographs."""
    own, other = _stored(trial), _stored(reference)
    return agree(own, other) if own and other and same_photographs(trial, reference) else None


def _stored(trial: TrialResult) -> dict[str, np.ndarray]:
    """Detections of the first good round that has any."""
    rounds = (place.arrays("outputs.npz", ARRAYS) for place in trial.good)
    return next((arrays for arrays in rounds if "detection_image" in arrays), {})


@dataclass(frozen=True)
class _Detections:
    """The surest first; `places` tells image and class apart."""

    places: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray


def _images(own: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> np.ndarray:
    """Numbers of the images that both have seen: `sample`, or where it isn't stored those with a detection."""
    one, other = (a.get("sample") for a in (own, reference))
    if one is not None and other is not None:
        return np.intersect1d(one, other)
    return np.union1d(own["detection_image"], reference["detection_image"])


def _confident(arrays: Mapping[str, np.ndarray], images: np.ndarray) -> _Detections:
    keep = np.isin(arrays["detection_image"], images) & (arrays["detection_score"] >= DOUBTFUL)
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(-arrays["detection_score"][rows], kind="stable")]
    places = np.stack([arrays["detection_image"][rows], arrays["detection_class"][rows]], axis=1).astype(np.int64)
    return _Detections(places, arrays["detection_box"][rows].astype(np.float64), arrays["detection_score"][rows])


def _matched_count(detections: _Detections, others: _Detections) -> int:
    """How many of the sure detections the other has again."""
    free: dict[tuple[int, ...], list[int]] = {}
    for row, place in enumerate(map(tuple, others.places.tolist())):
        free.setdefault(place, []).append(row)
    count = 0
    for row in np.flatnonzero(detections.scores >= SURE).tolist():
        candidates = free.get(tuple(detections.places[row].tolist()))
        if not candidates:
            continue
        overlaps = _overlap(detections.boxes[row], others.boxes[candidates])
        best = int(overlaps.argmax())
        if overlaps[best] >= OVERLAP:
            candidates.pop(best)
            count += 1
    return count


def _overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of a box (left, top, right, bottom) with each of others; 0 where neither has an area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = sides.clip(0).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).clip(0).prod(axis=1) + (box[2:] - box[:2]).clip(0).prod()
    ratios: np.ndarray = shared / np.maximum(areas - shared, np.finfo(np.float64).tiny)
    return ratios
