"""Dyno without extras, as in a bare wheel: no command ends in a traceback, and hints name the extra."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preloaded as forked
from dyno.worker import extras
from dyno.worker.spec import Unavailable

HIDE = """
import importlib.metadata as metadata, sys
HIDDEN = {hidden!r}
NAMES = {names!r}
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hider())
found = metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name in NAMES:
        raise metadata.PackageNotFoundError(name)
    return found(cls, name)
metadata.Distribution.from_name = classmethod(from_name)
"""
IMPORTS = {name.replace("-", "_") for name in extras.EXTRAS} | set(extras.IMPORT_NAMES)


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[forked.Server]:
    """Fork server for processes without any extra."""
    folder = tmp_path_factory.mktemp("hidden")
    hidden = IMPORTS | {"torch_tensorrt", "tensorrt", "skimage"}
    names = set(extras.EXTRAS) | {"torch_tensorrt", "tensorrt", "scikit-image"}
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden, names=names))
    libraries = ("numpy", "pandas", "scipy.stats", "dyno.cli.app", "dyno.cli.commands", "dyno.worker.main")
    server = forked.Server(libraries, {"PYTHONPATH": f"{folder}{os.pathsep}{root / 'src'}"})
    yield server
    server.stop()


@pytest.fixture
def bare(tmp_path: Path, nothing: forked.Server) -> Any:
    """Run a command, and its jobs, in processes without any extra."""
    env = {**os.environ, "PYTHONPATH": nothing.env["PYTHONPATH"], "DYNO_CACHE": str(tmp_path / "cache")}
    return lambda *words: forked.command(nothing.path, [*map(str, words)], tmp_path, env, 1200)


def test_every_extra_is_in_the_table(root: Path) -> None:
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert known["onnx"].pop(0) == "inference-dyno[onnx_files]"
    known["onnx"] += known["onnx_files"]
    for extra, needed in known.items():
        if extra not in ("all", "dev", "docs", "onnx_files"):
            names = {re.split(r"[<>=\\[]", each)[0] for each in needed}
            assert names - {"cuda-bindings"} == {name for name, own in extras.EXTRAS.items() if own == extra}, extra


@pytest.mark.parametrize(
    ("libraries", "present", "line"),
    [
        (["PIL"], {"torch": "2.8.0"}, "pip install 'inference-dyno[data]'"),
        (["torch", "sklearn.datasets", "torchvision"], {}, "pip install 'inference-dyno[data,torch]'"),
        (["torchvision"], {"torch": "2.8.0+cpu"}, "pip install 'inference-dyno[torch]' torch==2.8.0"),
        (["ultralytics"], {"torch": "2.8.0"}, "pip install 'inference-dyno[ultralytics]' torch==2.8.0"),
        (["torch_tensorrt"], {"torch": "2.8.0"}, "pip install torch_tensorrt torch==2.8.0"),
        (["onnx"], {"onnxruntime": "1.23.0"}, "pip install 'inference-dyno[onnx]'"),
        (["onnx"], {"onnxruntime-gpu": "1.23.0", "torch": "2.8.0"}, "pip install 'inference-dyno[onnx_files]'"),
        (["nvidia-modelopt"], {}, "pip install nvidia-modelopt"),
        (["tensorrt_rtx"], {}, "pip install 'inference-dyno[tensorrt_rtx]'"),
    ],
)
def test_install_commands_replace_no_engine(
    libraries: list[str], present: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_versions", lambda names: present)
    assert extras.install(*libraries) == line


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("uv-receipt.toml", "uv pip install --python {} 'inference-dyno[onnx]'"),
        ("pipx_metadata.json", "pipx inject tool 'inference-dyno[onnx]'"),
    ],
)
def test_install_commands_target_a_tools_environment(
    file: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "it's" / "tool"
    tool.mkdir(parents=True)
    (tool / file).touch()
    monkeypatch.setattr("sys.prefix", str(tool))
    assert extras.install("onnx") == line.format(shlex.quote(str(tool)))


def test_missing_libraries_are_listed() -> None:
    assert extras.name_lacking(["jinja2"]).startswith("this needs jinja2, not")
    assert extras.name_lacking(["torch", "sklearn"]).startswith("this needs torch and scikit-learn, not")
    assert extras.name_lacking(["torch", "torchvision", "sklearn"]).startswith(
        "this needs torch, torchvision and scikit-learn"
    )


def test_broken_libraries_are_named_with_the_feature_that_needs_them(importable: Any) -> None:
    importable("brokenlib", "raise RuntimeError('it finds no card\\nand goes on')")
    said = r"^video needs brokenlib, which can't be imported \(it finds no card\); pip install brokenlib$"
    with pytest.raises(Unavailable, match=said):
        extras.load_library("brokenlib", "video")


def test_a_library_blocked_by_a_system_limit_is_not_reinstalled(importable: Any) -> None:
    reason = "libbroken.so: failed to map segment from shared object"
    importable("mappedlib", f"raise ImportError('{reason}')")
    with pytest.raises(Unavailable, match=rf"^mappedlib can't be imported \({reason}\); allow more memory \(ulimit"):
        extras.load_library("mappedlib")
    importable("noexeclib", f"raise ImportError('{reason}: Operation not permitted')")
    with pytest.raises(Unavailable, match=r"; its file system is mounted noexec: install it on another$"):
        extras.load_library("noexeclib")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["report", "{golden}", "-o", "page"], "report"),
        (["demo"], "data,onnx,openvino,report,torch"),
        (["run", "torchvision:resnet18"], "onnx,openvino,torch"),
        (["run", "torchvision:resnet18", "--backend", "pytorch"], "torch"),
        (["run", "timm:resnet18", "--backend", "pytorch"], "torch"),
        (["run", "m.onnx", "--backend", "onnxruntime"], "onnx"),
        (["run", "m.xml", "--backend", "openvino"], "openvino"),
        (["run", "fake:n", "--channels", "1", "--backend", "fake", "--data", "digits"], "data"),
        (["run", "fake:n", "--backend", "fake", "--data", "photos"], "data"),
        (["export", "torchvision:resnet18", "-o", "r.onnx"], "torch"),
        (["export", "m.onnx", "-o", "m2.xml"], "openvino"),
        (["time", "m.onnx"], "onnx"),
        (["explain", "m.onnx", "onnxruntime", "openvino", "--save", "w.svg"], "report"),
        (["inspect", "m.onnx", "--format", "html"], "report"),
        (["profile", "m.onnx", "--roofline", "--save", "r.roofline.svg"], "report"),
        (["diff", "m.onnx", "torchvision:resnet18"], "onnx"),
        (["eval", "torchvision:resnet18", "--data", "photos"], "torch"),
        (["data", "train", "digits", "--model", "torchvision:resnet18"], "torch"),
        (["data", "imagenet-val", "flat", "-o", "sorted"], "torch"),
        (["export", "{golden}", "pytorch"], "torch"),
    ],
)
def test_a_missing_library_is_reported_in_one_line_with_its_extra(
    bare: Any, root: Path, tmp_path: Path, words: list[str], extra: str
) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not looked at: there is nothing to read it with")
    (tmp_path / "m.xml").write_text("<net/>")
    (tmp_path / "m.bin").write_text("")
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(4):
            (tmp_path / "photos" / name / f"{k}.png").write_bytes(bytes([k]))
    (tmp_path / "flat").mkdir()
    for k in range(3):
        (tmp_path / "flat" / f"ILSVRC2012_val_0000000{k + 1}.JPEG").write_bytes(bytes([k]))
    done = bare(*(word.format(golden=root / "tests/golden/run") for word in words))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("dyno: ")
    assert f"pip install 'inference-dyno[{extra}]'" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "page").exists()


def test_commands_without_extras_work(bare: Any, root: Path, tmp_path: Path) -> None:
    golden = root / "tests/golden/run"
    for words in (["show", golden], ["show", golden, "--table", "all"], ["compare", golden, golden], ["--help"]):
        done = bare(*words)
        assert done.returncode == 0 and "Traceback" not in done.stderr and done.stdout, done.stderr
    done = bare(
        "run", "fake:net", "--channels", "1", "--backend", "fake", "--rounds", "1", "--seconds", "0.05", "--out", "r"
    )
    assert done.returncode == 0, done.stderr
    assert (
        "no report: this needs jinja2 and matplotlib, not installed here; pip install 'inference-dyno[report]'"
        in done.stdout
    )
    assert not (tmp_path / "r/charts").exists()


def test_doctor_names_an_extra_for_each_backend(bare: Any) -> None:
    done = bare("doctor", "--format", "csv")
    assert done.returncode == 3 and "Traceback" not in done.stdout + done.stderr
    rows = {line.partition(",")[0]: line for line in done.stdout.splitlines()}
    for name, extra in (("pytorch", "torch"), ("onnxruntime", "onnx"), ("openvino", "openvino")):
        assert f"pip install 'inference-dyno[{extra}]'" in rows[name]
    text = " ".join(bare("doctor").stdout.split())
    assert "libraries here: none" in text and "not installed: torch, torchvision, timm" in text
    assert "pip install 'inference-dyno[data,onnx,openvino,report,torch,video]'" in text
