"""Raw outputs of a network with non-maximum suppression inside, read back as rows of boxes of each image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyno.analysis.records.results import TrialResult
from dyno.worker.tasks import layouts
from dyno.worker.tasks.layouts import FinalRows, Lists, ObservedOutputs, Pairs
from dyno.worker.tasks.postprocess import BoxForm

BOX = 4  # values of a box
MOST_IMAGES = 100  # whose rows are read
PLACES = 10_000  # more than there are classes


@dataclass(frozen=True)
class BoxRows:
    """Rows of several images, in the order in which the network left them.

    `images` int64 n, `boxes` float64 n x 4 (two corners, pixels), `scores` and `labels` float64 n, `rest` what a row
    has besides (masks, keypoints; float64 n x ...), and all `values` (float64 n x ...) by the output's position.
    `counts` are the rows of each image.
    """

    images: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    rest: list[np.ndarray]
    values: dict[str, np.ndarray]
    counts: np.ndarray


def of(trial: TrialResult) -> BoxRows | None:
    """Return the first 100 images' boxes of a trial's stored outputs, None where they aren't boxes.

    They are in a layout whose rows rounding may put into another order, with any n for each image, or images x n. Rows
    whose score isn't above 0 only fill up a fixed n. Where the number of rows per image isn't stored, each image has
    one, and its score is above 0: else they are four numbers and a value of another kind.
    """
    outputs = trial.outputs()
    row_counts = trial.output_rows(outputs)
    tables, counts = _make_tables(outputs, row_counts)
    chosen = _choose_layout(trial, tables) if tables else None
    if chosen is None:
        return None
    fit, form, size, arrays = chosen
    found = fit.layout.decode(fit, arrays, 0)
    scores = found.best_scores().astype(np.float64)
    labels = found.scores.argmax(0) if found.labels is None else found.labels + _batch_places(tables[fit.names[0]])
    boxes = form.corners(found.boxes.T, size).astype(np.float64)
    if not (_has_corners(boxes[scores > 0]) and np.all(scores <= 1)):
        return None
    if not (row_counts or _is_fixed(outputs)) and not np.all(scores > 0):
        return None
    images = np.repeat(np.arange(len(counts)), counts)
    keep = (scores > 0) & (images < MOST_IMAGES)
    values = {str(i): table[keep].astype(np.float64) for i, table in enumerate(tables.values())}
    rest = [found.rest.T] if found.rest is not None and found.rest.size else []
    rest += [table for name, table in tables.items() if name not in fit.names]
    rows = np.bincount(images[keep], minlength=min(len(counts), MOST_IMAGES))
    return BoxRows(images[keep], boxes[keep], scores[keep], labels[keep].astype(np.float64),
                   [table[keep].astype(np.float64) for table in rest], values, rows)  # fmt: skip


def _choose_layout(
    trial: TrialResult, tables: Mapping[str, np.ndarray]
) -> tuple[layouts.Fit, BoxForm, tuple[int, int], dict[str, np.ndarray]] | None:
    """Choose the layout of all rows as if they were of one image, with the boxes' form and the image's size.

    None without a layout whose rows may be in any order.
    """
    arrays = {name: table[None].copy() for name, table in tables.items()}
    for array in arrays.values():
        places = _batch_places(array[0])
        if np.any(places):
            array[..., 0] -= places // PLACES
    dims = trial.spec.get("dims") or {}
    size = int(dims.get("height") or 0), int(dims.get("width") or 0)
    if not all(size):
        return None
    task, shapes = trial.task, {name: array.shape for name, array in arrays.items()}
    extra = None if task.needs else 0  # of masks or keypoints any number
    fits = (FinalRows, Lists, Pairs) if task.labels == "objects" else (FinalRows, Lists)
    try:
        seen = ObservedOutputs(shapes, size, 0, extra, values=arrays)
        likeliest = layouts.possible(seen, fits)[0]
        fit, form = layouts.choose(seen, fits) or (likeliest, likeliest.layout.form)
    except layouts.UnreadBoxes:
        return None
    return (fit, form, size, arrays) if fit.layout.free_order else None


def _batch_places(table: np.ndarray) -> np.ndarray | int:
    """Return offsets that separate labels of a batch's images, if the first of seven columns is the image; else 0."""
    if (
        table.shape[-1] != len(layouts.BATCH_ROW)
        or table.dtype == bool
        or not np.all(table[:, 0] == np.round(table[:, 0]))
    ):
        return 0
    places: np.ndarray = table[:, 0] * PLACES
    return places


def _make_tables(
    outputs: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return each output as rows of one or more columns, and the rows of each image; nothing if outputs disagree."""
    tables, row_counts = dict[str, np.ndarray](), list[np.ndarray]()
    fixed = not counts and _is_fixed(outputs)
    for name, array in outputs.items():
        if not fixed:  # where every image has one box, nothing tells rows from images
            tables[name] = array.reshape(len(array), math.prod(array.shape[1:]))
            row_counts.append(counts.get(name, np.ones(len(array), np.int64)))
        elif array.ndim > 1 and array[:1].size > 1:
            images, rows = array.shape[:2]
            tables[name] = array.reshape(images * rows, math.prod(array.shape[2:]))
            row_counts.append(np.full(images, rows))
        elif array.dtype.kind not in "iu":  # else it says how many rows are boxes, which the scores say too
            return {}, np.zeros(0, np.int64)
    if not row_counts or any(not np.array_equal(rows, row_counts[0]) for rows in row_counts):
        return {}, np.zeros(0, np.int64)
    return tables, row_counts[0]


def _is_fixed(outputs: Mapping[str, np.ndarray]) -> bool:
    """Return whether an output has a fixed number of boxes for every image."""
    return any(a.ndim == 3 and (a.shape[2] == BOX or len(layouts.LAST_ROW) <= a.shape[2] < a.shape[1])
               for a in outputs.values())  # fmt: skip


def _has_corners(boxes: np.ndarray) -> bool:
    """Return whether the rows are two corners each, the smaller one first."""
    return bool(np.all(boxes[:, 2:] >= boxes[:, :2]))
