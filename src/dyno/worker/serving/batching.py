"""Dynamic batching with a deadline, for requests with known arrival times.

No thread sends requests: a request exists as soon as its time has come, and waits from then on. So a stalled server
can't delay the requests, and latency counts from a request's due time (no coordinated omission, as Tene calls it).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dyno.worker import measure
from dyno.worker.backend import Arrays, Session, answer_feeds
from dyno.worker.inputs.specs import static_shapes
from dyno.worker.serving.rates import Arrivals
from dyno.worker.spec import Dims, Plan, Trial, Unanswered, Unavailable, UserError

# Time for answering the waiting requests after the last arrival: a share of the arrivals' duration, plus seconds.
PATIENCE_SHARE, MIN_PATIENCE_S = 0.25, 1.0


class Clock:
    """Clock in seconds since its creation."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the clock's start."""
        return time.perf_counter() - self._began

    def sleep_until(self, deadline: float) -> None:
        """Sleep until `now` is at least `deadline`."""
        while (wait_s := deadline - self.now()) > 0:
            time.sleep(wait_s)


@dataclass(frozen=True)
class BatchingRules:
    """Limits of batching: requests per batch, seconds of the first one's wait, and queued requests (0: no limit)."""

    max_batch: int
    max_wait: float = 0.0
    queue: int = 0


class RequestSource(Protocol):
    """Source of batches of request numbers, which records their answers; see `Batcher`."""

    def take(self) -> list[int] | None: ...
    def finish(self, batch: list[int]) -> None: ...
    def unanswered(self, batch: list[int], reason: str) -> None: ...
    def stop(self) -> None: ...


class Batcher:
    """Queue that gives each free instance the next batch, and records each request's beginning and answer.

    `times` are the requests' due times, `began` and `ended` seconds by the clock (NaN if refused or left), `size` the
    number of requests in a request's batch (0 if refused or left). Requests are `refused` at a full queue, or if the
    `answer` of `answer_requests` fails; `complaint` is the first failure's reason, "" without failures.
    """

    def __init__(self, arrivals: Arrivals, rules: BatchingRules, clock: Clock) -> None:
        self._rules, self._clock = rules, clock
        self.times = arrivals.times
        self._due: list[float] = arrivals.times.tolist()
        count = len(self._due)
        self.began, self.ended = np.full(count, np.nan), np.full(count, np.nan)
        self.size = np.zeros(count, np.int64)
        self.refused = np.zeros(count, bool)
        self.complaint = ""
        self._end = self._due[-1] * (1 + PATIENCE_SHARE) + MIN_PATIENCE_S + rules.max_wait
        self._waiting: deque[int] = deque()
        self._next = 0
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> list[int] | None:
        """Return the next batch's request numbers, as soon as it is full or its first request has waited long enough.

        Return None after the last request, after the patience or after `stop`.
        """
        with self._lock:  # held while waiting, so that the next free instance comes after
            while True:
                now = self._clock.now()
                self._admit_requests(now)
                if self._stopped or now > self._end or not (self._waiting or self._next < len(self._due)):
                    return None
                if (ready_time := self._find_ready_time()) <= now:
                    break
                self._clock.sleep_until(ready_time)
            batch = [self._waiting.popleft() for _ in range(min(self._rules.max_batch, len(self._waiting)))]
            self.began[batch] = now
            self.size[batch] = len(batch)
            return batch

    def finish(self, batch: list[int]) -> None:
        """Record that the batch was answered now."""
        self.ended[batch] = self._clock.now()

    def unanswered(self, batch: list[int], reason: str) -> None:
        """Record that the batch gets no answer, for the reason `reason`."""
        self.began[batch], self.size[batch], self.refused[batch] = np.nan, 0, True
        self.complaint = self.complaint or reason

    def stop(self) -> None:
        """Hand out no further batches."""
        self._stopped = True

    def _admit_requests(self, now: float) -> None:
        """Queue the requests due until now, or refuse those beyond the queue's limit.

        This happens before any batch is taken, so no request has left the queue since their arrival.
        """
        while self._next < len(self._due) and self._due[self._next] <= now:
            if self._rules.queue and len(self._waiting) >= self._rules.queue:
                self.refused[self._next] = True
            else:
                self._waiting.append(self._next)
            self._next += 1

    def _find_ready_time(self) -> float:
        """Return the earliest time for the next batch: it is full, or its first request has waited for `max_wait`."""
        first_due = self._due[self._waiting[0] if self._waiting else self._next]
        last = self._next + self._rules.max_batch - len(self._waiting) - 1  # the request that completes the batch
        full_time = self._due[last] if last >= self._next and last < len(self._due) else float("inf")
        return first_due if last < self._next else min(full_time, first_due + self._rules.max_wait)


def answer_requests(batcher: RequestSource, answer: Callable[[int], None]) -> None:
    """Answer batches until there are no more requests; an `Unanswered` batch doesn't end the loop."""
    try:
        while (batch := batcher.take()) is not None:
            try:
                answer(len(batch))
            except Unanswered as e:
                batcher.unanswered(batch, str(e))
            else:
                batcher.finish(batch)
    except BaseException:
        batcher.stop()  # otherwise the other instances would answer all requests
        raise


# Instances of a model, each loaded and driven by its own thread, for several batch sizes.

Load = Callable[[Trial], Session]
Feed = Callable[[Session, int], Sequence[Arrays]]  # batches of the given size, in the session's form


@dataclass(frozen=True)
class Rung:
    """A session for batches of `size` requests, with batches to feed it."""

    size: int
    session: Session
    feeds: tuple[Arrays, ...]


class Lane:
    """A slot in all sessions of an instance, for one batch at a time, from host memory to host memory."""

    def __init__(self, rungs: Sequence[Rung], slot: int) -> None:
        self.rungs, self._slot = rungs, slot
        self._turns = itertools.count()
        self.answered: Arrays = {}  # the last batch's outputs

    def answer(self, count: int) -> None:
        """Answer `count` requests as the smallest batch that holds them."""
        rung = next(rung for rung in self.rungs if rung.size >= count)
        session, slot = rung.session, self._slot
        session.bind(rung.feeds[next(self._turns) % len(rung.feeds)], slot)
        session.run(slot)
        session.wait(slot)
        self.answered = session.fetch(slot)


class Instances:
    """`count` copies of a trial's model; on a CPU an instance has a lane per slot of its sessions.

    A GPU's slots share a stream and belong to one thread, so there an instance has one lane, and instances overlap.
    Close it in the end. Raises the errors of `load`.
    """

    def __init__(self, trial: Trial, sizes: Sequence[int], load: Load, feed: Feed, count: int) -> None:
        self._threads: list[ThreadPoolExecutor] = []
        self.lanes: list[Lane] = []
        self._owners: list[tuple[ThreadPoolExecutor, list[Rung]]] = []
        for _ in range(count):
            thread = self._start_thread()
            rungs = thread.submit(_load_ladder, trial, sizes, load, feed).result()
            self._owners.append((thread, rungs))
            session = rungs[-1].session
            slots = session.slots if session.stream is None and trial.runtime.device == "cpu" else 1
            self.lanes += [Lane(rungs, slot) for slot in range(slots)]
            for _ in range(slots - 1):
                self._start_thread()
        self.rungs = tuple(rung.size for rung in self._owners[0][1])

    def _start_thread(self) -> ThreadPoolExecutor:
        self._threads.append(ThreadPoolExecutor(1))
        return self._threads[-1]

    @property
    def ladder(self) -> Sequence[Rung]:
        """The first instance's batches, the largest last."""
        return self._owners[0][1]

    @property
    def first(self) -> Rung:
        """The first instance's largest batch."""
        return self.ladder[-1]

    def call(self, action: Callable[[], Any]) -> Any:
        """Call the action in the first instance's thread, the owner of its session."""
        return self._threads[0].submit(action).result()

    def warm_up(self, plan: Plan) -> None:
        """Warm up every session until it is steady, for `plan.warmup_s` seconds at most, one after the other."""
        for thread, rungs in self._owners:
            for rung in rungs:
                thread.submit(measure.warm_up, measure.make_step(rung.session, "all", rung.feeds), plan).result()

    def run_each(self, work: Callable[[Lane], None]) -> None:
        """Do the work with every lane at once, in the lane's thread; raise the first error."""
        futures: list[Future[None]] = [t.submit(work, lane) for t, lane in zip(self._threads, self.lanes, strict=True)]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Free all sessions and threads."""
        for thread, rungs in self._owners:
            for rung in rungs:
                thread.submit(rung.session.close).result()
        for thread in self._threads:
            thread.shutdown()


def _load_ladder(trial: Trial, sizes: Sequence[int], load: Load, feed: Feed) -> list[Rung]:
    """Load a session for each size that the engine takes; the trial's batch, the largest, must load.

    It is loaded first, so that an engine that can't be loaded at all is tried once.
    """
    rungs: list[Rung] = []
    for size in sorted({*sizes, trial.dims.batch}, reverse=True):
        try:
            session = load(replace(trial, dims=replace(trial.dims, batch=size)))
        except (UserError, Unavailable):
            if not rungs:
                raise
            continue
        rungs.append(Rung(size, session, tuple(session.stage(batch) for batch in feed(session, size))))
    return rungs[::-1]


# Known inputs as requests: in batches of several sizes, some of them padded.


class BatchFormingSession(Session):
    """One instance's sessions in the form of a single session for the largest batch.

    It answers its batch as smaller batches: each size once full and once with one request too few, while inputs last.
    If requests can't be told apart by the first axis of all inputs and outputs, it answers the batch whole.
    """

    def __init__(self, ladder: Sequence[Rung], dims: Dims) -> None:
        self._ladder, self._max_batch = ladder, ladder[-1].size
        session = ladder[-1].session
        self.inputs, self.outputs, self.stream = session.inputs, session.outputs, session.stream
        self._shapes = {r.size: static_shapes(r.session.inputs, replace(dims, batch=r.size)) for r in ladder}
        sizes = sorted(self._shapes, reverse=True)
        lower_sizes = [*sizes[1:], 0]  # 2 with one request too few is a full batch of 1, if there is such a session
        counts = [size - 1 if size - 1 > lower else size for size, lower in zip(sizes, lower_sizes, strict=True)]
        self._counts = list(dict.fromkeys([*counts, *sizes]))

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        self._fed = feeds

    def run(self, slot: int = 0) -> None:
        answers = []
        for begin, count in self._iter_batches():
            answer = self._answer_requests(begin, count)
            if answer is None:
                answers = [answer_feeds(self._ladder[-1].session, self._fed)]
                break
            answers.append(answer)
        self._answered = {name: np.concatenate([p[name] for p in answers]) if len(answers) > 1 else a
                          for name, a in answers[0].items()}  # fmt: skip

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return self._answered

    def _iter_batches(self) -> Iterator[tuple[int, int]]:
        """Yield each batch's first request and its size: every unused size that fits, then the rest."""
        begin = 0
        while rest := self._max_batch - begin:
            count = next((c for c in self._counts if c <= rest), rest)
            if count in self._counts:
                self._counts.remove(count)
            yield begin, count
            begin += count

    def _answer_requests(self, begin: int, count: int) -> dict[str, np.ndarray] | None:
        """Return the answers to `count` requests; None if they can't be told apart.

        The smallest sufficient batch answers them, filled with the requests that follow.
        """
        rung = next(rung for rung in self._ladder if rung.size >= count)
        rows, feeds = np.arange(begin, begin + rung.size) % self._max_batch, {}
        for name, array in self._fed.items():
            shape = self._shapes[rung.size].get(name, array.shape)
            if array.shape[:1] == (self._max_batch,) and shape == (rung.size, *array.shape[1:]):
                feeds[name] = array[rows]
            elif array.shape == shape:
                feeds[name] = array
            else:
                return None
        answers = answer_feeds(rung.session, feeds)
        if any(a.shape[:1] != (rung.size,) for a in answers.values()):
            return None
        return {name: a[:count] for name, a in answers.items()}
