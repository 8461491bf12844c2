"""Layers as calls inside calls: each one under the modules around it, with its seconds in every repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile

import numpy as np

from dyno.analysis.inside.tables import MODEL, names_cell, shape
from dyno.analysis.inside.times import Times, origins
from dyno.worker.facts.job import LAYERS, MODULES, Layer, LayerGraph

CONVERSIONS = "(conversions)"
BETWEEN = "."  # between the parts of a module's name


@dataclass(frozen=True)
class TimelineStep:
    """One layer that runs, under the modules that are around all of it.

    `index` is its place in the form. `stack` has full names, outermost first: of modules, then of the layer itself,
    unless a module's call is the layer. One that no module is known for is under its operator. `modules` are what it
    came from.
    """

    index: int
    layer: Layer
    stack: tuple[str, ...]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """The steps of one form in the order in which they run; `seconds` [repeats, steps] is empty where none was timed.

    A repeat is the mean of `runs_each` runs. With `own` the seconds of a step are those without its parts' steps.
    """

    title: str
    steps: tuple[TimelineStep, ...]
    seconds: np.ndarray
    runs_each: int = 1
    own: bool = False

    @cached_property
    def medians(self) -> np.ndarray:
        """Median seconds of each step; their sum is the time of all layers."""
        return np.median(self.seconds, axis=0) if len(self.seconds) else np.zeros(len(self.steps))

    def about(self, at: int) -> dict[str, str]:
        """Describe a step: its layer, type, modules, computing type, kernel, output and time, as far as known."""
        step, layer = self.steps[at], self.steps[at].layer
        own = {"layer": layer.name or self.steps[at].stack[-1], "type": layer.type, "modules": " ".join(step.modules)}
        ran = {"computes in": layer.computes_in, "kernel": layer.tactic, "output": output(layer)}
        moves = {"remark": "only changes type or layout" if layer.moves else ""}
        return {name: text for name, text in {**own, **ran, **moves, **self.time(at)}.items() if text}

    def time(self, at: int) -> dict[str, str]:
        """Return the step's median and its share of all layers' medians, as text; {} where nothing was timed."""
        if not len(self.seconds):
            return {}
        median, total = float(self.medians[at]), float(self.medians.sum()) or 1.0
        name = "own median, µs" if self.own else "median, µs"
        return {name: f"{1e6 * median:.3f}", "share, %": f"{100 * median / total:.2f}"}


def timelines(
    forms: Sequence[LayerGraph],
    graph_of: Mapping[int, int],
    module_of: Mapping[int, int],
    times: Mapping[int, Times],
    shown: Sequence[int],
) -> list[Timeline]:
    """Build the timelines of the forms `shown` (indices).

    `times` has the times of the forms that were timed; the other arguments are as in `times.profile`.
    """
    found = []
    for k in shown:
        origin = origins(forms, k, graph_of.get(k), module_of.get(k))
        timed = times.get(k)
        seconds = timed.layers if timed else np.zeros((0, len(forms[k].layers)))
        ran = [i for i, layer in enumerate(forms[k].layers) if not layer.skipped or seconds[:, i].any()]
        steps = tuple(_make_step(forms[k], i, origin[i][0]) for i in ran)
        each = len(timed.profiled) // len(timed.layers) if timed else 1
        found.append(Timeline(forms[k].library, steps, seconds[:, ran], each, forms[k].form == MODULES))
    return found


def _make_step(form: LayerGraph, index: int, modules: list[str]) -> TimelineStep:
    layer = form.layers[index]
    around = _find_shared_modules(modules)
    if form.form == MODULES:
        return TimelineStep(index, layer, (MODEL, *around), tuple(modules))
    if not modules:
        group = CONVERSIONS if layer.moves else f"({layer.type})"
        return TimelineStep(index, layer, (MODEL, group, layer.name or layer.type))
    label = layer.type
    if len(modules) > 1:
        label = names_cell("modules")({"modules_names": modules})
    if form.form == LAYERS and len(modules) > 1:
        label = f"{label}: {layer.type}"
    return TimelineStep(index, layer, (MODEL, *around, label), tuple(modules))


def _find_shared_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of the modules around all of these; of a single module, itself included."""
    if not modules or MODEL in modules:
        return ()
    paths = [name.split(BETWEEN) for name in modules]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return tuple(accumulate(shared, lambda one, other: f"{one}{BETWEEN}{other}"))


def output(layer: Layer) -> str:
    """Return shape, type and layout of the first output."""
    if not layer.outputs:
        return ""
    port = layer.outputs[0]
    return " ".join(filter(None, (shape(port), port.dtype, port.format)))


@dataclass(frozen=True)
class Mark:
    """Where a call begins or `ends`, in nanoseconds; `step` is the step that the call is, at its end."""

    name: str
    at: int
    ends: bool = False
    step: int | None = None


def marks(steps: Sequence[TimelineStep], nanoseconds: Sequence[int], begin: int) -> Iterator[Mark]:
    """Yield the calls of one repeat in the order of their begins and ends.

    Steps begin where the one before them ended, and a call around steps lasts from its first to its last one.
    """
    calling: list[str] = []
    at = begin
    for number, (step, lasts) in enumerate(zip(steps, nanoseconds, strict=True)):
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(calling, step.stack, strict=False)))
        yield from (Mark(name, at, ends=True) for name in reversed(calling[shared:]))
        yield from (Mark(name, at) for name in step.stack[shared:])
        at += lasts
        yield Mark(step.stack[-1], at, ends=True, step=number)
        calling = [*step.stack[:-1]]  # steps are listed as their calls end
    yield from (Mark(name, at, ends=True) for name in reversed(calling))
