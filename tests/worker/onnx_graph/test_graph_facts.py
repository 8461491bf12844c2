"""Precision and parameters of ONNX graphs whose weights lie elsewhere than in plain initialisers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as Types
from onnx import helper as h
from onnx import numpy_helper

from dyno.worker.onnx_graph.graph_facts import GraphFacts, read_graph_facts

W = np.random.default_rng(0).standard_normal((16, 16), np.float32)
Q = np.clip(W * 40, -127, 127).astype(np.int8)
PRODUCT = h.make_node("MatMul", ["x", "w"], ["y"])
MICROSOFT: dict[str, Any] = {"domain": "com.microsoft"}


def of(nodes: list[Any], weights: dict[str, Any] | None = None, kind: int = Types.FLOAT, **more: Any) -> GraphFacts:
    """The facts of a graph from x to y; a weight is an array, or a tensor that is stored as it is."""
    stored = [a if hasattr(a, "data_type") else numpy_helper.from_array(np.asarray(a), n)
              for n, a in (weights or {}).items()]  # fmt: skip
    ends = [h.make_tensor_value_info(name, kind, ["n", 16]) for name in "xy"]
    graph = h.make_graph(nodes, "net", ends[:1], ends[1:], stored, sparse_initializer=more.pop("sparse", ()))
    opsets = [h.make_opsetid(domain, 1 if domain else 21) for domain in ("", "com.microsoft", "own")]
    return read_graph_facts(h.make_model(graph, opset_imports=opsets, **more))


def body(nodes: list[Any], name: str, result: str, arrays: dict[str, Any]) -> Any:
    stored = [numpy_helper.from_array(array, key) for key, array in arrays.items()]
    return h.make_graph(nodes, name, [], [h.make_tensor_value_info(result, Types.FLOAT, None)], stored)


def test_weights_in_constants_of_any_form() -> None:
    tensor = numpy_helper.from_array(W.astype(np.float16))
    assert of([h.make_node("Constant", [], ["w"], value=tensor), PRODUCT]).precision == "fp16"
    rows = [h.make_node("Constant", [], ["flat"], value_floats=W.ravel().tolist()),
            h.make_node("Constant", [], ["to"], value_ints=[16, 16]),
            h.make_node("Reshape", ["flat", "to"], ["w"])]  # fmt: skip
    assert (facts := of([*rows, PRODUCT])).parameters == W.size and facts.precision == "fp32"


@pytest.mark.parametrize("constant", [False, True])
def test_a_sparse_weight_is_as_large_as_the_matrix_that_it_stands_for(constant: bool) -> None:
    values = numpy_helper.from_array(np.ones(5, np.float16), "w")
    sparse = h.make_sparse_tensor(values, numpy_helper.from_array(np.arange(5)), [16, 16])
    node = h.make_node("Constant", [], ["w"], sparse_value=sparse)
    facts = of([node, PRODUCT]) if constant else of([PRODUCT], sparse=[sparse])
    assert (facts.precision, facts.parameters) == ("fp16", 256)


def test_a_weight_that_two_layers_read_counts_once_and_those_of_two_branches_twice() -> None:
    shared = [h.make_node("MatMul", ["x", "w"], ["a"]), h.make_node("MatMul", ["a", "w"], ["y"])]
    assert of(shared, {"w": W}).parameters == W.size
    # Both branches have a weight of one name, and read one that lies around them.
    branches = {f"{side}_branch": body([h.make_node("MatMul", ["x", "w"], [f"{side}a"]),
                                        h.make_node("MatMul", [f"{side}a", "around"], [side])], side, side, {"w": W})
                for side in ("then", "else")}  # fmt: skip
    facts = of([h.make_node("If", ["flag"], ["y"], **branches)], {"around": W, "flag": np.array(True)})
    assert facts.parameters == 3 * W.size and (facts.enclosed, facts.enclosing) == (4, ("If",))


def test_weights_of_a_function_and_those_that_it_is_given() -> None:
    constant = h.make_node("Constant", [], ["v"], value=numpy_helper.from_array(W.astype(np.float16)))
    nodes = [constant, h.make_node("Transpose", ["w"], ["t"]),
             h.make_node("MatMul", ["i", "t"], ["m"]), h.make_node("MatMul", ["m", "v"], ["o"])]  # fmt: skip
    opsets = [h.make_opsetid("", 21)]
    function = h.make_function("own", "Pair", ["i", "w"], ["o"], nodes, opsets)
    calls = [h.make_node("Pair", ["x", "w"], ["a"], domain="own"), h.make_node("Pair", ["a", "w"], ["y"], domain="own")]
    facts = of(calls, {"w": W.astype(np.float16)}, functions=[function])
    assert (facts.precision, facts.parameters) == ("fp16", 2 * W.size)


def restored(*steps: tuple[str, list[str]]) -> list[Any]:
    """Nodes from q to w, one behind the other, and the product that reads w."""
    names = ["q", *(f"q{k}" for k in range(1, len(steps))), "w"]
    made = [h.make_node(op, [before, *others], [after], **({"to": 1} if op == "Cast" else {}))
            for (op, others), before, after in zip(steps, names, names[1:], strict=False)]  # fmt: skip
    return [*made, PRODUCT]


@pytest.mark.parametrize(
    ("steps", "stored", "precision"),
    [
        ((("DequantizeLinear", ["s"]), ("Transpose", [])), Q, "int8"),
        ((("Cast", []), ("Mul", ["s"])), Q, "int8"),
        ((("QuantizeLinear", ["s", "z"]), ("DequantizeLinear", ["s", "z"])), W, "int8"),
        ((("Cast", []), ("Identity", [])), W.astype(np.float16), "fp32"),
        ((("DequantizeLinear", ["s"]),), h.make_tensor("q", Types.INT4, (16, 16), Q.ravel() // 16), "int4"),
        ((("DequantizeLinear", ["s"]),), h.make_tensor("q", Types.UINT4, (16, 16), Q.ravel() % 16), "int4"),
        ((("DequantizeLinear", ["s"]),), h.make_tensor("q", Types.FLOAT8E4M3FN, (16, 16), W.ravel()), "fp8"),
        ((("DequantizeLinear", ["s"]),), h.make_tensor("q", Types.FLOAT4E2M1, (16, 16), W.ravel()), "fp4"),
        ((("Identity", []),), W.astype(ml_dtypes.bfloat16), "bf16"),
    ],
)
def test_a_weight_is_followed_to_the_layer_that_multiplies_it(steps: Any, stored: Any, precision: str) -> None:
    facts = of(restored(*steps), {"q": stored, "s": np.float32(0.1), "z": np.int8(0)})
    assert (facts.precision, facts.parameters, dict(facts.layers)) == (precision, 256, {precision: 1})


U8 = np.uint8


@pytest.mark.parametrize(
    ("node", "weights", "precision", "parameters"),
    [
        (h.make_node("MatMulNBits", ["x", "q", "s"], ["y"], K=16, N=24, bits=4, block_size=32, **MICROSOFT),
         {"q": np.zeros((24, 1, 16), U8), "s": np.ones(24, np.float32)}, "int4", 16 * 24),
        (h.make_node("MatMulNBits", ["x", "q", "s", "z"], ["y"], K=64, N=8, bits=2, block_size=32, **MICROSOFT),
         {"q": np.zeros((8, 2, 8), U8), "s": np.ones(16, np.float32), "z": np.zeros(8, U8)}, "int2", 64 * 8),
        (h.make_node("MatMulNBits", ["x", "q", "s"], ["y"], K=16, N=8, bits=8, block_size=16, **MICROSOFT),
         {"q": np.zeros((8, 1, 16), U8), "s": np.ones(8, np.float32)}, "int8", 128),
        (h.make_node("MatMulBnb4", ["x", "q", "s"], ["y"], K=16, N=16, block_size=16, quant_type=1, **MICROSOFT),
         {"q": np.zeros(128, U8), "s": np.ones(16, np.float32)}, "fp4", 256),
        (h.make_node("GatherBlockQuantized", ["q", "x", "s"], ["y"], bits=4, quantize_axis=1, **MICROSOFT),
         {"q": np.zeros((100, 8), U8), "s": np.ones((100, 1), np.float32)}, "int4", 1600),
        (h.make_node("QMoE", ["x", "r", "a", "s", "", "b", "s"], ["y"], k=1, **MICROSOFT),
         {"a": np.zeros((2, 16, 8), U8), "b": np.zeros((2, 16, 8), U8), "s": np.ones((2, 16), np.float32)},
         "int4", 1024),
        (h.make_node("DynamicQuantizeLSTM", ["x", "w", "r", "b", *[""] * 4, "s", "z", "s", "z"], ["y"], **MICROSOFT),
         {"w": np.zeros((1, 16, 16), np.int8), "r": np.zeros((1, 4, 16), np.int8), "b": np.zeros((1, 32), np.float32),
          "s": np.ones((1, 16), np.float32), "z": np.zeros((1, 16), np.int8)}, "int8", 256 + 64 + 32),
        (h.make_node("QAttention", ["x", "w", "b", "s", "s", "", "z", "z"], ["y"], num_heads=2, **MICROSOFT),
         {"w": np.zeros((16, 48), np.int8), "b": np.zeros(48, np.float32), "s": np.float32(1), "z": U8(0)},
         "int8", 816),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)  # fmt: skip
def test_weights_of_quantised_operators(node: Any, weights: Any, precision: str, parameters: int) -> None:
    facts = of([node], weights)
    assert (facts.precision, facts.parameters, facts.quantised_by) == (precision, parameters, node.op_type)


def test_bytes_that_are_no_weights_quantise_nothing() -> None:
    """An image of bytes that the graph itself scales, a mask, ids, and a graph without weights."""
    image = [h.make_node("DequantizeLinear", ["x", "s", "z"], ["f"]), h.make_node("MatMul", ["f", "w"], ["y"])]
    assert of(image, {"w": W, "s": np.float32(0.1), "z": U8(128)}, Types.UINT8).precision == "fp32"
    masked = [h.make_node("Cast", ["m"], ["c"], to=Types.FLOAT), h.make_node("Mul", ["x", "c"], ["a"]),
              h.make_node("MatMul", ["a", "w"], ["y"])]  # fmt: skip
    assert of(masked, {"m": np.ones((1, 16), bool), "w": W.astype(np.float16)}).precision == "fp16"
    looked_up = [h.make_node("Gather", ["w", "x"], ["y"])]
    assert (facts := of(looked_up, {"w": W}, Types.INT64)).precision == "fp32" and not facts.layers
    assert of([h.make_node("Relu", ["x"], ["y"])], kind=Types.FLOAT16).precision == "fp16"
