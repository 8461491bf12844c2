"""One sentence of the verdict, and the words for numbers in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from dyno.analysis.formatting import show, significant
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
    """`2.1x [1.9, 2.3]`; without an interval where there is none."""
    return f"{value:.2f}x" if isnan(low) else f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def spread(found: Interval, latency: bool) -> str:
    """A latency in seconds or a rate in images/s, with its interval where it has one."""
    show_one = (lambda v: show(v, "duration")) if latency else significant
    limits = "" if isnan(found.low) else f" [{show_one(found.low)}, {show_one(found.high)}]"
    return f"{show_one(found.value)}{'' if latency else ' images/s'}{limits}"
