"""BF16 ONNX graphs: the mixed-precision conversion of `fp16`, and their emulation on a CPU to check them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.facts.files import MakerFacts
from dyno.worker.onnx_graph.fp16 import SENSITIVE, mixed, refuse_unconvertible
from dyno.worker.onnx_graph.graph_facts import graphs_in, tensors_in
from dyno.worker.onnx_graph.head import decoding
from dyno.worker.onnx_graph.opset import in_opset, opset
from dyno.worker.spec import Artifact, Recipe

# ONNX lets convolutions, pools and most other operators compute in bfloat16 from this opset on.
OPSET = 22
EMULATION = "in float32 with every bfloat16 result rounded, as ONNX Runtime's CPU has few bfloat16 kernels"


def to_bf16(model: Any, recipe: Recipe, parent: Artifact, path: Path) -> MakerFacts:
    """Write the mixed-precision graph in opset 22; operators that ONNX has no bfloat16 for stay in FP32.

    The converter knows FP16 alone: its graph is taken and every FP16 in it made BF16, weights from their own values.
    """
    import onnx

    refuse_unconvertible(model, parent, "bf16")
    model = in_opset(model, max(OPSET, opset(model)))
    unsupported = {node.op_type for node in model.graph.node if not _has_bf16(node, opset(model))}
    converted, _ = mixed(
        model, unsupported, sorted(decoding(model.graph, recipe.model))
    )  # its warnings on weights beyond FP16's range don't apply to BF16
    _as_bf16(converted.graph, {tensor.name: tensor for tensor in model.graph.initializer})
    onnx.checker.check_model(converted, full_check=True)
    onnx.save(converted, path)
    names = ", ".join(sorted(unsupported - set(SENSITIVE)))
    warnings = [f"kept in FP32, as ONNX has no bfloat16 for them: {names}"] if names else []
    return MakerFacts(scheme="mixed BF16; inputs, outputs and sensitive nodes in FP32", warnings=tuple(warnings))


def _has_bf16(node: Any, version: int) -> bool:
    """Return whether the operator has a bfloat16 form in that opset, as far as it computes in floating point."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return False
    floats = [c.allowed_type_strs for c in schema.type_constraints if "tensor(float)" in c.allowed_type_strs]
    return not floats or any("tensor(bfloat16)" in allowed for allowed in floats)


def _as_bf16(graph: Any, originals: dict[str, Any]) -> None:
    """Make every FP16 in the graph BF16."""
    import ml_dtypes  # onnx depends on it
    import onnx

    half = onnx.TensorProto.FLOAT16
    for tensor in _find_tensors(graph, half):
        exact = originals.get(tensor.name, tensor) if tensor.name else tensor
        values = onnx.numpy_helper.to_array(exact).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for cast in _find_casts(graph, half):
        cast.i = onnx.TensorProto.BFLOAT16


def emulated(model: Any) -> Any:
    """Return the graph in float32 with every bfloat16 result rounded to bfloat16: on any CPU the results of a GPU.

    Run it without graph optimisation, which would remove the rounding.
    """
    import onnx

    bf16, single = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    typed = onnx.shape_inference.infer_shapes(model).graph
    rounded = {v.name for v in (*typed.value_info, *typed.output) if v.type.tensor_type.elem_type == bf16}
    converted = type(model).FromString(model.SerializeToString())
    for tensor in _find_tensors(converted.graph, bf16):
        values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for cast in _find_casts(converted.graph, bf16):
        cast.i = single

    def iter_rounded_nodes(node: Any) -> Iterator[Any]:
        yield node
        for k, name in enumerate(node.output):
            if name in rounded:
                node.output[k] = f"{name}_exact"
                yield onnx.helper.make_node("Cast", [f"{name}_exact"], [f"{name}_bf16"], to=bf16)
                yield onnx.helper.make_node("Cast", [f"{name}_bf16"], [name], to=single)

    _rewrite_nodes(converted.graph, iter_rounded_nodes)
    return converted


def _rewrite_nodes(graph: Any, change: Callable[[Any], Iterator[Any]]) -> None:
    nodes = [new for node in graph.node for new in change(node)]
    del graph.node[:]
    graph.node.extend(nodes)


def _find_tensors(graph: Any, kind: int) -> list[Any]:
    return [tensor for tensor in tensors_in(graph) if tensor.data_type == kind]


def _find_casts(graph: Any, kind: int) -> list[Any]:
    """Return the attributes that set a node's result type to `kind`."""
    nodes = (node for inner in graphs_in(graph) for node in inner.node)
    return [a for node in nodes for a in node.attribute if a.name in ("to", "dtype") and a.i == kind]
