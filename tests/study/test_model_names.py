"""Tests of model sources: their names, and what is answered where one is unclear."""

from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.runner.run_folder import folder_name
from dyno.study import model_names
from dyno.study.model_names import model_name

NET = """
import torch

def build(width, depth=1): return torch.nn.Sequential(*[torch.nn.Conv2d(3, width, 3) for _ in range(depth)])
def other(): return torch.nn.ReLU()

def _hidden():
    ...
"""
LIBRARIES = {"torchvision": {"both", "one"}, "timm": {"both", "vit_small"}}


def test_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    monkeypatch.chdir(tmp_path)
    assert model_name(".") == model_name("hf:.") == tmp_path.name
    assert model_name("torchvision:resnet18") == "resnet18"
    assert model_name("a/b.c/net.onnx") == "net"
    names = {
        ("timm:a", "m.onnx"): "a-m", ("net.py:build",): "net", ("x/other.py:f",): "other-f",
        ("net.py:build(width=8)",): "net-width=8",
        ("dyno.worker.nets.digits:resnet18",): "digits-resnet18", ("net.py:net",): "net", ("fake:[/x] y",): "x-y",
        ("ultralytics:yolov8n.yaml",): "yolov8n", ("fake:" + "x" * 300,): "x" * 80, ("fake:..",): "model",
    }  # fmt: skip
    assert {models: folder_name(models) for models in names} == names


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "list_names", lambda library: frozenset(LIBRARIES[library]))


@pytest.mark.usefixtures("libraries")
def test_a_network_in_only_one_library_needs_no_prefix(refused: Any, tmp_path: Path) -> None:
    assert Study(models=["one", "vit_small"]).models == ("torchvision:one", "timm:vit_small")
    assert Study(models="both").models == ("both",), "which is refused when it is looked at"
    (tmp_path / "one").mkdir()
    assert Study(models="one").models == ("one",)


def test_library_model_names_match_the_library() -> None:
    torchvision = pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    listed = {name for name in torchvision.models.list_models() if "quantized" not in name}
    assert model_names.list_names("torchvision") >= listed
    assert model_names.list_names("timm") >= set(timm.list_models())
    assert model_names.find_libraries("resnet18") == ["torchvision", "timm"]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("resnet18", "torchvision and timm each have a model resnet18; give torchvision:resnet18 or timm:resnet18"),
        ("mobilenet_v3_smal", "there is no model 'mobilenet_v3_smal'; did you mean torchvision:mobilenet_v3_small?"),
        ("qqqqq", "there is no file or folder qqqqq; give a model such as torchvision:resnet18"),
        ("yolov8n.pt", "there is no such file: yolov8n.pt"),
        ("none.py", "there is no Python file none.py"),
        (
            "net.py",
            "give one of the functions of net.py, which returns the module: net.py:build(width=…), net.py:other",
        ),
        ("empty.py", "empty.py has no function; write one that returns the module, and give empty.py:FUNCTION"),
        (
            "net.py:build",
            "net: net.py:build is missing a required argument: 'width'; give it, e.g. net.py:build(width=16)",
        ),
        ("net.py:build(wide=8)", "net(wide=8): net.py:build is missing a required argument: 'width'"),
        (
            "net.py:build(8)",
            "net(8): 'build(8)' is not FUNCTION(NAME=VALUE, …) with plain values, such as build(width=16)",
        ),
        ("net.py:build(width=open)", "net(width=open): 'build(width=open)' is not FUNCTION(NAME=VALUE, …)"),
    ],
)
def test_an_ambiguous_model_gets_advice(refused: Any, tmp_path: Path, source: str, line: str) -> None:
    pytest.importorskip("timm")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert refused("run", source, "--backend", "pytorch", "--dry-run").startswith(line)


def test_model_functions_take_arguments(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(NET)
    words = ("net.py:build(width=4)", "net.py:build(width=4, depth=1)", "--backend", "torch", "--size", 8, "--dry-run")
    out = call("run", *words, code=0)[1]
    assert "net(width=4)" in out and "net(width=4, depth=1)" in out and "2 trials, 0 refused" in out


def test_generic_function_names_are_replaced_by_the_file_name() -> None:
    names = ("net.py:build", "a/net.py:make_model(n=1)", "package.nets:model", "net.py:small", "torchvision:resnet18")
    assert [*map(model_name, names)] == ["net", "net(n=1)", "nets", "small", "resnet18"]
