"""Input data of models: real images unchanged, or reproducible random numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dyno.worker.inputs.input_data import Images, hash_feeds, read_batches
from dyno.worker.spec import DataSpec, Dims, Preprocess, Tensor
from refusals import refuses

IMAGE = Tensor("input", "float32", ("batch", 3, 4, 4))
FREE = Tensor("input", "float32", ("batch", 3, "height", "width"))
DIMS = Dims(3, 4, 4)
PREPROCESS = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 4), dtype=np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    np.save(tmp_path / "labels.npy", np.arange(10) % 4)
    np.save(tmp_path / "test.npy", np.array([8, 2, 5, 7]))
    return DataSpec("ten", str(tmp_path), count=4)


def test_pixels_are_normalised_as_in_training(data: DataSpec) -> None:
    images = Images(data, PREPROCESS)
    pixels = np.load(Path(data.folder) / "images.npy")[[8, 2]] / 255.0
    expected = (pixels - np.reshape((0.5, 0.4, 0.3), (1, 3, 1, 1))) / np.reshape((0.2, 0.3, 0.4), (1, 3, 1, 1))
    got = images.read_batch(0, 2)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert (len(images), images.shape) == (4, (3, 4, 4))


def test_batches_wrap_around(data: DataSpec) -> None:
    images = Images(data, PREPROCESS)
    np.testing.assert_array_equal(images.read_batch(2, 4), images.read_batch(0, 4)[[2, 3, 0, 1]])
    fed = [feed["input"] for feed in read_batches(data, PREPROCESS, [IMAGE], DIMS, 3)]
    np.testing.assert_array_equal(np.concatenate(fed), images.read_batch(0, 9))


def test_a_single_mean_applies_to_every_channel(data: DataSpec) -> None:
    grey = Images(data, Preprocess(mean=(0.5,), std=(0.25,))).read_batch(0, 1)
    assert grey.min() >= -2 and grey.max() <= 2 and grey.std() > 0.5


def test_random_inputs_are_non_zero_and_reproducible() -> None:
    def fed(seed: int) -> list[dict[str, np.ndarray]]:
        return list(read_batches(DataSpec(seed=seed), PREPROCESS, [IMAGE], DIMS, 4))

    first, again, other = fed(0), fed(0), fed(1)
    assert all(feed["input"].shape == (3, 3, 4, 4) and feed["input"].dtype == np.float32 for feed in first)
    assert 0.5 < np.std([f["input"] for f in first]) < 2
    assert not np.array_equal(first[0]["input"], first[1]["input"]), "the rotation needs different batches"
    assert hash_feeds(first) == hash_feeds(again) != hash_feeds(other)


def test_int8_inputs_span_all_values_and_masks_only_0_and_1() -> None:
    tensors = [Tensor(name, "int8", (1, 5000)) for name in ("x", "mask")]
    (fed,) = read_batches(DataSpec(), PREPROCESS, tensors, DIMS, 1)
    assert [(int(v.min()), int(v.max())) for v in (fed["x"], fed["mask"])] == [(-128, 127), (0, 1)]


def test_float_and_uint8_inputs_get_the_same_random_image() -> None:
    raw = list(read_batches(DataSpec(), PREPROCESS, [replace(IMAGE, dtype="uint8")], DIMS, 2))
    ready = list(read_batches(DataSpec(), PREPROCESS, [IMAGE], DIMS, 2))
    assert {feed["input"].dtype.name for feed in raw} == {"uint8"}
    mean, std = (np.float32(v).reshape(1, 3, 1, 1) for v in (PREPROCESS.mean, PREPROCESS.std))
    for pixels, image in zip(raw, ready, strict=True):
        np.testing.assert_allclose((pixels["input"] / 255.0 - mean) / std, image["input"], rtol=1e-5, atol=1e-6)
    assert hash_feeds(raw, PREPROCESS) == hash_feeds(ready, PREPROCESS) == hash_feeds(ready) != hash_feeds(raw)


def test_a_uint8_input_gets_raw_pixels_of_the_data_set(data: DataSpec) -> None:
    raw = next(read_batches(data, PREPROCESS, [replace(IMAGE, dtype="uint8")], DIMS, 1))["input"]
    assert raw.dtype == np.uint8
    np.testing.assert_array_equal(raw, np.load(Path(data.folder) / "images.npy")[[8, 2, 5]])


def test_a_feature_map_is_not_an_image() -> None:
    (feed,) = read_batches(DataSpec(), PREPROCESS, [Tensor("map", "float32", ("batch", 64, 4, 4))], Dims(8, 4, 4), 1)
    assert abs(feed["map"].mean()) < 0.1 and 0.9 < feed["map"].std() < 1.1


@pytest.mark.parametrize(
    ("dtype", "low", "high", "made"),
    [
        ("float16", -9, 9, "float32"),
        ("bfloat16", -9, 9, "float32"),
        ("float64", -9, 9, "float32"),
        ("int64", 0, 1, "int64"),
        ("uint8", 0, 255, "uint8"),
        ("bool", 0, 1, "bool"),
    ],
)
def test_random_numbers_fit_the_type(dtype: str, low: int, high: int, made: str) -> None:
    tensor = Tensor("ids", dtype, ("batch", 64))
    (feed,) = read_batches(DataSpec(), PREPROCESS, [tensor], Dims(8, 1, 1, {"ids": (8, 64)}), 1)
    array = feed["ids"]
    assert (array.shape, array.dtype.name) == ((8, 64), made)
    assert low <= array.min() < array.max() <= high
    assert array.max() > 1 or high == 1


def test_several_inputs_are_all_fed() -> None:
    mask = Tensor("mask", "float32", (3, 2))
    (feed,) = read_batches(DataSpec(), PREPROCESS, [IMAGE, mask], DIMS, 1)
    assert {name: a.shape for name, a in feed.items()} == {"input": (3, 3, 4, 4), "mask": (3, 2)}


@pytest.mark.parametrize(
    ("tensors", "dims", "message"),
    [
        ([FREE], Dims(3, 8, 8), r"the images are 3x4x4 but the model's input 'input' is 3x8x8; set --size"),
        ([IMAGE, Tensor("mask", "float32", (3, 2))], DIMS, "images fit a model with one N x C x H x W input"),
        ([Tensor("ids", "int64", (3, 2))], DIMS, "images fit a model with one N x C x H x W input"),
    ],
)
def test_mismatched_images_are_refused(data: DataSpec, tensors: list[Tensor], dims: Dims, message: str) -> None:
    refuses(message, next, read_batches(data, PREPROCESS, tensors, dims, 1))


def test_a_damaged_data_set_is_named(data: DataSpec) -> None:
    path = Path(data.folder) / "images.npy"
    path.write_bytes(path.read_bytes()[:100])
    refuses(r"can't be read .*; remove the folder to decode again", Images, data, PREPROCESS)
    path.unlink()
    refuses("can't be read", Images, data, PREPROCESS)


def test_the_feed_hash_covers_names_and_bytes() -> None:
    a, b = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32)[::-1]
    assert hash_feeds([{"x": a, "y": b}]) == hash_feeds([{"y": np.ascontiguousarray(b), "x": a}])
    assert hash_feeds([{"x": a, "y": b}]) != hash_feeds([{"x": a, "z": b}])
    assert hash_feeds([{"x": a}]) == hash_feeds([{"y": a}])  # the name of a file's only input is arbitrary
    assert hash_feeds([{"x": a}]) != hash_feeds([{"x": b}])
