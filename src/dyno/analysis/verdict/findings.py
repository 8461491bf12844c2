"""One sentence of the verdict, and the words for numbers in it."""

from __future__ import annotations

from dataclasses import dataclass

from dyno.analysis.formatting import limits, show, significant
from dyno.analysis.stats import Interval

BEST, NOTE, WARNING, FAILURE = "best", "note", "warning", "failure"


@dataclass(frozen=True)
class Finding:
    """One sentence and what kind it is: best, note, warning or failure."""

    kind: str
    text: str


def ms(value: float) -> str:
    """Milliseconds as a duration."""
    return show(value * 1e-3, "duration")


def ratio(value: float, low: float, high: float) -> str:
    """`2.1x [1.9, 2.3]`; without an interval where there is none, with words for one that is too wide."""
    return f"{value:.2f}x{limits(low, high, lambda v: f'{v:.2f}')}"


def spread(found: Interval, latency: bool) -> str:
    """A latency in seconds or a rate in images/s, with its interval where it has one."""
    show_one = (lambda v: show(v, "duration")) if latency else significant
    unit = "" if latency else " images/s"
    return f"{show_one(found.value)}{unit}{limits(found.low, found.high, show_one)}"
