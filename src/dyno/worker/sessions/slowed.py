"""A session that is slowed down on purpose, by a known share: what the self-test has to see."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from dyno.worker.backend import Arrays, Session
from dyno.worker.facts.engine import EngineFacts

now = time.perf_counter_ns


class SlowedSession(Session):
    """The session, each of whose runs takes `share` longer than it did by itself.

    On a CPU the processor is kept busy after a run, for that share of what this run has just taken. What is queued on a
    GPU's stream is timed by events on the stream, so there the host is kept busy before the launch, while the stream is
    empty, for the share of what the run before took: both clocks see it. With 0 nothing is added but the time of the
    wrapper itself, which therefore belongs around whatever a slowed session is compared with.
    """

    def __init__(self, session: Session, share: float) -> None:
        self.session, self.share = session, share
        self.inputs, self.outputs = session.inputs, session.outputs
        self.slots, self.stream = session.slots, session.stream
        self._began = self._took = 0

    def run(self, slot: int = 0) -> None:
        """See `Session.run`."""
        if self.stream is not None:
            _busy_for(int(self.share * self._took))
        self._began = now()
        self.session.run(slot)

    def wait(self, slot: int = 0) -> None:
        """See `Session.wait`."""
        self.session.wait(slot)
        self._took = now() - self._began
        if self.stream is None:
            _busy_for(int(self.share * self._took))

    def stage(self, feeds: Arrays) -> Arrays:
        """See `Session.stage`."""
        return self.session.stage(feeds)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """See `Session.bind`."""
        self.session.bind(feeds, slot)

    def restoring(self, feeds: Arrays) -> Callable[[], None] | None:
        """See `Session.restoring`."""
        return self.session.restoring(feeds)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """See `Session.fetch`."""
        return self.session.fetch(slot)

    def parts(self, feeds: Arrays) -> dict[str, float]:
        """See `Session.parts`."""
        return self.session.parts(feeds)

    @property
    def batches(self) -> tuple[int, int, int] | None:
        """See `Session.batches`."""
        return self.session.batches

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See `Session.reshape`."""
        self.session.reshape(shapes)

    def device_memory(self) -> int:
        """See `Session.device_memory`."""
        return self.session.device_memory()

    def facts(self) -> EngineFacts:
        """See `Session.facts`."""
        return self.session.facts()

    def close(self) -> None:
        """See `Session.close`."""
        self.session.close()


def _busy_for(nanoseconds: int) -> None:
    # Counted from here on, so that the calls on the way are as long with a share of 0: a run may take but 100 µs.
    # sleep() would be late by more than the share of many a run.
    end = now() + nanoseconds
    while now() < end:
        pass
