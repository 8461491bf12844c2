"""The nodes of ONNX graphs: shapes, weights, operations, and the modules that they came from."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dyno.layers import tables
from dyno.worker.layers import graph
from dyno.worker.spec import UserError

FLOAT = TensorProto.FLOAT


def stored(path: Path, nodes: list[Any], weights: dict[str, Any], shape: tuple[Any, ...] = (1, 3, 8, 8)) -> str:
    """An ONNX file of these nodes from `x` to `y`."""
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    x, y = helper.make_tensor_value_info("x", FLOAT, shape), helper.make_tensor_value_info("y", FLOAT, None)
    made = helper.make_graph(nodes, "net", [x], [y], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(made, opset_imports=opsets), path)
    return str(path)


def of(shape: tuple[int, ...], kind: Any = np.float32) -> Any:
    return np.ones(shape, kind)


def test_weights_are_told_from_statistics_limits_and_indices(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "t", "mean", "var"], ["n"], "norm"),
        helper.make_node("Clip", ["n", "low"], ["l"], "clip"),
        helper.make_node("Mul", ["l", "half"], ["m"], "halve"),
        helper.make_node("Reshape", ["m", "flat"], ["y"], "flatten"),
    ]
    weights = {
        "w": of((4, 3, 3, 3)), "b": of((4,)), "s": of((4,)), "t": of((4,)), "mean": of((4,)), "var": of((4,)),
        "low": np.float32(0), "half": of((1,)), "flat": np.array([1, -1]),
    }  # fmt: skip
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, weights, ("n", 3, 8, 8)), {"x": (1, 3, 8, 8)})
    rows = {layer.name: layer for layer in found.layers}
    assert {name: layer.parameters for name, layer in rows.items() if layer.parameters} == {"conv": 112, "norm": 8}
    assert found.parameters == 120 and not found.notes
    assert rows["conv"].flops == 2 * 4 * 6 * 6 * 27 and [p.name for p in rows["conv"].inputs] == ["x"]
    assert rows["flatten"].outputs[0].shape == (1, 144)


def test_a_weight_of_two_nodes_is_stored_once(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", [a, "w"], [b], a) for a, b in (("x", "h"), ("h", "y"))]
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, {"w": of((8, 8))}), {})
    assert [layer.parameters for layer in found.layers] == [64, 64] and found.parameters == 64


def test_quantised_weights_count_and_scales_do_not(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["f"], "weights"),
        helper.make_node("DequantizeLinear", ["b", "sb"], ["g"], "bias"),
        helper.make_node("Conv", ["x", "f", "g"], ["y"], "conv", kernel_shape=[3, 3]),
    ]
    weights = {"w": of((4, 3, 3, 3), np.int8), "s": np.float32(1), "z": np.int8(0), "b": of((4,), np.int32),
               "sb": np.float32(1)}  # fmt: skip
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, weights), {})
    assert [layer.parameters for layer in found.layers] == [108, 4, 0]


def test_an_operator_of_another_domain_has_its_name_and_no_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [helper.make_node("Strange", ["x"], ["y"], domain="mine")]
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, {}), {})
    assert (found.layers[0].name, found.layers[0].type) == ("Strange to y", "mine.Strange")
    assert found.notes == ("the shapes of 1 of 1 nodes can't be inferred",)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"], "ONNX Runtime leaves a copy where it gives up"


@pytest.mark.parametrize(
    ("name", "scopes", "module"),
    [
        ("node_1", "['', 'layer1', 'layer1.0', 'layer1.0.relu', 'relu_1']", ("layer1.0.relu",)),
        ("node_1", "['', 'flatten']", ("",)),
        ("node_1", "not a list", ()),
        ("/layer1/layer1.0/conv1/Conv", "", ("layer1.0.conv1",)),
        ("/Add", "", ("",)),
        ("node_1", "", ()),
    ],
)
def test_nodes_know_their_modules(tmp_path: Path, name: str, scopes: str, module: tuple[str, ...]) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name)
    if scopes:
        node.metadata_props.add(key=graph.SCOPES, value=scopes)
    assert graph.read_graph(stored(tmp_path / "m.onnx", [node], {}), {}).layers[0].modules == module


def test_missing_weights_are_a_line(tmp_path: Path) -> None:
    path = stored(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": of((8, 8))})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "w.data").unlink()
    with pytest.raises(UserError, match=r"keeps weights in .*w\.data, which doesn't exist"):
        graph.read_graph(path, {})


def test_weights_in_branches_count_and_their_operations_are_unknown(tmp_path: Path) -> None:
    def branch(name: str, *weights: Any) -> Any:
        node = helper.make_node("MatMul", ["x", name], ["out_" + name], name)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info("out_" + name, FLOAT, None)], weights)

    inner = branch("inner", numpy_helper.from_array(of((8, 8)), "inner"))
    nodes = [
        helper.make_node("MatMul", ["x", "outer"], ["h"], "first"),
        helper.make_node("If", ["yes"], ["y"], "choice", then_branch=inner, else_branch=branch("outer")),
    ]
    weights = {"outer": of((8, 8)), "yes": np.asarray(True)}
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, weights, (1, 8)), {})
    assert [(layer.parameters, layer.flops) for layer in found.layers] == [(64, 128), (128, None)]
    assert found.parameters == 128 and any("1 of 2 nodes are not counted" in note for note in found.notes)
    assert "at least 128 FLOPs" in tables.summarise_layers(found)
