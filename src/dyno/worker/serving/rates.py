"""Arrival times of requests, and the test whether an engine keeps up with them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dyno.worker.spec import UserError

# Figures of requests' times: percentiles with unanswered requests among them, stability, and the bound.

HOLDS, OVER, UNSTABLE, TOO_FEW = "yes", "no", "unstable", "too few requests"
MAX_DRIFT_DEVIATIONS = 3.0  # standard deviations of a queue without drift
CHECKED_SHARES = (0.5, 0.75, 1.0)  # shares of the requests


def find_percentile(latencies: np.ndarray, q: float) -> float:
    """Return a percentile (q = 0.99: the 99th) by linear interpolation; inf if it falls on an unanswered request."""
    values = np.sort(latencies)
    position = q * (len(values) - 1)
    low, high = math.floor(position), math.ceil(position)
    if not math.isfinite(values[high]):
        return math.inf
    return float(values[low] + (values[high] - values[low]) * (position - low))


def list_latencies(arrival: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the seconds from each request's due time to its answer, inf without an answer."""
    return np.where(np.isnan(ended), np.inf, ended - arrival)


def count_backlog(arrival: np.ndarray, began: np.ndarray, refused: np.ndarray, share: float = 1.0) -> int:
    """Return the number of requests waiting at the last arrival, or at the last of the first `share` of requests."""
    count = max(1, round(share * len(arrival)))
    last_arrival = arrival[count - 1]
    return int((~(began[:count] <= last_arrival) & ~refused[:count]).sum())


def is_unstable(arrival: np.ndarray, began: np.ndarray, refused: np.ndarray, batch: int) -> bool:
    """Return whether requests come faster than they are answered.

    A queue whose arrivals and answers are equally fast is a reflected random walk: after n requests its length is the
    absolute value of a normal variable with a standard deviation of about sqrt(n) (Feller, An Introduction to
    Probability Theory II, 1971, VI.2). A queue beyond three of them plus the batch that forms is drift, if it is so
    after a half and after three quarters of the requests too: a stall of the machine is over by then.
    """
    return all(
        count_backlog(arrival, began, refused, share) > MAX_DRIFT_DEVIATIONS * math.sqrt(share * len(arrival)) + batch
        for share in CHECKED_SHARES
    )


def judge_rate(seconds: np.ndarray, q: float, bound: float, min_requests: int, is_growing: bool) -> str:
    """Return whether the percentile of the latencies is within the bound; "" without a bound (0)."""
    if is_growing:
        return UNSTABLE
    if not bound:
        return ""
    if len(seconds) < min_requests:
        return TOO_FEW
    return HOLDS if find_percentile(seconds, q) <= bound else OVER


# Arrival times: random, or from a trace; fixed before the first request, independent of the answers.

USUAL_S = 10.0
MAX_RATE_S = 120.0  # default limit of a rate in a search
MAX_TRACE_S = 1e6  # limit of a trace: eleven days; clocks and timeouts must reach it
WARM_UP_SHARE = 0.1  # share of uncounted requests at the beginning, when the queue is empty


@dataclass(frozen=True)
class Arrivals:
    """Arrival times in seconds, ascending; requests count from number `first` on."""

    times: np.ndarray
    first: int = 0

    @property
    def rate(self) -> float:
        """Requests per second of a trace: its intervals, one fewer than requests, by its duration."""
        return (len(self.times) - 1) / float(self.times[-1] - self.times[0])


def count_requests(rate: float, min_requests: int, seconds: float) -> int:
    """Return the number of requests expected in `seconds`; if that is 0, in ten seconds (at least `min_requests`)."""
    return max(1, round(rate * seconds)) if seconds else max(min_requests, round(rate * USUAL_S))


def find_lowest(min_requests: int, seconds: float) -> float:
    """Return the lowest rate that brings enough requests in `seconds` (0: in `MAX_RATE_S`)."""
    return (min_requests + 0.1) / (seconds or MAX_RATE_S)  # plus a tenth of a request, so that rounding never loses one


def draw_arrivals(rate: float, min_requests: int, seconds: float, seed: int) -> Arrivals:
    """Return a Poisson process: independent exponential intervals with the mean 1 / `rate`.

    `count_requests` of the requests count; `WARM_UP_SHARE` of them come before.
    """
    count = count_requests(rate, min_requests, seconds)
    warm_up = round(WARM_UP_SHARE * count)
    gaps = np.random.default_rng(seed).exponential(1 / rate, warm_up + count)
    return Arrivals(np.cumsum(gaps), warm_up)


def read_trace(path: Path) -> np.ndarray:
    """Read the arrival times of a trace, counted from its first request; raise a `UserError` for an invalid one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on empty files, reported below
            times = np.loadtxt(path, dtype=np.float64, ndmin=1, encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no trace {path}") from None
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from None
    except ValueError as e:
        raise UserError(f"{path} is not a trace: {str(e).rstrip('.')}; write a time in seconds on each line") from None
    if times.ndim != 1 or len(times) < 2:
        raise UserError(f"{path} is not a trace: it must have at least two times, one on each line")
    if not np.isfinite(times).all() or (np.diff(times) < 0).any() or times[-1] == times[0]:
        raise UserError(f"{path} is not a trace: its times must be numbers of seconds in ascending order")
    if times[-1] - times[0] > MAX_TRACE_S:
        raise UserError(f"{path} is not a trace: it takes {times[-1] - times[0]:.3g} s; write its times in seconds")
    return np.asarray(times - times[0])
