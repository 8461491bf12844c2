"""Backends are found by name, or brought along as `module:Class`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dyno.worker import backends, registry
from dyno.worker.backend import Backend, FileFormat, Maker, Session
from dyno.worker.registry import find, names
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial, UserError

TRIAL = Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(1, 4, 4))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_backend_is_found_by_its_name() -> None:
    found = names()
    assert found == sorted(found)
    assert {"onnxruntime", "openvino", "pytorch"} <= set(found)
    assert not any(name.startswith("fake") for name in found)
    for name in found:
        made = find(name)
        assert made.name == name
        assert made.precisions and made.devices and made.requires


def test_makers_are_found_and_not_listed() -> None:
    for step in ("onnx_export", "onnx_precision", "openvino"):
        assert registry.maker(step).name == step
    with pytest.raises(UserError, match="unknown backend 'onnx_export'"):
        find("onnx_export")


def test_a_new_file_is_a_new_backend(tmp_path: Path) -> None:
    """No registry: one more file in the folder, and the name is known."""
    (tmp_path / "brand_new.py").write_text(
        "from dyno.worker.backends.fake import Fake\nclass New(Fake):\n    name = 'brandnew'\nNEW = New()\n"
    )
    code = (
        f"from dyno.worker import backends; backends.__path__.append({str(tmp_path)!r})\n"
        "from dyno.worker.registry import names, find; print('brandnew' in names(), find('brandnew').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.stdout.split() == ["True", "brandnew"], done.stderr
    assert str(tmp_path) not in backends.__path__


@pytest.mark.parametrize(("wrong", "near"), [("onnxruntme", "onnxruntime"), ("openvno", "openvino")])
def test_the_nearest_spelling_is_told(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"^unknown backend '{wrong}'; did you mean '{near}'\?$"):
        find(wrong)


def test_without_a_near_one_all_are_told() -> None:
    with pytest.raises(UserError, match=rf"^unknown backend 'zzz'; known: {', '.join(names())}$"):
        find("zzz")


def test_a_class_from_outside(on_path: Path) -> None:
    (on_path / "brought.py").write_text(
        "from dyno.worker.backends.fake import Fake\nclass Mine(Fake):\n    name = 'mine'\nOWN = Mine()\n"
    )
    assert find("brought:Mine").name == "mine"
    assert find("brought:Mine").refuse(TRIAL) == ""
    assert find("brought:OWN").name == "mine"


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("no_such_module_at_all:X", None, "No module named 'no_such_module_at_all'"),
        ("broken_a:X", "x = 1", "has no attribute 'X'"),
        ("broken_b:X", "def f(:", "invalid syntax"),
        ("broken_c:X", "raise RuntimeError('licence expired')", "licence expired"),
        ("broken_d:X", "class X:\n    def __init__(self, n): pass", "missing 1 required positional argument"),
        ("broken_e:X", "class X: pass", r"'broken_e:X' is not a dyno\.worker\.backend\.Backend"),
        ("broken_f:X", "X = 5", "is not a dyno"),
        ("broken_g:X", "class X:\n    def __init__(self): raise ValueError('a\\nb')", "can't be loaded: a$"),
    ],
)
def test_a_broken_one_from_outside_is_the_user_s_error(on_path: Path, name: str, code: str | None, reason: str) -> None:
    if code is not None:
        (on_path / f"{name[:-2]}.py").write_text(code)
    with pytest.raises(UserError, match=reason) as caught:
        find(name)
    assert "\n" not in str(caught.value)


def test_refusals_name_what_there_is() -> None:
    fake = find("fake")
    assert fake.refuse(TRIAL) == ""
    assert fake.refuse(replace(TRIAL, precision="fp8")) == "fake has no fp8 here (it has fp32, fp16, int8)"
    assert fake.refuse(replace(TRIAL, precision="tf32")) == "tf32 is a mode of NVIDIA GPUs; a CPU has none"
    assert (
        find("pytorch").refuse(replace(TRIAL, precision="int8")) == "pytorch has no int8 here (it has fp32, fp16, bf16)"
    )
    assert fake.refuse(replace(TRIAL, runtime=Runtime(device="cuda:1"))) == "fake can't run on cuda:1 (it runs on cpu)"


def test_what_a_backend_must_offer() -> None:
    for kind in (Backend, Maker, FileFormat, Session):
        with pytest.raises(TypeError, match="abstract"):
            kind()
