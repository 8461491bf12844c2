"""The outputs of a batch are those of its inputs, a row for each, on any axis; anything else fails the trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.evaluation.evaluate import evaluate, find_rows
from dyno.worker.spec import Dims, ModelSpec, Tensor, Trial, UserError

Function = Callable[[np.ndarray], dict[str, np.ndarray]]
WEIGHTS = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)


class Net(Session):
    """A function of the one input."""

    def __init__(self, function: Function, shape: tuple[int, ...], outputs: tuple[Tensor, ...] = ()) -> None:
        self.inputs, self.outputs, self.function = (Tensor("x", "float32", shape),), outputs, function

    def bind(self, feeds: Any, slot: int = 0) -> None:
        self.bound = feeds["x"]

    def run(self, slot: int = 0) -> None:
        self.answered = self.function(self.bound)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return self.answered


def trial(batch: int = 8, *declared: tuple[int | str, ...], **shapes: tuple[int | str, ...]) -> Trial:
    outputs = tuple(Tensor(f"y{k}" if k else "y", "float32", shape) for k, shape in enumerate(declared))
    return Trial(ModelSpec("net", "fake:net", outputs=outputs), "fake", "fp32", Dims(batch, 0, 0, shapes))


def scores(x: np.ndarray) -> np.ndarray:
    return x @ WEIGHTS


def detections(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = scores(x)[scores(x)[:, 0] > 0]
    return found


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: {"y": scores(x).mean(0, keepdims=True)}, "the file says batch x 5, but gave 1 x 5 for a batch of 8"),
        (lambda x: {"y": scores(x).reshape(1, -1)}, "the file says batch x 5, but gave 1 x 40 for a batch of 8"),
        (lambda x: {"y": scores(x) - scores(x).mean(0)}, r"change by \d+% of their size with the other inputs"),
    ],
)
def test_what_a_file_declares_must_hold(function: Function, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_rows(Net(function, (8, 4)), trial(8, ("batch", 5)), 8)
    assert find_rows(Net(function, (1, 4)), trial(1, ("batch", 5)), 1).axes == {"y": 0}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"y": scores(x), "loss": np.float32(np.square(x).mean())},
        lambda x: {"y": scores(x), "anchors": np.ones((1, 7, 4), np.float32)},
        lambda x: {"anchors": WEIGHTS},
        lambda x: {"loss": np.square(x).mean(keepdims=True)[:1]},
        lambda x: {"boxes": detections(x)},
        lambda x: {"tokens": np.repeat(scores(x), 3, axis=0)},
        lambda x: {"pairs": scores(x) @ scores(x).T},
        lambda x: {"labels": scores(x).argmax(1)},
        lambda x: {"usage": np.abs(scores(x)).mean(0), "y": scores(x)},
    ],
    ids="loss, anchors, table, loss alone, detections, flattened, pairs, labels, usage".split(", "),
)
def test_outputs_without_a_row_for_each_input_are_not_condemned(function: Function) -> None:
    assert find_rows(Net(function, (8, 4)), trial(), 8).warning == ""


def test_detections_of_any_number_may_be_declared_as_a_batch() -> None:
    assert find_rows(Net(lambda x: {"y": detections(x)}, (8, 4)), trial(8, ("batch", 5)), 8).axes == {"y": None}


def test_a_free_axis_of_the_engine_has_any_number_of_rows() -> None:
    def most(x: np.ndarray) -> dict[str, np.ndarray]:
        return {"y": np.sort(scores(x), axis=0)[-3:]}

    free = (Tensor("y", "float32", ("found", 5)),)
    assert find_rows(Net(most, (8, 4), free), trial(), 8).axes == {"y": None}
    with pytest.raises(UserError, match="the outputs are 3 x 5 for a batch of 8, which has no row for each input"):
        find_rows(Net(most, (8, 4)), trial(), 8)


def test_one_row_of_all_inputs_is_none_for_each() -> None:
    with pytest.raises(UserError, match="the outputs are 1 x 40 for a batch of 8, which has no row for each input"):
        find_rows(Net(lambda x: {"y": scores(x).reshape(1, -1)}, (8, 4)), trial(), 8)


def test_rows_that_change_with_others_where_the_axis_is_assumed_are_a_warning() -> None:
    rows = find_rows(Net(lambda x: {"y": np.cumsum(x, 0)}, (8, 4)), trial(), 8)
    assert "the model mixes them, or the batch is another axis" in rows.warning


def test_random_outputs_prove_nothing() -> None:
    rng = np.random.default_rng(0)
    rows = find_rows(Net(lambda x: {"y": rng.standard_normal((8, 5))}, (8, 4)), trial(8, ("batch", 5)), 8)
    assert (rows.axes, rows.warning) == ({"y": 0}, "")


def test_the_rows_of_a_later_axis_are_stacked_in_the_order_of_the_inputs() -> None:
    """Of 7 inputs in batches of 3: what is stored is what each gives alone."""

    def net(x: np.ndarray) -> dict[str, np.ndarray]:
        seen.append(np.array(x))
        return {"y": np.cumsum(x @ WEIGHTS, axis=0)}

    seen = list[np.ndarray]()
    one = trial(3, (6, "batch", 5), x=(6, "batch", 4))
    one = Trial(one.model, "fake", "fp32", one.dims, data=type(one.data)(count=7))
    stored = evaluate(Net(net, (6, 3, 4)), one).arrays["output:y"]
    inputs = np.concatenate(seen[-3:], axis=1)[:, :7]
    expected = np.cumsum(np.einsum("tbi,io->bto", inputs, WEIGHTS), axis=1)
    np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)
