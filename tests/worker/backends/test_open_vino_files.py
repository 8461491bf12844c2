"""An IR repeats what its ONNX file says about its origin."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_text
from dyno.worker.backends.open_vino_files import IR
from dyno.worker.inspection import Purpose
from dyno.worker.spec import Dims, ModelSpec, Preprocess, Trial, to_json

onnx = pytest.importorskip("onnx")
openvino = pytest.importorskip("openvino")


def save(path: Path, **metadata: str) -> None:
    model = onnx_text.model("(float[n, 3, 8, 8] x) => (float[n, 3, 8, 8] y) { y = Relu(x) }")
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("metadata", "purpose", "image"),
    [
        ({}, Purpose(), {}),
        ({"task": "anything", "preprocess": "[1"}, Purpose(), {}),
        (
            {"preprocess": json.dumps(to_json(Preprocess((0.5,) * 3, (0.25,) * 3))), "imgsz": "[8, 8]"},
            Purpose(preprocess=Preprocess((0.5,) * 3, (0.25,) * 3)),
            {"imgsz": [8, 8]},
        ),
        (
            {"task": "pose", "names": "{0: 'a'}", "kpt_shape": "[17, 3]"},
            Purpose(task="pose", classes=1, class_names=("a",), keypoints=(17, 3)),
            {},
        ),
    ],
)
def test_an_ir_keeps_the_metadata_of_its_onnx_file(
    metadata: dict[str, str], purpose: Purpose, image: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path / "m.onnx", **metadata)
    openvino.save_model(openvino.Core().read_model(tmp_path / "m.onnx"), tmp_path / "m.xml")
    contents = IR.read(str(tmp_path / "m.xml"), Trial(ModelSpec("m", "m.xml"), "openvino", "fp32", Dims(1, 8, 8)))
    assert (contents.task, dict(contents.image)) == (purpose, image)


INFO = {"labels": "red dark_blue", "mean_values": "127.5 0 0", "scale_values": "255 51 51", "resize_type": "standard"}
ULTRALYTICS = "task: classify\nimgsz:\n- 16\n- 8\nnames:\n  0: cat\n  1: dog\n"


@pytest.mark.parametrize(
    ("info", "beside", "purpose", "image"),
    [
        (INFO, "", Purpose(class_names=("red", "dark_blue"),
                           preprocess=Preprocess((0.5, 0.0, 0.0), (1.0, 0.2, 0.2), resize=0.0)), {}),
        (INFO | {"embedded_processing": "True"}, "", Purpose(class_names=("red", "dark_blue")), {}),
        ({}, ULTRALYTICS, Purpose(task="classify", classes=2, class_names=("cat", "dog")), {"imgsz": [16, 8]}),
        ({"scale_values": "255"}, "", Purpose(preprocess=Preprocess((0.0,) * 3, (1.0,) * 3, resize=1.0)), {}),
        ({}, "task: classify\nauthor: somebody\n", Purpose(), {}),
        ({}, "a: [", Purpose(), {}),
    ],
)  # fmt: skip
def test_metadata_of_other_programs_is_read(
    info: dict[str, str], beside: str, purpose: Purpose, image: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path / "m.onnx")
    model = openvino.Core().read_model(tmp_path / "m.onnx")
    for key, value in info.items():
        model.set_rt_info(value, ["model_info", key])
    openvino.save_model(model, tmp_path / "m.xml")
    (tmp_path / "metadata.yaml").write_text(beside)
    contents = IR.read(str(tmp_path / "m.xml"), Trial(ModelSpec("m", "m.xml"), "openvino", "fp32", Dims(1, 8, 8)))
    assert (contents.task, dict(contents.image)) == (purpose, image)


REDUCED = "(float[n, 3, 4] x) => (float[n, 1, 4] y) { y = Reduce%s<axes=[1]>(x) }"
SOFTMAX = "(float[n, 3, 4] x) => (float[n, 3, 4] y) { y = Softmax<axis=1>(x) }"


@pytest.mark.parametrize(
    ("text", "opset", "warning"),
    [
        (
            REDUCED % "L1",
            15,
            "OpenVINO gives an output another shape than the ONNX file declares (y [1,1,1] for [?,1,4])",
        ),
        (REDUCED % "Max", 15, ""),
        (SOFTMAX, 11, "OpenVINO gives outputs other values than ONNX Runtime (y)"),
        (SOFTMAX, 13, ""),
    ],
    ids=["ReduceL1", "ReduceMax", "Softmax-11", "Softmax-13"],
)
def test_operators_computed_differently_by_openvino_have_a_warning(
    call: Any, text: str, opset: int, warning: str
) -> None:
    """It ignores the axes of ReduceL1 before opset 18, and that Softmax spans all axes from its own before opset 13."""
    onnx_text.write("m.onnx", text, opset=opset)
    x = np.random.default_rng(0).standard_normal((1, 3, 4), np.float32)
    (right,) = pytest.importorskip("onnxruntime").InferenceSession("m.onnx").run(None, {"x": x})
    found = openvino.Core().compile_model("m.onnx", "CPU")(x)[0]
    if warning and found.shape == right.shape and np.allclose(found, right, atol=1e-4):
        pytest.skip(f"OpenVINO {openvino.__version__} computes it as ONNX says")
    words = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --boundaries model --backend openvino".split()
    _, out, _ = call("run", "m.onnx", *words, code=0)
    assert warning in " ".join(out.split()) and ("; one of the two is wrong" in out) == bool(warning), out
    _, out, err = call("export", "m.onnx", "-o", "m.xml", code=0)
    assert ("OpenVINO gives" in out + err) == bool(warning), out + err


def test_values_that_differ_only_with_free_axes_have_a_warning_that_says_so(call: Any, tmp_path: Path) -> None:
    """OpenVINO's LSTM with a free batch gives the state after all steps, not after the sequence's own."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) / 2
               for name, shape in {"w": (1, 32, 4), "r": (1, 32, 8), "b": (1, 64)}.items()}  # fmt: skip
    onnx_text.write("m.onnx", """(float[6, n, 4] x, int32[n] lens) => (float[1, n, 8] y) {
        all, y = LSTM<hidden_size=8>(x, w, r, b, lens) }""", **weights)  # fmt: skip
    x, lens = rng.standard_normal((6, 1, 4), np.float32), np.array([2], np.int32)
    (right,) = pytest.importorskip("onnxruntime").InferenceSession("m.onnx").run(None, {"x": x, "lens": lens})
    model = openvino.Core().read_model("m.onnx")
    if np.allclose(openvino.compile_model(model, "CPU")([x, lens])[0], right, atol=1e-2):
        pytest.skip(f"OpenVINO {openvino.__version__} is right with free axes")
    words = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --boundaries model --input lens=2".split()
    _, out, _ = call("run", "m.onnx", *words, "--backend", "onnxruntime,openvino", "--out", "run", code=0)
    said = "gives outputs other values than ONNX Runtime (y) only while axes are free: trials fix the shapes and agree"
    assert said in " ".join(out.split()), out
    _, out, err = call("export", "m.onnx", "-o", "m.xml", "--input", "lens=2", code=0)
    assert "call reshape() before compiling the file" in " ".join((out + err).split()), out + err


def test_an_ir_of_dynamic_rank_is_refused(call: Any, tmp_path: Path) -> None:
    """OpenVINO writes one for a scripted module without an example; fed with a number, it would still be timed."""
    x = openvino.opset13.parameter(openvino.PartialShape.dynamic(), float, name="x")
    openvino.save_model(openvino.Model([openvino.opset13.relu(x)], [x], "m"), tmp_path / "m.xml")
    _, _, err = call("run", "m.xml", code=2)
    assert "input 'x' may have any number of axes; convert the model with a shape or an example" in err
