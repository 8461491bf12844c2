"""An exported graph equals its module at every batch, or the export fails."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import onnx_text
from dyno.worker.backend import Session
from dyno.worker.evaluation.evaluate import evaluate
from dyno.worker.inputs import input_data
from dyno.worker.makers import export
from dyno.worker.makers.export import export_recipe, unwrap
from dyno.worker.makers.onnx_format import ONNX
from dyno.worker.makers.precision import OnnxInput, OnnxPrecision, convert_recipe, reading_pixels
from dyno.worker.nets import models
from dyno.worker.onnx_graph.file import read_io
from dyno.worker.registry import find, get_maker, list_backends
from dyno.worker.spec import Artifact, Dims, ModelSpec, Recipe, Runtime, Tensor, Trial, UserError, digest, to_json
from refusals import refuses

DIGITS = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1)
FREE = Dims(0, 64, 64)

NETS = '''
import torch
from torch import nn
from torchvision import ops

class Baked(nn.Module):
    """Tracing keeps the example's batch in the reshape; dynamo has no amax of all axes."""
    def forward(self, x):
        x = x + 0 * x.amax()
        return x.reshape(int(torch.tensor(x.shape[0])), -1)

class Wide(nn.Module):
    """Tracing warns of the width, which is fixed."""
    def forward(self, x): return x.reshape(-1, int(torch.tensor(x.shape[1])) * 16)

class Branch(nn.Module):
    """Dynamo has no amax of all axes, tracing is right."""
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(48, 2)
    def forward(self, x):
        x = x + 0 * x.amax()
        return self.fc(x.flatten(1))

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        y = self.conv(x)
        return {"map": y, "parts": [y.mean((2, 3)), y.amax((2, 3))]}

class Each(nn.Module):
    """A result for each image, as torchvision's detectors give them."""
    def forward(self, x): return [{"mean": image.mean()} for image in x]

class Bent(nn.Module):
    """Deformable convolutions are in ONNX from opset 19 on."""
    def __init__(self):
        super().__init__()
        self.conv, self.offsets = ops.DeformConv2d(3, 4, 3), nn.Conv2d(3, 18, 3)
    def forward(self, x): return self.conv(x, self.offsets(x))

class Counting(nn.Module):
    """Keeps something of each call."""
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return x.mean((2, 3)) / self.calls

class Shifting(nn.Module):
    """Writes into its input."""
    def forward(self, x): return x.sub_(0.5).mean((2, 3))

class Halved(nn.Module):
    """Returns what numpy has no type for."""
    def forward(self, x): return x.mean((2, 3)).bfloat16()

def shifting(): return Shifting()
def halved(): return Halved()
def counting(): return Counting()
def bent(): return Bent()
def each(): return Each()
def baked(): return Baked()
def wide(): return Wide()
def branch(): return Branch()
def several(): return Several()
def quantised():
    """In eight bits, as torch.ao makes it; its state has types and packed weights, too."""
    from torch.ao import quantization as ao
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    net = nn.Sequential(ao.QuantStub(), *layers, ao.DeQuantStub()).eval()
    net.qconfig = ao.default_qconfig
    ao.prepare(net, inplace=True)(torch.ones(1, 3, 8, 8))
    return ao.convert(net)
'''


@pytest.fixture
def nets(tmp_path) -> Path:
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    return file


def make(folder: Path, model: ModelSpec = DIGITS, dims: Dims = FREE, **options: Any) -> Artifact:
    return get_maker("onnx_export").make(export_recipe(model, dims, Runtime(threads=2), options), None, folder)


def same(artifact: Artifact, model: ModelSpec, batch: int, size: int) -> None:
    """Check that the file gives the module's outputs on input unknown to the export."""
    x = np.random.default_rng(9).standard_normal((batch, model.channels, size, size), dtype=np.float32)
    session = onnxruntime.InferenceSession(artifact.path, providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        want = models.load(model, Dims(batch, size, size))(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(session.run(["output"], {"input": x})[0], want, 1e-3, 1e-4)


def test_the_recipe_keeps_only_options_that_change_the_file():
    recipe = export_recipe(DIGITS, FREE, Runtime(device="cuda:0"), {"opset": 17, "channels_last": True})
    assert (recipe.maker, recipe.format, recipe.precision) == ("onnx_export", "onnx", "fp32")
    assert recipe.options == {"opset": 17}
    assert digest(recipe) == digest(export_recipe(DIGITS, FREE, Runtime(), {"opset": 17}))
    assert "onnx_export" not in list_backends()


def test_a_file_with_a_free_batch_runs_at_every_batch(tmp_path, capfd):
    artifact = make(tmp_path)
    assert capfd.readouterr().out == ""
    assert artifact.inputs == (Tensor("input", "float32", ("batch", 1, 64, 64)),)
    assert artifact.outputs == (Tensor("output", "float32", ("batch", 10)),)
    assert artifact.bytes == Path(artifact.path).stat().st_size
    for batch in (1, 2, 5):
        same(artifact, DIGITS, batch, 64)
    made_by = artifact.made_by
    assert (made_by.exporter, made_by.opset, made_by.warnings) == ("dynamo", 18, ())
    assert made_by.verified.batches == (1, 3)
    assert 0 < made_by.verified.max_abs_error < 1e-3
    assert made_by.weights_sha256 == models.weights_sha256(models.load(DIGITS))
    assert made_by.parameters == 701_818
    json.dumps(to_json(made_by))


def test_a_fixed_batch_stays_fixed(tmp_path):
    artifact = make(tmp_path, dims=Dims(4, 64, 64), exporter="torchscript", opset=17)
    assert artifact.inputs[0].shape == (4, 1, 64, 64)
    assert artifact.outputs[0].shape == (4, 10)
    assert (artifact.made_by.exporter, artifact.made_by.opset) == ("torchscript", 17)
    same(artifact, DIGITS, 4, 64)


def test_the_other_exporter_takes_over(tmp_path, nets):
    model = ModelSpec("branch", f"{nets}:branch")
    artifact = make(tmp_path, model, Dims(0, 4, 4))
    assert artifact.made_by.exporter == "torchscript"
    assert "the dynamo exporter: failed" in artifact.made_by.warnings[0]
    same(artifact, model, 7, 4)


def test_a_torch_export_program_can_be_traced(tmp_path):
    """It can't change its mode, which tracing used to require."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(), torch.nn.ReLU())
    torch.export.save(torch.export.export(net.eval(), (torch.randn(2, 3, 8, 8),)), tmp_path / "net.pt2")
    model = ModelSpec("net", f"saved:{tmp_path / 'net.pt2'}")
    artifact = make(tmp_path, model, Dims(2, 8, 8), exporter="torchscript")
    assert artifact.made_by.exporter == "torchscript"
    same(artifact, model, 2, 8)


def test_a_graph_with_a_hard_coded_batch_is_refused(tmp_path, nets):
    with pytest.raises(UserError, match=r"fixed batch \(--batch 1\).*torchscript exporter: wrote") as caught:
        make(tmp_path, ModelSpec("baked", f"{nets}:baked"), Dims(0, 4, 4))
    assert "\n" not in str(caught.value)


def test_a_trace_with_warnings_is_checked_at_a_larger_batch_that_fits_into_memory(tmp_path, nets, monkeypatch):
    for limit, notes in (
        (1, ("the graph was traced, with warnings, and compared at batches up to 3 only",)),
        (1e9, ()),
    ):
        monkeypatch.setattr(export, "LARGER_B", limit)
        (tmp_path / f"{limit}").mkdir()
        made = make(tmp_path / f"{limit}", ModelSpec("wide", f"{nets}:wide"), Dims(0, 4, 4), exporter="torchscript")
        assert made.made_by.warnings == notes


def test_outputs_in_dicts_and_lists_get_names(tmp_path, nets):
    artifact = make(tmp_path, ModelSpec("several", f"{nets}:several"), Dims(0, 8, 8))
    assert [(t.name, t.shape) for t in artifact.outputs] == [
        ("output", ("batch", 4, 6, 6)),
        ("output_1", ("batch", 4)),
        ("output_2", ("batch", 4)),
    ]


@pytest.mark.slow
def test_a_module_quantised_by_pytorch_is_exported(tmp_path, nets):
    artifact = make(tmp_path, ModelSpec("quantised", f"{nets}:quantised"), Dims(0, 8, 8))
    kinds = {node.op_type for node in onnx.load(artifact.path).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= kinds


def test_invalid_sizes_and_options_are_refused_in_one_line(tmp_path):
    refuses("refuses 1x3x64x64: Wrong image height", make, tmp_path, ModelSpec("vit", "torchvision:vit_b_16"), FREE)
    refuses("unknown exporter 'fast'", make, tmp_path, exporter="fast")
    for options, message in (({"exporter": "fast"}, "exporter=fast"), ({"opset": "new"}, "opset=new")):
        refuses(f"^{message}: onnx's .* must be ", ONNX.recipe, Trial(DIGITS, "onnx", "fp32", FREE, options))


def test_dynamo_exports_are_converted_to_older_opsets(tmp_path) -> None:
    artifact = make(tmp_path, exporter="dynamo", opset=17)
    assert (artifact.made_by.exporter, artifact.made_by.opset) == ("dynamo", 17)
    onnx.checker.check_model(artifact.path, full_check=True)
    same(artifact, DIGITS, 5, 64)


def test_a_given_file_is_used_unchanged(tmp_path):
    path = make(tmp_path, exporter="torchscript").path
    given = make(tmp_path / "elsewhere", ModelSpec("m", f"file:{path}"))
    assert (given.path, given.seconds, given.format) == (path, 0.0, "onnx")
    assert (given.inputs, given.outputs) == read_io(path)
    assert given.made_by.weights_sha256 == given.sha256


def test_non_onnx_files_are_refused(tmp_path):
    whole = Path(make(tmp_path, exporter="torchscript").path).read_bytes()
    path = tmp_path / "given.onnx"

    def said() -> str:
        with pytest.raises(UserError) as caught:
            make(tmp_path, ModelSpec("m", f"file:{path}"))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "doesn't exist" in said()
    path.touch()
    assert "is empty" in said()
    for share in (0.02, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "whole ONNX file" in said()
    path.write_text("a picture of a cat\n" * 9)
    assert "ONNX file" in said()
    broken = onnx.load_from_string(whole)
    broken.graph.node[0].input[0] = "absent"
    onnx.save(broken, path)
    assert "not a valid ONNX graph" in said()


def test_external_weights_belong_to_the_file(tmp_path):
    model = onnx.load(make(tmp_path, exporter="torchscript").path)
    path, beside = tmp_path / "big.onnx", tmp_path / "big.bin"
    onnx.save(model, path, save_as_external_data=True, location=beside.name)
    spec = ModelSpec("m", f"file:{path}")
    before = make(tmp_path, spec)
    assert before.bytes > beside.stat().st_size
    beside.write_bytes(beside.read_bytes()[:-1] + b"\x7f")
    assert make(tmp_path, spec).sha256 != before.sha256
    beside.unlink()
    refuses(r"big\.bin", make, tmp_path, spec)


@pytest.mark.parametrize(
    ("source", "size"), [("torchvision:resnet18", 64), ("timm:test_efficientnet", 64), ("timm:test_vit", 160)]
)
def test_known_networks_export_with_a_free_batch(source, size, tmp_path):
    model = replace(DIGITS, source=source, channels=3)
    artifact = make(tmp_path, model, Dims(0, size, size))
    assert artifact.made_by.exporter == "dynamo"
    same(artifact, model, 2, size)


def test_one_output_per_image_allows_no_free_batch(tmp_path, nets):
    model = ModelSpec("each", f"{nets}:each")
    refuses(r"returns 1 tensors at batch 1 and 3 at 3, .*--batch 1", make, tmp_path, model, Dims(0, 8, 8))
    assert make(tmp_path, model, Dims(1, 8, 8), exporter="torchscript").outputs == (Tensor("output", "float32", ()),)


def test_a_module_whose_outputs_vary_is_refused(tmp_path, nets):
    line = "counting gives other outputs at each call on one input, so no graph can be compared with it; let its"
    refuses(line, make, tmp_path, ModelSpec("counting", f"{nets}:counting"), Dims(0, 8, 8))


def test_a_module_may_write_into_its_input_but_not_return_bfloat16(tmp_path, nets):
    size = Dims(0, 8, 8)
    assert make(tmp_path, ModelSpec("shifting", f"{nets}:shifting"), size).made_by.verified
    with pytest.raises(UserError, match=r"halved returns bfloat16, .*; let its forward return .float\(\)"):
        make(tmp_path, ModelSpec("halved", f"{nets}:halved"), size)


def test_operators_of_a_later_opset_raise_the_opset(tmp_path, nets):
    model = ModelSpec("bent", f"{nets}:bent")
    made = make(tmp_path, model, Dims(0, 8, 8))
    assert made.made_by.opset > 18 and "ONNX Runtime refuses" in made.made_by.warnings[0]
    same(made, model, 3, 8)


def test_wrapper_prefixes_are_removed_unless_names_clash(tmp_path: Path) -> None:
    branches = [
        helper.make_graph(
            [helper.make_node(kind, ["h", "model.fc.weight"], [f"y{kind}"], f"/model/{kind}")],
            kind, [], [helper.make_tensor_value_info(f"y{kind}", TensorProto.FLOAT, None)],
        )
        for kind in ("Add", "Sub")
    ]  # fmt: skip
    nodes = [
        helper.make_node("Mul", ["x", "model.scale"], ["m"], "/model/Mul"),
        helper.make_node("Add", ["m", "scale"], ["h"], "/Mul"),  # added by the wrapper
        helper.make_node("Abs", ["h"], ["a"], "/model/model/Mul"),  # its new name belongs to a node that stays
        helper.make_node("Abs", ["h"], ["b"], "/model/Abs"),
        helper.make_node("Abs", ["h"], ["c"], "/model/model/Abs"),
        helper.make_node("If", ["yes"], ["y"], "/model/fc/If", then_branch=branches[0], else_branch=branches[1]),
    ]
    stored = {"model.scale": np.float32([2]), "scale": np.float32([3]), "model.fc.weight": np.float32([5]),
              "yes": np.array(True)}  # fmt: skip
    path = tmp_path / "net.onnx"
    onnx.save(onnx_text.of_nodes(nodes, {"x": [1]}, {"y": [1]}, stored), path)
    unwrap(path)
    read = onnx.load(path).graph
    assert [node.name for node in read.node] == [
        "/model/Mul", "/Mul", "/model/model/Mul", "/Abs", "/model/Abs", "/fc/If"
    ]  # fmt: skip
    assert {tensor.name for tensor in read.initializer} == {"model.scale", "scale", "fc.weight", "yes"}
    assert onnxruntime.InferenceSession(path).run(None, {"x": np.float32([1])})[0] == 1 * 2 + 3 + 5


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
def test_raw_and_normalised_pixels_give_the_same_outputs(digits: Any, tmp_path: Path, precision: str) -> None:
    parent = lowered(digits, precision, tmp_path / "parent")
    made = pixels(digits, parent, tmp_path / "made")
    assert (made.inputs, made.outputs) == ((Tensor("input", "uint8", ("batch", 1, 8, 8)),), parent.outputs)
    assert (made.precision, made.parent_sha256) == (precision, parent.sha256)
    check = made.made_by.input_check
    assert check.max_difference < {"fp32": 1e-5, "int8": 0.02}.get(precision, 0.005) * check.max_output
    assert made.made_by.input.scale == (pytest.approx(1 / (255 * 0.5)),)
    assert made.made_by.input.offset == (pytest.approx(-1),)
    assert parent.made_by.set_fields().keys() - {"steps"} <= made.made_by.set_fields().keys()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_uint8_inputs_give_the_same_classes_with_a_quarter_of_the_bytes(
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
    fed = [
        next(input_data.read_batches(trial.data, trial.model.preprocess, s.inputs, trial.dims, 1)) for s in (plain, raw)
    ]
    assert fed[0]["input"].nbytes == 4 * fed[1]["input"].nbytes
    assert len({input_data.hash_feeds([feed], trial.model.preprocess) for feed in fed}) == 1


def session(digits: Any, backend: str, artifact: Artifact, folder: Path) -> Session:
    trial = digits.trial(backend, batch=8)
    engine = find(backend)
    folder.mkdir()
    if backend == "openvino":
        artifact = get_maker("openvino").make(
            Recipe("openvino", "openvino", "fp32", digits.model, Dims(0, 8, 8)), artifact, folder
        )
    return engine.load(trial, artifact)


def test_pixels_are_normalised_in_float32_before_other_casts(digits: Any, tmp_path: Path) -> None:
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


def test_the_pixel_step_is_last_and_only_on_request(digits: Any) -> None:
    plain = convert_recipe(digits.trial("tensorrt", "fp16"), "tensorrt")
    raw = convert_recipe(digits.trial("tensorrt", "fp16", input="uint8"), "tensorrt")
    assert (raw.maker, raw.precision, raw.options, raw.parent) == ("onnx_input", "fp16", {"input": "uint8"}, plain)
    assert convert_recipe(digits.trial("tensorrt", "fp16", input="float32"), "tensorrt") == plain
    with pytest.raises(UserError, match="unknown input 'int8'; did you mean 'uint8'"):
        convert_recipe(digits.trial("tensorrt", "fp16", input="int8"), "tensorrt")


def test_models_without_an_image_input_are_refused(digits: Any, tmp_path: Path) -> None:
    step = reading_pixels(asked(digits, "fp32"))
    ids = replace(digits.artifact, inputs=(Tensor("ids", "int64", ("batch", 16)),))
    refuses(r"one image input .*; this one has ids", OnnxInput().make, step, ids, tmp_path)
    once = pixels(digits, digits.artifact, tmp_path / "once")
    refuses("'input' is uint8 already", OnnxInput().make, step, once, tmp_path)
