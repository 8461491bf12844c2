"""A finding tested again on the engine as it is: marked tensors change what an engine fuses, and may hide or make it.

The graph is cut around the suspects alone, once with everything in the engine, and once with the reference in the
suspects' place; what lies between the cuts is fused as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyno.worker.facts.numerics import Apart, Point
from dyno.worker.numerics.compare import Sides
from dyno.worker.numerics.engine import Engine
from dyno.worker.numerics.graph import Graph

MOST_SUSPECTS = MOST_FUSED = 8
MOST = 0.8  # of the squared errors, which those of independent layers add up in
Values = dict[str, list[np.ndarray]]


def suspects(points: Sequence[Point]) -> list[str]:
    """The fewest layers that make MOST of the error, in the graph's order; those that make numbers infinite, if any do.

    A layer's weight is its effect on the outputs, or its own error where no effect was tried at all.
    """
    tried = any(point.effect is not None for point in points)
    weights = {point.tensor: (point.effect or 0.0) if tried else point.added.error for point in points}
    broken = [name for name, weight in weights.items() if not np.isfinite(weight)]
    if broken:
        return broken[:MOST_SUSPECTS]
    total, summed, chosen = sum(weight**2 for weight in weights.values()), 0.0, set[str]()
    for name in sorted(weights, key=lambda name: -weights[name])[:MOST_SUSPECTS]:
        if summed >= MOST * total:
            break
        chosen.add(name)
        summed += weights[name] ** 2
    return [name for name in weights if name in chosen]


@dataclass(frozen=True)
class Stages:
    """Points by the stage that computes them: the suspects in odd ones, all others in even ones.

    `levels` has each point's, and each output's that is none; `wanted` those that a later stage reads, and the outputs.
    """

    levels: Mapping[str, int]
    wanted: frozenset[str]


def stages(sides: Sides, chosen: Sequence[str]) -> Stages:
    """The stages of the graph that is cut around the chosen points, which are the reference graph's too."""
    assert sides.other is not None
    stops, levels, wanted = {*sides.points}, dict[str, int](), {*sides.graph.outputs}
    targets = [name for name in sides.graph.outputs if name not in stops]
    for name in (*sides.points, *targets):
        reads = {*sides.graph.reads(name, stops)}
        if name in chosen:
            reads |= {*sides.other.reads(name, stops)}
        below = {read: levels[read] for read in reads if read in levels}
        deepest = max(below.values(), default=0)
        levels[name] = deepest + (deepest % 2 != (name in chosen))
        wanted |= {read for read, level in below.items() if level < levels[name]}
    return Stages(levels, frozenset(wanted))


def staged(sides: Sides, plan: Stages, reference: Engine | None) -> Apart | None:
    """The network's outputs when it runs stage by stage, the odd ones in the reference where one is given."""
    other = sides.other
    assert other is not None
    values: Values = {name: [feed[name] for feed in sides.feeds] for name in sides.feeds[0]}
    for level in range(max(plan.levels.values()) + 1):
        outputs = [name for name, own in plan.levels.items() if own == level and name in plan.wanted]
        if not outputs:
            continue
        own, engine = (other, reference) if level % 2 and reference else (sides.graph, sides.engine)
        before = {name for name, own_level in plan.levels.items() if own_level < level}
        values |= _stage(sides, own, engine, outputs, before, values)
    runs = range(sides.kept.runs)
    return sides.outputs([[values[name][run] for name in sides.graph.outputs] for run in runs])


def _stage(
    sides: Sides, graph: Graph, engine: Engine, outputs: Sequence[str], before: set[str], values: Values
) -> Values:
    shapes = {name: arrays[0].shape for name, arrays in values.items()}
    inputs: dict[str, Any] = {}
    if graph is sides.other:  # whose inputs may have other names
        own = sides.kept.feeds(graph.inputs)
        inputs = {name: [feed[name] for feed in own] for name in graph.inputs}
        shapes |= {name: arrays[0].shape for name, arrays in inputs.items()}
    model, reads = graph.piece(outputs, before, shapes)
    feeds = [{name: (inputs.get(name) or values[name])[run] for name in reads} for run in range(sides.kept.runs)]
    results = engine.run(model, feeds, {name: graph.dtype(name) for name in reads})
    return {name: [*arrays] for name, arrays in zip(outputs, zip(*results, strict=True), strict=True)}


def border(sides: Sides) -> tuple[str, ...]:
    """The last point at which a graph that ends there, with nothing else marked, still agrees, and the first at which
    it doesn't ("" for the inputs and for the whole network): by halves, so that there may be others."""
    low, high = -1, len(sides.points)
    kinds = sides.kinds(sides.graph.inputs)
    while high - low > 1:
        middle = (low + high) // 2
        name = sides.points[middle]
        model, reads = sides.graph.piece([name], (), sides.shapes)
        feeds = [{each: feed[each] for each in reads} for feed in sides.feeds]
        runs = sides.engine.run(model, feeds, kinds)
        found = sides.apart([run[0] for run in runs], sides.kept[name])
        if found is not None and found.error <= sides.limits.error:
            low = middle
        else:
            high = middle
    return (sides.points[low] if low >= 0 else "", sides.points[high] if high < len(sides.points) else "")


def fused(sides: Sides, last: str) -> list[str]:
    """The fewest layers before `last`, with it, that are still wrong when they are cut out as one piece, in the graph's
    order; none where MOST_FUSED aren't enough."""
    chosen = {last} & {*sides.points}
    while chosen and len(chosen) <= MOST_FUSED:
        found = staged(sides, stages(sides, [*chosen]), None)
        if found is None or not found.error <= sides.limits.error:
            return [name for name in sides.points if name in chosen]
        before = {name for point in chosen for name in sides.graph.reads(point, {*sides.points})} & {*sides.points}
        if before <= chosen:
            return []
        chosen |= before
    return []
