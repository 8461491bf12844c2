"""`dyno profile`: times by module name, a planted slow layer on top, and never a latency."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import dyno
import onnx_text
from dyno.layers import forms
from dyno.runner.device_lock import launch_in_turn
from dyno.study import defaults
from dyno.worker.spec import Job

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

QUICK = ("--runs", 10, "--seconds", 0.03, "--warmup", 0.02)
ENGINES = ("onnxruntime", "openvino")
# `slow` has five hundred times the operations of all others together.
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
        self.slow = nn.Conv2d(8, 8, 25, padding=12)
        self.last = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    def forward(self, x): return self.last(self.slow(self.first(x)))

def net(): return Net()
def script(): return torch.jit.script(Net())
"""


def tables(call: Any, *words: object) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the layers' rows by form, and one summary row per form."""
    _, out, _ = call("profile", *words, *QUICK, "--format", "json", code=0)
    found = json.loads(out)["tables"]
    by_form: dict[str, list[dict[str, Any]]] = {}
    for row in found["profile"]["rows"]:
        by_form.setdefault(row["form"].split(" ")[0], []).append(row)
    return by_form, found["reconciliation"]["rows"]


@pytest.mark.parametrize(
    ("model", "size"), [("torchvision:resnet18", 64), ("timm:test_vit", 160)], ids=["resnet", "vit"]
)
def test_all_engine_layers_have_times_and_module_names(call: Any, model: str, size: int) -> None:
    library, _, name = model.partition(":")
    library_module = pytest.importorskip(library)
    built = library_module.create_model(name) if library == "timm" else library_module.models.get_model(name)
    parts = {"(model)", *(part for part, _ in built.named_modules())}
    products = {part for part, each in built.named_modules() if isinstance(each, (torch.nn.Conv2d, torch.nn.Linear))}
    by_form, lines = tables(call, model, *ENGINES, "--size", size, "--top", 0)
    assert list(by_form) == ["PyTorch", "ONNX", "OpenVINO"]
    for form, rows in by_form.items():
        assert sum(row["share"] for row in rows) == pytest.approx(100)
        assert rows[-1]["cumulative"] == pytest.approx(100)
        times = [row["time_us"] for row in rows]
        assert times == sorted(times, reverse=True) and times[0] > 0
        named = [set((row["modules"] or "").split()) for row in rows if not row["remark"]]
        assert all(names and names <= parts for names in named), (form, named)
        assert products <= set().union(*named), form
        assert all(row["time_us"] > 0 for row in rows if products & set((row["modules"] or "").split()))
    assert [line["remainder_ms"] for line in lines] == pytest.approx(
        [line["unprofiled_ms"] - line["layers_ms"] for line in lines]
    )
    sums = [sum(row["time_us"] for row in rows) / 1e3 for rows in by_form.values()]
    assert [line["layers_ms"] for line in lines] == pytest.approx(sums)


def test_the_slowest_layer_is_first_and_the_rest_is_one_row(call: Any, net: str) -> None:
    by_form, _ = tables(call, net, *ENGINES, "--size", 32, "--top", 2)
    for form, rows in by_form.items():
        assert rows[0]["modules"].split()[0] == "slow" and rows[0]["share"] > 50, form
        assert len(rows) == 3 and rows[2]["modules"].endswith("more layers") and rows[2]["type"] is None
        assert rows[2]["cumulative"] == pytest.approx(100) and rows[2]["time_us"] > 0


def test_layers_are_listed_in_graph_order(call: Any, net: str) -> None:
    by_form, _ = tables(call, net, "--size", 32, "--order", "graph", "--top", 0)
    assert [row["modules"] for row in by_form["PyTorch"]] == [
        "first.0", "first.1", "slow", "last.0", "last.1", "last.2", "last.3", "last.4", "(model)",
    ]  # fmt: skip


def test_a_file_runs_in_its_default_backend_with_its_own_names(call: Any, net: str, tmp_path: Path) -> None:
    assert call("export", net, "--size", "32", "-o", "n.onnx")[0] == 0
    alone, _ = tables(call, "n.onnx")
    asked, _ = tables(call, "n.onnx", "openvino")
    assert list(alone) == ["ONNX"] and list(asked) == ["OpenVINO"]
    (tmp_path / "copy.onnx").write_bytes((tmp_path / "n.onnx").read_bytes())
    _, lines = tables(call, "n.onnx", "copy.onnx", "n.onnx")
    assert [line["form"].partition(", ")[2] for line in lines] == ["n.onnx", "copy.onnx", "n.onnx (2)"]
    assert alone["ONNX"][0]["modules"] == asked["OpenVINO"][0]["modules"] == "slow"


def test_unnamed_nodes_have_times(call: Any, tmp_path: Path) -> None:
    model = onnx_text.model("""(float[8, 8] x, bool yes) => (float[8, 8] y) {
        a = Erf(x)
        turned = Transpose<perm = [1, 0]>(a)
        b = Cos(turned)
        c = If<then_branch = then () => (float[8, 8] then) { then = Erf(a) },
               else_branch = else () => (float[8, 8] else) { else = Erf(a) }>(yes)
        d = Atan(c)
        y = Add(b, d)
    }""")  # fmt: skip
    onnx.save(model, tmp_path / "net.onnx")
    by_form, _ = tables(call, "net.onnx", "--top", 0, "--order", "graph")
    types = [node.op_type for node in model.graph.node]
    assert sorted(row["type"] for row in by_form["ONNX"]) == sorted(types)
    assert not any(row["remark"] for row in by_form["ONNX"])  # the Transpose is part of the model
    code, out, err = call("inspect", "net.onnx", "onnxruntime")
    assert code == 0 and "ONNX Runtime" in out and "6 layers." in out, err


def test_an_engine_s_python_needs_no_onnx(
    call: Any, net: str, other_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT's Python lacks onnx; ONNX Runtime's needs it to list layers, so the engine's job runs in this Python."""
    readers = []

    def launch(job: Job, *rest: Any) -> Any:
        assert job.trial is not None
        if job.trial.backend:
            assert job.trial.backend == "pytorch" or job.runtime.python == other_python
            return launch_in_turn(replace(job, runtime=replace(job.runtime, python="")), *rest)
        readers.append(job.runtime.python)
        return launch_in_turn(job, *rest)

    monkeypatch.setattr(forms, "launch_in_turn", launch)
    tables(call, net, "onnxruntime", "--size", 32, "--python", f"onnxruntime={other_python}")
    assert readers == [""]


def test_profile_records_have_no_latency(net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = dyno.profile(net, "openvino", sizes=("32",), runs=7, seconds=0.03, warmup=0.02)
    assert len(found.records) == len(found.times) == 2
    for record, times in zip(found.records, found.times.values(), strict=True):
        assert {m.tag for m in record.measurements} == {"load", "first_call", "unprofiled", "profiled", "layers"}
        assert len(times.unprofiled) >= 3 and times.unprofiled.min() > 0
    torch_times, openvino_times = found.times.values()
    assert torch_times.layers.shape == (7, 9) and len(torch_times.profiled) == 7
    assert len(openvino_times.layers) == 5 and len(openvino_times.profiled) == 10  # the same number per compilation
    # A part without a row counts for its parent: the layers cover the whole call.
    assert (torch_times.layers.sum(axis=1) <= torch_times.profiled).all()
    frame = found.to_pandas()
    assert frame["share"].sum() == pytest.approx(200) and frame["modules"].iloc[0] == "slow"


def test_backends_without_layer_times_are_refused_in_one_line(
    refused: Any, net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = (
        "these report layer times: onnxruntime (cpu), openvino (cpu), pytorch (cpu, cuda), tensorrt (cuda), "
        "tensorrt_rtx (cuda)"
    )
    assert refused("profile", net, "compile") == f"compile reports no layer times on cpu; {able}"
    assert refused("profile", net, "onnx") == f"an ONNX graph doesn't run by itself; {able}"
    assert refused("profile", net, "tensorrt") == f"tensorrt reports no layer times on cpu; {able}"
    with monkeypatch.context() as patched:
        patched.setattr(defaults, "missing_gpu", lambda device: False)
        said = refused("profile", net, "onnxruntime", "--device", "cuda:0", "--size", "32")
    assert said == f"onnxruntime reports no layer times on cuda; {able}"
    assert refused("profile", net, "opnvino") == "unknown form 'opnvino'; did you mean 'openvino'?"
    assert refused("profile", net, "--order", "tme") == "unknown order 'tme'; did you mean 'time'?"
    assert refused("profile", net, "--runs", "4") == "runs is 4; it must be at least 5"
    assert refused("profile", net, "--batch", "0") == "batch is 0; it must be at least 1"
    said = refused("profile", "net.py:script", "--size", "32", *QUICK)
    assert "it is TorchScript, whose modules can't be watched" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["profile", "inspect"])
def test_a_missing_gpu_is_reported_in_one_line(
    call: Any, refused: Any, net: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    form = () if command == "profile" else ("onnxruntime",)
    asked = (command, net, *form, "--device", "cuda:0", "--size", "32")
    assert refused(*asked).startswith("there is no cuda:0 here")
    assert call("inspect", net, "onnx", "--size", "32")[0] == 0  # the export runs on the CPU
    monkeypatch.setattr(defaults, "missing_gpu", lambda device: False)  # as for a GPU that disappears meanwhile
    code, _, said = call(*asked)
    assert code == (2 if command == "profile" else 3) and "net" in said.splitlines()[-1]
    assert "no CUDA device" in said or "no NVIDIA driver" in said, said


def test_profiles_include_the_roofline(call: Any, refused: Any, net: str, tmp_path: Path) -> None:
    assert refused("profile", net, "--save", "n.svg") == "n.svg needs the device's ceilings; add --roofline"
    assert refused("profile", net, "--data-sheet", "fp32=1").endswith("add --roofline")
    words = ("profile", net, "onnxruntime", "--size", 32, "--top", 0, "--roofline", "--data-sheet", "fp32=1000",
             "--save", "n.svg", "--save", "n.png")  # fmt: skip
    _, out, _ = call(*words, *QUICK, "--format", "json", code=0)
    found = json.loads(out)["tables"]
    ceilings = {row["ceiling"]: row for row in found["ceilings"]["rows"]}
    product, copy = ceilings["matrix product, fp32"]["tflops"], ceilings["copy, read and written"]["gb_s"]
    assert product > 0 and copy > 0
    slow = [row for row in found["profile"]["rows"] if row["modules"] == "slow"]
    assert len(slow) == 2
    flops = 2 * 8 * 8 * 25 * 25 * 32 * 32
    for row in slow:
        assert row["tflops"] == pytest.approx(flops / (row["time_us"] * 1e-6) / 1e12)
        assert row["reached"] == pytest.approx(100 * row["tflops"] / product)
        assert row["bound"] == ("arithmetic" if row["reached"] >= 50 else "neither")
        assert bool(row.get("above")) == (row["reached"] > 100)
    for line in found["reconciliation"]["rows"]:
        assert line["tflops"] > 0 and line["reached"] == pytest.approx(100 * line["roof_ms"] / line["unprofiled_ms"])
    assert ceilings["matrix product, fp32"]["of_sheet"] == pytest.approx(product / 10)
    assert (tmp_path / "n.svg").read_text(encoding="utf-8").startswith("<svg")
    assert (tmp_path / "n.png").read_bytes().startswith(b"\x89PNG")


def test_forms_refused_by_a_library_are_left_out(call: Any, half_known: Path) -> None:
    code, out, err = call("profile", half_known, "openvino", "onnxruntime", *QUICK, "--format", "json")
    assert code == 3 and "dyno: left out: half openvino fp32: " in err and "OpenVINO doesn't support Det-17" in err
    (row,) = json.loads(out)["tables"]["reconciliation"]["rows"]
    assert row["form"].startswith("ONNX Runtime")
    code, out, err = call("profile", half_known, "openvino/fp8", *QUICK)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("dyno: half openvino fp8: openvino has no fp8")
