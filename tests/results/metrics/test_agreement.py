"""Agreement of outputs: the isclose share, the errors, values that are not finite, and the ranks' table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dyno.results.metrics import agreement
from dyno.results.trial_result import Results
from dyno.worker.spec import UserError

VALUES = arrays(np.float32, (4, 3), elements=st.floats(-1e4, 1e4, width=32))


@given(VALUES, VALUES)
def test_close_share_is_numpys_isclose(a: np.ndarray, b: np.ndarray) -> None:
    found = agreement.judge_agreement({"o": a}, {"o": b})
    x, y = a.astype(float), b.astype(float)
    assert found.close == pytest.approx(np.isclose(x, y, rtol=1e-3, atol=1e-8).mean())
    assert found.max_abs == pytest.approx(np.abs(x - y).max())
    assert found.count == 12


def ranked(scores: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """The first k classes of each row, as the worker stores them."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
    return {"topk_index": order, "topk_score": np.take_along_axis(scores, order, axis=1)}


def test_errors_of_known_values() -> None:
    found = agreement.judge_agreement({"o": np.array([[1.0, 2.2, 0.5]])}, {"o": np.array([[1.0, 2.0, 0.0]])})
    assert found.close == pytest.approx(1 / 3)
    assert found.max_abs == 0.5
    assert found.max_rel == pytest.approx(0.1)  # the zero has no relative error
    assert found.mean_abs == pytest.approx(0.7 / 3)


def test_values_that_are_not_finite_are_counted_and_never_close() -> None:
    a = np.array([[np.nan, np.inf, 1.0, np.inf]])
    b = np.array([[1.0, np.inf, 1.0, -np.inf]])
    found = agreement.judge_agreement({"o": a}, {"o": b})
    assert found.nonfinite == 2
    assert found.reference_nonfinite == 2
    assert found.close == 0.5  # 1 = 1 and the same infinity
    assert np.isfinite([found.max_abs, found.mean_abs, found.max_rel]).all()


def test_several_outputs_count_together_and_the_shorter_one_decides() -> None:
    own = {"a": np.ones((3, 2)), "b": np.zeros((3, 4))}
    other = {"a": np.ones((5, 2)), "b": np.ones((5, 4))}
    found = agreement.judge_agreement(own, other)
    assert (found.count, found.samples) == (18, 3)
    assert found.close == pytest.approx(6 / 18)


def test_outputs_that_do_not_fit_are_one_line() -> None:
    with pytest.raises(UserError, match="differ in name"):
        agreement.judge_agreement({"a": np.ones((1, 1))}, {"b": np.ones((1, 1))})
    with pytest.raises(UserError, match=r"differs in shape: \[1, 2\] against \[1, 3\]"):
        agreement.judge_agreement({"a": np.ones((1, 2))}, {"a": np.ones((1, 3))})


def test_ranks_by_hand() -> None:
    reference = ranked(np.array([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1]]), 3)
    own = ranked(np.array([[0.6, 0.9, 0.5], [0.3, 0.2, 0.1]]), 3)
    assert reference["topk_index"].tolist() == [[1, 2, 0], [0, 1, 2]]
    first, second, third = agreement.compare_ranks(own, reference)
    assert (first.mae, first.disagreement) == (0, 0)
    assert second.mae == pytest.approx(0.05)  # 0.6 in place of 0.5, in one of two inputs
    assert second.disagreement == third.disagreement == 0.5
    assert agreement.compare_ranks({}, reference) == []


def test_stored_trials(demo: Results) -> None:
    reference = demo.trials[0]
    same = next(t for t in demo if t.configuration == "openvino fp32")
    far = next(t for t in demo if t.configuration == "onnxruntime int8")
    assert agreement.read_agreement(same, reference).close > 0.9 > agreement.read_agreement(far, reference).close
    assert len(agreement.compare_ranks(far.answers, reference.answers)) == 10
    assert agreement.read_agreement(next(t for t in demo if not t.good), reference) is None
