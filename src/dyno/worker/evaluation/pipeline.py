"""Batches through a session with all its slots in flight: the next are read while it runs, and outputs are processed at
the same time, so that the engine is the bottleneck of an evaluation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.inputs import input_data
from dyno.worker.spec import Trial

# Sources of a pipeline's batches: images of a decoded data set, read in several threads, or random numbers.

Feed = Mapping[str, np.ndarray]


class BatchSource:
    """Batches by number; a batch is filled in `parts`, each by another thread if there are several."""

    parts = 1

    def new_arrays(self) -> dict[str, np.ndarray]:
        """Return new arrays for one batch, in the engine's form."""
        raise NotImplementedError

    def fill(self, feed: Feed, number: int, part: int) -> None:
        """Write one part of the batch into arrays as from `new_arrays`."""
        raise NotImplementedError


class DecodedImages(BatchSource):
    """Images of a decoded data set; after the last one the first follows, so that every batch is full."""

    def __init__(self, session: Session, trial: Trial, threads: int) -> None:
        self.name, self.shape, self.images = input_data.open_images(
            trial.data, trial.model.preprocess, session.inputs, trial.dims
        )
        self._dtype = "uint8" if session.inputs[0].dtype == "uint8" else "float32"
        self.parts = min(threads, self.shape[0])

    def new_arrays(self) -> dict[str, np.ndarray]:
        return {self.name: np.zeros(self.shape, self._dtype)}

    def fill(self, feed: Feed, number: int, part: int) -> None:
        batch = self.shape[0]
        begin, end = (batch * i // self.parts for i in (part, part + 1))
        self.images.read_into(feed[self.name][begin:end], number * batch + begin)


class RandomInputs(BatchSource):
    """Random inputs, the same for every run: they are drawn one after the other from the data's seed."""

    def __init__(self, session: Session, trial: Trial, count: int) -> None:
        model, tensors = trial.model, session.inputs
        self._batches = list(input_data.batches(trial.data, model.preprocess, tensors, trial.dims, count, model.inputs))

    def new_arrays(self) -> dict[str, np.ndarray]:
        return {name: np.zeros_like(array) for name, array in self._batches[0].items()}

    def fill(self, feed: Feed, number: int, part: int) -> None:
        for name, array in self._batches[number % len(self._batches)].items():
            np.copyto(feed[name], array)


Outputs = dict[str, np.ndarray]
Keep = Callable[[int, Outputs], None]
Work = Callable[[int, Outputs], Any]

AHEAD = 2  # batches that are read, or lie ready, while every slot has one
BACKLOG = 8  # batches whose outputs may wait for processing before the loop waits for them
SMALL = 4 << 20  # outputs of fewer bytes are copied out of the slot, so that it can run again at once
LEAST_SAMPLES = 3  # of the times of each stage


@dataclass(frozen=True)
class PipelineResult:
    """Results of `work` for each batch's outputs, in order, and the seconds from the last warm-up batch to the end."""

    results: list[Any]
    seconds: float


class Pipeline:
    """One session and one source of batches; buffers are allocated once, where the session reads them fastest."""

    def __init__(self, session: Session, source: BatchSource, helpers: int = 1) -> None:
        self._session, self._source, self._helpers = session, source, helpers
        self._buffers = [session.stage(source.new_arrays()) for _ in range(session.slots + AHEAD)]

    def run(self, count: int, keep: Keep, work: Work, warm_up: int = 0) -> PipelineResult:
        """Run the first `count` batches, after the first `warm_up` of them as warm-up.

        `keep` is called in order and at once, `work` in other threads; the outputs are valid until they return. The
        clock starts when the last batch of warm-up has been fetched and the next are in flight, so that the time to
        fill the pipeline is left out and the time to drain it counts. Without warm-up, both count.
        """
        numbers = [*range(warm_up), *range(count)]
        with ThreadPoolExecutor(self._helpers) as readers, ThreadPoolExecutor(self._helpers) as workers:
            feeder = _Feeder(self._source, self._buffers, readers, numbers)
            return _PipelineRun(self._session, feeder, workers, keep, work).run(numbers, warm_up)

    def stages(self, work: Work, seconds: float) -> dict[str, np.ndarray]:
        """Return the seconds per batch of each stage, one batch at a time in one thread, without overlap of stages.

        `preprocess` ends with the input bound, `inference` with the outputs in host memory, `postprocess` with `work`.
        On a GPU the copy of the input is only queued by `bind`, so its time is part of `inference`.
        """
        now, times, feed = time.perf_counter, [], self._buffers[0]
        deadline, number = now() + seconds, 0
        while number < LEAST_SAMPLES or now() < deadline:
            start = now()
            for part in range(self._source.parts):
                self._source.fill(feed, number, part)
            self._session.bind(feed)
            bound = now()
            self._session.run()
            self._session.wait()
            fetched = self._session.fetch()
            ran = now()
            work(number, fetched)
            times.append((bound - start, ran - bound, now() - ran))
            number += 1
        columns = np.asarray(times, np.float64).T
        return dict(zip(("preprocess", "inference", "postprocess"), columns, strict=True))


class _Feeder:
    """Reads batches in order into recycled buffers; only the loop's own thread calls it."""

    def __init__(
        self, source: BatchSource, buffers: list[Any], readers: ThreadPoolExecutor, numbers: Sequence[int]
    ) -> None:
        self._source, self._readers, self._numbers = source, readers, iter(numbers)
        self._free = deque(buffers)
        self._ready: deque[tuple[Any, list[Future[None]]]] = deque()
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._free and (number := next(self._numbers, None)) is not None:
            feed, parts = self._free.popleft(), range(self._source.parts)
            self._ready.append((feed, [self._readers.submit(self._source.fill, feed, number, part) for part in parts]))

    def take(self) -> Any:
        feed, parts = self._ready.popleft()
        for part in parts:
            part.result()
        return feed

    def give(self, feed: Any) -> None:
        self._free.append(feed)
        self._read_ahead()


class _PipelineRun:
    """One run of the loop, with the feed and the reader of each slot."""

    def __init__(self, session: Session, feeder: _Feeder, workers: ThreadPoolExecutor, keep: Keep, work: Work) -> None:
        self._session, self._feeder, self._workers = session, feeder, workers
        self._keep, self._work = keep, work
        self._fed: list[Any] = [None] * session.slots
        self._reading: list[Future[Any] | None] = [None] * session.slots  # work that still reads the slot's outputs
        self._results: list[Future[Any]] = []

    def run(self, numbers: Sequence[int], warm_up: int) -> PipelineResult:
        slots, count = self._session.slots, len(numbers)
        start = time.perf_counter()
        for step in range(count + slots):
            if step >= slots:
                self._finish_step(step - slots, numbers[step - slots], counts=step - slots >= warm_up)
                if step - slots == warm_up - 1:
                    start = time.perf_counter()
            if step < count:
                self._start_slot(step % slots)
        result = [result.result() for result in self._results]
        return PipelineResult(result[warm_up:], time.perf_counter() - start)

    def _start_slot(self, slot: int) -> None:
        self._fed[slot] = self._feeder.take()
        self._session.bind(self._fed[slot], slot)
        if (reader := self._reading[slot]) is not None:
            reader.result()
        self._session.run(slot)

    def _finish_step(self, step: int, number: int, counts: bool) -> None:
        slot = step % self._session.slots
        self._session.wait(slot)
        fetched, fed = self._session.fetch(slot), self._fed[slot]
        if counts:
            self._keep(number, fetched)
        # With one slot the next run comes at once, and with small outputs a copy costs less than waiting. An output may
        # be an input itself, where that lies, which is filled anew once it was given back.
        small = self._session.slots == 1 or sum(a.nbytes for a in fetched.values()) <= SMALL
        copied = small or any(np.may_share_memory(a, feed) for a in fetched.values() for feed in fed.values())
        outputs = {name: np.array(a) for name, a in fetched.items()} if copied else fetched
        self._feeder.give(fed)
        result = self._workers.submit(self._work, number, outputs)
        self._reading[slot] = None if copied else result
        self._results.append(result)
        if len(self._results) > BACKLOG:
            self._results[-BACKLOG - 1].result()
