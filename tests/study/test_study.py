"""A study from flags, TOML or Python reports its errors in one line, before anything runs."""

import dataclasses
import inspect
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dyno
from dyno import Study, UserError
from dyno.study.study import Choice, find_runtime, parse_budget, parse_size
from refusals import refuses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("onnxruntime", Choice("onnxruntime")),
        ("compile@mode=max-autotune", Choice("compile", {"mode": "max-autotune"})),
        (
            "fake@latency_ms=2.5@n=3@on=true@off=False",
            Choice("fake", {"latency_ms": 2.5, "n": 3, "on": True, "off": False}),
        ),
        ("openvino@precision=fp32+int8@runtime=old", Choice("openvino", {}, ("fp32", "int8"), "old")),
        ("mine.engine:Class@k=a=b", Choice("mine.engine:Class", {"k": "a=b"})),
    ],
)
def test_a_backend_with_options(text: str, expected: Choice) -> None:
    assert Choice.parse(text) == expected


@pytest.mark.parametrize("text", ["a@", "a@x", "a@x=", "a@=1"])
def test_a_broken_option_is_named(text: str) -> None:
    refuses("is not NAME=VALUE", Choice.parse, text)


def test_conflicting_duplicates_are_refused() -> None:
    refuses("option n is given twice in 'a@n=1@n=2'; give it once", Choice.parse, "a@n=1@n=2")
    refuses("the budget top1 is given twice, as 1 and 5; give it once", parse_budget, ["top1=1", "top1=5"])
    assert Study(models="fake:net", boundaries=("all", "model", "all")).boundaries == ("all", "model")


def test_the_study_docstring_has_every_field_unindented() -> None:
    lines = (inspect.getdoc(Study) or "").splitlines()
    assert not [line for line in lines if line.startswith(" ")]
    assert {line.partition(":")[0] for line in lines} >= {f.name for f in dataclasses.fields(Study)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"models": ()}, "no model given; name one, e.g. torchvision:resnet18"),
        ({"precisions": ("fp23",)}, "unknown precision 'fp23'; did you mean 'fp32'?"),
        ({"precisions": ("double",)}, "unknown precision 'double'; known: fp32, tf32, fp16, bf16, int8, fp8"),
        ({"backends": ("fake@precision=fp32+in8",)}, "unknown precision 'in8'; did you mean 'int8'?"),
        ({"boundaries": ("modle",)}, "unknown boundary 'modle'; did you mean 'model'?"),
        ({"budget": {"top2": 1}, "data": "d"}, "unknown budget 'top2'; did you mean 'top5'?"),
        ({"budget": {"top1": 1}}, "an accuracy budget needs labelled images; give --data"),
        ({"unreadable": "ignore"}, "unknown unreadable 'ignore'; known: refuse, skip"),
        ({"sizes": ("big",)}, "image size 'big' is not a number of pixels like 224, or HEIGHTxWIDTH like 480x640"),
        ({"sizes": (0,)}, "image size '0' is not a number"),
        ({"sizes": ("480x",)}, "image size '480x' is not a number"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"classes": -1}, "classes is -1; it must be at least 1"),
        ({"seconds": math.nan}, "seconds is nan; it must be more than 0"),
        ({"seconds": math.inf}, "seconds is inf; it must be more than 0 and at most 1,000,000,000"),
        ({"mean": (0.5,) * 3, "std": (0.0,) * 3}, "std is 0.0, 0.0, 0.0; pixels are divided by it"),
        ({"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}, "mean is 123.7, 116.3, 103.5; pixels are 0 to 1"),
        ({"mean": (0.0,), "std": (255.0,)}, "std is 255.0; pixels are 0 to 1, so divide mean and std by 255"),
        ({"mean": (math.nan,), "std": (1.0,)}, "mean is nan; pixels are 0 to 1"),
        ({"budget": {"top1": math.nan}, "data": "d"}, "budget top1=nan must be between 0 and 100 points"),
        ({"budget": {"top1": -1.0}, "data": "d"}, "budget top1=-1 must be between 0 and 100 points"),
        ({"batches": (0,)}, "batch sizes must be whole numbers of at least 1, not 0"),
        ({"batches": ("8",)}, "batches is '8'; it must be a whole number, or a list of such"),
        ({"batches": (True,)}, "batches is True; it must be"),
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"rounds": "3"}, "rounds is '3'; it must be a whole number"),
        ({"threads": -1}, "threads is -1; it must be at least 0"),
        ({"seconds": 0}, "seconds is 0; it must be more than 0"),
        ({"timeout": -5.0}, "timeout is -5.0; it must be more than 0"),
        ({"models": (3,)}, "models is 3; it must be text, or a list of such"),
        ({"device": list(range(99))}, "device is a value of type list; it must be text"),
        ({"channels": "a"}, "channels is 'a'; it must be a whole number"),
        ({"pretrained": "yes"}, "pretrained is 'yes'; it must be true or false"),
        ({"budget": 5}, "budget is 5; it must be a table of: a number"),
        ({"runtime": {"fake": {"env": "A=1"}}}, "runtime 'fake' needs a path as python and a table as env"),
        ({"runtime": {"fake": {"environment": {"A": "1"}}}}, "unknown key of runtime 'fake' 'environment'"),
        ({"baseline": "fake/fp32"}, "baseline is 'fake/fp32'; it must be a table of: any value"),
        ({"runtime": {"fake": "python3"}}, "runtime is {'fake': 'python3'}; it must be a table of: a table of"),
    ],
)
def test_invalid_fields_are_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Study(**{"models": ("fake:net",), **fields})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_numpy_numbers_are_accepted() -> None:
    """A study file can hold them, although the `repr` of NumPy's isn't TOML."""
    fields: dict[str, Any] = {
        "batches": np.array([1, 8]), "rounds": np.int64(3), "seconds": np.float64(0.5), "turns": np.bool_(False),
        "warmup": np.float32(0.5), "sizes": [np.int64(64)], "budget": {"top1": np.float64(1)},
    }  # fmt: skip
    study = Study(models="fake:net", data=Path("d"), **fields)
    assert (study.batches, study.rounds, study.seconds, study.turns) == ((1, 8), 3, 0.5, False)
    assert Study(**tomllib.loads(study.to_toml())) == study


TABLE = """
models = ["torchvision:resnet18", "m.onnx"]
backends = ["onnxruntime", "openvino@precision=int8"]
precisions = ["fp32", "int8"]
batches = [1, 8]
sizes = [224, "480x640"]
data = "images"
rounds = 5
seconds = 1

[budget]
top1 = 0.5

[runtime.old]
python = "/opt/python3.10"
env = { LD_LIBRARY_PATH = "/opt/lib" }
"""


def test_toml_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(TABLE)
    study = Study.from_toml(tmp_path / "s.toml", rounds=2)
    assert study.sizes == ("224", "480x640") and study.batches == (1, 8)
    assert study.budget == {"top1": 0.5}
    assert study.rounds == 2, "a flag wins over the file"
    assert study.runtime["old"]["env"] == {"LD_LIBRARY_PATH": "/opt/lib"}


@pytest.mark.parametrize(
    ("fields", "rounds", "until", "turns"),
    [
        ({}, 5, "decided", True),
        ({"rounds": 4}, 4, "rounds", True),
        ({"rounds": 1}, 1, "rounds", True),
        ({"rounds": 4, "until": "decided"}, 4, "decided", True),
        ({"until": "rounds"}, 5, "rounds", True),
        ({"turns": False}, 5, "decided", False),
        ({"samples": 10}, 5, "decided", False),
        ({"interval": 0.01}, 5, "decided", False),
    ],
)
def test_requested_rounds_are_exact(fields: dict[str, Any], rounds: int, until: str, turns: bool) -> None:
    study = Study(models=("fake:net",), **fields)
    assert (study.rounds, study.until, study.turns) == (rounds, until, turns)
    assert (study.plan.blocks > 0) == turns


def test_a_study_survives_a_toml_round_trip(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(TABLE)
    study = Study.from_toml(tmp_path / "s.toml")
    (tmp_path / "t.toml").write_text(study.to_toml())
    assert Study.from_toml(tmp_path / "t.toml") == study
    # Defaults are written out, so that a stored study documents its measurement.
    assert Study(models=("fake:net",)).to_table() == {
        "models": ["fake:net"], "rounds": 5, "until": "decided", "turns": True,
    }  # fmt: skip


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
positive = st.floats(1e-9, 1e9)


@settings(max_examples=60)
@given(models=st.lists(words, min_size=1), env=st.dictionaries(words, words, max_size=2), seconds=positive, name=words)
def test_any_study_survives_a_toml_round_trip(
    models: list[str], env: dict[str, str], seconds: float, name: str
) -> None:
    runtime = {name: {"python": name, "env": {**env, "n": 1, "on": True}}}
    study = Study(models=tuple(models), runtime=runtime, seconds=seconds, batches=(1, 8), pretrained=True)
    assert Study(**tomllib.loads(study.to_toml())) == study


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = ['fake:net']\nbatchs = [1]", "unknown key 'batchs' in s.toml; did you mean 'batches'?"),
        ("models = ['fake:net'", "s.toml is not valid TOML: "),
        ("backends = ['fake']", "s.toml names no models; write models = "),
        ("models = 'fake:net'\nbudget = 5", "s.toml: budget is 5; it must be a table"),
        ("models = 'fake:net'\nrounds = '3'", "s.toml: rounds is '3'"),
        ("\udcff", "s.toml is not a text in UTF-8; save it in that encoding"),
    ],
)
def test_invalid_toml_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as caught:
        Study.from_toml(tmp_path / "s.toml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "given", "names_file"),
    [
        ("models = 'fake:net'\nrounds = '3'", {"seed": 1}, True),
        ("models = 'fake:net'", {"rounds": "3"}, False),
        ("rounds = 3", {"models": "fake:net", "rounds": "3"}, False),
    ],
)
def test_errors_name_the_file_they_come_from(
    tmp_path: Path, text: str, given: dict[str, Any], names_file: bool
) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        Study.from_toml(tmp_path / "s.toml", **given)
    assert str(caught.value).startswith("rounds is '3'") is not names_file
    assert ("s.toml: " in str(caught.value)) is names_file


def test_windows_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b"\xef\xbb\xbfmodels = ['fake:net']\r\nsizes = [64]\r\n")
    assert Study.from_toml(tmp_path / "s.toml") == Study(models="fake:net", sizes=64)


def test_a_fixed_number_of_samples_disables_the_other_rules() -> None:
    plan = Study(models=("fake:net",), samples=50, seconds=3).plan
    assert plan.min_samples == plan.max_samples == 50
    assert plan.seconds > 1e5
    assert Study(models=("fake:net",), seconds=2).plan.seconds == 2


def test_sizes_and_budgets() -> None:
    assert parse_size("224") == (224, 224)
    assert parse_size("480X640") == (480, 640)
    assert parse_budget(["top1=0.5, top5=1"]) == parse_budget(["top1=0.5", "top5=1"]) == {"top1": 0.5, "top5": 1.0}


@pytest.mark.parametrize("text", ["top1", "top1=", "top1=much"])
def test_a_broken_budget_is_named(text: str) -> None:
    refuses("is not NAME=POINTS", parse_budget, [text])


def test_backends_have_their_runtime() -> None:
    tables = {"old": {"python": "/old"}, "onnxruntime": {"python": "/ort"}}
    study = Study(models=("fake:net",), runtime=tables)
    assert find_runtime(study, Choice("onnxruntime")) == {"python": "/ort"}
    assert find_runtime(study, Choice("onnxruntime", runtime="old")) == {"python": "/old"}
    assert find_runtime(study, Choice("openvino")) == {}
    with pytest.raises(UserError, match="'openvino' asks for runtime 'new', which the study does not define"):
        find_runtime(study, Choice("openvino", runtime="new"))


def test_common_aliases_of_backends_and_precisions_are_accepted() -> None:
    backends = ["ORT@threads=2", "TensorRT@precision=half+FP32", "fake"]
    study = Study(models="fake:n", backends=backends, precisions="float16")
    assert study.backends == ("onnxruntime@threads=2", "tensorrt@precision=fp16+fp32", "fake")
    assert study.precisions == ("fp16",)


def test_singular_field_names_are_accepted_in_python() -> None:
    study = Study(model="fake:n", backend="torch", precision="half", batch=8, size=32)
    assert (study.models, study.backends, study.batches, study.sizes) == (("fake:n",), ("pytorch",), (8,), ("32",))
    assert study == Study(models="fake:n", backends="pytorch", precisions="fp16", batches=8, sizes=32)
    refuses(r"^batch and batches are one setting; give one of them$", Study, models="fake:n", batch=1, batches=[2])
    refuses("^size is one size: give '480x640' for height and width, or sizes", Study, model="fake:n", size=(480, 640))
    assert Study(model="fake:n", size="480x640").sizes == ("480x640",) and Study(model="n", size=[32]).sizes == ("32",)
    refuses(r"unknown precision 'fp61'", dyno.evaluate, "fake:n", "digits", precision="fp61")


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"until": "decided", "minutes": 2}, 120),
        ({"until": "every-row", "minutes": 0.1}, 60),
        ({"until": "decided", "minutes": 2, "build_timeout": 5}, 5),
        ({"until": "rounds", "minutes": 2}, 3600),
    ],
)
def test_a_build_may_take_the_minutes_of_a_study_until_decided(
    fake_study: Any, fields: dict[str, Any], seconds: float
) -> None:
    study = fake_study(rounds=2, **fields)
    assert study.plan.build_timeout_s == study.build_timeout_s == seconds
