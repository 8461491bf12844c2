"""FP8 and INT8 by nvidia-modelopt: a job in an interpreter of its own, a clear line where there is none."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dyno.jobs.launcher import launch
from dyno.worker.inputs.calibration import CalibrationImages
from dyno.worker.makers.modelopt_quantise import Feeds, OnnxModelopt, _import_library
from dyno.worker.makers.precision import converted
from dyno.worker.onnx_graph.graph_facts import read_graph_facts
from dyno.worker.registry import find, maker
from dyno.worker.spec import DataSpec, Dims, Job, Recipe, Runtime, Trial, Unavailable, UserError

PYTHON = os.environ.get("DYNO_TEST_MODELOPT", "")
needs_modelopt = pytest.mark.skipif(not PYTHON, reason="DYNO_TEST_MODELOPT names no Python with nvidia-modelopt")


def asked(digits: Any, precision: str = "fp8", target: str = "tensorrt", **options: Any) -> Recipe:
    return converted(digits.trial(target, precision, **options), target)


def test_fp8_is_always_made_by_it_int8_when_it_is_asked_for(digits: Any) -> None:
    step = asked(digits)
    assert (step.maker, step.precision, step.runtime.name) == ("onnx_modelopt", "fp8", "modelopt")
    assert step.options == {"samples": 128, "method": "minmax"}
    assert step.data is not None and step.data.split == "calibration"
    assert step.parent is not None and step.parent.maker == "onnx_export"
    assert asked(digits, "int8").maker == "onnx_precision"
    assert asked(digits, "int8", quantizer="modelopt").maker == "onnx_modelopt"
    pixels = asked(digits, input="uint8")
    assert (pixels.maker, pixels.parent) == ("onnx_input", step)


def test_what_cannot_be_is_one_line(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp8 needs real calibration images: give --data"):
        converted(replace(digits.trial("tensorrt", "fp8"), data=DataSpec()), "tensorrt")
    with pytest.raises(UserError, match="fp8 by nvidia-modelopt is for TensorRT, not for openvino"):
        asked(digits, target="openvino")
    with pytest.raises(UserError, match="unknown quantizer 'torch'; known: onnxruntime, modelopt"):
        asked(digits, "int8", quantizer="torch")
    with pytest.raises(UserError, match="no calibration method 'percentile'; it has minmax, entropy"):
        OnnxModelopt().make(asked(digits, method="percentile"), digits.artifact, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is not None, reason="nvidia-modelopt is installed here")
def test_a_python_without_it_is_told_what_to_give(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"--python modelopt=PATH \(there: pip install nvidia-modelopt\[onnx\]\)"):
        OnnxModelopt().make(asked(digits), digits.artifact, tmp_path)
    with pytest.raises(Unavailable, match="nvidia-modelopt can't be imported"):
        _import_library()


def test_the_images_can_be_read_from_the_start_again(digits: Any) -> None:
    feeds = Feeds(CalibrationImages(asked(digits, samples=3), digits.artifact))
    first = [feeds.get_next() for _ in range(4)]
    assert [feed is None for feed in first] == [False, False, False, True]
    feeds.rewind()
    again = feeds.get_next()
    assert again is not None and first[0] is not None
    np.testing.assert_array_equal(again["input"], first[0]["input"])
    np.testing.assert_array_equal(feeds.get_first()["input"], first[0]["input"])


@needs_modelopt
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "kind"), [("fp8", "float8"), ("int8", "int8")])
def test_its_files_are_right_and_build(digits: Any, tmp_path: Path, precision: str, kind: str) -> None:
    step = asked(digits, precision, quantizer="modelopt")
    job = Job("make", Runtime("modelopt", PYTHON, threads=2), recipe=step, artifact=digits.artifact)
    record = launch(job, tmp_path / "job", 1200)
    assert record.status == "ok", record.reason
    made = record.artifact
    assert made is not None and made.precision == precision == read_graph_facts(onnx.load(made.path)).precision
    assert made.made_by.calibration.samples == 128
    assert made.made_by.check.max_difference < 0.15 * made.made_by.check.max_output
    assert onnx.load(made.path).graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert sorted(p.suffix for p in (tmp_path / "job").iterdir()).count(".onnx") == 1

    pytest.importorskip("tensorrt_rtx")
    model = replace(digits.model, precision=precision)
    mixed = {"allow_mixed": True}  # it leaves convolutions of few channels, as most here are, in FP16 rather than FP8
    trial = Trial(model, "tensorrt_rtx", precision, Dims(4, 8, 8), mixed, runtime=Runtime(device="cuda:0"))
    recipe = find("tensorrt_rtx").recipe(trial)
    assert recipe is not None
    told = maker("tensorrt_rtx").make(recipe, made, tmp_path).made_by
    assert told.layers_by_type.get(kind, 0) >= {"fp8": 1, "int8": 3}[precision]
