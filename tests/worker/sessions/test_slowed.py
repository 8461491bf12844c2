"""A session that is slowed down on purpose takes longer by the share that was asked for, and is the same otherwise."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.fake import FakeSession
from dyno.worker.jobs import run_trial
from dyno.worker.spec import Trial


class Clock:
    """Nanoseconds that pass by 10 at each look, and by what a run takes."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        self.at += 10
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(run_trial, "now", made)
    return made


class Timed(FakeSession):
    """A run of 10 µs, half of it behind `wait`, as of what is queued."""

    clock: Clock

    def run(self, slot: int = 0) -> None:
        """See `Session.run`."""
        self.clock.at += 5000

    def wait(self, slot: int = 0) -> None:
        """See `Session.wait`."""
        self.clock.at += 5000


@pytest.mark.parametrize("stream", [None, "a stream"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_each_run_is_longer_by_the_share(fake_trial: Any, clock: Clock, stream: Any, share: float) -> None:
    inner = Timed(fake_trial())
    inner.clock, inner.stream = clock, stream
    session = run_trial.SlowedSession(inner, share)
    for _ in range(2):  # on a stream the delay is that of the run before
        begin = clock.at
        session.run()
        session.wait()
    assert (clock.at - begin) / 10_000 == pytest.approx(1 + share, abs=0.01)


def test_all_else_is_the_session(fake_trial: Any) -> None:
    trial: Trial = fake_trial()
    inner = FakeSession(trial)
    session = run_trial.SlowedSession(inner, 0.1)
    (tensor,) = session.inputs
    feeds = session.stage({tensor.name: np.ones((2, 1, 4, 4), np.float32)})
    session.bind(feeds)
    begin = time.perf_counter()
    session.run()
    session.wait()
    assert time.perf_counter() - begin >= 1.1 * inner.latency_s
    assert np.array_equal(session.fetch()["output"], inner.fetch()["output"])
    assert session.facts() == inner.facts()
    assert (session.outputs, session.slots, session.batches, session.parts(feeds)) == (inner.outputs, 1, None, {})
    assert session.device_memory() == 0
    session.close()
