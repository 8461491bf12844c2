"""Names as users write them, of backends, precisions, settings and networks, and the answer to an unclear one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dyno
from dyno import Study, UserError
from dyno.study import library_names
from dyno.study.study import model_name

NET = """
import torch

def build(width, depth=1):
    return torch.nn.Sequential(*[torch.nn.Conv2d(3, width, 3) for _ in range(depth)])

def other():
    return torch.nn.ReLU()

def _hidden():
    ...
"""
LIBRARIES = {"torchvision": {"both", "one"}, "timm": {"both", "vit_small"}}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_names, "list_names", lambda library: frozenset(LIBRARIES[library]))


def test_usual_names_of_backends_and_precisions_are_known() -> None:
    study = Study(models="fake:n", backends=["ort@threads=2", "trt@precision=half+fp32", "fake"], precisions="float16")
    assert study.backends == ("onnxruntime@threads=2", "tensorrt@precision=fp16+fp32", "fake")
    assert study.precisions == ("fp16",)


def test_one_value_has_the_name_of_one_in_python() -> None:
    study = Study(model="fake:n", backend="torch", precision="half", batch=8, size=32)
    assert study == Study(models="fake:n", backends="pytorch", precisions="fp16", batches=8, sizes=32)
    with pytest.raises(UserError, match=r"^batch and batches are one setting; give one of them$"):
        Study(models="fake:n", batch=1, batches=[2])
    with pytest.raises(UserError, match=r"unknown precision 'fp61'"):
        dyno.evaluate("fake:n", "digits", precision="fp61")


@pytest.mark.usefixtures("libraries")
def test_a_network_of_one_library_needs_no_prefix(refused: Callable[..., str], tmp_path: Path) -> None:
    assert Study(models=["one", "vit_small"]).models == ("torchvision:one", "timm:vit_small")
    assert Study(models="both").models == ("both",), "which is refused when it is looked at"
    (tmp_path / "one").mkdir()
    assert Study(models="one").models == ("one",)


def test_the_names_of_a_library_are_those_of_its_code() -> None:
    torchvision = pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    listed = {name for name in torchvision.models.list_models() if "quantized" not in name}
    assert library_names.list_names("torchvision") >= listed
    assert library_names.list_names("timm") >= set(timm.list_models())
    assert library_names.find_libraries("resnet18") == ["torchvision", "timm"]


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
def test_an_unclear_model_is_answered_with_what_to_give(
    refused: Callable[..., str], tmp_path: Path, source: str, line: str
) -> None:
    pytest.importorskip("timm")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert refused("run", source, "--backend", "pytorch", "--dry-run").startswith(line)


def test_a_function_is_called_with_arguments(call: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(NET)
    words = ("net.py:build(width=4)", "net.py:build(width=4, depth=1)", "--backend", "torch", "--size", 8, "--dry-run")
    out = call("run", *words, code=0)[1]
    assert "net(width=4)" in out and "net(width=4, depth=1)" in out and "2 trials, 0 refused" in out


def test_a_model_is_named_after_its_file_where_the_function_says_nothing() -> None:
    names = ("net.py:build", "a/net.py:make_model(n=1)", "package.nets:model", "net.py:small", "torchvision:resnet18")
    assert [*map(model_name, names)] == ["net", "net(n=1)", "nets", "small", "resnet18"]
