"""Suspects tested again without marks: marked tensors change what an engine fuses, and may hide an error or make one.

The graph is cut around the suspects alone, once with everything in the engine, and once with the reference in the
suspects' place; what lies between the cuts is fused as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyno.worker.facts.numerics import Difference, LayerError
from dyno.worker.numerics.compare import TensorComparison
from dyno.worker.numerics.engine import GraphEngine
from dyno.worker.numerics.graph import Graph

MOST_SUSPECTS = MOST_FUSED = 8
MOST = 0.8  # of the squared errors, which those of independent layers add up in
Values = dict[str, list[np.ndarray]]


def suspects(layers: Sequence[LayerError]) -> list[str]:
    """Return the fewest layers that make MOST of the error, in the graph's order.

    If any layers make numbers infinite, return those. A layer's weight is its effect on the outputs, or its own error
    if no effect was measured at all.
    """
    tried = any(layer.effect is not None for layer in layers)
    weights = {layer.tensor: (layer.effect or 0.0) if tried else layer.own.error for layer in layers}
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
class TensorStages:
    """Tensors by the stage that computes them: the suspects in odd ones, all others in even ones.

    `numbers` has the stage of each compared tensor and of each output; `wanted` are the tensors that a later stage
    reads, and the outputs.
    """

    numbers: Mapping[str, int]
    wanted: frozenset[str]


def stages(comparison: TensorComparison, chosen: Sequence[str]) -> TensorStages:
    """Return the stages of the graph cut around the chosen tensors, which the reference's graph has too."""
    stops, numbers, wanted = {*comparison.tensors}, dict[str, int](), {*comparison.graph.outputs}
    targets = [name for name in comparison.graph.outputs if name not in stops]
    for name in (*comparison.tensors, *targets):
        reads = {*comparison.graph.reads(name, stops)}
        if name in chosen:
            reads |= {*comparison.reference_graph.reads(name, stops)}
        below = {read: numbers[read] for read in reads if read in numbers}
        deepest = max(below.values(), default=0)
        numbers[name] = deepest + (deepest % 2 != (name in chosen))
        wanted |= {read for read, number in below.items() if number < numbers[name]}
    return TensorStages(numbers, frozenset(wanted))


def run_stages(comparison: TensorComparison, plan: TensorStages, reference: GraphEngine | None) -> Difference | None:
    """Compare the network's outputs when it runs stage by stage, the odd stages in the reference if one is given."""
    values: Values = {name: [feed[name] for feed in comparison.feeds] for name in comparison.feeds[0]}
    for number in range(max(plan.numbers.values()) + 1):
        outputs = [name for name, own in plan.numbers.items() if own == number and name in plan.wanted]
        if not outputs:
            continue
        graph, engine = comparison.graph, comparison.engine
        if number % 2 and reference:
            graph, engine = comparison.reference_graph, reference
        before = {name for name, own in plan.numbers.items() if own < number}
        values |= _run_stage(comparison, graph, engine, outputs, before, values)
    runs = range(comparison.stored.runs)
    return comparison.outputs([[values[name][run] for name in comparison.graph.outputs] for run in runs])


def _run_stage(
    comparison: TensorComparison,
    graph: Graph,
    engine: GraphEngine,
    outputs: Sequence[str],
    before: set[str],
    values: Values,
) -> Values:
    shapes = {name: arrays[0].shape for name, arrays in values.items()}
    inputs: dict[str, Any] = {}
    if graph is comparison.reference_graph:  # whose inputs may have other names
        own = comparison.stored.feeds(graph.inputs)
        inputs = {name: [feed[name] for feed in own] for name in graph.inputs}
        shapes |= {name: arrays[0].shape for name, arrays in inputs.items()}
    model, reads = graph.piece(outputs, before, shapes)
    feeds = [{name: (inputs.get(name) or values[name])[run] for name in reads} for run in range(comparison.stored.runs)]
    results = engine.run(model, feeds, graph.dtypes(reads))
    return {name: [*arrays] for name, arrays in zip(outputs, zip(*results, strict=True), strict=True)}


def boundary(comparison: TensorComparison) -> tuple[str, ...]:
    """Return the last tensor at which the graph still agrees, and the first at which it doesn't.

    For each, the graph ends there, with nothing else marked. "" stands for the inputs and for the whole network. The
    search is by bisection, so there may be others.
    """
    tensors = comparison.tensors
    low, high = -1, len(tensors)
    while high - low > 1:
        middle = (low + high) // 2
        name = tensors[middle]
        model, reads = comparison.graph.piece([name], (), comparison.shapes)
        feeds = [{each: feed[each] for each in reads} for feed in comparison.feeds]
        runs = comparison.engine.run(model, feeds, comparison.graph.dtypes(reads))
        difference = comparison.difference([run[0] for run in runs], name)
        if difference is not None and difference.error <= comparison.limits.error:
            low = middle
        else:
            high = middle
    return (tensors[low] if low >= 0 else "", tensors[high] if high < len(tensors) else "")


def fused_suspects(comparison: TensorComparison, last: str) -> list[str]:
    """Return the fewest layers up to `last` that are still wrong when cut out as one piece, in the graph's order.

    Return none if MOST_FUSED layers aren't enough.
    """
    tensors = {*comparison.tensors}
    chosen = {last} & tensors
    while chosen and len(chosen) <= MOST_FUSED:
        difference = run_stages(comparison, stages(comparison, [*chosen]), None)
        if difference is None or not difference.error <= comparison.limits.error:
            return [name for name in comparison.tensors if name in chosen]
        before = {name for each in chosen for name in comparison.graph.reads(each, tensors)} & tensors
        if before <= chosen:
            return []
        chosen |= before
    return []
