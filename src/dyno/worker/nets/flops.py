"""Floating-point operations of one image: counted while a module runs, or computed from an ONNX graph.

Only convolutions and matrix products count, with two operations per multiply-add: the rest is a small part of a
network's arithmetic, and the peak is measured on matrix products too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from dyno.worker.facts.engine import COMPUTE_LAYER
from dyno.worker.onnx_graph.graph_facts import graphs_in, graphs_of

MAX_INFERRED_SIZE = 2**31 - 1  # for inferred dimensions
RECURRENT_OPERATORS = ("LSTM", "GRU", "RNN")
PRODUCT_OPERATORS = ("Conv", "ConvTranspose", "DeformConv", "Gemm", "MatMul", "QLinearConv", "ConvInteger",
                     "QLinearMatMul", "MatMulInteger", "MatMulNBits", "Einsum", "Attention",
                     *RECURRENT_OPERATORS)  # fmt: skip
# Input number of the second factor, if not 1: quantised nodes have scales between
WEIGHT_INPUTS = {"QLinearConv": 3, "QLinearMatMul": 3}


def of_module(module: Any, *args: Any, **keywords: Any) -> int:
    """Run one call of the module with these arguments; return its operations by `torch.utils.flop_counter`."""
    with count_operations() as counter:
        module(*args, **keywords)
        return int(counter.get_total_flops())


@contextmanager
def count_operations() -> Iterator[Any]:
    """Count the block's operations without gradients; yield the `FlopCounterMode`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter lacks fused attention; unfused, it consists of products.
    is_fused = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as undo:
        undo.callback(torch.backends.mha.set_fastpath_enabled, is_fused)
        torch.backends.mha.set_fastpath_enabled(False)
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        undo.enter_context(torch.no_grad())  # in inference mode, operators without effect would seem to copy
        # It also lacks LSTMs on the CPU, `Bilinear`, and torchvision's deformable convolutions.
        formulas = {torch.ops.aten.mkldnn_rnn_layer: _of_recurrent_layer, torch.ops.aten._trilinear: _of_bilinear}
        if hasattr(torch.ops.torchvision, "deform_conv2d"):
            formulas[torch.ops.torchvision.deform_conv2d] = _of_deformable
        yield undo.enter_context(FlopCounterMode(display=False, custom_mapping=formulas))


def _of_recurrent_layer(values: Sequence[int], first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of one layer in one direction, from the shapes of its input and both matrices."""
    return 2 * math.prod(values[:2]) * (math.prod(first) + math.prod(second))


def _of_bilinear(first: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of the first input times the weight [results, first, second] times the second input."""
    return 2 * first[0] * weight[0] * weight[2] * (first[1] + 1)


def _of_deformable(_: Sequence[int], weight: Sequence[int], *__: Any, out_shape: Sequence[int], **___: Any) -> int:
    """Return the operations as of any convolution; sampling of the input doesn't count."""
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


def of_onnx(path: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the operations of one run of the file with these input shapes; 0 if uncountable.

    They are uncountable if a shape can't be inferred, or if other layers, branches or loops multiply.
    """
    import onnx

    inference = with_shapes(onnx.load(path, load_external_data=False), shapes)
    if inference is None:
        return 0
    graph, tensor_shapes = inference
    counts = [of_node(node, tensor_shapes) for node in graph.node if node.op_type in PRODUCT_OPERATORS]
    if any(COMPUTE_LAYER.search(node.op_type) for node in graph.node if node.op_type not in PRODUCT_OPERATORS):
        return 0  # a fused or quantised layer of unknown operations
    if any(has_products_inside(node) for node in graph.node):
        return 0  # the number of executions is unknown
    return 0 if None in counts else sum(count for count in counts if count)


def has_products_inside(node: Any) -> bool:
    """Return whether a node's branches or loop multiply: their number of executions is known only at run time."""
    nodes = (inner for outer in graphs_of(node) for graph in graphs_in(outer) for inner in graph.node)
    return any(COMPUTE_LAYER.search(inner.op_type) for inner in nodes)


def with_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, dict[str, tuple[int, ...]]] | None:
    """Return the model's graph with shapes inferred from these input shapes, and each tensor's shape by name.

    Unknown dimensions are 0. Return None if the shapes contradict each other. The model itself is changed.
    """
    import onnx

    for value in model.graph.input:
        for axis, length in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            axis.dim_value = length
    del model.graph.value_info[:]  # stored shapes of other batches would override inference
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        tensor_shapes = _list_shapes(graph)
        if any(0 in tensor_shapes.get(name, (0,)) for node in graph.node for name in node.output if name):
            value_infos = [v for v in _worked_out(model) if 0 in tensor_shapes.get(v.name, (0,))]
            model.graph.value_info.extend(value_infos)  # ONNX's inference continues from these
            graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph if value_infos else graph
            tensor_shapes = {**_list_shapes(graph), **{v.name: _read_shape(v) for v in value_infos}}
    except (onnx.shape_inference.InferenceError, ValueError):
        return None
    return graph, tensor_shapes


def _list_shapes(graph: Any) -> dict[str, tuple[int, ...]]:
    values = (*graph.input, *graph.value_info, *graph.output)
    shapes = {v.name: _read_shape(v) for v in values if v.type.tensor_type.HasField("shape")}
    return shapes | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def _worked_out(model: Any) -> list[Any]:
    """Return the tensors with a complete shape by ONNX Runtime's own inference; [] without that inference.

    It follows arithmetic on shapes, such as half of the channels, where ONNX's inference stops, and ends at the first
    operator unknown to it, such as ReduceL2. These are the steps of its `infer_shapes`, which writes incomplete shapes
    into the working folder.
    """
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, get_attribute

        def infer_shape(node: Any) -> None:  # the library's own ignores `start` and `end`
            bounds = slice(get_attribute(node, "start", 0), get_attribute(node, "end", None))
            inference.sympy_data_[node.output[0]] = inference._get_sympy_shape(node, 0)[bounds]

        inference = SymbolicShapeInference(MAX_INFERRED_SIZE, auto_merge=False, guess_output_rank=False, verbose=0)
        inference.dispatcher_["Shape"] = infer_shape
        inference._preprocess(model)
    except Exception:  # an unexpected version of the library
        return []
    with suppress(Exception):  # unknown operators and shapes, of any kind
        while inference.run_:
            inference._infer_impl()
    graph = inference.out_mp_.graph
    return [
        v
        for v in (*graph.value_info, *graph.output)
        if v.type.tensor_type.HasField("shape") and 0 not in _read_shape(v)
    ]


def _read_shape(value: Any) -> tuple[int, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else 0 for d in value.type.tensor_type.shape.dim)


def of_node(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the operations of a product; None if its shapes are unknown."""
    first = shapes.get(node.input[0], ())
    if node.op_type == "MatMulNBits":  # packed weights
        sizes = {a.name: a.i for a in node.attribute}
        return 2 * math.prod(first) * sizes.get("N", 0) if first and 0 not in first else None
    index = WEIGHT_INPUTS.get(node.op_type, 1)
    if len(node.input) <= index:  # an einsum of one input only moves or adds values
        return 0
    second = shapes.get(node.input[index], ())
    result = shapes.get(node.output[0], ())
    if node.op_type in RECURRENT_OPERATORS:  # per step both matrices: [directions, gates x hidden, …]
        weights = math.prod(second) + math.prod(shapes.get(node.input[2], ()))
        return 2 * math.prod(first[:2]) * weights if first and second and 0 not in (*first[:2], *second) else None
    if not first or not second or not result or 0 in (*second, *result):
        return None
    flags = {a.name: a.i for a in node.attribute}
    if node.op_type == "Gemm":
        sum_length = first[0 if flags.get("transA") else 1] or second[1 if flags.get("transB") else 0]
        return 2 * math.prod(result) * sum_length
    if "MatMul" in node.op_type:
        return 2 * math.prod(result) * (first[-2 if flags.get("transA") else -1] or second[-2:][0])
    if 0 in first:
        return None
    if node.op_type == "ConvTranspose":  # each input value times its kernel: [C, M / group, kernel…]
        return of_convolution(math.prod(second), second[0], first)
    if node.op_type == "Einsum":
        return _of_einsum(node, first, second)
    if node.op_type == "Attention":
        return _of_attention(node, first, second, result)
    return of_convolution(math.prod(second), second[0], result)  # kernel [M, C / group, kernel…]


def of_convolution(weights: int, channels: int, values: Sequence[int]) -> int | None:
    """Return the operations of a layer in which each value is multiplied by all weights of its channel.

    Values and channels are a convolution's results, or a transposed convolution's inputs. Return None for unknown
    shapes.
    """
    is_known = weights > 0 and channels > 0 and values and min(values) > 0
    return 2 * math.prod(values) * weights // channels if is_known else None


def of_product(first: Sequence[int], second: Sequence[int], result: Sequence[int]) -> int | None:
    """Return the operations of a matrix product, whichever axes of its factors are transposed or moved.

    The second factor may be () for weights without a shape, which have no batch axis. Return None if the length of the
    sum is unknown.
    """
    if min(len(first), len(result)) < 2 or min(*first, *second, *result) <= 0:
        return None
    rows, columns = result[-2:]
    # Valid for a factor with all batch axes; for others it is too small and not a length of both.
    lengths = [math.prod(first) * columns // math.prod(result), math.prod(second) * rows // math.prod(result)]
    length = lengths[0] if not second else max(lengths)
    has_length = length in first and (not second or length in second)
    return 2 * math.prod(result) * length if has_length else None


def _of_einsum(node: Any, first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    """Return the operations of an einsum: of a product if it sums over a letter of both factors, else 0.

    Return None if the equation isn't plain.
    """
    equation = next((a.s.decode() for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    factors, arrow, result = equation.partition("->")
    a, _, b = factors.partition(",")
    if not arrow or "." in equation or len(node.input) != 2 or len(a) != len(first) or len(b) != len(second):
        return None
    lengths = {**dict(zip(a, first, strict=True)), **dict(zip(b, second, strict=True))}
    return 2 * math.prod(lengths.values()) if (set(a) & set(b)) - set(result) else 0


def _of_attention(node: Any, first: tuple[int, ...], second: tuple[int, ...], result: tuple[int, ...]) -> int | None:
    """Return the operations of both products of attention; None with keys of an earlier call.

    ONNX Runtime's own operator first computes [N, length, width] by [width, queries + keys + values].
    """
    if len(node.input) > 4 and node.input[4]:
        return None
    if node.domain == "com.microsoft":
        sizes = next((a.ints for a in node.attribute if a.name == "qkv_hidden_sizes"), [second[1] // 3] * 3)
        return 2 * first[0] * first[1] * (math.prod(second) + first[1] * (sizes[0] + sizes[2]))
    if len(first) == 4:  # [N, heads, length, width]
        return 2 * math.prod(first[:3]) * second[2] * (first[3] + result[3])
    return 2 * first[0] * first[1] * second[1] * (first[2] + result[2])  # [N, length, heads x width]
