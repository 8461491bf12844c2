"""A file that reads raw pixels gives what its parent gives for the normalised ones, in every precision and engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dyno.worker.backend import Session
from dyno.worker.evaluation.evaluate import evaluate
from dyno.worker.inputs import input_data
from dyno.worker.makers.precision import OnnxInput, OnnxPrecision, converted, reading_pixels
from dyno.worker.registry import find, maker
from dyno.worker.spec import Artifact, Dims, Recipe, Tensor, UserError


def asked(digits: Any, precision: str) -> Recipe:
    data = replace(digits.data, split="calibration") if precision == "int8" else None
    return Recipe("onnx_precision", "onnx", precision, digits.model, Dims(0, 8, 8), {"target": "tensorrt"}, data)


def lowered(digits: Any, precision: str, folder: Path) -> Artifact:
    folder.mkdir()
    found: Artifact = digits.artifact
    return found if precision == "fp32" else OnnxPrecision().make(asked(digits, precision), found, folder)


def pixels(digits: Any, parent: Artifact, folder: Path) -> Artifact:
    folder.mkdir()
    return OnnxInput().make(reading_pixels(asked(digits, parent.precision)), parent, folder)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_raw_pixels_give_what_normalised_ones_give(digits: Any, tmp_path: Path, precision: str) -> None:
    parent = lowered(digits, precision, tmp_path / "parent")
    made = pixels(digits, parent, tmp_path / "made")
    assert (made.inputs, made.outputs) == ((Tensor("input", "uint8", ("batch", 1, 8, 8)),), parent.outputs)
    assert (made.precision, made.parent_sha256) == (precision, parent.sha256)
    check = made.made_by.input_check
    assert check.max_difference < {"fp32": 1e-5, "int8": 0.02}.get(precision, 0.005) * check.max_output
    assert made.made_by.input.scale == (pytest.approx(1 / (255 * 0.5)),)
    assert made.made_by.input.offset == (pytest.approx(-1),)
    assert parent.made_by.set_fields().keys() - {"steps"} <= made.made_by.set_fields().keys()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_every_class_is_the_same_on_real_digits_fed_as_a_quarter_of_the_bytes(
    digits: Any, tmp_path: Path, backend: str
) -> None:
    pytest.importorskip(backend)
    trial = digits.trial(backend, batch=8, input="uint8")
    raw_file = pixels(digits, digits.artifact, tmp_path / "made")
    plain = session(digits, backend, digits.artifact, tmp_path / "plain")
    raw = session(digits, backend, raw_file, tmp_path / "raw")
    assert [t.dtype for t in (*plain.inputs, *raw.inputs)] == ["float32", "uint8"]
    before, after = (evaluate(session, trial, timed=False).arrays for session in (plain, raw))
    np.testing.assert_array_equal(before["topk_index"][:, 0], after["topk_index"][:, 0])
    np.testing.assert_allclose(before["output:output"], after["output:output"], rtol=1e-3, atol=1e-3)
    assert (after["topk_index"][:, 0] == after["label"]).mean() > 0.9
    fed = [next(input_data.batches(trial.data, trial.model.preprocess, s.inputs, trial.dims, 1)) for s in (plain, raw)]
    assert fed[0]["input"].nbytes == 4 * fed[1]["input"].nbytes
    assert len({input_data.fingerprint([feed], trial.model.preprocess) for feed in fed}) == 1


def session(digits: Any, backend: str, artifact: Artifact, folder: Path) -> Session:
    trial = digits.trial(backend, batch=8)
    engine = find(backend)
    folder.mkdir()
    if backend == "openvino":
        artifact = maker("openvino").make(
            Recipe("openvino", "openvino", "fp32", digits.model, Dims(0, 8, 8)), artifact, folder
        )
    return engine.load(trial, artifact)


def test_normalisation_is_done_in_float32_before_the_graphs_own_type(digits: Any, tmp_path: Path) -> None:
    halves = onnx.load(digits.artifact.path)
    halves.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    up = onnx.helper.make_node("Cast", ["input"], ["input_up"], to=onnx.TensorProto.FLOAT)
    for node in halves.graph.node:
        node.input[:] = ["input_up" if name == "input" else name for name in node.input]
    nodes = [up, *(onnx.NodeProto.FromString(n.SerializeToString()) for n in halves.graph.node)]
    del halves.graph.node[:]
    halves.graph.node.extend(nodes)
    onnx.save(halves, tmp_path / "halves.onnx")
    image = replace(digits.artifact.inputs[0], dtype="float16")
    parent = replace(digits.artifact, path=str(tmp_path / "halves.onnx"), inputs=(image,))
    made = pixels(digits, parent, tmp_path / "made")
    first = [node.op_type for node in onnx.load(made.path).graph.node][:5]
    assert first == ["Cast", "Mul", "Add", "Cast", "Cast"]
    assert made.made_by.input_check.max_difference < 1e-3 * made.made_by.input_check.max_output


def test_the_step_comes_last_and_only_when_it_is_asked_for(digits: Any) -> None:
    plain = converted(digits.trial("tensorrt", "fp16"), "tensorrt")
    raw = converted(digits.trial("tensorrt", "fp16", input="uint8"), "tensorrt")
    assert (raw.maker, raw.precision, raw.options, raw.parent) == ("onnx_input", "fp16", {"input": "uint8"}, plain)
    assert converted(digits.trial("tensorrt", "fp16", input="float32"), "tensorrt") == plain
    with pytest.raises(UserError, match="unknown input 'int8'; did you mean 'uint8'"):
        converted(digits.trial("tensorrt", "fp16", input="int8"), "tensorrt")


def test_what_has_no_image_input_is_one_line(digits: Any, tmp_path: Path) -> None:
    step = reading_pixels(asked(digits, "fp32"))
    ids = replace(digits.artifact, inputs=(Tensor("ids", "int64", ("batch", 16)),))
    with pytest.raises(UserError, match=r"one image input .*; this one has ids"):
        OnnxInput().make(step, ids, tmp_path)
    once = pixels(digits, digits.artifact, tmp_path / "once")
    with pytest.raises(UserError, match="'input' is uint8 already"):
        OnnxInput().make(step, once, tmp_path)
