"""Parts of the verdict: decisions, findings, and their wording of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.formatting import UNCLEAR_WORD, format_points, format_ratio, show
from dyno.results import ranking, remarks, stats
from dyno.results.metrics import accuracy, choose_metric, list_metrics, mean_ap
from dyno.results.metrics.accuracy import KEEP_OPTION, OVER, UNDECIDED, WITHIN
from dyno.results.notes import (
    ROUTE_KEPT,
    AnchorDevices,
    Attempt,
    RouteAttempt,
    estimate_latency,
    percent_slower,
    read_attempts,
    read_devices,
)
from dyno.results.ranking import LATENCY
from dyno.results.run_data import RunData
from dyno.results.stats import Speedup
from dyno.results.trial_result import Results, TrialResult
from dyno.worker.facts.files import (
    AS_IN_TRAINING,
    AVERAGED_WARNING,
    DRAWN_STEPS,
    IN_SINGLE,
    ONE_OF,
    OTHER_SHAPE,
    OTHER_VALUES,
    RANDOM_WARNING,
)
from dyno.worker.spec import AS_READ, TEXT_ORDER, Preprocess
from dyno.worker.tasks.classify import NO_ACCURACY
from dyno.worker.tasks.layouts import NO_BOXES

if TYPE_CHECKING:
    import pandas as pd

BEST, NOTE, WARNING, FAILURE = "best", "note", "warning", "failure"
PROBLEMS_PART = "problems"  # the report's section of warnings and failures


@dataclass(frozen=True)
class Finding:
    """A sentence and its kind: best, note, warning or failure; `part` names the report's section with details."""

    kind: str
    text: str
    part: str = ""


@dataclass(frozen=True)
class Figure:
    """A number on a decision's card: its name, value, and a line below it."""

    name: str
    value: str
    below: str


@dataclass(frozen=True)
class Decision:
    """A sentence on the winner and its lead, for one model and size (`where`); `kind` is as in Finding.

    `answers` are short, each after its question: whether it is real, whether it is right, what to do next. `findings`
    are further sentences, `figures` the numbers for a card, and `badge` is its certainty in a word. `candidates` are
    the ids of trials that may win; `by` is the deciding speed.
    """

    kind: str
    where: str
    text: str
    answers: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()
    badge: str = ""
    candidates: tuple[str, ...] = ()
    by: str = ""

    @property
    def sentence(self) -> str:
        """The text, after its model and size."""
        return f"{self.where}: {self.text}" if self.where else self.text


def format_ms(value: float) -> str:
    """Format milliseconds as a duration."""
    return show(value * 1e-3, "duration")


# Sentences on a whole run: devices, precisions searched, pixel inputs, routes to ONNX, trials without accuracy.

# Sentences on a study's devices: differences, and parallel use.


def list_device_findings(results: Results) -> Iterator[Finding]:
    """Yield a sentence on the devices' differences and one on their parallel use; empty for a study on one device."""
    devices = read_devices(results.folder)
    if devices is None:
        return
    if difference := _describe_difference(devices):
        yield Finding(NOTE, difference)
    yield Finding(NOTE, _describe_company(devices))


def _describe_difference(devices: AnchorDevices) -> str:
    """Describe the difference between the slowest and the fastest device, by the anchor trial alone on each."""
    if devices.extremes is None:
        return ""
    fastest, slowest, is_real = devices.extremes
    percent = 100 * (estimate_latency(slowest) / estimate_latency(fastest) - 1)
    noise = "" if is_real else "; that is within the noise of its rounds"
    names = f"{slowest.place} is the slowest, {fastest.place} the fastest"
    return f"Cards differ by {percent:.2g} % ({devices.anchor}, repeated on each: {names}{noise})."


def _describe_company(devices: AnchorDevices) -> str:
    """Describe whether devices worked in parallel, and the slow-down compared with each device alone."""
    if not devices.side_by_side:
        evidence = f" ({devices.anchor}: {_format_slowdowns(devices.disturbed)})" if devices.disturbed else ""
        return f"Blocks were measured one at a time where devices were slower side by side than alone{evidence}."
    if devices.devices and not devices.speedups:
        return "Devices worked side by side: each is on a different host."
    slowdowns = {device: speedup for device, speedup in devices.speedups.items() if speedup.verdict == stats.SLOWER}
    if slowdowns:
        margin = f"up to {devices.equivalent:g} % count as equal"
        detail = f"{devices.anchor}: {_format_slowdowns(slowdowns)}"
        return f"Devices worked side by side: they were hardly slower than alone ({detail}; {margin})."
    min_ratio = min((speedup.low for speedup in devices.speedups.values()), default=math.nan)
    bound = f" (by less than {percent_slower(min_ratio):.2g} %, with 95 % confidence)" if 0.5 < min_ratio < 1 else ""
    return f"Devices worked side by side: none was measurably slower than alone{bound}."


def _format_slowdowns(speedups: Mapping[str, stats.Speedup]) -> str:
    return ", ".join(f"{device} by {percent_slower(speedup.value):.2g} %" for device, speedup in speedups.items())


# Lowered precisions that fail the budget, and the effect of keeping some layers in a higher precision.

LOWERED_PRECISIONS = ("int8", "fp16")
HIGHER_PRECISIONS = ("fp32", "tf32")
MAX_LAYERS_NAMED = 3  # higher-precision layers named in a sentence


def list_failing(run: RunData) -> list[str]:
    """Return ids of trials whose lowered precision fails the budget or is undecided, although layers could help.

    One per configuration and size, at the smallest batch that ran. Failures beyond the reach of layers are left out:
    too few images for any trial to be within, or a size at which higher precisions fail the budget too.
    """
    frame = run.frame
    rows = {row["trial"]: row for _, row in frame.iterrows()}
    by_series: dict[Any, TrialResult] = {}
    for t in sorted(run.records, key=lambda t: t.batch):
        if t.precision in LOWERED_PRECISIONS and KEEP_OPTION not in t.options and t.status == "ok":
            by_series.setdefault(accuracy.make_series_key(t), t)
    ids = []
    for t in by_series.values():
        row = rows[t.id]
        peers = frame[(frame["model"] == t.model) & (frame["size"] == t.size) & (frame["device"] == t.device)]
        higher_rows = peers[peers["precision"].isin(HIGHER_PRECISIONS) & (peers["status"] == "ok")]
        if (
            row["budget"] in (OVER, UNDECIDED)
            and (higher_rows["budget"] == WITHIN).any()
            and _has_enough_images(row, run.budgets)
        ):
            ids.append(t.id)
    return ids


def _has_enough_images(row: pd.Series, budgets: Sequence[accuracy.Budget]) -> bool:
    """Return whether a trial with all the reference's answers would be within the budget on that number of images."""
    return all(list_metrics()[budget.metric].unchanged(row["images"]).low >= budget.limit for budget in budgets)


def list_precision_findings(run: RunData) -> Iterator[Finding]:
    """Yield the layers kept in a higher precision for each lowered precision, and their cost."""
    mixed_trials: dict[Any, list[TrialResult]] = {}
    for t in run.records:
        if KEEP_OPTION in t.options:
            mixed_trials.setdefault(accuracy.make_series_key(t), []).append(t)
    plain = {(accuracy.make_series_key(t), t.batch): t for t in run.records if KEEP_OPTION not in t.options}
    rows = {row["trial"]: row for _, row in run.frame.iterrows()} if run.budgets and mixed_trials else {}
    for series, trials in mixed_trials.items() if rows else ():
        batch = min(t.batch for t in trials)
        candidates = [t for t in trials if t.batch == batch]
        if (lowered := plain.get((series, batch))) is not None and rows[lowered.id]["budget"] in (OVER, UNDECIDED):
            passing_trials = [t for t in candidates if rows[t.id]["budget"] == WITHIN and t.status == "ok"]
            best = min(passing_trials, key=_count_kept, default=None)
            yield (
                _report_success(lowered, best, rows, run) if best else _report_failure(lowered, candidates, run.budget)
            )


def _count_kept(t: TrialResult) -> int:
    return int(t.options[KEEP_OPTION])


def _report_success(plain: TrialResult, mixed: TrialResult, rows: dict[str, pd.Series], run: RunData) -> Finding:
    row, plain_row = rows[mixed.id], rows[plain.id]
    change = choose_metric(row.to_frame().T, run.budget_metrics).change_in(plain_row)[1]
    loss = f" ({format_points(change / 100)} points)" if change == change else ""
    failure = "loses more than it allows" if plain_row["budget"] == OVER else "is undecided"
    layers = mixed.made_by.kept
    names = ", ".join(layer.node for layer in layers[:MAX_LAYERS_NAMED]) + (
        ", …" if len(layers) > MAX_LAYERS_NAMED else ""
    )
    boundary, clock = str(row["boundary"]), str(row["clock"])
    cost = ranking.estimate_speedup(mixed, plain, boundary, clock, run.rule)
    return Finding(
        NOTE,
        f"{plain.label} {failure} under {run.budget}{loss}; with {_count_kept(mixed)} of {mixed.made_by.ranked} "
        f"layers in a higher precision ({names}) it is within: {format_ms(row[LATENCY])}, "
        f"{_as_fast(cost)}. How many to keep was chosen on the test images "
        "themselves.",
    )


def _as_fast(cost: Speedup) -> str:
    ratio = format_ratio(cost.value, cost.low, cost.high)
    return f"what that costs is {UNCLEAR_WORD}" if ratio == UNCLEAR_WORD else f"{ratio} as fast as without"


def _report_failure(plain: TrialResult, candidates: Sequence[TrialResult], budget: str) -> Finding:
    max_kept = max(map(_count_kept, candidates))
    total = next((n for t in candidates if (n := t.made_by.ranked)), "?")
    return Finding(
        WARNING,
        f"{plain.label}: up to {max_kept} of {total} layers in a higher precision don't bring it within {budget}.",
    )


# Files computed differently from what they store.


def list_weight_findings(results: Results) -> Iterator[Finding]:
    """Yield warnings on models computed otherwise than stored: other types, weights, functions, modes or readings."""
    models = dict.fromkeys(t.model_name for t in results if t.good and IN_SINGLE in remarks.list_warnings(t))
    advice = "values next to a threshold, as in trees, may differ from float64's by more than rounding"
    yield from (Finding(WARNING, f"{model}: {IN_SINGLE}; {advice}.") for model in models)
    lines = ((t.model_name, line) for t in results if t.good for line in remarks.list_warnings(t))
    prefixes = (AVERAGED_WARNING, AS_IN_TRAINING, DRAWN_STEPS, ONE_OF, OTHER_SHAPE, OTHER_VALUES, RANDOM_WARNING)
    texts = dict.fromkeys(f"{model}: {line}." for model, line in lines if line.startswith(prefixes))
    yield from (Finding(WARNING, text) for text in texts)


# Labels that may belong to another class.


def list_label_findings(results: Results) -> Iterator[Finding]:
    """Yield warnings on doubtful labels: numeric names sorted as text, misplaced boxes, or another class order."""
    lines = [
        (t.model_name, line.removeprefix("data: ")) for t in results if t.good for line in remarks.list_warnings(t)
    ]
    texts = dict.fromkeys(f"Labels: {line}." for _, line in lines if line.startswith(TEXT_ORDER))
    texts |= dict.fromkeys(f"{model}: {line}." for model, line in lines if line.startswith(AS_READ))
    yield from (Finding(WARNING, text) for text in texts)
    matrices = dict[str, accuracy.Confusion]()
    for t in results:
        if t.good and t.model_name not in matrices and (matrix := mean_ap.read_any_confusion(t)):
            matrices[t.model_name] = matrix
    for model, matrix in matrices.items():
        if order_note := matrix.describe_other_order():
            yield Finding(WARNING, f"{model}: {order_note}.")


# Guessed image sizes and normalisations, for files without such information.


def list_pixel_findings(results: Results) -> Iterator[Finding]:
    """Yield a warning for each model with a guessed image size or image preparation."""
    trials = [t for t in results if t.good or t.status == "failed"]  # perhaps because of the guess
    sizes = {t.model_name: t.size for t in trials if results.model_facts(t).size_guessed}
    for model, size in sizes.items():
        yield Finding(
            WARNING, f"{model}: the file leaves the image's size free; {size} was chosen: give --size, or --shapes."
        )
    sentences = dict.fromkeys(
        f"{t.model_name}: {text}" for t in results if t.good and (text := describe_guess(t, results))
    )
    yield from (Finding(WARNING, sentence) for sentence in sentences)


def describe_guess(trial: TrialResult, results: Results) -> str:
    """Describe the guesses in the trial's image preparation, and what to do; "" without a guess."""
    facts = results.model_facts(trial)
    preprocess = trial.spec.model.preprocess
    is_letterboxed = preprocess.letterbox
    if reason := facts.images_unchecked:
        if is_letterboxed:
            return f"images were letterboxed, but the model's own processor {reason}; its accuracy may be higher there."
        return (
            "images were prepared as preprocessor_config.json says, but the model's own processor couldn't be run to "
            f"check that ({reason}); if it does anything else, its answers are wrong."
        )
    if not facts.preprocess_guessed:
        return ""
    mean, std = _join_values(preprocess.mean), _join_values(preprocess.std)
    zeros, ones, byte_std = (_join_values([value] * len(preprocess.mean)) for value in (0, 1, 0.003922))
    normalisations = {"pixels in 0..1": (zeros, ones), "pixels in 0..255": (zeros, byte_std)}
    if len(preprocess.mean) == len(Preprocess().mean):
        normalisations["ImageNet's"] = (_join_values(Preprocess().mean), _join_values(Preprocess().std))
    options = (f"{' and '.join(pair)} for {name}" for name, pair in normalisations.items() if pair != (mean, std))
    preparation = "letterboxed and normalised" if is_letterboxed else "normalised"
    bgr_hint = ", and for BGR turn the channels in the file" * (len(preprocess.mean) == 3)
    crop = "" if is_letterboxed else f" They were cropped at the centre of {preprocess.resize:.3g} times the size."
    return (
        f"images were {preparation} by mean {mean} and std {std}, as the file doesn't specify them; if the network was "
        f"trained with others, its answers are wrong: give --mean and --std ({', '.join(options)}){bgr_hint}.{crop}"
    )


def _join_values(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


# Sentences on alternative routes to the ONNX file.


def list_route_findings(results: Results) -> Iterator[Finding]:
    """Yield a sentence for each configuration that kept another route, and one on all other routes tried."""
    models = {t.model for t in results}
    attempts = [one for one in read_attempts(results.folder) if one.model in models]
    for one in attempts:
        if (kept := one.kept_route) is not None:
            text = f"{_name_attempt(one)} by the route {kept.route} ran {kept.ratio:.2f} times as fast as by the"
            rest = _format_routes(route for route in one.routes if route.outcome != ROUTE_KEPT)
            yield Finding(BEST, f"{text} usual one at batch {one.batch}; it has separate rows{rest}.")
    if texts := [f"{_name_attempt(one)}{_format_routes(one.routes)}" for one in attempts if one.kept_route is None]:
        yield Finding(NOTE, f"No other route to the ONNX file is proven faster; tried: {', '.join(texts)}.")


def _name_attempt(attempt: Attempt) -> str:
    return f"{attempt.model} {attempt.configuration}"


def _format_routes(routes: Iterable[RouteAttempt]) -> str:
    outcomes = [f"{route.route} {f'{route.ratio:.2f}x' if route.ratio else route.outcome}" for route in routes]
    return f" ({', '.join(outcomes)})" if outcomes else ""


# Outputs without accuracy: no class scores for labelled images, or no boxes in a known layout.


def list_unscored_findings(run: RunData) -> Iterator[Finding]:
    """Yield a warning for each model without class scores or boxes.

    With a budget it adds that the budget was not checked, as no trial of the model can fail it.
    """
    budget = "; the budget was not checked" if run.budgets else ""
    sentences = ((t.model_name, sentence) for t in run.records if t.good and (sentence := list_unscored(t)))
    for model, sentence in dict.fromkeys(sentences):
        yield Finding(WARNING, f"{model}: {sentence}{budget}.")


def list_empty_budgets(run: RunData) -> Iterator[Finding]:
    """Yield a warning for each reference whose whole accuracy is within the permitted loss."""
    references = {t.id: t.model_name for t in run.references.values()} if run.budgets else {}
    for _, row in run.frame[run.frame["trial"].isin(list(references))].iterrows():
        for budget in run.budgets:
            metric = list_metrics()[budget.metric]
            if float(row.get(metric.column, math.nan)) <= budget.points:
                subject = f"{references[row['trial']]}: the reference has {metric.label} {row[metric.column]:.2f} %"
                yield Finding(
                    WARNING, f"{subject}, and the budget {budget} allows losing all of it, so every trial is within it."
                )


def list_unscored(t: TrialResult) -> str:
    """Return the trial's warning on outputs that can't be scored, else ""."""
    marks = NO_ACCURACY, NO_BOXES
    positions = ((warning, warning.find(mark)) for warning in remarks.list_warnings(t) for mark in marks)
    return next((warning[index:] for warning, index in positions if index >= 0), "")  # text after the stage
