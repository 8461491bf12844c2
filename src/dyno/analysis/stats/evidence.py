"""What rounds say of a pair of trials: a mean log ratio with its standard error, paired by round or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyno.analysis.stats.summaries import deviation

ALONE, TURNS = "one after the other", "in turns"


@dataclass(frozen=True)
class Evidence:
    """The mean of log(reference seconds / own seconds) over so many `rounds` (above 0 is faster), its standard `error`
    and Student's degrees of `freedom`; NaN with a single round.

    `spread` is the deviation of a round's log ratio and `parts` how many degrees of freedom each further round brings:
    what is needed to tell how the error falls. `seen` is after how many rounds it may have been looked at, where that
    is more. With `builds` above 0 a round in all this is a build, the mean of its rounds.
    """

    difference: float
    error: float
    freedom: float
    rounds: int
    measured: str
    spread: float = math.nan
    parts: float = 1.0
    seen: int = 0
    builds: int = 0

    @property
    def looked(self) -> int:
        """After how many rounds it is looked at."""
        return max(self.rounds, self.seen)

    @property
    def single(self) -> bool:
        """Whether there is a ratio but nothing to judge it by."""
        return not self.freedom > 0


def paired(logs: Sequence[float]) -> Evidence | None:
    """Of two trials that measured in turns: `logs` holds for each round (a fresh process of each) the median over
    blocks of log(reference / own seconds). What a round's machine did to both is in neither; None without rounds."""
    if not len(logs):
        return None
    each = np.asarray(logs, np.float64)
    n, mean = len(each), float(each.mean())
    if n < 2:
        return Evidence(mean, math.nan, math.nan, n, TURNS)
    spread = deviation(each)
    return Evidence(mean, spread / math.sqrt(n), n - 1, n, TURNS, spread)


def unpaired(own: Sequence[float], reference: Sequence[float]) -> Evidence | None:
    """Of two trials that measured apart: both hold one median latency per round, in seconds.

    Standard error and degrees of freedom are Welch's (1947) and Satterthwaite's (1946); None without rounds of either.
    """
    if not len(own) or not len(reference):
        return None
    a, b = np.log(own), np.log(reference)
    difference, rounds = float(b.mean() - a.mean()), min(len(a), len(b))
    if rounds < 2:
        return Evidence(difference, math.nan, math.nan, rounds, ALONE)
    each = float(a.var(ddof=1)), float(b.var(ddof=1))
    va, vb = each[0] / len(a), each[1] / len(b)
    if not va + vb > 0:
        return Evidence(difference, 0.0, len(a) + len(b) - 2, rounds, ALONE, 0.0, 2.0)
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    parts = sum(each) ** 2 / (each[0] ** 2 + each[1] ** 2)
    return Evidence(difference, math.sqrt(va + vb), freedom, rounds, ALONE, math.sqrt(sum(each)), parts)
