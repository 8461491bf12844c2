"""Average precision from matches: what COCOeval accumulates, in arrays, so that it can be done again without some
images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Matches:
    """All detections of one class, the surest first: `right` and `ignored` bool [thresholds, n], the `group` of images
    that each is from [n]; `wanted` is how many objects each group of images has."""

    right: np.ndarray
    ignored: np.ndarray
    group: np.ndarray
    wanted: np.ndarray


def matches(evaluated: Iterable[dict[str, Any] | None], groups: dict[int, int], count: int, thresholds: int) -> Matches:
    """Collect one class's entries of `COCOeval.evalImgs`; `groups` maps an image's id to one of `count` groups."""
    entries = [e for e in evaluated if e is not None]
    scores = np.concatenate([np.empty(0), *(np.asarray(e["dtScores"], np.float64) for e in entries)])
    order = np.argsort(-scores, kind="mergesort")  # as COCOeval does, so that ties rank alike
    wanted = np.zeros(count, np.int64)
    for e in entries:
        wanted[groups[e["image_id"]]] += int(np.count_nonzero(np.asarray(e["gtIgnore"]) == 0))
    parts = [np.full(len(e["dtScores"]), groups[e["image_id"]], np.int64) for e in entries]
    empty = np.empty((thresholds, 0))
    matched = np.concatenate([empty, *(e["dtMatches"] for e in entries)], axis=1)[:, order] != 0
    ignored = np.concatenate([empty, *(e["dtIgnore"] for e in entries)], axis=1)[:, order] != 0
    group = np.concatenate([np.empty(0, np.int64), *parts])[order]
    return Matches(matched & ~ignored, ignored, group, wanted)


def average(m: Matches, recalls: np.ndarray, without: int | None = None) -> np.ndarray:
    """Compute average precision at each threshold, less one group of images; NaN where no object is left.

    The mean over `recalls` of the best precision at that recall or a higher one (Everingham et al. 2010, with COCO's
    101 points); `ignored` detections count neither as right nor as wrong.
    """
    wanted = m.wanted.sum() - (m.wanted[without] if without is not None else 0)
    right, ignored = m.right, m.ignored
    if wanted == 0:
        return np.full(len(right), np.nan)
    if without is not None:
        keep = m.group != without
        right, ignored = right[:, keep], ignored[:, keep]
    hits = np.cumsum(right, axis=1, dtype=np.float64)
    tried = np.cumsum(~ignored, axis=1, dtype=np.float64)
    precision = hits / np.maximum(tried, np.spacing(1))
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    averages = np.zeros(len(right))
    for i, reached in enumerate(hits / wanted):
        places = np.searchsorted(reached, recalls, side="left")
        averages[i] = best[i, places[places < reached.size]].sum() / len(recalls)
    return averages
