"""Profiles from text: every form, and one line for everything that can't be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyno.worker.backends.tensor_rt.settings import (
    batch_range,
    explain_outside,
    find_fixed_size,
    format_profiles,
    is_static,
    parse_profiles,
)
from dyno.worker.spec import Dims, Tensor, UserError

IMAGE = Tensor("x", "float32", ("batch", 3, "height", "width"))
FIXED = Tensor("x", "float32", (1, 3, 224, 224))
MASK = Tensor("input:mask", "int64", ("batch", "length"))
DIMS = Dims(4, 224, 256)


def test_static_is_the_trial_s_own_shape() -> None:
    found = parse_profiles("static", [IMAGE], DIMS)
    assert found == [{"x": ((4, 3, 224, 256),) * 3}]
    assert is_static(found) and find_fixed_size(found, "x") == (4, 3, 224, 256)


def test_a_free_trial_takes_the_file_s_batch() -> None:
    assert parse_profiles("static", [FIXED], Dims(0, 224, 224)) == [{"x": ((1, 3, 224, 224),) * 3}]


def test_batches() -> None:
    found = parse_profiles("1:8:16", [IMAGE], DIMS)
    assert found == [{"x": ((1, 3, 224, 256), (8, 3, 224, 256), (16, 3, 224, 256))}]
    assert find_fixed_size(found, "x") == (-1, 3, 224, 256), "only what varies stays free"
    assert not is_static(found)


def test_one_batch_is_static() -> None:
    assert is_static(parse_profiles("8", [IMAGE], DIMS))
    assert parse_profiles("8", [IMAGE], DIMS) == parse_profiles("8:8:8", [IMAGE], DIMS)


def test_shapes_of_several_inputs_and_profiles() -> None:
    text = "x:1x3x32x32,2x3x32x32,4x3x64x32;input:mask:1x7|x:8x3x32x32;input:mask:8x7"
    found = parse_profiles(text, [IMAGE, MASK], DIMS)
    assert [sorted(profile) for profile in found] == [["input:mask", "x"]] * 2
    assert found[0]["x"] == ((1, 3, 32, 32), (2, 3, 32, 32), (4, 3, 64, 32))
    assert found[1]["input:mask"] == ((8, 7),) * 3
    assert find_fixed_size(found, "x") == (-1, 3, -1, 32) and find_fixed_size(found, "input:mask") == (-1, 7)
    assert format_profiles(found)[1] == {"x": [[8, 3, 32, 32]] * 3, "input:mask": [[8, 7]] * 3}


def test_an_input_whose_shape_is_fixed_needs_no_mention() -> None:
    weights = Tensor("w", "float32", (3,))
    assert parse_profiles("x:1x3x8x8", [IMAGE, weights], DIMS)[0]["w"] == ((3,),) * 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1:8", "profile '1:8' is not MIN:OPT:MAX, three batches such as 1:8:16"),
        ("8:1:16", "profile '8:1:16' is out of order: it must be 1 <= min <= opt <= max"),
        ("0:1:2", "profile '0:1:2' is out of order: it must be 1 <= min <= opt <= max"),
        ("x:1x3x8x8,2x3x8x8", "is neither MIN:OPT:MAX batches nor NAME:MIN,OPT,MAX shapes"),
        ("1x3x8x8", "is neither MIN:OPT:MAX batches nor"),
        ("x:1x3xax8", "is neither MIN:OPT:MAX batches nor"),
        ("y:1x3x8x8", "the model has no input 'y'; its inputs: x"),
        ("x:1x3x8", "input 'x' has 4 dimensions, 1x3x8 has 3"),
        ("x:1x4x8x8", "the file has input 'x' fixed at batchx3xheightxwidth, not 1x4x8x8"),
        ("x:2x3x8x8,1x3x8x8,4x3x8x8", "is out of order: it must be 1 <= min <= opt <= max everywhere"),
        ("", "is neither MIN:OPT:MAX batches nor"),
    ],
)
def test_text_that_is_no_profile(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_profiles(text, [IMAGE], DIMS)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["static", "1:4:8", "4", "x:4x3x224x224", "x:1x3x224x224,4x3x224x224,8x3x224x224"])
def test_a_static_file_takes_no_other_shape(text: str) -> None:
    with pytest.raises(UserError, match=r"fixed.*export it") as caught:
        parse_profiles(text, [FIXED], Dims(4, 224, 224))
    assert "\n" not in str(caught.value)


def test_a_free_batch_that_nobody_gives() -> None:
    with pytest.raises(UserError, match=r"the batch of 'x' is free; give a batch, or a range MIN:OPT:MAX"):
        parse_profiles("static", [IMAGE], Dims(0, 224, 224))


def test_an_input_without_a_shape() -> None:
    with pytest.raises(UserError, match="no shape is given for input 'input:mask', which is batchxlength"):
        parse_profiles("x:1x3x8x8", [IMAGE, MASK], DIMS)


@given(st.lists(st.integers(1, 64), min_size=3, max_size=3), st.integers(1, 64))
def test_a_batch_is_outside_or_the_profile_has_it(sizes: list[int], batch: int) -> None:
    low, opt, high = sorted(sizes)
    text = f"{low}:{opt}:{high}"
    assert batch_range(text) == (low, opt, high)
    why = explain_outside(text, batch)
    assert bool(why) == (not low <= batch <= high)
    assert "\n" not in why


def test_outside_names_what_is_allowed() -> None:
    assert explain_outside("1:4:8|32", 16) == "batch 16 is outside the engine's profile (batches 1 to 8 or 32)"
    assert explain_outside("static", 16) == explain_outside("1:4:8|16:32:64", 16) == explain_outside("x:1x3", 16) == ""
