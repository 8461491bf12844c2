"""Inputs on the command line: shapes with types, ranges, constants and files of arrays."""

from pathlib import Path

import numpy as np
import pytest

from dyno import Study
from dyno.study import input_options
from refusals import refuses


def overrides(**fields: object) -> dict[str, dict[str, object]]:
    study = Study(models="fake:net", **fields)
    return input_options.parse_overrides(study.inputs, study.shapes)


def test_shapes_may_have_a_type() -> None:
    found = input_options.parse_shapes(["a:1x3", "onnx::x:2x4x8", "ids:batchx128:int64"])
    assert found["a"] == {"shape": [1, 3]} and found["onnx::x"] == {"shape": [2, 4, 8]}
    assert found["ids"] == {"shape": ["batch", 128], "dtype": "int64"}
    found = input_options.parse_shapes(["sr::int64", "onnx::y::int64"])
    assert found == {name: {"shape": [], "dtype": "int64"} for name in ("sr", "onnx::y")}, "numbers"


@pytest.mark.parametrize("text", ["1x3", "a:", "a:1x3:", "a:1xb", ":1x3", "::int64", "a:0x3", "a:-1x3"])
def test_a_broken_shape_is_named(text: str) -> None:
    refuses("is not NAME:1x3x224x224", input_options.parse_shapes, [text])


def test_any_axis_may_be_the_batch_and_others_may_be_empty() -> None:
    assert input_options.parse_shapes(["a:50xbatchx16", "past:batchx4x0x8"]) == {
        "a": {"shape": [50, "batch", 16]}, "past": {"shape": ["batch", 4, 0, 8]},
    }  # fmt: skip
    refuses("with one batch", input_options.parse_shapes, ["a:batchxbatch"])


def test_an_unknown_type_is_named() -> None:
    refuses("unknown type of input 'ids' 'int46'; did you mean 'int64'", input_options.parse_shapes, ["ids:1x8:int46"])


def test_ranges_and_constants() -> None:
    found = overrides(inputs=["ids=0..30521", "sr=16000", "flag=true", "x=-1.5..1"], shapes=["ids:1x8:int64"])
    assert found["ids"] == {"low": 0, "high": 30521, "shape": [1, 8], "dtype": "int64"}
    assert found["sr"]["value"] == 16000 and found["flag"]["value"] is True
    assert found["x"] == {"low": -1.5, "high": 1}
    assert type(found["flag"]["low"]) is int, "a number in a record is no bool"


@pytest.mark.parametrize("text", ["x=nan", "x=0..inf", "x=-inf..0"])
def test_non_finite_ranges_are_refused(text: str) -> None:
    refuses("has values that can't be drawn; give finite numbers", overrides, inputs=[text])
    assert overrides(inputs=["x=-inf"])["x"]["low"] == -np.inf, "as a mask of attention is filled"


@pytest.mark.parametrize("text", ["ids", "ids=", "=3", "ids=a..b", "ids=true..false", "ids=1..", "feeds"])
def test_a_broken_input_is_named(text: str) -> None:
    refuses("is not NAME=VALUE such as sr=16000", overrides, inputs=[text])


def test_a_range_must_not_end_below_its_start() -> None:
    refuses("a range whose end is below its start", overrides, inputs=["ids=9..0"])


def test_arrays_give_shapes_and_are_identified_by_content(tmp_path: Path) -> None:
    path = tmp_path / "feeds.npz"
    np.savez(path, ids=np.arange(12).reshape(4, 3), table=np.ones((2, 5)))
    found = overrides(inputs=[str(path)])
    assert found["ids"]["shape"] == ["batch", 3] and found["ids"]["dtype"] == "int64"
    assert found["table"]["shape"] == [2, 5] and found["table"]["dtype"] == "float32"
    np.savez(path, ids=np.zeros((4, 3), np.int64), table=np.full((2, 5), -np.inf))  # like an attention mask
    assert overrides(inputs=[str(path)])["ids"]["feeds_sha256"] != found["ids"]["feeds_sha256"]
    for damaged in (b"no arrays", path.read_bytes()[:-9], path.read_bytes().replace(b"NUMPY", b"NUMPI")):
        path.write_bytes(damaged)
        refuses(r"feeds.npz can't be read as arrays by input name", overrides, inputs=[str(path)])


@pytest.mark.parametrize(("array", "wrong"), [(np.full((2, 2), np.nan), "NaN"), (np.empty((0, 2)), "is empty")])
def test_unusable_arrays_are_refused(tmp_path: Path, array: np.ndarray, wrong: str) -> None:
    np.savez(tmp_path / "feeds.npz", x=array)
    refuses(wrong, overrides, inputs=[str(tmp_path / "feeds.npz")])


@pytest.mark.parametrize(
    ("array", "kind"),
    [(np.array(["a"]), "text"), (np.ones(2, complex), "complex numbers"), (np.zeros(2, "V2"), "values of")],
)
def test_non_numeric_arrays_are_refused(tmp_path: Path, array: np.ndarray, kind: str) -> None:
    np.savez(tmp_path / "feeds.npz", x=array)
    refuses(f"the array 'x' in feeds.npz holds {kind}", overrides, inputs=[str(tmp_path / "feeds.npz")])
