"""Measures of the distance between arrays: outputs, and tensors inside a network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dyno.worker.facts.job import have_labels

ATOL, RTOL = 1e-8, 1e-3
MAX_COMPARED_VALUES = 4_000_000  # per output, from the first input on
MIN_CHANNEL_SHARE = 1e-3  # lower bound of a channel's size, as a share of the largest channel's


@dataclass(frozen=True)
class Closeness:
    """Values of A compared with values of B (the reference).

    `close` is the share with |a - b| <= atol + rtol * |b|; labels must be equal. `max_abs`, `mean_abs` and `max_rel`
    (|a - b| / |b|, for b other than 0) are over the finite pairs that aren't labels. `nonfinite` counts values of A
    that are NaN or infinite and differ from B's (never close), `reference_nonfinite` B's; equal infinities and NaN at
    the same place agree. `labels_changed` is the share of differing labels (NaN: no labels).
    """

    count: int
    close: float
    max_abs: float
    mean_abs: float
    max_rel: float
    nonfinite: int
    reference_nonfinite: int
    labels_changed: float = math.nan


def compare_all(pairs: Iterable[tuple[np.ndarray, np.ndarray]], rtol: float, atol: float) -> Closeness:
    """Compare pairs of equally large arrays, all as one: labels exactly, others in double precision."""
    labels, values = [], [(np.zeros(0), np.zeros(0))]
    for a, b in pairs:
        if have_labels(a, b):
            labels.append(np.ravel(a) == np.ravel(b))
        else:
            values.append((a.astype(np.float64).ravel(), b.astype(np.float64).ravel()))
    a, b = (np.concatenate([pair[k] for pair in values]) for k in (0, 1))
    finite_a, finite_b = np.isfinite(a), np.isfinite(b)
    is_finite = finite_a & finite_b
    error, size = np.abs(a[is_finite] - b[is_finite]), np.abs(b[is_finite])
    is_same = ~finite_a & ~finite_b & ((a == b) | (np.isnan(a) & np.isnan(b)))
    equal_count = int(sum(equal.sum() for equal in labels))
    close = equal_count + int((error <= atol + rtol * size).sum()) + int(is_same.sum())
    label_count = sum(map(len, labels))
    count, nonzero = len(a) + label_count, size > 0
    return Closeness(
        count=count,
        close=close / count if count else math.nan,
        max_abs=float(error.max(initial=0.0)),
        mean_abs=float(error.mean()) if len(error) else math.nan,
        max_rel=float((error[nonzero] / size[nonzero]).max(initial=0.0)),
        nonfinite=int((~finite_a & ~is_same).sum()),
        reference_nonfinite=int((~finite_b).sum()),
        labels_changed=1 - equal_count / label_count if label_count else math.nan,
    )


def find_one_sided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return for each value whether it is NaN or infinite in one array and differs in the other."""
    is_one_sided: np.ndarray = ~(np.isfinite(a) & np.isfinite(b)) & (a != b) & ~(np.isnan(a) & np.isnan(b))
    return is_one_sided


def shares_changed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return each input's share of differing labels (axis 0)."""
    shares: np.ndarray = (a != b).reshape(len(a), -1).mean(axis=1) if b.size else np.zeros(0)
    return shares


def relative_errors(a: np.ndarray, b: np.ndarray, channels: bool = False) -> np.ndarray:
    """Return |a - b| / |b| in the 2-norm of each input (axis 0).

    With `channels` it is the worst channel's (axis 1), if there are several. Non-finite values are infinitely far off,
    unless equal. For labels it is the share that differs.
    """
    count = min(len(a), len(b))
    if have_labels(a, b):
        return shares_changed(a[:count], b[:count])
    count = min(count, max(1, MAX_COMPARED_VALUES // max(1, a[:1].size)))
    if not count or not a[:1].size:
        return np.zeros(0)
    a, b = (array[:count].astype(np.float64) for array in (a, b))
    same_nonfinite = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))
    a, b = np.where(same_nonfinite, 0, a), np.where(same_nonfinite, 0, b)
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    if scale:  # avoids underflow and overflow of squares
        a, b = a / scale, b / scale
    shape = (count, b.shape[1], -1) if channels and b.ndim > 2 else (count, 1, -1)
    size = np.linalg.norm(b.reshape(shape), axis=2)
    # Outputs near 0 of one input are judged by the size of the other inputs' outputs.
    size = np.maximum(size, np.sqrt(np.mean(size**2, axis=0)))
    size = np.maximum(size, MIN_CHANNEL_SHARE * size.max(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        distance = np.linalg.norm((a - b).reshape(shape), axis=2)
        ratio = np.where(distance == 0, 0.0, distance / np.where(size > 0, size, np.finfo(np.float32).tiny))
    errors: np.ndarray = np.where(np.isnan(ratio), np.inf, ratio).max(axis=1)
    return errors
