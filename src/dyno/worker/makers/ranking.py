"""How much each layer of an ONNX graph costs when it alone is in the lower type: which ones to keep higher first.

Each layer is rounded alone, the rest stays in FP32, and the signal-to-quantisation-noise ratio of the network's outputs
is taken on calibration images (as in Bhandare et al. 2019 and ONNX Runtime's own debugging tool, but at the outputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.facts.files import RankedLayer
from dyno.worker.onnx_graph.check import session
from dyno.worker.onnx_graph.int8 import CalibratedGraph, Scheme
from dyno.worker.onnx_graph.placement import LINEAR, channel_axis, sites

IMAGES = 16  # that the layers are ranked on, of those that calibrated
LIMIT_DB = 120.0  # of a ratio: an output that is exact, or no number at all, lies there
# What only passes values on has nothing of its own to round.
PASSING = set(
    "Relu Clip LeakyRelu MaxPool Reshape Flatten Transpose Squeeze Unsqueeze Identity Pad Slice Split Gather Expand "
    "Shape Cast Concat Resize DepthToSpace SpaceToDepth".split()
)

Feeds = Sequence[Mapping[str, np.ndarray]]
Changed = Callable[[Any], None]


def rank(
    model: Any, changes: Mapping[str, Changed], feeds: Feeds, threads: int, report: Callable[[int, int], None]
) -> list[RankedLayer]:
    """Return the layers, the most sensitive first; ties in the graph's order.

    `changes` maps a node's name to a function that rounds that one layer in a copy of the graph. `report` gets the
    number of finished layers, and of all.
    """
    exact = _compute_outputs(model, feeds, threads)
    kinds = {node.name: node.op_type for node in model.graph.node}
    layers = []
    for done, (name, change) in enumerate(changes.items()):
        report(done, len(changes))
        copy = type(model)()
        copy.CopyFrom(model)
        change(copy.graph)
        ratio = sqnr(exact, _compute_outputs(copy, feeds, threads))
        layers.append(RankedLayer(name, kinds[name], round(ratio, 2)))
    return sorted(layers, key=lambda layer: layer.sqnr_db)


def sqnr(exact: Sequence[np.ndarray], rounded: Sequence[np.ndarray]) -> float:
    """Return the ratio of the outputs' power to that of their error in dB, within ±120."""
    signal = sum(float(np.square(a, dtype=np.float64).sum()) for a in exact)
    noise = sum(float(np.square(b.astype(np.float64) - a).sum()) for a, b in zip(exact, rounded, strict=True))
    if not math.isfinite(noise):
        return -LIMIT_DB
    if not noise or not signal:
        return LIMIT_DB if not noise else -LIMIT_DB
    return max(-LIMIT_DB, min(LIMIT_DB, 10 * math.log10(signal / noise)))


def _compute_outputs(model: Any, feeds: Feeds, threads: int) -> list[np.ndarray]:
    # Optimised, casts that round would be taken out and Q/DQ pairs fused into something that isn't this layer alone.
    ready = session(model.SerializeToString(), optimised=False, threads=threads)
    with np.errstate(all="ignore"):
        runs = [ready.run(None, dict(feed)) for feed in feeds]
    return [np.concatenate([np.atleast_1d(run[k]) for run in runs]) for k in range(len(runs[0]))]


def int8_changes(seen: CalibratedGraph) -> dict[str, Changed]:
    """Return, for each layer that the scheme would quantise, a function that quantises it alone."""
    wanted: dict[str, list[int]] = {}
    for node, k in _int8_sites(seen):
        wanted.setdefault(node.name, []).append(k)
    return {name: _make_quantiser(name, inputs, seen) for name, inputs in wanted.items()}


def _int8_sites(seen: CalibratedGraph) -> Iterator[tuple[Any, int]]:
    """Yield the quantised activations, as node and number of its input."""
    if seen.scheme.fused:
        yield from sites(seen.model.graph, seen.excluded, seen.transformer)
        return
    for node in seen.model.graph.node:
        if node.op_type in seen.types - PASSING and node.name not in seen.excluded:
            yield from ((node, k) for k, name in enumerate(node.input) if name in seen.ranges)


def _make_quantiser(name: str, inputs: list[int], seen: CalibratedGraph) -> Changed:
    def quantise_layer(graph: Any) -> None:
        node = next(n for n in graph.node if n.name == name)
        for k in inputs:
            _round_activation(graph, node, k, seen.ranges[node.input[k]], seen.scheme)
        if node.op_type in LINEAR:
            _round_weight(graph, node, 63 if seen.narrow else 127)

    return quantise_layer


def _round_activation(graph: Any, node: Any, k: int, span: tuple[float, float], scheme: Scheme) -> None:
    import onnx

    low, high = min(span[0], 0.0), max(span[1], 0.0)
    unsigned = scheme.activations == "U8" or (scheme.activations == "U8 or S8" and low >= 0)
    scale = ((high - low) / 255 if unsigned else max(-low, high) / 127) or 1.0
    zero = np.uint8(round(-low / scale)) if unsigned else np.int8(0)
    read = f"{node.name}_{k}"
    arrays = {f"{read}_scale": np.float32(scale), f"{read}_zero": zero}
    graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    pair = [
        onnx.helper.make_node("QuantizeLinear", [node.input[k], *arrays], [f"{read}_q"]),
        onnx.helper.make_node("DequantizeLinear", [f"{read}_q", *arrays], [f"{read}_dq"]),
    ]
    node.input[k] = f"{read}_dq"
    _insert_nodes(graph, node, pair, [])


def _round_weight(graph: Any, node: Any, largest: int) -> None:
    """Round a weight symmetrically, per output channel, in place of the initializer.

    A weight that isn't constant stays as it is.
    """
    tensor = next((t for t in graph.initializer if t.name == node.input[1]), None)
    if tensor is None:
        return
    values = _read_array(tensor)
    axis = channel_axis(node, values.ndim)
    others = tuple(k for k in range(values.ndim) if k != axis) if axis is not None else None
    scale = np.abs(values).max(axis=others, keepdims=True) / largest
    scale = np.where(scale > 0, scale, 1)
    _replace_weight(graph, node, 1, (np.round(values / scale) * scale).astype(values.dtype))


def fp16_changes(model: Any, kept: Sequence[str]) -> dict[str, Changed]:
    """Return, for each layer, a function that rounds its inputs, weights and outputs to FP16.

    Layers are those that compute in float32, without the operators that are `kept` higher anyway.
    """
    import onnx

    typed = onnx.shape_inference.infer_shapes(model).graph
    floats = {v.name for v in (*typed.value_info, *typed.input, *typed.output)
              if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}  # fmt: skip
    chosen = [
        node.name
        for node in model.graph.node
        if node.op_type not in PASSING | {*kept, "Constant"} and floats & {*node.input} and {*node.output} <= floats
    ]
    return {name: _make_halver(name, floats) for name in chosen}


def _make_halver(name: str, floats: set[str]) -> Changed:
    import onnx

    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT

    def make_casts(read: str, written: str, label: str) -> list[Any]:
        return [
            onnx.helper.make_node("Cast", [read], [f"{label}_half"], to=half),
            onnx.helper.make_node("Cast", [f"{label}_half"], [written], to=single),
        ]

    def halve_layer(graph: Any) -> None:
        node = next(n for n in graph.node if n.name == name)
        constants = {t.name: t for t in graph.initializer}
        before, after = [], []
        for k, read in enumerate(node.input):
            if read in constants and constants[read].data_type == single:
                with np.errstate(over="ignore"):
                    _replace_weight(graph, node, k, _read_array(constants[read]).astype(np.float16).astype(np.float32))
            elif read in floats:
                node.input[k] = f"{name}_{k}_single"
                before += make_casts(read, node.input[k], f"{name}_{k}")
        for k, written in enumerate(node.output):
            node.output[k] = f"{name}_{k}_exact"
            after += make_casts(node.output[k], written, f"{name}_{k}_out")
        _insert_nodes(graph, node, before, after)

    return halve_layer


def _read_array(tensor: Any) -> np.ndarray:
    import onnx

    return np.asarray(onnx.numpy_helper.to_array(tensor))


def _replace_weight(graph: Any, node: Any, k: int, values: np.ndarray) -> None:
    """Give the node its own copy of the weight, which other nodes may read."""
    import onnx

    node.input[k] = f"{node.name}_{k}_rounded"
    graph.initializer.append(onnx.numpy_helper.from_array(values, node.input[k]))


def _insert_nodes(graph: Any, node: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    place = next(i for i, n in enumerate(graph.node) if n.name == node.name)
    for k, new in enumerate(before):
        graph.node.insert(place + k, new)
    for k, new in enumerate(after):
        graph.node.insert(place + len(before) + 1 + k, new)
