"""INT8 of networks without an image input is calibrated on their described inputs, and the record names the source."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
import onnx_text
from dyno.results import remarks
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs.calibration import CalibrationInputs
from dyno.worker.makers.precision import OnnxPrecision, convert_recipe
from dyno.worker.onnx_graph.file import make_artifact
from dyno.worker.registry import find
from dyno.worker.spec import Artifact, DataSpec, Dims, InputSpec, ModelSpec, Recipe, Trial, UserError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
WIDTH = 6
X = InputSpec("x", "float32", ("batch", WIDTH), -2.0, 2.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """y = x W + scale: a layer with weights, and two inputs that are not images."""
    weights = np.random.default_rng(0).standard_normal((WIDTH, 4)).astype(np.float32)
    inputs = f"(float[batch, {WIDTH}] x, float[batch, 4] scale)"
    text = inputs + " => (float[batch, 4] y) { z = MatMul(x, w) y = Add(z, scale) }"
    return onnx_text.write(tmp_path / "dense.onnx", text, ir=9, w=weights)


def trial(file: Path, *specs: InputSpec, backend: str = "onnxruntime", **options: Any) -> Trial:
    model = ModelSpec("dense", f"file:{file}", precision="fp32", inputs=specs)
    return Trial(model, backend, "int8", Dims(2, 0, 0), options=options, data=DataSpec(count=2))


def quantised(asked: Trial, folder: Path) -> tuple[Artifact, float]:
    """Return the quantised file, and the width of x's calibrated range."""
    recipe = convert_recipe(asked, asked.backend)
    made = OnnxPrecision().make(recipe, make_artifact(asked.model.file, 0.0, MakerFacts()), folder)
    graph = onnx.load(made.path).graph
    (node,) = [n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x"]
    (scale,) = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name == node.input[1]]
    return made, 255 * float(scale)


def test_calibration_ranges_match_the_described_values(file: Path, tmp_path: Path) -> None:
    made, width = quantised(trial(file, X, InputSpec("scale", "float32", ("batch", 4))), tmp_path)
    assert 3.8 < width <= 4.0
    said = made.made_by.calibration
    assert said.inputs == {"x": "random, -2 to 2", "scale": "random"} and said.samples == 128
    assert "random values, not real ones, of x, scale" in said.note


def test_calibration_uses_array_rows_up_to_their_number(file: Path, tmp_path: Path) -> None:
    rows = np.linspace(-10, 10, 5 * WIDTH, dtype=np.float32).reshape(5, WIDTH)
    np.savez(tmp_path / "feeds.npz", x=rows, scale=np.ones((5, 4), np.float32))
    arrays = {"low": None, "high": None, "feeds": str(tmp_path / "feeds.npz"), "feeds_sha256": "f" * 64}
    both = replace(X, **arrays), InputSpec("scale", "float32", ("batch", 4), **arrays)
    made, width = quantised(trial(file, *both), tmp_path)
    assert width == pytest.approx(20, rel=1e-3)
    said = made.made_by.calibration
    assert (said.samples, said.data_sha256) == (5, "f" * 64) and set(said.inputs.values()) == {"feeds.npz"}
    assert "calibrated on 5 rows, all that feeds.npz has" in made.made_by.warnings
    assert quantised(trial(file, *both, samples=1), tmp_path)[1] < 11  # every range includes 0
    mixed, _ = quantised(trial(file, both[0], InputSpec("scale", "float32", ("batch", 4))), tmp_path)
    assert mixed.made_by.calibration.inputs == {"x": "feeds.npz", "scale": "random"}


def test_calibration_values_are_reproducible_and_differ_from_test_values(file: Path) -> None:
    recipe = convert_recipe(trial(file, X), "onnxruntime")
    assert recipe.data is not None and recipe.data.seed != DataSpec().seed
    seen = CalibrationInputs(replace(recipe, dims=Dims(0, 0, 0)), only_x(make_artifact(str(file), 0.0, MakerFacts())))
    whole = list(seen.feeds(0, 4))
    np.testing.assert_array_equal(next(seen.feeds(3, 4))["x"], whole[3]["x"])
    assert len({feed["x"].tobytes() for feed in whole}) == 4


def only_x(whole: Artifact) -> Artifact:
    return replace(whole, inputs=whole.inputs[:1])


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_calibration_without_described_values_is_refused(file: Path, backend: str) -> None:
    image = InputSpec("pixels", "float32", ("batch", 3, "height", "width"), keyword=True)
    for specs in ((), (image,)):
        asked = trial(file, *specs, backend=backend)
        assert "--calibration" in find(backend).refuse(asked) and "--input" in find(backend).refuse(asked)
        with pytest.raises(UserError, match="--calibration"):
            convert_recipe(asked, backend)
    for specs in ((X,), (replace(image, low=0.0, high=1.0),), (image, X)):
        assert find(backend).refuse(trial(file, *specs, backend=backend)) == ""
    recipe: Recipe = convert_recipe(trial(file, X), backend)
    assert recipe.data is not None and not recipe.data.folder


def test_run_records_name_their_calibration_data(call: Any, file: Path) -> None:
    pytest.importorskip("openvino")
    short = ("--seconds", 0.02, "--block", 0.01, "--boundaries", "model")
    words = ("--backend", "onnxruntime,openvino", "--precision", "int8", "--input", "x=-2..2", *short)
    call("run", file, *words, "--rounds", 1, "--warmup", 0.01, "--threads", 1, "--out", "r", code=0)
    for each in dyno.load("r").records:
        assert any("random values, not real ones, of x" in note for note in remarks.list_notes(each))
        assert each.facts.calibration.inputs["x"] == "random, -2 to 2"
        assert not any("random" in reason for reason in remarks.list_reasons(each))
