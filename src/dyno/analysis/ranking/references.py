"""The reference trial of each trial, and whether two trials are comparable."""

from __future__ import annotations

from typing import Any

from dyno.analysis.records.results import Results, TrialResult
from dyno.worker.spec import UserError

RANDOM = "outputs are random"
INCOMPARABLE = "not comparable"  # how the verdict begins of a row that must not be held against its reference


def references(results: Results, wanted: str | None = None) -> dict[str, TrialResult]:
    """The trial that each trial is compared to, by trial id: same model, size, batch and device.

    `wanted` is a backend (with `@option=value`s or without), `BACKEND/PRECISION`, or the beginning of a trial id (its
    backend, precision and options then count in every group). By default pytorch fp32 where the group has it, else the
    group's first trial that ran. A group without the wanted one has no reference.
    """
    groups: dict[tuple[str, str, int, str], list[TrialResult]] = {}
    for t in results.trials:
        groups.setdefault(t.group, []).append(t)
    if wanted is None:
        chosen = {g: _usual(ts) for g, ts in groups.items()}
    else:
        chosen = _named(results, groups, wanted)
    return {t.id: ref for t in results.trials if (ref := chosen.get(t.group)) is not None}


def yardsticks(results: Results, chosen: dict[str, TrialResult]) -> dict[str, TrialResult]:
    """What each trial's accuracy is held against, by trial id: the reference of the study's first size.

    So a budget says what a smaller image may cost as well. With one size, and where the first one has no reference, it
    is the trial's own reference (`chosen`).
    """
    sizes = [str(size) for size in results.settings.get("sizes") or ()]
    if len(sizes) < 2:
        return chosen
    height, _, width = sizes[0].lower().partition("x")
    first = height if width in ("", height) else sizes[0].lower()
    at_first = {(t.model, t.batch, t.device): chosen[t.id] for t in results if t.size == first and t.id in chosen}
    found = {t.id: at_first.get((t.model, t.batch, t.device), chosen.get(t.id)) for t in results}
    return {id: reference for id, reference in found.items() if reference is not None}


def incomparable(a: TrialResult, b: TrialResult) -> str:
    """Why two trials must not be compared (random outputs; other weights or inputs, seen by their sha256), or ""."""
    if a.facts.get("random_outputs") or b.facts.get("random_outputs"):
        return RANDOM
    files = a.form and b.form and a.form != b.form  # which have their own hashes, whatever weights are in them
    for key, words in (("weights_sha256", "other weights"), ("inputs_sha256", "other inputs")):
        left, right = a.facts.get(key), b.facts.get(key)
        if files and key == "weights_sha256":
            continue
        if left and right and left != right:
            return words
    return ""


def _usual(trials: list[TrialResult]) -> TrialResult | None:
    ran = [t for t in trials if t.good]
    plain = [t for t in ran if (t.backend, t.precision) == ("pytorch", "fp32")]
    # Options are extra work on top of the plain way, so the plain way is the yardstick.
    return min(plain, key=lambda t: len(t.options)) if plain else next(iter(ran), None)


def _named(results: Results, groups: dict[Any, list[TrialResult]], wanted: str) -> dict[Any, TrialResult | None]:
    backend, _, precision = wanted.replace("/", ":").replace(" ", ":").partition(":")
    way = next((t.way for t in results.trials if t.id.startswith(wanted)), None) if len(wanted) >= 4 else None

    def fits(t: TrialResult) -> bool:
        return t.way == way if way else backend in (t.backend, t.variant) and precision in ("", t.precision)

    chosen = {g: next((t for t in ts if fits(t) and t.good), None) for g, ts in groups.items()}
    if not any(chosen.values()):
        ways = sorted({f"{t.backend}/{t.precision}" for t in results.trials if t.good})
        raise UserError(f"no trial that ran fits the reference {wanted!r}; there are {', '.join(ways) or 'none'}")
    return chosen
