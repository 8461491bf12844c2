"""Free dimensions become the trial's, symbols get values, and images may be N x H x W x C."""

from pathlib import Path

import numpy as np
import pytest

from dyno.worker.inputs.input_data import Images, hash_feeds, read_batches
from dyno.worker.inputs.specs import channels_first, channels_last, find_axes, fit_feed, image_of, static_shapes
from dyno.worker.jobs.inspect_model import batch_axes, described_shapes, fixed_batch
from dyno.worker.spec import DataSpec, Dims, Preprocess, Tensor, UserError
from refusals import refuses

IMAGE = Tensor("input", "float32", ("batch", 3, "height", "width"))


def test_batch_and_size_fill_the_free_dimensions_of_an_image() -> None:
    assert static_shapes([IMAGE], Dims(8, 224, 320)) == {"input": (8, 3, 224, 320)}


def test_named_shapes_fill_the_other_free_dimensions() -> None:
    ids, mask = (Tensor(name, "int64", ("batch", "length")) for name in ("ids", "mask"))
    both = {"ids": (2, 128), "mask": (2, 128)}
    assert static_shapes([ids, mask], Dims(1, 0, 0, both)) == both
    refuses("'ids' has a free dimension 'length'", static_shapes, [ids], Dims(1, 0, 0))
    refuses("'ids' has 2 dimensions, not 128", static_shapes, [ids], Dims(1, 0, 0, {"ids": (128,)}))


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (Dims(4, 224, 224), "fixed batch 1, not 4; export it with --batch dynamic"),
        (Dims(1, 256, 224), "fixed height 224"),
    ],
)
def test_a_fixed_image_shape_cannot_be_changed(dims: Dims, said: str) -> None:
    refuses(said, static_shapes, [Tensor("input", "float32", (1, 3, 224, 224))], dims)


def test_a_fixed_vector_input_may_lack_the_batch() -> None:
    assert static_shapes([IMAGE, Tensor("scale", "float32", (2,))], Dims(8, 32, 32))["scale"] == (2,)


def test_a_fitting_feed_is_not_copied() -> None:
    feed = np.ones((2, 3), np.float32)
    assert fit_feed({"x": feed}, Tensor("x", "float32", (2, 3)), (2, 3)) is feed


def test_feeds_are_cast_and_reordered_but_wrong_shapes_are_refused() -> None:
    feed = np.arange(6, dtype=np.float32).reshape(3, 2).T
    made = fit_feed({"x": feed}, Tensor("x", "int64", (2, 3)), (2, 3))
    assert made.dtype == np.int64
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, feed)
    refuses("'x' wants 2x3, but got 3x2", fit_feed, {"x": feed.T}, Tensor("x", "float32", (2, 3)), (2, 3))
    refuses("input 'x' was not fed, only y", fit_feed, {"y": feed}, Tensor("x", "float32", (2, 3)), (2, 3))


def test_a_second_image_has_a_size_of_its_own() -> None:
    small, mask = Tensor("small", "float32", ("batch", 3, 16, 16)), Tensor("mask", "bool", (1, 1, 8, 8))
    found = static_shapes([IMAGE, small, mask], Dims(4, 32, 32))
    assert found == {"input": (4, 3, 32, 32), "small": (4, 3, 16, 16), "mask": (1, 1, 8, 8)}


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
def test_the_batch_axis_is_found_by_name(inputs: dict[str, Axes], outputs: dict[str, Axes], axis: int | None) -> None:
    assert batch_axes(tensors(**inputs), tensors(**outputs)) == {"x": axis}


def test_an_input_without_the_batch_has_no_batch_axis() -> None:
    both = tensors(x=("batch", 7), position_ids=("length",), table=(4, 2))
    assert batch_axes(both, tensors(y=("batch", 5))) == {"x": 0, "position_ids": None, "table": None}


def test_without_known_outputs_the_first_axis_is_the_batch() -> None:
    assert batch_axes(tensors(x=(8, 3, 32, 32)), []) == {"x": 0}


@pytest.mark.parametrize("mask", [f"{PAST} + sequence_length", "total_sequence_length", "attention_mask_length"])
def test_past_and_new_lengths_sum_to_the_total(mask: str) -> None:
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


def test_inconsistent_lengths_are_refused() -> None:
    inputs = decoder(f"{PAST} + sequence_length")
    axes = batch_axes(inputs, [])
    with pytest.raises(UserError, match=r"don't add up: past_sequence_length 15, sequence_length 1, for a sum of 17"):
        described_shapes(inputs, axes, {"ids": ("batch", 1), "mask": ("batch", 17), "past_key": ("batch", 4, 15, 8)})
    with pytest.raises(UserError, match="leave -2 for past_sequence_length"):
        described_shapes(inputs, axes, {"ids": ("batch", 3), "mask": ("batch", 1)})


def test_missing_lengths_are_listed_with_the_options_to_give() -> None:
    inputs = decoder(f"{PAST} + sequence_length")
    with pytest.raises(UserError) as refused:
        described_shapes(inputs, batch_axes(inputs, []), {})
    assert "sequence_length (ids, mask); past_sequence_length (mask, past_key, past_value)" in str(refused.value)
    assert "--shapes ids:batchx<sequence_length> --shapes past_key:batchx4x<past_sequence_length>x8" in str(
        refused.value
    )


def test_dimension_formulas_are_solved() -> None:
    inputs = tensors(x=("batch", "s0"), y=("batch", "2*s0 + 1"), z=("batch", "s0 - 1"))
    found = described_shapes(inputs, batch_axes(inputs, []), {"y": ("batch", 9)})
    assert found == {"x": ("batch", 4), "y": ("batch", 9), "z": ("batch", 3)}


def test_a_mask_shares_the_free_size_of_its_image() -> None:
    inputs = tensors(pixels=("batch", 3, "h", "w"), mask=("batch", "h", "w"))
    assert described_shapes(inputs, batch_axes(inputs, []), {}) == {"mask": ("batch", "height", "width")}


def test_numeric_shapes_fix_the_batch() -> None:
    inputs = tensors(x=("time", "batch", 16))
    axes = batch_axes(inputs, [])
    assert fixed_batch(inputs, axes, {"x": (50, 4, 16)}) == 4
    assert described_shapes(inputs, axes, {"x": (50, 4, 16)}) == {"x": (50, "batch", 16)}
    assert fixed_batch(inputs, axes, {"x": (50, "batch", 16)}) == 0
    assert fixed_batch(tensors(x=("seq", 16)), {"x": None}, {}) == 1


@pytest.mark.parametrize("name", ["batch", "batch_size"])
def test_a_later_batch_axis_is_found_under_any_name(name: str) -> None:
    """The file may even use Dyno's own names: a recurrent network's state of two layers beside its sound."""
    inputs = [Tensor("sound", "float32", (name, 512)), Tensor("state", "float32", (2, name, 128))]
    shapes = described_shapes(inputs, batch_axes(inputs, [Tensor("state_n", "float32", (2, name, 128))]), {})
    assert shapes == {"state": (2, "batch", 128)}
    assert Dims(2, 0, 0, shapes).batch_axis("state", (2, 2, 128)) == 1


DIMS = Dims(2, 6, 5)
PREPROCESS = Preprocess()


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        (("n", 3, 32, 32), False),
        (("n", 32, 32, 3), True),
        ((1, "h", "w", 1), True),
        ((1, 1, "h", "w"), False),
        ((1, 3, 3, 3), False),
        ((1, "c", "h", "w"), False),
        ((1, 64, 8, 8), False),
        ((1, 64, 4, 4), False),
        ((1, 32, 3), False),
    ],
)
def test_channels_last_is_detected_from_the_shape(shape: tuple[int | str, ...], last: bool) -> None:
    assert channels_last(shape) is last
    assert find_axes(shape) == ((3, 1, 2) if last else (1, 2, 3))


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (7, 3, 6, 5), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(7))
    np.save(tmp_path / "test.npy", np.arange(7)[::-1])
    return DataSpec("noise", str(tmp_path))


def fed(data: DataSpec, last: bool, dtype: str) -> np.ndarray:
    shape = ("n", "h", "w", 3) if last else ("n", 3, "h", "w")
    (feed,) = read_batches(data, PREPROCESS, [Tensor("x", dtype, shape)], DIMS, 1)
    return feed["x"]


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("real", [True, False])
def test_both_layouts_get_the_same_images(data: DataSpec, dtype: str, real: bool) -> None:
    chosen = data if real else DataSpec()
    first, last = fed(chosen, False, dtype), fed(chosen, True, dtype)
    assert last.shape == (2, 6, 5, 3) and last.flags.c_contiguous
    np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), first)
    assert channels_first(last.shape) == first.shape


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_channels_last_images_are_read_into_given_memory(data: DataSpec, dtype: type) -> None:
    images = Images(data, PREPROCESS, last=True)
    place = np.zeros((2, 6, 5, 3), dtype)
    images.read_into(place, 3)
    np.testing.assert_allclose(place, images.read_batch(3, 2, "uint8" if dtype is np.uint8 else "float32"), rtol=1e-6)


def test_raw_and_normalised_pixels_have_the_same_hash(data: DataSpec) -> None:
    raw, usual = ([{"x": fed(data, True, dtype)}] for dtype in ("uint8", "float32"))
    assert hash_feeds(raw, PREPROCESS) == hash_feeds(usual, PREPROCESS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("input", ("batch_size", 3, "frames", 160)), ("degraded_audio", ("n", 1, 400, 257)), ("mel", ("n", 1, 80, "w"))],
)
def test_audio_inputs_are_not_images(name: str, shape: tuple[int | str, ...]) -> None:
    assert image_of([Tensor(name, "float32", shape)]) is None
    assert image_of([Tensor("frames", "float32", ("frames", 3, "height", "width"))]) is not None
