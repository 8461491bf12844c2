"""Stages that overlap: a thread for each, bounded queues between them, order kept, every item timed.

A stage whose queue is full waits (back-pressure), so memory is bounded whatever is slow. Threads overlap because
decoding, resizing, inference and encoding happen in libraries that release Python's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from dyno.worker.video.ends import now

DEPTH = 4  # items that may wait for a stage
LIVE_DEPTH = 1  # of a live source: whatever waits is late
TICK_S = 0.25
READER_S = 1.0  # that a stopped reader has to come back, which may be waiting for its source's next byte


class Step:
    """The work of one stage; the base class hands each item on as it is."""

    name = ""

    def work(self, item: Any) -> Iterable[Any]:
        """What is handed on after this item: nothing yet, the item, or earlier ones."""
        return (item,)

    def rest(self) -> Iterable[Any]:
        """What it still holds: called at the end, and when nothing waits while it `holds`."""
        return ()

    @property
    def holds(self) -> bool:
        """Whether something is in progress that `rest` could finish while no further item waits."""
        return False


@dataclass
class Timed:
    """What one stage did, item by item, in ns of `perf_counter_ns`: when it began and ended the work, and when what it
    handed on had found room; how many items waited when it took one."""

    began: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def add(self, began: int, ended: int, waiting: int) -> None:
        """One piece of work, which is `handed` on afterwards."""
        self.began.append(began)
        self.ended.append(ended)
        self.waiting.append(waiting)

    def arrays(self, since: int) -> dict[str, np.ndarray]:
        """As arrays: seconds since that moment, and the queue's length."""
        times = {name: (np.asarray(getattr(self, name)[: len(self.handed)], np.int64) - since) / 1e9
                 for name in ("began", "ended", "handed")}  # fmt: skip
        return {**times, "waiting": np.asarray(self.waiting[: len(self.handed)], np.int64)}


class Stopped(Exception):
    """Another stage failed, or the user stopped the whole."""


class _Channel:
    """A bounded queue between two stages that can be closed by the first and stopped by anyone."""

    def __init__(self, room: int, condition: threading.Condition) -> None:
        self._items: deque[Any] = deque()
        self._room, self._condition = room, condition
        self.closed = self.stopped = False

    def put(self, item: Any) -> None:
        """Add the item as soon as there is room."""
        with self._condition:
            while len(self._items) >= self._room and not self.stopped:
                self._condition.wait()
            self._add(item)

    def offer(self, item: Any) -> int:
        """Add the item at once; returns how many older ones had to go for it."""
        with self._condition:
            gone = max(0, len(self._items) - self._room + 1)
            for _ in range(gone):
                self._items.popleft()
            self._add(item)
            return gone

    def _add(self, item: Any) -> None:
        if self.stopped:
            raise Stopped
        self._items.append(item)
        self._condition.notify_all()

    def get(self, wait: bool) -> tuple[Any, int]:
        """The next item (None: there is none now, or none any more) and how many waited, this one included."""
        with self._condition:
            while wait and not self._items and not self.closed and not self.stopped:
                self._condition.wait()
            if self.stopped:
                raise Stopped
            if not self._items:
                return None, 0
            waiting = len(self._items)
            item = self._items.popleft()
            self._condition.notify_all()
            return item, waiting

    def close(self) -> None:
        with self._condition:
            self.closed = True
            self._condition.notify_all()

    def stop(self) -> None:
        with self._condition:
            self.stopped = True
            self._condition.notify_all()


class Stages:
    """A source and the steps after it; `run` them once.

    A `live` source never waits: where its queue is full, the oldest item there is `dropped`.
    """

    def __init__(self, name: str, source: Iterator[Any], steps: Sequence[Step], live: bool = False) -> None:
        self._source, self._steps, self._live = source, steps, live
        self.dropped = 0
        # A condition for each queue: a shared one would wake every thread for every item.
        self._channels = [_Channel(LIVE_DEPTH if live else DEPTH, threading.Condition()) for _ in steps]
        self.timed = {stage: Timed() for stage in (name, *(step.name for step in steps))}
        self._errors: list[BaseException] = []
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._first = name

    def run(self, tick: Callable[[], None]) -> None:
        """Until the source ends; raises what the first stage that failed raised. `tick` is called four times a second.

        An interrupt of this thread stops every stage after the item that it is at, and is raised again.
        """
        threads = [threading.Thread(target=self._guarded, args=(self._read,), name=self._first, daemon=True)]
        for k, step in enumerate(self._steps):
            threads.append(threading.Thread(target=self._guarded, args=(self._work, k), name=step.name, daemon=True))
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                with suppress(Empty):  # an interrupted `join` takes the thread for ended, so threads say it themselves
                    self._ended.get(timeout=TICK_S)
                    running -= 1
                tick()
        finally:
            if running:
                self._stop()
            threads[0].join(READER_S)
            for thread in threads[1:]:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _stop(self) -> None:
        for channel in self._channels:
            channel.stop()

    def _guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Stopped:
            pass
        except BaseException as e:  # it is raised again where the stages were started
            self._errors.append(e)
            self._stop()
        finally:
            self._ended.put(None)

    def _read(self) -> None:
        timed, channel = self.timed[self._first], self._channels[0]
        while True:
            item = next(self._source, None)
            if item is None:
                break
            timed.add(item.began, now(), 0)
            if self._live:
                self.dropped += channel.offer(item)
            else:
                channel.put(item)
            timed.handed.append(now())
        channel.close()

    def _work(self, k: int) -> None:
        step, timed = self._steps[k], self.timed[self._steps[k].name]
        onward = self._channels[k + 1] if k + 1 < len(self._channels) else None
        while True:
            item, waiting = self._channels[k].get(wait=not step.holds)
            at_end = item is None and self._channels[k].closed and not step.holds
            began = now()
            done = list(step.rest() if item is None else step.work(item))
            if item is not None or done:
                timed.add(began, now(), waiting)
                for one in done:
                    if onward is not None:
                        onward.put(one)
                timed.handed.append(now())
            if at_end:
                break
        if onward is not None:
            onward.close()
