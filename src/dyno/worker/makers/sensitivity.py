"""Ranks an ONNX graph's layers by their cost in a lower type: once for all `keep=N` conversions."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Maker, make_derived
from dyno.worker.facts.files import MakerFacts, RankedLayer
from dyno.worker.inputs.calibration import calibration_of, make_example
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.onnx_graph.fold import lift_constants
from dyno.worker.onnx_graph.graph_facts import add_weight, copy_message, set_nodes
from dyno.worker.onnx_graph.half_precision import list_sensitive
from dyno.worker.onnx_graph.int8 import CalibratedGraph, Scheme, observe_ranges
from dyno.worker.onnx_graph.placement import LINEAR_OPERATORS, channel_axis, list_sites, name_nodes
from dyno.worker.spec import Artifact, DataSpec, Option, Recipe, UserError

# Cost of each layer of an ONNX graph in the lower type: the order of layers to keep higher
#
# Each layer is rounded alone, with the rest in FP32, and the signal-to-quantisation-noise ratio of the network's
# outputs is measured on calibration images (as in Bhandare et al. 2019 and ONNX Runtime's own debugging tool, but at
# the outputs).

RANKING_IMAGES = 16  # calibration images for the ranking
MAX_RATIO_DB = 120.0  # ratio of an exact output; negative for NaN or infinity
# Operators that only pass values on, without rounding
PASSING_OPERATORS = set(
    "Relu Clip LeakyRelu MaxPool Reshape Flatten Transpose Squeeze Unsqueeze Identity Pad Slice Split Gather Expand "
    "Shape Cast Concat Resize DepthToSpace SpaceToDepth".split()
)

Feeds = Sequence[Mapping[str, np.ndarray]]
Changed = Callable[[Any], None]


def rank(
    model: Any, changes: Mapping[str, Changed], feeds: Feeds, threads: int, report: Callable[[int, int], None]
) -> list[RankedLayer]:
    """Return the layers, most sensitive first; ties in the graph's order.

    `changes` maps a node's name to a function that rounds only that layer in a copy of the graph. `report` gets the
    numbers of finished and of all layers.
    """
    exact = _compute_outputs(model, feeds, threads)
    kinds = {node.name: node.op_type for node in model.graph.node}
    layers = []
    for count, (name, change) in enumerate(changes.items()):
        report(count, len(changes))
        copy = copy_message(model)
        change(copy.graph)
        ratio = compute_sqnr(exact, _compute_outputs(copy, feeds, threads))
        layers.append(RankedLayer(name, kinds[name], round(ratio, 2)))
    return sorted(layers, key=lambda layer: layer.sqnr_db)


def compute_sqnr(exact: Sequence[np.ndarray], rounded: Sequence[np.ndarray]) -> float:
    """Return the ratio of the outputs' power to their error's in dB, within ±MAX_RATIO_DB."""
    signal = sum(float(np.square(a, dtype=np.float64).sum()) for a in exact)
    noise = sum(float(np.square(b.astype(np.float64) - a).sum()) for a, b in zip(exact, rounded, strict=True))
    if not math.isfinite(noise):
        return -MAX_RATIO_DB
    if not noise or not signal:
        return MAX_RATIO_DB if not noise else -MAX_RATIO_DB
    return max(-MAX_RATIO_DB, min(MAX_RATIO_DB, 10 * math.log10(signal / noise)))


def _compute_outputs(model: Any, feeds: Feeds, threads: int) -> list[np.ndarray]:
    # Unoptimised: else rounding casts would be removed, and Q/DQ pairs fused beyond this layer.
    session = make_session(model.SerializeToString(), optimised=False, threads=threads)
    with np.errstate(all="ignore"):
        runs = [session.run(None, dict(feed)) for feed in feeds]
    return [np.concatenate([np.atleast_1d(run[k]) for run in runs]) for k in range(len(runs[0]))]


def int8_changes(calibrated_graph: CalibratedGraph) -> dict[str, Changed]:
    """Return, for each layer that the scheme quantises, a function that quantises only that layer."""
    sites: dict[str, list[int]] = {}
    for node, k in _int8_sites(calibrated_graph):
        sites.setdefault(node.name, []).append(k)
    return {name: _make_quantiser(name, inputs, calibrated_graph) for name, inputs in sites.items()}


def _int8_sites(calibrated_graph: CalibratedGraph) -> Iterator[tuple[Any, int]]:
    """Yield the quantised activations as node and input number."""
    if calibrated_graph.scheme.fused:
        yield from list_sites(calibrated_graph.model.graph, calibrated_graph.excluded, calibrated_graph.transformer)
        return
    for node in calibrated_graph.model.graph.node:
        if node.op_type in calibrated_graph.types - PASSING_OPERATORS and node.name not in calibrated_graph.excluded:
            yield from ((node, k) for k, name in enumerate(node.input) if name in calibrated_graph.ranges)


def _make_quantiser(name: str, inputs: list[int], calibrated_graph: CalibratedGraph) -> Changed:
    def quantise_layer(graph: Any) -> None:
        node = next(n for n in graph.node if n.name == name)
        if node.op_type in LINEAR_OPERATORS:  # first: from the first insertion on the graph has a copy of the node
            _round_weight(graph, node, 63 if calibrated_graph.narrow else 127)
        for k in inputs:
            _round_activation(graph, node, k, calibrated_graph.ranges[node.input[k]], calibrated_graph.scheme)

    return quantise_layer


def _round_activation(graph: Any, node: Any, k: int, span: tuple[float, float], scheme: Scheme) -> None:
    import onnx

    low, high = min(span[0], 0.0), max(span[1], 0.0)
    is_unsigned = scheme.activations == "U8" or (scheme.activations == "U8 or S8" and low >= 0)
    scale = ((high - low) / 255 if is_unsigned else max(-low, high) / 127) or 1.0
    zero_point = np.uint8(round(-low / scale)) if is_unsigned else np.int8(0)
    prefix = f"{node.name}_{k}"
    arrays = add_weight(graph, f"{prefix}_scale", np.float32(scale)), add_weight(graph, f"{prefix}_zero", zero_point)
    pair = [
        onnx.helper.make_node("QuantizeLinear", [node.input[k], *arrays], [f"{prefix}_q"]),
        onnx.helper.make_node("DequantizeLinear", [f"{prefix}_q", *arrays], [f"{prefix}_dq"]),
    ]
    node.input[k] = f"{prefix}_dq"
    _insert_nodes(graph, node, pair, [])


def _round_weight(graph: Any, node: Any, max_level: int) -> None:
    """Round a weight symmetrically, per output channel, in place of the initialiser.

    A weight that isn't constant is left unchanged.
    """
    tensor = next((t for t in graph.initializer if t.name == node.input[1]), None)
    if tensor is None:
        return
    values = _read_array(tensor)
    axis = channel_axis(node, values.ndim)
    other_axes = tuple(k for k in range(values.ndim) if k != axis) if axis is not None else None
    scale = np.abs(values).max(axis=other_axes, keepdims=True) / max_level
    scale = np.where(scale > 0, scale, 1)
    _replace_weight(graph, node, 1, (np.round(values / scale) * scale).astype(values.dtype))


def fp16_changes(model: Any, kept_operators: Sequence[str]) -> dict[str, Changed]:
    """Return, for each layer, a function that rounds its inputs, weights and outputs to FP16.

    Layers are nodes that compute in float32, except operators in `kept_operators`, which stay higher anyway.
    """
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    floats = {v.name for v in (*graph.value_info, *graph.input, *graph.output)
              if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}  # fmt: skip
    layers = [
        node.name
        for node in model.graph.node
        if node.op_type not in PASSING_OPERATORS | {*kept_operators, "Constant"}
        and floats & {*node.input}
        and {*node.output} <= floats
    ]
    return {name: _make_halver(name, floats) for name in layers}


def _make_halver(name: str, floats: set[str]) -> Changed:
    import onnx

    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT

    def make_casts(source: str, target: str, label: str) -> list[Any]:
        return [
            onnx.helper.make_node("Cast", [source], [f"{label}_half"], to=half),
            onnx.helper.make_node("Cast", [f"{label}_half"], [target], to=single),
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
    """Give the node its own copy of the weight, which other nodes may share."""
    node.input[k] = add_weight(graph, f"{node.name}_{k}_rounded", values)


def _insert_nodes(graph: Any, node: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    index = next(i for i, n in enumerate(graph.node) if n.name == node.name)
    set_nodes(graph, [*graph.node[:index], *before, node, *after, *graph.node[index + 1 :]])


def rank_recipe(parent: Recipe, precision: str, data: DataSpec | None, options: dict[str, Option]) -> Recipe:
    """Return the recipe of the parent's file with its layers ranked for the precision.

    The options are the conversion's.
    """
    return replace(parent, maker=OnnxSensitivity.name, precision=precision, options=options, data=data, parent=parent)


class OnnxSensitivity(Maker):
    """A maker of the same ONNX file with named nodes and, in `made_by`, layers ranked by sensitivity."""

    name = "onnx_sensitivity"
    requires = ("onnx", "onnxruntime", "onnxconverter-common", "onnxslim")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write the FP32 graph with the ranking's node names; `made_by.ranking` lists them.

        FOLDER/stage has the progress. Raise a `UserError` for missing or unsuitable calibration data.
        """
        started = time.perf_counter()
        assert parent is not None
        model, changes = _prepare_graph(recipe, parent, folder)
        feeds = _load_feeds(recipe, parent)

        def report_progress(done: int, total: int) -> None:
            (folder / "stage").write_text(f"rank layers for {recipe.precision}: {done} of {total}")

        ranking = rank(model, changes, feeds, recipe.runtime.threads, report_progress)
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        made_by = MakerFacts(
            backend=self.name,
            options=dict(recipe.options),
            ranking=tuple(ranking),
            ranked_on=sum(len(next(iter(feed.values()))) for feed in feeds),
        )
        return make_derived(parent, path, parent.precision, made_by, started)


ONNX_SENSITIVITY = OnnxSensitivity()


def _prepare_graph(recipe: Recipe, parent: Artifact, folder: Path) -> tuple[Any, dict[str, Changed]]:
    """Return the graph with named nodes, and for each layer a function that lowers only its precision."""
    import onnx

    model = lift_constants(onnx.load(parent.path))
    if recipe.precision == "fp16":
        name_nodes(model.graph)
        return model, fp16_changes(model, list_sensitive())
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        calibrated_graph = observe_ranges(model, recipe, calibration_of(recipe, parent), Path(scratch))
    return calibrated_graph.model, int8_changes(calibrated_graph)


def _load_feeds(recipe: Recipe, parent: Artifact) -> Sequence[dict[str, np.ndarray]]:
    """Return inputs for the ranking, spread over the calibration's data; one random batch without data."""
    if recipe.data is None:
        return [make_example(recipe, parent)]
    ranking_recipe = replace(recipe, options={**recipe.options, "samples": RANKING_IMAGES})
    data = calibration_of(ranking_recipe, parent)
    return list(data.feeds(0, len(data)))


def layers_to_keep(recipe: Recipe, parent: Artifact) -> tuple[RankedLayer, ...]:
    """Return the layers kept higher by the recipe's option `keep`: the most sensitive in the parent's ranking.

    Raise a `UserError` if there are fewer layers.
    """
    count = recipe.options.get("keep", 0)
    ranking = parent.made_by.ranking
    if count > len(ranking):  # type: ignore[operator]
        raise UserError(f"keep={count}: {recipe.model.name} has {len(ranking)} layers that {recipe.precision} touches")
    return ranking[: int(count)]
