"""Facts of an ONNX file in any opset, with weights inside it or beside it."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx import TensorProto as Types
from onnx import helper as h
from onnx.reference import ReferenceEvaluator

import onnx_text
from dyno.store import copy, sha256_of
from dyno.worker.layers.graph import read_graph as read_layers
from dyno.worker.onnx_graph import graph_facts as onnx_weights
from dyno.worker.onnx_graph.graph_facts import GraphFacts, read_graph_facts
from dyno.worker.onnx_graph.repair import convert_opset, read_opset
from dyno.worker.spec import UserError
from refusals import refuses


@pytest.mark.parametrize(
    ("stored", "computed", "precision"),
    [(np.float16, TensorProto.FLOAT, "fp32"), (np.float32, TensorProto.FLOAT16, "fp16"), (np.float16, 0, "fp16")],
)
def test_file_precision_is_the_type_its_weights_are_computed_in(
    stored: type, computed: int, precision: str, tmp_path: Path
) -> None:
    """Weights may be stored in half precision and cast before a product."""
    kind = "float" if computed == TensorProto.FLOAT else "float16"
    product = f"c = Cast<to = {computed}>(t) y = MatMul(x, c)" if computed else "y = MatMul(x, t)"
    text = f"({kind}[1, 8] x) => ({kind}[1, 8] y) {{ t = Transpose(w) {product} }}"
    onnx_text.write(tmp_path / "net.onnx", text, w=np.ones((8, 8), stored))
    assert read_graph_facts(onnx.load(tmp_path / "net.onnx")).precision == precision


def graph(kind: str, inputs: list[str], version: int, **attributes: Any) -> Any:
    """Build one node over `x`, 2 x 3, with `axes` = [1] available."""
    node = helper.make_node(kind, inputs, ["y"], **attributes)
    axes = {"axes": np.array([1])} if "axes" in inputs else {}
    return onnx_text.of_nodes([node], {"x": [2, 3]}, {"y": None}, axes, opset=version, ir=10)


def test_a_dynamo_reduce_mean_is_converted_to_opset_17() -> None:
    new = convert_opset(graph("ReduceMean", ["x", "axes"], 18, keepdims=1, noop_with_empty_axes=0), 17)
    assert (read_opset(new), list(new.graph.node[0].input)) == (17, ["x"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ReferenceEvaluator(new).run(None, {"x": x})[0], [[1], [4]])


def test_a_graph_already_in_the_wanted_opset_is_unchanged() -> None:
    model = graph("Relu", ["x"], 17)
    assert convert_opset(model, 17) is model


def test_an_operator_missing_from_the_wanted_opset_is_refused() -> None:
    refuses("can't be written in opset 17 instead of 20: ", convert_opset, graph("Gelu", ["x"], 20), 17)


@pytest.mark.parametrize("count", [3, 4])
def test_a_split_by_number_of_outputs_is_converted_to_opset_17(count: int) -> None:
    """11 columns in parts of 4, 4 and 3, or 3, 3, 3 and 2: below opset 18 the sizes must be explicit."""
    parts = [f"part{k}" for k in range(count)]
    node = helper.make_node("Split", ["x"], parts, axis=-1, num_outputs=count)
    old = onnx_text.of_nodes([node], {"x": [2, 11]}, dict.fromkeys(parts, (2, None)), opset=18, ir=10)
    feeds = {"x": np.arange(22, dtype=np.float32).reshape(2, 11)}
    expected = ReferenceEvaluator(old).run(None, feeds)
    new = convert_opset(old, 17)
    assert read_opset(new) == 17 and {entry.domain for entry in new.opset_import} == {""}
    for one, other in zip(ReferenceEvaluator(new).run(None, feeds), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def weighty(tmp_path: Path) -> Path:
    """y = x + w, with w in weights.bin."""
    w = np.arange(256, dtype=np.float32)
    model = onnx_text.model("(float[256] x) => (float[256] y) { y = Add(x, w) }", opset=18, ir=9, w=w)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def ran(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"x": np.zeros(256, np.float32)})
    return np.asarray(out)


def test_changed_external_weights_change_the_file_hash(weighty: Path) -> None:
    (weights,) = onnx_weights.list_files_beside(weighty)
    assert weights == weighty.parent / "weights.bin"
    before = sha256_of(weighty)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert sha256_of(weighty) != before
    weights.unlink()
    assert sha256_of(weighty) != before


def test_a_copy_includes_the_external_weights_under_its_own_name(weighty: Path, tmp_path: Path) -> None:
    for name in ("one.onnx", "two.onnx"):
        copy(weighty, tmp_path / "out" / name)
    (tmp_path / "weights.bin").unlink()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "one.onnx", "one.onnx.data", "two.onnx", "two.onnx.data",
    ]  # fmt: skip
    np.testing.assert_array_equal(ran(tmp_path / "out" / "two.onnx"), np.arange(256))


def test_invalid_graphs_have_no_external_files(tmp_path: Path) -> None:
    for content in (b"", b"location", b"no weighty at a location of its own"):
        (tmp_path / "a.onnx").write_bytes(content)
        assert onnx_weights.list_files_beside(tmp_path / "a.onnx") == []


def test_a_truncated_weight_file_is_refused(weighty: Path) -> None:
    onnx_weights.check_files_beside(str(weighty))
    with open(weighty.parent / "weights.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"weights.bin, which is cut short at 1,000 bytes: w ends at 1,024; copy it"):
        onnx_weights.check_files_beside(str(weighty))
    refuses("cut short", read_layers, str(weighty), {"x": (256,)})
    (weighty.parent / "weights.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1024\n")
    refuses(
        "weights.bin is a Git LFS pointer, not the weights file itself; fetch it with git lfs pull",
        read_layers,
        str(weighty),
        {"x": (256,)},
    )


@pytest.mark.parametrize(("key", "text"), [("offset", "-4"), ("offset", "0x10"), ("length", "-1")])
def test_an_impossible_external_location_is_refused(weighty: Path, key: str, text: str) -> None:
    model = onnx.load(weighty, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = text if entry.key == key else entry.value
    weighty.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=rf"keeps w in another file, at an impossible {key} '{text}'; export it again"):
        onnx_weights.check_files_beside(str(weighty))


W = np.random.default_rng(0).standard_normal((16, 16), np.float32)
Q = np.clip(W * 40, -127, 127).astype(np.int8)
PRODUCT = h.make_node("MatMul", ["x", "w"], ["y"])
MICROSOFT: dict[str, Any] = {"domain": "com.microsoft"}


def of(nodes: list[Any], weights: dict[str, Any] | None = None, kind: int = Types.FLOAT, **more: Any) -> GraphFacts:
    """Return the facts of a graph from x to y; a weight is an array, or a tensor stored unchanged."""
    settings = {"kind": kind, "opset": 21, "ir": 10, "domains": ("com.microsoft", "own")}
    model = onnx_text.of_nodes(nodes, {"x": ["n", 16]}, {"y": ["n", 16]}, weights, **settings, **more)
    return read_graph_facts(model)


def body(nodes: list[Any], name: str, result: str, arrays: dict[str, Any]) -> Any:
    stored = [numpy_helper.from_array(array, key) for key, array in arrays.items()]
    return h.make_graph(nodes, name, [], [h.make_tensor_value_info(result, Types.FLOAT, None)], stored)


def test_weights_in_constants_of_any_form_are_counted() -> None:
    tensor = numpy_helper.from_array(W.astype(np.float16))
    assert of([h.make_node("Constant", [], ["w"], value=tensor), PRODUCT]).precision == "fp16"
    rows = [h.make_node("Constant", [], ["flat"], value_floats=W.ravel().tolist()),
            h.make_node("Constant", [], ["to"], value_ints=[16, 16]),
            h.make_node("Reshape", ["flat", "to"], ["w"])]  # fmt: skip
    assert (facts := of([*rows, PRODUCT])).parameters == W.size and facts.precision == "fp32"


@pytest.mark.parametrize("constant", [False, True])
def test_a_sparse_weight_counts_as_its_dense_matrix(constant: bool) -> None:
    values = numpy_helper.from_array(np.ones(5, np.float16), "w")
    sparse = h.make_sparse_tensor(values, numpy_helper.from_array(np.arange(5)), [16, 16])
    node = h.make_node("Constant", [], ["w"], sparse_value=sparse)
    facts = of([node, PRODUCT]) if constant else of([PRODUCT], sparse_initializer=[sparse])
    assert (facts.precision, facts.parameters) == ("fp16", 256)


def test_shared_weights_count_once_and_branch_weights_per_branch() -> None:
    shared = [h.make_node("MatMul", ["x", "w"], ["a"]), h.make_node("MatMul", ["a", "w"], ["y"])]
    assert of(shared, {"w": W}).parameters == W.size
    # Both branches have a weight of the same name, and read a weight of the outer graph.
    branches = {f"{side}_branch": body([h.make_node("MatMul", ["x", "w"], [f"{side}a"]),
                                        h.make_node("MatMul", [f"{side}a", "around"], [side])], side, side, {"w": W})
                for side in ("then", "else")}  # fmt: skip
    facts = of([h.make_node("If", ["flag"], ["y"], **branches)], {"around": W, "flag": np.array(True)})
    assert facts.parameters == 3 * W.size and (facts.enclosed, facts.enclosing) == (4, ("If",))


def test_weights_inside_and_passed_to_functions_are_counted() -> None:
    constant = h.make_node("Constant", [], ["v"], value=numpy_helper.from_array(W.astype(np.float16)))
    nodes = [constant, h.make_node("Transpose", ["w"], ["t"]),
             h.make_node("MatMul", ["i", "t"], ["m"]), h.make_node("MatMul", ["m", "v"], ["o"])]  # fmt: skip
    function = h.make_function("own", "Pair", ["i", "w"], ["o"], nodes, [h.make_opsetid("", 21)])
    calls = [h.make_node("Pair", ["x", "w"], ["a"], domain="own"), h.make_node("Pair", ["a", "w"], ["y"], domain="own")]
    facts = of(calls, {"w": W.astype(np.float16)}, functions=[function])
    assert (facts.precision, facts.parameters) == ("fp16", 2 * W.size)


def restored(*steps: tuple[str, list[str]]) -> list[Any]:
    """Return consecutive nodes from q to w, and the product that reads w."""
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
def test_weights_are_traced_to_the_layer_that_multiplies_them(steps: Any, stored: Any, precision: str) -> None:
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
def test_weights_of_quantised_operators_are_counted(node: Any, weights: Any, precision: str, parameters: int) -> None:
    facts = of([node], weights)
    assert (facts.precision, facts.parameters, facts.quantised_by) == (precision, parameters, node.op_type)


@pytest.mark.parametrize("kind", [np.int16, np.uint16])
def test_weights_of_sixteen_bits_are_parameters(kind: Any) -> None:
    nodes = [h.make_node("DequantizeLinear", ["w", "s", "z"], ["f"]), h.make_node("MatMul", ["x", "f"], ["y"])]
    facts = of(nodes, {"w": W.astype(kind), "s": np.float32(0.1), "z": kind(3)})
    assert (facts.precision, facts.parameters) == ("fp32", W.size)


def test_integer_tensors_other_than_weights_do_not_mean_int8() -> None:
    """An image of bytes scaled by the graph, a mask, ids, and a graph without weights."""
    image = [h.make_node("DequantizeLinear", ["x", "s", "z"], ["f"]), h.make_node("MatMul", ["f", "w"], ["y"])]
    assert of(image, {"w": W, "s": np.float32(0.1), "z": U8(128)}, Types.UINT8).precision == "fp32"
    masked = [h.make_node("Cast", ["m"], ["c"], to=Types.FLOAT), h.make_node("Mul", ["x", "c"], ["a"]),
              h.make_node("MatMul", ["a", "w"], ["y"])]  # fmt: skip
    assert of(masked, {"m": np.ones((1, 16), bool), "w": W.astype(np.float16)}).precision == "fp16"
    looked_up = [h.make_node("Gather", ["w", "x"], ["y"])]
    assert (facts := of(looked_up, {"w": W}, Types.INT64)).precision == "fp32" and not facts.layers
    assert of([h.make_node("Relu", ["x"], ["y"])], kind=Types.FLOAT16).precision == "fp16"
