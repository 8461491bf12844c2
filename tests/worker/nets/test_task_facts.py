"""A file's task comes from its metadata, else from the length of its predictions."""

from pathlib import Path
from typing import Any

import pytest

import onnx_text
from dyno.worker.inspection import Purpose
from dyno.worker.nets import file_facts
from dyno.worker.spec import ModelSpec, Preprocess, UserError
from dyno.worker.tasks import OutputShapes

onnx = pytest.importorskip("onnx")

MODEL = ModelSpec("net", "file:net.onnx")


def outputs(*shapes: Any, size: tuple[int, int] = (640, 640)) -> OutputShapes:
    return OutputShapes({f"output{number}": shape for number, shape in enumerate(shapes)}, size)


def file(path: Path, **metadata: str) -> str:
    model = onnx_text.model("(float[1] x) => (float[1] y) { y = Relu(x) }")
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return str(path)


def purpose(path: str) -> Purpose:
    return file_facts.read_purpose({entry.key: entry.value for entry in onnx.load(path).metadata_props})


def test_written_metadata_is_read_back(tmp_path: Path) -> None:
    path = file(tmp_path / "m.onnx", author="somebody")
    preprocess = Preprocess((0.0,), (1.0,), letterbox=True)
    file_facts.write_purpose(path, ModelSpec("p", "x", classes=2, task="pose", keypoints=(4, 3), preprocess=preprocess))
    found = purpose(path)
    assert (found.task, found.classes, found.keypoints) == ("pose", 2, (4, 3))
    assert found.preprocess == preprocess
    assert {entry.key for entry in onnx.load(path).metadata_props} >= {"author", "task", "names", "kpt_shape"}


def test_ultralytics_metadata_is_read(tmp_path: Path) -> None:
    path = file(tmp_path / "m.onnx", task="pose", names="{0: 'a', 1: 'person, adult'}", kpt_shape="[17, 3]")
    names = ("a", "person, adult")
    assert purpose(path) == Purpose(task="pose", classes=2, class_names=names, keypoints=(17, 3))
    found = file_facts.find_task_facts(MODEL, "", purpose(path), outputs(("batch", 57, 8400)))
    assert found.preprocess.letterbox


def test_foreign_metadata_is_ignored(tmp_path: Path) -> None:
    path = file(
        tmp_path / "m.onnx", task="obb", names="__import__('os')", kpt_shape="7", preprocess='{"mean": 3, "a": 1}'
    )
    assert purpose(path) == Purpose()
    assert file_facts.find_task_facts(MODEL, "", Purpose(), outputs(("batch", 10))) == Purpose()


@pytest.mark.parametrize(
    ("task", "shapes", "known", "found"),
    [
        ("detect", [(1, 84, 8400)], {}, (80, ())),
        ("detect", [("n", 84, "anchors")], {}, (80, ())),
        ("detect", [(1, 8400, 84)], {"classes": 80}, (80, ())),
        ("detect", [(1, 25200, 85)], {}, (80, ())),
        ("detect", [(1, 25200, 6)], {}, (1, ())),
        ("detect", [(1, 8400, 85)], {}, (None, ())),  # 80 classes with objectness, or 81: values decide
        ("detect", [(1, 8400, 85)], {"classes": 80}, (80, ())),
        ("detect", [(1, 300, 6)], {}, (None, ())),
        ("detect", [("n", 4), ("n",), ("n",)], {}, (None, ())),
        ("detect", [(1, 84, 8400)], {"metadata": 3}, (3, ())),  # contradictory, so no boxes are read
        ("detect", [(1, 1000)], {}, (None, ())),
        ("detect", [(1, "n", 8400)], {}, (None, ())),
        ("segment", [(1, 38, 8400), (1, 32, 160, 160)], {}, (2, ())),
        ("segment", [("b", "c", "a"), ("b", 32, 160, 160)], {"classes": 2}, (2, ())),
        ("segment", [(1, 300, 38), (1, 32, 160, 160)], {}, (None, ())),
        ("segment", [(1, 25200, 117), (1, 32, 160, 160)], {}, (80, ())),
        ("segment", [(1, 84, 8400)], {}, (None, ())),
        ("pose", [(1, 56, 8400)], {}, (1, (17, 3))),
        ("pose", [(1, 13, 8400)], {}, (1, (4, 2))),
        ("pose", [(1, 19, 8400)], {"classes": 3}, (3, (4, 3))),
        ("pose", [(1, 300, 57)], {}, (None, (17, 3))),
    ],
)
def test_classes_and_keypoints_are_inferred_from_shapes(
    task: str, shapes: list[Any], known: dict[str, Any], found: tuple[int | None, tuple[int, ...]]
) -> None:
    metadata = Purpose(classes=known.pop("metadata", None))
    facts = file_facts.find_task_facts(ModelSpec("net", "file:net.onnx", **known), task, metadata, outputs(*shapes))
    assert (facts.classes, facts.keypoints) == found


@pytest.mark.parametrize(
    ("task", "known", "metadata", "shapes", "reason"),
    [
        ("pose", {}, {"task": "detect"}, [(1, 84, 8400)], "is a network for detect, not pose"),
        ("detect", {"classes": 3}, {}, [(1, 84, 8400)], "1x84x8400, which has 80 classes for detect, not 3"),
        (
            "segment",
            {"classes": 3},
            {},
            [(1, 38, 8400), (1, 32, 160, 160)],
            "has 2 classes.*check --task and --classes",
        ),
    ],
)
def test_options_that_contradict_the_file_are_refused(
    task: str, known: dict[str, Any], metadata: dict[str, Any], shapes: list[Any], reason: str
) -> None:
    model = ModelSpec("net", "file:net.onnx", **known)
    with pytest.raises(UserError, match=reason):
        file_facts.find_task_facts(model, task, Purpose(**metadata), outputs(*shapes))
