"""The two sides of a comparison: their trials, distinguished by side and name, and which of them are pairs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dyno.planning.planned import PlannedTrial
from dyno.worker.spec import ModelSpec, Recipe, Trial, UserError, digest


def paired(sides: Mapping[str, Sequence[PlannedTrial]]) -> list[PlannedTrial]:
    """Return the trials of both sides, each with its side; two models of the same name are called by their files.

    Raises `UserError` if no trial of one side has a counterpart on the other.
    """
    names: dict[str, set[str]] = {}
    for entry in (entry for planned in sides.values() for entry in planned):
        names.setdefault(entry.trial.model.name, set()).add(digest(entry.trial.model))
    shared = {name for name, models in names.items() if len(models) > 1}
    _check_sides(sides)
    trials = []
    for side, planned in sides.items():
        for entry in planned:
            model = entry.trial.model
            trial = renamed(entry.trial, place_of(model)) if model.name in shared else entry.trial
            trials.append(replace(entry, trial=replace(trial, side=side)))
    return trials


def renamed(trial: Trial, name: str) -> Trial:
    """Return the trial with its model renamed, in the trial and in the files that it needs."""

    def rename_recipe(old: Recipe | None) -> Recipe | None:
        if old is None:
            return None
        model = replace(old.model, name=name)
        return replace(old, model=model, parent=rename_recipe(old.parent), fallback=rename_recipe(old.fallback))

    return replace(trial, model=replace(trial.model, name=name), recipe=rename_recipe(trial.recipe))


def place_of(model: ModelSpec) -> str:
    """Return what distinguishes models of the same name: the file, or the whole source."""
    return os.path.relpath(model.file) if model.file else model.source


def _check_sides(sides: Mapping[str, Sequence[PlannedTrial]]) -> None:
    """Refuse sides that share no batch and size, or no configuration."""
    a, b = sides.values()
    dims = [{(entry.trial.dims.batch, entry.trial.dims.shown) for entry in side} for side in (a, b)]
    if not dims[0] & dims[1]:
        in_a, in_b = (", ".join(f"batch {n}{f', size {size}' * bool(size)}" for n, size in sorted(d)) for d in dims)
        raise UserError(f"A runs at {in_a} and B at {in_b}, so nothing can be compared; give --batch and --size")
    configurations = [{f"{entry.trial.variant} {entry.trial.precision}" for entry in side} for side in (a, b)]
    if not configurations[0] & configurations[1]:
        in_a, in_b = (", ".join(sorted(names)) for names in configurations)
        raise UserError(f"A runs as {in_a} and B as {in_b}; give the --backends and --precision of both")
