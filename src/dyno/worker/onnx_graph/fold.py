"""ONNX graphs with all constants computed: weights as initialisers, batch norms inside convolutions, shapes inferred.

Exporters (PaddlePaddle's, TensorFlow's, PyTorch's without folding) leave weights in Constant nodes, after Identity
nodes and before batch norms. A quantiser finds no weights there, and leaves such layers in float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.onnx_graph.graph_facts import add_weight, copy_message, drop_weight_inputs, graphs_in, set_nodes
from dyno.worker.onnx_graph.repair import ONNX_DOMAINS
from dyno.worker.sessions.torch_support import first_line

ONNX_TYPES = {
    "tensor(float)": "FLOAT",
    "tensor(float16)": "FLOAT16",
    "tensor(double)": "DOUBLE",
    "tensor(int64)": "INT64",
}
MAX_FOLD_ERROR = 1e-2  # share of the largest output: deep networks amplify rounding

Folder = Callable[[Any, Path], Any]


def fold_graph(model: Any, feeds: Mapping[str, np.ndarray], scratch: Path) -> tuple[Any, list[str]]:
    """Return the graph folded and its shapes inferred, and warnings; `scratch` is for temporary files.

    The first method that keeps the outputs for the feeds is used: onnxslim, then ONNX Runtime's basic optimisation. If
    both fail, only `lift_constants` applies, with a warning.
    """
    import onnx

    model, notes = lift_constants(model), []
    expected = _compute_outputs(model, feeds)
    for name, fold in {"slimmed": _fold_with_onnxslim, "optimised": _fold_with_onnx_runtime}.items():
        try:
            candidate = onnx.shape_inference.infer_shapes(fold(copy_message(model), scratch), data_prop=True)
            onnx.checker.check_model(candidate)
            if has_close_outputs(expected, _compute_outputs(candidate, feeds)):
                return _infer_types(candidate), []
            notes.append(f"{name}: other outputs")
        except MemoryError:
            raise
        except Exception as e:  # rewriters may raise anything on unexpected graphs
            system.raise_if_disk_full(e, scratch)
            notes.append(f"{name}: {first_line(e)[:120]}")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return _infer_types(inferred), [f"constants and batch norms could not be folded ({'; '.join(notes)})"]


def lift_constants(model: Any) -> Any:
    """Return the graph with Constant nodes as initialisers, and no initialiser among its inputs or outputs."""
    import onnx

    copy = copy_message(model)
    graph, remaining = copy.graph, []
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        is_constant = node.op_type == "Constant" and node.domain in ONNX_DOMAINS and node.output[0] not in outputs
        tensor = _read_constant(node) if is_constant else None
        if tensor is None:
            remaining.append(node)
        else:
            graph.initializer.add().CopyFrom(tensor)
    for tensor in (tensor for tensor in graph.initializer if tensor.name in outputs):  # as a detector's anchors
        name, tensor.name = tensor.name, f"{tensor.name}_stored"
        for node in (node for inner in graphs_in(graph) for node in inner.node):
            node.input[:] = [tensor.name if input_name == name else input_name for input_name in node.input]
        remaining.append(onnx.helper.make_node("Identity", [tensor.name], [name]))
    set_nodes(graph, remaining)
    drop_weight_inputs(graph)
    # Before IR version 4, every initialiser had to be an input.
    copy.ir_version = max(copy.ir_version, onnx.IR_VERSION_2019_1_22 + 1)
    return copy


def multiply_factors(graph: Any) -> set[str]:
    """Fold alpha and beta of each Gemm into its weights and bias, in place.

    ONNX Runtime's quantiser drops beta. Return the names of the Gemms whose bias is no constant.
    """
    import onnx

    weights, remaining = {tensor.name: tensor for tensor in graph.initializer}, set[str]()
    for node in (node for node in graph.node if node.op_type == "Gemm" and node.domain in ONNX_DOMAINS):
        for index, factor in (1, "alpha"), (2, "beta"):
            attributes = [attribute for attribute in node.attribute if attribute.name == factor and attribute.f != 1]
            if not attributes or len(node.input) <= index:
                continue
            if node.input[index] in weights:
                values = onnx.numpy_helper.to_array(weights[node.input[index]])
                name = f"{node.input[index]}_{node.output[0]}_{factor}"
                node.input[index] = add_weight(graph, name, (values * attributes[0].f).astype(values.dtype))
                node.attribute.remove(attributes[0])
            elif factor == "beta":
                remaining.add(node.name)
    return remaining


def _infer_types(model: Any) -> Any:
    """Return the graph with a type for every tensor; ONNX Runtime infers those after non-ONNX operators."""
    import onnx

    typed_names = {value.name for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    untyped_names = [name for node in model.graph.node for name in node.output if name and name not in typed_names]
    if not untyped_names:
        return model
    probe = copy_message(model)
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in untyped_names)
    for output in make_session(probe.SerializeToString(), optimised=False).get_outputs():
        if output.name in untyped_names and output.type in ONNX_TYPES:
            kind = getattr(onnx.TensorProto, ONNX_TYPES[output.type])
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(output.name, kind, output.shape))
    return model


def _read_constant(node: Any) -> Any:
    """Return the value of a Constant node as a tensor named like its output; None for text and sparse values."""
    import onnx

    (value,) = node.attribute
    if value.name == "value":
        tensor = copy_message(value.t)
        tensor.name = node.output[0]
        return tensor
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if value.name not in dtypes:
        return None
    return onnx.numpy_helper.from_array(
        np.asarray(onnx.helper.get_attribute_value(value), dtypes[value.name]), node.output[0]
    )


def _fold_with_onnxslim(model: Any, scratch: Path) -> Any:
    import onnx
    import onnxslim

    slim = onnx.shape_inference.infer_shapes(onnxslim.slim(model), data_prop=True)
    return _norms_in_products(slim)


def _norms_in_products(model: Any) -> Any:
    """Fold batch norms of a matrix product's columns into the product's weights, in place; return the graph.

    LeViT's linear layers have one each, after a Reshape to [rows, columns]; onnxslim folds only those of convolutions.
    """
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    readers = Counter(name for node in graph.node for name in node.input) + Counter(out.name for out in graph.output)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}

    def find_producer(name: str) -> Any:
        """Return the node that writes a tensor with a single reader; else None."""
        return makers.get(name) if readers[name] == 1 else None

    for node in [node for node in graph.node if node.op_type == "BatchNormalization"]:
        product = find_producer(node.input[0])
        if product is not None and product.op_type == "Reshape":
            product = find_producer(product.input[0])
        weight = weights.get(product.input[1]) if product is not None and product.op_type == "MatMul" else None
        norm = [weights[name] for name in node.input[1:5] if name in weights]
        if weight is None or len(norm) < 4 or readers[weight.name] > 1:
            continue
        # With two axes the norm's is the second: the product's columns, if equally long.
        if ranks.get(node.input[0]) == len(weight.dims) == 2 and weight.dims[1] == norm[0].dims[0]:
            _into_product(graph, node, weight, norm)
    return model


def _into_product(graph: Any, node: Any, weight: Any, norm: Sequence[Any]) -> None:
    """Multiply the weight by the norm's scale, and replace the norm by an addition of the rest."""
    import onnx

    epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), 1e-5)
    scale, bias, mean, variance = (onnx.numpy_helper.to_array(tensor).astype(np.float64) for tensor in norm)
    factor = scale / np.sqrt(variance + epsilon)
    values = onnx.numpy_helper.to_array(weight)
    new_weight = onnx.numpy_helper.from_array((values * factor).astype(values.dtype), weight.name)
    weight.CopyFrom(new_weight)
    offset = add_weight(graph, f"{node.output[0]}_bias", (bias - mean * factor).astype(values.dtype))
    addition = onnx.helper.make_node("Add", [node.input[0], offset], [node.output[0]], name=node.name)
    addition.metadata_props.extend(node.metadata_props)
    node.CopyFrom(addition)


def _fold_with_onnx_runtime(model: Any, scratch: Path) -> Any:
    """Fold with ONNX Runtime at the level that keeps to ONNX's own operators."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(scratch / "folded.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(options.optimized_model_filepath)
    domains = {node.domain for node in optimised.graph.node}
    entries = [entry for entry in optimised.opset_import if entry.domain and entry.domain not in domains]
    for entry in entries:
        optimised.opset_import.remove(entry)
    return optimised


def _compute_outputs(model: Any, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    session = make_session(model.SerializeToString(), optimised=False)
    return [np.asarray(output) for output in session.run(None, dict(feeds))]


def has_close_outputs(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
    """Return whether outputs differ only by rounding; non-floats must be equal."""
    return len(before) == len(after) and all(_is_close(b, a) for b, a in zip(before, after, strict=True))


def _is_close(before: np.ndarray, after: np.ndarray) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.dtype.kind != "f":
        return bool((before == after).all())
    finite = before[np.isfinite(before)]
    return np.allclose(after, before, 1e-3, MAX_FOLD_ERROR * float(np.abs(finite).max(initial=0.0)), equal_nan=True)
