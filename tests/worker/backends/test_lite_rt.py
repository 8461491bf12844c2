"""LiteRT: files of layers with results computed here, and modules that litert-torch converts."""

import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.jobs.launcher import launch
from dyno.worker import registry
from dyno.worker.backend import answer_feeds
from dyno.worker.backends import lite_rt
from dyno.worker.extras import load_library
from dyno.worker.inspection import Purpose
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Option, Runtime, Tensor, Trial, Unavailable

LITERT = registry.find("litert")
CONVERTER = os.environ.get("DYNO_TEST_LITERT_TORCH", "")
WEIGHTS = np.array([[1, 2, -3, 4], [-5, 6, 7, 8]], np.int8)
X = np.array([[0.5, 1, -1, 2], [3, 0, 0.25, -0.5], [1, 1, 1, 1]], np.float32)


@pytest.fixture
def library() -> Any:
    reason = "ai-edge-litert is not installed"
    return pytest.importorskip("ai_edge_litert.schema_py_generated", reason=reason)


def tflite(schema: Any, path: Path, io: str = "float32", weights: str = "float32", batch: int = 3) -> str:
    """Write a layer y = x W' and its remainder modulo 2, not in XNNPACK. Integers: x / 0.25, W / 0.5, y / 0.5 + 3."""
    import flatbuffers

    scales = {"x": (0.25, 0), "w": (0.5, 0), "y": (0.5, 3), "two": (0.5, 3), "z": (0.5, 3)}
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.buffers, graph.tensors = 3, [schema.BufferT()], []
    two = 2.0 if io == "float32" else 7
    values = {"w": WEIGHTS.astype(weights), "two": np.full(1, two, io)}
    for name, shape in (("x", [batch, 4]), ("w", [2, 4]), ("y", [batch, 2]), ("two", [1]), ("z", [batch, 2])):
        tensor, kind = schema.TensorT(), weights if name == "w" else io
        tensor.name, tensor.shape, tensor.type = name, shape, getattr(schema.TensorType, kind.upper())
        if name in "xyz" and batch == 1:
            tensor.shapeSignature = [-1, shape[1]]
        if kind == "int8":
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [[each] for each in scales[name]]
        if name == "w" and weights == "float16":
            tensor.name, tensor.type = "wide", schema.TensorType.FLOAT32  # read by the layer, widened from w
        elif name in values:
            tensor.buffer = len(model.buffers)
            model.buffers.append(schema.BufferT())
            model.buffers[-1].data = np.frombuffer(values[name].tobytes(), np.uint8)
        graph.tensors.append(tensor)
    if weights == "float16":
        stored = schema.TensorT()
        stored.name, stored.shape, stored.type, stored.buffer = "w", [2, 4], schema.TensorType.FLOAT16, 2
        model.buffers.append(schema.BufferT())
        model.buffers[-1].data = np.frombuffer(values["w"].tobytes(), np.uint8)
        graph.tensors.append(stored)
    layer, rest = schema.OperatorT(), schema.OperatorT()
    layer.inputs, layer.outputs, rest.inputs, rest.outputs, rest.opcodeIndex = [0, 1, -1], [2], [2, 3], [4], 1
    layer.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
    layer.builtinOptions = schema.FullyConnectedOptionsT()
    model.operatorCodes = [schema.OperatorCodeT(), schema.OperatorCodeT()]
    kinds = schema.BuiltinOperator.FULLY_CONNECTED, schema.BuiltinOperator.FLOOR_MOD
    for code, kind in zip(model.operatorCodes, kinds, strict=True):
        code.builtinCode = code.deprecatedBuiltinCode = kind
    graph.inputs, graph.outputs, model.subgraphs = [0], [2] if io == "int8" else [2, 4], [graph]
    graph.operators = [layer] if io == "int8" else [layer, rest]
    if weights == "float16":
        widen, code = schema.OperatorT(), schema.OperatorCodeT()
        widen.inputs, widen.outputs, widen.opcodeIndex = [5], [1], 2
        code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
        graph.operators.insert(0, widen)
        model.operatorCodes.append(code)
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return str(path)


def trial_of(path: str, precision: str = "fp32", own: str = "fp32", batch: int = 3, **options: Option) -> Trial:
    model = ModelSpec("net", f"file:{path}", precision=own)
    return Trial(model, "litert", precision, Dims(batch, 0, 0), options, runtime=Runtime(threads=1))


def load(trial: Trial, folder: Path) -> Any:
    recipe = LITERT.recipe(trial)
    assert recipe is not None
    return LITERT.load(trial, registry.get_maker(recipe.maker).make(recipe, None, folder))


def test_the_signature_that_ran_is_named(library: Any, call: Any, tmp_path: Path) -> None:
    import flatbuffers

    model = library.ModelT.InitFromPackedBuf(Path(tflite(library, tmp_path / "a.tflite")).read_bytes())
    model.signatureDefs = []
    for name in ("embed", "predict"):
        signature, given, result = library.SignatureDefT(), library.TensorMapT(), library.TensorMapT()
        (given.name, given.tensorIndex), (result.name, result.tensorIndex) = ("x", 0), ("y", 2)
        signature.signatureKey, signature.inputs, signature.outputs = name, [given], [result]
        model.signatureDefs.append(signature)
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    (tmp_path / "two.tflite").write_bytes(bytes(builder.Output()))
    _, out, _ = call(
        "run", "two.tflite", "--rounds", "1", "--seconds", "0.02", "--warmup", "0.01", "--out", "run", code=0
    )
    assert "one of the file's signatures was run: the one with the input x, of embed, predict" in " ".join(out.split())


@pytest.mark.parametrize(
    ("stored", "scale", "zero_point", "expected"),
    [
        ("int8", 1.0, -128, (0.0, 1 / 255)),
        ("uint8", 1.0, 0, (0.0, 1 / 255)),
        ("uint8", 1 / 255, 0, (0.0, 1.0)),
        ("int8", 0.003921568859368563, -128, (0.0, 1.0)),
        ("uint8", 2 / 255, 127, (0.5, 0.5)),
        ("uint8", 1 / 128, 128, (0.5, 0.5)),
        ("uint8", 0.0187, 114, None),
        ("float32", 0.0, 0, None),
    ],
)
def test_normalisation_is_derived_from_the_quantised_input_range(
    stored: str, scale: float, zero_point: int, expected: tuple[float, float] | None
) -> None:
    port = lite_rt.TflitePort(0, Tensor("image", "float32", ("batch", 32, 32, 3)), stored, scale, zero_point)
    found = lite_rt.find_range([port])
    assert found is None if expected is None else found is not None and (found.mean[0], found.std[0]) == expected


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("xnnpack", [True, False])
def test_outputs_are_correct_and_delegated_operators_are_reported(
    library: Any, tmp_path: Path, xnnpack: bool, batch: int
) -> None:
    path = tflite(library, tmp_path / "net.tflite", batch=batch)  # a batch of 1 is free
    session = load(trial_of(path, xnnpack=xnnpack), tmp_path)
    found, expected = answer_feeds(session, {"x": X}), X @ WEIGHTS.T.astype(np.float32)
    assert session.inputs[0].shape == (3, 4)
    np.testing.assert_allclose(found["y"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["z"], np.mod(expected, 2), rtol=1e-5, atol=1e-5)
    facts = session.facts()
    assert facts.operators == {"FULLY_CONNECTED": 1, "FLOOR_MOD": 1} and facts.layers_by_type == {"float32": 1}
    assert facts.precision_truth.ok and facts.threads == 1
    assert facts.nodes_by_provider == {"XNNPACK": int(xnnpack), "LiteRT": 2 - xnnpack}
    assert facts.notes == (("XNNPACK runs 1 of 2 operators, LiteRT's own kernels the others (1 FLOOR_MOD)",) * xnnpack)


def test_metadata_appended_to_the_file_is_read(library: Any, tmp_path: Path) -> None:
    path = tflite(library, tmp_path / "net.tflite")
    with zipfile.ZipFile(path, "a") as archive:
        about = {"task": "classify", "names": {"0": "cat", "1": "dog"}, "imgsz": [8, 8], "end2end": False}
        archive.writestr("metadata.json", json.dumps(about))
    contents = registry.list_formats()["tflite"].read(path, trial_of(path))
    assert contents.task == Purpose(task="classify", classes=2, class_names=("cat", "dog"))
    assert contents.image == {"imgsz": [8, 8]}


@pytest.mark.parametrize("xnnpack", [True, False])
def test_quantised_inputs_and_outputs_are_exposed_as_floats(library: Any, tmp_path: Path, xnnpack: bool) -> None:
    path = tflite(library, tmp_path / "net.tflite", "int8", "int8")
    contents = registry.list_formats()["tflite"].read(path, trial_of(path))
    assert contents.precision == "int8"
    assert [(t.name, t.dtype, t.shape) for t in contents.inputs] == [("x", "float32", (3, 4))]
    session = load(trial_of(path, "int8", "int8", xnnpack=xnnpack), tmp_path)
    session.bind({"x": X})
    session.run()
    stored = np.clip(np.rint(X / 0.25), -128, 127) * 0.25 @ (WEIGHTS * 0.5).T
    expected = (np.clip(np.rint(stored / 0.5) + 3, -128, 127) - 3) * 0.5
    np.testing.assert_allclose(session.fetch()["y"], expected, atol=0.5)  # one step, as halves are rounded either way
    assert session.facts().layers_by_type == {"int8": 1} and session.facts().precision_truth.ok


def test_float_activations_and_int8_weights_run_in_int8(library: Any, tmp_path: Path) -> None:
    path = tflite(library, tmp_path / "net.tflite", "float32", "int8")
    assert registry.list_formats()["tflite"].read(path, trial_of(path)).precision == "int8"
    assert load(trial_of(path, "int8", "int8"), tmp_path).facts().layers_by_type == {"int8": 1}


def test_a_file_with_fp16_weights_is_labelled_fp16(library: Any, tmp_path: Path) -> None:
    path = tflite(library, tmp_path / "net.tflite", "float32", "float16")
    assert registry.list_formats()["tflite"].read(path, trial_of(path)).precision == "fp16"
    truth = load(trial_of(path, "fp16", "fp16"), tmp_path).facts().precision_truth
    assert truth.refuted and "1 have weights stored in float16" in truth.sentence
    for other in ("fp32", "int8"):
        assert LITERT.refuse(trial_of(path, other, "fp16")).startswith("the file's weights are fp16 already")


def test_a_mixed_type_file_runs_in_its_own_types(library: Any, tmp_path: Path) -> None:
    """A float file with int8 weights in fewer than half of its layers (here in its only layer)."""
    trial = trial_of(tflite(library, tmp_path / "net.tflite", "float32", "int8"), "int8", "int8")
    made = registry.get_maker("litert").make(LITERT.recipe(trial), None, tmp_path)
    truth = LITERT.load(replace(trial, precision="fp32", model=replace(trial.model, precision="fp32")), made).facts()
    assert truth.precision_truth.ok and not truth.precision_truth.refuted
    assert truth.precision_truth.sentence == "the file mixes types, and they were kept: 1 in int8"


def test_a_tflite_file_runs_and_exports_to_a_standalone_script(library: Any, call: Any, tmp_path: Path) -> None:
    tflite(library, tmp_path / "net.tflite")
    code, out, err = call("run", "net.tflite", "--quick", "--seconds", 0.05, "--warmup", 0.02, "--out", "runs/net")
    assert code == 0 and "litert" in out and "ran in the requested type" in out, err
    assert call("export", "runs/net", "-o", "best.tflite")[0] == 0
    scope: dict[str, Any] = {"__file__": str(tmp_path / "best.py"), "__name__": "best"}
    exec(compile((tmp_path / "best.py").read_text(), "best.py", "exec"), scope)
    np.testing.assert_allclose(scope["run"](scope["load"](), {"x": X})["y"], X @ WEIGHTS.T, rtol=1e-6)
    assert "batch" in call("run", "net.tflite", "--batch", 2, code=2)[2]
    code, _, err = call("export", "net.tflite", "-o", "net.onnx")
    assert (code, err) == (2, "dyno: net.tflite can't be made an ONNX file; give the model that it was made from\n")


@pytest.mark.parametrize("content", [b"", b"no file of that kind"])
def test_a_damaged_file_is_reported_in_one_line(library: Any, call: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.tflite").write_bytes(content)
    code, _, err = call("run", "bad.tflite")
    assert code == 2 and "bad.tflite can't be read by LiteRT" in err and err.count("\n") == 1


def test_unsupported_trials_are_refused_in_one_line() -> None:
    trial = trial_of("net.tflite", "int8")
    assert "needs real calibration images" in LITERT.refuse(trial)
    assert LITERT.refuse(replace(trial, options={"scheme": "dynamic"})) == ""
    assert "samples is for scheme=static" in LITERT.refuse(replace(trial, options={"scheme": "dynamic", "samples": 4}))
    for precision, own in (("fp32", "fp32"), ("int8", "int8")):
        reason = LITERT.refuse(trial_of("net.tflite", precision, own, scheme="static"))
        assert reason == "scheme is for a float model that Dyno quantises to int8; omit it"
    assert "int8 already" in LITERT.refuse(trial_of("net.tflite", "fp32", "int8"))
    assert "reads .tflite files, not net.onnx" in LITERT.refuse(trial_of("net.onnx"))


def test_files_are_made_in_the_python_with_the_converter() -> None:
    trial = Trial(ModelSpec("net", "torchvision:resnet18"), "litert", "fp32", Dims(2, 8, 8), {"xnnpack": False})
    for each, name in ((trial, "litert_torch"), (trial_of("net.tflite"), "main")):
        recipe = LITERT.recipe(replace(each, runtime=Runtime("main", "/here/python")))
        assert recipe is not None and (recipe.maker, recipe.options) == ("litert", {})
        assert (recipe.runtime.name, recipe.runtime.python) == (name, "/here/python")
    quantised = LITERT.recipe(trial_of("net.tflite", "int8", scheme="dynamic"))
    assert quantised is not None and quantised.runtime.name == "litert_torch"


@pytest.mark.usefixtures("library")
def test_a_missing_converter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message comes before a study with nothing but skipped rows."""
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    assert "--python litert_torch=PATH" in LITERT.probe().detail
    monkeypatch.setattr(lite_rt, "find_spec", lambda name: name)
    assert LITERT.probe().detail == ""


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ai_edge_litert.interpreter", "litert_torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match=r"ai-edge-litert is not installed .*'inference-dyno\[litert\]'"):
        LITERT.probe()
    with pytest.raises(Unavailable, match=r"--python litert_torch=PATH \(there: pip install litert-torch"):
        load_library("litert_torch", cure=lite_rt.CONVERTER_ADVICE)


@pytest.mark.slow
@pytest.mark.skipif(not CONVERTER, reason="DYNO_TEST_LITERT_TORCH names no Python with litert-torch")
@pytest.mark.parametrize(
    ("precision", "options", "off"),
    [
        ("int8", {"scheme": "static"}, 0.1),
        ("int8", {"scheme": "dynamic"}, 0.05),
        ("fp16", {}, 1e-3),
        ("fp32", {}, 1e-5),
    ],
)
def test_a_module_is_converted(
    library: Any, tmp_path: Path, precision: str, options: dict[str, Option], off: float
) -> None:
    torch = pytest.importorskip("torch")
    from dyno.worker.nets import models

    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Softsign(), "
        "nn.Flatten(), nn.LayerNorm(288), nn.GELU(), nn.Linear(288, 10), nn.Softmax(1))\n"
    )
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 8, 8), np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    np.save(tmp_path / "labels.npy", np.zeros(8, np.int64))
    np.save(tmp_path / "calibration.npy", np.arange(8))
    trial = Trial(
        ModelSpec("net", f"{tmp_path}/nets.py:net"), "litert", precision, Dims(2, 8, 8), options,
        data=DataSpec("noise", str(tmp_path), "1"), runtime=Runtime(threads=1),
    )  # fmt: skip
    job = Job("make", Runtime("litert_torch", CONVERTER, threads=1), recipe=LITERT.recipe(trial))
    made = launch(job, tmp_path / "job", 600)
    assert made.artifact is not None, made.reason
    assert [path.name for path in (tmp_path / "job").glob("*.tflite")] == ["model.tflite"]
    session = LITERT.load(trial, made.artifact)
    x = ((pixels[:2] / 255 - [[[0.485]], [[0.456]], [[0.406]]]) / [[[0.229]], [[0.224]], [[0.225]]]).astype(np.float32)
    session.bind({"input": x})
    session.run()
    with torch.inference_mode():
        expected = models.load(trial.model, trial.dims)(torch.from_numpy(x)).numpy()
    assert np.abs(session.fetch()["output"] - expected).max() < off * np.abs(expected).max()
    facts = session.facts()
    assert facts.layers_by_type == {"int8" if options else "float32": 2}
    assert not [kind for kind in lite_rt.KEPT_FLOAT if kind in " ".join(facts.notes)]  # left to LiteRT's own kernels
    if precision == "fp16":  # two bytes for each of 216 + 2880 weights; computation stays in float32
        module = models.load(trial.model, trial.dims).half().float()
        with torch.inference_mode():
            rounded = module(torch.from_numpy(x)).numpy()
        assert np.abs(session.fetch()["output"] - rounded).max() < np.abs(session.fetch()["output"] - expected).max()
        assert facts.precision_truth.refuted and "0 of 2 compute layers in float16" in facts.precision_truth.sentence
    assert ("2 have weights stored in float16" in facts.precision_truth.sentence) == (precision == "fp16")
    assert session.inputs[0].name == "input" and session.outputs[0].shape == (2, 10)
