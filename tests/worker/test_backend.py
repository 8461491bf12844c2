"""Backends are found by name, or loaded as `module:Class`."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dyno.worker import backends, plugins, registry
from dyno.worker.backend import Backend, FileFormat, Maker, Session
from dyno.worker.option_values import Check, check_types, check_values, flag, number, one_of, whole
from dyno.worker.registry import find, list_backends
from dyno.worker.spec import Dims, ModelSpec, Option, Runtime, Trial, UserError
from refusals import refuses

TRIAL = Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(1, 4, 4))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_backend_is_found_by_its_name() -> None:
    found = list_backends()
    assert found == sorted(found)
    assert {"onnxruntime", "openvino", "pytorch"} <= set(found)
    assert not any(name.startswith("fake") for name in found)
    for name in found:
        made = find(name)
        assert made.name == name
        assert made.precisions and made.devices and made.requires


def test_makers_are_found_but_not_listed_as_backends() -> None:
    for step in ("onnx_export", "onnx_precision", "openvino"):
        assert registry.get_maker(step).name == step
    refuses("unknown backend 'onnx_export'", find, "onnx_export")


def test_a_new_file_is_a_new_backend(tmp_path: Path) -> None:
    """There is no registry: one more file in the folder makes the name known."""
    (tmp_path / "brand_new.py").write_text(
        "from dyno.worker.backends.fake import Fake\nclass New(Fake):\n    name = 'brandnew'\nNEW = New()\n"
    )
    code = (
        f"from dyno.worker import backends; backends.__path__.append({str(tmp_path)!r})\n"
        "from dyno.worker.registry import list_backends, find\n"
        "print('brandnew' in list_backends(), find('brandnew').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.stdout.split() == ["True", "brandnew"], done.stderr
    assert str(tmp_path) not in backends.__path__


@pytest.mark.parametrize(("wrong", "near"), [("onnxruntme", "onnxruntime"), ("openvno", "openvino")])
def test_an_unknown_backend_suggests_the_nearest_name(wrong: str, near: str) -> None:
    refuses(rf"^unknown backend '{wrong}'; did you mean '{near}'\?$", find, wrong)


def test_a_backend_with_a_precision_is_refused_with_the_two_options() -> None:
    wrong = "torchao/int8"
    refuses(f"^'{wrong}' is a backend and a precision; give --backend torchao --precision int8$", find, wrong)


def test_an_unknown_backend_without_a_near_name_lists_all() -> None:
    refuses(rf"^unknown backend 'zzz'; known: {', '.join(list_backends())}$", find, "zzz")


def test_a_backend_class_from_another_module_is_found(on_path: Path) -> None:
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
def test_a_broken_external_backend_is_a_user_error(on_path: Path, name: str, code: str | None, reason: str) -> None:
    if code is not None:
        (on_path / f"{name[:-2]}.py").write_text(code)
    refuses(reason, find, name)


def test_refusals_name_the_available_choices() -> None:
    fake = find("fake")
    assert fake.refuse(TRIAL) == ""
    assert fake.refuse(replace(TRIAL, precision="fp8")) == "fake has no fp8 here (it has fp32, fp16, int8)"
    step = "; give --precision int8"
    assert find("torchao").refuse(TRIAL) == f"torchao has no fp32 here (it has int8, fp8, int4){step}"
    assert fake.refuse(replace(TRIAL, precision="tf32")) == "tf32 is a mode of NVIDIA GPUs; a CPU has none"
    assert (
        find("pytorch").refuse(replace(TRIAL, precision="int8")) == "pytorch has no int8 here (it has fp32, fp16, bf16)"
    )
    assert fake.refuse(replace(TRIAL, runtime=Runtime(device="cuda:1"))) == "fake can't run on cuda:1 (it runs on cpu)"


def test_interfaces_are_abstract() -> None:
    for kind in (Backend, Maker, FileFormat, Session):
        with pytest.raises(TypeError, match="abstract"):
            kind()


KINDS = """
from dataclasses import dataclass
@dataclass
class Colour:
    name: str
    by: str
"""


@dataclass
class Place:
    """A package of colours, and the folder of installed distributions."""

    package: ModuleType
    kind: type
    site: Path

    def install(self, name: str, entry_points: str, code: str) -> None:
        """Install a distribution as pip does."""
        (self.site / f"{name}.py").write_text(code)
        info = self.site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[test.colours]\n{entry_points}\n")
        importlib.invalidate_caches()

    def names(self) -> dict[str, str]:
        return {
            name: colour.by for name, colour in plugins.list_declared(self.package, self.kind, "test.colours").items()
        }

    def broken(self) -> dict[str, str]:
        return plugins.list_broken("test.colours", self.kind)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    package = tmp_path / "colours"
    package.mkdir()
    (tmp_path / "colour_kind.py").write_text(KINDS)
    (package / "__init__.py").write_text("")
    (package / "warm.py").write_text("from colour_kind import Colour\nRED = Colour('red', 'own')\nOTHER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    for cached in ("_load_group", "_read_entry_points"):  # each test installs other distributions
        monkeypatch.setattr(plugins, cached, getattr(plugins, cached).__wrapped__)
    kind = importlib.import_module("colour_kind").Colour
    yield Place(importlib.import_module("colours"), kind, tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] in ("colours", "colour_kind", "shop", "bad")]:
        del sys.modules[name]


def test_objects_are_found_in_the_package_and_in_entry_points(place: Place) -> None:
    place.install(
        "shop",
        "blue = shop:BLUE\nred = shop:RED",
        "from colour_kind import Colour\nBLUE = Colour('blue', 'shop')\nRED = Colour('red', 'shop')\n",
    )
    assert place.names() == {"red": "own", "blue": "shop"}
    assert not place.broken()


def test_broken_entry_points_are_named_and_hide_no_others(place: Place) -> None:
    place.install("bad", "gone = bad:GONE\nraises = bad.no_module:X\nnumber = bad:NUMBER", "NUMBER = 5\n")
    assert place.names() == {"red": "own"}
    reasons = place.broken()
    assert reasons.keys() == {"gone", "raises", "number"}
    assert "int" in reasons["number"] and "GONE" in reasons["gone"]


EVERY = [*registry.list_backends(), "fake"]
# Free text: tactic sources by name, and an engine's hardware compatibility.
FREE = {"tactics", "hardware_compatible"}


@pytest.mark.parametrize("name", EVERY)
def test_invalid_option_values_name_the_valid_ones(name: str) -> None:
    found = registry.find(name)
    assert set(found.options) == set(found.values), "declare `values` beside `options`"
    for option in set(found.options) - FREE:
        said = found.values[option]("no such value")
        assert said and "\n" not in said, option
        refuses(f"^{option}=no such value: {name}'s {option} must be ", found.check_options, {option: "no such value"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onnxruntime", {"optimization": "basic", "spinning": False, "opset": 17, "keep": 0, "input": "uint8"}),
        ("openvino", {"streams": 2, "pinning": True, "method": "percentile", "percentile": 99.9}),
        ("compile", {"mode": "max-autotune", "freeze": False, "channels_last": True}),
        ("tensorrt", {"profile": "1:8:16|17:32:64", "optimization": 5, "hardware_compatible": True, "tactics": "none"}),
        ("tensorrt", {"profile": 8, "graph": False, "slots": 2, "route": "flags", "timing_cache": False}),
        ("tensorrt", {"profile": "x:1x3x8x8,2x3x8x8,4x3x8x8"}),
        ("torch_tensorrt", {"ir": "dynamo", "profile": "1:2:4", "optimization": 0}),
    ],
)
def test_valid_options_are_accepted(name: str, options: dict[str, Option]) -> None:
    registry.find(name).check_options(options)


@pytest.mark.parametrize(
    ("check", "value", "kind"),
    [
        (one_of("all", "basic"), "basik", "one of all, basic; did you mean basic?"),
        (flag, 1, "true or false"),
        (whole(1), 0, "a whole number of at least 1"),
        (whole(1), True, "a whole number of at least 1"),
        (whole(0, 5), 6, "a whole number from 0 to 5"),
        (whole(0, 5), 2.5, "a whole number from 0 to 5"),
        (number(50, 100), 101, "a number from 50 to 100"),
    ],
)
def test_option_checks_describe_valid_values(check: Check, value: Option, kind: str) -> None:
    with pytest.raises(UserError) as e:
        check_values("engine", {"name": value, "other": "anything"}, {"name": check})
    assert str(e.value).endswith(f"engine's name must be {kind}")


@pytest.mark.parametrize("value", [2**53, -(2**53), (1, 2**53), {"a": [2**53]}])
def test_whole_numbers_are_at_most_those_that_json_holds_exactly(value: Any) -> None:
    def more(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: more(each) for name, each in one.items()}
        return [1, *map(more, one)] if isinstance(one, (list, tuple)) else one + (1 if one > 0 else -1)

    check_types({"n": value, "other": 2**99}, {"n": Any})
    refuses("it must be at most 9,007,199,254,740,992", check_types, {"n": more(value)}, {"n": Any})
