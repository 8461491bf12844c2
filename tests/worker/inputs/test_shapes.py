"""Free dimensions become the trial's, fixed ones are respected, and feeds are fitted without needless copies."""

from __future__ import annotations

import numpy as np
import pytest

from dyno.worker.inputs.specs import fitted, static_shapes
from dyno.worker.spec import Dims, Tensor, UserError

IMAGE = Tensor("input", "float32", ("batch", 3, "height", "width"))


def test_batch_and_size_fill_the_free_dimensions_of_an_image() -> None:
    assert static_shapes([IMAGE], Dims(8, 224, 320)) == {"input": (8, 3, 224, 320)}


def test_shapes_by_name_fill_what_batch_and_size_cannot() -> None:
    ids, mask = (Tensor(name, "int64", ("batch", "length")) for name in ("ids", "mask"))
    both = {"ids": (2, 128), "mask": (2, 128)}
    assert static_shapes([ids, mask], Dims(1, 0, 0, both)) == both
    with pytest.raises(UserError, match="'ids' has a free dimension 'length'"):
        static_shapes([ids], Dims(1, 0, 0))
    with pytest.raises(UserError, match="'ids' has 2 dimensions, not 128"):
        static_shapes([ids], Dims(1, 0, 0, {"ids": (128,)}))


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (Dims(4, 224, 224), "fixed batch 1, not 4; export it with --batch dynamic"),
        (Dims(1, 256, 224), "fixed height 224"),
    ],
)
def test_a_fixed_image_is_not_asked_to_be_another(dims: Dims, said: str) -> None:
    with pytest.raises(UserError, match=said):
        static_shapes([Tensor("input", "float32", (1, 3, 224, 224))], dims)


def test_a_fixed_vector_beside_the_image_need_not_have_the_batch() -> None:
    scale = Tensor("scale", "float32", (2,))
    assert static_shapes([IMAGE, scale], Dims(8, 32, 32))["scale"] == (2,)


def test_a_fitting_feed_is_not_copied() -> None:
    feed = np.ones((2, 3), np.float32)
    assert fitted(feed, Tensor("x", "float32", (2, 3)), (2, 3)) is feed


def test_type_and_order_are_fitted_and_a_wrong_shape_refused() -> None:
    feed = np.arange(6, dtype=np.float32).reshape(3, 2).T
    made = fitted(feed, Tensor("x", "int64", (2, 3)), (2, 3))
    assert made.dtype == np.int64
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, feed)
    with pytest.raises(UserError, match="'x' wants 2x3, but got 3x2"):
        fitted(feed.T, Tensor("x", "float32", (2, 3)), (2, 3))


def test_a_second_image_has_a_size_of_its_own() -> None:
    small, mask = Tensor("small", "float32", ("batch", 3, 16, 16)), Tensor("mask", "bool", (1, 1, 8, 8))
    found = static_shapes([IMAGE, small, mask], Dims(4, 32, 32))
    assert found == {"input": (4, 3, 32, 32), "small": (4, 3, 16, 16), "mask": (1, 1, 8, 8)}
