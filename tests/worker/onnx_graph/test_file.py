"""What an ONNX file says of itself, in any opset, with weights beside it or in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import onnx_text
from dyno.store import copy, sha256_of
from dyno.worker.layers.graph import read_graph as read_layers
from dyno.worker.onnx_graph import graph_facts as onnx_weights
from dyno.worker.onnx_graph.graph_facts import read_graph_facts
from dyno.worker.onnx_graph.repair import convert_opset, read_opset
from dyno.worker.spec import UserError


@pytest.mark.parametrize(
    ("stored", "computed", "precision"),
    [(np.float16, TensorProto.FLOAT, "fp32"), (np.float32, TensorProto.FLOAT16, "fp16"), (np.float16, 0, "fp16")],
)
def test_a_file_is_of_the_precision_that_its_weights_are_computed_with(
    stored: type, computed: int, precision: str, tmp_path: Path
) -> None:
    """Weights may be kept in half precision, and be cast before a product."""
    kind = "float" if computed == TensorProto.FLOAT else "float16"
    product = f"c = Cast<to = {computed}>(t) y = MatMul(x, c)" if computed else "y = MatMul(x, t)"
    text = f"({kind}[1, 8] x) => ({kind}[1, 8] y) {{ t = Transpose(w) {product} }}"
    onnx_text.write(tmp_path / "net.onnx", text, w=np.ones((8, 8), stored))
    assert read_graph_facts(onnx.load(tmp_path / "net.onnx")).precision == precision


def graph(kind: str, inputs: list[str], version: int, **attributes: Any) -> Any:
    """One node over `x`, 2 x 3, with `axes` = [1] at hand."""
    node = helper.make_node(kind, inputs, ["y"], **attributes)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    x.type.tensor_type.shape.CopyFrom(helper.make_tensor_value_info("x", 1, [2, 3]).type.tensor_type.shape)
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    made = helper.make_graph([node], "one", [x], [y], [axes] if "axes" in inputs else [])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


def test_a_mean_as_dynamo_writes_it_goes_back_to_opset_17() -> None:
    old = graph("ReduceMean", ["x", "axes"], 18, keepdims=1, noop_with_empty_axes=0)
    new = convert_opset(old, 17)
    assert (read_opset(new), list(new.graph.node[0].input)) == (17, ["x"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ReferenceEvaluator(new).run(None, {"x": x})[0], [[1], [4]])


def test_a_graph_in_the_wanted_opset_is_left_alone() -> None:
    model = graph("Relu", ["x"], 17)
    assert convert_opset(model, 17) is model


def test_an_operator_that_the_wanted_opset_lacks_is_one_line() -> None:
    with pytest.raises(UserError, match="can't be written in opset 17 instead of 20: ") as caught:
        convert_opset(graph("Gelu", ["x"], 20), 17)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [3, 4])
def test_a_split_that_only_names_the_number_of_its_parts_goes_back_to_opset_17(count: int) -> None:
    """11 columns in parts of 4, 4 and 3, or 3, 3, 3 and 2: below opset 18 the sizes have to stand there."""
    parts = [f"part{k}" for k in range(count)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 11])
    node = helper.make_node("Split", ["x"], parts, axis=-1, num_outputs=count)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, None]) for name in parts]
    old = helper.make_model(
        helper.make_graph([node], "one", [x], outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
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


def test_a_change_of_the_weights_is_another_file(weighty: Path) -> None:
    (weights,) = onnx_weights.list_files_beside(weighty)
    assert weights == weighty.parent / "weights.bin"
    before = sha256_of(weighty)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert sha256_of(weighty) != before
    weights.unlink()
    assert sha256_of(weighty) != before


def test_a_copy_takes_them_along_under_its_own_name(weighty: Path, tmp_path: Path) -> None:
    for name in ("one.onnx", "two.onnx"):
        copy(weighty, tmp_path / "out" / name)
    (tmp_path / "weights.bin").unlink()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "one.onnx", "one.onnx.data", "two.onnx", "two.onnx.data",
    ]  # fmt: skip
    np.testing.assert_array_equal(ran(tmp_path / "out" / "two.onnx"), np.arange(256))


def test_what_is_no_graph_has_nothing_beside_it(tmp_path: Path) -> None:
    for content in (b"", b"location", b"no weighty at a location of its own"):
        (tmp_path / "a.onnx").write_bytes(content)
        assert onnx_weights.list_files_beside(tmp_path / "a.onnx") == []


def test_a_file_of_weights_that_is_cut_short_is_one_line(weighty: Path) -> None:
    onnx_weights.check_files_beside(str(weighty))
    with open(weighty.parent / "weights.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"weights.bin, which is cut short at 1,000 bytes: w ends at 1,024; copy it"):
        onnx_weights.check_files_beside(str(weighty))
    with pytest.raises(UserError, match="cut short"):
        read_layers(str(weighty), {"x": (256,)})
