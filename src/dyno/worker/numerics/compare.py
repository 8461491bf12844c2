"""Every layer of an engine's graph against the reference: its total error, its own, and its effect on the outputs.

A layer's own error is measured on the reference's values: the layer runs alone, so nothing is fused with it. Its effect
on the network's outputs is measured by adding only that error to the reference's graph.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.facts.job import Difference, LayerError
from dyno.worker.nets import flops
from dyno.worker.numerics.closeness import compare_all, relative_errors
from dyno.worker.numerics.engine import (
    DELTA_SUFFIX,
    Feeds,
    Graph,
    GraphEngine,
    StoredTensors,
    TensorWriter,
    cast,
    match_inputs,
    run_once,
)
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.onnx_graph.graph_facts import copy_message
from dyno.worker.sessions.torch_support import import_torch, real_view, takes_hooks, walk_tensors
from dyno.worker.spec import UserError

# The reference's tensors: the results of every layer of a module or graph on a few inputs

MAX_KEPT_B = 2 << 30  # bytes of all tensors; limits the number of inputs
MAX_MARKED_B = 256 << 20  # bytes of the outputs of one marked graph
UNKNOWN_SHAPE_B = 1 << 20  # assumed bytes of a tensor of unknown shape
SAME_TENSOR_ERROR = 1e-3  # relative error of a tensor identified with a call's result, in FP32
Call = tuple[str, int]  # a part's name, and the number of its call
Calls = Mapping[str, Call]  # by tensor


def run_module_reference(
    session: Session,
    module: Any,
    graph: Graph,
    engine: GraphEngine,
    names: Calls,
    feeds: Sequence[Feeds],
    writer: TensorWriter,
) -> None:
    """Store the results of the module's calls by the names of their tensors in the graph.

    `graph` is the module's own export, run by `engine` node by node. A call is matched with the tensor of equal values.
    Without a match, if the export's outputs are wrong too, `names` gives the tensor by name; with right outputs the
    names are wrong.
    """
    with _Hooks(module) as hooks:
        outputs = [run_once(session, feeds[0])]
        inputs = {name: feeds[0][source] for name, source in match_inputs(graph.inputs, [*feeds[0]]).items()}
        calls = _by_values(hooks.results, graph, engine, inputs)
        if not _same_outputs(graph, engine, inputs, outputs[0]):
            used_calls = {*calls.values()}
            calls = {tensor: call for tensor, call in names.items() if call not in used_calls} | calls
        values = {tensor: [hooks.results[call]] for tensor, call in calls.items() if call in hooks.results}
        for feed in within_memory(feeds, lambda: sum(runs[0].nbytes for runs in values.values())):
            if feed is feeds[0]:
                continue
            hooks.clear()
            outputs.append(run_once(session, feed))
            for tensor, runs in values.items():
                if calls[tensor] in hooks.results:
                    runs.append(hooks.results[calls[tensor]])
    for tensor, runs in values.items():
        if len(runs) == len(outputs):
            writer.add(tensor, runs)
    writer.end(feeds[: len(outputs)], [*zip(*outputs, strict=True)])


class _Hooks(ExitStack):
    """Forward hooks: while open, `results` has the first tensor returned by each call of a part since `clear`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.results: dict[Call, np.ndarray] = {}
        self._calls: Counter[str] = Counter()
        for name, part in module.named_modules():
            if takes_hooks(import_torch(), part):
                self.enter_context(part.register_forward_hook(self._make_hook(name)))

    def _make_hook(self, name: str) -> Callable[..., None]:
        def store_result(part: Any, args: Any, result: Any) -> None:
            tensor = next(walk_tensors(result), None)
            if tensor is not None:  # a copy: later operators may write in place
                self.results[name, self._calls[name]] = np.array(real_view(tensor.detach()).cpu().float().numpy())
            self._calls[name] += 1

        return store_result

    def clear(self) -> None:
        self.results.clear()
        self._calls.clear()


def _by_values(results: Mapping[Call, np.ndarray], graph: Graph, engine: GraphEngine, feed: Feeds) -> dict[str, Call]:
    """Match each tensor of the graph with the call of equal result.

    Several tensors may match the same call.
    """
    by_shape: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call, result in results.items():
        by_shape[result.shape].append(call)
    matches: dict[str, Call] = {}
    for name, (values,) in _iter_tensors(graph, engine, [feed]):
        distances = {
            call: float(relative_errors(values[None], results[call][None]).max(initial=0.0))
            for call in by_shape[values.shape]
        }
        nearest = min(distances, key=lambda call: distances[call], default=None)
        if nearest is not None and distances[nearest] <= SAME_TENSOR_ERROR:
            matches[name] = nearest
    return matches


def _same_outputs(graph: Graph, engine: GraphEngine, feed: Feeds, outputs: Sequence[np.ndarray]) -> bool:
    """Return whether the graph's outputs have these values."""
    (graph_outputs,) = engine.run(graph.mark([], {}), [feed], graph.read_dtypes(graph.inputs))
    return len(graph_outputs) == len(outputs) and all(
        a.shape == b.shape and relative_errors(a[None], b[None]).max(initial=0.0) <= SAME_TENSOR_ERROR
        for a, b in zip(graph_outputs, outputs, strict=True)
    )


def _iter_tensors(graph: Graph, engine: GraphEngine, feeds: Sequence[Feeds]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield each computed floating-point tensor of the graph, with its values in every run."""
    sizes = count_bytes(graph, {name: array.shape for name, array in feeds[0].items()})
    inner = [name for name in graph.float_tensors if name not in graph.outputs]
    for index, names in enumerate([*in_parts(inner, sizes)] or [[]]):
        results = engine.run(graph.mark(names, {}), feeds, graph.read_dtypes(graph.inputs))
        for name, values in zip([*graph.outputs, *names], zip(*results, strict=True), strict=True):
            if name in names or (not index and name in graph.float_tensors):
                yield name, [*values]


def run_graph_reference(engine: GraphEngine, graph: Graph, feeds: Sequence[Feeds], writer: TensorWriter) -> None:
    """Store every computed floating-point tensor of the graph."""
    sizes = count_bytes(graph, {name: array.shape for name, array in feeds[0].items()})
    runs = [*within_memory(feeds, lambda: sum(sizes.get(name, UNKNOWN_SHAPE_B) for name in graph.float_tensors))]
    for name, values in _iter_tensors(graph, engine, runs):
        writer.add(name, values)
    outputs = engine.run(graph.mark([], {}), runs, graph.read_dtypes(graph.inputs))
    writer.end(runs, [*zip(*outputs, strict=True)])


def within_memory(feeds: Sequence[Feeds], measure_run: Callable[[], int]) -> Iterator[Feeds]:
    """Yield the feeds as far as MAX_KEPT_B allows, at least one.

    `measure_run` returns the bytes of a run after the first.
    """
    for index, feed in enumerate(feeds):
        if index and (index + 1) * measure_run() > MAX_KEPT_B:
            return
        yield feed


def count_bytes(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the bytes of each tensor of inferable shape, at four bytes per value."""
    inferred = flops.with_shapes(copy_message(graph.model), shapes)
    tensor_shapes = inferred[1] if inferred else {}
    return {name: 4 * math.prod(shape) for name, shape in tensor_shapes.items() if 0 not in shape}


def in_parts(names: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names in lists of at most MAX_MARKED_B bytes, or of a single name."""
    group, total = list[str](), 0
    for name in names:
        size = sizes.get(name, UNKNOWN_SHAPE_B)
        if group and total + size > MAX_MARKED_B:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def check_finite(feeds: Iterable[Feeds]) -> None:
    """Raise a `UserError` for an input with NaN or infinity, which makes engines incomparable."""
    for feed in feeds:
        for name, array in feed.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise UserError(f"input {name!r} has values that are NaN or infinite; give inputs of numbers")


CLEAR_ERROR_RATIO = 4.0  # ratio of own to total error beyond rounding
MAX_CANDIDATES = 32  # layers with measured effect on the outputs: those with the largest own errors


@dataclass(frozen=True)
class Limits:
    """Limits of the comparison: |a - b| <= atol + rtol |b| is close; a tensor disagrees beyond the relative `error`."""

    error: float
    rtol: float
    atol: float


@dataclass
class TensorComparison:
    """An engine with its graph, against a reference with its graph and stored tensors.

    `tensors` are the names in both, in the order of the engine's graph.
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

    def compare_tensor(self, values: Sequence[np.ndarray], name: str) -> Difference | None:
        """Compare the runs' values of a tensor with the reference's; return None for other shapes."""
        reference = self.stored[name]
        if any(array.shape != reference.shape[1:] for array in values):
            return None
        return _compute_difference([(np.stack([*values]), reference)], self.limits)

    def outputs(self, runs: Sequence[Sequence[np.ndarray]]) -> Difference | None:
        """Compare each run's network outputs with the reference's, by position; return None for other shapes."""
        references = self.stored.outputs
        pairs = [(np.stack([*values]), b) for values, b in zip(zip(*runs, strict=True), references, strict=False)]
        if len(runs[0]) != len(references) or any(a.shape != b.shape for a, b in pairs):
            return None
        return _compute_difference(pairs, self.limits)


def _compute_difference(pairs: Sequence[tuple[np.ndarray, np.ndarray]], limits: Limits) -> Difference:
    """Return the difference of several tensors as one: the largest error, and the close share of all values."""
    error = max((float(relative_errors(a, b).max(initial=0.0)) for a, b in pairs), default=0.0)
    c = compare_all(pairs, limits.rtol, limits.atol)
    return Difference(error, c.close, c.max_abs, c.max_rel, c.nonfinite, c.reference_nonfinite)


def mark_tensors(
    comparison: TensorComparison, sizes: Mapping[str, int]
) -> tuple[dict[str, Difference], Difference | None, int]:
    """Return each tensor's total difference, the outputs', and the number of parts of the marked run.

    Each tensor is an output of the marked graph. Tensors of other shapes are dropped, and their shapes left to the
    engine.
    """
    graph, differences, outputs = comparison.graph, dict[str, Difference](), None
    shapes = {name: array.shape for name, array in comparison.feeds[0].items()}
    parts = [*in_parts([name for name in comparison.tensors if name not in graph.outputs], sizes)] or [[]]
    for index, names in enumerate(parts):
        runs = comparison.engine.run(graph.mark(names, shapes), comparison.feeds, graph.read_dtypes(graph.inputs))
        if not index:
            outputs = comparison.outputs([run[: len(graph.outputs)] for run in runs])
        for name, values in zip([*graph.outputs, *names], zip(*runs, strict=True), strict=True):
            if name in comparison.tensors and (difference := comparison.compare_tensor(values, name)):
                differences[name] = difference
    comparison.tensors = [name for name in comparison.tensors if name in differences]
    return differences, outputs, len(parts)


def isolate_layers(comparison: TensorComparison, sizes: Mapping[str, int], folder: Path) -> dict[str, Difference]:
    """Return each tensor's difference with its layer on the reference's values; store its values in the folder."""
    stops, differences, writer = {*comparison.tensors}, dict[str, Difference](), TensorWriter(folder)
    for names in in_parts(comparison.tensors, {name: 2 * size for name, size in sizes.items()}):
        model, reads = comparison.graph.isolate(names, stops, comparison.shapes)
        runs = comparison.engine.run(model, _reference_feeds(comparison, reads), comparison.graph.read_dtypes(reads))
        for name, values in zip(names, zip(*runs, strict=True), strict=True):
            if difference := comparison.compare_tensor(values, name):
                differences[name] = difference
                writer.add(name, values)
    writer.end(comparison.feeds, [])
    return differences


def _reference_feeds(comparison: TensorComparison, reads: Sequence[str]) -> Iterator[Feeds]:
    for run, feed in enumerate(comparison.feeds):
        yield {name: feed[name] if name in feed else comparison.stored[name][run] for name in reads}


def find_mismatched(
    comparison: TensorComparison, total: Mapping[str, Difference], own: Mapping[str, Difference]
) -> set[str]:
    """Return the tensors that are off, while a reader is closer in the engine than on the reference's values.

    Such a tensor isn't the reference's under another engine: it was matched with another call of a module, or its
    readers were scaled to compensate.
    """
    limit, stops = comparison.limits.error, {*comparison.tensors}
    suspects = [name for name, each in own.items() if each.error > max(limit, CLEAR_ERROR_RATIO * total[name].error)]
    read_tensors = {each for name in suspects for each in comparison.graph.reads(name, stops)}
    return {name for name in read_tensors & stops if total[name].error > limit and not total[name].nonfinite}


def with_effects(
    comparison: TensorComparison, layers: Sequence[LayerError], folder: Path, path: Path
) -> tuple[LayerError, ...]:
    """Return the layers, with the effects of those with the largest own errors.

    `folder` contains the values stored by `isolate_layers`; the reference's graph with deltas as inputs is written to
    `path`.
    """
    import onnx

    graph, values = comparison.reference_graph, StoredTensors(folder)
    candidates = [layer for layer in layers if layer.own.error > 0 and layer.tensor in graph.float_tensors]
    names = [layer.tensor for layer in sorted(candidates, key=lambda layer: -layer.own.error)[:MAX_CANDIDATES]]
    onnx.save(graph.with_deltas(names), path)
    session = make_session(str(path), optimised=False, threads=comparison.engine.threads)
    types = graph.read_dtypes((*graph.inputs, *names))
    feeds = [{name: cast(a, types[name]) for name, a in feed.items()} for feed in comparison.stored.feeds(graph.inputs)]
    zeros = {name + DELTA_SUFFIX: np.zeros((), types[name]) for name in names}
    base = [session.run(None, {**feed, **zeros}) for feed in feeds]
    effects: dict[str, float] = {}
    for name in names:
        with np.errstate(all="ignore"):
            deltas = [cast(value.astype(np.float64) - reference, types[name])
                      for value, reference in zip(values[name], comparison.stored[name], strict=True)]  # fmt: skip
        runs = [session.run(None, {**f, **zeros, name + DELTA_SUFFIX: d}) for f, d in zip(feeds, deltas, strict=True)]
        effects[name] = _largest_error(runs, base)
    return tuple(replace(layer, effect=effects.get(layer.tensor)) for layer in layers)


def _largest_error(runs: Sequence[Sequence[Any]], base: Sequence[Sequence[Any]]) -> float:
    """Return the largest error of any output with the same shape in every run."""
    pairs = zip(zip(*runs, strict=True), zip(*base, strict=True), strict=True)
    matches = [(a, b) for a, b in pairs if len({array.shape for array in (*a, *b)}) == 1]
    return max((float(relative_errors(np.stack(a), np.stack(b)).max(initial=0.0)) for a, b in matches), default=0.0)


# Suspects tested again without marks: marked tensors change an engine's fusions, and may hide or cause an error
#
# The graph is cut only around the suspects, once with all stages in the engine, and once with the reference in place of
# the suspects; between the cuts, the engine fuses as usual.

MAX_SUSPECTS = MAX_FUSED = 8
MAX_EXPLAINED_SHARE = 0.8  # share of the squared errors, which add up over independent layers
Values = dict[str, list[np.ndarray]]


def list_suspects(layers: Sequence[LayerError]) -> list[str]:
    """Return the fewest layers that explain MAX_EXPLAINED_SHARE of the error, in the graph's order.

    If any layers make numbers infinite, return those. A layer's weight is its effect on the outputs, or its own error
    if no effect was measured at all.
    """
    has_effects = any(layer.effect is not None for layer in layers)
    weights = {layer.tensor: (layer.effect or 0.0) if has_effects else layer.own.error for layer in layers}
    overflows = [name for name, weight in weights.items() if not np.isfinite(weight)]
    if overflows:
        return overflows[:MAX_SUSPECTS]
    total, subtotal, suspects = sum(weight**2 for weight in weights.values()), 0.0, set[str]()
    for name in sorted(weights, key=lambda name: -weights[name])[:MAX_SUSPECTS]:
        if subtotal >= MAX_EXPLAINED_SHARE * total:
            break
        suspects.add(name)
        subtotal += weights[name] ** 2
    return [name for name in weights if name in suspects]


@dataclass(frozen=True)
class TensorStages:
    """Tensors by the stage that computes them: suspects in odd stages, others in even ones.

    `numbers` has the stage of each compared tensor and output; `tensor_names` are the outputs and the tensors read by a
    later stage.
    """

    numbers: Mapping[str, int]
    tensor_names: frozenset[str]


def list_stages(comparison: TensorComparison, suspects: Sequence[str]) -> TensorStages:
    """Return the stages of the graph cut around the chosen tensors, which exist in the reference's graph too."""
    stops, numbers, tensor_names = {*comparison.tensors}, dict[str, int](), {*comparison.graph.outputs}
    targets = [name for name in comparison.graph.outputs if name not in stops]
    for name in (*comparison.tensors, *targets):
        reads = {*comparison.graph.reads(name, stops)}
        if name in suspects:
            reads |= {*comparison.reference_graph.reads(name, stops)}
        read_stages = {tensor: numbers[tensor] for tensor in reads if tensor in numbers}
        last_stage = max(read_stages.values(), default=0)
        numbers[name] = last_stage + (last_stage % 2 != (name in suspects))
        tensor_names |= {tensor for tensor, stage in read_stages.items() if stage < numbers[name]}
    return TensorStages(numbers, frozenset(tensor_names))


def run_stages(comparison: TensorComparison, plan: TensorStages, reference: GraphEngine | None) -> Difference | None:
    """Compare the network's outputs when run stage by stage, odd stages in the reference if one is given."""
    values: Values = {name: [feed[name] for feed in comparison.feeds] for name in comparison.feeds[0]}
    for stage in range(max(plan.numbers.values()) + 1):
        outputs = [
            name for name, tensor_stage in plan.numbers.items() if tensor_stage == stage and name in plan.tensor_names
        ]
        if not outputs:
            continue
        graph, engine = comparison.graph, comparison.engine
        if stage % 2 and reference:
            graph, engine = comparison.reference_graph, reference
        stops = {name for name, tensor_stage in plan.numbers.items() if tensor_stage < stage}
        values |= _run_stage(comparison, graph, engine, outputs, stops, values)
    runs = range(comparison.stored.runs)
    return comparison.outputs([[values[name][run] for name in comparison.graph.outputs] for run in runs])


def _run_stage(
    comparison: TensorComparison,
    graph: Graph,
    engine: GraphEngine,
    outputs: Sequence[str],
    stops: set[str],
    values: Values,
) -> Values:
    shapes = {name: arrays[0].shape for name, arrays in values.items()}
    inputs: dict[str, Any] = {}
    if graph is comparison.reference_graph:  # inputs may have other names
        reference_feeds = comparison.stored.feeds(graph.inputs)
        inputs = {name: [feed[name] for feed in reference_feeds] for name in graph.inputs}
        shapes |= {name: arrays[0].shape for name, arrays in inputs.items()}
    model, reads = graph.extract_piece(outputs, stops, shapes)
    feeds = [{name: (inputs.get(name) or values[name])[run] for name in reads} for run in range(comparison.stored.runs)]
    results = engine.run(model, feeds, graph.read_dtypes(reads))
    return {name: [*arrays] for name, arrays in zip(outputs, zip(*results, strict=True), strict=True)}


def find_boundary(comparison: TensorComparison) -> tuple[str, ...]:
    """Return the last tensor at which the graph still agrees, and the first at which it doesn't.

    The graph is ended at each tested tensor, with nothing else marked. "" stands for the inputs and for the whole
    network. The search is a bisection, so there may be other boundaries.
    """
    tensors = comparison.tensors
    low, high = -1, len(tensors)
    while high - low > 1:
        middle = (low + high) // 2
        name = tensors[middle]
        model, reads = comparison.graph.extract_piece([name], (), comparison.shapes)
        feeds = [{tensor: feed[tensor] for tensor in reads} for feed in comparison.feeds]
        runs = comparison.engine.run(model, feeds, comparison.graph.read_dtypes(reads))
        difference = comparison.compare_tensor([run[0] for run in runs], name)
        if difference is not None and difference.error <= comparison.limits.error:
            low = middle
        else:
            high = middle
    return (tensors[low] if low >= 0 else "", tensors[high] if high < len(tensors) else "")


def list_fused_suspects(comparison: TensorComparison, last: str) -> list[str]:
    """Return the fewest layers up to `last` that are still wrong when cut out as one piece, in the graph's order.

    Return none if MAX_FUSED layers aren't enough.
    """
    tensors = {*comparison.tensors}
    suspects = {last} & tensors
    while suspects and len(suspects) <= MAX_FUSED:
        difference = run_stages(comparison, list_stages(comparison, [*suspects]), None)
        if difference is None or not difference.error <= comparison.limits.error:
            return [name for name in comparison.tensors if name in suspects]
        inputs = {name for suspect in suspects for name in comparison.graph.reads(suspect, tensors)} & tensors
        if inputs <= suspects:
            return []
        suspects |= inputs
    return []
