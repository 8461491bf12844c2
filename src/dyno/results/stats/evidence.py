"""What rounds say of a pair of trials: a mean log ratio with its standard error, paired by round or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dyno.results.stats import rejection
from dyno.results.stats.intervals import t_quantile
from dyno.results.stats.summaries import deviation

ALONE, TURNS, SESSIONS = "one after the other", "in turns", "in two sessions"
# Two or three rounds hardly estimate their own spread: a usual one counts as if it had been seen in further rounds.
USUAL_SPREAD, USUAL_FREEDOM = 0.2, 2  # of the log ratios of undisturbed rounds, and degrees of freedom
USUAL_SHARE = {2: 0.5, 3: 0.25}  # by the rounds, how much of the error the test with that spread may spend


@dataclass(frozen=True)
class Evidence:
    """The mean of log(reference seconds / own seconds) over `rounds` rounds (above 0 is faster), its standard `error`
    and Student's degrees of `freedom`; NaN with a single round.

    `spread` is the deviation of a round's log ratio and `parts` how many degrees of freedom each further round brings:
    what is needed to tell how the error falls. `seen` is after how many rounds it may have been looked at, where that
    is more. With `builds` above 0 a round in all this is a build, the mean of its rounds. `rejected` of the rounds
    are far from the others and left out of mean and error; None where none may be. `disturbed` are further ones that
    don't count, because other programs took the processors then. `unfiltered` is the mean of all. Rounds that are
    `undisturbed`, if they are very few, are also tested with a usual spread.
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
    rejected: int | None = None
    disturbed: int = 0
    unfiltered: float = math.nan
    undisturbed: bool = False

    @property
    def p_value(self) -> float:
        """The two-sided p-value of "no difference"."""
        if not self.error:
            return 0.0 if self.difference else 1.0
        t = self.difference / self.error
        if self.rejected is None:
            return rejection.student_p(t, self.freedom)
        p = rejection.p_value(t, self.rounds, self.rejected)
        if not (share := self._usual_share):
            return p
        usual = rejection.student_p(self.difference / self._moderated_error, self.freedom + USUAL_FREEDOM)
        return min(1.0, p / (1 - share), usual / share)

    def half_width(self, level: float) -> float:
        """Return half the width of the interval whose error is `level`."""
        if not self.error:
            return 0.0
        if self.rejected is None:
            return self.error * t_quantile(self.freedom, level)
        share = self._usual_share
        half = self.error * rejection.critical_value(self.rounds, self.rejected, level * (1 - share))
        if not share:
            return half
        return min(half, self._moderated_error * t_quantile(self.freedom + USUAL_FREEDOM, level * share))

    @property
    def _usual_share(self) -> float:
        return USUAL_SHARE.get(self.rounds, 0.0) if self.undisturbed and not self.rejected else 0.0

    @property
    def _moderated_error(self) -> float:
        """The standard error with the usual spread beside the own one (moderated t: Smyth 2004)."""
        freedom = self.freedom + USUAL_FREEDOM
        variance = (self.freedom * self.spread**2 + USUAL_FREEDOM * USUAL_SPREAD**2) / freedom
        return math.sqrt(variance / self.rounds)

    @property
    def looked(self) -> int:
        """After how many rounds it is looked at."""
        return max(self.rounds, self.seen)

    @property
    def single(self) -> bool:
        """Whether there is a ratio but nothing to judge it by."""
        return not self.freedom > 0


def paired(logs: Sequence[float], are_rounds: bool = True) -> Evidence | None:
    """Return the evidence on two trials that measured in turns; None without rounds.

    `logs` holds for each round (a fresh process of each) the median over blocks of log(reference / own seconds), so the
    machine's effect on both in a round cancels. Disturbed rounds are rejected, unless `logs` are means of several
    rounds each.
    """
    if not len(logs):
        return None
    each = np.asarray(logs, np.float64)
    n = len(each)
    if n < 2:
        return Evidence(float(each.mean()), math.nan, math.nan, n, TURNS)
    kept = rejection.keep_undisturbed(each) if are_rounds else each
    spread = deviation(kept)
    rejected = n - len(kept) if are_rounds else None
    error, freedom = spread / math.sqrt(len(kept)), len(kept) - 1
    mean, unfiltered = float(kept.mean()), float(each.mean())
    return Evidence(mean, error, freedom, n, TURNS, spread, rejected=rejected, unfiltered=unfiltered)


def unpaired(own: Sequence[float], reference: Sequence[float]) -> Evidence | None:
    """Collect the evidence from two trials that measured apart: both hold one median latency per round, in seconds.

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


LEAST_SESSIONS = 3  # of a machine, for a variance between them


def between_sessions(e: Evidence, sessions: int, spread: float) -> Evidence:
    """Return the evidence on trials of two sessions of a machine, of which `sessions` differed by `spread`.

    Each trial's mean has its session's deviation besides its rounds': a session is the highest level, and one
    observation (Kalibera and Jones 2013). `spread` is the standard deviation of a session's log latency; degrees of
    freedom are Satterthwaite's (1946). With fewer than LEAST_SESSIONS nothing is known, and nothing is judged.
    """
    if e.single or sessions < LEAST_SESSIONS or not spread > 0:
        return replace(e, error=math.nan, freedom=math.nan, measured=SESSIONS)
    within, between = e.error**2, 2 * spread**2
    freedom = (within + between) ** 2 / (within**2 / e.freedom + between**2 / (sessions - 1))
    return replace(e, error=math.sqrt(within + between), freedom=freedom, rejected=None, measured=SESSIONS)
