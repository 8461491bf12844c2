"""When a graph is recorded and when it is replayed, without a GPU; tests/gpu has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dyno.worker.backends.tensor_rt import run
from dyno.worker.backends.tensor_rt.run import TensorRTSession


class Recorded:
    """A CUDA graph that notes what is done with it."""

    def __init__(self, stream: Any, work: Callable[[], None], done: list[str]) -> None:
        done.append("record")
        work()
        self.done = done

    def launch(self) -> None:
        self.done.append("replay")

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Any, list[str]]]:
    def make(graphed: bool) -> tuple[Any, list[str]]:
        done: list[str] = []
        monkeypatch.setattr(run, "Graph", lambda stream, work: Recorded(stream, work, done))
        made: Any = TensorRTSession.__new__(TensorRTSession)
        made._graphed, made._graphs, made._runs, made._results, made._compute = graphed, [None], [0], [{}], None
        made._launch = lambda slot: done.append("launch")
        return made, done

    return make


def test_the_second_run_of_a_shape_is_recorded_and_the_next_ones_replayed(session: Any) -> None:
    made, done = session(True)
    for _ in range(4):
        made.enqueue(0)
    assert done == ["launch", "record", "launch", "replay", "replay", "replay"]
    made._forget(0)
    made.enqueue(0)
    assert done[6:] == ["close", "launch"], "another shape begins anew"


def test_without_graphs_every_run_is_launched(session: Any) -> None:
    made, done = session(False)
    for _ in range(3):
        made.enqueue(0)
    assert done == ["launch"] * 3
