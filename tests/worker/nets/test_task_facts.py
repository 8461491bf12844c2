"""A file says what it is for, and where it doesn't the length of its predictions says the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dyno.worker.inspection import Purpose
from dyno.worker.nets import task_facts
from dyno.worker.onnx_graph.file import read_metadata
from dyno.worker.spec import ModelSpec, Preprocess, UserError

onnx = pytest.importorskip("onnx")

MODEL = ModelSpec("net", "file:net.onnx")


def file(path: Path, **metadata: str) -> str:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out])
    model = onnx.helper.make_model(graph)
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return str(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = file(tmp_path / "m.onnx", author="somebody")
    preprocess = Preprocess((0.0,), (1.0,), letterbox=True)
    task_facts.write(path, ModelSpec("p", "x", classes=2, task="pose", keypoints=(4, 3), preprocess=preprocess))
    found = task_facts.read(read_metadata(path))
    assert (found.task, found.classes, found.keypoints) == ("pose", 2, (4, 3))
    assert found.preprocess == preprocess
    assert {entry.key for entry in onnx.load(path).metadata_props} >= {"author", "task", "names", "kpt_shape"}


def test_metadata_of_ultralytics_is_read(tmp_path: Path) -> None:
    path = file(tmp_path / "m.onnx", task="pose", names="{0: 'a', 1: 'person, adult'}", kpt_shape="[17, 3]")
    assert task_facts.read(read_metadata(path)) == Purpose(task="pose", classes=2, keypoints=(17, 3))
    found = task_facts.facts(MODEL, "", task_facts.read(read_metadata(path)), [("batch", 57, 8400)])
    assert found.preprocess.letterbox


def test_metadata_of_others_is_no_harm(tmp_path: Path) -> None:
    path = file(
        tmp_path / "m.onnx", task="obb", names="__import__('os')", kpt_shape="7", preprocess='{"mean": 3, "a": 1}'
    )
    assert task_facts.read(read_metadata(path)) == Purpose()
    assert task_facts.facts(MODEL, "", Purpose(), [("batch", 10)]) == Purpose()


@pytest.mark.parametrize(
    ("task", "outputs", "known", "found"),
    [
        ("detect", [(1, 84, 8400)], {}, (80, ())),
        ("segment", [(1, 38, 8400), (1, 32, 160, 160)], {}, (2, ())),
        ("segment", [("b", "c", "a"), ("b", 32, 160, 160)], {"classes": 2}, (2, ())),
        ("pose", [(1, 56, 8400)], {}, (1, (17, 3))),
        ("pose", [(1, 13, 8400)], {}, (1, (4, 2))),
        ("pose", [(1, 19, 8400)], {"classes": 3}, (3, (4, 3))),
    ],
)
def test_the_length_of_a_prediction_says_the_rest(
    task: str, outputs: list[Any], known: dict[str, Any], found: tuple[int, tuple[int, ...]]
) -> None:
    facts = task_facts.facts(ModelSpec("net", "file:net.onnx", **known), task, Purpose(), outputs)
    assert (facts.classes, facts.keypoints) == found


@pytest.mark.parametrize(
    ("task", "metadata", "outputs", "reason"),
    [
        ("pose", {"task": "detect"}, [(1, 84, 8400)], "is a network for detect, not pose"),
        ("detect", {}, [(1, 1000)], "1x1000; a network for detect gives predictions"),
        ("segment", {}, [(1, 84, 8400)], "and prototypes"),
        ("detect", {}, [(1, "n", 8400)], "give --classes"),
        ("detect", {"classes": 3}, [(1, 84, 8400)], "84 values for each anchor, which is not 4 . 3 classes"),
        ("segment", {}, [(1, 30, 8400), (1, 32, 160, 160)], "check --task and --classes"),
    ],
)
def test_contradictions_are_one_line(task: str, metadata: dict[str, Any], outputs: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        task_facts.facts(MODEL, task, Purpose(**metadata), outputs)
