"""Layers ranked by their cost in a lower type, and the use of the ranking by `keep`."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_text
from dyno.jobs.launcher import launch
from dyno.worker.inputs.calibration import CalibrationImages
from dyno.worker.makers.modelopt_quantise import Feeds, OnnxModelopt
from dyno.worker.makers.precision import OnnxPrecision, convert_recipe
from dyno.worker.makers.sensitivity import OnnxSensitivity, compute_sqnr, int8_changes, rank
from dyno.worker.onnx_graph.check import compute_outputs
from dyno.worker.onnx_graph.graph_facts import read_graph_facts
from dyno.worker.onnx_graph.int8 import CalibratedGraph, Scheme
from dyno.worker.registry import find, get_maker
from dyno.worker.spec import Artifact, DataSpec, Dims, Job, Recipe, Runtime, Trial, Unavailable, UserError
from refusals import refuses

TARGETS = ("onnxruntime", "openvino", "tensorrt")


def ranked(digits: Any, folder: Path, precision: str = "int8", target: str = "onnxruntime", keep: int = 1) -> Artifact:
    folder.mkdir(exist_ok=True)
    return OnnxSensitivity().make(_steps(digits, precision, target, keep)[0], digits.artifact, folder)


def _steps(digits: Any, precision: str, target: str, keep: int) -> tuple[Recipe, Recipe]:
    made = convert_recipe(replace(digits.trial("onnxruntime", precision, keep=keep)), target)
    assert made.parent is not None
    return made.parent, made


@pytest.mark.parametrize("target", TARGETS)
def test_layers_are_ranked_from_the_most_sensitive(digits: Any, target: str, tmp_path: Path) -> None:
    made = ranked(digits, tmp_path, target=target)
    ranking = made.made_by.ranking
    assert {each.op for each in ranking} >= {"Conv", "Gemm"}
    ratios = [each.sqnr_db for each in ranking]
    assert ratios == sorted(ratios) and 10 < ratios[0] < 60
    assert {each.node for each in ranking} <= {node.name for node in onnx.load(made.path).graph.node}
    assert ranking == ranked(digits, tmp_path / "again", target=target).made_by.ranking
    assert made.precision == "fp32" and made.made_by.ranked_on == 16


@pytest.mark.parametrize(
    ("narrow", "steps", "scheme", "least", "of_x"),
    [(False, 127, "S8", -3, 3 / 127), (True, 63, "S8", -3, 3 / 127), (False, 127, "U8", 0.5, 3 / 255)],
)
def test_the_cost_of_a_layer_comes_from_its_rounded_inputs_and_weights(
    narrow: bool, steps: int, scheme: str, least: float, of_x: float
) -> None:
    """Inputs have one scale, and 0 in their range; weights have one for each output."""
    rng = np.random.default_rng(0)
    x, w, b = (
        rng.uniform(low, 3, shape).astype(np.float32) for low, shape in ((least, (9, 4)), (-3, (4, 3)), (-3, (3,)))
    )
    model = onnx_text.model("(float[9, 4] x) => (float[9, 3] y) { [layer] y = Gemm(x, w, b) }", w=w, b=b)
    seen = CalibratedGraph(
        model, Scheme(scheme, False), frozenset({"Gemm"}), set(), False, {"x": (least, 3.0)}, None, narrow, ()
    )
    (found,) = rank(model, int8_changes(seen), [{"x": x}], 1, lambda *_: None)
    of_w = np.abs(w).max(axis=0) / steps
    rounded = np.round(x / of_x) * of_x @ (np.round(w / of_w) * of_w) + b
    assert found.node == "layer" and found.sqnr_db == pytest.approx(compute_sqnr([x @ w + b], [rounded]), abs=0.01)


@pytest.mark.parametrize("target", TARGETS)
def test_kept_layers_read_floats(digits: Any, target: str, tmp_path: Path) -> None:
    parent = ranked(digits, tmp_path, target=target, keep=2)
    made = OnnxPrecision().make(_steps(digits, "int8", target, 2)[1], parent, _folder(tmp_path / "made"))
    kept = [each.node for each in made.made_by.kept]
    assert kept == [each.node for each in parent.made_by.ranking[:2]]
    graph = onnx.load(made.path).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    reads = {node.name: [makers.get(name) for name in node.input] for node in graph.node}
    assert all("DequantizeLinear" not in reads[name] for name in kept)
    assert any("DequantizeLinear" in reads[each.node] for each in parent.made_by.ranking[2:])


def test_keeping_more_layers_brings_outputs_closer(digits: Any, tmp_path: Path) -> None:
    feeds = {"input": digits.images()[0][:64]}
    exact = compute_outputs(digits.artifact.path, feeds)[0]
    parent = ranked(digits, tmp_path)
    ratios = []
    for keep in (1, len(parent.made_by.ranking) - 1):
        recipe = _steps(digits, "int8", "onnxruntime", keep)[1]
        made = OnnxPrecision().make(recipe, parent, _folder(tmp_path / str(keep)))
        ratios.append(compute_sqnr(exact, compute_outputs(made.path, feeds)[0]))
    assert ratios[0] < ratios[1]


def test_fp16_files_keep_layers_in_fp32(digits: Any, tmp_path: Path) -> None:
    trial = digits.trial("onnxruntime", "fp16", keep=1)
    for data, chosen in (
        (trial.data, replace(trial.data, split="calibration", count=DataSpec.count)),
        (DataSpec(), None),
    ):
        recipe = convert_recipe(replace(trial, data=data), "onnxruntime").parent
        assert recipe is not None and recipe.data == chosen
    parent = ranked(digits, tmp_path, "fp16")
    made = OnnxPrecision().make(_steps(digits, "fp16", "onnxruntime", 1)[1], parent, _folder(tmp_path / "made"))
    (kept,) = made.made_by.kept
    graph = onnx.load(made.path).graph
    node = next(node for node in graph.node if node.name == kept.node)
    weights = {t.name: t.data_type for t in graph.initializer}
    assert {weights[name] for name in node.input if name in weights} == {onnx.TensorProto.FLOAT}
    assert onnx.TensorProto.FLOAT16 in weights.values()


def test_sqnr_values_stay_finite() -> None:
    a = [np.ones(4)]
    assert compute_sqnr(a, [np.ones(4)]) == 120
    assert compute_sqnr(a, [np.full(4, np.inf)]) == -120
    assert compute_sqnr(a, [np.full(4, np.nan)]) == -120
    assert compute_sqnr(a, [np.full(4, 1.1)]) == pytest.approx(20, abs=0.01)
    assert compute_sqnr([np.zeros(2)], [np.ones(2)]) == -120


def test_keeping_more_layers_than_exist_is_refused(digits: Any, tmp_path: Path) -> None:
    parent = ranked(digits, tmp_path)
    with pytest.raises(UserError, match=r"keep=99: digits has \d+ layers that int8 touches"):
        OnnxPrecision().make(_steps(digits, "int8", "onnxruntime", 99)[1], parent, _folder(tmp_path / "made"))


def test_bf16_keeps_no_layers(digits: Any) -> None:
    refuses("bf16 has the range of fp32", convert_recipe, digits.trial("onnxruntime", "bf16", keep=1), "onnxruntime")


def test_one_ranking_serves_any_number_of_kept_layers(digits: Any) -> None:
    first, second = (_steps(digits, "int8", "onnxruntime", keep) for keep in (1, 5))
    assert first[0] == second[0] and first[1] != second[1]
    plain = convert_recipe(digits.trial("onnxruntime", "int8", keep=0), "onnxruntime")
    assert plain.parent is not None and plain.parent.maker == "onnx_export"


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


PYTHON = os.environ.get("DYNO_TEST_MODELOPT", "")
needs_modelopt = pytest.mark.skipif(not PYTHON, reason="DYNO_TEST_MODELOPT names no Python with nvidia-modelopt")


def asked(digits: Any, precision: str = "fp8", target: str = "tensorrt", **options: Any) -> Recipe:
    return convert_recipe(digits.trial(target, precision, **options), target)


def test_modelopt_makes_fp8_always_and_int8_on_request(digits: Any) -> None:
    step = asked(digits)
    assert (step.maker, step.precision, step.runtime.name) == ("onnx_modelopt", "fp8", "modelopt")
    assert step.options == {"samples": 128, "method": "minmax"}
    assert step.data is not None and step.data.split == "calibration"
    assert step.parent is not None and step.parent.maker == "onnx_export"
    assert asked(digits, "int8").maker == "onnx_precision"
    assert asked(digits, "int8", quantizer="modelopt").maker == "onnx_modelopt"
    pixels = asked(digits, input="uint8")
    assert (pixels.maker, pixels.parent) == ("onnx_input", step)


def test_impossible_quantisations_are_refused_in_one_line(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp8 needs real calibration images: give --data"):
        convert_recipe(replace(digits.trial("tensorrt", "fp8"), data=DataSpec()), "tensorrt")
    refuses("fp8 by nvidia-modelopt is for TensorRT, not for openvino", asked, digits, target="openvino")
    refuses("unknown quantizer 'torch'; known: onnxruntime, modelopt", asked, digits, "int8", quantizer="torch")
    with pytest.raises(UserError, match="no calibration method 'percentile'; it has minmax, entropy"):
        OnnxModelopt().make(asked(digits, method="percentile"), digits.artifact, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is not None, reason="nvidia-modelopt is installed here")
def test_a_missing_modelopt_names_the_option_to_give(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"nvidia-modelopt is not installed .*--python modelopt=PATH \(there: pip"):
        OnnxModelopt().make(asked(digits), digits.artifact, tmp_path)


def test_calibration_images_can_be_rewound(digits: Any) -> None:
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
def test_modelopt_files_are_accurate_and_build(digits: Any, tmp_path: Path, precision: str, kind: str) -> None:
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
    mixed = {"allow_mixed": True}  # leaves convolutions of few channels, most of them here, in FP16 rather than FP8
    trial = Trial(model, "tensorrt_rtx", precision, Dims(4, 8, 8), mixed, runtime=Runtime(device="cuda:0"))
    recipe = find("tensorrt_rtx").recipe(trial)
    assert recipe is not None
    told = get_maker("tensorrt_rtx").make(recipe, made, tmp_path).made_by
    assert told.layers_by_type.get(kind, 0) >= {"fp8": 1, "int8": 3}[precision]
