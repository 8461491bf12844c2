"""`dyno diff --layers`: planted wrong layers by module name, all forms, and bad input in one line."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
import onnx_text
from refusals import refuses

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")
onnx = pytest.importorskip("onnx")

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
    def forward(self, x): return self.relu(self.relu(self.bn(self.conv(x))) + x)

class Gate(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.to_gate = nn.Conv2d(channels, channels, 1)
    def forward(self, x): return x * torch.sigmoid(self.to_gate(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block, self.gate = nn.Conv2d(1, 8, 3), Block(8), Gate(8)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    def forward(self, x): return self.head(self.gate(self.block(self.stem(x))))

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    def forward(self, ids): return self.head(self.encoder(self.embedding(ids)).mean(1))

class Shared(nn.Module):
    act = nn.SiLU()  # one for all, as in many detectors: each call has the first part's name
    def __init__(self, channels):
        super().__init__()
        self.conv, self.act = nn.Conv2d(channels, channels, 3, padding=1), Shared.act
    def forward(self, x): return self.act(self.conv(x))

def net(): return Net().eval()
def text(): return Text().eval()

def shared():
    torch.manual_seed(0)
    return nn.Sequential(Shared(1), Shared(1), nn.Upsample(scale_factor=2), Shared(1)).eval()

def script(): return torch.jit.script(Net())
"""
SIZE = ("--size", "16", "--channels", "1")


def changed(path: Path, out: str, weight: str, factor: float) -> str:
    """Copy the file with one weight multiplied; `weight` is a part of its name."""
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if weight in t.name and len(t.dims) > 1)
    array = (onnx.numpy_helper.to_array(tensor) * factor).astype(np.float32)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, path.with_name(out))
    return out


def tables(call: Any, *words: object) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the layers' rows, one row per engine, and the sentences."""
    _, out, _ = call("diff", *words, "--layers", "--format", "json", code=0)
    found = json.loads(out)["tables"]
    return found["layer-errors"]["rows"], found["layer-findings"]["rows"], found["layer-findings"]["notes"]


def test_a_module_and_its_forms_agree_layer_by_layer(call: Any, net: str) -> None:
    rows, findings, notes = tables(call, net, "onnx", "onnxruntime", "openvino", *SIZE, "--top", "0")
    assert [row["engine"] for row in findings] == ["node by node", "onnxruntime", "openvino"]
    assert all(row["unmodified_error"] < 1e-5 and not row["first"] and not row["verdict"] for row in findings)
    assert all(row["own_error"] < 1e-5 and row["error"] < 1e-4 for row in rows)
    assert sum("outputs agree" in note for note in notes) == 3
    named = {row["modules"] for row in rows if row["engine"] == "openvino"}
    # The block's sum is no call's result; the gate's product is a call's result.
    assert named == {"stem", "block.conv block.bn", "block.relu", "gate.to_gate", "gate", "head.0", "head.1", "head.2"}


def test_a_planted_wrong_weight_is_traced_to_its_module(call: Any, net: str, tmp_path: Path) -> None:
    assert call("export", net, *SIZE, "-o", "right.onnx")[0] == 0
    wrong = changed(tmp_path / "right.onnx", "wrong.onnx", "to_gate", -2.0)
    for first in (net, "right.onnx"):  # against the module, then the file
        rows, (finding,), notes = tables(call, first, wrong, *SIZE)
        (suspect,) = [row for row in rows if row["suspect"] == "yes"]
        assert suspect["modules"] == "gate.to_gate" and suspect["share"] > 99.9
        assert finding["verdict"] == "confirmed" and "gate.to_gate" in finding["first"]
        assert finding["substituted_error"] < 1e-5 < 1e-3 < finding["unmodified_error"]
        assert finding["cut_error"] == pytest.approx(finding["unmodified_error"], rel=1e-3)
        assert any("made here" in note for note in notes) and any("confirmed: " in note for note in notes)
    code, out, _ = call("diff", "right.onnx", wrong, "--layers", "--size", "16", "--least", "0.999", "--order", "error")
    assert code == 1 and "first that disagrees, suspect" in out
    two = changed(tmp_path / wrong, "two.onnx", "stem", 1.02)  # the larger change makes over 80 % of the error
    notes = tables(call, "right.onnx", two, *SIZE)[2]
    assert any("still disagree: of the other layers, " in note and "stem" in note for note in notes), notes
    broken = changed(tmp_path / "right.onnx", "broken.onnx", "to_gate", float("nan"))
    notes = tables(call, "right.onnx", broken, *SIZE)[2]
    assert any("not finite; its own error is infinite" in note and note.endswith("made here.") for note in notes)
    code, out, _ = call("diff", "right.onnx", wrong, "--layers", "--size", "16", "--format", "markdown")
    assert code == 0 and "- confirmed: with no tensor marked and the reference in its place" in out


def test_modules_that_share_an_activation_are_distinguished(call: Any, net: str) -> None:
    rows, (finding,), notes = tables(call, net.replace(":net", ":shared"), "onnxruntime", *SIZE, "--top", "0")
    assert len(rows) == 7 and not finding["first"] and finding["mismatched"] == 0
    assert all(row["error"] < 1e-5 for row in rows) and not any("left out" in note for note in notes)


def test_a_sum_inside_a_layer_is_not_taken_for_its_result(call: Any, net: str) -> None:
    """The sum has the encoder layer's name, but the norm after it gives the layer's result."""
    words = (net.replace(":net", ":text"), "onnxruntime", "openvino", "--shapes", "ids:batchx7:int64", "--top", "0")
    rows, findings, notes = tables(call, *words)
    assert len(findings) == 2 and all(not finding["first"] and finding["mismatched"] == 0 for finding in findings)
    assert all(row["error"] < 1e-5 for row in rows) and not any("disagree" in note for note in notes)
    assert {"embedding", "head"} <= {row["modules"].rpartition(".")[2] for row in rows}


def test_int8_names_the_layers_of_the_largest_error(call: Any, net: str) -> None:
    rows, findings, _ = tables(call, net, "onnxruntime/int8", "openvino/int8", *SIZE, "--data", "digits", "--top", "0")
    assert [row["engine"] for row in findings] == ["onnxruntime int8", "openvino int8"]
    for finding in findings:
        own = [row for row in rows if row["engine"] == finding["engine"]]
        assert finding["suspect_count"] == sum(row["suspect"] == "yes" for row in own) > 0
        assert 0 < finding["unmodified_error"] < 0.2 and finding["limit"] == 0.1
        assert finding["substituted_error"] is not None
        assert sum(row["share"] for row in own if row["suspect"] == "yes") >= 80 or finding["suspect_count"] == 8
        assert {"stem", "gate.to_gate"} <= {row["modules"].split()[0] for row in own}
        assert all(row["error"] < 0.2 for row in own)  # even where the quantiser removed a ReLU


def test_csv_has_every_column(call: Any, net: str) -> None:
    _, out, _ = call("diff", net, "onnx", *SIZE, "--layers", "--compared", "1", "--format", "csv", code=0)
    first = next(csv.DictReader(io.StringIO(out)))
    assert {"tensor", "own_error", "effect", "max_abs", "nonfinite", "suspect"} <= first.keys()


def looping(path: Path, factor: float) -> str:
    """Write a loop whose rank ONNX can't infer: three times h = tanh(factor h + x), with all intermediate h."""
    text = """(float[batch, length, 4] x) => (float[batch, length, 4] y) {
        [recurrence] last, steps = Loop<
            body = body (int64 i, bool go, float[] h) => (bool on, float[] new, float[] step) {
                scaled = Mul(h, factor) added = Add(scaled, x) new = Tanh(added) on = Identity(go) step = Identity(new)
            }>(trips, yes, x)
        [mean] mean = ReduceMean<axes = [0], keepdims = 0>(steps)
        [sum] y = Add(mean, last)
    }"""
    onnx_text.write(path, text, ir=9, trips=np.array(3), yes=np.array(True), factor=np.float32(factor))
    return path.name


def test_a_loop_is_one_layer_with_all_its_outputs(call: Any, tmp_path: Path) -> None:
    right, wrong = looping(tmp_path / "right.onnx", 1.0), looping(tmp_path / "wrong.onnx", -1.0)
    rows, (finding,), notes = tables(call, right, wrong, "--shapes", "x:batchx5x4", "--top", "0")
    assert [row["tensor"] for row in rows] == ["last", "steps", "mean", "y"]
    assert finding["layers"] == 3 and finding["suspects"] == "recurrence" and finding["verdict"] == "confirmed"
    assert finding["substituted_error"] < 1e-6 and any(note.startswith("1 layer of 3 makes 100%") for note in notes)
    _, findings, _ = tables(call, right, "onnxruntime", "openvino", "--shapes", "x:batchx5x4")
    assert [row["engine"] for row in findings] == ["onnxruntime", "openvino"]
    assert all(row["unmodified_error"] < 1e-6 and row["marked_error"] < 1e-6 for row in findings)


def test_invalid_input_is_refused_in_one_line(refused: Any, net: str, call: Any) -> None:
    assert refused("diff", net, "--layers", *SIZE).startswith("nothing to compare the layers with: give a form")
    assert refused("diff", net, "onnx", "--top", "2", *SIZE) == "--top is for --layers; add that, or omit it"
    assert refused("diff", net, "onnx", "--layers", "--compared", "0") == "compared is 0; it must be at least 1"
    assert refused("diff", net, "onnx", "--layers", "--order", "eror") == "unknown order 'eror'; did you mean 'error'?"
    assert refused("diff", net, "--layers", "--backend", "openvino").startswith("--layers takes no --backend; give")
    assert refused("diff", net, "onnx", "--layers", "--out", "r") == "--layers keeps no run folder; omit --out"
    assert refused("diff", net, "tensorrt", "--layers").startswith("tensorrt runs no parts of a graph")
    said = refused("diff", "net.py:script", "onnx", "--layers", *SIZE)
    assert "is TorchScript, whose modules can't be watched" in said
    assert call("export", net, *SIZE, "-o", "n.onnx")[0] == 0 and call("export", "n.onnx", "-o", "n.xml")[0] == 0
    assert refused("diff", "n.onnx", "n.xml", "--layers").startswith("n.xml is not an ONNX graph; give the ONNX file")
    Path("n.tflite").write_bytes(b"TFL3")
    assert refused("diff", "n.tflite", "n.onnx", "--layers").startswith("litert runs no parts of a graph")
    assert refused("diff", "n.onnx", "none.onnx", "--layers") == "there is no model file none.onnx"
    assert refused("diff", "n.onnx", "onnx", "--layers", "--rtol", "-1") == "rtol is -1.0; it must be at least 0"
    model = onnx.load("n.onnx")
    onnx.save(model, "far.onnx", save_as_external_data=True, location="far.data", size_threshold=0)
    Path("far.data").unlink()
    assert "far.data, which doesn't exist" in refused("diff", "n.onnx", "far.onnx", "--layers", "--size", "16")


def test_layers_are_compared_from_python(net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = dyno.diff_layers(net, "onnxruntime", sizes=("16",), channels=1, compared=2, top=1)
    assert isinstance(found, dyno.LayerAgreement) and found.close > 0.99 and found.compared[0].errors.runs == 2
    assert len(found.tables[0].rows) == 1 < len(found.to_pandas())  # of the table all layers
    refuses("top is -1", dyno.diff_layers, net, "onnxruntime", top=-1)


def test_a_module_in_memory_is_compared_by_submodule_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import nn

    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    found = dyno.diff_layers((net, torch.randn(1, 3, 8, 8)), "onnxruntime", compared=2)
    assert [*found.to_pandas()["modules"]] == ["0", "1", "2", "3"] and found.close > 0.99


def test_sequences_of_tensors_are_skipped(call: Any) -> None:
    onnx_text.write("seq.onnx", """(float[3, 4] x) => (float[3, 4] y) {
        [split] rows = SplitToSequence<axis = 0>(x)
        [concat] again = ConcatFromSequence<axis = 0>(rows)
        [relu] y = Relu(again)
    }""")  # fmt: skip
    rows, _, notes = tables(call, "seq.onnx", "onnxruntime")
    assert [row["layer"] for row in rows] == ["concat", "relu"] and any("outputs agree" in note for note in notes)


def test_forms_refused_by_a_library_are_left_out(call: Any, half_known: Path) -> None:
    code, out, err = call("diff", half_known, "openvino", "onnxruntime", "--layers", "--format", "json")
    assert code == 3 and "dyno: left out: half openvino fp32: " in err and "OpenVINO doesn't support Det-17" in err
    (finding,) = json.loads(out)["tables"]["layer-findings"]["rows"]
    assert finding["engine"] == "onnxruntime" and finding["close"] == 100
    code, out, err = call("diff", half_known, "openvino", "--layers")
    assert (code, out) == (2, "") and "dyno: half openvino fp32: " in err.splitlines()[-1]


def test_a_module_is_compared_with_a_graph(refused: Any, net: str) -> None:
    for other in "pytorch", net.replace(":net", ":text"):
        assert "is a PyTorch module, not a graph" in refused("diff", net, other, "--layers")
