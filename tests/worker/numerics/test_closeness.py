"""The distance between outputs doesn't depend on their unit."""

import numpy as np
import pytest

from dyno.worker.numerics.closeness import relative_errors


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-24, 1.0, 1e20, 1e30])
def test_errors_are_relative_at_every_scale(scale: float) -> None:
    """|-5b - b| / |b| is 6, and |1.25b - b| / |b| is 1/4."""
    b = (np.array([[1.0, 2.0, 3.0]]) * scale).astype(np.float32)
    assert relative_errors(-5 * b, b) == pytest.approx([6.0], rel=1e-5)
    assert relative_errors(1.25 * b, b) == pytest.approx([0.25], rel=1e-5)
    assert relative_errors(b, b).tolist() == [0.0]


def test_errors_of_zero_and_infinite_outputs_are_defined() -> None:
    zero, one = np.zeros((1, 2), np.float32), np.array([[1e-30, 0]], np.float32)
    assert relative_errors(zero, zero).tolist() == [0.0]
    assert relative_errors(one, zero) == pytest.approx(1e-30 / np.finfo(np.float32).tiny)
    bad = np.array([[np.inf, 1.0]], np.float32)
    assert relative_errors(bad, bad).tolist() == [0.0] and relative_errors(
        bad, np.ones((1, 2), np.float32)
    ).tolist() == [np.inf]
    assert relative_errors(np.ones((1, 2), np.float32), bad).tolist() == [np.inf]
