"""Folding: nothing constant is left to compute, and a graph that no longer does the same is never taken."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxslim
import pytest
import torch
from onnx import helper as h
from onnx import numpy_helper
from torch import nn

from dyno.worker.makers.export import fusible
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


# PyTorch's exporter knows for ever only the operators that there were when it first ran: other tests need these.
pytest.importorskip("torchvision")

torch.manual_seed(0)


class Swap(nn.Module):
    """Attention's keys: the last two axes of four are swapped."""

    def forward(self, x: Any) -> Any:
        heads = x.reshape(x.shape[0], 5, 2, 4).permute(0, 2, 1, 3)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


def exported(module: nn.Module) -> Any:
    example = torch.randn(2, 5, 8)
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        program = torch.onnx.export(
            module.eval(), (example,), dynamo=True, opset_version=18, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    assert program is not None
    return program.model_proto


def ran(model: Any, feed: np.ndarray, scratch: Path) -> tuple[np.ndarray, Counter[str]]:
    """The outputs, and the operators that ONNX Runtime makes of the graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(scratch / "optimised.onnx"), 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: feed})
    return output, Counter(node.op_type for node in onnx.load(scratch / "optimised.onnx").graph.node)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "gone", "there"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), "Erf", "BiasGelu"),
        (nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8)), "Erf", "Gelu"),
        (Swap(), "Reshape", "FusedMatMul"),
    ],
    ids=["gelu after a bias", "gelu by itself", "keys of attention"],
)
def test_what_engines_fuse(module: nn.Module, gone: str, there: str, tmp_path: Path) -> None:
    model, feed = exported(module), np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    before, written = ran(model, feed, tmp_path)
    after, fused = ran(fusible(model), feed, tmp_path)
    assert fused[gone] < written[gone] and fused[there] >= max(1, written[there])
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_another_function_with_an_erf_stays_as_it_is(tmp_path: Path) -> None:
    class Other(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (0.25 * (torch.erf(x / 3.0) + 2.0))

    model, feed = exported(Other()), np.ones((1, 5, 8), np.float32)
    written = Counter(node.op_type for node in model.graph.node)
    rewritten = fusible(model)
    assert Counter(node.op_type for node in rewritten.graph.node) == written
    assert ran(rewritten, feed, tmp_path)[1]["Erf"] == 1
