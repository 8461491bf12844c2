"""The two backends without their libraries: what is refused, and which trials share an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dyno.worker.registry import find
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Recipe, Runtime, Trial, UserError, digest

MODEL = ModelSpec("net", "torchvision:resnet18")
FILE = ModelSpec("net", "file:/somewhere/net.onnx", "abc")
DATA = DataSpec("photos", "/somewhere/photos", "d161")
GPU = Runtime(device="cuda:0", threads=2)
PYTHON = Runtime("old", "/somewhere/python3.10", device="cuda:0", threads=2)


def trial(precision: str = "fp32", batch: int = 8, *, model: ModelSpec = MODEL, **options: Any) -> Trial:
    return Trial(model, "tensorrt", precision, Dims(batch, 224, 224), options, data=DATA, runtime=GPU)


def recipe(precision: str = "fp32", batch: int = 8, *, model: ModelSpec = MODEL, **options: Any) -> Recipe:
    made = find("tensorrt").recipe(trial(precision, batch, model=model, **options))
    assert made is not None
    return made


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_both_are_found(name: str) -> None:
    engine = find(name)
    assert engine.name == name and engine.devices == ("cuda",)
    assert engine.refuse(replace(trial(), backend=name)) == ""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(trial(), runtime=Runtime()), "tensorrt can't run on cpu (it runs on cuda)"),
        (trial("fp6"), "tensorrt has no fp6 here"),
        (trial("int4"), "int4 is for a file with such weights; Dyno doesn't quantise to it"),
        (trial(model=ModelSpec("ir", "file:net.xml")), "tensorrt reads .onnx, .engine and .plan files, not net.xml"),
        (trial("tf32", model=replace(FILE, precision="int8")), "the file's weights are int8 already; run it as int8"),
        (replace(trial("int8"), data=DataSpec()), "int8 needs real calibration images: give --data"),
        (trial(batch=32, profile="1:8:16"), "batch 32 is outside the engine's profile (batches 1 to 16)"),
        (trial(profile="16:8:1"), "is out of order"),
        (trial(optimization=9), "optimization must be a level from 0 to 5, not 9"),
        (trial("fp16", route="calibrator"), "route=calibrator is for int8, not fp16"),
        (trial("fp16", joints=True), "joints is for int8 graphs that Dyno quantises; omit it here"),
        (trial("int8", joints=True, route="calibrator"), "joints is for int8 graphs that Dyno quantises; omit it here"),
        (trial("int8", route="flags"), "route=flags has no ranges for int8"),
    ],
)
def test_refusals_are_one_line(asked: Trial, said: str) -> None:
    reason = find("tensorrt").refuse(asked)
    assert said in reason and "\n" not in reason


@pytest.mark.parametrize("name", ["net.engine", "net.plan"])
def test_a_given_engine_is_left_as_it_is(name: str) -> None:
    given = ModelSpec("net", f"file:/somewhere/{name}", "abc")
    assert find("tensorrt").refuse(trial("fp16", model=given)) == ""
    made = recipe("fp16", model=given)
    assert (made.maker, made.parent, made.runtime) == ("tensorrt", None, GPU)


def test_an_engine_is_built_where_it_runs_from_a_file_made_here() -> None:
    made = find("tensorrt").recipe(replace(trial("fp16"), runtime=PYTHON))
    assert made and made.runtime == PYTHON and made.format == "engine"
    assert made.parent and made.parent.maker == "onnx_precision" and made.parent.precision == "fp16"
    assert made.parent.runtime.python == ""


def test_int8_is_calibrated_for_tensorrt() -> None:
    made = recipe("int8", samples=16)
    assert made.parent and made.parent.options["target"] == "tensorrt" and made.parent.options["samples"] == 16
    assert made.data is None and "samples" not in made.options


def test_flags_and_calibrator_start_from_fp32() -> None:
    flags, calibrator = recipe("fp16", route="flags"), recipe("int8", route="calibrator", samples=16)
    assert flags.parent == calibrator.parent == recipe().parent
    assert (flags.precision, flags.options) == ("fp16", {"route": "flags"})
    assert calibrator.options == {"route": "calibrator", "samples": 16}
    assert calibrator.data and (calibrator.data.split, calibrator.data.sha256) == ("calibration", "d161")


def test_a_route_that_can_t_be_is_the_user_s_error() -> None:
    with pytest.raises(UserError, match="route=calibrator is for int8"):
        recipe("fp16", route="calibrator")


def test_batches_of_one_profile_share_an_engine() -> None:
    assert digest(recipe(batch=1, profile="1:8:16")) == digest(recipe(batch=16, profile="1:8:16"))
    assert digest(recipe(batch=1)) != digest(recipe(batch=16))
    assert recipe(batch=1, profile="1:8:16").parent == recipe(batch=16, profile="1:8:16").parent
    folded = [recipe(batch=batch).parent for batch in (1, 16)]
    assert all(folded) and folded[0].parent == folded[1].parent, "one export serves every batch"


@pytest.mark.parametrize(
    "options", [{"graph": False}, {"slots": 1}, {"route": "auto"}, {"route": "graph"}, {"build": 0}]
)
def test_what_does_not_shape_an_engine_does_not_name_it(options: dict[str, Any]) -> None:
    assert digest(recipe("fp16", **options)) == digest(recipe("fp16"))


@pytest.mark.parametrize(
    "options", [{"build": 1}, {"optimization": 5}, {"profile": "1:8:16"}, {"refit": True}, {"tactics": "none"}]
)
def test_what_shapes_an_engine_names_it(options: dict[str, Any]) -> None:
    assert digest(recipe("fp16", **options)) != digest(recipe("fp16"))
