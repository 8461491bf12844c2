"""What the times of requests say: percentiles with unanswered requests among them, stability, and the bound."""

from __future__ import annotations

import math

import numpy as np

HOLDS, OVER, UNSTABLE, TOO_FEW = "yes", "no", "unstable", "too few requests"
DRIFTLESS = 3.0  # standard deviations of a queue that has no drift
CHECKED = (0.5, 0.75, 1.0)  # of the requests


def percentile(latencies: np.ndarray, q: float) -> float:
    """Return a percentile (q = 0.99: the 99th) by linear interpolation.

    Unanswered requests are inf, and so is a percentile that falls on them.
    """
    ordered = np.sort(latencies)
    place = q * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    if not math.isfinite(ordered[high]):
        return math.inf
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def latencies(arrival: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the seconds from each request's due time to its answer, inf for one without an answer."""
    return np.where(np.isnan(ended), np.inf, ended - arrival)


def backlog(arrival: np.ndarray, began: np.ndarray, refused: np.ndarray, share: float = 1.0) -> int:
    """Return the number of requests waiting when the last one came, or the last of that share of them."""
    count = max(1, round(share * len(arrival)))
    last = arrival[count - 1]
    return int((~(began[:count] <= last) & ~refused[:count]).sum())


def unstable(arrival: np.ndarray, began: np.ndarray, refused: np.ndarray, most: int) -> bool:
    """Return whether requests come faster than they are answered.

    A queue whose arrivals and answers are equally fast is a reflected random walk: after n requests its length is the
    absolute value of a normal variable with a standard deviation of about sqrt(n) (Feller, An Introduction to
    Probability Theory II, 1971, VI.2). A queue beyond three of them plus the batch that forms is drift, if it is so
    after a half and after three quarters of the requests too: a stall of the machine is over by then.
    """
    return all(
        backlog(arrival, began, refused, share) > DRIFTLESS * math.sqrt(share * len(arrival)) + most
        for share in CHECKED
    )


def verdict(seconds: np.ndarray, q: float, bound: float, least: int, grows: bool) -> str:
    """Return whether that percentile of the latencies is within the bound; "" without a bound (0)."""
    if grows:
        return UNSTABLE
    if not bound:
        return ""
    if len(seconds) < least:
        return TOO_FEW
    return HOLDS if percentile(seconds, q) <= bound else OVER
