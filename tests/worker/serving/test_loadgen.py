"""The queue of LoadGen's queries, with a fake library that records its calls."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.worker.serving.batching import BatchingRules, Clock, answer_requests
from dyno.worker.serving.loadgen import QueryQueue
from dyno.worker.spec import Unanswered


class Simulated(Clock):
    """A clock advanced only by work."""

    time = 0.0

    def __init__(self) -> None:
        pass

    def now(self) -> float:
        return self.time


class Library:
    """The LoadGen library, recording its calls."""

    def __init__(self) -> None:
        self.answered: list[int] = []

    def QuerySampleResponse(self, id: int, data: int, size: int) -> int:  # noqa: N802 (the library's name)
        return id

    def QuerySamplesComplete(self, ids: list[int]) -> None:  # noqa: N802
        self.answered += ids


@pytest.fixture
def queue() -> QueryQueue:
    """Return a queue of five simultaneous queries, with ids from 100."""
    made = QueryQueue(BatchingRules(2, max_wait=0.5), Simulated(), Library())
    made.issue([SimpleNamespace(id=100 + number) for number in range(5)])
    made.flush()
    return made


def told(queue: QueryQueue) -> list[int]:
    library: Any = queue._library
    return list(library.answered)


def test_every_query_is_answered_in_batches(queue: QueryQueue) -> None:
    clock: Any = queue._clock

    def answer(count: int) -> None:
        clock.time += 0.1 * count

    answer_requests(queue, answer)
    assert told(queue) == [100, 101, 102, 103, 104]
    assert queue.began == pytest.approx([0, 0, 0.2, 0.2, 0.4]) and queue.ended == pytest.approx(
        [0.2, 0.2, 0.4, 0.4, 0.5]
    )
    assert queue.size.tolist() == [2, 2, 2, 2, 1] and not queue.refused.any() and (queue.times == 0).all()
    queue.set_latencies({1: 0.3, 4: 0.6})
    assert queue.times == pytest.approx([0, -0.1, 0, 0, -0.1]), "due 0.3 s before 0.2 s, and 0.6 s before 0.5 s"


def test_an_unanswered_query_is_still_completed_for_loadgen(queue: QueryQueue) -> None:
    def answer(count: int) -> None:
        if len(told(queue)) == 2:
            raise Unanswered("too busy")

    answer_requests(queue, answer)
    assert told(queue) == [100, 101, 102, 103, 104], "LoadGen waits for each"
    assert queue.refused.tolist() == [False, False, True, True, False] and queue.complaint == "too busy"
    assert np.isnan(queue.ended).tolist() == queue.refused.tolist()


def test_an_engine_failure_completes_all_loadgen_queries(queue: QueryQueue) -> None:
    def answer(count: int) -> None:
        raise ValueError("broken")

    other = queue.take()  # taken by another instance at work
    assert other == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        answer_requests(queue, answer)
    queue.finish(other)
    queue.issue([SimpleNamespace(id=200)])
    assert sorted(told(queue)) == [100, 101, 102, 103, 104, 200]
