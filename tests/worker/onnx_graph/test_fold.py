"""Folding: nothing constant is left to compute, and a graph that no longer does the same is never taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest
from onnx import helper as h
from onnx import numpy_helper

from dyno.worker.onnx_graph.check import session
from dyno.worker.onnx_graph.fold import folded, lifted

RNG = np.random.default_rng(0)
FEEDS = {"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)}


def constant(name: str, array: np.ndarray) -> Any:
    return h.make_node("Constant", [], [name], value=numpy_helper.from_array(array.astype(np.float32)))


@pytest.fixture
def raw() -> Any:
    """A convolution and a batch norm whose weights are Constant nodes, one of them behind an Identity."""
    kinds = [("scale", 1 + RNG.random(4)), ("bias", RNG.random(4)), ("mean", RNG.random(4)), ("var", 1 + RNG.random(4))]
    nodes = [
        constant("w", RNG.standard_normal((4, 3, 3, 3))),
        h.make_node("Identity", ["w"], ["same"]),
        *(constant(name, array) for name, array in kinds),
        h.make_node("Conv", ["x", "same"], ["seen"], pads=[1, 1, 1, 1]),
        h.make_node("BatchNormalization", ["seen", "scale", "bias", "mean", "var"], ["y"]),
    ]
    io = [h.make_tensor_value_info(n, 1, ["batch", c, 8, 8]) for n, c in (("x", 3), ("y", 4))]
    return h.make_model(
        h.make_graph(nodes, "raw", io[:1], io[1:]), opset_imports=[h.make_opsetid("", 17)], ir_version=8
    )


def outputs(model: Any) -> np.ndarray:
    return np.asarray(session(model.SerializeToString()).run(None, FEEDS)[0])


def changed(model: Any) -> Any:
    """A rewriter that breaks the graph without a word."""
    for node in model.graph.node:
        if node.op_type == "Conv":
            node.attribute[0].ints[:] = [0, 0, 2, 2]
    return model


def refused(model: Any) -> Any:
    raise ValueError("what is this?")


@pytest.mark.parametrize("slim", [onnxslim.slim, changed, refused])
def test_weights_become_initialisers_and_batch_norms_parts_of_convolutions(
    raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slim: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(onnxslim, "slim", slim)
    made, notes = folded(raw, FEEDS, tmp_path)
    assert [node.op_type for node in made.graph.node] == ["Conv"]
    assert {*made.graph.node[0].input[1:]} == {t.name for t in made.graph.initializer}
    assert [entry.domain for entry in made.opset_import] == [""]
    assert notes == []
    np.testing.assert_allclose(outputs(made), outputs(raw), rtol=1e-4, atol=1e-5)


def test_a_graph_that_nothing_folds_stays_what_it_is(raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    monkeypatch.setattr(onnxslim, "slim", refused)
    made, notes = folded(raw, FEEDS, tmp_path / "no such folder")
    assert "BatchNormalization" in [node.op_type for node in made.graph.node]
    assert len(notes) == 1 and "could not be folded (slimmed: what is this?; optimised: " in notes[0]
    np.testing.assert_array_equal(outputs(made), outputs(raw))


def test_numbers_of_every_kind_are_lifted_and_initialisers_are_no_inputs() -> None:
    nodes = [
        h.make_node("Constant", [], ["one"], value_float=1.5),
        h.make_node("Constant", [], ["two"], value_floats=[1.0, 2.0]),
        h.make_node("Constant", [], ["axes"], value_ints=[0]),
        h.make_node("Constant", [], ["text"], value_string="a"),
        h.make_node("Constant", [], ["kept"], value_int=3),
        h.make_node("Mul", ["two", "one"], ["product"]),
        h.make_node("Add", ["product", "w"], ["sum"]),
        h.make_node("ReduceSum", ["sum", "axes"], ["y"], keepdims=0),
    ]
    weight = numpy_helper.from_array(np.float32([1, 2]), "w")
    w, y = h.make_tensor_value_info("w", 1, [2]), h.make_tensor_value_info("y", 1, [])
    kept = h.make_tensor_value_info("kept", onnx.TensorProto.INT64, [])
    model = h.make_model(h.make_graph(nodes, "all", [w], [y, kept], [weight]), ir_version=3)
    made = lifted(model)
    assert {t.name: numpy_helper.to_array(t).tolist() for t in made.graph.initializer} == {
        "w": [1, 2], "one": 1.5, "two": [1, 2], "axes": [0]
    }  # fmt: skip
    # Text is no tensor of numbers, and an output has to be some node's.
    assert [n.output[0] for n in made.graph.node if n.op_type == "Constant"] == ["text", "kept"]
    assert not made.graph.input and made.ir_version > 3
    assert len(model.graph.input) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_norm_behind_a_linear_layer_goes_into_its_weights(tmp_path: Path, shared: bool) -> None:
    """As LeViT has them: the norm sees [rows, columns]. A product that others read too keeps its own values."""
    columns = [("scale", 1 + RNG.random(5)), ("bias", RNG.random(5)), ("mean", RNG.random(5)), ("var", RNG.random(5))]
    weights = [("w", RNG.standard_normal((8, 5))), *columns]
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["product"]),
        h.make_node("Reshape", ["product", "rows"], ["flat"]),
        h.make_node("BatchNormalization", ["flat", "scale", "bias", "mean", "var"], ["normed"], name="norm"),
        h.make_node("Relu", ["product" if shared else "normed"], ["z"]),
    ]
    stored = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights]
    stored.append(numpy_helper.from_array(np.array([-1, 5]), "rows"))
    io = [h.make_tensor_value_info("x", 1, [2, 3, 8, 8])]
    sizes = {"normed": [48, 5], "z": [2, 3, 8, 5] if shared else [48, 5]}
    outs = [h.make_tensor_value_info(name, 1, size) for name, size in sizes.items()]
    graph = h.make_graph(nodes, "linear", io, outs, stored)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    slim, warnings = folded(model, FEEDS, tmp_path)
    kinds = {node.op_type for node in slim.graph.node}
    assert not warnings and ("BatchNormalization" in kinds) == shared
    np.testing.assert_allclose(outputs(slim), outputs(model), rtol=1e-4, atol=1e-4)
