"""Every layer of a graph in an engine against the reference's values: with its error's own part told from what it read.

A layer's own error is what it adds when it reads the reference's values: it runs alone, so nothing is fused with it.
What that does to the network's outputs is taken by adding it to the reference's graph, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.closeness import closeness, errors
from dyno.worker.facts.numerics import Apart, Point
from dyno.worker.numerics.engine import Engine, Keeping, Kept, cast
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
class Sides:
    """The graph that an engine runs, and the reference: its values, and its own graph (None where it has none)."""

    engine: Engine
    graph: Graph
    kept: Kept
    limits: Limits
    other: Graph | None = None

    def __post_init__(self) -> None:
        self.points = [name for name in self.graph.floats if name in self.kept]
        self.feeds = self.kept.feeds(self.graph.inputs)
        self.shapes = {**self.kept.shapes, **{name: array.shape for name, array in self.feeds[0].items()}}

    def kinds(self, names: Sequence[str]) -> dict[str, np.dtype[Any]]:
        """The types in which the graph has the tensors."""
        return {name: self.graph.dtype(name) for name in names}

    def apart(self, own: Sequence[np.ndarray], reference: np.ndarray) -> Apart | None:
        """The runs' values against the reference's; None for other shapes."""
        if any(array.shape != reference.shape[1:] for array in own):
            return None
        return joined([(np.stack([*own]), reference)], self.limits)

    def outputs(self, runs: Sequence[Sequence[np.ndarray]]) -> Apart | None:
        """The network's outputs of each run against the reference's, by their place; None for other shapes."""
        pairs = [(np.stack([*own]), b) for own, b in zip(zip(*runs, strict=True), self.kept.outputs, strict=False)]
        if len(runs[0]) != len(self.kept.outputs) or any(a.shape != b.shape for a, b in pairs):
            return None
        return joined(pairs, self.limits)


def joined(pairs: Sequence[tuple[np.ndarray, np.ndarray]], limits: Limits) -> Apart:
    """Several tensors as one: the largest error counts, and close are so many of all values."""
    error = max((float(errors(a, b).max(initial=0.0)) for a, b in pairs), default=0.0)
    a, b = (np.concatenate([np.ravel(pair[side]) for pair in pairs]) for side in (0, 1))
    found = closeness(a, b, limits.rtol, limits.atol)
    return Apart(error, found.close, found.max_abs, found.max_rel, found.nonfinite, found.reference_nonfinite)


def marked(sides: Sides, sizes: Mapping[str, int]) -> tuple[dict[str, Apart], Apart | None, int]:
    """Each point of the marked graph, the outputs that this gave, and in how many parts it was run."""
    graph, apart, outputs = sides.graph, dict[str, Apart](), None
    parts = [*in_parts([name for name in sides.points if name not in graph.outputs], sizes)] or [[]]
    for number, part in enumerate(parts):
        runs = sides.engine.run(graph.marked(part, sides.shapes), sides.feeds, sides.kinds(graph.inputs))
        if not number:
            outputs = sides.outputs([run[: len(graph.outputs)] for run in runs])
        for name, own in zip([*graph.outputs, *part], zip(*runs, strict=True), strict=True):
            if name in sides.points and (found := sides.apart(own, sides.kept[name])):
                apart[name] = found
    sides.points = [name for name in sides.points if name in apart]
    return apart, outputs, len(parts)


def alone(sides: Sides, sizes: Mapping[str, int], folder: Path) -> tuple[dict[str, Apart], Kept]:
    """Each point when its layer reads the reference's values, and these outputs."""
    stops, found, keeping = {*sides.points}, dict[str, Apart](), Keeping(folder)
    for part in in_parts(sides.points, {name: 2 * size for name, size in sizes.items()}):
        model, reads = sides.graph.alone(part, stops, sides.shapes)
        runs = sides.engine.run(model, [*_fed(sides, reads)], sides.kinds(reads))
        for name, own in zip(part, zip(*runs, strict=True), strict=True):
            if apart := sides.apart(own, sides.kept[name]):
                found[name] = apart
                keeping.add(name, own)
    keeping.end(sides.feeds, [])
    return found, Kept(folder)


def of_another_meaning(sides: Sides, apart: Mapping[str, Apart], added: Mapping[str, Apart]) -> set[str]:
    """The points that are off while a reader of theirs is nearer in the engine than on the reference's values.

    Such a tensor isn't the reference's under another engine: it was matched with another call of a module, or its
    readers were scaled to make up for it.
    """
    limit, stops = sides.limits.error, {*sides.points}
    made_up = [name for name, own in added.items() if own.error > max(limit, CLEARLY * apart[name].error)]
    read = {each for name in made_up for each in sides.graph.reads(name, stops)}
    return {name for name in read & stops if apart[name].error > limit and not apart[name].nonfinite}


def _fed(sides: Sides, reads: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    for run, feed in enumerate(sides.feeds):
        yield {name: feed[name] if name in feed else sides.kept[name][run] for name in reads}


def with_effects(sides: Sides, points: Sequence[Point], local: Kept, threads: int, path: Path) -> list[Point]:
    """The points with the effect of those whose layers have the largest errors of their own."""
    import onnx

    other = sides.other
    if other is None:
        return [*points]
    able = [point for point in points if point.added.error > 0 and point.tensor in other.floats]
    chosen = [point.tensor for point in sorted(able, key=lambda point: -point.added.error)[:CANDIDATES]]
    onnx.save(other.movable(chosen), path)
    ready = session(str(path), optimised=False, threads=threads)
    kinds = {name: other.dtype(name) for name in (*other.inputs, *chosen)}
    feeds = [{name: cast(a, kinds[name]) for name, a in feed.items()} for feed in sides.kept.feeds(other.inputs)]
    still = {name + DELTA: np.zeros((), kinds[name]) for name in chosen}
    base = [ready.run(None, {**feed, **still}) for feed in feeds]
    effects: dict[str, float] = {}
    for name in chosen:
        with np.errstate(all="ignore"):
            deltas = [cast(local[name][k].astype(np.float64) - sides.kept[name][k], kinds[name])
                      for k in range(len(feeds))]  # fmt: skip
        moved = [ready.run(None, {**f, **still, name + DELTA: d}) for f, d in zip(feeds, deltas, strict=True)]
        effects[name] = _largest(moved, base)
    return [replace(point, effect=effects.get(point.tensor)) for point in points]


def _largest(runs: Sequence[Sequence[np.ndarray]], base: Sequence[Sequence[np.ndarray]]) -> float:
    """The largest error of any output that has the same shape in every run."""
    pairs = zip(zip(*runs, strict=True), zip(*base, strict=True), strict=True)
    same = [(a, b) for a, b in pairs if len({array.shape for array in (*a, *b)}) == 1]
    return max((float(errors(np.stack(a), np.stack(b)).max(initial=0.0)) for a, b in same), default=0.0)
