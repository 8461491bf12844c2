"""The figures of requests that came at one rate, as pure functions of the stored times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyno.analysis import stats
from dyno.analysis.stats import Interval
from dyno.worker.facts.job import ServeFacts, ServeStep
from dyno.worker.serve import rates

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
SECTIONS = 10  # of consecutive requests, whose percentiles an interval is made from


@dataclass(frozen=True)
class RateMeasurement:
    """One rate in one round. Arrays have a value for each request, those of warm-up included, in seconds."""

    step: ServeStep
    facts: ServeFacts
    arrays: Mapping[str, np.ndarray]
    round: int = 0

    def _choose_counted(self, name: str) -> np.ndarray:
        return self.arrays[name][self.step.first :]

    @cached_property
    def latencies(self) -> np.ndarray:
        """Seconds from when each request was due until it was answered, inf where it never was."""
        return rates.list_latencies(self._choose_counted("arrival"), self._choose_counted("ended"))

    @cached_property
    def _answered(self) -> np.ndarray:
        return np.asarray(np.isfinite(self.latencies))

    @property
    def count(self) -> int:
        """Requests that count."""
        return len(self.latencies)

    @property
    def refused(self) -> int:
        """Those that found the queue full, or got no answer of a server."""
        return int(self._choose_counted("refused").sum())

    @property
    def left(self) -> int:
        """Those that still waited when no more were answered."""
        return self.count - int(self._answered.sum()) - self.refused

    @property
    def backlog(self) -> int:
        """How many requests waited when the last one came."""
        return rates.count_backlog(self.arrays["arrival"], self.arrays["began"], self.arrays["refused"])

    @property
    def served(self) -> float:
        """Requests answered per second, from when those that count began to come until the last answer.

        Under a rate far too high the server may get no further than to those before them.
        """
        first, ended, due = self.step.first, self.arrays["ended"], self.arrays["arrival"]
        since = float(due[first - 1]) if first else 0.0
        answered = ended[ended > since]  # NaN where there was no answer
        begins = not first and due[0] == since  # a trace's first request begins the time and comes after no interval
        return float((len(answered) - begins) / (answered.max() - since)) if len(answered) else 0.0

    @property
    def mean_batch(self) -> float:
        """Requests per batch."""
        sizes = self._choose_counted("size")[self._answered]
        return float(len(sizes) / (1 / sizes).sum()) if len(sizes) else math.nan

    @property
    def queued(self) -> float:
        """Mean seconds from when a request was due until its batch began."""
        return self._compute_mean(self._choose_counted("began") - self._choose_counted("arrival"))

    @property
    def computed(self) -> float:
        """Mean seconds of a request's batch, from host memory to host memory."""
        return self._compute_mean(self._choose_counted("ended") - self._choose_counted("began"))

    def _compute_mean(self, seconds: np.ndarray) -> float:
        chosen = seconds[self._answered]
        return float(chosen.mean()) if len(chosen) else math.nan

    def percentile(self, name: str) -> Interval | None:
        """Return that percentile of the latencies; None with too few requests, or where it falls on unanswered ones."""
        if self.count < stats.samples_for(QUANTILES[name]):
            return None
        found = sectioned(self.latencies, QUANTILES[name])
        return found if math.isfinite(found.value) else None


def sectioned(samples: np.ndarray, q: float) -> Interval:
    """Compute a percentile with its 95 % interval from ten sections of consecutive samples, by Student's t.

    Consecutive requests wait in the same queue, so a section counts as one observation (sectioning; Asmussen and Glynn,
    Stochastic Simulation, 2007, III.5). Without limits where a section has too few samples for that percentile, or
    where it falls on an unanswered one.
    """
    value = rates.find_percentile(samples, q)
    each = [rates.find_percentile(part, q) for part in np.array_split(samples, SECTIONS) if len(part)]
    if len(samples) // SECTIONS < stats.samples_for(q) or not np.isfinite([value, *each]).all():
        return Interval(value, math.nan, math.nan)
    spread = math.sqrt(sum((one - value) ** 2 for one in each) / (SECTIONS - 1))
    reach = stats.t_quantile(SECTIONS - 1) * spread / math.sqrt(SECTIONS)
    return Interval(value, max(0.0, value - reach), value + reach)
