"""When requests come: at random, or as a trace says; known before the first is sent, whatever the answers do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dyno.worker.spec import UserError

USUAL_S = 10.0
LONGEST_S = 1e6  # of a trace: eleven days; clocks and timeouts can't count to whatever a number can say
WARM_UP = 0.1  # of the requests: they come before those that count, since the queue is empty at first


@dataclass(frozen=True)
class Arrivals:
    """Times in seconds since the beginning, ascending; those from number `first` on count."""

    times: np.ndarray
    first: int = 0

    @property
    def rate(self) -> float:
        """Requests per second of a trace, by its intervals, of which there are one fewer than requests."""
        return (len(self.times) - 1) / float(self.times[-1] - self.times[0])


def poisson(rate: float, least: int, seconds: float, seed: int) -> Arrivals:
    """Return a Poisson process: independent exponential intervals with the mean 1 / `rate`.

    It counts the requests expected in `seconds`, or, if that is 0, in ten seconds, at least `least`.
    """
    count = max(1, round(rate * seconds)) if seconds else max(least, round(rate * USUAL_S))
    before = round(WARM_UP * count)
    gaps = np.random.default_rng(seed).exponential(1 / rate, before + count)
    return Arrivals(np.cumsum(gaps), before)


def read_trace(path: Path) -> np.ndarray:
    """Read the arrival times of a trace, counted from its first request; raise a `UserError` for an invalid one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of no lines; what is wrong is said below
            times = np.loadtxt(path, dtype=np.float64, ndmin=1)
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
    if times[-1] - times[0] > LONGEST_S:
        raise UserError(f"{path} is not a trace: it takes {times[-1] - times[0]:.3g} s; write its times in seconds")
    return np.asarray(times - times[0])
