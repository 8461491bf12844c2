"""Are a trial's outputs correct? They are compared with the reference's, by tolerances for each precision.

The speed of a graph with other outputs is meaningless: such a trial is in no ranking.
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
from dyno.worker.facts.job import MIN_LABELS, is_labels
from dyno.worker.numerics.closeness import find_one_sided
from dyno.worker.numerics.closeness import relative_errors as distances
from dyno.worker.spec import OTHER_NAMES, PRECISIONS, Trial, UserError, usual_name

# The reference trial of each trial, and whether two trials are comparable.
#
# Tables choose references among stored trials, the engine among planned ones, by the same functions.

REFERENCE_DIR = "reference"  # a run's folder for a reference outside its trials
T = TypeVar("T", Trial, TrialResult)
BASELINES = ("pytorch", "aoti", "compile", "onnxruntime")  # in order of preference: least changes to the network first
MIN_ID_LENGTH = 4  # characters of an id that name a trial
CHANGING_OUTPUTS, OTHER_WEIGHTS, OTHER_INPUTS = (
    "outputs change from call to call",
    "different weights",
    "different inputs",
)
INCOMPARABLE = "not comparable"  # start of the verdict of an incomparable row


def find_references(results: Results, requested: str | None = None) -> dict[str, TrialResult]:
    """Return the reference of each trial, by trial id: one of the same model, size, batch and device.

    `requested` (see `matcher`) applies to every group; the default is the group's `first`. A group in which no
    successful trial fits has no reference. UserError where no group has one.
    """
    groups: dict[tuple[str, str, int, str, str], list[TrialResult]] = {}
    for t in results.trials:
        groups.setdefault(t.group, []).append(t)
    fits = make_matcher(requested, results.trials) if requested else None
    chosen = {group: first_trial(_list_candidates(trials), fits) for group, trials in groups.items()}
    if requested and not any(chosen.values()):
        available = sorted({f"{t.backend}/{t.precision}" for t in results.trials if t.good})
        raise UserError(
            f"no successful trial fits the reference {requested!r}; available: {', '.join(available) or 'none'}"
        )
    return {t.id: ref for t in results.trials if (ref := chosen[t.group]) is not None}


def _list_candidates(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the successful trials, last those below fp32 with NaN or infinity (an overflow?)."""
    return sorted((t for t in trials if t.good), key=lambda t: not t.finite and t.precision not in ("fp32", "tf32"))


def make_matcher(requested: str, trials: Iterable[T]) -> Callable[[T], bool]:
    """Return a function that tells whether a trial may be the requested reference.

    It is `BACKEND`, `BACKEND/PRECISION` (also with a colon or a space), either with the backend's options as
    `@option=value`, or the beginning of the id of one of the `trials`, whose backend, options and precision then count.
    """
    for t in trials if len(requested) >= MIN_ID_LENGTH else ():
        if t.id.startswith(requested):
            configuration = t.side, t.variant, t.precision
            return lambda other: (other.side, other.variant, other.precision) == configuration
    precisions = "|".join((*PRECISIONS, *OTHER_NAMES))
    # The precision stands behind the backend or behind its last option.
    match = re.search(rf"[/: ]({precisions})(?=@|$)", requested, re.IGNORECASE)
    precision = usual_name(match[1]) if match else ""
    backend, *options = (requested[: match.start()] + requested[match.end() :] if match else requested).split("@")
    name = usual_name(backend)

    def is_match(t: T) -> bool:
        own, *its = t.variant.split("@")
        return own == name and precision in ("", t.precision) and (not options or sorted(options) == sorted(its))

    return is_match


def first_trial(trials: Sequence[T], fits: Callable[[T], bool] | None) -> T | None:
    """Return the reference of trials that are compared with each other, in their order in tables; None without one.

    It is the first that `fits`; by default the first of `BASELINES` in fp32, with the fewest options, else the first in
    fp32, or the first.
    """
    if fits:
        return next((t for t in trials if fits(t)), None)
    full = [t for t in trials if t.precision == "fp32"]
    baselines = [t for name in BASELINES for t in sorted(full, key=lambda t: len(t.options)) if t.backend == name]
    return next(iter(baselines or full or trials), None)


def accuracy_references(results: Results, chosen: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """Return the trial that each trial's accuracy is compared with, by trial id: the reference of the first size.

    So a budget limits the loss by smaller images as well. With one size, and where the first one has no reference, it
    is the trial's own reference (`chosen`).
    """
    sizes = [str(size) for size in results.settings.get("sizes") or ()]
    if len(sizes) < 2:
        return chosen
    height, _, width = sizes[0].lower().partition("x")
    first = height if width in ("", height) else sizes[0].lower()
    at_first = {(t.model, t.batch, t.device): chosen[t.id] for t in results if t.size == first and t.id in chosen}
    references = {t.id: at_first.get((t.model, t.batch, t.device), chosen.get(t.id)) for t in results}
    return {id: reference for id, reference in references.items() if reference is not None}


def list_output_sources(results: Results) -> list[TrialResult]:
    """Return the trials that ran only as a source of outputs to compare the run's with."""
    with suppress(UserError):  # there is none, or it can't be read
        return load_run(results.folder / REFERENCE_DIR).trials
    return []


def compared_with(results: Results, chosen: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """Return the trial whose outputs each trial's are compared with, by trial id.

    It is one that ran for that purpose alone, else the trial's reference (`chosen`).
    """
    others = {t.group: t for t in list_output_sources(results) if t.good}
    return chosen | {t.id: others[t.group] for t in results if t.group in others}


def find_mismatch(a: TrialResult, b: TrialResult) -> str:
    """Return the reason why two trials can't be compared, or "".

    Reasons are outputs that change, and weights or inputs with different sha256.
    """
    if a.facts.random_outputs or b.facts.random_outputs:
        return CHANGING_OUTPUTS
    files = a.form and b.form and a.form != b.form  # files have their own hashes, whatever their weights
    weights = {t.facts.weights_sha256 for t in (a, b)} - {""}
    if len(weights) > 1 and not files:
        return OTHER_WEIGHTS
    return OTHER_INPUTS if other_inputs(a, b) else ""


def other_inputs(a: TrialResult, b: TrialResult) -> bool:
    """Return whether two trials are known to have been fed different values."""
    return len({t.facts.inputs_sha256 for t in (a, b)} - {""}) > 1


# outcomes of a row's outputs; the second starts the verdict of a row without a speed
OUTPUTS_AGREE, OUTPUTS_WRONG = "agree", "wrong outputs"
NOT_FINITE = "the outputs are not finite (NaN or infinity): this engine is wrong, or its precision overflows"
EXACT_ERROR = 1e-5  # smaller relative errors aren't meaningful
MAX_FLIPPED_SHARE = 0.3  # share of an input's labels


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of a precision; errors are |a - b| / |b| in the 2-norm, per input and output (and channel, for
    detectors), and the largest over the outputs counts.

    Up to `close` outputs agree, beyond `limit` they are wrong. Between the two the task decides: the share of inputs
    whose class (or of sure detections whose box) changes may be `changed`. Of the inputs, `quantile` must hold it.
    Of an output's labels (see `is_labels`) the share `labels` may differ.
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
# Of one quantised file in two engines, which round alike: 3 % apart in residual networks, 43 % where one is wrong.
OF_ONE_FILE = Tolerance(1e-1, 2e-1, 0.10, 0.10, 0.95)


@dataclass(frozen=True)
class Correctness:
    """How far a trial's outputs are from its reference's: the relative `error` (NaN where all outputs are labels), the
    share of answers that `changed` (None where there are no answers to compare), and the tolerance.

    `labels_changed` is the largest share of an output's labels that differ (NaN: none has labels), and `answers` the
    number of answers. Of `inputs` inputs `far` are beyond the limit, in the output that has most of them. Shares count
    as beyond what is allowed only where the lower limit of Clopper and Pearson's interval is."""

    error: float
    changed: float | None
    tolerance: Tolerance
    precision: str
    mismatch: str = ""  # a mismatch of shapes, boxes or labels, whatever the error
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
        """Whether more inputs are beyond the limit than may be."""
        if not self.inputs:
            return self.error > self.tolerance.limit
        return stats.exceeds(self.far, self.inputs, 1 - self.tolerance.quantile)

    @property
    def _changed_count(self) -> int:
        return round((self.changed or 0) * self.answers)

    @property
    def _has_changed(self) -> bool:
        """Whether more answers changed than may."""
        return stats.exceeds(self._changed_count, self.answers, self.tolerance.changed)

    @property
    def doubt(self) -> str:
        """Why it isn't known whether more inputs or answers are beyond the tolerance than may be; "" where it is."""
        if not self.ok or not self.error > self.tolerance.close:
            return ""
        if self.error > self.tolerance.limit:
            return self._describe_doubt(self.far, self.inputs, "inputs are off", 1 - self.tolerance.quantile)
        if not (self.changed or 0) > self.tolerance.changed:
            return ""
        return self._describe_doubt(self._changed_count, self.answers, "answers change", self.tolerance.changed)

    def _describe_doubt(self, hits: int, count: int, what: str, allowed: float) -> str:
        return (
            f"can't tell with {count} whether more than {allowed:.0%} of the {what}, which {self.precision} allows "
            f"({hits} did): about {stats.estimate_needed(hits, count, allowed):,} are needed"
        )

    @property
    def reason(self) -> str:
        """The errors beyond the tolerance, with the tolerance; "" without any."""
        if self.ok or self.mismatch:
            return self.mismatch
        allowed = self.tolerance
        text = f"off by {format_number(self.error, 2)} of their size"
        if self._is_far:
            return f"{text} ({self.precision} allows {allowed.limit:g})"
        return f"{text} and {self.changed:.1%} of the answers changed ({self.precision} allows {allowed.changed:.0%})"


def name_distance(error: float, labels_changed: float = math.nan) -> str:
    """Describe how far outputs are from the reference's; `labels_changed` in percent."""
    words = []
    if not math.isnan(error):
        words.append(
            f"off by {show(error, 'percentage', 2)}"
            if error > EXACT_ERROR
            else f"to {show(EXACT_ERROR, 'percentage', 1)}"
        )
    if not math.isnan(labels_changed):
        share = show(labels_changed / 100, "percentage", 2)
        words.append(f"{share} of labels differ" if labels_changed else "no label differs")
    return ", ".join(words)


def check_correctness(trial: TrialResult, reference: TrialResult) -> Correctness | None:
    """Compare the trial's stored outputs with the reference's, by the widest of the tolerances that apply.

    They are those of both precisions, and of the types that the reference's layers ran in. None for the reference
    itself, where either stored no outputs or no values, or where the two are `find_mismatch` (other weights or inputs,
    or outputs that change). For detectors every channel of an output is checked separately, because boxes are far
    larger numbers than scores; in eight bits they are taken together.
    """
    if trial is reference or find_mismatch(trial, reference):
        return None
    own, other, apart = agreement.paired_outputs(trial, reference)
    if not own or not other:
        return None
    # A module that PyTorch quantised has the precision FP32, and files made of it round elsewhere by a step.
    ran = read_truth(reference)
    types = [name for name in (ran.types if ran else ()) if name in TOLERANCES]
    precision = max(trial.precision, reference.precision, *types, key=lambda name: TOLERANCES[name].limit)
    tolerance = TOLERANCES[precision]
    if _run_one_quantised_file(trial, reference):
        tolerance, precision = OF_ONE_FILE, f"one {precision} file"
    if not trial.finite and reference.finite:
        return Correctness(np.inf, None, tolerance, precision, NOT_FINITE)
    if (rows := agreement.pair_rows(trial, reference)) is not None:
        return _judge_boxes(rows.errors, tolerance, precision)
    shapes = [[list(a.shape[1:]) for a in arrays] for arrays in (own, other)]
    if shapes[0] != shapes[1]:
        return Correctness(np.inf, None, tolerance, precision, f"outputs of shape {shapes[0]} instead of {shapes[1]}")
    if apart > tolerance.changed:
        text = f"other numbers of rows for {apart:.1%} of the inputs ({precision} allows {tolerance.changed:.0%})"
        return Correctness(np.inf, None, tolerance, precision, text)
    channels = trial.task.labels == "objects" and tolerance.quantile == 1
    if channels:
        own, other = ([_values_first(array) for array in arrays] for arrays in (own, other))
    pairs = [(a[:n], b[:n]) for a, b in zip(own, other, strict=True) if (n := min(len(a), len(b))) and b[:1].size]
    if not pairs:
        return None
    values = [pair for pair in pairs if not _have_labels(*pair)]
    if text := _compare_not_finite(values):
        return Correctness(np.inf, None, tolerance, precision, text)
    errors = [distances(a, b, channels) for a, b in values]
    worst = max((float(np.quantile(e, tolerance.quantile, method="higher")) for e in errors), default=math.nan)
    changed, answers = None, 0
    if worst > tolerance.close:
        changed, answers = _compute_changed(trial, reference, own[0], other[0], tolerance)
    labels = [_compare_labels(*pair, values, tolerance, precision) for pair in pairs if _have_labels(*pair)]
    mismatch = next((wrong for _, wrong in labels if wrong), "")
    share = max((share for share, _ in labels), default=math.nan)
    far, inputs = max(((int((e > tolerance.limit).sum()), len(e)) for e in errors), default=(0, 0))
    return Correctness(worst, changed, tolerance, precision, mismatch, share, answers, far, inputs)


def _run_one_quantised_file(a: TrialResult, b: TrialResult) -> bool:
    """Return whether both run a file of the user's as it was quantised, so that they share its error."""
    file = a.spec.model.file
    as_it_is = all(t.precision in QUANTISED_PRECISIONS and not t.made_by.scheme for t in (a, b))
    return bool(file) and file == b.spec.model.file and as_it_is


def _have_labels(own: np.ndarray, other: np.ndarray) -> bool:
    """Return whether both outputs are labels: an engine may give whole numbers as float32 too."""
    return is_labels(other) or (is_labels(own) and bool((other == np.round(other)).all()))


def _compare_not_finite(values: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    """Return what is wrong where NaN and infinities are not those of the reference at the same places, else ""."""
    one_sided = [(a, b, found) for a, b in values if (found := find_one_sided(a, b)).any()]
    if not one_sided:
        return ""
    count, total = sum(int(found.sum()) for *_, found in one_sided), sum(a.size for a, _ in values)
    share = f"{count:,} of {total:,} values"
    if any((~np.isfinite(a) & found).any() for a, _, found in one_sided):
        return f"{NOT_FINITE}; {share} are not those of the reference"
    return f"the reference's outputs are NaN or infinite where this engine gives numbers, in {share}"


def _compare_labels(
    own: np.ndarray,
    other: np.ndarray,
    values: Sequence[tuple[np.ndarray, np.ndarray]],
    tolerance: Tolerance,
    precision: str,
) -> tuple[float, str]:
    """Return the share of an output's labels that differ, and a description of the fault, else "".

    One label may differ by chance where there are enough; no single input with many labels may have too large a share.
    """
    if "f" in (own.dtype.kind, other.dtype.kind):  # floating-point types round large integers
        own, other = own.astype(np.float32), other.astype(np.float32)
    differs = own != other
    scores = next((b for _, b in values if _are_ranked(b, other)), None)
    if scores is not None:
        differs &= ~_are_tied(own, other, scores, tolerance.limit)
    share = float(differs.mean())
    if share > tolerance.labels and not (differs.sum() == 1 and differs.size >= MIN_LABELS):
        return (
            share,
            f"{show(share, 'percentage', 2)} of labels differ ({precision} allows {100 * tolerance.labels:g} %)",
        )
    most = float(differs.reshape(len(differs), -1).mean(axis=1).max())
    if most > MAX_FLIPPED_SHARE and differs[0].size >= MIN_LABELS:
        return share, f"{show(most, 'percentage', 2)} of labels differ in one input ({100 * MAX_FLIPPED_SHARE:g} % may)"
    return share, ""


def _are_ranked(scores: np.ndarray, indices: np.ndarray) -> bool:
    """Return whether these are the scores of a top-k's indices, the highest first."""
    return bool(scores.shape == indices.shape and scores.ndim == 2 and scores.shape[1] > 1
                and (scores[:, 1:] <= scores[:, :-1]).all())  # fmt: skip


def _are_tied(own: np.ndarray, other: np.ndarray, scores: np.ndarray, limit: float) -> np.ndarray:
    """Return whether each of a top-k's indices may stand at its rank.

    It may where the reference's score of it is as near to that rank's score as the tolerance allows each score. The
    reference's last score is an upper bound for an index that it doesn't list.
    """
    scores = scores.astype(np.float64)
    room = limit * np.sqrt(np.mean(_zero_not_finite(scores) ** 2, axis=1, keepdims=True))
    listed = own[:, :, None] == other[:, None, :]
    theirs = np.where(listed.any(axis=2), np.take_along_axis(scores, listed.argmax(axis=2), axis=1), scores[:, -1:])
    with np.errstate(invalid="ignore"):
        tied: np.ndarray = (theirs == scores) | (np.abs(theirs - scores) <= room)
    return tied


def _zero_not_finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0)


def _values_first(array: np.ndarray) -> np.ndarray:
    """Return predictions as batch x values x anchors; anchors outnumber values in all but the smallest images."""
    return np.swapaxes(array, 1, 2) if array.ndim == 3 and array.shape[2] < array.shape[1] / 2 else array


def _judge_boxes(errors: np.ndarray, tolerance: Tolerance, precision: str) -> Correctness | None:
    """Judge by the paired boxes' errors: the share beyond the limit may not exceed that of answers that may change.

    Return None without errors.
    """
    if not errors.size:
        return None
    beyond = errors > tolerance.limit
    share = float(beyond.mean())
    text = (
        f"{share:.1%} of the boxes have no partner or are off by more than {tolerance.limit:g} of their size "
        f"({precision} allows {tolerance.changed:.0%})"
    )
    error = float(errors[~beyond].max(initial=0.0))
    is_wrong = stats.exceeds(int(beyond.sum()), beyond.size, tolerance.changed)
    return Correctness(error, share, tolerance, precision, text if is_wrong else "", answers=beyond.size)


def _compute_changed(
    trial: TrialResult, reference: TrialResult, own: np.ndarray, other: np.ndarray, tolerance: Tolerance
) -> tuple[float | None, int]:
    """Return the share of the reference's answers that the trial doesn't give, None where there are no answers; and how
    many answers there are."""
    if boxes := agreement.compare_boxes(trial, reference):
        own_share = boxes.own_share if boxes.own_share is not None else 0.0
        return 1 - min(boxes.share, own_share), boxes.expected if boxes.share <= own_share else max(boxes.own, 1)
    if trial.task.labels != "classes" or is_labels(other) or own.ndim != 2 or own.shape[1] < 2:
        return None, 0
    count = min(len(own), len(other))
    a, b = own[:count].astype(np.float64), other[:count].astype(np.float64)
    # What isn't finite is the same in both: the best of the others counts.
    a, b = (np.where(np.isfinite(b), array, -np.inf) for array in (a, b))
    rows, classes = np.arange(count), a.argmax(axis=1)
    # A class that lay closer to the first than the tolerance allows each score is a tie, which rounding may decide.
    with np.errstate(invalid="ignore"):  # a row without a number has no answer
        lead = b.max(axis=1) - b[rows, classes]
    tied = tolerance.limit * np.sqrt(np.mean(_zero_not_finite(b) ** 2, axis=1))
    return float((lead > tied).mean()), count
