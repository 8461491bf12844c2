"""The batch is the axis that a file names so, and lengths follow from those of other inputs, or are asked for."""

from __future__ import annotations

import pytest

from dyno.worker.inputs.symbols import batch_axes, described_shapes, fixed_batch
from dyno.worker.spec import Tensor, UserError

Axes = tuple["int | str", ...]
PAST = "past_sequence_length"


def tensors(**shapes: Axes) -> list[Tensor]:
    return [Tensor(name, "int64" if "ids" in name or "mask" in name else "float32", s) for name, s in shapes.items()]


def decoder(mask: str) -> list[Tensor]:
    cache = ("batch_size", 4, PAST, 8)
    return tensors(ids=("batch_size", "sequence_length"), mask=("batch_size", mask), past_key=cache, past_value=cache)


@pytest.mark.parametrize(
    ("inputs", "outputs", "axis"),
    [
        ({"x": ("time", "batch", 16)}, {"y": ("batch", 5)}, 1),
        ({"x": (50, "N", 16)}, {"y": ("N", 5)}, 1),
        ({"x": ("T", "B", 16)}, {"y": ("T", "B", 5)}, 1),
        ({"x": (3, "batch_size")}, {"y": ("batch_size",)}, 1),
        ({"x": ("batch", "time", 16)}, {"y": ("batch", 5)}, 0),
        ({"x": ("unk__1", 3, "h", "w")}, {"y": ("unk__1", 5)}, 0),
        ({"x": ("frames", "videos", 16)}, {"y": ("videos", 5)}, 1),
        ({"x": ("seq", 16)}, {"y": ("seq", 5)}, None),
        ({"x": ("x_0", 3, 8, 8)}, {"y": ("y_0", 5)}, 0),
        ({"x": ("p2o.Dimension.0", 3, "p2o.Dimension.1", 8)}, {"y": ("p2o.Dimension.2", 5)}, 0),
        ({"x": (50, 4, 16)}, {"y": (4, 5)}, 1),
        ({"x": (16, 3, 32, 32)}, {"y": (1, 5)}, None),
        ({"x": (8, 3, 32, 32)}, {"y": (8, 5)}, 0),
        ({"x": ("", "", 16)}, {"y": ("", 5)}, 0),
        ({"x": ("batch_seq_len", 4)}, {"y": ("batch_seq_len", 4)}, None),
        ({"x": ("h", "w", 3)}, {"y": (1, 5)}, None),
        ({"x": ("rows", 16)}, {"y": ("rows", 5)}, 0),
    ],
)
def test_the_batch_is_the_axis_of_that_name(
    inputs: dict[str, Axes], outputs: dict[str, Axes], axis: int | None
) -> None:
    assert batch_axes(tensors(**inputs), tensors(**outputs)) == {"x": axis}


def test_an_input_without_the_batch_has_none() -> None:
    both = tensors(x=("batch", 7), position_ids=("length",), table=(4, 2))
    assert batch_axes(both, tensors(y=("batch", 5))) == {"x": 0, "position_ids": None, "table": None}


@pytest.mark.parametrize("mask", [f"{PAST} + sequence_length", "total_sequence_length", "attention_mask_length"])
def test_past_and_new_make_the_whole(mask: str) -> None:
    inputs = decoder(mask)
    axes = batch_axes(inputs, [])
    cache = ("batch", 4, 16, 8)
    for given in (
        {"ids": ("batch", 1), "mask": ("batch", 17)},
        {"ids": ("batch", 1), "past_key": ("batch", 4, 16, 8)},
        {"mask": ("batch", 17), "past_value": ("batch", 4, 16, 8)},
    ):
        found = described_shapes(inputs, axes, given)
        assert found == {"ids": ("batch", 1), "mask": ("batch", 17), "past_key": cache, "past_value": cache}
    empty = described_shapes(inputs, axes, {"ids": ("batch", 3), "past_key": ("batch", 4, 0, 8)})
    assert empty["mask"] == ("batch", 3) and empty["past_value"] == ("batch", 4, 0, 8)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    inputs = decoder(f"{PAST} + sequence_length")
    axes = batch_axes(inputs, [])
    with pytest.raises(UserError, match=r"don't add up: past_sequence_length 15, sequence_length 1, for a sum of 17"):
        described_shapes(inputs, axes, {"ids": ("batch", 1), "mask": ("batch", 17), "past_key": ("batch", 4, 15, 8)})
    with pytest.raises(UserError, match="leave -2 for past_sequence_length"):
        described_shapes(inputs, axes, {"ids": ("batch", 3), "mask": ("batch", 1)})


def test_what_is_missing_is_listed_with_the_shapes_to_give() -> None:
    inputs = decoder(f"{PAST} + sequence_length")
    with pytest.raises(UserError) as refused:
        described_shapes(inputs, batch_axes(inputs, []), {})
    assert "sequence_length (ids, mask); past_sequence_length (mask, past_key, past_value)" in str(refused.value)
    assert "--shapes ids:batchx<sequence_length> --shapes past_key:batchx4x<past_sequence_length>x8" in str(
        refused.value
    )


def test_sums_of_numbers_and_factors() -> None:
    inputs = tensors(x=("batch", "s0"), y=("batch", "2*s0 + 1"), z=("batch", "s0 - 1"))
    found = described_shapes(inputs, batch_axes(inputs, []), {"y": ("batch", 9)})
    assert found == {"x": ("batch", 4), "y": ("batch", 9), "z": ("batch", 3)}


def test_an_image_keeps_its_free_size_and_shares_it_with_a_mask_of_the_same_names() -> None:
    inputs = tensors(pixels=("batch", 3, "h", "w"), mask=("batch", "h", "w"))
    assert described_shapes(inputs, batch_axes(inputs, []), {}) == {"mask": ("batch", "height", "width")}


def test_numbers_alone_fix_the_batch_where_the_file_has_it() -> None:
    inputs = tensors(x=("time", "batch", 16))
    axes = batch_axes(inputs, [])
    assert fixed_batch(inputs, axes, {"x": (50, 4, 16)}) == 4
    assert described_shapes(inputs, axes, {"x": (50, 4, 16)}) == {"x": (50, "batch", 16)}
    assert fixed_batch(inputs, axes, {"x": (50, "batch", 16)}) == 0
    assert fixed_batch(tensors(x=("seq", 16)), {"x": None}, {}) == 1
