"""INT8 ONNX graphs: Q/DQ by onnxruntime.quantization's static post-training quantisation, calibrated on real images.

A model without image input is calibrated on its described inputs: see `calibration`. The scheme (Jacob et al., 2018)
depends on the target engine: see `QUANTISATION_SCHEMES`.
"""

from __future__ import annotations

import copy
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs.calibration import CalibrationImages, CalibrationInputs, calibration_of, make_reader
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.onnx_graph.fold import fold_graph, multiply_factors
from dyno.worker.onnx_graph.placement import (
    JOINTS_OPTION,
    LINEAR_OPERATORS,
    MOVE_OPERATORS,
    OBSERVED_OPERATORS,
    list_decoding_nodes,
    name_nodes,
    place_pairs,
)
from dyno.worker.onnx_graph.repair import convert_opset, order, read_opset
from dyno.worker.spec import Artifact, Recipe, check_known

# Without ONNX Runtime's entropy: with as many bins as quantised values, it keeps nearly the whole range.
CALIBRATION_METHODS = {"minmax": "MinMax", "percentile": "Percentile"}
DEFAULT_METHOD = "minmax"
DEFAULT_PERCENTILE = 99.99
# Batches per step: histograms need every intermediate tensor, which takes much memory
HISTOGRAM_BATCHES = 8

Ranges = dict[str, tuple[float, float]]
Calibration = CalibrationImages | CalibrationInputs
# Operators that lose accuracy in eight bits without a gain in speed, and indices, which must not be rounded
NOT_QUANTISED = set(
    "Softmax LayerNormalization InstanceNormalization BatchNormalization EmbedLayerNormalization CumSum TopK ArgMax "
    "Where".split()
)
# First opset with per-channel scales of Q/DQ nodes
PER_CHANNEL_OPSET = 13


@dataclass(frozen=True)
class Scheme:
    """The quantisation scheme that suits an engine best.

    `activations`: unsigned with any zero point (`U8`), signed and symmetric (`S8`), or unsigned with zero point 0 for
    values that are never negative and signed for others (`U8 or S8`). `fused`: Q/DQ nodes only where `placement` puts
    them.
    """

    activations: str
    quantise_bias: bool
    fused: bool = False

    @property
    def text(self) -> str:
        """The scheme in the field's short form, e.g. `U8S8, asymmetric activations, …`: activations, then weights."""
        kinds = " or ".join(f"{kind}S8" for kind in self.activations.split(" or "))
        zero = "asymmetric" if self.activations == "U8" else "zero-point 0"
        bias = "INT32" if self.quantise_bias else "float"
        return f"{kinds}, {zero} activations, symmetric per-channel weights, {bias} bias"


# Chosen by measurement. ONNX Runtime's x86 kernels need unsigned activations: S8 leaves half the convolutions unfused
# and gains nothing. OpenVINO's CPU plugin computes some networks wrongly if zero points aren't 0 (MobileNetV3-Small's
# outputs are 89 % off, 4 % in ONNX Runtime with the same file), and U8 after a ReLU is faster than S8. TensorRT takes
# only symmetric S8 and rejects an INT32 bias.
QUANTISATION_SCHEMES = {
    "onnxruntime": Scheme("U8", quantise_bias=True),
    "openvino": Scheme("U8 or S8", quantise_bias=False),
    "tensorrt": Scheme("S8", quantise_bias=False, fused=True),
}


def to_int8(
    model: Any, recipe: Recipe, parent: Artifact, folder: Path, higher: Sequence[str] = ()
) -> tuple[Any, MakerFacts]:
    """Return the quantised graph, with nodes in `higher` left in float.

    The facts have scheme, target, calibration, number of float nodes and warnings.
    """
    data = calibration_of(recipe, parent)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        graph = observe_ranges(model, recipe, data, Path(scratch))
        excluded = graph.excluded | {*higher}
        if graph.scheme.fused:
            place_pairs(graph.model, graph.ranges, excluded, graph.transformer, joints=JOINTS_OPTION in recipe.options)
            quantised = graph.model
        else:
            extra_options = _extra_options(graph.scheme, graph.ranges)
            if higher:
                # The tool also quantises a layer's outputs, and so the inputs of a kept layer.
                extra_options["OpTypesToExcludeOutputQuantization"] = sorted(graph.types)
            quantised = _quantise_graph(Path(scratch) / "prepared.onnx", graph, excluded, extra_options)
            _reading_floats(quantised, higher)
    return quantised, MakerFacts(
        scheme=graph.scheme.text + (", weights in 7 bits because this CPU has no VNNI" if graph.narrow else ""),
        target=str(recipe.options.get("target", "")),
        calibration=replace(data.facts, method=str(recipe.options.get("method", DEFAULT_METHOD))),
        kept_float=len(excluded),
        warnings=(*graph.warnings, *data.warnings),
    )


@dataclass(frozen=True)
class CalibratedGraph:
    """A calibrated graph with named nodes.

    `types` are the quantised operators, `excluded` the float nodes, `ranges` the tensors' ranges and `collected` the
    same as onnxruntime's object; `transformer`: whether it is one; `narrow`: weights of seven bits.
    """

    model: Any
    scheme: Scheme
    types: frozenset[str]
    excluded: set[str]
    transformer: bool
    ranges: Ranges
    collected: Any
    narrow: bool
    warnings: tuple[str, ...]


def observe_ranges(model: Any, recipe: Recipe, data: Calibration, scratch: Path) -> CalibratedGraph:
    """Prepare and calibrate the graph by the recipe's options `target` and `method`; works in `scratch`."""
    target = str(recipe.options.get("target", ""))
    check_known("int8 target", target, QUANTISATION_SCHEMES)
    scheme = QUANTISATION_SCHEMES[target]
    prepared, notes, scaled_nodes = _prepare_graph(model, data, scratch)
    excluded, transformer = _find_attention(prepared)
    excluded |= scaled_nodes | list_decoding_nodes(prepared.graph, recipe.model)
    if scheme.quantise_bias:
        excluded |= _find_grouped(prepared)
    if not scheme.fused:
        excluded |= _find_stacked(prepared)
    operators = (*OBSERVED_OPERATORS, *(MOVE_OPERATORS if JOINTS_OPTION in recipe.options else ()))
    types = operators if scheme.fused else LINEAR_OPERATORS if transformer else _every_type()
    ranges, collected = _calibrate_ranges(scratch, types, data, recipe)
    is_narrow = target != "tensorrt" and _can_saturate()
    return CalibratedGraph(
        prepared, scheme, frozenset(types), excluded, transformer, ranges, collected, is_narrow, tuple(notes)
    )


def _reading_floats(model: Any, higher: Sequence[str]) -> None:
    """Connect kept nodes directly to the float tensors: the tool puts one Q/DQ pair before all their readers."""
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        for k, name in enumerate(node.input) if node.name in higher else ():
            pair = makers.get(name)
            quantised = makers.get(pair.input[0]) if pair is not None and pair.op_type == "DequantizeLinear" else None
            if quantised is not None and quantised.op_type == "QuantizeLinear":
                node.input[k] = quantised.input[0]


def _quantise_graph(path: Path, graph: CalibratedGraph, excluded: Iterable[str], extra_options: dict[str, Any]) -> Any:
    """Quantise with onnxruntime, by the ranges calibrated before.

    `quantize_static` takes ranges only from version 1.27 on; the function it calls does in every version.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

    quantizer = QDQQuantizer(
        load_model_with_shape_infer(path),
        per_channel=True,
        reduce_range=graph.narrow,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=copy.deepcopy(graph.collected),  # changed by the quantiser
        nodes_to_quantize=[],
        nodes_to_exclude=sorted(excluded),
        op_types_to_quantize=sorted(graph.types),
        extra_options=extra_options,
    )
    quantizer.quantize_model()
    quantised = quantizer.model.model
    _restore_clips(graph.model, quantised)
    order(quantised)  # the tool's order ignores reads of branches and loops
    return quantised


def _restore_clips(prepared: Any, quantised: Any) -> None:
    """Restore each Clip and Relu that the tool dropped although 8-bit values reach beyond its bounds.

    They do if they are symmetric around 0 and the bounds aren't, and if 0 is outside the bounds.
    """
    from onnx import NodeProto
    from onnx.numpy_helper import to_array

    graph, bounds = quantised.graph, {tensor.name: tensor for tensor in prepared.graph.initializer}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    readers = {node.input[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    kept_names = {node.name for node in graph.node}
    for node in prepared.graph.node:
        # possible names of the node's output
        names = [f"{name}{suffix}" for name in node.output for suffix in ("", "_QuantizeLinear_Input")]
        output = next((name for name in names if name in readers and name in makers), "")
        if node.op_type not in ("Clip", "Relu") or node.name in kept_names or not output:
            continue
        scale, zero = (to_array(constants[name]).reshape(-1)[0] for name in readers[output].input[1:3])
        limits = [(int(end) - int(zero)) * float(scale) for end in (np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max)]
        low, high = _read_bounds(node, bounds)
        if limits[0] >= low - scale and limits[1] <= high + scale:
            continue
        clip = NodeProto()
        clip.CopyFrom(node)
        clip.input[0], clip.output[0] = f"{output}_unclipped", output
        makers[output].output[[*makers[output].output].index(output)] = clip.input[0]
        graph.node.append(clip)
        for name in {*node.input[1:]} & bounds.keys() - constants.keys():
            constants[name] = bounds[name]
            graph.initializer.append(bounds[name])


def _read_bounds(node: Any, constants: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of a Clip or Relu; for computed bounds, a range that contains no value."""
    from onnx.numpy_helper import to_array

    if node.op_type == "Relu":
        return 0.0, np.inf
    low, high = [*node.input[1:], "", ""][:2]
    return (
        float(to_array(constants[low])) if low in constants else np.inf if low else -np.inf,
        float(to_array(constants[high])) if high in constants else -np.inf if high else np.inf,
    )


def _prepare_graph(model: Any, data: Calibration, scratch: Path) -> tuple[Any, list[str], set[str]]:
    """Return the graph folded (see `fold`) with every node named, also written as prepared.onnx; warnings; and the
    nodes with factors that couldn't be folded."""
    import onnx

    (feeds,) = data.feeds(0, 1)
    prepared, notes = fold_graph(convert_opset(model, max(PER_CHANNEL_OPSET, read_opset(model))), feeds, scratch)
    name_nodes(prepared.graph)
    scaled = multiply_factors(prepared.graph)
    onnx.save(prepared, scratch / "prepared.onnx")
    return prepared, notes, scaled


def _every_type() -> set[str]:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return (set(QDQRegistry) | set(QLinearOpsRegistry)) - NOT_QUANTISED


def _find_attention(model: Any) -> tuple[set[str], bool]:
    """Return the names of products of two activations, which stay in float, and whether it is a transformer.

    ONNX Runtime would fuse the Softmax between such products into a quantised one: ViT-Tiny's outputs are then 57 %
    off. With attention or layer normalisation only layers with weights are quantised: residual sums and GELUs in eight
    bits add an error of 31 % there, and none in a convolutional network.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type in LINEAR_OPERATORS and n.input[1] not in weights]
    has_attention = any(node.op_type in ("MatMul", "Gemm") for node in products)
    return {n.name for n in products}, has_attention or any(n.op_type == "LayerNormalization" for n in model.graph.node)


def _find_grouped(model: Any) -> set[str]:
    """Return transposed convolutions in groups with a bias: the tool fails on them.

    It has a scale per channel of a single group, but the bias has all channels.
    """
    nodes = (node for node in model.graph.node if node.op_type == "ConvTranspose" and len(node.input) > 2)
    return {node.name for node in nodes if any(a.name == "group" and a.i > 1 for a in node.attribute)}


def _find_stacked(model: Any) -> set[str]:
    """Return MatMul nodes with stacked weights: the quantiser gives their rows scales, which no engine reads."""
    stacked_weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 2}
    return {node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in stacked_weights}


def _calibrate_ranges(scratch: Path, types: Iterable[str], data: Calibration, recipe: Recipe) -> tuple[Ranges, Any]:
    """Collect all tensors' ranges; return the lowest and highest value of each, and onnxruntime's own object."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    method = CALIBRATION_METHODS[str(recipe.options.get("method", DEFAULT_METHOD))]
    percentile = (
        {"percentile": float(recipe.options.get("percentile", DEFAULT_PERCENTILE))} if method == "Percentile" else {}
    )
    calibrator = create_calibrator(
        scratch / "prepared.onnx",
        sorted(types),
        str(scratch / "augmented.onnx"),
        calibrate_method=CalibrationMethod[method],
        extra_options=percentile,
    )
    # Its own session would pin a thread to each core of the machine.
    calibrator.infer_session = make_session(str(scratch / "augmented.onnx"), optimised=False)
    for start in range(0, len(data), HISTOGRAM_BATCHES):
        end = min(start + HISTOGRAM_BATCHES, len(data))
        calibrator.collect_data(make_reader(data.feeds(start, end)))
    collected = calibrator.compute_data()
    ranges = ((name, collected[name].range_value) for name in collected)
    return {name: (float(np.min(low)), float(np.max(high))) for name, (low, high) in ranges}, collected


def _extra_options(scheme: Scheme, ranges: Ranges) -> dict[str, Any]:
    from onnxruntime.quantization import QuantType

    options: dict[str, Any] = {
        "ActivationSymmetric": False,
        "WeightSymmetric": True,
        "QuantizeBias": scheme.quantise_bias,
    }
    if scheme.activations == "U8 or S8":
        override = {"quant_type": QuantType.QInt8, "symmetric": True}
        options["TensorQuantOverrides"] = {name: [override] for name, (low, _) in ranges.items() if low < 0}
    return options


def _can_saturate() -> bool:
    """Return whether this x86 CPU sums U8 x S8 products in 16 bits, which overflow: all CPUs before VNNI do."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not system.cpu_flags() & {"avx512_vnni", "avx_vnni", "amx_int8"}
