"""Images N x H x W x C: the same pictures as N x C x H x W, in the other order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dyno.worker.inputs.input_data import Images, batches, fingerprint
from dyno.worker.inputs.specs import axes, channels_first, channels_last
from dyno.worker.spec import DataSpec, Dims, Preprocess, Tensor

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
def test_few_channels_at_the_end_and_longer_sides(shape: tuple[int | str, ...], last: bool) -> None:
    assert channels_last(shape) is last
    assert axes(shape) == ((3, 1, 2) if last else (1, 2, 3))


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", rng.integers(0, 256, (7, 3, 6, 5), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(7))
    np.save(tmp_path / "test.npy", np.arange(7)[::-1])
    return DataSpec("noise", str(tmp_path))


def fed(data: DataSpec, last: bool, dtype: str) -> np.ndarray:
    shape = ("n", "h", "w", 3) if last else ("n", 3, "h", "w")
    (feed,) = batches(data, PREPROCESS, [Tensor("x", dtype, shape)], DIMS, 1)
    return feed["x"]


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("real", [True, False])
def test_both_layouts_are_fed_the_same_pictures(data: DataSpec, dtype: str, real: bool) -> None:
    chosen = data if real else DataSpec()
    first, last = fed(chosen, False, dtype), fed(chosen, True, dtype)
    assert last.shape == (2, 6, 5, 3) and last.flags.c_contiguous
    np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), first)
    assert channels_first(last.shape) == first.shape


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_a_pipeline_reads_them_into_its_own_memory(data: DataSpec, dtype: type) -> None:
    images = Images(data, PREPROCESS, last=True)
    place = np.zeros((2, 6, 5, 3), dtype)
    images.read_into(place, 3)
    np.testing.assert_allclose(place, images.batch(3, 2, "uint8" if dtype is np.uint8 else "float32"), rtol=1e-6)


def test_pixels_count_as_what_their_normalisation_makes_of_them(data: DataSpec) -> None:
    raw, usual = ([{"x": fed(data, True, dtype)}] for dtype in ("uint8", "float32"))
    assert fingerprint(raw, PREPROCESS) == fingerprint(usual, PREPROCESS)
