"""The two sides of a comparison: their trials, told apart by side and name, and which of them belong together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dyno.planning.planned import Planned
from dyno.worker.spec import ModelSpec, Recipe, Trial, UserError, digest


def paired(sides: Mapping[str, Sequence[Planned]]) -> list[Planned]:
    """The trials of both sides, each with its side; two models of one name go by their files.

    `UserError` where no trial of one side has its counterpart on the other.
    """
    names: dict[str, set[str]] = {}
    for one in (one for planned in sides.values() for one in planned):
        names.setdefault(one.trial.model.name, set()).add(digest(one.trial.model))
    shared = {name for name, models in names.items() if len(models) > 1}
    _check(sides)
    found = []
    for side, planned in sides.items():
        for one in planned:
            model = one.trial.model
            trial = renamed(one.trial, place_of(model)) if model.name in shared else one.trial
            found.append(replace(one, trial=replace(trial, side=side)))
    return found


def renamed(trial: Trial, name: str) -> Trial:
    """The trial, and the files that it needs, of the model by another name."""

    def recipe(old: Recipe | None) -> Recipe | None:
        if old is None:
            return None
        model = replace(old.model, name=name)
        return replace(old, model=model, parent=recipe(old.parent), fallback=recipe(old.fallback))

    return replace(trial, model=replace(trial.model, name=name), recipe=recipe(trial.recipe))


def place_of(model: ModelSpec) -> str:
    """What tells a model from another one of its name: its file, or its whole source."""
    return os.path.relpath(model.file) if model.file else model.source


def _check(sides: Mapping[str, Sequence[Planned]]) -> None:
    """Refuse sides that share no batch and size, or no configuration."""
    a, b = sides.values()
    dims = [{(one.trial.dims.batch, one.trial.dims.shown) for one in side} for side in (a, b)]
    if not dims[0] & dims[1]:
        said = [", ".join(f"batch {batch}{f', size {size}' * bool(size)}" for batch, size in sorted(d)) for d in dims]
        raise UserError(f"A runs at {said[0]} and B at {said[1]}, so nothing can be compared; give --batch and --size")
    ways = [{(one.trial.variant, one.trial.precision) for one in side} for side in (a, b)]
    if not ways[0] & ways[1]:
        said = [", ".join(sorted(" ".join(way) for way in each)) for each in ways]
        raise UserError(f"A runs as {said[0]} and B as {said[1]}; give the --backends and --precision of both")
