"""The reference trial of each trial, and whether two trials are comparable.

Tables choose references among stored trials, the engine among planned ones, by the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from dyno.analysis.records.results import Results, TrialResult, load
from dyno.worker.spec import PRECISIONS, Trial, UserError

BESIDE = "reference"  # in a run folder: the run of a reference that isn't among its trials
T = TypeVar("T", Trial, TrialResult)
SHORTEST_ID = 4  # characters of an id that name a trial
CHANGING, OTHER_WEIGHTS, OTHER_INPUTS = "outputs change from call to call", "different weights", "different inputs"
INCOMPARABLE = "not comparable"  # the beginning of the verdict of a row that can't be compared with its reference


def references(results: Results, requested: str | None = None) -> dict[str, TrialResult]:
    """Return the reference of each trial, by trial id: one of the same model, size, batch and device.

    `requested` (see `matcher`) applies to every group; the default is the group's `first`. A group in which no
    successful trial fits has no reference. UserError where no group has one.
    """
    groups: dict[tuple[str, str, int, str, str], list[TrialResult]] = {}
    for t in results.trials:
        groups.setdefault(t.group, []).append(t)
    fits = matcher(requested, results.trials) if requested else None
    chosen = {group: first([t for t in trials if t.good], fits) for group, trials in groups.items()}
    if requested and not any(chosen.values()):
        available = sorted({f"{t.backend}/{t.precision}" for t in results.trials if t.good})
        raise UserError(
            f"no successful trial fits the reference {requested!r}; available: {', '.join(available) or 'none'}"
        )
    return {t.id: ref for t in results.trials if (ref := chosen[t.group]) is not None}


def matcher(requested: str, trials: Iterable[T]) -> Callable[[T], bool]:
    """Return a function that tells whether a trial may be the requested reference.

    It is `BACKEND`, `BACKEND/PRECISION` (also with a colon or a space), either with the backend's options as
    `@option=value`, or the beginning of the id of one of the `trials`, whose backend, options and precision then count.
    """
    for t in trials if len(requested) >= SHORTEST_ID else ():
        if t.id.startswith(requested):
            configuration = t.side, t.variant, t.precision
            return lambda other: (other.side, other.variant, other.precision) == configuration
    precisions = "|".join(PRECISIONS)
    # The precision stands behind the backend or behind its last option.
    match = re.search(rf"[/: ]({precisions})(?=@|$)", requested)
    precision = match[1] if match else ""
    backend, *options = (requested[: match.start()] + requested[match.end() :] if match else requested).split("@")

    def is_match(t: T) -> bool:
        own, *its = t.variant.split("@")
        return own == backend and precision in ("", t.precision) and (not options or sorted(options) == sorted(its))

    return is_match


def first(trials: Sequence[T], fits: Callable[[T], bool] | None) -> T | None:
    """Return the reference of trials that are compared with each other, in their order in tables; None without one.

    It is the first that `fits`; by default pytorch fp32 with the fewest options, else the first.
    """
    if fits:
        return next((t for t in trials if fits(t)), None)
    baselines = [t for t in trials if (t.backend, t.precision) == ("pytorch", "fp32")]
    return min(baselines, key=lambda t: len(t.options)) if baselines else next(iter(trials), None)


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


def beside(results: Results) -> list[TrialResult]:
    """Return the trials that ran only as a source of outputs to compare the run's with."""
    with suppress(UserError):  # there is none, or it can't be read
        return load(results.folder / BESIDE).trials
    return []


def compared_with(results: Results, chosen: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """Return the trial whose outputs each trial's are compared with, by trial id.

    It is one that ran for that purpose alone, else the trial's reference (`chosen`).
    """
    others = {t.group: t for t in beside(results) if t.good}
    return chosen | {t.id: others[t.group] for t in results if t.group in others}


def incomparable(a: TrialResult, b: TrialResult) -> str:
    """Return the reason why two trials can't be compared, or "".

    Reasons are outputs that change, and weights or inputs with different sha256.
    """
    if a.facts.random_outputs or b.facts.random_outputs:
        return CHANGING
    files = a.form and b.form and a.form != b.form  # files have hashes of their own, whatever their weights
    weights = {t.facts.weights_sha256 for t in (a, b)} - {""}
    if len(weights) > 1 and not files:
        return OTHER_WEIGHTS
    return OTHER_INPUTS if other_inputs(a, b) else ""


def other_inputs(a: TrialResult, b: TrialResult) -> bool:
    """Return whether two trials are known to have been fed different values."""
    return len({t.facts.inputs_sha256 for t in (a, b)} - {""}) > 1
