"""The reference trial of each trial, and whether two trials are comparable."""

from __future__ import annotations

from typing import Any

from dyno.analysis.records.results import Results, TrialResult
from dyno.worker.spec import UserError

RANDOM = "outputs are random"
INCOMPARABLE = "not comparable"  # the beginning of the verdict of a row that can't be compared with its reference


def references(results: Results, requested: str | None = None) -> dict[str, TrialResult]:
    """The trial that each trial is compared to, by trial id: same model, size, batch and device.

    `requested` is a backend (with `@option=value`s or without), `BACKEND/PRECISION`, or the beginning of a trial id
    (its configuration is then the reference in every group). By default pytorch fp32 where the group has it, else
    the group's first trial that ran. A group without it has no reference.
    """
    groups: dict[tuple[str, str, int, str, str], list[TrialResult]] = {}
    for t in results.trials:
        groups.setdefault(t.group, []).append(t)
    if requested is None:
        chosen = {g: _default(ts) for g, ts in groups.items()}
    else:
        chosen = _requested(results, groups, requested)
    return {t.id: ref for t in results.trials if (ref := chosen.get(t.group)) is not None}


def accuracy_references(results: Results, chosen: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """The trial that each trial's accuracy is compared with, by trial id: the reference of the study's first size.

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


def incomparable(a: TrialResult, b: TrialResult) -> str:
    """Why two trials can't be compared (random outputs, or another sha256 of weights or inputs), or ""."""
    if a.facts.random_outputs or b.facts.random_outputs:
        return RANDOM
    files = a.form and b.form and a.form != b.form  # files have hashes of their own, whatever their weights
    weights = {t.facts.weights_sha256 for t in (a, b)} - {""}
    if len(weights) > 1 and not files:
        return "other weights"
    if len({t.facts.inputs_sha256 for t in (a, b)} - {""}) > 1:
        return "other inputs"
    return ""


def _default(trials: list[TrialResult]) -> TrialResult | None:
    ran = [t for t in trials if t.good]
    baselines = [t for t in ran if (t.backend, t.precision) == ("pytorch", "fp32")]
    # The one with the fewest options is the baseline.
    return min(baselines, key=lambda t: len(t.options)) if baselines else next(iter(ran), None)


def _requested(results: Results, groups: dict[Any, list[TrialResult]], requested: str) -> dict[Any, TrialResult | None]:
    backend, _, precision = requested.replace("/", ":").replace(" ", ":").partition(":")
    by_id = (t.configuration for t in results.trials if len(requested) >= 4 and t.id.startswith(requested))
    configuration = next(by_id, None)

    def fits(t: TrialResult) -> bool:
        if configuration:
            return t.configuration == configuration
        return backend in (t.backend, t.variant) and precision in ("", t.precision)

    chosen = {g: next((t for t in ts if fits(t) and t.good), None) for g, ts in groups.items()}
    if not any(chosen.values()):
        available = sorted({f"{t.backend}/{t.precision}" for t in results.trials if t.good})
        raise UserError(
            f"no trial that ran fits the reference {requested!r}; there are {', '.join(available) or 'none'}"
        )
    return chosen
