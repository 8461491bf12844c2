"""Dynamic batching with a deadline, of requests whose times are known before.

No thread sends requests: a request is there as soon as its time has come, and waits from then on. So what holds up the
server can't hold up the requests, and latency counts from when a request was due (what Tene calls coordinated omission
can't happen).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dyno.worker.serve.arrivals import Arrivals
from dyno.worker.spec import Unanswered

# How long those that still wait are answered after the last has come: a share of the time in which requests come, and
# seconds.
PATIENCE, LEAST_PATIENCE_S = 0.25, 1.0


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the clock's start."""
        return time.perf_counter() - self._began

    def sleep_until(self, at: float) -> None:
        """Return when `now` is `at` or a little more."""
        while (left := at - self.now()) > 0:
            time.sleep(left)


@dataclass(frozen=True)
class BatchingRules:
    """At most `most` requests are a batch, the first of which waits for the others at most `max_wait` seconds; at most
    `queue` requests wait (0: no limit)."""

    most: int
    max_wait: float = 0.0
    queue: int = 0


class Batcher:
    """Give each free instance the next batch, and record when each request began and was answered.

    `began` and `ended` are seconds by the clock, NaN for requests that were refused or left; `size` is the number of
    requests in a request's batch, 0 for those. Refused is who found the queue full, and whom `answer` of `serve` gave
    no answer; `complaint` is what the first of the latter was told, "" without any.
    """

    def __init__(self, arrivals: Arrivals, rules: BatchingRules, clock: Clock) -> None:
        self._rules, self._clock = rules, clock
        self._due: list[float] = arrivals.times.tolist()
        count = len(self._due)
        self.began, self.ended = np.full(count, np.nan), np.full(count, np.nan)
        self.size = np.zeros(count, np.int64)
        self.refused = np.zeros(count, bool)
        self.complaint = ""
        self._end = self._due[-1] * (1 + PATIENCE) + LEAST_PATIENCE_S + rules.max_wait
        self._waiting: deque[int] = deque()
        self._next = 0
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> list[int] | None:
        """Return the next batch's request numbers, as soon as it is full or its first request has waited long enough.

        Return None if no more come, or patience is over.
        """
        with self._lock:  # held while it waits, so that the next free one comes after
            while True:
                now = self._clock.now()
                self._admit_requests(now)
                if self._stopped or now > self._end or not (self._waiting or self._next < len(self._due)):
                    return None
                if (ready := self._find_ready_time()) <= now:
                    break
                self._clock.sleep_until(ready)
            batch = [self._waiting.popleft() for _ in range(min(self._rules.most, len(self._waiting)))]
            self.began[batch] = now
            self.size[batch] = len(batch)
            return batch

    def done(self, batch: list[int]) -> None:
        """Record that the batch was answered now."""
        self.ended[batch] = self._clock.now()

    def unanswered(self, batch: list[int], why: str) -> None:
        """Record that the batch gets no answer, and `why`."""
        self.began[batch], self.size[batch], self.refused[batch] = np.nan, 0, True
        self.complaint = self.complaint or why

    def stop(self) -> None:
        """Hand out no further batches."""
        self._stopped = True

    def _admit_requests(self, now: float) -> None:
        """Queue the requests due until now, or refuse those beyond the queue's limit.

        This happens before any batch is taken, so no request has left the queue since they came.
        """
        while self._next < len(self._due) and self._due[self._next] <= now:
            if self._rules.queue and len(self._waiting) >= self._rules.queue:
                self.refused[self._next] = True
            else:
                self._waiting.append(self._next)
            self._next += 1

    def _find_ready_time(self) -> float:
        """Return the time at which the next batch may begin, if no unknown request comes."""
        first = self._due[self._waiting[0] if self._waiting else self._next]
        last = self._next + self._rules.most - len(self._waiting) - 1  # who fills the batch
        full = self._due[last] if last >= self._next and last < len(self._due) else float("inf")
        return first if last < self._next else min(full, first + self._rules.max_wait)


def serve(batcher: Batcher, answer: Callable[[int], None]) -> None:
    """Answer batches until there are no more requests; an `Unanswered` batch doesn't end the loop."""
    try:
        while (batch := batcher.take()) is not None:
            try:
                answer(len(batch))
            except Unanswered as e:
                batcher.unanswered(batch, str(e))
            else:
                batcher.done(batch)
    except BaseException:
        batcher.stop()  # the others would answer alone what was meant for all
        raise
