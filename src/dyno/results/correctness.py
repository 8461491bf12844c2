"""Correctness of outputs: compared with the reference's outputs, by a tolerance for each precision.

The speed of a graph with other outputs is meaningless, so such trials are not ranked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dyno.formatting import format_number, show
from dyno.results import stats
from dyno.results.metrics import agreement
from dyno.results.metrics.precision import read_truth
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.worker.facts.engine import QUANTISED_PRECISIONS
from dyno.worker.facts.job import MIN_LABELS, have_labels, is_labels
from dyno.worker.numerics.closeness import find_one_sided
from dyno.worker.numerics.closeness import relative_errors as distances
from dyno.worker.spec import OTHER_NAMES, PRECISIONS, Trial, UserError, usual_name

# The reference of each trial, and whether two trials are comparable. Tables choose references among stored trials, the
# engine among planned ones, by the same functions.

REFERENCE_DIR = "reference"  # subfolder of a run for a reference outside its trials
T = TypeVar("T", Trial, TrialResult)
BASELINES = ("pytorch", "aoti", "compile", "onnxruntime")  # in order of preference: least changes to the network first
MIN_ID_LENGTH = 4  # shortest prefix of an id
CHANGING_OUTPUTS, OTHER_WEIGHTS, OTHER_INPUTS = (
    "outputs change from call to call",
    "different weights",
    "different inputs",
)
INCOMPARABLE = "not comparable"  # start of the verdict of an incomparable row


def find_references(results: Results, requested: str | None = None) -> dict[str, TrialResult]:
    """Return the reference of each trial, by trial id: a trial of the same model, size, batch and device.

    `requested` (see `make_matcher`) applies to every group; the default is the group's `first_trial`. Groups without a
    matching successful trial have no reference. UserError if no group has one.
    """
    groups: dict[tuple[str, str, int, str, str], list[TrialResult]] = {}
    for t in results.trials:
        groups.setdefault(t.group, []).append(t)
    fits = make_matcher(requested, results.trials) if requested else None
    references = {group: first_trial(_list_candidates(trials), fits) for group, trials in groups.items()}
    if requested and not any(references.values()):
        available = sorted({f"{t.backend}/{t.precision}" for t in results.trials if t.good})
        raise UserError(
            f"no successful trial fits the reference {requested!r}; available: {', '.join(available) or 'none'}"
        )
    return {t.id: ref for t in results.trials if (ref := references[t.group]) is not None}


def _list_candidates(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the successful trials; those below fp32 with NaN or infinity (overflow) come last."""
    return sorted((t for t in trials if t.good), key=lambda t: not t.finite and t.precision not in ("fp32", "tf32"))


def make_matcher(requested: str, trials: Iterable[T]) -> Callable[[T], bool]:
    """Return a predicate for the requested reference.

    `requested` is `BACKEND` or `BACKEND/PRECISION` (also with a colon or a space), either with the backend's options as
    `@option=value`, or a prefix of the id of one of the `trials`; then its backend, options and precision must match.
    """
    for t in trials if len(requested) >= MIN_ID_LENGTH else ():
        if t.id.startswith(requested):
            configuration = t.side, t.variant, t.precision
            return lambda other: (other.side, other.variant, other.precision) == configuration
    precisions = "|".join((*PRECISIONS, *OTHER_NAMES))
    # The precision follows the backend or its last option.
    match = re.search(rf"[/: ]({precisions})(?=@|$)", requested, re.IGNORECASE)
    precision = usual_name(match[1]) if match else ""
    backend, *options = (requested[: match.start()] + requested[match.end() :] if match else requested).split("@")
    name = usual_name(backend)

    def is_match(t: T) -> bool:
        first, *rest = t.variant.split("@")
        return first == name and precision in ("", t.precision) and (not options or sorted(options) == sorted(rest))

    return is_match


def first_trial(trials: Sequence[T], fits: Callable[[T], bool] | None) -> T | None:
    """Return the reference among comparable trials, given in the order of tables; None without one.

    It is the first that `fits`. By default it is the first of `BASELINES` in fp32, with the fewest options, else the
    first in fp32, else the first.
    """
    if fits:
        return next((t for t in trials if fits(t)), None)
    fp32 = [t for t in trials if t.precision == "fp32"]
    baselines = [t for name in BASELINES for t in sorted(fp32, key=lambda t: len(t.options)) if t.backend == name]
    return next(iter(baselines or fp32 or trials), None)


def accuracy_references(results: Results, by_id: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """Return the trial to compare each trial's accuracy with, by trial id: the reference at the first size.

    So a budget also limits the loss by smaller images. With one size, or without a reference at the first size, it is
    the trial's own reference (`by_id`).
    """
    sizes = [str(size) for size in results.settings.get("sizes") or ()]
    if len(sizes) < 2:
        return by_id
    height, _, width = sizes[0].lower().partition("x")
    first_size = height if width in ("", height) else sizes[0].lower()
    by_group = {(t.model, t.batch, t.device): by_id[t.id] for t in results if t.size == first_size and t.id in by_id}
    references = {t.id: by_group.get((t.model, t.batch, t.device), by_id.get(t.id)) for t in results}
    return {id: reference for id, reference in references.items() if reference is not None}


def list_output_sources(results: Results) -> list[TrialResult]:
    """Return the trials that ran only to provide reference outputs."""
    with suppress(UserError):  # missing or unreadable
        return load_run(results.folder / REFERENCE_DIR).trials
    return []


def compared_with(results: Results, by_id: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """Return the trial to compare each trial's outputs with, by trial id.

    It is a trial that ran only for that purpose, else the trial's reference (`by_id`).
    """
    sources = {t.group: t for t in list_output_sources(results) if t.good}
    return by_id | {t.id: sources[t.group] for t in results if t.group in sources}


def find_mismatch(a: TrialResult, b: TrialResult) -> str:
    """Return the reason why two trials can't be compared, or "".

    Reasons are changing outputs, and weights or inputs with different sha256.
    """
    if a.facts.random_outputs or b.facts.random_outputs:
        return CHANGING_OUTPUTS
    is_other_file = a.form and b.form and a.form != b.form  # files have their own hashes, even with equal weights
    weights = {t.facts.weights_sha256 for t in (a, b)} - {""}
    if len(weights) > 1 and not is_other_file:
        return OTHER_WEIGHTS
    return OTHER_INPUTS if other_inputs(a, b) else ""


def other_inputs(a: TrialResult, b: TrialResult) -> bool:
    """Return whether two trials are known to have had different input values."""
    return len({t.facts.inputs_sha256 for t in (a, b)} - {""}) > 1


# outcomes of the output check; OUTPUTS_WRONG also starts the verdict of a row without a speed
OUTPUTS_AGREE, OUTPUTS_WRONG = "agree", "wrong outputs"
NOT_FINITE = "the outputs are not finite (NaN or infinity): this engine is wrong, or its precision overflows"
EXACT_ERROR = 1e-5  # smaller relative errors aren't meaningful
MAX_FLIPPED_SHARE = 0.3  # share of the labels of one input


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a precision for relative errors |a - b| / |b| (2-norm, per input and output; largest over outputs).

    For detectors, also per channel. Up to `close` outputs agree, beyond `limit` they are wrong. In between, the task
    decides: the share of inputs whose class (or of confident detections whose box) changes may be `changed`. The share
    `quantile` of the inputs must be within the limits. The share `labels` of an output's labels (see `is_labels`) may
    differ.
    """

    close: float
    limit: float
    changed: float
    labels: float
    quantile: float = 1.0


TOLERANCES = {
    "fp32": Tolerance(1e-3, 1e-2, 0.01, 0.001),
    "tf32": Tolerance(5e-3, 5e-2, 0.01, 0.005),
    "fp16": Tolerance(1e-2, 1e-1, 0.02, 0.01),
    "bf16": Tolerance(5e-2, 3e-1, 0.05, 0.05),
    "int8": Tolerance(1e-1, 6e-1, 0.10, 0.10, 0.95),
    "fp8": Tolerance(1e-1, 6e-1, 0.10, 0.10, 0.95),
    "int4": Tolerance(2e-1, 6e-1, 0.20, 0.20, 0.95),
    "fp4": Tolerance(2e-1, 6e-1, 0.20, 0.20, 0.95),
    "int2": Tolerance(3e-1, 8e-1, 0.30, 0.30, 0.95),
}
# One quantised file in two engines, which round alike: 3 % apart in residual networks, 43 % if one is wrong.
OF_ONE_FILE = Tolerance(1e-1, 2e-1, 0.10, 0.10, 0.95)


@dataclass(frozen=True)
class Correctness:
    """Deviation of a trial's outputs from its reference's, and the tolerance.

    `error` is relative, NaN if all outputs are labels. `changed` is the share of changed answers (None: nothing to
    compare) out of `answers`. `labels_changed` is the largest share of an output's labels that differ (NaN: no labels).
    `far` of `inputs` inputs are beyond the limit, in the worst output. A share exceeds its allowance only if the lower
    limit of Clopper and Pearson's interval does.
    """

    error: float
    changed: float | None
    tolerance: Tolerance
    precision: str
    mismatch: str = ""  # a mismatch of shapes, boxes or labels, at any error
    labels_changed: float = math.nan
    answers: int = 0
    far: int = 0
    inputs: int = 0

    @property
    def ok(self) -> bool:
        """Whether the outputs are within the tolerance."""
        if self.mismatch or self._is_far:
            return False
        if math.isnan(self.error):
            return True
        return self.error <= self.tolerance.close or not self._has_changed

    @property
    def _is_far(self) -> bool:
        """Whether too many inputs are beyond the limit."""
        if not self.inputs:
            return self.error > self.tolerance.limit
        return stats.exceeds(self.far, self.inputs, 1 - self.tolerance.quantile)

    @property
    def _changed_count(self) -> int:
        return round((self.changed or 0) * self.answers)

    @property
    def _has_changed(self) -> bool:
        """Whether too many answers changed."""
        return stats.exceeds(self._changed_count, self.answers, self.tolerance.changed)

    @property
    def doubt(self) -> str:
        """Why too few inputs or answers leave the decision open; "" if they don't."""
        if not self.ok or not self.error > self.tolerance.close:
            return ""
        if self.error > self.tolerance.limit:
            return self._describe_doubt(self.far, self.inputs, "inputs are off", 1 - self.tolerance.quantile)
        if not (self.changed or 0) > self.tolerance.changed:
            return ""
        return self._describe_doubt(self._changed_count, self.answers, "answers change", self.tolerance.changed)

    def _describe_doubt(self, hits: int, count: int, subject: str, allowed: float) -> str:
        return (
            f"can't tell with {count} whether more than {allowed:.0%} of the {subject}, which {self.precision} allows "
            f"({hits} did): about {stats.estimate_needed(hits, count, allowed):,} are needed"
        )

    @property
    def reason(self) -> str:
        """Description of errors beyond the tolerance, with the tolerance; "" without any."""
        if self.ok or self.mismatch:
            return self.mismatch
        tolerance = self.tolerance
        text = f"off by {format_number(self.error, 2)} of their size"
        if self._is_far:
            return f"{text} ({self.precision} allows {tolerance.limit:g})"
        return f"{text} and {self.changed:.1%} of the answers changed ({self.precision} allows {tolerance.changed:.0%})"


def name_distance(error: float, labels_changed: float = math.nan) -> str:
    """Describe the deviation from the reference's outputs; `labels_changed` in percent."""
    phrases = []
    if not math.isnan(error):
        phrases.append(
            f"off by {show(error, 'percentage', 2)}"
            if error > EXACT_ERROR
            else f"to {show(EXACT_ERROR, 'percentage', 1)}"
        )
    if not math.isnan(labels_changed):
        share = show(labels_changed / 100, "percentage", 2)
        phrases.append(f"{share} of labels differ" if labels_changed else "no label differs")
    return ", ".join(phrases)


def check_correctness(trial: TrialResult, reference: TrialResult) -> Correctness | None:
    """Compare the trial's stored outputs with the reference's, by the widest applicable tolerance.

    Tolerances are those of both precisions and of the types that the reference's layers ran in. None for the reference
    itself, if either stored no outputs or no values, or after `find_mismatch`. For detectors, every channel of an
    output is checked separately, because boxes are much larger numbers than scores; in eight bits, channels are taken
    together.
    """
    if trial is reference or find_mismatch(trial, reference):
        return None
    actual, expected, omitted = agreement.paired_outputs(trial, reference)
    if not actual or not expected:
        return None
    # A module quantised by PyTorch has the precision FP32; files made from it round differently by one step.
    truth = read_truth(reference)
    types = [name for name in (truth.types if truth else ()) if name in TOLERANCES]
    precision = max(trial.precision, reference.precision, *types, key=lambda name: TOLERANCES[name].limit)
    tolerance = TOLERANCES[precision]
    if _run_one_quantised_file(trial, reference):
        tolerance, precision = OF_ONE_FILE, f"one {precision} file"
    if not trial.finite and reference.finite:
        return Correctness(np.inf, None, tolerance, precision, NOT_FINITE)
    if (rows := agreement.pair_rows(trial, reference)) is not None:
        return _judge_boxes(rows.errors, tolerance, precision)
    shapes = [[list(a.shape[1:]) for a in arrays] for arrays in (actual, expected)]
    if shapes[0] != shapes[1]:
        return Correctness(np.inf, None, tolerance, precision, f"outputs of shape {shapes[0]} instead of {shapes[1]}")
    if omitted > tolerance.changed:
        text = f"different numbers of rows for {omitted:.1%} of the inputs ({precision} allows {tolerance.changed:.0%})"
        return Correctness(np.inf, None, tolerance, precision, text)
    has_channels = trial.task.labels == "objects" and tolerance.quantile == 1
    if has_channels:
        actual, expected = ([_values_first(array) for array in arrays] for arrays in (actual, expected))
    pairs = [(a[:n], b[:n]) for a, b in zip(actual, expected, strict=True) if (n := min(len(a), len(b))) and b[:1].size]
    if not pairs:
        return None
    values = [pair for pair in pairs if not have_labels(*pair)]
    if text := _compare_not_finite(values):
        return Correctness(np.inf, None, tolerance, precision, text)
    errors = [distances(a, b, has_channels) for a, b in values]
    worst_error = max((float(np.quantile(e, tolerance.quantile, method="higher")) for e in errors), default=math.nan)
    changed, answers = None, 0
    if worst_error > tolerance.close:
        changed, answers = _compute_changed(trial, reference, actual[0], expected[0], tolerance)
    labels = [_compare_labels(*pair, values, tolerance, precision) for pair in pairs if have_labels(*pair)]
    mismatch = next((fault for _, fault in labels if fault), "")
    share = max((share for share, _ in labels), default=math.nan)
    far, inputs = max(((int((e > tolerance.limit).sum()), len(e)) for e in errors), default=(0, 0))
    return Correctness(worst_error, changed, tolerance, precision, mismatch, share, answers, far, inputs)


def _run_one_quantised_file(a: TrialResult, b: TrialResult) -> bool:
    """Return whether both run the same quantised user file, and so share its error."""
    file = a.spec.model.file
    is_unchanged = all(t.precision in QUANTISED_PRECISIONS and not t.made_by.scheme for t in (a, b))
    return bool(file) and file == b.spec.model.file and is_unchanged


def _compare_not_finite(values: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    """Describe NaN and infinities at other places than the reference's; "" without any."""
    one_sided = [(a, b, mask) for a, b in values if (mask := find_one_sided(a, b)).any()]
    if not one_sided:
        return ""
    count, total = sum(int(mask.sum()) for *_, mask in one_sided), sum(a.size for a, _ in values)
    share = f"{count:,} of {total:,} values"
    if any((~np.isfinite(a) & mask).any() for a, _, mask in one_sided):
        return f"{NOT_FINITE}; {share} are not those of the reference"
    return f"the reference's outputs are NaN or infinite where this engine gives numbers, in {share}"


def _compare_labels(
    actual: np.ndarray,
    expected: np.ndarray,
    values: Sequence[tuple[np.ndarray, np.ndarray]],
    tolerance: Tolerance,
    precision: str,
) -> tuple[float, str]:
    """Return the share of an output's labels that differ, and a description of the fault, else "".

    One label may differ by chance if there are enough; a single input with many labels may not have too large a share.
    """
    if "f" in (actual.dtype.kind, expected.dtype.kind):  # floating-point types round large integers
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    is_different = actual != expected
    scores = next((b for _, b in values if _are_ranked(b, expected)), None)
    if scores is not None:
        is_different &= ~_are_tied(actual, expected, scores, tolerance.limit)
    share = float(is_different.mean())
    if share > tolerance.labels and not (is_different.sum() == 1 and is_different.size >= MIN_LABELS):
        return (
            share,
            f"{show(share, 'percentage', 2)} of labels differ ({precision} allows {100 * tolerance.labels:g} %)",
        )
    peak = float(is_different.reshape(len(is_different), -1).mean(axis=1).max())
    if peak > MAX_FLIPPED_SHARE and is_different[0].size >= MIN_LABELS:
        return share, f"{show(peak, 'percentage', 2)} of labels differ in one input ({100 * MAX_FLIPPED_SHARE:g} % may)"
    return share, ""


def _are_ranked(scores: np.ndarray, indices: np.ndarray) -> bool:
    """Return whether `scores` belong to the indices of a top-k, highest first."""
    return bool(scores.shape == indices.shape and scores.ndim == 2 and scores.shape[1] > 1
                and (scores[:, 1:] <= scores[:, :-1]).all())  # fmt: skip


def _are_tied(actual: np.ndarray, expected: np.ndarray, scores: np.ndarray, limit: float) -> np.ndarray:
    """Return whether each index of a top-k may stand at its rank.

    It may if the reference's score of it differs from that rank's score by at most the tolerance. For an index that the
    reference doesn't list, the reference's last score is an upper bound.
    """
    scores = scores.astype(np.float64)
    margin = limit * np.sqrt(np.mean(_zero_not_finite(scores) ** 2, axis=1, keepdims=True))
    matches = actual[:, :, None] == expected[:, None, :]
    values = np.where(matches.any(axis=2), np.take_along_axis(scores, matches.argmax(axis=2), axis=1), scores[:, -1:])
    with np.errstate(invalid="ignore"):
        is_tied: np.ndarray = (values == scores) | (np.abs(values - scores) <= margin)
    return is_tied


def _zero_not_finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0)


def _values_first(array: np.ndarray) -> np.ndarray:
    """Return predictions as batch x values x anchors; except in the smallest images, anchors outnumber values."""
    return np.swapaxes(array, 1, 2) if array.ndim == 3 and array.shape[2] < array.shape[1] / 2 else array


def _judge_boxes(errors: np.ndarray, tolerance: Tolerance, precision: str) -> Correctness | None:
    """Judge paired boxes by the share of errors beyond the limit, at most `tolerance.changed`; None without errors."""
    if not errors.size:
        return None
    is_beyond = errors > tolerance.limit
    share = float(is_beyond.mean())
    text = (
        f"{share:.1%} of the boxes have no partner or are off by more than {tolerance.limit:g} of their size "
        f"({precision} allows {tolerance.changed:.0%})"
    )
    error = float(errors[~is_beyond].max(initial=0.0))
    is_wrong = stats.exceeds(int(is_beyond.sum()), is_beyond.size, tolerance.changed)
    return Correctness(error, share, tolerance, precision, text if is_wrong else "", answers=is_beyond.size)


def _compute_changed(
    trial: TrialResult, reference: TrialResult, actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance
) -> tuple[float | None, int]:
    """Return the share of the reference's answers that changed (None without answers), and the number of answers."""
    if boxes := agreement.compare_boxes(trial, reference):
        own_share = boxes.own_share if boxes.own_share is not None else 0.0
        return 1 - min(boxes.share, own_share), boxes.expected if boxes.share <= own_share else max(boxes.own, 1)
    if trial.task.labels != "classes" or is_labels(expected) or actual.ndim != 2 or actual.shape[1] < 2:
        return None, 0
    count = min(len(actual), len(expected))
    a, b = actual[:count].astype(np.float64), expected[:count].astype(np.float64)
    # Non-finite values are equal in both: the best finite value counts.
    a, b = (np.where(np.isfinite(b), array, -np.inf) for array in (a, b))
    rows, classes = np.arange(count), a.argmax(axis=1)
    # A class is a tie if its score is within the tolerance of the first: rounding may decide.
    with np.errstate(invalid="ignore"):  # a row without a number has no answer
        lead = b.max(axis=1) - b[rows, classes]
    tie_limit = tolerance.limit * np.sqrt(np.mean(_zero_not_finite(b) ** 2, axis=1))
    return float((lead > tie_limit).mean()), count
