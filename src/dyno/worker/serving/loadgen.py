"""Requests from MLPerf's LoadGen in its server scenario, with times known to LoadGen only, and results from its log."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.extras import load_library
from dyno.worker.serving.batching import BatchingRules, Clock

SUMMARY_FILE, TRACE_FILE = "mlperf_log_summary.txt", "mlperf_log_trace.json"
SAMPLE_LINE = re.compile(r'"sample_seq":(\d+),.*"complete_ns":(\d+)')  # a line of the trace, which isn't valid JSON
NO_BOUND_NS = 10**15  # eleven days
NO_BATCH = (np.nan, np.nan, 0)  # a query's start and end of its batch, and its size
SAMPLE_COUNT = 1024  # size of LoadGen's data set; the drawn sample doesn't matter here


class QueryQueue:
    """Queue that gives each free instance the next batch of LoadGen's issued queries, and answers LoadGen.

    It has the interface of `Batcher`, but the due `times` of queries are known only afterwards. No query is refused, as
    LoadGen waits for every answer; unanswered queries are in `refused`, and LoadGen takes them as answered.
    """

    def __init__(self, rules: BatchingRules, clock: Clock, library: Any) -> None:
        self._rules, self._clock, self._library = rules, clock, library
        self._ids: list[int] = []
        self._times: list[float] = []
        self._records: dict[int, tuple[float, float, int]] = {}
        self._unanswered: set[int] = set()
        self._announced: set[int] = set()
        self._waiting: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_over = self._is_stopped = False
        self.complaint = ""

    @property
    def times(self) -> np.ndarray:
        """Due time of each query in seconds by the clock; its arrival until `set_latencies`."""
        return np.array(self._times)

    def set_latencies(self, latencies: Mapping[int, float]) -> None:
        """Set the due times from LoadGen's latencies (seconds from due time to answer) by query number."""
        for index, seconds in latencies.items():
            end = self._records.get(index, NO_BATCH)[1]
            if not np.isnan(end):
                self._times[index] = end - seconds

    @property
    def began(self) -> np.ndarray:
        """Start of each query's batch in seconds, NaN without an answer."""
        return np.array([self._records.get(index, NO_BATCH)[0] for index in range(len(self._ids))])

    @property
    def ended(self) -> np.ndarray:
        """Time of each query's answer in seconds, NaN without an answer."""
        return np.array([self._records.get(index, NO_BATCH)[1] for index in range(len(self._ids))])

    @property
    def size(self) -> np.ndarray:
        """Number of queries in each query's batch, 0 without an answer."""
        return np.array([self._records.get(index, NO_BATCH)[2] for index in range(len(self._ids))])

    @property
    def refused(self) -> np.ndarray:
        """Flags of the queries without an answer."""
        return np.array([index in self._unanswered for index in range(len(self._ids))])

    def issue(self, samples: Sequence[Any]) -> None:
        """Take LoadGen's next queries."""
        with self._changed:
            now, first = self._clock.now(), len(self._ids)
            self._ids += [sample.id for sample in samples]
            self._times += [now] * len(samples)
            indices = range(first, len(self._ids))
            if not self._is_stopped:
                self._waiting += indices
            self._changed.notify_all()
        if self._is_stopped:
            self._tell(indices)

    def flush(self) -> None:
        """Note that no more queries come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def take(self) -> list[int] | None:
        """Return the next batch's numbers, as soon as it is full or its first query has waited long enough.

        Return None after the last query or after `stop`.
        """
        with self._changed:
            while True:
                if self._is_stopped or (self._is_over and not self._waiting):
                    return None
                now = self._clock.now()
                wait_s = self._times[self._waiting[0]] + self._rules.max_wait - now if self._waiting else None
                if wait_s is not None and (wait_s <= 0 or self._is_over or len(self._waiting) >= self._rules.max_batch):
                    break
                self._changed.wait(wait_s)
            batch = [self._waiting.popleft() for _ in range(min(self._rules.max_batch, len(self._waiting)))]
            self._records |= dict.fromkeys(batch, (now, np.nan, len(batch)))
            return batch

    def finish(self, batch: Sequence[int]) -> None:
        """Record that the batch was answered now."""
        now = self._clock.now()
        self._records |= {index: (self._records[index][0], now, len(batch)) for index in batch}
        self._tell(batch)

    def unanswered(self, batch: Sequence[int], reason: str) -> None:
        """Record that the batch gets no answer, for the reason `reason`."""
        self._unanswered |= {*batch}
        for index in batch:
            del self._records[index]
        self.complaint = self.complaint or reason
        self._tell(batch)

    def stop(self) -> None:
        """Hand out no further batches; LoadGen takes the remaining queries as answered, and ends."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._tell(range(len(self._ids)))

    def _tell(self, indices: Sequence[int]) -> None:
        """Complete the queries, each only once: LoadGen then forgets it, while another instance may still answer it."""
        with self._changed:
            new_indices = [index for index in indices if index not in self._announced]
            self._announced |= {*new_indices}
        self._library.QuerySamplesComplete([self._library.QuerySampleResponse(self._ids[n], 0, 0) for n in new_indices])


@dataclass(frozen=True)
class ServerScenario:
    """LoadGen's server scenario: `count` queries at `rate`/s, the share `quantile` within `bound_s` s (0: no bound)."""

    rate: float
    count: int
    quantile: float
    bound_s: float
    seed: int
    folder: Path  # for the logs

    @contextmanager
    def send_queries(self, queries: QueryQueue) -> Iterator[None]:
        """Run LoadGen in a thread, which sends its queries and has ended when the block ends."""
        library = load_library("mlperf_loadgen", "LoadGen")
        settings, log = library.TestSettings(), library.LogSettings()
        settings.scenario, settings.mode = library.TestScenario.Server, library.TestMode.PerformanceOnly
        settings.server_target_qps = self.rate
        settings.server_target_latency_ns = round(1e9 * self.bound_s) or NO_BOUND_NS
        settings.server_target_latency_percentile = self.quantile
        settings.min_query_count = settings.max_query_count = self.count
        settings.min_duration_ms = 0
        for name in ("qsl", "sample_index", "schedule"):
            setattr(settings, f"{name}_rng_seed", self.seed)
        self.folder.mkdir(exist_ok=True)
        log.log_output.outdir, log.log_output.copy_summary_to_stdout = str(self.folder), False
        sut = library.ConstructSUT(queries.issue, queries.flush)
        samples = library.ConstructQSL(SAMPLE_COUNT, SAMPLE_COUNT, lambda _: None, lambda _: None)
        thread = threading.Thread(target=library.StartTestWithLogSettings, args=(sut, samples, settings, log))
        thread.start()
        try:
            yield
        finally:
            thread.join()
            library.DestroyQSL(samples)
            library.DestroySUT(sut)
        queries.set_latencies(self._read_latencies())

    def _read_latencies(self) -> dict[int, float]:
        """Return the seconds from each query's scheduled time to its answer, by query number."""
        matches = SAMPLE_LINE.findall((self.folder / TRACE_FILE).read_text(encoding="utf-8"))
        return {int(index): int(nanoseconds) / 1e9 for index, nanoseconds in matches}

    def read_latency(self) -> float:
        """Return the percentile of the latencies in seconds from LoadGen's summary."""
        text = (self.folder / SUMMARY_FILE).read_text(encoding="utf-8")
        match = re.search(rf"^{100 * self.quantile:.2f} percentile latency \(ns\) *: (\d+)$", text, re.MULTILINE)
        return int(match[1]) / 1e9 if match else 0.0
