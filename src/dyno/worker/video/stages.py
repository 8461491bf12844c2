"""Overlapping stages: a thread each, bounded queues between them, order kept, every item timed.

A stage waits while its successor's queue is full (back-pressure), so memory is bounded. Threads overlap because
decoding, resizing, inference and encoding happen in libraries that release Python's lock.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from dyno.worker.video.media import now

QUEUE_DEPTH = 8  # queue length of a stage
ITEMS_AHEAD = 2  # items held per lane
LIVE_QUEUE_DEPTH = 1  # live sources: waiting frames are late
TICK_S = 0.25
READER_TIMEOUT_S = 1.0  # limit for a stopped reader, which may be blocked by its source


class PipelineStage:
    """The work of one stage; the base class passes items on unchanged.

    A stage with several `lanes` runs `work` in that many threads in parallel; results are passed on in the items'
    order. Its `work` is no generator, and it holds no items.
    """

    name = ""
    lanes = 1
    room = QUEUE_DEPTH  # length of its queue

    def within(self, loop: Callable[[], None]) -> None:
        """Run the stage's loop, which returns when no further item comes."""
        loop()

    def work(self, item: Any) -> Iterable[Any]:
        """Return the items to pass on after this item: none yet, the item, or earlier ones."""
        return (item,)

    def in_order(self, results: Sequence[Any]) -> None:
        """Receive the results of `work` or `rest` before they are passed on, in the items' order even with lanes."""

    def flush(self) -> Iterable[Any]:
        """Return the items still held: called at the end, and when nothing waits while it `holds`."""
        return ()

    @property
    def holds(self) -> bool:
        """Whether work is in progress that `rest` could finish while no item waits."""
        return False


def make_number_array() -> array[int]:
    """Return an empty array of integers of eight bytes: a film has many frames."""
    return array("q")


@dataclass
class StageTimestamps:
    """The work of one stage, item by item, in ns of `perf_counter_ns`.

    `began` and `ended` enclose the work, `handed` is when its results had found room, and `waiting` the queue length
    when the item was taken.
    """

    began: array[int] = field(default_factory=make_number_array)
    ended: array[int] = field(default_factory=make_number_array)
    handed: array[int] = field(default_factory=make_number_array)
    waiting: array[int] = field(default_factory=make_number_array)

    def add(self, began: int, ended: int, waiting: int) -> None:
        """Add one piece of work, to be `handed` on afterwards."""
        self.began.append(began)
        self.ended.append(ended)
        self.waiting.append(waiting)

    def arrays(self, start_ns: int) -> dict[str, np.ndarray]:
        """Return arrays: seconds since that moment, and the queue's length."""
        times = {name: (np.asarray(getattr(self, name)[: len(self.handed)], np.int64) - start_ns) / 1e9
                 for name in ("began", "ended", "handed")}  # fmt: skip
        return {**times, "waiting": np.asarray(self.waiting[: len(self.handed)], np.int64)}


class PipelineStopped(Exception):
    """Another stage failed, or the user stopped the pipeline."""


class _Channel:
    """A bounded queue between two stages; the first closes it, and any thread may stop it.

    It uses two of Python's own queues, one of items and one of free places: waiting threads cost nothing and wake up
    faster than with a condition. Places are freed half a queue at a time: a delayed stage then works on several items
    in a row, with its data in the processor's cache (a fifth of a decoder's time).
    """

    def __init__(self, capacity: int) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(capacity):
            self._places.put(None)
        self._together, self._left = max(1, capacity // 2), 0
        self.closed = self._stopped = False

    def put(self, item: Any) -> None:
        """Add the item as soon as there is room."""
        self._places.get()
        self._check_running()
        self._items.put(item)

    def offer(self, item: Any) -> int:
        """Add the item at once; return the number of older items dropped for it."""
        self._check_running()
        drop_count = 0
        try:
            self._places.get_nowait()
        except Empty:
            try:
                self._items.get_nowait()  # replaced by the item
                drop_count = 1
            except Empty:
                self._places.get()  # just taken: its place will be free in a moment
        self._items.put(item)
        return drop_count

    def get(self, wait: bool) -> tuple[Any, int]:
        """Return the next item (None: none now, or closed) and the queue's length, including this item."""
        self._check_running()
        if self.closed:
            return None, 0
        try:
            item = self._items.get(block=wait)
        except Empty:
            return None, 0
        self._check_running()
        if item is None:
            self.closed = True
            return None, 0
        self._left += 1
        if self._left == self._together:
            for _ in range(self._together):
                self._places.put(None)
            self._left = 0
        return item, self._items.qsize() + 1

    def close(self) -> None:
        """Announce that no further item comes."""
        self._items.put(None)

    def stop(self) -> None:
        """Raise `PipelineStopped` in all present and future waiting threads."""
        self._stopped = True
        self._places.put(None)
        self._items.put(None)

    def _check_running(self) -> None:
        if self._stopped:
            raise PipelineStopped


class VideoPipeline:
    """A source and its steps; `run_pipelines` runs it once.

    A `live` source never waits: if its queue is full, the oldest item in it is `dropped`.
    """

    def __init__(self, name: str, source: Iterator[Any], steps: Sequence[PipelineStage], live: bool = False) -> None:
        self._source, self._steps, self._live = source, steps, live
        self.dropped = 0
        self._channels = [_Channel(LIVE_QUEUE_DEPTH if live else step.room) for step in steps]
        self.timed = {stage: StageTimestamps() for stage in (name, *(step.name for step in steps))}
        # Items held by lanes: ITEMS_AHEAD per lane, including one being collected and one waiting.
        self._lane_channels = {
            k: _Channel(ITEMS_AHEAD * step.lanes - 2) for k, step in enumerate(steps) if step.lanes > 1
        }
        self._source_stage = name

    def list_actions(self) -> list[tuple[str, Callable[[], None]]]:
        """Return the actions of each stage's threads, the reader first."""
        actions: list[tuple[str, Callable[[], None]]] = []
        for k, step in enumerate(self._steps):
            if k in self._lane_channels:
                actions += [(step.name, partial(self._work_in_lanes, k)), (step.name, partial(self._collect, k))]
            else:
                actions.append((step.name, partial(step.within, partial(self._run_step, k))))
        return [(self._source_stage, self._read_source), *actions]

    def stop(self) -> None:
        """Stop every stage after its current item."""
        for channel in (*self._channels, *self._lane_channels.values()):
            channel.stop()

    def _read_source(self) -> None:
        timestamps, channel = self.timed[self._source_stage], self._channels[0]
        while True:
            item = next(self._source, None)
            if item is None:
                break
            timestamps.add(item.began, now(), 0)
            if self._live:
                self.dropped += channel.offer(item)
            else:
                channel.put(item)
            timestamps.handed.append(now())
        channel.close()

    def _run_step(self, k: int) -> None:
        step = self._steps[k]
        while True:
            item, waiting = self._channels[k].get(wait=not step.holds)
            is_end = item is None and self._channels[k].closed and not step.holds
            began = now()
            results = list(step.flush() if item is None else step.work(item))
            if item is not None or results:
                self._hand_on(k, began, waiting, results)
            if is_end:
                break
        self._close_next(k)

    def _work_in_lanes(self, k: int) -> None:
        """Start the work on each item; `_collect` passes results on in the items' order."""
        step, futures = self._steps[k], self._lane_channels[k]
        with ThreadPoolExecutor(step.lanes, step.name) as executor:
            while (entry := self._channels[k].get(wait=True))[0] is not None:
                item, waiting = entry
                futures.put((executor.submit(step.work, item), waiting))
        futures.close()

    def _collect(self, k: int) -> None:
        """Pass on the lanes' results one by one, as from a stage with one thread.

        A piece begins when it was taken or when the previous one was passed on, so the pieces add up to the time with
        work.
        """
        while (entry := self._lane_channels[k].get(wait=True)[0]) is not None:
            (future, waiting), began = entry, now()
            self._hand_on(k, began, waiting, list(future.result()))
        self._close_next(k)

    def _hand_on(self, k: int, began: int, waiting: int, results: list[Any]) -> None:
        step, timestamps = self._steps[k], self.timed[self._steps[k].name]
        step.in_order(results)
        timestamps.add(began, now(), waiting)
        if k + 1 < len(self._channels):
            for item in results:
                self._channels[k + 1].put(item)
        timestamps.handed.append(now())

    def _close_next(self, k: int) -> None:
        if k + 1 < len(self._channels):
            self._channels[k + 1].close()


def run_pipelines(lines: Sequence[VideoPipeline], tick: Callable[[], None]) -> None:
    """Run the pipelines in parallel until their sources end; raise the first failed stage's error.

    `tick` is called four times a second. An interrupt of this thread stops every stage and is raised again.
    """
    end_events: SimpleQueue[None] = SimpleQueue()
    errors: list[BaseException] = []

    def stop_lines() -> None:
        for line in lines:
            line.stop()

    def run_action(action: Callable[[], None]) -> None:
        try:
            action()
        except PipelineStopped:
            pass
        except BaseException as e:  # raised again by the starting thread
            errors.append(e)
            stop_lines()
        finally:
            end_events.put(None)

    started = [[threading.Thread(target=run_action, args=(action,), name=name, daemon=True)
                for name, action in line.list_actions()] for line in lines]  # fmt: skip
    threads = [thread for line in started for thread in line]
    for thread in threads:
        thread.start()
    running_count = len(threads)
    try:
        while running_count:
            with suppress(Empty):  # an interrupted `join` seems finished, so threads report their end
                end_events.get(timeout=TICK_S)
                running_count -= 1
            tick()
    finally:
        if running_count:
            stop_lines()
        deadline = time.monotonic() + READER_TIMEOUT_S
        for reader, *workers in started:
            reader.join(max(0.0, deadline - time.monotonic()))
            for thread in workers:
                thread.join()
    if errors:
        raise errors[0]
