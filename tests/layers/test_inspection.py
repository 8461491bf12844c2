"""`dyno inspect`: layers of one form, several aligned, and one line for unreadable input."""

import dataclasses
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dyno
import onnx_text
from dyno.worker.backends.tensor_rt import given, layers, library
from dyno.worker.spec import UserError

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

NET = """
import torch
from torch import nn

def net(channels=3):
    return nn.Sequential(nn.Conv2d(channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
                         nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def grey(): return net(1)

class Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("it never works")

def broken(): return Broken()
def script(): return torch.jit.script(nn.Conv2d(3, 4, 3))
"""


def tables(call: Any, *words: object) -> dict[str, Any]:
    _, out, _ = call("inspect", *words, "--format", "json", code=0)
    found: dict[str, Any] = json.loads(out)["tables"]
    return found


def test_a_module_is_inspected_alone(call: Any, net: str) -> None:
    table = tables(call, net, "--size", "16", "--batch", "2")["layers"]
    assert [row["type"] for row in table["rows"]][:3] == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert sum(row["parameters"] or 0 for row in table["rows"]) == 216 + 16 + 584 + 90
    assert table["rows"][0]["output"] == "2x8x14x14" and table["rows"][0]["bytes"] == 4 * 2 * 8 * 14 * 14
    assert table["notes"][0].startswith("PyTorch ") and "906 parameters" in table["notes"][0]


def test_a_network_by_name_is_inspected_at_its_own_size(call: Any) -> None:
    first = tables(call, "torchvision:inception_v3")["layers"]["rows"][0]
    assert first["output"] == "1x32x149x149", "of 299 x 299, in steps of 2 without padding"


@pytest.mark.parametrize(
    ("model", "size", "parameters"),
    [("torchvision:resnet18", "64", (11_689_512, 11_684_712)), ("timm:test_vit", "160", None),
     ("ultralytics:yolov8n-cls.yaml", "64", (2_719_288, 2_715_880))],
    ids=["resnet18", "vit", "yolo"],
)  # fmt: skip
def test_module_graph_and_engines_are_aligned(
    call: Any, model: str, size: str, parameters: tuple[int, int] | None
) -> None:
    if model.startswith("ultralytics") and importlib.util.find_spec("ultralytics") is None:  # importing it patches PIL
        pytest.skip("no ultralytics")
    table = tables(call, model, "onnx", "onnxruntime", "openvino", "--size", size)["aligned"]
    rows, notes = table["rows"], table["notes"]
    assert not any("unaligned" in note for note in notes), notes
    for name, note in zip("abcd", notes[:4], strict=True):  # each layer counts exactly once
        total = sum(row[f"parameters_{name}"] or 0 for row in rows)
        assert parameters is None or name not in "ab" or total == parameters["ab".index(name)]
        assert parameters is None or f"{total:,} parameters" in note
    nodes = [each for row in rows for each in (row["b"] or "").split()]
    assert len(nodes) == len(set(nodes)) and f"{len(nodes)} nodes" in notes[1]
    products = [row for row in rows if row["flops"]]
    assert products and all(row["c"] and row["d"] for row in products if row["b"])  # these run in every engine
    if parameters:
        (folded,) = (note for note in notes if "fewer parameters" in note)
        assert "batch norms folded" in folded and "elsewhere" not in folded


def test_names_survive_quantisation(call: Any, net: str) -> None:
    asked = "onnx/int8", "onnxruntime/int8", "openvino/int8"
    found = tables(call, net.replace(":net", ":grey"), *asked, "--data", "digits", "--size", "16", "--channels", "1")
    rows = found["aligned"]["rows"]
    (first,) = [row for row in rows if (row["a"] or "").split()[:1] == ["0"]]
    assert "1" in first["a"].split() and "batch norm folded" in first["remark"] and first["c"] and first["d"]
    convolutions = [row for row in rows if row["flops"]]
    assert len(convolutions) == 3 and len({row["a"].split()[0] for row in convolutions}) == 3


def test_an_engine_built_without_a_gpu_is_inspected_without_one(call: Any, net: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert call("export", net, "--size", "16", "-o", "n.onnx")[0] == 0
    assert call("export", "n.onnx", "--backend", "tensorrt_rtx", "-o", "n.engine")[0] == 0
    rows = [row for row in tables(call, "n.onnx", "n.engine")["aligned"]["rows"] if row["flops"]]
    assert len(rows) == 3 and all(row["b"] for row in rows)
    (tmp_path / "n.engine").write_bytes((tmp_path / "n.engine").read_bytes() + b"more")  # a stale listing
    assert given._read_listing(tmp_path / "n.engine") is None


def test_an_engine_without_layer_information_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def give(layer: layers.EngineLayer) -> None:
        contents = given.EngineContents((), (), (1, 1, 1), [layer], "11.0", given.GpuFacts())
        monkeypatch.setattr(given, "_open_engine", lambda *_: contents)

    give(layers.EngineLayer("one", "", (), (), ""))
    with pytest.raises(UserError, match=r"built without layer information.*--profilingVerbosity=detailed"):
        given.list_layers("tensorrt", str(tmp_path / "x.engine"), "cuda:0")
    give(layers.EngineLayer("conv", "CaskConvolution", (), (), "k", nodes=("n",), parameters=9))
    found = given.list_layers("tensorrt", str(tmp_path / "x.engine"), "cuda:0")
    assert (found.library, found.parameters) == (f"{library.PRODUCT_NAMES['tensorrt']} 11.0", 9)


def test_unreadable_models_are_refused_in_one_line(refused: Any, net: str, onnx_file: Path) -> None:
    onnx = pytest.importorskip("onnx")
    assert refused("inspect", "net.py:broken").startswith("broken: the model refuses 1x3x224x224: it never works")
    assert "TorchScript, whose modules can't be watched" in refused("inspect", "net.py:script")
    assert refused("inspect", net, "opnvino") == "unknown form 'opnvino'; did you mean 'openvino'?"
    assert refused("inspect", net, "openvino/int9") == "unknown precision 'int9'; did you mean 'int8'?"
    assert refused("inspect", net, "--batch", "0") == "batch is 0; it must be at least 1"
    assert refused("inspect", onnx_file, "pytorch").startswith(f"there is no PyTorch module in {onnx_file}")
    weight = onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    model = onnx.load(onnx_file)
    model.graph.initializer.append(weight)
    model.graph.node[0].input[1] = "w"
    onnx.save(model, onnx_file, save_as_external_data=True, location="w.data", size_threshold=0)
    Path(onnx_file).with_name("w.data").unlink()
    assert "w.data, which doesn't exist; put it back beside it" in refused("inspect", onnx_file)


def test_forms_refused_by_a_library_are_left_out(call: Any, refused: Any, net: str, half_known: Path) -> None:
    code, out, err = call("inspect", half_known, "openvino", "onnxruntime", "--format", "json")
    (said,) = [line for line in err.splitlines() if "left out" in line]
    assert code == 3 and said.startswith("dyno: left out: half openvino fp32: ") and said.endswith("support Det-17")
    rows = json.loads(out)["tables"]["aligned"]["rows"]
    assert [row["a"] for row in rows] == [row["b"] for row in rows] and len(rows) == 2 and "c" not in rows[0]
    code, out, err = call("inspect", net, "compile", "openvino/fp8", "--size", "16")
    assert code == 3 and "net compile fp32: compile doesn't say what its layers are" in err
    assert "net openvino fp8: openvino has no fp8" in err and "Conv2d" in out
    assert refused("inspect", "net.py:broken", "compile").startswith("broken: ")


def test_forms_of_two_files_are_named_after_them(call: Any, onnx_file: Path) -> None:
    onnx_file.with_name("other.onnx").write_bytes(onnx_file.read_bytes())
    _, out, _ = call("inspect", onnx_file, onnx_file.with_name("other.onnx"), code=0)
    assert re.search(rf"ONNX opset \d+, {onnx_file.name} aligned with ONNX opset \d+, other.onnx", out)


def test_models_are_inspected_from_python(net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = dyno.inspect(net, sizes=("16",))
    frame = found.to_pandas()
    assert frame["type"].iloc[0] == "Conv2d" and int(frame["parameters"].sum()) == found.forms[0].parameters


OWN = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.out.weight = self.embed.weight
    def forward(self, ids): return self.out(self.embed(ids)).softmax(-1)

def tied(): return Tied()
def tied_inputs(): return {"ids": torch.ones(1, 7, dtype=torch.int64)}

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = self.other = nn.Conv2d(3, 3, 3)
        self.act = nn.ReLU()
    def forward(self, x): return self.act(self.other(self.act(self.conv(x))))

def twice(): return Twice()
def nothing(): return nn.Sequential()
"""


@pytest.fixture
def own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")


@pytest.mark.usefixtures("own")
def test_shared_weights_count_once_and_own_operations_belong_to_the_model(call: Any) -> None:
    alone = tables(call, "own.py:tied")["layers"]
    assert [row["parameters"] for row in alone["rows"]] == [800, None] and "800 parameters" in alone["notes"][0]
    rows = tables(call, "own.py:tied", "onnx")["aligned"]["rows"]
    assert [row["a"] for row in rows] == ["embed", "out", "(model)"]


@pytest.mark.usefixtures("own")
def test_a_module_with_two_names_has_the_nodes_of_both(call: Any, refused: Any) -> None:
    rows = tables(call, "own.py:twice", "onnx", "--size", "16")["aligned"]["rows"]
    assert [row["a"] for row in rows] == ["conv", "act", "conv", "act"] and all(row["b"] for row in rows)
    assert refused("inspect", "own.py:nothing") == "nothing has no layers: it has no part that can run"


def test_forms_of_a_file_default_to_its_precision(call: Any) -> None:
    text = "(float16[1, 8] x) => (float16[1, 8] y) { [product] y = MatMul(x, w) }"
    onnx_text.write("half.onnx", text, w=np.ones((8, 8), np.float16))
    notes = tables(call, "half.onnx", "onnxruntime", "onnxruntime/fp32")["aligned"]["notes"]
    titles = [note.partition(":")[0] for note in notes if "64 parameters" in note]
    assert titles[1].endswith(" fp16") and titles[2].startswith("ONNX Runtime") and not titles[2].endswith(" fp16")


def test_a_folder_named_like_a_form_does_not_hide_it(call: Any, net: str) -> None:
    Path("onnx").mkdir()
    assert tables(call, net, "onnx", "--size", "16")["aligned"]["rows"][0]["b"]


def test_a_torch_export_program_is_listed_by_modules(call: Any, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(1, 3, 16, 16),)), tmp_path / "net.pt2")
    rows = tables(call, "net.pt2")["layers"]["rows"]
    assert [(row["name"], row["type"]) for row in rows] == [("0", "Conv2d"), ("1", "ReLU")]
    rows = tables(call, "net.pt2", "onnx")["aligned"]["rows"]
    assert [row["a"] for row in rows] == ["0", "1"] and all(row["b"] for row in rows)
    code, out, err = call("profile", "net.pt2", "onnxruntime", "--runs", 5, "--seconds", 0.02, "--warmup", 0.02)
    assert code == 0 and "PyTorch 2" in out and "Conv2d" in out, err


def test_program_inputs_are_passed_by_position(call: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()).eval()
    torch.export.save(torch.export.export(net, (torch.zeros(2, 5, 8),)), tmp_path / "words.pt2")
    rows = tables(call, "words.pt2")["layers"]["rows"]
    assert [(row["type"], row["output"], row["flops"]) for row in rows] == [
        ("Linear", "2x5x4", 2 * 10 * 8 * 4), ("GELU", "2x5x4", None)
    ]  # fmt: skip


@dataclasses.dataclass
class Answer:
    """Type unknown to torch.export, so the program wraps the module."""

    score: torch.Tensor


class Answering(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = torch.nn.Conv2d(3, 4, 3), torch.nn.Sigmoid()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Answer:
        return Answer(self.act(self.conv(x)) * self.conv(y))


def test_a_module_in_memory_keeps_its_submodule_names() -> None:
    image = torch.zeros(1, 3, 8, 8)
    found = dyno.inspect((Answering().eval(), (image, image)), "onnx")
    module, graph = (found.forms[k] for k in found.requested)
    assert [(layer.name, layer.type) for layer in module.layers] == [
        ("conv", "Conv2d"), ("act", "Sigmoid"), ("conv", "Conv2d"),
    ]  # fmt: skip
    assert [layer.modules for layer in graph.layers] == [("conv",), ("act",), ("conv",), ("",)]
    assert [row["a"] for row in found.tables[0].rows] == ["conv", "act", "conv", "(model)"]


SCORED = '''
import torch

class Scored(torch.nn.Module):
    """Only the older exporter writes it (dynamo has no amax of all axes), and one product is outside its parts."""
    def __init__(self):
        super().__init__()
        self.fc, self.model = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
    def forward(self, x, y): return {"score": self.model(self.fc(x) @ y + 0 * x.amax())}

def make(): return Scored()
def make_inputs(): return torch.zeros(1, 2, 8), torch.zeros(1, 8, 8)
'''


def test_own_operations_stay_with_their_module_in_the_old_exporter(call: Any, tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(SCORED, encoding="utf-8")
    rows = tables(call, "scored.py:make", "onnx")["aligned"]["rows"]
    assert [(row["a"], row["flops"]) for row in rows if row["flops"]] == [
        ("fc", 2 * 2 * 8 * 8), ("(model)", 2 * 2 * 8 * 8), ("model", 2 * 2 * 8 * 4)
    ]  # fmt: skip
    assert not [row["b"] for row in rows if ("model" in row["b"] and row["a"] != "model") or "model/model" in row["b"]]


def test_a_backend_that_cannot_read_the_file_reports_it(call: Any, tmp_path: Path) -> None:
    (tmp_path / "net.xml").write_text(IR, encoding="utf-8")
    (tmp_path / "net.bin").write_bytes(b"")
    said = {"onnxruntime": "onnxruntime reads .onnx files, not ", "onnx": "there is no ONNX graph in "}
    for form, reason in said.items():
        code, _, err = call("inspect", "net.xml", form)
        assert code == 3 and err.splitlines()[-1].startswith(f"dyno: left out: net {form} fp32: {reason}")


IR = """<?xml version="1.0"?>
<net name="net" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="1,8" element_type="f32"/>
<output><port id="0" precision="FP32" names="x"><dim>1</dim><dim>8</dim></port></output></layer>
<layer id="1" name="relu" type="ReLU" version="opset1"><input><port id="0"><dim>1</dim><dim>8</dim></port></input>
<output><port id="1" precision="FP32" names="y"><dim>1</dim><dim>8</dim></port></output></layer>
<layer id="2" name="y" type="Result" version="opset1">
<input><port id="0"><dim>1</dim><dim>8</dim></port></input></layer>
</layers><edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/>
<edge from-layer="1" from-port="1" to-layer="2" to-port="0"/></edges></net>
"""
