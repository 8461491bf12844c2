"""The reference's tensors: what every layer of a module, or of a graph, computes on a few inputs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.nets import flops
from dyno.worker.numerics.closeness import errors
from dyno.worker.numerics.engine import Feeds, GraphEngine, TensorWriter, counterparts, once
from dyno.worker.numerics.graph import Graph
from dyno.worker.sessions.torch_support import import_torch, real_view, takes_hooks, tensors
from dyno.worker.spec import UserError

MOST_KEPT = 2 << 30  # bytes of all tensors of all runs; fewer inputs are compared where they would be more
MOST_MARKED = 256 << 20  # bytes of the tensors that one run of a marked graph puts out
UNKNOWN = 1 << 20  # bytes that a tensor of unknown shape is taken for
SAME = 1e-3  # of its size: a tensor that is nearer to a call's result is that, in FP32
Call = tuple[str, int]  # a part's name, and which of its calls
Calls = Mapping[str, Call]  # by the tensor


def of_module(
    session: Session,
    module: Any,
    graph: Graph,
    engine: GraphEngine,
    named: Calls,
    feeds: Sequence[Feeds],
    writer: TensorWriter,
) -> None:
    """Store the results of the module's calls, each by the name of the tensor that it is in the graph.

    `graph` is the module's own export, which `engine` runs node by node. A call is the tensor that has its values.
    Where none has them and the export's outputs are wrong too, `named` says which tensor the names point to; with right
    outputs the names are what is wrong.
    """
    with _Hooks(module) as hooks:
        outputs = [once(session, feeds[0])]
        own = {name: feeds[0][given] for name, given in counterparts(graph.inputs, [*feeds[0]]).items()}
        calls = _by_values(hooks.results, graph, engine, own)
        if not _same_outputs(graph, engine, own, outputs[0]):
            taken = {*calls.values()}
            calls = {tensor: call for tensor, call in named.items() if call not in taken} | calls
        values = {tensor: [hooks.results[call]] for tensor, call in calls.items() if call in hooks.results}
        for feed in within_memory(feeds, lambda: sum(runs[0].nbytes for runs in values.values())):
            if feed is feeds[0]:
                continue
            hooks.clear()
            outputs.append(once(session, feed))
            for tensor, runs in values.items():
                if calls[tensor] in hooks.results:
                    runs.append(hooks.results[calls[tensor]])
    for tensor, runs in values.items():
        if len(runs) == len(outputs):
            writer.add(tensor, runs)
    writer.end(feeds[: len(outputs)], [*zip(*outputs, strict=True)])


class _Hooks:
    """While it is open, `results` has the first tensor that each call of a part gave since `clear`."""

    def __init__(self, module: Any) -> None:
        self.results: dict[Call, np.ndarray] = {}
        self._calls: Counter[str] = Counter()
        parts = [(name, part) for name, part in module.named_modules() if takes_hooks(import_torch(), part)]
        self._hooks = [part.register_forward_hook(self._make_hook(name)) for name, part in parts]

    def _make_hook(self, name: str) -> Callable[..., None]:
        def store_result(part: Any, args: Any, result: Any) -> None:
            first = next(tensors(result), None)
            if first is not None:  # a copy: what follows may write in place
                self.results[name, self._calls[name]] = np.array(real_view(first.detach()).cpu().float().numpy())
            self._calls[name] += 1

        return store_result

    def clear(self) -> None:
        """Forget the last run."""
        self.results.clear()
        self._calls.clear()

    def __enter__(self) -> _Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _by_values(results: Mapping[Call, np.ndarray], graph: Graph, engine: GraphEngine, feed: Feeds) -> dict[str, Call]:
    """Match each tensor of the graph with the call of the same result, by values.

    Several tensors may match the same call.
    """
    by_shape: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call, result in results.items():
        by_shape[result.shape].append(call)
    matched: dict[str, Call] = {}
    for name, (own,) in _iter_tensors(graph, engine, [feed]):
        distances = {
            call: float(errors(own[None], results[call][None]).max(initial=0.0)) for call in by_shape[own.shape]
        }
        nearest = min(distances, key=lambda call: distances[call], default=None)
        if nearest is not None and distances[nearest] <= SAME:
            matched[name] = nearest
    return matched


def _same_outputs(graph: Graph, engine: GraphEngine, feed: Feeds, outputs: Sequence[np.ndarray]) -> bool:
    """Return whether the graph's outputs have these values."""
    (own,) = engine.run(graph.marked([], {}), [feed], graph.dtypes(graph.inputs))
    return len(own) == len(outputs) and all(
        a.shape == b.shape and errors(a[None], b[None]).max(initial=0.0) <= SAME
        for a, b in zip(own, outputs, strict=True)
    )


def _iter_tensors(graph: Graph, engine: GraphEngine, feeds: Sequence[Feeds]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield each floating-point tensor that the graph computes, with its values in every run."""
    sizes = bytes_of(graph, {name: array.shape for name, array in feeds[0].items()})
    inner = [name for name in graph.float_tensors if name not in graph.outputs]
    for number, part in enumerate([*in_parts(inner, sizes)] or [[]]):
        results = engine.run(graph.marked(part, {}), feeds, graph.dtypes(graph.inputs))
        for name, values in zip([*graph.outputs, *part], zip(*results, strict=True), strict=True):
            if name in part or (not number and name in graph.float_tensors):
                yield name, [*values]


def of_graph(engine: GraphEngine, graph: Graph, feeds: Sequence[Feeds], writer: TensorWriter) -> None:
    """Store every floating-point tensor that the graph computes."""
    sizes = bytes_of(graph, {name: array.shape for name, array in feeds[0].items()})
    runs = [*within_memory(feeds, lambda: sum(sizes.get(name, UNKNOWN) for name in graph.float_tensors))]
    for name, values in _iter_tensors(graph, engine, runs):
        writer.add(name, values)
    outputs = engine.run(graph.marked([], {}), runs, graph.dtypes(graph.inputs))
    writer.end(runs, [*zip(*outputs, strict=True)])


def within_memory(feeds: Sequence[Feeds], of_one: Callable[[], int]) -> Iterator[Feeds]:
    """Yield as many of the feeds as MOST_KEPT allows, at least one.

    `of_one` returns the bytes of a run after the first.
    """
    for number, feed in enumerate(feeds):
        if number and (number + 1) * of_one() > MOST_KEPT:
            return
        yield feed


def bytes_of(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the bytes of each tensor whose shape can be inferred from the inputs', at four bytes a value."""
    model = type(graph.model)()
    model.CopyFrom(graph.model)
    inferred = flops.with_shapes(model, shapes)
    known = inferred[1] if inferred else {}
    return {name: 4 * math.prod(shape) for name, shape in known.items() if 0 not in shape}


def in_parts(names: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names in lists of at most MOST_MARKED bytes, or of a single name."""
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
    """Raise a `UserError` for an input with NaN or infinity, with which engines can't be compared."""
    for feed in feeds:
        for name, array in feed.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise UserError(f"input {name!r} has values that are NaN or infinite; give inputs of numbers")
