"""Folding: no constant computation remains, and a graph with changed results is never used."""

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

import onnx_text
from dyno.worker.makers.export import make_fusible
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.onnx_graph.fold import fold_graph, lift_constants

RNG = np.random.default_rng(0)
FEEDS = {"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)}


def constant(name: str, array: np.ndarray) -> Any:
    return h.make_node("Constant", [], [name], value=numpy_helper.from_array(array.astype(np.float32)))


@pytest.fixture
def raw() -> Any:
    """Build a convolution and a batch norm with weights in Constant nodes, one of them behind an Identity."""
    kinds = [("scale", 1 + RNG.random(4)), ("bias", RNG.random(4)), ("mean", RNG.random(4)), ("var", 1 + RNG.random(4))]
    nodes = [
        constant("w", RNG.standard_normal((4, 3, 3, 3))),
        h.make_node("Identity", ["w"], ["same"]),
        *(constant(name, array) for name, array in kinds),
        h.make_node("Conv", ["x", "same"], ["seen"], pads=[1, 1, 1, 1]),
        h.make_node("BatchNormalization", ["seen", "scale", "bias", "mean", "var"], ["y"]),
    ]
    return onnx_text.of_nodes(nodes, {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 4, 8, 8]})


def outputs(model: Any) -> np.ndarray:
    return np.asarray(make_session(model.SerializeToString()).run(None, FEEDS)[0])


def changed(model: Any) -> Any:
    """Break the graph silently, as a faulty rewriter would."""
    for node in model.graph.node:
        if node.op_type == "Conv":
            node.attribute[0].ints[:] = [0, 0, 2, 2]
    return model


def refused(model: Any) -> Any:
    raise ValueError("what is this?")


@pytest.mark.parametrize("slim", [onnxslim.slim, changed, refused])
def test_weights_become_initialisers_and_batch_norms_are_folded(
    raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slim: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(onnxslim, "slim", slim)
    made, notes = fold_graph(raw, FEEDS, tmp_path)
    assert [node.op_type for node in made.graph.node] == ["Conv"]
    assert {*made.graph.node[0].input[1:]} == {t.name for t in made.graph.initializer}
    assert [entry.domain for entry in made.opset_import] == [""]
    assert notes == []
    np.testing.assert_allclose(outputs(made), outputs(raw), rtol=1e-4, atol=1e-5)


def test_a_graph_that_cannot_be_folded_is_unchanged(raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    monkeypatch.setattr(onnxslim, "slim", refused)
    made, notes = fold_graph(raw, FEEDS, tmp_path / "no such folder")
    assert "BatchNormalization" in [node.op_type for node in made.graph.node]
    assert len(notes) == 1 and "could not be folded (slimmed: what is this?; optimised: " in notes[0]
    np.testing.assert_array_equal(outputs(made), outputs(raw))


def test_numeric_constants_become_initialisers_and_inputs_are_removed() -> None:
    model = onnx_text.model("""(float[2] w) => (float y, int64 kept) {
        one = Constant<value_float = 1.5>()
        two = Constant<value_floats = [1.0, 2.0]>()
        axes = Constant<value_ints = [0]>()
        text = Constant<value_string = "a">()
        kept = Constant<value_int = 3>()
        product = Mul(two, one)
        sum = Add(product, w)
        y = ReduceSum<keepdims = 0>(sum, axes)
    }""", ir=3, w=np.float32([1, 2]))  # fmt: skip
    made = lift_constants(model)
    assert {t.name: numpy_helper.to_array(t).tolist() for t in made.graph.initializer} == {
        "w": [1, 2], "one": 1.5, "two": [1, 2], "axes": [0]
    }  # fmt: skip
    # Text is no numeric tensor, and every output needs a node.
    assert [n.output[0] for n in made.graph.node if n.op_type == "Constant"] == ["text", "kept"]
    assert not made.graph.input and made.ir_version > 3
    assert len(model.graph.input) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_norm_after_a_linear_layer_is_folded(tmp_path: Path, shared: bool) -> None:
    """In LeViT the norm sees [rows, columns]. A product with further readers keeps its values."""
    columns = {"scale": 1 + RNG.random(5), "bias": RNG.random(5), "mean": RNG.random(5), "var": 1 + RNG.random(5)}
    weights = {"w": RNG.standard_normal((8, 5)), **columns}
    text = f"""(float[2, 3, 8, 8] x) => (float[48, 5] normed, float[{"2, 3, 8, 5" if shared else "48, 5"}] z) {{
        product = MatMul(x, w)
        flat = Reshape(product, rows)
        [norm] normed = BatchNormalization(flat, scale, bias, mean, var)
        z = Relu({"product" if shared else "normed"})
    }}"""
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    model = onnx_text.model(text, rows=np.array([-1, 5]), **arrays)
    slim, warnings = fold_graph(model, FEEDS, tmp_path)
    kinds = {node.op_type for node in slim.graph.node}
    assert not warnings and ("BatchNormalization" in kinds) == shared
    np.testing.assert_allclose(outputs(slim), outputs(model), rtol=1e-4, atol=1e-4)


# PyTorch's exporter only ever knows the operators that exist at its first run: other tests need these.
pytest.importorskip("torchvision")

torch.manual_seed(0)


class Swap(nn.Module):
    """Attention with the last two axes of its four-dimensional keys swapped."""

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
    """Return the outputs, and counts of the operators after ONNX Runtime's optimisation."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(scratch / "optimised.onnx"), 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: feed})
    return output, Counter(node.op_type for node in onnx.load(scratch / "optimised.onnx").graph.node)


@pytest.mark.parametrize(
    ("module", "gone", "there"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), "Erf", "BiasGelu"),
        (nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8)), "Erf", "Gelu"),
        (Swap(), "Reshape", "FusedMatMul"),
    ],
    ids=["gelu after a bias", "gelu by itself", "keys of attention"],
)
def test_gelu_and_attention_are_rewritten_for_fusion(module: nn.Module, gone: str, there: str, tmp_path: Path) -> None:
    model, feed = exported(module), np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    before, written = ran(model, feed, tmp_path)
    after, fused = ran(make_fusible(model), feed, tmp_path)
    assert fused[gone] < written[gone] and fused[there] >= max(1, written[there])
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ahead", "kinds"), [("2, 3", 1), ("3, 2", 3)])
def test_axes_split_differently_are_not_swapped(ahead: str, kinds: int, tmp_path: Path) -> None:
    text = f"""(float[2, 3, 4, 5] x) => (float[{ahead}, 5, 4] y) {{
        flat = Reshape(x, three)
        swapped = Transpose<perm = [0, 2, 1]>(flat)
        y = Reshape(swapped, back)
    }}"""
    model = onnx_text.model(text, three=np.array([6, 4, 5]), back=np.array([*map(int, ahead.split(", ")), 5, 4]))
    made, feed = make_fusible(model), np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    assert len(made.graph.node) == kinds
    np.testing.assert_array_equal(ran(made, feed, tmp_path)[0], ran(model, feed, tmp_path)[0])


def test_an_erf_that_is_not_gelu_is_unchanged(tmp_path: Path) -> None:
    class Other(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (0.25 * (torch.erf(x / 3.0) + 2.0))

    model, feed = exported(Other()), np.ones((1, 5, 8), np.float32)
    written = Counter(node.op_type for node in model.graph.node)
    rewritten = make_fusible(model)
    assert Counter(node.op_type for node in rewritten.graph.node) == written
    assert ran(rewritten, feed, tmp_path)[1]["Erf"] == 1
