"""Agreement of two configurations' outputs: isclose share, errors, and the top-10 table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dyno.results.metrics.accuracy import match_images, same_photographs
from dyno.results.stats import compute_wilson
from dyno.results.trial_result import TrialResult
from dyno.worker.facts.job import is_labels
from dyno.worker.numerics.closeness import ATOL, RTOL, Closeness, compare_all
from dyno.worker.spec import UserError
from dyno.worker.tasks import layouts
from dyno.worker.tasks.layouts import FinalRows, Lists, ObservedOutputs, Pairs, ScoredLists
from dyno.worker.tasks.postprocess import BoxForm

# Raw outputs of networks with built-in NMS, read as rows of boxes per image.

BOX_VALUES = 4, 5  # number of values of a box, without or with its score
MAX_IMAGES_READ = 100  # images to read rows of
MAX_PLACES = 10_000  # exceeds any number of classes


@dataclass(frozen=True)
class BoxRows:
    """Box rows of several images, in the network's order.

    `images` int64 n, `boxes` float64 n x 4 (two corners, pixels), `scores` and `labels` float64 n, `extra_values`
    further values of a row (masks, keypoints; float64 n x ...), and all `values` (float64 n x ...) by the output's
    position. `counts` is the number of rows per image.
    """

    images: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    extra_values: list[np.ndarray]
    values: dict[str, np.ndarray]
    counts: np.ndarray


def read_box_rows(trial: TrialResult) -> BoxRows | None:
    """Return the boxes of the first 100 images from a trial's stored outputs, None if the outputs aren't boxes.

    Accepts layouts whose row order may depend on rounding, with any n per image, or images x n. Rows with a score of 0
    or less are padding of a fixed n. If the number of rows per image isn't stored, each image must have one row with a
    score above 0; otherwise they are four numbers and a value of another kind.
    """
    outputs = trial.outputs()
    row_counts = trial.output_rows(outputs)
    tables, counts = _make_tables(outputs, row_counts)
    choice = _choose_layout(trial, tables) if tables else None
    if choice is None:
        return None
    fit, form, size, arrays = choice
    result = fit.layout.decode(fit, arrays, 0)
    scores = result.best_scores().astype(np.float64)
    if len(scores) != counts.sum():  # the first of seven values is not an image index
        return None
    labels = result.scores.argmax(0) if result.labels is None else result.labels + _batch_places(tables[fit.names[0]])
    boxes = form.convert_boxes(result.boxes.T, size).astype(np.float64)
    corners = boxes[scores > 0]
    if not (np.all(corners[:, 2:] >= corners[:, :2]) and np.all(scores <= 1)):
        return None
    if not (row_counts or _is_fixed(outputs)) and not np.all(scores > 0):
        return None
    images = np.repeat(np.arange(len(counts)), counts)
    keep = (scores > 0) & (images < MAX_IMAGES_READ)
    values = {str(i): table[keep].astype(np.float64) for i, table in enumerate(tables.values())}
    rest = [result.extra_values.T] if result.extra_values is not None and len(result.extra_values) else []
    rest += [table for name, table in tables.items() if name not in fit.names]
    rows = np.bincount(images[keep], minlength=min(len(counts), MAX_IMAGES_READ))
    return BoxRows(images[keep], boxes[keep], scores[keep], labels[keep].astype(np.float64),
                   [table[keep].astype(np.float64) for table in rest], values, rows)  # fmt: skip


def _choose_layout(
    trial: TrialResult, tables: Mapping[str, np.ndarray]
) -> tuple[layouts.Fit, BoxForm, tuple[int, int], dict[str, np.ndarray]] | None:
    """Choose the layout of all rows as if from one image, with the boxes' form and the image's size.

    None without a layout that allows any row order.
    """
    arrays = {name: table[None].copy() for name, table in tables.items()}
    for array in arrays.values():
        offsets = _batch_places(array[0])
        if np.any(offsets):
            array[..., 0] -= offsets // MAX_PLACES
    size = trial.spec.dims.height, trial.spec.dims.width
    if not all(size):
        return None
    task, shapes = trial.task, {name: array.shape for name, array in arrays.items()}
    extra = None if task.needs else 0  # any number of masks or keypoints
    kinds = (FinalRows, Lists, ScoredLists)
    fits = (*kinds, Pairs) if task.labels == "objects" else kinds
    try:
        outputs = ObservedOutputs(shapes, size, 0, extra, values=arrays)
        best_fit = layouts.list_fits(outputs, fits)[0]
        fit, form = layouts.choose_layout(outputs, fits) or (best_fit, best_fit.layout.form)
    except layouts.UnreadBoxes:
        return None
    return (fit, form, size, arrays) if fit.layout.free_order else None


def _batch_places(table: np.ndarray) -> np.ndarray | int:
    """Return label offsets per image of a batch if the first of seven columns is the image index, else 0."""
    if (
        table.shape[-1] != len(layouts.BATCH_ROW)
        or table.dtype == bool
        or not np.all(table[:, 0] == np.round(table[:, 0]))
    ):
        return 0
    offsets: np.ndarray = table[:, 0] * MAX_PLACES
    return offsets


def _make_tables(
    outputs: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return each output as rows of one or more columns, and the rows per image; empty if outputs disagree."""
    tables, row_counts = dict[str, np.ndarray](), list[np.ndarray]()
    is_fixed = not counts and _is_fixed(outputs)
    for name, array in outputs.items():
        if not is_fixed:  # with one box per image, rows can't be told from images
            tables[name] = array.reshape(len(array), math.prod(array.shape[1:]))
            row_counts.append(counts.get(name, np.ones(len(array), np.int64)))
        elif array.ndim > 1 and array[:1].size > 1:
            images, rows = array.shape[:2]
            tables[name] = array.reshape(images * rows, math.prod(array.shape[2:]))
            row_counts.append(np.full(images, rows))
        elif array.dtype.kind not in "iu":  # integers are the number of boxes, known from the scores
            return {}, np.zeros(0, np.int64)
    if not row_counts or any(not np.array_equal(rows, row_counts[0]) for rows in row_counts):
        return {}, np.zeros(0, np.int64)
    return tables, row_counts[0]


def _is_fixed(outputs: Mapping[str, np.ndarray]) -> bool:
    """Return whether an output has the same number of boxes for every image."""
    return any(a.ndim == 3 and (a.shape[2] in BOX_VALUES or len(layouts.LAST_ROW) <= a.shape[2] < a.shape[1])
               for a in outputs.values())  # fmt: skip


# Agreement of two detectors: the share of confident detections that the other one has too.

SURE_SCORE = 0.25  # usual score threshold for display
# lowest score of a counterpart: scores near the threshold are no lost objects
DOUBTFUL_SCORE = SURE_SCORE / 2
MIN_OVERLAP = 0.5  # lowest IoU of boxes of one object
MIN_SIDE_SHARE = 0.01  # share of the farthest edge of all boxes
THRESHOLD_MARGIN = 1.01  # multiple of the lowest kept score, below which rounding decides what is kept
DETECTION_ARRAYS = ("detection_image", "detection_box", "detection_score", "detection_class", "sample")


@dataclass(frozen=True)
class BoxAgreement:
    """Counts of confident detections of a trial and its reference on common images.

    The trial finds `matched` of the reference's `expected` detections; the reference finds `confirmed` of the trial's
    `own`.
    """

    expected: int
    matched: int
    own: int
    confirmed: int

    @property
    def share(self) -> float:
        """Share of the reference's detections found by the trial."""
        return self.matched / self.expected

    @property
    def own_share(self) -> float | None:
        """Share of the trial's detections found by the reference; None if the trial has no detections."""
        return self.confirmed / self.own if self.own else None


def judge_boxes(actual: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> BoxAgreement | None:
    """Match the `detection_*` arrays of two trials; None if the reference has no confident detection.

    A detection with score >= 0.25 is matched by one of score >= 0.125, of the same class in the same image, with IoU >=
    0.5. Matches are one to one: in descending order of score, each takes the free box of largest overlap.
    """
    images = _list_images(actual, reference)
    a, b = _choose_confident(actual, images), _choose_confident(reference, images)
    expected, own_count = int((b.scores >= SURE_SCORE).sum()), int((a.scores >= SURE_SCORE).sum())
    if not expected:
        return None
    matched, confirmed = (int((partners >= 0).sum()) for partners in (_match_sure(b, a), _match_sure(a, b)))
    return BoxAgreement(expected, matched, own_count, confirmed)


def compare_boxes(trial: TrialResult, reference: TrialResult) -> BoxAgreement | None:
    """Apply `judge_boxes` to two stored trials; None without detections (classifiers), and for other photographs."""
    a, b = _read_detections(trial), _read_detections(reference)
    return judge_boxes(a, b) if a and b and same_photographs(trial, reference) else None


def _read_detections(trial: TrialResult) -> dict[str, np.ndarray]:
    """Return the detections of the first good round that has any."""
    rounds = (r.read_arrays("outputs.npz", DETECTION_ARRAYS) for r in trial.good)
    return next((arrays for arrays in rounds if "detection_image" in arrays), {})


@dataclass(frozen=True)
class _ConfidentDetections:
    """Detections in descending order of score; `places` holds image and class."""

    places: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray


def _list_images(actual: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the indices of common images: by `sample`, else all images with a detection."""
    samples, reference_samples = (a.get("sample") for a in (actual, reference))
    if samples is not None and reference_samples is not None:
        return np.intersect1d(samples, reference_samples)
    return np.union1d(actual["detection_image"], reference["detection_image"])


def _choose_confident(arrays: Mapping[str, np.ndarray], images: np.ndarray) -> _ConfidentDetections:
    keep = np.isin(arrays["detection_image"], images) & (arrays["detection_score"] >= DOUBTFUL_SCORE)
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(-arrays["detection_score"][rows], kind="stable")]
    places = np.stack([arrays["detection_image"][rows], arrays["detection_class"][rows]], axis=1).astype(np.int64)
    return _ConfidentDetections(
        places, arrays["detection_box"][rows].astype(np.float64), arrays["detection_score"][rows]
    )


def _match_sure(detections: _ConfidentDetections, targets: _ConfidentDetections) -> np.ndarray:
    """Return the row of each confident detection's match in `targets`, -1 without a match."""
    free_rows: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(map(tuple, targets.places.tolist())):
        free_rows.setdefault(key, []).append(row)
    partners = np.full(int((detections.scores >= SURE_SCORE).sum()), -1)  # highest scores first
    for row in range(len(partners)):
        candidates = free_rows.get(tuple(detections.places[row].tolist()))
        if not candidates:
            continue
        overlaps = _compute_overlap(detections.boxes[row], targets.boxes[candidates])
        best = int(overlaps.argmax())
        if overlaps[best] >= MIN_OVERLAP:
            partners[row] = candidates.pop(best)
    return partners


@dataclass(frozen=True)
class BoxFlip:
    """An image with different confident detections: its row in the decoded data, and unmatched boxes (float64 n x 4).

    `reference` and `own` are unmatched boxes of each; `renamed` counts pairs of these with different classes.
    """

    image: int
    reference: np.ndarray
    own: np.ndarray
    renamed: int

    @property
    def lost(self) -> int:
        return len(self.reference) - self.renamed

    @property
    def gained(self) -> int:
        return len(self.own) - self.renamed


@dataclass(frozen=True)
class BoxFlips:
    """Number of common images, and the images with different detections, most differences first."""

    images: int
    flips: list[BoxFlip]

    def describe(self) -> str:
        """Describe the counts, with Wilson's 95 % interval of the share of images."""
        share = compute_wilson(len(self.flips), self.images)
        lost, gained, renamed = (sum(getattr(f, name) for f in self.flips) for name in ("lost", "gained", "renamed"))
        percent = f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"
        return (f"{len(self.flips)} of {self.images} images differ, {percent}: "
                f"{lost} lost, {gained} gained, {renamed} of another class")  # fmt: skip


def list_box_flips(trial: TrialResult, reference: TrialResult) -> BoxFlips | None:
    """Match confident detections as in `judge_boxes`; None without detections or for other photographs."""
    actual, expected = _read_detections(trial), _read_detections(reference)
    if not actual or not expected or not same_photographs(trial, reference):
        return None
    images = _list_images(actual, expected)
    if not len(images):
        return None
    a, b = _choose_confident(actual, images), _choose_confident(expected, images)
    gained, lost = (np.flatnonzero(partners < 0) for partners in (_match_sure(a, b), _match_sure(b, a)))
    flips = []
    for image in np.union1d(a.places[gained, 0], b.places[lost, 0]).tolist():
        gains, losses = gained[a.places[gained, 0] == image], lost[b.places[lost, 0] == image]
        flips.append(BoxFlip(image, b.boxes[losses], a.boxes[gains], _count_renamed(a, gains, b, losses)))
    return BoxFlips(len(images), sorted(flips, key=lambda f: f.renamed - len(f.reference) - len(f.own)))


def _count_renamed(a: _ConfidentDetections, i: np.ndarray, b: _ConfidentDetections, j: np.ndarray) -> int:
    """Return the largest number of pairs of these rows that overlap by half and differ in class."""
    from scipy.optimize import linear_sum_assignment

    overlaps = np.array([_compute_overlap(a.boxes[row], b.boxes[j]) for row in i]).reshape(len(i), len(j))
    pairs = (overlaps >= MIN_OVERLAP) & (a.places[i, 1][:, None] != b.places[j, 1])
    return int(pairs[linear_sum_assignment(pairs, maximize=True)].sum())


def _compute_overlap(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Compute the IoU of a box (left, top, right, bottom) with each of `boxes`; 0 if neither has an area."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    intersections = sides.clip(0).prod(axis=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(axis=1) + (box[2:] - box[:2]).clip(0).prod()
    ratios: np.ndarray = intersections / np.maximum(areas - intersections, np.finfo(np.float64).tiny)
    return ratios


@dataclass(frozen=True)
class PairedRows:
    """Box rows of two networks with built-in NMS, paired in any order.

    `own` and `reference` have each output by its position: the pairs, then rows of the reference alone, then rows of
    the trial alone, with NaN for missing rows. `errors` has one number per row that counts: the largest of the
    differences in box (relative to its longer side), score (relative to the highest) and other values (2-norm); 1
    without a partner.
    """

    images: int
    own: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]
    errors: np.ndarray


def pair_rows(trial: TrialResult, reference: TrialResult) -> PairedRows | None:
    """Pair the boxes of two trials' raw outputs, None if they aren't boxes after NMS.

    Boxes are a set: engines may order equal scores differently. Partners share image and label and overlap by half; the
    sum of overlaps is maximal (Kuhn, 1955). Unpaired rows with a score within 1 % of the lowest kept don't count.
    """
    actual, expected = read_box_rows(trial), read_box_rows(reference)
    if actual is None or expected is None:
        return None
    widths = [[values.shape[1] for values in rows.values.values()] for rows in (actual, expected)]
    if widths[0] != widths[1]:
        return None
    a, b = _pair_boxes(actual, expected)
    gained, lost = np.setdiff1d(np.arange(len(actual.scores)), a), np.setdiff1d(np.arange(len(expected.scores)), b)
    unpaired_errors = np.ones(_count_unpaired(actual, gained, expected) + _count_unpaired(expected, lost, actual))
    return PairedRows(
        max(len(actual.counts), len(expected.counts)),
        {name: np.concatenate([v[a], np.full((len(lost), v.shape[1]), np.nan), v[gained]])
         for name, v in actual.values.items()},
        {name: np.concatenate([v[b], v[lost], np.full((len(gained), v.shape[1]), np.nan)])
         for name, v in expected.values.items()},
        np.concatenate([_row_errors(actual, a, expected, b), unpaired_errors]),
    )  # fmt: skip


def _pair_boxes(actual: BoxRows, expected: BoxRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the paired row indices of both."""
    from scipy.optimize import linear_sum_assignment

    margin = _least_side(expected) * np.array([-1, -1, 1, 1])  # boxes cut off at the image's edge may have no area
    actual_boxes, expected_boxes = actual.boxes + margin, expected.boxes + margin
    pairs: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for image, label in np.unique(np.stack([expected.images, expected.labels], axis=1), axis=0).tolist():
        a, b = (np.flatnonzero((rows.images == image) & (rows.labels == label)) for rows in (actual, expected))
        overlaps = np.stack([_compute_overlap(box, actual_boxes[a]) for box in expected_boxes[b]])
        # Scores tell coinciding boxes apart.
        nearness = 1 - np.abs(expected.scores[b][:, None] - actual.scores[a][None, :])
        b_index, a_index = linear_sum_assignment(np.nan_to_num(overlaps + 1e-3 * nearness), maximize=True)
        is_overlapping = overlaps[b_index, a_index] >= MIN_OVERLAP
        pairs.append((a[a_index[is_overlapping]], b[b_index[is_overlapping]]))
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


def _least_side(rows: BoxRows) -> float:
    """Return the smallest length that a box's side counts as, in the boxes' unit: pixels, or shares of the image."""
    return float(max(MIN_SIDE_SHARE * np.abs(rows.boxes).max(initial=0), np.finfo(np.float64).tiny))


def _row_errors(actual: BoxRows, a: np.ndarray, expected: BoxRows, b: np.ndarray) -> np.ndarray:
    """Compute the largest relative error of each pair."""
    boxes = expected.boxes[b]
    side = np.maximum((boxes[:, 2:] - boxes[:, :2]).max(axis=1, initial=0), _least_side(expected))
    errors = [
        np.abs(actual.boxes[a] - boxes).max(axis=1, initial=0) / side,
        np.abs(actual.scores[a] - expected.scores[b]) / expected.scores.max(initial=np.finfo(np.float64).tiny),
    ]
    for actual_values, values in zip(actual.extra_values, expected.extra_values, strict=True):
        if len(values):
            distances = np.linalg.norm(actual_values[a] - values[b], axis=1)
            errors.append(distances / max(float(np.sqrt(np.mean(np.square(np.linalg.norm(values, axis=1))))), 1e-30))
    worst: np.ndarray = np.max(errors, axis=0)
    return np.where(np.isnan(worst), 1.0, worst)


def _count_unpaired(rows: BoxRows, unpaired: np.ndarray, other_rows: BoxRows) -> int:
    """Count rows without a partner, except rows at the lowest kept score of either network.

    That edge is the lowest score of all; in images with the largest number of rows, which a limit may have cut, their
    own lowest score. If most rows are at the edge, all rows count.
    """
    if not len(unpaired):
        return 0
    edge = np.full(len(rows.counts), min(rows.scores.min(initial=1), other_rows.scores.min(initial=1)))
    for image in np.flatnonzero(rows.counts == rows.counts.max(initial=0)):
        edge[image] = max(edge[image], rows.scores[rows.images == image].min(initial=1))
    edge_rows = rows.scores <= THRESHOLD_MARGIN * edge[rows.images]
    return len(unpaired) if edge_rows.mean() > 0.5 else int((~edge_rows[unpaired]).sum())


RANK_COUNT = 10


@dataclass(frozen=True)
class Agreement(Closeness):
    """Differences between A's values and B's (the reference) over all outputs of `samples` inputs."""

    samples: int = 0


@dataclass(frozen=True)
class Rank:
    """A row of the top-10 table: the scores' mean absolute error, and the share of inputs with another class there."""

    rank: int
    mae: float
    disagreement: float


def judge_agreement(
    actual: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], rtol: float = RTOL, atol: float = ATOL
) -> Agreement:
    """Compare outputs by name, each [N, ...]; UserError for different names or shapes. The shorter N counts."""
    if set(actual) != set(reference) or not actual:
        raise UserError(
            f"outputs differ in name: {', '.join(actual) or 'none'} against {', '.join(reference) or 'none'}"
        )
    closeness = compare_all([_cut_arrays(name, actual[name], reference[name]) for name in reference], rtol, atol)
    samples = min(min(len(actual[n]), len(reference[n])) for n in reference)
    return Agreement(**vars(closeness), samples=samples)


def _cut_arrays(name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if a.shape[1:] != b.shape[1:]:
        raise UserError(f"output {name!r} differs in shape: {list(a.shape)} against {list(b.shape)}")
    n = min(len(a), len(b))
    return a[:n], b[:n]


def read_agreement(
    trial: TrialResult, reference: TrialResult, rtol: float = RTOL, atol: float | None = None
) -> Agreement | None:
    """Return the agreement of two stored trials over common inputs; None if either lacks outputs of that shape.

    The default `atol` is ATOL, scaled by the reference's largest value if that is below 1: outputs around 1e-29 would
    all be close by 1e-8, whatever their signs.
    """
    if atol is None:
        atol = ATOL * min(1.0, find_largest(reference))
    try:
        return compare_outputs(trial, reference, rtol, atol)
    except UserError:  # other shapes: the trial's row has the reason
        return None


def compare_outputs(trial: TrialResult, reference: TrialResult, rtol: float = RTOL, atol: float = ATOL) -> Agreement:
    """Compare like `read_agreement`; UserError if there is nothing to compare.

    Outputs are matched by position, as names differ between files. Boxes of networks with built-in NMS are paired
    first; a box without a partner is close to nothing.
    """
    if rows := pair_rows(trial, reference):
        return replace(judge_agreement(rows.own, rows.reference, rtol, atol), samples=rows.images)
    actual, expected, omitted = paired_outputs(trial, reference)
    if len(actual) != len(expected):
        raise UserError(f"{trial.model} {trial.backend} {trial.precision} has {len(actual)} outputs, "
                        f"{reference.model} {reference.backend} {reference.precision} has {len(expected)}")  # fmt: skip
    if omitted:
        raise UserError(
            f"the outputs differ in their number of rows for {omitted:.1%} of the inputs, so no row has a partner"
        )
    agreement = judge_agreement(dict(_by_position(actual)), dict(_by_position(expected)), rtol, atol)
    counts = reference.output_rows(reference.outputs())
    fixed_counts = [len(output) for name, output in reference.outputs().items() if name not in counts]
    varied_counts = [len(rows) * reference.batch for rows in counts.values()]
    return replace(agreement, samples=min([*fixed_counts, *varied_counts])) if counts else agreement


def find_largest(trial: TrialResult) -> float:
    """Return the largest finite |value| of outputs other than labels; 0 without any."""
    values = (np.abs(output[np.isfinite(output)]) for output in trial.outputs().values() if not is_labels(output))
    return max((float(each.max(initial=0.0)) for each in values), default=0.0)


def paired_outputs(trial: TrialResult, reference: TrialResult) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Return the raw outputs of both, and the share of batches or inputs left out.

    Outputs are paired by name if both have the same names (a given engine may list its outputs in another order), else
    by position. A network may return any number of rows, like `nonzero`. Batches or inputs with different numbers of
    rows are left out.
    """
    actual, expected = trial.outputs(), reference.outputs()
    if set(actual) == set(expected):
        actual = {name: actual[name] for name in expected}
    arrays, targets = list(actual.values()), list(expected.values())
    if len(actual) != len(expected) or trial.batch != reference.batch:
        return arrays, targets, 0.0
    counts, other_counts = trial.output_rows(actual), reference.output_rows(expected)
    omitted = 0.0
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if (a in counts or b in other_counts) and actual[a].shape[1:] == expected[b].shape[1:]:
            rows = counts.get(a, _one_each(len(actual[a]), trial.batch))
            other_rows = other_counts.get(b, _one_each(len(expected[b]), trial.batch))
            n = min(len(rows), len(other_rows))
            mask = rows[:n] == other_rows[:n]
            arrays[i], targets[i] = _keep_rows(actual[a], rows[:n], mask), _keep_rows(expected[b], other_rows[:n], mask)
            omitted = max(omitted, float(1 - mask.mean())) if n else omitted
    return arrays, targets, omitted


def _one_each(images: int, batch: int) -> np.ndarray:
    return np.diff(np.minimum(np.arange(0, images + batch, batch), images))


def _keep_rows(array: np.ndarray, rows: np.ndarray, keep: np.ndarray) -> np.ndarray:
    result: np.ndarray = array[: rows.sum()][np.repeat(keep, rows)]
    return result


def _by_position(outputs: Iterable[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    return ((f"output {i}", array) for i, array in enumerate(outputs))


def compare_answers(trial: TrialResult, reference: TrialResult) -> list[Rank]:
    """Compute the top-10 table of two trials.

    Empty if they list the same outputs in another order, because the first output that may be class scores is ranked.
    """
    ranks = compare_ranks(trial.answers, reference.answers)
    names, reference_names = (list(t.outputs()) if ranks else [] for t in (trial, reference))
    return ranks if names == reference_names or set(names) != set(reference_names) else []


def compare_ranks(answers: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> list[Rank]:
    """Compute the top-10 table (R8) of two classifiers' `topk_index` and `topk_score` [N, k], over common images."""
    if not {"topk_index", "topk_score"} <= set(answers) & set(reference):
        return []
    index, reference_index = match_images(dict(answers), dict(reference))
    k = min(RANK_COUNT, answers["topk_index"].shape[1], reference["topk_index"].shape[1])
    if not len(index):
        return []
    a, b = answers["topk_score"][index, :k].astype(np.float64), reference["topk_score"][reference_index, :k]
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))  # infinities too
    is_different = answers["topk_index"][index, :k] != reference["topk_index"][reference_index, :k]
    return [Rank(i + 1, float(error[:, i].mean()), float(is_different[:, i].mean())) for i in range(k)]
