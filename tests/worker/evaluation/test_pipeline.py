"""The pipeline feeds batches in order through every slot, never touches what an engine still reads, and overlaps."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.evaluation import evaluate
from dyno.worker.evaluation.evaluate import AHEAD, BatchSource, Pipeline

BATCH = 4


class Counting(BatchSource):
    """Batch n is n in every place."""

    def __init__(self, parts: int = 1, seconds: float = 0.0) -> None:
        self.parts, self.seconds = parts, seconds
        self.filled: list[int] = []

    def new_arrays(self):
        return {"input": np.full((BATCH, 2), -1.0, np.float32)}

    def fill(self, feed, number, part):
        time.sleep(self.seconds)
        feed["input"][part :: self.parts] = number
        self.filled.append(number)


class Late(Session):
    """Reads its input some time after `run`, in a thread of its own, as a GPU would; outputs lie in its slot."""

    def __init__(self, slots: int, seconds: float = 0.002) -> None:
        self.slots, self.seconds = slots, seconds
        self.queue = ThreadPoolExecutor(1)
        self.bound: list[np.ndarray | None] = [None] * slots
        self.places = [np.zeros((BATCH, 2), np.float32) for _ in range(slots)]
        self.running: list[Future[None] | None] = [None] * slots
        self.staged = 0

    def stage(self, feeds):
        self.staged += 1
        return feeds

    def bind(self, feeds, slot=0):
        self.bound[slot] = feeds["input"]

    def run(self, slot=0):
        self.running[slot] = self.queue.submit(self._compute, slot)

    def _compute(self, slot):
        time.sleep(self.seconds)
        self.places[slot][:] = 10 * self.bound[slot]

    def wait(self, slot=0):
        self.running[slot].result()

    def fetch(self, slot=0):
        return {"output": self.places[slot]}


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Late]:
    late = Late(request.param)
    yield late
    late.queue.shutdown()


def first(number: int, fetched: dict[str, np.ndarray]) -> tuple[int, float]:
    time.sleep(0.001)
    assert (fetched["output"] == fetched["output"][0, 0]).all()
    return number, float(fetched["output"][0, 0])


def nothing(number: int, fetched: dict[str, np.ndarray]) -> None:
    pass


@pytest.mark.parametrize("session", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_every_batch_once_and_in_order(session: Late, small: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "SMALL", 1 << 20 if small else 0)
    kept: list[float] = []
    result = Pipeline(session, Counting(parts=2), helpers=3).run(
        count, lambda number, fetched: kept.append(float(fetched["output"][0, 0])), first
    )
    assert result.results == [(number, 10.0 * number) for number in range(count)]
    assert kept == [10.0 * number for number in range(count)]
    assert session.staged == session.slots + AHEAD, "buffers are made once, where the session wants them"


class Passing(Late):
    """Its output is its input, where that lies."""

    def fetch(self, slot=0):
        return {"output": self.bound[slot]}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("slots", [1, 3])
def test_an_output_may_be_the_input_itself(slots: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "SMALL", 1 << 20 if small else 0)
    session, kept = Passing(slots, seconds=0), list[float]()

    def keep(number: int, fetched: dict[str, np.ndarray]) -> None:
        time.sleep(0.002)  # so that a buffer that was given back too soon is filled anew by now
        kept.append(float(fetched["output"].mean()))

    result = Pipeline(session, Counting()).run(10, keep, first)
    session.queue.shutdown()
    assert kept == [*range(10)] and result.results == [(number, float(number)) for number in range(10)]


@pytest.mark.parametrize("session", [2], indirect=True)
def test_buffers_serve_a_second_run(session: Late) -> None:
    source = Counting()
    both = Pipeline(session, source)
    assert both.run(5, nothing, first).results == both.run(5, nothing, first).results
    assert session.staged == session.slots + AHEAD
    assert source.filled == [*range(5), *range(5)]


@pytest.mark.parametrize("session", [1, 3], indirect=True)
def test_warm_up_fills_the_pipeline_and_counts_for_nothing(session: Late) -> None:
    class SlowStart(Counting):
        def fill(self, feed, number, part):
            time.sleep(0.1 if len(self.filled) < 2 else 0)
            super().fill(feed, number, part)

    kept: list[int] = []
    source = SlowStart()
    begin = time.perf_counter()
    result = Pipeline(session, source).run(6, lambda number, fetched: kept.append(number), first, warm_up=4)
    took = time.perf_counter() - begin
    assert result.seconds > 0.01 and took - result.seconds > 0.19, "six batches of 2 ms, without the two slow ones"
    assert source.filled == [*range(4), *range(6)]
    assert kept == [*range(6)]
    assert result.results == [(number, 10.0 * number) for number in range(6)]


@pytest.mark.parametrize("session", [2], indirect=True)
def test_reading_running_and_ranking_overlap(session: Late) -> None:
    meeting = threading.Barrier(3)  # one after the other, none of the three would meet the others

    class Reading(Counting):
        def fill(self, feed, number, part):
            if number == 9:
                meeting.wait(600)
            super().fill(feed, number, part)

    def compute(slot: int) -> None:
        if (session.bound[slot] == 8).all():
            meeting.wait(600)
        Late._compute(session, slot)

    def rank(number: int, fetched: dict[str, np.ndarray]) -> int:
        if number == 7:
            meeting.wait(600)
        return number

    session._compute = compute  # type: ignore[method-assign]
    assert Pipeline(session, Reading(), helpers=2).run(20, nothing, rank).results == [*range(20)]


@pytest.mark.parametrize("session", [1], indirect=True)
def test_stages_do_not_overlap(session: Late) -> None:
    stages = Pipeline(session, Counting(seconds=0.004)).stages(first, 0.05)
    assert list(stages) == ["preprocess", "inference", "postprocess"]
    assert len({len(samples) for samples in stages.values()}) == 1 and len(stages["inference"]) >= 3
    for name, least in (("preprocess", 0.004), ("inference", 0.002), ("postprocess", 0.001)):
        assert stages[name].min() >= least


@pytest.mark.parametrize("session", [3], indirect=True)
def test_an_error_in_any_thread_ends_the_run(session: Late) -> None:
    def broken(number: int, fetched: dict[str, np.ndarray]) -> None:
        raise ValueError("no ranks")

    with pytest.raises(ValueError, match="no ranks"):
        Pipeline(session, Counting()).run(30, nothing, broken)
    source = Counting()
    source.fill = lambda feed, number, part: 1 // (3 - number)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        Pipeline(session, source).run(30, nothing, first)
    assert threading.active_count() < 20
