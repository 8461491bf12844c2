"""Known inputs as requests: which batches are formed of them, and that every answer is its own input's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dyno.serving.session import _count_inputs
from dyno.worker.backend import Arrays, Session
from dyno.worker.jobs.serve import _list_powers
from dyno.worker.serve.batching import BatchFormingSession, Rung
from dyno.worker.spec import Dims, Tensor


class Doubles(Session):
    """Twice its input; `seen` has the batches that it got, and with `pooled` it answers all requests as one."""

    def __init__(self, size: int, seen: list[list[int]], pooled: bool = False) -> None:
        self.inputs = (Tensor("x", "float32", (size, 1)), Tensor("factor", "float32", (1,)))
        self.outputs = (Tensor("y", "float32", (size, 1)),)
        self._seen, self._pooled = seen, pooled

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        self._bound = feeds

    def run(self, slot: int = 0) -> None:
        assert self._bound["x"].shape == self.inputs[0].shape
        self._seen.append([int(x) for x in self._bound["x"][:, 0]])

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        answer = self._bound["factor"] * self._bound["x"]
        return {"y": answer.sum(0, keepdims=True) if self._pooled else answer}


def answered(sizes: Sequence[int], times: int, pooled: bool = False) -> tuple[np.ndarray, list[list[int]]]:
    """The answers to so many largest batches of 1, 2, 3, …, and the batches that were formed."""
    seen: list[list[int]] = []
    ladder = [Rung(size, Doubles(size, seen, pooled), ()) for size in sizes]
    formed, most, answers = BatchFormingSession(ladder, Dims(sizes[-1], 0, 0)), sizes[-1], []
    for number in range(times):
        x = np.arange(1 + number * most, 1 + (number + 1) * most, dtype=np.float32)[:, None]
        formed.bind({"x": x, "factor": np.full(1, 2, np.float32)})
        formed.run()
        formed.wait()
        answers.append(formed.fetch()["y"])
    return np.concatenate(answers)[:, 0], seen


def test_batches_of_each_size_are_formed_full_and_not() -> None:
    answers, seen = answered((1, 2, 4, 8), 4)
    assert answers.tolist() == [2 * x for x in range(1, 33)]
    assert [1, 2, 3, 4, 5, 6, 7, 8] in seen and [8] in seen, "seven requests fill up a batch of eight"
    assert [9, 10, 11, 12] in seen and [12, 13] in seen and [25, 26, 27, 28] in seen, "three requests, then two; four"
    assert {len(batch) for batch in seen} == {1, 2, 4, 8}


@pytest.mark.parametrize("most", [1, 2, 5, 8, 19, 32, 64, 100, 128, 257, 512])
def test_the_usual_inputs_form_batches_of_every_size(most: int) -> None:
    sizes = _list_powers(most)
    answers, seen = answered(sizes, -(-_count_inputs(most) // most))
    assert {len(batch) for batch in seen} == {*sizes}
    assert answers.tolist() == [2 * x for x in range(1, len(answers) + 1)]


def test_where_only_the_largest_is_loaded_all_others_fill_it_up() -> None:
    answers, seen = answered((3,), 2)
    assert answers.tolist() == [2 * x for x in range(1, 7)]
    assert seen == [[1, 2, 3], [3, 1, 2], [4, 5, 6]]


def test_what_can_not_be_told_apart_is_answered_whole() -> None:
    answers, seen = answered((1, 2, 4), 1, pooled=True)
    assert answers.tolist() == [20] and seen[-1] == [1, 2, 3, 4]
