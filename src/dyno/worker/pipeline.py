"""Batches through a session with all its slots in flight: the next are read while it runs, and what came out is worked
up beside it, so that the engine is what an evaluation waits for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.sources import Source

Outputs = dict[str, np.ndarray]
Keep = Callable[[int, Outputs], None]
Work = Callable[[int, Outputs], Any]

AHEAD = 2  # batches that are read, or lie ready, while every slot has one
BACKLOG = 8  # batches whose outputs may wait to be worked up before the loop waits for them
SMALL = 4 << 20  # outputs of fewer bytes are copied out of the slot, so that it can run again at once
LEAST_SAMPLES = 3  # of the times of each stage


class Pipeline:
    """One session and one source of batches; buffers are made once, where the session reads them fastest."""

    def __init__(self, session: Session, source: Source, helpers: int = 1) -> None:
        self._session, self._source, self._helpers = session, source, helpers
        self._buffers = [session.stage(source.room()) for _ in range(session.slots + AHEAD)]

    def run(self, count: int, keep: Keep, work: Work) -> list[Any]:
        """The first `count` batches; returns what `work` made of each one's outputs, in order.

        `keep` is called in order and at once, `work` in other threads; the outputs are theirs until they return.
        """
        with ThreadPoolExecutor(self._helpers) as readers, ThreadPoolExecutor(self._helpers) as workers:
            feeder = _Feeder(self._source, self._buffers, readers, count)
            return _Flow(self._session, feeder, workers, keep, work).run(count)

    def stages(self, work: Work, seconds: float) -> dict[str, np.ndarray]:
        """Seconds per batch of each stage, one batch at a time in one thread so that no stage overlaps another.

        `preprocess` ends with the input bound, `inference` with the outputs in host memory, `postprocess` with `work`.
        On a GPU the copy of the input is only queued by `bind`, so its time is part of `inference`.
        """
        now, found, feed = time.perf_counter, [], self._buffers[0]
        deadline, turn = now() + seconds, 0
        while turn < LEAST_SAMPLES or now() < deadline:
            start = now()
            for part in range(self._source.parts):
                self._source.fill(feed, turn, part)
            self._session.bind(feed)
            bound = now()
            self._session.run()
            self._session.wait()
            fetched = self._session.fetch()
            ran = now()
            work(turn, fetched)
            found.append((bound - start, ran - bound, now() - ran))
            turn += 1
        columns = np.asarray(found, np.float64).T
        return dict(zip(("preprocess", "inference", "postprocess"), columns, strict=True))


class _Feeder:
    """Reads batches in order into buffers that come back; only the loop's own thread calls it."""

    def __init__(self, source: Source, buffers: list[Any], readers: ThreadPoolExecutor, count: int) -> None:
        self._source, self._readers, self._count = source, readers, count
        self._free = deque(buffers)
        self._ready: deque[tuple[Any, list[Future[None]]]] = deque()
        self._next = 0
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._free and self._next < self._count:
            feed, number = self._free.popleft(), self._next
            parts = range(self._source.parts)
            self._ready.append((feed, [self._readers.submit(self._source.fill, feed, number, part) for part in parts]))
            self._next += 1

    def take(self) -> Any:
        feed, parts = self._ready.popleft()
        for part in parts:
            part.result()
        return feed

    def give(self, feed: Any) -> None:
        self._free.append(feed)
        self._read_ahead()


class _Flow:
    """One run of the loop, and what is where in it."""

    def __init__(self, session: Session, feeder: _Feeder, workers: ThreadPoolExecutor, keep: Keep, work: Work) -> None:
        self._session, self._feeder, self._workers = session, feeder, workers
        self._keep, self._work = keep, work
        self._fed: list[Any] = [None] * session.slots
        self._reading: list[Future[Any] | None] = [None] * session.slots  # work that still reads the slot's outputs
        self._made: list[Future[Any]] = []

    def run(self, count: int) -> list[Any]:
        session, slots = self._session, self._session.slots
        for turn in range(count):
            slot = turn % slots
            if turn >= slots:
                self._finish(turn - slots)
            self._fed[slot] = self._feeder.take()
            session.bind(self._fed[slot], slot)
            if (reader := self._reading[slot]) is not None:
                reader.result()
            session.run(slot)
        for late in range(max(0, count - slots), count):
            self._finish(late)
        return [made.result() for made in self._made]

    def _finish(self, turn: int) -> None:
        slot = turn % self._session.slots
        self._session.wait(slot)
        fetched = self._session.fetch(slot)
        self._feeder.give(self._fed[slot])
        self._keep(turn, fetched)
        # With one slot the next run comes at once, and with small outputs a copy costs less than waiting.
        copied = self._session.slots == 1 or sum(a.nbytes for a in fetched.values()) <= SMALL
        own = {name: np.array(a) for name, a in fetched.items()} if copied else fetched
        made = self._workers.submit(self._work, turn, own)
        self._reading[slot] = None if copied else made
        self._made.append(made)
        if len(self._made) > BACKLOG:
            self._made[-BACKLOG - 1].result()
