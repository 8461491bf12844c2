"""Layers ranked by what they cost in a lower type, and what `keep` makes of the ranking."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dyno.worker.makers.precision import OnnxPrecision, converted
from dyno.worker.makers.sensitivity import OnnxSensitivity, sqnr
from dyno.worker.onnx_graph.check import outputs
from dyno.worker.spec import Artifact, Recipe, UserError

TARGETS = ("onnxruntime", "openvino", "tensorrt")


def ranked(digits: Any, folder: Path, precision: str = "int8", target: str = "onnxruntime", keep: int = 1) -> Artifact:
    folder.mkdir(exist_ok=True)
    return OnnxSensitivity().make(_steps(digits, precision, target, keep)[0], digits.artifact, folder)


def _steps(digits: Any, precision: str, target: str, keep: int) -> tuple[Recipe, Recipe]:
    trial = replace(digits.trial("onnxruntime", precision, keep=keep))
    made = converted(trial, target)
    assert made.parent is not None
    return made.parent, made


@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_is_ranked_the_worst_first(digits: Any, target: str, tmp_path: Path) -> None:
    made = ranked(digits, tmp_path, target=target)
    ranking = made.made_by.ranking
    assert {each.op for each in ranking} >= {"Conv", "Gemm"}
    ratios = [each.sqnr_db for each in ranking]
    assert ratios == sorted(ratios) and 10 < ratios[0] < 60
    names = {node.name for node in onnx.load(made.path).graph.node}
    assert {each.node for each in ranking} <= names
    assert ranking == ranked(digits, tmp_path / "again", target=target).made_by.ranking
    assert made.precision == "fp32" and made.made_by.ranked_on == 16


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


def test_the_more_layers_are_kept_the_nearer_the_outputs(digits: Any, tmp_path: Path) -> None:
    feeds = {"input": digits.images()[0][:64]}
    exact = outputs(digits.artifact.path, feeds)[0]
    parent = ranked(digits, tmp_path)
    ratios = []
    for keep in (1, len(parent.made_by.ranking) - 1):
        recipe = _steps(digits, "int8", "onnxruntime", keep)[1]
        made = OnnxPrecision().make(recipe, parent, _folder(tmp_path / str(keep)))
        ratios.append(sqnr(exact, outputs(made.path, feeds)[0]))
    assert ratios[0] < ratios[1]


def test_fp16_keeps_them_too(digits: Any, tmp_path: Path) -> None:
    parent = ranked(digits, tmp_path, "fp16")
    made = OnnxPrecision().make(_steps(digits, "fp16", "onnxruntime", 1)[1], parent, _folder(tmp_path / "made"))
    (kept,) = made.made_by.kept
    graph = onnx.load(made.path).graph
    node = next(node for node in graph.node if node.name == kept.node)
    weights = {t.name: t.data_type for t in graph.initializer}
    assert {weights[name] for name in node.input if name in weights} == {onnx.TensorProto.FLOAT}
    assert onnx.TensorProto.FLOAT16 in weights.values()


def test_ratios_stay_finite() -> None:
    a = [np.ones(4)]
    assert sqnr(a, [np.ones(4)]) == 120
    assert sqnr(a, [np.full(4, np.inf)]) == -120
    assert sqnr(a, [np.full(4, np.nan)]) == -120
    assert sqnr(a, [np.full(4, 1.1)]) == pytest.approx(20, abs=0.01)
    assert sqnr([np.zeros(2)], [np.ones(2)]) == -120


def test_more_than_there_are_is_refused(digits: Any, tmp_path: Path) -> None:
    parent = ranked(digits, tmp_path)
    with pytest.raises(UserError, match=r"keep=99: digits has \d+ layers that int8 touches"):
        OnnxPrecision().make(_steps(digits, "int8", "onnxruntime", 99)[1], parent, _folder(tmp_path / "made"))


def test_bf16_keeps_no_layers(digits: Any) -> None:
    with pytest.raises(UserError, match="bf16 has the range of fp32"):
        converted(digits.trial("onnxruntime", "bf16", keep=1), "onnxruntime")


def test_one_ranking_serves_every_number(digits: Any) -> None:
    first, second = (_steps(digits, "int8", "onnxruntime", keep) for keep in (1, 5))
    assert first[0] == second[0] and first[1] != second[1]
    plain = converted(digits.trial("onnxruntime", "int8", keep=0), "onnxruntime")
    assert plain.parent is not None and plain.parent.maker == "onnx_export"


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path
