"""Sources are distinguished, the requested weights are loaded, and nothing in a checkpoint is ever run."""

import argparse
import hashlib
import importlib
import importlib.util
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dyno.store import sha256_of
from dyno.worker import nets
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.nets import model_source, models, saved_modules
from dyno.worker.nets.local_code import load_file
from dyno.worker.sessions.torch_support import named_outputs
from dyno.worker.snippets.modules import write_module as snippet
from dyno.worker.spec import Dims, InputSpec, ModelSpec, Preprocess, Trial, UserError
from refusals import refuses
from trap import Trap

PLANTED = """
from dyno.worker.nets.model_source import BuildCode, ModelSource
from dyno.worker.spec import Preprocess

class Planted(ModelSource):
    name = "planted"
    form = "planted:OUTPUTS"
    takes_image = True
    def build(self, model, rest, dims, state):
        import torch

        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, int(rest)))
    def read_image_config(self, model, rest): return Preprocess((0.0,) * 3, (1.0,) * 3), (4, 6)
    def write_code(self, model, rest, network, dims, classes):
        return BuildCode((), "", f"return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, {rest}))")

PLANTED = Planted()
"""
DIGITS = "dyno.worker.nets.digits:resnet18"


def spec(source: str = DIGITS, **options: Any) -> ModelSpec:
    return ModelSpec("test", source, **options)


def refusal(model: ModelSpec) -> str:
    with pytest.raises(UserError) as caught:
        models.load(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "kind", "rest"),
    [
        ("torchvision:resnet18", "torchvision", "resnet18"),
        ("timm:resnet18.a1_in1k", "timm", "resnet18.a1_in1k"),
        ("ultralytics:yolov8n-cls.yaml", "ultralytics", "yolov8n-cls.yaml"),
        ("file:/a:b/m.onnx", "file", "/a:b/m.onnx"),
        ("torchvision.models:resnet18", "module", "torchvision.models:resnet18"),
        ("package.nets:Net.small", "module", "package.nets:Net.small"),
        ("/a:b/nets.py:small", "python", "/a:b/nets.py:small"),
        ("сети/моя.py:модель", "python", "сети/моя.py:модель"),
    ],
)
def test_parse_distinguishes_source_kinds(source, kind, rest):
    assert models.parse(source) == (kind, rest)


def test_a_model_source_can_be_added_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped into the package, it is parsed, built, inspected, and written into a script."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setattr(nets, "__path__", [*nets.__path__, str(tmp_path)])
    monkeypatch.setattr(model_source, "list_sources", model_source.list_sources.__wrapped__)
    monkeypatch.setattr(models, "list_sources", model_source.list_sources)
    planted = replace(spec("planted:5"), preprocess=Preprocess())
    with pytest.raises(UserError, match="planted:OUTPUTS"):
        models.parse("planted:")
    found = inspect_model(Trial(planted, "pytorch", "fp32", Dims(1, 0, 0)), [], {}, "")
    assert (found.size, found.outputs, found.parameters) == ((4, 6), 5, 5 * 3 * 4 * 6 + 5)
    assert found.preprocess == models.preprocess(planted) == Preprocess((0.0,) * 3, (1.0,) * 3)
    trial = Trial(replace(planted, inputs=found.inputs), "pytorch", "fp32", Dims(1, 4, 6))
    part = snippet(trial, None, {"script": "net.py", "file": "net.pt"}, tmp_path)
    assert "return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 5))" in part.code
    sys.modules.pop("dyno.worker.nets.planted")


@pytest.mark.parametrize("source", ["resnet18", "torchvision:", "a b:net", "nets:2", "/a/b:net", "ultralytics:"])
def test_parse_refuses_invalid_sources(source):
    with pytest.raises(UserError, match="torchvision:NAME"):
        models.parse(source)


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("torchvision:resnt50", "did you mean torchvision:resnet50?"),
        ("timm:vit_tiny_patch16_22", "did you mean timm:vit_tiny_patch16_224?"),
        ("torchvision.models:resnt50", "did you mean resnet50?"),
        ("resnet50", "has no source prefix, such as torchvision:"),
        ("nowhere_at_all:net", "No module named 'nowhere_at_all'"),
        ("missing.py:net", "missing.py doesn't exist"),
        ("math:pi", "is a float"),
    ],
)
def test_unknown_names_get_the_nearest_one(source, hint):
    assert hint in refusal(spec(source))


def test_random_weights_depend_only_on_the_seed():
    first, again, other = (models.load(spec(seed=seed, channels=1)) for seed in (1, 1, 2))
    assert not first.training
    assert models.weights_sha256(first) == models.weights_sha256(again) != models.weights_sha256(other)


def test_a_function_may_draw_from_any_generator(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(
        "import random, numpy, torch\n"
        "def net():\n"
        "    made = torch.nn.Linear(3, 2)\n"
        "    made.bias.data = torch.tensor([random.random(), numpy.random.rand()])\n"
        "    return made\n"
    )
    source = f"{tmp_path / 'drawn.py'}:net"
    first, again, other = (models.load(spec(source, seed=seed)) for seed in (2**40, 2**40, 1))
    assert first.bias.tolist() == again.bias.tolist() and not (first.bias == other.bias).any()


def test_weights_sha256_covers_values_types_and_names():
    net = torch.nn.Linear(2, 3)
    before = models.weights_sha256(net)
    assert models.weights_sha256(torch.nn.Linear(2, 3).to(torch.bfloat16)) != before
    assert models.weights_sha256(torch.nn.Sequential(net)) != before
    with torch.no_grad():
        net.weight[0, 0] += 1
    assert models.weights_sha256(net) != before


def test_sparse_buffers_are_hashed_by_value() -> None:
    def hash_buffer(values: torch.Tensor) -> str:
        module = torch.nn.Module()
        module.register_buffer("adjacency", values.to_sparse())
        return models.weights_sha256(module)

    assert hash_buffer(torch.eye(3)) == hash_buffer(torch.eye(3)) != hash_buffer(2 * torch.eye(3))


def test_weights_quantised_by_torchao_are_hashed_by_value() -> None:
    torchao = pytest.importorskip("torchao.quantization")

    def hash_quantised(values: torch.Tensor) -> str:
        net = torch.nn.Linear(32, 32, bias=False)
        net.weight.data = values
        torchao.quantize_(net, torchao.Int8WeightOnlyConfig())
        return models.weights_sha256(net)

    values = torch.arange(1024.0).reshape(32, 32)
    assert hash_quantised(values) == hash_quantised(values) != hash_quantised(2 * values)


def test_non_dense_outputs_are_refused_with_advice() -> None:
    refuses(r"returns a sparse tensor, .* return \.to_dense\(\)", named_outputs, torch.eye(3).to_sparse())
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    refuses(r"returns a nested tensor, .* return \.to_padded_tensor\(0\)", named_outputs, (torch.eye(3), nested))


def test_classes_and_channels_reach_the_libraries():
    assert models.load(spec("torchvision:mobilenet_v2", classes=7)).classifier[1].out_features == 7
    timm = models.load(spec("timm:test_vit", classes=7, channels=1), Dims(1, 96, 96))
    assert timm(torch.zeros(1, 1, 96, 96)).shape == (1, 7)
    assert "has 3 input channels, not 1" in refusal(spec("torchvision:resnet18", channels=1))


def test_the_digits_network_is_a_quarter_as_wide():
    net = models.load(spec(classes=10, channels=1))
    assert sum(p.numel() for p in net.parameters()) == 701_818
    assert net(torch.zeros(2, 1, 64, 64)).shape == (2, 10)


def test_a_python_file_is_a_source(tmp_path, monkeypatch):
    (tmp_path / "part.py").write_text("WIDTH = 5\n")
    file = tmp_path / "моя сеть.py"
    file.write_text(
        "import torch\nfrom part import WIDTH\n"
        "def net(num_classes=3): return torch.nn.Linear(WIDTH, num_classes)\n"
        "def bare(): return torch.nn.Linear(1, 2)\n"
        "def number(): return 5\n"
        "def broken(): return 1 / 0\n"
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    assert models.load(spec(f"{file}:net")).out_features == 3
    assert models.load(spec(f"{file}:net", classes=9)).out_features == 9
    assert models.load(spec(f"{file}:bare", classes=9)).out_features == 2
    assert "must return a torch.nn.Module" in refusal(spec(f"{file}:number"))
    assert "ZeroDivisionError: division by zero" in refusal(spec(f"{file}:broken"))
    assert "did you mean broken?" in refusal(spec(f"{file}:brokn"))
    assert refusal(spec(f"{file}:other")).endswith("сеть.py has no function 'other'; it has net, bare, number, broken")
    assert "changed since" in refusal(spec(f"{file}:net", source_sha256="0" * 64))


@pytest.fixture
def trained() -> torch.nn.Module:
    return models.load(spec(seed=5, channels=1, classes=10))


@pytest.mark.parametrize(
    "kind", ["plain", "state_dict", "model", "model_state_dict", "parallel", "compiled", "safetensors"]
)
def test_wrapped_checkpoints_are_read(kind, tmp_path, trained):
    state = trained.state_dict()
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    prefixes = {"parallel": "module.", "compiled": "_orig_mod.module."}
    state = {prefixes.get(kind, "") + name: tensor for name, tensor in state.items()}
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"epoch": 3, kind: state} if kind in ("state_dict", "model", "model_state_dict") else state, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = models.load(spec(seed=1, channels=1, weights=str(path), weights_sha256=digest))
    assert models.weights_sha256(loaded) == models.weights_sha256(trained)


@pytest.mark.parametrize("place", ["", "model.", "layer1."])
def test_checkpoints_of_compiled_submodules_are_read(place, tmp_path, trained):
    inner = "model." if place == "model." else ""
    names = {name: f"{inner}{name}".replace(place, f"{place}_orig_mod.", 1) for name in trained.state_dict()}
    torch.save({"state_dict": {names[name]: value for name, value in trained.state_dict().items()}}, tmp_path / "w.pt")
    loaded = models.load(spec(seed=1, channels=1, weights=str(tmp_path / "w.pt")))
    assert models.weights_sha256(loaded) == models.weights_sha256(trained)


def test_trainer_checkpoints_are_read_from_the_model_attribute(tmp_path, trained):
    path, state = tmp_path / "last.ckpt", trained.state_dict()
    inner = {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "state_dict": {**inner, "criterion.weight": torch.ones(10)}}, path)
    loaded = models.load(spec(seed=1, channels=1, weights=str(path)))
    assert models.weights_sha256(loaded) == models.weights_sha256(trained)
    teacher = {f"teacher.{name}": tensor + 1 for name, tensor in state.items()}
    torch.save({"state_dict": {**inner, **teacher}}, path)
    message = refusal(spec(channels=1, weights=str(path)))
    assert message.endswith("has the model's weights more than once, as model and teacher; save one of them alone")
    torch.save({"state_dict": dict(list(inner.items())[:-2])}, path)
    assert "don't fit the model: missing conv1.weight" in refusal(spec(channels=1, weights=str(path)))


@pytest.mark.parametrize("source", ["torchvision:resnet18", "timm:resnet18"])
def test_the_number_of_classes_is_read_from_the_checkpoint(source, tmp_path):
    path = tmp_path / "w.pth"
    torch.save(models.load(spec("torchvision:resnet18", classes=4)).state_dict(), path)
    assert models.load(spec(source, weights=str(path))).fc.out_features == 4
    message = refusal(spec(source, classes=5, weights=str(path)))
    assert "fc.weight (model [5, 512], file [4, 512])" in message
    assert message.endswith("; they are of 4 classes: give --classes 4")


def test_weights_with_other_class_counts_name_the_option_to_give(tmp_path, trained):
    torch.save(trained.state_dict(), tmp_path / "ten.pt")
    file = tmp_path / "nets.py"
    file.write_text(
        "from dyno.worker.nets.digits import resnet18\n"
        "def net(num_classes=1000): return resnet18(num_classes)\n"
        "def fixed(): return resnet18(1000)\n"
    )
    weights = {"channels": 1, "weights": str(tmp_path / "ten.pt")}
    assert refusal(spec(f"{file}:net", **weights)).endswith("; they are of 10 classes: give --classes 10")
    assert models.load(spec(f"{file}:net", classes=10, **weights)).fc.out_features == 10
    message = refusal(spec(f"{file}:fixed", **weights))
    assert message.endswith("they are of 10 classes: let the function take num_classes and give --classes 10")


def test_weights_that_do_not_fit_are_named(tmp_path, trained):
    state = trained.state_dict()
    del state["conv1.weight"]
    state["extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "w.pt")
    message = refusal(spec(channels=1, weights=str(tmp_path / "w.pt")))
    assert "missing conv1.weight" in message
    assert "unexpected extra" in message


def test_half_precision_weights_load_and_quantised_ones_are_refused(tmp_path, trained):
    state = trained.state_dict()
    torch.save({name: value.half() for name, value in state.items()}, tmp_path / "w.pt")
    assert models.load(spec(channels=1, weights=str(tmp_path / "w.pt"))).conv1.weight.dtype == torch.float32
    torch.save({**state, "conv1.weight": (state["conv1.weight"] * 100).to(torch.int8)}, tmp_path / "w.pt")
    message = refusal(spec(channels=1, weights=str(tmp_path / "w.pt")))
    assert message.startswith("conv1.weight in ") and "is int8, and floating point in the model" in message


@pytest.mark.parametrize("new_format", [True, False])
def test_code_in_a_checkpoint_is_never_run(new_format, tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "w.pt"
    torch.save({"state_dict": Trap(mark)}, path, _use_new_zipfile_serialization=new_format)
    assert "runs code when it is read" in refusal(spec(channels=1, weights=str(path)))
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the trap works
    assert mark.exists()


class BuiltIn:
    """An object that pickles as a call of a built-in function, without its module's name."""

    def __reduce__(self):
        return print, ("ran",)


def test_built_in_functions_in_a_checkpoint_are_never_run(tmp_path, capsys):
    torch.save({"state_dict": BuiltIn()}, tmp_path / "w.pt")
    assert "runs code when it is read" in refusal(spec(channels=1, weights=str(tmp_path / "w.pt")))
    assert "ran" not in capsys.readouterr().out


def test_pickled_objects_and_programs_are_refused(tmp_path, trained):
    torch.save({"args": argparse.Namespace(lr=1), "model": trained.state_dict()}, tmp_path / "args.pt")
    assert "(argparse.Namespace)" in refusal(spec(weights=str(tmp_path / "args.pt")))
    torch.jit.trace(torch.nn.Linear(1, 1), torch.zeros(1, 1)).save(tmp_path / "program.pt")
    assert "TorchScript" in refusal(spec(weights=str(tmp_path / "program.pt")))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_damaged_checkpoints_are_refused(suffix, tmp_path, trained):
    path = tmp_path / f"w{suffix}"
    assert "doesn't exist" in refusal(spec(weights=str(path)))
    path.touch()
    assert "is empty" in refusal(spec(weights=str(path)))
    path.write_text("these are not weights\n" * 20)
    assert "checkpoint" in refusal(spec(weights=str(path)))
    save_file(trained.state_dict(), path) if suffix == ".safetensors" else torch.save(trained.state_dict(), path)
    whole = path.read_bytes()
    assert "changed since" in refusal(spec(weights=str(path), weights_sha256="0" * 64))
    path.write_bytes(whole[: len(whole) // 2])
    damaged = "not a whole .safetensors" if suffix == ".safetensors" else "cut short or damaged"
    assert damaged in refusal(spec(weights=str(path)))


def test_a_foreign_zip_file_is_not_called_damaged(tmp_path):
    path = tmp_path / "net.keras"
    with zipfile.ZipFile(path, "w") as f:
        f.writestr("config.json", "{}")
    assert refusal(spec(weights=str(path))).endswith("is a zip file, but not of torch.save: it has no data.pkl")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_all_parts_of_an_indexed_checkpoint_are_read(kind, tmp_path, trained):
    """Its hash covers the parts: other weights under the same index are other weights."""
    state = trained.state_dict()
    parts = {f"model-{i + 1}-of-2.{kind}": dict(list(state.items())[i::2]) for i in range(2)}
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file) if kind == "safetensors" else torch.save(tensors, tmp_path / file)
    path, last = tmp_path / f"model.{kind}.index.json", tmp_path / f"model-2-of-2.{kind}"
    path.write_text(json.dumps({"weight_map": {name: file for file, inner in parts.items() for name in inner}}))
    given = spec(seed=1, channels=1, weights=str(path), weights_sha256=sha256_of(path))
    assert models.weights_sha256(models.load(given)) == models.weights_sha256(trained)
    torch.save(state, last) if kind == "bin" else save_file(state, last)
    assert sha256_of(path) != given.weights_sha256
    assert "changed since the study was planned" in refusal(given)
    assert "as another file of" in refusal(replace(given, weights_sha256=""))
    last.unlink()
    assert refusal(replace(given, weights_sha256="")).endswith(f"{last.name} doesn't exist")


@pytest.mark.parametrize("map_", [{"fc.weight": "../w.bin"}, {"fc.weight": "model.bin.index.json"}, {}, [1], None])
def test_a_weight_index_may_only_name_files_in_its_folder(map_, tmp_path):
    path = tmp_path / "model.bin.index.json"
    path.write_text(json.dumps({"weight_map": map_}))
    assert "is no index of weight files in its folder" in refusal(spec(weights=str(path)))


@pytest.mark.parametrize(
    ("content", "message"), [({"epoch": 1, "net": {}}, "it has epoch, net"), (torch.zeros(1), "a Tensor")]
)
def test_a_checkpoint_without_weights_lists_its_content(content, message, tmp_path):
    torch.save(content, tmp_path / "w.pt")
    assert message in refusal(spec(weights=str(tmp_path / "w.pt")))


def test_a_failed_download_is_reported_in_one_line(tmp_path, monkeypatch):
    def no_network(*args: Any, **options: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    message = refusal(spec("torchvision:resnet18", pretrained=True))
    assert "published weights of torchvision:resnet18 can't be loaded" in message


def test_preprocessing_comes_from_the_library():
    assert models.preprocess(spec("torchvision:resnet18")) == Preprocess()
    assert models.preprocess(spec("torchvision:mobilenet_v2")).resize == pytest.approx(232 / 224)
    vit = models.preprocess(spec("timm:vit_tiny_patch16_224"))
    assert (vit.mean, vit.interpolation) == ((0.5, 0.5, 0.5), "bicubic")
    assert vit.resize == pytest.approx(1 / 0.9)
    own = Preprocess((0.5,), (0.5,), 0.0)
    assert models.preprocess(spec(preprocess=own)) == own


def test_image_size_comes_from_the_library():
    assert models.image_size(spec("torchvision:inception_v3")) == (299, 299)
    assert models.image_size(spec("timm:vit_base_patch16_384")) == (384, 384)
    assert models.image_size(spec("torchvision:fasterrcnn_resnet50_fpn")) == (800, 800)
    assert models.image_size(spec("torchvision:ssd300_vgg16")) == (300, 300)
    assert models.image_size(spec("torchvision:fcn_resnet50")) is None
    assert models.image_size(spec()) is None


def test_vision_transformers_are_built_for_the_requested_size():
    net = models.load(spec("timm:vit_tiny_patch16_224", classes=3), Dims(1, 96, 64))
    assert net(torch.zeros(1, 3, 96, 64)).shape == (1, 3)


def test_models_compiled_by_their_function_run_eagerly(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def whole(): return nn.DataParallel(torch.compile(nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())))\n"
        "def part():\n    net = nn.Sequential(torch.compile(nn.Conv2d(3, 2, 3)), nn.ReLU())\n"
        "    net[1].compile()\n    return net\n"
        "def lazy(): return nn.Sequential(nn.LazyConv2d(2, 3))\n"
    )
    for name in ("whole", "part"):
        net = models.build(ModelSpec(name, f"{tmp_path / 'nets.py'}:{name}"))
        assert [*net.state_dict()] == ["0.weight", "0.bias"] and type(net[0]) is torch.nn.Conv2d
        assert not any(part._compiled_call_impl for part in net.modules())
    with pytest.raises(UserError, match="Sequential has lazy weights, which its first call makes; call it once on an"):
        models.build(ModelSpec("lazy", f"{tmp_path / 'nets.py'}:lazy"))


def test_programs_and_frozen_scripts_load_from_functions_and_files(tmp_path: Path) -> None:
    """Neither has modes to switch between."""
    (tmp_path / "nets.py").write_text(
        "import torch\n\n"
        "def net(): return torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.BatchNorm2d(2)).eval()\n"
        "def program(): return torch.export.export(net(), (torch.zeros(2, 3, 8, 8),))\n"
        "def running(): return program().module()\n"
        "def frozen(): return torch.jit.freeze(torch.jit.script(net()))\n"
    )
    nets, x = {name: models.build(ModelSpec(name, f"{tmp_path / 'nets.py'}:{name}"))
               for name in ("net", "program", "running", "frozen")}, torch.randn(2, 3, 8, 8)  # fmt: skip
    nets["frozen"].save(tmp_path / "net.torchscript")
    nets["file"] = models.build(ModelSpec("file", f"saved:{tmp_path / 'net.torchscript'}"))
    assert not nets["file"].training and not nets["frozen"].training, "exporters and torch.compile ask"
    for name, net in nets.items():
        assert torch.allclose(net(x), nets["net"](x), atol=1e-5), name


def test_weights_stored_as_constants_are_counted() -> None:
    """Frozen TorchScript has them as constants, PyTorch's quantised layers have them packed: both had 0 parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)).eval()
    script = torch.jit.script(net)
    packed = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, torch.qint8)
    for module in (net, script, torch.jit.freeze(script), packed):
        assert models.count_parameters(module) == 6 * 8 + 8 + 8 * 5 + 5
    hashes = set[str]()
    for kind in (torch.nn.LSTM, torch.nn.GRUCell):
        plain = [torch.nn.Sequential(kind(4, 4)) for _ in range(2)]
        packed = [torch.ao.quantization.quantize_dynamic(net, {kind}, torch.qint8) for net in plain]
        assert [*map(models.count_parameters, packed)] == [*map(models.count_parameters, plain)]
        hashes |= {*map(models.weights_sha256, packed)}
    assert len(hashes) == 4
    tied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)})
    tied["head"].weight = tied["embed"].weight
    assert models.count_parameters(tied) == 20


SETS = """
import torch
torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
def net():
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    return torch.nn.Linear(2, 2)
"""


def test_process_settings_changed_by_model_code_are_restored(tmp_path: Path) -> None:
    def settings() -> tuple[Any, ...]:
        cuda, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        kind = torch.get_num_threads(), torch.is_grad_enabled(), torch.empty(1).dtype, torch.empty(1).device
        return cuda, cudnn, torch.get_float32_matmul_precision(), *kind

    (tmp_path / "nets.py").write_text(SETS)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        before = settings()
        models.load(spec(f"{tmp_path / 'nets.py'}:net"))
        assert settings() == before
    finally:
        torch.set_num_threads(threads)


def test_model_code_that_exits_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])\n")
    (tmp_path / "nets.py").write_text("import sys\ndef net(): sys.exit('no such file')\n")
    assert "script.py called sys.exit(2); put what a script does into" in refusal(spec(f"{tmp_path / 'script.py'}:net"))
    assert "nets.py:net called sys.exit('no such file'); " in refusal(spec(f"{tmp_path / 'nets.py'}:net"))


NET = """
import importlib
import beside_part
from beside_pack.inner import TWO

def late():
    import beside_late
    return beside_late.THREE

def computed(name): return importlib.import_module(name)
def through(library, name): return library(name)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules; imports from it are undone afterwards."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "beside_pack").mkdir()
    for name, text in {
        "net": NET, "beside_part": "import beside_deep", "beside_deep": "ONE = 1", "beside_late": "THREE = 3",
        "beside_pack/__init__": "", "beside_pack/inner": "TWO = 2", "beside_any": "", "beside_other": "",
        "beside_library": "raise RuntimeError('taken for a library of that name')",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("beside_", "dyno_model_"))]:
        del sys.modules[name]


def test_modules_beside_a_model_are_importable_only_by_its_code(folder: Path) -> None:
    path = list(sys.path)
    net = load_file(folder / "net.py", "")
    assert (net.beside_part.beside_deep.ONE, net.TWO, net.late()) == (1, 2, 3)
    assert net.computed("beside_any").__file__ == str(folder / "beside_any.py")
    assert net.through(importlib.import_module, "beside_other").__file__ == str(folder / "beside_other.py")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("beside_library")
    assert importlib.util.find_spec("beside_library") is None and sys.path == path


def test_modules_named_in_model_code_are_importable_by_any_caller(folder: Path) -> None:
    """torch.compile runs a traced function's imports in its own frame."""
    load_file(folder / "net.py", "")
    assert importlib.import_module("beside_late").THREE == 3


def test_the_largest_batch_of_a_program_comes_from_batched_inputs() -> None:
    class Sums(torch.nn.Module):
        def forward(self, x: Any, steps: Any) -> Any:
            return x.sum(1, keepdim=True) + steps.sum(0)[None]

    sizes = {"x": {0: torch.export.Dim("rows", max=64)}, "steps": {0: torch.export.Dim("time", max=4)}}
    program = torch.export.export(Sums(), (torch.randn(3, 5), torch.randn(2, 5)), dynamic_shapes=sizes).module()
    inputs = InputSpec("x", shape=("batch", 5)), InputSpec("steps", shape=(2, 5))
    assert saved_modules.find_most_batch(program, inputs) == 64
    assert saved_modules.find_most_batch(torch.nn.ReLU(), inputs) == 0
