"""Floating-point operations of one image: counted while a module runs, or read off an ONNX graph.

Only convolutions and matrix products count, a multiplication with its addition as two: the rest is a small part of a
network's arithmetic, and the peak is measured with matrix products too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger")
# Where the second factor stands among a node's inputs, when not at 1: quantised nodes have scales between.
SECOND = {"QLinearConv": 3, "QLinearMatMul": 3}


def of_module(module: Any, *args: Any, **keywords: Any) -> int:
    """Operations of one call of the module with these arguments, which is made, by `torch.utils.flop_counter`."""
    with counting() as counter:
        module(*args, **keywords)
        return int(counter.get_total_flops())


@contextmanager
def counting() -> Iterator[Any]:
    """A `FlopCounterMode` that counts what runs inside, without gradients."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter doesn't know fused attention; the unfused form consists of products.
    fused = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as undo:
        undo.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        undo.enter_context(torch.no_grad())  # in inference mode an operator that does nothing would seem to copy
        yield undo.enter_context(FlopCounterMode(display=False))


def of_onnx(path: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Operations of one run of the file with inputs of these shapes, or 0 where a shape inside can't be inferred."""
    import onnx

    inferred = with_shapes(onnx.load(path, load_external_data=False), shapes)
    if inferred is None:
        return 0
    graph, known = inferred
    counts = [of_node(node, known) for node in graph.node if node.op_type in PRODUCTS]
    return 0 if None in counts else sum(count for count in counts if count)


def with_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, dict[str, tuple[int, ...]]] | None:
    """The model's graph with the shapes inferred from inputs of these shapes, and each tensor's shape by its name (0: a
    dimension that stays unknown); None where they contradict each other. The model itself is changed."""
    import onnx

    for value in model.graph.input:
        for axis, length in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            axis.dim_value = length
    del model.graph.value_info[:]  # recorded for other batches, these would override inference
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError):
        return None
    every = (*graph.input, *graph.value_info, *graph.output)
    known = {v.name: _shape(v) for v in every if v.type.tensor_type.HasField("shape")}
    return graph, known | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else 0 for d in value.type.tensor_type.shape.dim)


def of_node(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Operations of a product, None where its shapes aren't known."""
    first = shapes.get(node.input[0], ())
    second = shapes.get(node.input[SECOND.get(node.op_type, 1)], ())
    result = shapes.get(node.output[0], ())
    if not first or not second or not result or 0 in (*first, *second, *result):
        return None
    if node.op_type == "ConvTranspose":  # each input value meets its whole kernel: [C, M / group, kernel…]
        return 2 * math.prod(first) * math.prod(second[1:])
    if "Conv" in node.op_type:  # each output value is a sum over its kernel: [M, C / group, kernel…]
        return 2 * math.prod(result) * math.prod(second[1:])
    if node.op_type == "Gemm":
        flipped = any(a.name == "transA" and a.i for a in node.attribute)
        return 2 * math.prod(result) * first[0 if flipped else 1]
    return 2 * math.prod(result) * first[-1]
