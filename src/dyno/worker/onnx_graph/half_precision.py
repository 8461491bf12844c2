"""FP16 ONNX graphs: onnxconverter-common's mixed-precision conversion, with values beyond FP16's range kept in FP32."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs.calibration import make_example, make_reader
from dyno.worker.onnx_graph.graph_facts import copy_message, read_graph_facts, reads_of, set_nodes
from dyno.worker.onnx_graph.placement import list_decoding_nodes, name_nodes
from dyno.worker.onnx_graph.repair import ONNX_DOMAINS, convert_opset, order, read_opset, retype
from dyno.worker.spec import Artifact, Recipe, UserError

# Operators that lose most in half precision: their values span too many magnitudes
SENSITIVE_OPERATORS = (
    "Softmax LogSoftmax LayerNormalization InstanceNormalization GroupNormalization Exp Log Pow "
    "ReduceSum ReduceSumSquare ReduceL2 ReduceLogSumExp"
).split()


def to_fp16(
    model: Any, recipe: Recipe, parent: Artifact, folder: Path, higher: Sequence[str] = ()
) -> tuple[Any, MakerFacts]:
    """Return the mixed-precision graph, with nodes in `higher` left in FP32, and its scheme and warnings.

    The warnings include nodes kept for their large values.
    """
    refuse_unconvertible(model, parent, "fp16")
    name_nodes(model.graph)  # those that stay in FP32 are known by their names
    head = list_decoding_nodes(model.graph, recipe.model)
    large_nodes = _too_large(model, make_example(recipe, parent), folder)
    nodes = [node for node in model.graph.node if node.domain in ONNX_DOMAINS]
    unsupported = {node.op_type for node in nodes if not _has_type(node, read_opset(model), "tensor(float16)")}
    converted, warnings = convert_mixed(model, unsupported, sorted({*large_nodes, *head, *higher}))
    if large_nodes:
        warnings.insert(0, f"kept in FP32, as their values exceed FP16's range: {', '.join(large_nodes[:10])}")
    scope = "sensitive nodes and the detector's decoding" if head else "sensitive nodes"
    return converted, MakerFacts(scheme=f"mixed FP16; inputs, outputs and {scope} in FP32", warnings=tuple(warnings))


def refuse_unconvertible(model: Any, parent: Artifact, precision: str) -> None:
    """Raise a `UserError` for a graph in half precision, or with products out of the conversion's reach."""
    facts = read_graph_facts(model)
    if (kind := facts.precision) in ("fp16", "bf16"):
        raise UserError(f"{parent.path} is in {kind} already; run it as {kind}, which leaves the file as it is")
    if facts.enclosed:
        operators, total = " and ".join(facts.enclosing), sum(facts.layers.values())
        raise UserError(
            f"{parent.path} can't be converted to {precision}: {facts.enclosed} of its {total} layers with weights are "
            f"inside {operators} operators, whose graphs are not converted; export it without control flow, or in "
            f"{precision} already"
        )


def convert_mixed(model: Any, float_operators: set[str], float_nodes: list[str]) -> tuple[Any, list[str]]:
    """Return the graph in FP16, except sensitive and blocked operators and the nodes in `float_nodes`; and warnings."""
    import onnx
    from onnxconverter_common import float16

    _own_outputs(model.graph)
    _describe_once(model.graph)
    name_nodes(model.graph)
    blocked_types = sorted({*list_sensitive(), *float_operators})
    _own_weights(
        model.graph, [node for node in model.graph.node if node.op_type in blocked_types or node.name in float_nodes]
    )
    # The converter ignores the graph's own casts to float: their readers would get two types.
    casts = [n.name for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i == onnx.TensorProto.FLOAT]
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        # The library's default limits, 1e-7 and 1e4, would change weights within FP16's range.
        converted = float16.convert_float_to_float16(
            copy_message(model),
            min_positive_val=float(np.finfo(np.float16).smallest_subnormal),
            max_finite_val=float(np.finfo(np.float16).max),
            keep_io_types=True,
            op_block_list=blocked_types,
            node_block_list=[*float_nodes, *casts],
        )
    order(converted)  # the converter's order ignores reads of inner graphs
    _skip_round_trips(converted.graph)
    _keep_outputs(converted.graph, model.graph)
    return converted, _summarise_warnings([str(w.message) for w in records if issubclass(w.category, UserWarning)])


def list_sensitive() -> list[str]:
    """Return the operators that stay in FP32 in every network: the library's and Dyno's."""
    from onnxconverter_common import float16

    return sorted({*float16.DEFAULT_OP_BLOCK_LIST, *SENSITIVE_OPERATORS})


def _summarise_warnings(messages: list[str]) -> list[str]:
    """Return a summary of the library's warnings, one per tensor with a weight outside FP16's range.

    Too small weights become FP16's smallest number, which is ordinary rounding; too large ones are clipped.
    """
    matches = {message: re.search(r"number (\S+) will be truncated", message) for message in messages}
    largest = max((abs(float(match[1])) for match in matches.values() if match), default=0.0)
    rest = sorted(message for message, match in matches.items() if not match)
    if largest < 1:
        return rest
    limit = np.finfo(np.float16).max
    return [f"weights up to {largest:.3g} exceed FP16's range and were cut to {limit:.0f}", *rest]


def _own_outputs(graph: Any) -> None:
    """Give graph outputs that nodes also read their own tensor, after an Identity node.

    The converter casts outputs back to FP32 under their own names, so their readers would get that type.
    """
    import onnx

    read_names = {name for node in graph.node for name in node.input}
    written_names = {name for node in graph.node for name in node.output}
    inner_names = {out.name: f"{out.name}_inside" for out in graph.output if out.name in read_names & written_names}
    for node in graph.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                names[k] = inner_names.get(name, name)
    graph.node.extend(onnx.helper.make_node("Identity", [inner_name], [out]) for out, inner_name in inner_names.items())


def _describe_once(graph: Any) -> None:
    """Remove duplicate descriptions of inputs, outputs and weights, which PyTorch's newer exporter writes.

    The converter would change one declaration and trust the other, and so round the weights of nodes that stay in FP32.
    """
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    for value in [value for value in graph.value_info if value.name in names]:
        graph.value_info.remove(value)


def _own_weights(graph: Any, nodes: list[Any]) -> None:
    """Give nodes that stay in FP32 their own copies of shared weights.

    The converter gives a shared weight one type for all readers, which makes the graph invalid.
    """
    readers = Counter(name for node in graph.node for name in set(node.input))
    shared_weights = {t.name: t for t in graph.initializer if readers[t.name] > 1}
    for node in nodes:
        for k, name in enumerate(node.input):
            if name in shared_weights:
                node.input[k] = f"{name}_of_{node.name}"
                copy = graph.initializer.add()
                copy.CopyFrom(shared_weights[name])
                copy.name = node.input[k]


def _skip_round_trips(graph: Any) -> None:
    """Connect FP32 nodes directly to FP32 outputs, without rounding to FP16 in between.

    The converter leaves such pairs of casts after a tensor with several readers: large values overflow there.
    """
    import onnx

    def find_casts(kind: int) -> dict[str, str]:
        return {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Cast" and n.attribute[0].i == kind}

    down, up = find_casts(onnx.TensorProto.FLOAT16), find_casts(onnx.TensorProto.FLOAT)
    for node in graph.node:
        for k, name in enumerate(node.input):
            if up.get(name) in down:
                node.input[k] = down[up[name]]
    # Remove casts without readers: the second of a pair, then the first.
    for casts in (up, down):
        read_names = {name for node in graph.node for name in reads_of(node)} | {out.name for out in graph.output}
        for node in [n for n in graph.node if n.output[0] in casts and n.output[0] not in read_names]:
            graph.node.remove(node)
    del graph.value_info[:]  # outdated


def _keep_outputs(graph: Any, original: Any) -> None:
    """Restore the outputs' types: the converter loses them if an operator kept in FP32 comes last."""
    kinds = {out.name: out.type.tensor_type.elem_type for out in original.output}
    makers = {name: node for node in graph.node for name in node.output}
    for out in graph.output:
        if out.type.tensor_type.elem_type != kinds[out.name] and makers[out.name].op_type == "Cast":
            makers[out.name].attribute[0].i = out.type.tensor_type.elem_type = kinds[out.name]


def _too_large(model: Any, feeds: dict[str, np.ndarray], scratch: Path) -> list[str]:
    """Return the names of nodes with inputs, outputs or weights beyond FP16's range on this input.

    They are found by the FP32 model: a CPU without FP16 kernels runs the converted model in FP32, without overflow.
    """
    import onnx
    from onnxruntime.quantization.calibrate import create_calibrator

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        onnx.save(model, f"{folder}/source.onnx")
        calibrator = create_calibrator(Path(folder) / "source.onnx", None, f"{folder}/augmented.onnx")
        calibrator.collect_data(make_reader(iter([feeds])))
        ranges = calibrator.compute_data().data
    limit = float(np.finfo(np.float16).max)
    large_names = {name for name, tensor_range in ranges.items() if np.abs([*tensor_range.range_value]).max() > limit}
    large_names |= {tensor.name for tensor in model.graph.initializer if _exceeds(tensor, limit)}
    return [node.name for node in model.graph.node if large_names & {*node.input, *node.output}]


def _exceeds(tensor: Any, limit: float) -> bool:
    """Return whether a float32 weight has a finite value beyond `limit`."""
    import onnx

    if tensor.data_type != onnx.TensorProto.FLOAT:
        return False
    values = np.abs(onnx.numpy_helper.to_array(tensor))
    return bool((np.isfinite(values) & (values > limit)).any())


# BF16 ONNX graphs: the mixed-precision conversion of FP16, and their emulation on a CPU to check them

# First opset with bfloat16 for convolutions, pools and most other operators
BFLOAT16_OPSET = 22
EMULATION_NOTE = "in float32 with every bfloat16 result rounded, as ONNX Runtime's CPU has few bfloat16 kernels"


def to_bf16(model: Any, recipe: Recipe, parent: Artifact, folder: Path) -> tuple[Any, MakerFacts]:
    """Return the mixed-precision graph in opset 22; operators without a bfloat16 form stay in FP32.

    The converter supports only FP16: every FP16 type in its graph becomes BF16, and weights are rounded from the
    originals.
    """
    import onnx

    refuse_unconvertible(model, parent, "bf16")
    model = convert_opset(model, max(BFLOAT16_OPSET, read_opset(model)))
    opset = read_opset(model)
    unsupported = {node.op_type for node in model.graph.node if not _has_type(node, opset, "tensor(bfloat16)")}
    converted, _ = convert_mixed(
        model, unsupported, sorted(list_decoding_nodes(model.graph, recipe.model))
    )  # warnings on FP16's range don't apply to BF16
    kinds, weights = onnx.TensorProto, {tensor.name: tensor for tensor in model.graph.initializer}
    retype(converted, (kinds.FLOAT16,), kinds.BFLOAT16, weights)
    names = ", ".join(sorted(unsupported - set(SENSITIVE_OPERATORS)))
    warnings = [f"kept in FP32, as ONNX has no bfloat16 for them: {names}"] if names else []
    scheme = "mixed BF16; inputs, outputs and sensitive nodes in FP32"
    return converted, MakerFacts(scheme=scheme, warnings=tuple(warnings))


def _has_type(node: Any, opset: int, kind: str) -> bool:
    """Return whether the operator has a form of that type in that opset, if it computes in floating point at all."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return False
    if any(value.type_str == "tensor(float)" for value in (*schema.inputs, *schema.outputs)):
        return False
    type_lists = [c.allowed_type_strs for c in schema.type_constraints if "tensor(float)" in c.allowed_type_strs]
    return not type_lists or any(kind in types for types in type_lists)


def emulate_bfloat16(model: Any) -> Any:
    """Return the graph in float32 with every bfloat16 result rounded: a GPU's results on any CPU.

    Run it without graph optimisation, which would remove the rounding.
    """
    import onnx

    bf16, fp32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    graph = onnx.shape_inference.infer_shapes(model).graph
    bf16_names = {v.name for v in (*graph.value_info, *graph.output) if v.type.tensor_type.elem_type == bf16}
    converted = copy_message(model)
    retype(converted, (bf16,), fp32)

    def iter_rounded_nodes(node: Any) -> Iterator[Any]:
        yield node
        for k, name in enumerate(node.output):
            if name in bf16_names:
                node.output[k] = f"{name}_exact"
                yield onnx.helper.make_node("Cast", [f"{name}_exact"], [f"{name}_bf16"], to=bf16)
                yield onnx.helper.make_node("Cast", [f"{name}_bf16"], [name], to=fp32)

    set_nodes(converted.graph, [new_node for node in converted.graph.node for new_node in iter_rounded_nodes(node)])
    return converted
