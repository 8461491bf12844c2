"""Specs survive JSON unchanged; an id depends only on the measured properties."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyno.worker.facts.files import MakerFacts, MakerStep
from dyno.worker.spec import (
    Artifact,
    DataSpec,
    Dims,
    Job,
    ModelSpec,
    Plan,
    Preprocess,
    Recipe,
    Runtime,
    Tensor,
    Trial,
    digest,
    from_json,
    make_absolute,
    shorten,
    to_json,
)
from refusals import refuses

MODEL = ModelSpec("net", "torchvision:resnet18", weights="/a/w.pt", weights_sha256="ab", classes=7)
DIMS = Dims(8, 224, 320, {"mask": (8, 16)})
PARENT = Recipe("onnx_export", "onnx", "fp32", MODEL, DIMS)
RECIPE = Recipe("onnx_precision", "onnx", "int8", MODEL, DIMS, {"samples": 64}, DataSpec("d", "/d", "cd"), PARENT)
TRIAL = Trial(MODEL, "onnxruntime", "int8", DIMS, {"spinning": False}, RECIPE, DataSpec("d", "/d", "cd", count=9))
ARTIFACT = Artifact(
    "onnx",
    "/x.onnx",
    "ef",
    123,
    "fp32",
    (Tensor("input", "float32", ("batch", 3, 8, 8)),),
    (),
    1.5,
    "aa",
    MakerFacts(other={"k": [1]}, steps=(MakerStep("m"),)),
)
JOB = Job("run", Runtime("old", "/p", {"A": "1"}), TRIAL, 2, RECIPE, ARTIFACT, "x", {"n": [1, {"m": None}]})


def there_and_back(value: Any) -> Any:
    return from_json(type(value), json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize("value", [MODEL, DIMS, RECIPE, TRIAL, ARTIFACT, JOB], ids=lambda v: type(v).__name__)
def test_values_survive_a_json_round_trip(value: Any) -> None:
    assert there_and_back(value) == value


def test_nested_recipes_survive_a_json_round_trip() -> None:
    back = there_and_back(JOB)
    assert isinstance(back.recipe.parent, Recipe) and isinstance(back.recipe.parent.model.preprocess, Preprocess)
    assert back.trial.dims.shapes == {"mask": (8, 16)}
    assert back.trial.id == TRIAL.id


text = st.text(max_size=8)
counts = st.integers(1, 10**6)
options = st.dictionaries(text, text | st.integers() | st.floats(allow_nan=False) | st.booleans(), max_size=3)
models = st.builds(
    ModelSpec, name=text, source=text, weights=text, seed=counts, classes=st.none() | counts, pretrained=st.booleans()
)
sizes = st.builds(
    Dims, batch=counts, height=counts, width=counts, shapes=st.dictionaries(text, st.lists(counts).map(tuple))
)
recipes: st.SearchStrategy[Recipe] = st.deferred(
    lambda: st.builds(
        Recipe, maker=text, format=text, precision=text, model=models, dims=sizes, options=options,
        data=st.none() | st.builds(DataSpec, name=text, count=counts), parent=st.none() | recipes,
        runtime=st.builds(Runtime, name=text, env=st.dictionaries(text, text, max_size=2)),
    )
)  # fmt: skip


@settings(max_examples=30)
@given(st.builds(Trial, models, text, text, sizes, options, st.none() | recipes))
def test_any_trial_survives_a_json_round_trip(trial: Trial) -> None:
    back = there_and_back(trial)
    assert back == trial
    assert back.id == trial.id


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Plan, {"secnds": 3}, "Plan has an unknown key 'secnds'; known keys: boundaries, warmup_s, "),
        (Dims, {"batch": 1, "height": 2}, "Dims is incomplete: .*'width'"),
        (Job, {"kind": "run", "runtime": {"pyton": ""}}, "Job.runtime has an unknown key 'pyton'"),
        (Job, {"kind": "run", "trial": {}}, "Job.trial is incomplete"),
        (Dims, {"batch": True, "height": 2, "width": 2}, "Dims.batch is of type bool, which is wrong here"),
        (Dims, {"batch": 1, "height": 2, "width": 10**400}, "Dims.width is larger than any number that is stored"),
    ],
)
def test_a_wrong_key_is_named(kind: type, data: dict[str, Any], message: str) -> None:
    refuses(message, from_json, kind, data)


def test_the_id_is_short_hexadecimal() -> None:
    assert TRIAL.id == digest(TRIAL)[:12]
    assert len(TRIAL.id) == 12 and int(TRIAL.id, 16) >= 0


@pytest.mark.parametrize(
    "other",
    [
        replace(TRIAL, model=replace(MODEL, name="another", weights="/elsewhere/w.pt")),
        replace(TRIAL, data=replace(TRIAL.data, folder="/elsewhere", name="another")),
        replace(TRIAL, plan=replace(TRIAL.plan, rounds=9, timeout_s=1.0)),
        replace(TRIAL, runtime=replace(TRIAL.runtime, name="another")),
        replace(TRIAL, recipe=replace(RECIPE, parent=replace(PARENT, model=replace(MODEL, weights="/elsewhere")))),
        replace(TRIAL, options=dict(reversed(list({"spinning": False}.items())))),
    ],
)
def test_paths_names_and_rounds_do_not_change_the_id(other: Trial) -> None:
    assert other.id == TRIAL.id


def test_a_file_is_identified_by_its_content() -> None:
    one = Trial(ModelSpec("m", "file:/a/m.onnx", source_sha256="1"), "onnxruntime", "fp32", Dims(1, 8, 8))
    assert replace(one, model=replace(one.model, source="file:/b/n.onnx")).id == one.id
    assert replace(one, model=replace(one.model, source_sha256="2")).id != one.id
    code = replace(one, model=ModelSpec("m", "/a/m.py:net", source_sha256="1"))
    assert replace(code, model=replace(code.model, source="/b/n.py:net")).id == code.id
    assert replace(code, model=replace(code.model, source="/a/m.py:other")).id != code.id
    assert code.id != one.id


@pytest.mark.parametrize(
    "other",
    [
        replace(TRIAL, precision="fp32"),
        replace(TRIAL, backend="openvino"),
        replace(TRIAL, dims=replace(DIMS, batch=1)),
        replace(TRIAL, options={"spinning": True}),
        replace(TRIAL, recipe=None),
        replace(TRIAL, recipe=replace(RECIPE, parent=replace(PARENT, options={"opset": 18}))),
        replace(TRIAL, model=replace(MODEL, weights_sha256="cd")),
        replace(TRIAL, model=replace(MODEL, source="timm:resnet18")),
        replace(TRIAL, model=replace(MODEL, preprocess=Preprocess(mean=(0.5,)))),
        replace(TRIAL, data=replace(TRIAL.data, sha256="ef")),
        replace(TRIAL, data=replace(TRIAL.data, split="train")),
        replace(TRIAL, runtime=replace(TRIAL.runtime, threads=4)),
        replace(TRIAL, runtime=replace(TRIAL.runtime, python="/p")),
        replace(TRIAL, plan=replace(TRIAL.plan, seconds=1.0)),
    ],
)
def test_settings_that_affect_results_change_the_id(other: Trial) -> None:
    assert other.id != TRIAL.id


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRIAL.precision = "fp32"  # type: ignore[misc]


def test_labels_show_only_non_default_settings() -> None:
    assert Dims(1, 224, 224).size == "224"
    assert Dims(1, 480, 640).size == "480x640"
    assert TRIAL.label == "net onnxruntime@spinning=False int8 b8 224x320"
    assert replace(TRIAL, options={}, runtime=Runtime("old")).variant == "onnxruntime@runtime=old"
    assert ModelSpec("m", "file:/a/m.onnx").file == "/a/m.onnx"
    assert MODEL.file == ""


def test_the_helpful_sentence_of_a_long_message_comes_first() -> None:
    """In ONNX Runtime it follows all inputs of a node, or the places of an inference error."""
    inputs = ", ".join(f'"layer_{k}.weight": tensor(float)' for k in range(30))
    shortened = shorten(
        f'Invalid model. In Node, ("n", Op) : ({inputs}) -> ("y") , Error Unrecognized attribute: k for Op'
    )
    assert shortened.startswith("Error Unrecognized attribute: k for Op (Invalid model. In Node")
    assert len(shortened) <= 300 and shortened.endswith("…)")
    places = "".join(f"(op_type:If, node name: pick{k}): " for k in range(20))
    shortened = shorten(
        f"[ShapeInferenceError] Inference error(s): {places}[ShapeInferenceError] B has inconsistent type"
    )
    assert shortened.startswith("[ShapeInferenceError] B has inconsistent type")


@pytest.mark.parametrize("text", ["", "short.", "x" * 5000, "word " * 900, "Error. " * 300])
def test_a_shortened_message_is_one_line_of_limited_length(text: str) -> None:
    for most in (120, 300):
        assert len(shorten(text, most)) <= most
    assert shorten("two\n lines") == "two lines"


@pytest.mark.parametrize("is_taken", [False, True])
def test_two_dots_after_a_link_lead_to_the_parent_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    (tmp_path / "far/inside").mkdir(parents=True)
    (tmp_path / "far/net.py").touch()
    (tmp_path / "link").symlink_to("far/inside")
    if is_taken:  # by another file of the name
        (tmp_path / "net.py").touch()
    monkeypatch.chdir(tmp_path)
    assert make_absolute(Path("link/../net.py")) == (tmp_path / "far/net.py").resolve()
    assert make_absolute(Path("link/../absent.py")) == tmp_path / "absent.py"
    assert make_absolute(Path("link")) == tmp_path / "link"
