"""INT8 from files as other exporters write them: every quantisable layer is quantised, and outputs stay close."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_text
from dyno.worker.facts.files import MakerFacts
from dyno.worker.makers.precision import OnnxPrecision
from dyno.worker.onnx_graph import check
from dyno.worker.onnx_graph.file import make_artifact
from dyno.worker.registry import find, get_maker
from dyno.worker.spec import Artifact, Dims, Recipe
from refusals import refuses


def quantised(digits: Any, parent: Artifact, folder: Path, target: str) -> Artifact:
    data = replace(digits.data, split="calibration")
    recipe = Recipe("onnx_precision", "onnx", "int8", digits.model, Dims(0, 8, 8), {"target": target}, data)
    folder.mkdir(exist_ok=True)
    return OnnxPrecision().make(recipe, parent, folder)


def raw(path: Path, out: Path) -> Path:
    """Rewrite the network as some exporters do: weights in Constant nodes, a batch norm after every convolution."""
    model, h = onnx.load(path), onnx.helper
    nodes = [h.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    for node in model.graph.node:
        nodes.append(type(node).FromString(node.SerializeToString()))
        if node.op_type != "Conv":
            continue
        out_name, channels = node.output[0], len(_weight(model, node.input[1]))
        nodes[-1].output[0] = f"{out_name}_before"
        values = {"gamma": 1.5, "beta": 0.1, "mean": 0.1, "var": 1.5**2}
        for name, value in values.items():
            tensor = onnx.numpy_helper.from_array(np.full(channels, value, np.float32))
            nodes.append(h.make_node("Constant", [], [f"{out_name}_{name}"], value=tensor))
        inputs = [f"{out_name}_before", *(f"{out_name}_{name}" for name in values)]
        nodes.append(h.make_node("BatchNormalization", inputs, [out_name], epsilon=0.0))
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    onnx.save(model, out)
    return out


def _weight(model: Any, name: str) -> np.ndarray:
    return onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
def test_weights_in_constant_nodes_and_unfused_batch_norms_become_int8(
    digits: Any, tmp_path: Path, target: str
) -> None:
    parent = digits.described(raw(Path(digits.artifact.path), tmp_path / "raw.onnx"))
    made = quantised(digits, parent, tmp_path / "made", target)
    graph = onnx.load(made.path).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(layers) == 4
    assert {makers.get(name) for node in layers for name in node.input[:2]} == {"DequantizeLinear"}
    assert "BatchNormalization" not in makers.values()
    assert made.made_by.warnings == ()
    feeds = {"input": digits.images()[0][:100]}
    (before,), (after,) = (check.compute_outputs(file.path, feeds)[0] for file in (parent, made))
    assert np.abs(after - before).mean() < 0.1 * np.abs(before).mean()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_constant_node_weights_run_in_int8(digits: Any, tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    parent = digits.described(raw(Path(digits.artifact.path), tmp_path / "raw.onnx"))
    made = quantised(digits, parent, tmp_path / "made", backend)
    engine = find(backend)
    if backend == "openvino":
        (tmp_path / "ir").mkdir()
        step = Recipe(backend, backend, "int8", digits.model, Dims(0, 8, 8))
        made = get_maker(step.maker).make(step, made, tmp_path / "ir")
    assert engine.load(digits.trial(backend, "int8"), made).facts().precision_truth.share == {"int8": 1.0}


def test_quantisation_continues_past_a_custom_operator(digits: Any, tmp_path: Path) -> None:
    """ONNX's shape inference knows no types behind it; without them its neighbours would stay in float or fail."""
    model = onnx.load(digits.artifact.path)
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.op_type, relu.domain = "Gelu", "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "own.onnx")
    made = quantised(digits, digits.described(tmp_path / "own.onnx"), tmp_path / "made", "onnxruntime")
    graph = onnx.load(made.path).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    read = [makers.get(node.input[0]) for node in graph.node if node.op_type == "Conv"]
    assert read == ["DequantizeLinear"] * 3


def test_an_fp16_file_is_cast_to_fp32_before_int8(digits: Any, tmp_path: Path) -> None:
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(digits.artifact.path)), tmp_path / "half.onnx")
    parent = replace(make_artifact(str(tmp_path / "half.onnx"), 0.0, MakerFacts()), precision="fp16")
    assert parent.inputs[0].dtype == "float16"
    (tmp_path / "single").mkdir()
    up = Recipe("onnx_precision", "onnx", "fp32", digits.model, Dims(0, 8, 8))
    single = OnnxPrecision().make(up, parent, tmp_path / "single")
    assert single.inputs[0].dtype == "float32"
    assert single.made_by.warnings == (
        "made from a file in fp16: its weights have that file's rounding in every precision",
    )
    made = quantised(digits, single, tmp_path / "made", "onnxruntime")
    images = digits.images()[0][:100]
    (exact,), (up_cast,), (low,) = (
        check.compute_outputs(file.path, {"input": images})[0] for file in (digits.artifact, single, made)
    )
    assert np.abs(up_cast - exact).max() < 0.01 * np.abs(exact).max()
    assert np.abs(low - exact).mean() < 0.1 * np.abs(exact).mean()


def test_an_output_read_by_other_nodes_survives_fp16(digits: Any, tmp_path: Path) -> None:
    model = onnx.load(digits.artifact.path)
    inner = next(node for node in model.graph.node if node.op_type == "Flatten").output[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(inner, onnx.TensorProto.FLOAT, ["batch", 512]))
    onnx.save(model, tmp_path / "two.onnx")
    (tmp_path / "made").mkdir()
    recipe = Recipe("onnx_precision", "onnx", "fp16", digits.model, Dims(0, 8, 8))
    made = OnnxPrecision().make(recipe, digits.described(tmp_path / "two.onnx"), tmp_path / "made")
    assert [(tensor.name, tensor.dtype) for tensor in made.outputs] == [("output", "float32"), (inner, "float32")]


@pytest.mark.parametrize("operator", ["Relu", "Flurp"])
def test_an_old_opset_is_upgraded_for_per_channel_scales(digits: Any, tmp_path: Path, operator: str) -> None:
    text = f"""(float[batch, 1, 8, 8] input) => (float[batch, 1, 8, 8] output) {{
        seen = Conv<pads = [1, 1, 1, 1]>(input, weight) output = {operator}(seen)
    }}"""
    onnx_text.write(tmp_path / "old.onnx", text, opset=11, weight=np.ones((1, 1, 3, 3), np.float32))
    parent = replace(digits.artifact, path=str(tmp_path / "old.onnx"))
    if operator == "Relu":
        assert onnx.load(quantised(digits, parent, tmp_path / "made", "onnxruntime").path).opset_import[0].version == 13
        return
    refuses(r"^ONNX Runtime, which .* refuses it: .*Flurp", quantised, digits, parent, tmp_path / "made", "onnxruntime")
