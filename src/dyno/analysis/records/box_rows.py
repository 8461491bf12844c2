"""Raw outputs of a network with non-maximum suppression inside, read back as rows of boxes of each image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyno.analysis.records.results import TrialResult

CORNERS = 4  # values of a box
IN_ONE = 6  # columns where boxes, score and label are one output
MOST_IMAGES = 100  # whose rows are read


@dataclass(frozen=True)
class BoxRows:
    """Rows of several images, in the order in which the network left them.

    `images` int64 n, `boxes` float64 n x 4 (two corners), `scores` and `labels` float64 n, and all `values` (float64
    n x ...) by the output's position. `counts` are the rows of each image.
    """

    images: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    values: dict[str, np.ndarray]
    counts: np.ndarray


def of(trial: TrialResult) -> BoxRows | None:
    """The first 100 images' boxes of a trial's stored outputs, None where they aren't any.

    Boxes are n x 4 corners beside n scores and perhaps n labels, in any order, or n x 6 in one output: with any n for
    each image, or images x n. Rows whose score isn't above 0 only fill a fixed n up. Where nothing says how many rows
    an image has, each has one, and its score is above 0: else they are four numbers and a value of another kind.
    """
    outputs = trial.outputs()
    row_counts = trial.output_rows(outputs)
    tables, counts = _tables(outputs, row_counts)
    columns = _columns(tables)
    if columns is None:
        return None
    boxes, scores, labels = (column.astype(np.float64) for column in columns)
    if not (_corners(boxes[scores > 0]) and np.all(scores <= 1)):
        return None
    if not (row_counts or _fixed(outputs)) and not np.all(scores > 0):
        return None
    images = np.repeat(np.arange(len(counts)), counts)
    keep = (scores > 0) & (images < MOST_IMAGES)
    values = {str(i): table[keep].astype(np.float64) for i, table in enumerate(tables)}
    rows = np.bincount(images[keep], minlength=min(len(counts), MOST_IMAGES))
    return BoxRows(images[keep], boxes[keep], scores[keep], labels[keep], values, rows)


def _tables(outputs: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Each output as rows of one or more columns, and the rows of each image; nothing where they differ in those."""
    tables, row_counts = [], []
    fixed = not counts and _fixed(outputs)
    for name, array in outputs.items():
        if not fixed:  # where every image has one box, nothing tells rows from images
            tables.append(array.reshape(len(array), math.prod(array.shape[1:])))
            row_counts.append(counts.get(name, np.ones(len(array), np.int64)))
        elif array.ndim > 1 and array[:1].size > 1:
            images, rows = array.shape[:2]
            tables.append(array.reshape(images * rows, math.prod(array.shape[2:])))
            row_counts.append(np.full(images, rows))
        elif array.dtype.kind not in "iu":  # else it says how many rows are boxes, which the scores say too
            return [], np.zeros(0, np.int64)
    if not row_counts or any(not np.array_equal(rows, row_counts[0]) for rows in row_counts):
        return [], np.zeros(0, np.int64)
    return tables, row_counts[0]


def _fixed(outputs: Mapping[str, np.ndarray]) -> bool:
    """Whether an output has so many boxes for every image."""
    return any(a.ndim == 3 and a.shape[2] in (CORNERS, IN_ONE) for a in outputs.values())


def _columns(tables: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Boxes, scores and labels of rows; None where it isn't clear which is which."""
    if len(tables) == 1 and tables[0].shape[1] == IN_ONE:
        boxes, scores, labels = tables[0][:, :CORNERS], tables[0][:, CORNERS], tables[0][:, CORNERS + 1]
        return (boxes, scores, labels) if _whole(labels) else None
    wide = [table for table in tables if table.shape[1] == CORNERS]
    single = [table[:, 0] for table in tables if table.shape[1] == 1]
    if len(wide) != 1 or not single:
        return None
    if len(single) == 1:
        return wide[0], single[0], np.zeros(len(single[0]))
    integers = [column for column in single if column.dtype.kind in "iu"] or [c for c in single if _whole(c)]
    others = [column for column in single if not any(column is whole for whole in integers)]
    return (wide[0], others[0], integers[0]) if len(integers) == 1 and len(others) == 1 else None


def _whole(column: np.ndarray) -> bool:
    return bool(np.all(column == np.round(column)))


def _corners(boxes: np.ndarray) -> bool:
    """Whether the rows are two corners each, the smaller one first."""
    return bool(np.all(boxes[:, 2:] >= boxes[:, :2]))
