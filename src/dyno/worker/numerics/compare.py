"""Every layer of a graph in an engine against the reference: its total error, its own, and its effect on the outputs.

A layer's own error is what it adds when it reads the reference's values: it runs alone, so nothing is fused with it.
What that does to the network's outputs is taken by adding it to the reference's graph, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.facts.numerics import Difference, LayerError
from dyno.worker.numerics.closeness import closeness, errors
from dyno.worker.numerics.engine import Feeds, GraphEngine, StoredTensors, TensorWriter, cast
from dyno.worker.numerics.graph import DELTA, Graph
from dyno.worker.numerics.reference import in_parts
from dyno.worker.onnx_graph.check import session

CLEARLY = 4.0  # times as far off on the reference's values as on the engine's: not by rounding
CANDIDATES = 32  # layers of the largest errors of their own, of which the effect on the outputs is tried


@dataclass(frozen=True)
class Limits:
    """|a - b| <= atol + rtol |b| is close; beyond `error` of its size a tensor disagrees."""

    error: float
    rtol: float
    atol: float


@dataclass
class TensorComparison:
    """An engine with the graph that it runs, against a reference with its graph and its stored tensors.

    `tensors` are the names that both have, in the order of the engine's graph.
    """

    engine: GraphEngine
    graph: Graph
    reference_graph: Graph
    stored: StoredTensors
    limits: Limits

    def __post_init__(self) -> None:
        self.tensors = [name for name in self.graph.float_tensors if name in self.stored]
        self.feeds = self.stored.feeds(self.graph.inputs)
        self.shapes = {**self.stored.shapes, **{name: array.shape for name, array in self.feeds[0].items()}}

    def difference(self, own: Sequence[np.ndarray], name: str) -> Difference | None:
        """Compare the runs' values of a tensor with the reference's; None for other shapes."""
        reference = self.stored[name]
        if any(array.shape != reference.shape[1:] for array in own):
            return None
        return _compute_difference([(np.stack([*own]), reference)], self.limits)

    def outputs(self, runs: Sequence[Sequence[np.ndarray]]) -> Difference | None:
        """Compare the network's outputs of each run with the reference's, by their place; None for other shapes."""
        references = self.stored.outputs
        pairs = [(np.stack([*own]), b) for own, b in zip(zip(*runs, strict=True), references, strict=False)]
        if len(runs[0]) != len(references) or any(a.shape != b.shape for a, b in pairs):
            return None
        return _compute_difference(pairs, self.limits)


def _compute_difference(pairs: Sequence[tuple[np.ndarray, np.ndarray]], limits: Limits) -> Difference:
    """Return the difference of several tensors as one: the largest error, and the close share of all values."""
    error = max((float(errors(a, b).max(initial=0.0)) for a, b in pairs), default=0.0)
    c = closeness(pairs, limits.rtol, limits.atol)
    return Difference(error, c.close, c.max_abs, c.max_rel, c.nonfinite, c.reference_nonfinite)


def marked(
    comparison: TensorComparison, sizes: Mapping[str, int]
) -> tuple[dict[str, Difference], Difference | None, int]:
    """Return each tensor's total difference, the outputs', and the number of parts in which the graph was run.

    Each tensor is an output of the graph there. Tensors of other shapes are dropped, so their shapes are left to the
    engine.
    """
    graph, differences, outputs = comparison.graph, dict[str, Difference](), None
    shapes = {name: array.shape for name, array in comparison.feeds[0].items()}
    parts = [*in_parts([name for name in comparison.tensors if name not in graph.outputs], sizes)] or [[]]
    for number, part in enumerate(parts):
        runs = comparison.engine.run(graph.marked(part, shapes), comparison.feeds, graph.dtypes(graph.inputs))
        if not number:
            outputs = comparison.outputs([run[: len(graph.outputs)] for run in runs])
        for name, own in zip([*graph.outputs, *part], zip(*runs, strict=True), strict=True):
            if name in comparison.tensors and (difference := comparison.difference(own, name)):
                differences[name] = difference
    comparison.tensors = [name for name in comparison.tensors if name in differences]
    return differences, outputs, len(parts)


def isolated(comparison: TensorComparison, sizes: Mapping[str, int], folder: Path) -> dict[str, Difference]:
    """Return each tensor's difference when its layer reads the reference's values; store its values in the folder."""
    stops, differences, writer = {*comparison.tensors}, dict[str, Difference](), TensorWriter(folder)
    for part in in_parts(comparison.tensors, {name: 2 * size for name, size in sizes.items()}):
        model, reads = comparison.graph.isolated(part, stops, comparison.shapes)
        runs = comparison.engine.run(model, _reference_feeds(comparison, reads), comparison.graph.dtypes(reads))
        for name, own in zip(part, zip(*runs, strict=True), strict=True):
            if difference := comparison.difference(own, name):
                differences[name] = difference
                writer.add(name, own)
    writer.end(comparison.feeds, [])
    return differences


def _reference_feeds(comparison: TensorComparison, reads: Sequence[str]) -> Iterator[Feeds]:
    for run, feed in enumerate(comparison.feeds):
        yield {name: feed[name] if name in feed else comparison.stored[name][run] for name in reads}


def mismatched(
    comparison: TensorComparison, total: Mapping[str, Difference], own: Mapping[str, Difference]
) -> set[str]:
    """Return the tensors that are off, with a reader that is nearer in the engine than on the reference's values.

    Such a tensor isn't the reference's under another engine: it was matched with another call of a module, or its
    readers were scaled to make up for it.
    """
    limit, stops = comparison.limits.error, {*comparison.tensors}
    made_up = [name for name, each in own.items() if each.error > max(limit, CLEARLY * total[name].error)]
    read = {each for name in made_up for each in comparison.graph.reads(name, stops)}
    return {name for name in read & stops if total[name].error > limit and not total[name].nonfinite}


def with_effects(
    comparison: TensorComparison, layers: Sequence[LayerError], folder: Path, path: Path
) -> tuple[LayerError, ...]:
    """Return the layers, with the effects of those that have the largest errors of their own.

    `folder` contains the values stored by `isolated`; `path` is where the reference's graph is written with deltas as
    inputs.
    """
    import onnx

    graph, local = comparison.reference_graph, StoredTensors(folder)
    able = [layer for layer in layers if layer.own.error > 0 and layer.tensor in graph.float_tensors]
    chosen = [layer.tensor for layer in sorted(able, key=lambda layer: -layer.own.error)[:CANDIDATES]]
    onnx.save(graph.with_deltas(chosen), path)
    ready = session(str(path), optimised=False, threads=comparison.engine.threads)
    kinds = graph.dtypes((*graph.inputs, *chosen))
    feeds = [{name: cast(a, kinds[name]) for name, a in feed.items()} for feed in comparison.stored.feeds(graph.inputs)]
    still = {name + DELTA: np.zeros((), kinds[name]) for name in chosen}
    base = [ready.run(None, {**feed, **still}) for feed in feeds]
    effects: dict[str, float] = {}
    for name in chosen:
        with np.errstate(all="ignore"):
            deltas = [cast(own.astype(np.float64) - reference, kinds[name])
                      for own, reference in zip(local[name], comparison.stored[name], strict=True)]  # fmt: skip
        moved = [ready.run(None, {**f, **still, name + DELTA: d}) for f, d in zip(feeds, deltas, strict=True)]
        effects[name] = _largest_error(moved, base)
    return tuple(replace(layer, effect=effects.get(layer.tensor)) for layer in layers)


def _largest_error(runs: Sequence[Sequence[Any]], base: Sequence[Sequence[Any]]) -> float:
    """Return the largest error of any output that has the same shape in every run."""
    pairs = zip(zip(*runs, strict=True), zip(*base, strict=True), strict=True)
    same = [(a, b) for a, b in pairs if len({array.shape for array in (*a, *b)}) == 1]
    return max((float(errors(np.stack(a), np.stack(b)).max(initial=0.0)) for a, b in same), default=0.0)
