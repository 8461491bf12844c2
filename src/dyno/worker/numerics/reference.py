"""The reference's values: what every layer of a module, or of a graph, computes on a few inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.nets import flops
from dyno.worker.numerics.engine import Engine, Feeds, Keeping, once
from dyno.worker.numerics.graph import Graph
from dyno.worker.sessions.torch_support import tensors
from dyno.worker.spec import UserError

MOST_KEPT = 2 << 30  # bytes of all tensors of all runs; fewer inputs are compared where they would be more
MOST_MARKED = 256 << 20  # bytes of the tensors that one run of a marked graph puts out
UNKNOWN = 1 << 20  # bytes that a tensor of unknown shape is taken for
Calls = Mapping[tuple[str, int], str]


def of_module(session: Session, module: Any, calls: Calls, feeds: Sequence[Feeds], keeping: Keeping) -> None:
    """Keep the results of the calls, each by the name of the tensor that it stands for; `calls` has a part's name, and
    which of its calls it is."""
    seen: Counter[str] = Counter()
    values: dict[str, list[np.ndarray]] = {name: [] for name in calls.values()}

    def watching(name: str) -> Callable[..., None]:
        def watch(part: Any, args: Any, result: Any) -> None:
            tensor = calls.get((name, seen[name]))
            seen[name] += 1
            first = next(tensors(result), None)
            if tensor and first is not None:  # a copy: what follows may write in place
                values[tensor].append(np.array(first.detach().cpu().float().numpy()))

        return watch

    named = {name for name, _ in calls}
    hooks = [part.register_forward_hook(watching(name)) for name, part in module.named_modules() if name in named]
    results: list[list[np.ndarray]] = []
    try:
        for feed in within_memory(feeds, lambda: sum(runs[0].nbytes for runs in values.values() if runs)):
            seen.clear()
            results.append(once(session, feed))
    finally:
        for hook in hooks:
            hook.remove()
    for name, runs in values.items():
        if len(runs) == len(results):
            keeping.add(name, runs)
    keeping.end(feeds[: len(results)], [*zip(*results, strict=True)])


def of_graph(engine: Engine, graph: Graph, feeds: Sequence[Feeds], keeping: Keeping) -> None:
    """Keep every floating-point tensor that the graph computes."""
    kinds = {name: graph.dtype(name) for name in graph.inputs}
    sizes = bytes_of(graph, {name: array.shape for name, array in feeds[0].items()})
    runs = [*within_memory(feeds, lambda: sum(sizes.get(name, UNKNOWN) for name in graph.floats))]
    marked = [name for name in graph.floats if name not in graph.outputs]
    for number, part in enumerate([*in_parts(marked, sizes)] or [[]]):
        results = engine.run(graph.marked(part, {}), runs, kinds)
        for name, values in zip([*graph.outputs, *part], zip(*results, strict=True), strict=True):
            if name in graph.floats and not (number and name in graph.outputs):
                keeping.add(name, values)
    keeping.end(runs, [*zip(*(result[: len(graph.outputs)] for result in results), strict=True)])


def within_memory(feeds: Sequence[Feeds], of_one: Callable[[], int]) -> Iterator[Feeds]:
    """As many of the feeds as MOST_KEPT allows, one at least; `of_one` has the bytes of a run after the first."""
    for number, feed in enumerate(feeds):
        if number and (number + 1) * of_one() > MOST_KEPT:
            return
        yield feed


def bytes_of(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of each tensor whose shape can be inferred from those of the inputs."""
    model = type(graph.model)()
    model.CopyFrom(graph.model)
    inferred = flops.with_shapes(model, shapes)
    known = inferred[1] if inferred else {}
    return {name: 4 * math.prod(shape) for name, shape in known.items() if 0 not in shape}


def in_parts(names: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names in lists of MOST_MARKED bytes at most, or of one."""
    part, filled = list[str](), 0
    for name in names:
        size = sizes.get(name, UNKNOWN)
        if part and filled + size > MOST_MARKED:
            yield part
            part, filled = [], 0
        part.append(name)
        filled += size
    if part:
        yield part


def check_finite(feeds: Iterable[Feeds]) -> None:
    """A `UserError` for an input with NaN or infinity, with which no two engines can be compared."""
    for feed in feeds:
        for name, array in feed.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise UserError(f"input {name!r} has values that are NaN or infinite; give inputs of numbers")
