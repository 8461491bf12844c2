"""Evidence on a pair of trials from its rounds: a mean log ratio and its standard error, paired by round or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dyno.results.stats import rejection
from dyno.results.stats.intervals import t_quantile
from dyno.results.stats.summaries import compute_std

ONE_AFTER_ANOTHER, IN_TURNS, IN_TWO_SESSIONS = "one after the other", "in turns", "in two sessions"
MIN_P, MAX_P = 1e-12, 0.99  # limits of p for uninterleaved trials with rejected rounds
# Two or three rounds estimate their spread poorly, so a prior spread counts like that of further rounds.
PRIOR_SPREAD, PRIOR_FREEDOM = 0.2, 2  # of log ratios of undisturbed rounds; degrees of freedom
PRIOR_ERROR_SHARE = {2: 0.5, 3: 0.25}  # by rounds: share of the error that the test with the prior spread may use


@dataclass(frozen=True)
class Group:
    """Rounds of one of two uninterleaved trials: the mean of their logs, without `rejected` rounds."""

    rounds: int
    rejected: int
    mean: float
    spread: float  # standard deviation of the logs

    @property
    def freedom(self) -> int:
        """Student's degrees of freedom."""
        return self.rounds - self.rejected - 1

    @property
    def variance(self) -> float:
        """Variance of the mean."""
        return self.spread**2 / (self.freedom + 1)

    def variance_at(self, level: float) -> float:
        """Return the variance that widens Student's interval as the rejection requires at this level."""
        factor = rejection.critical_value(self.rounds, self.rejected, level) / t_quantile(self.freedom, level)
        return self.variance * factor**2


@dataclass(frozen=True)
class Evidence:
    """Mean of log(reference seconds / own seconds) over `rounds` rounds (above 0 is faster).

    `error` is its standard error and `freedom` Student's degrees of freedom, NaN with a single round. `spread`, the
    deviation of a round's log ratio, and `parts`, the degrees of freedom per further round, predict how the error
    falls. `rounds_seen` is the number of rounds looked at, if larger. With `builds` above 0, a round here is a build
    (the mean of its rounds). `rejected` outlying rounds are left out of mean and error; None if rejection is not
    allowed. `disturbed` further rounds don't count, because other programs took the processors. `unfiltered` is the
    mean of all. Very few rounds that are `undisturbed` are also tested with the prior spread. Uninterleaved trials have
    a group of rounds each.
    """

    difference: float
    error: float
    freedom: float
    rounds: int
    measured: str
    spread: float = math.nan
    parts: float = 1.0
    rounds_seen: int = 0
    builds: int = 0
    rejected: int | None = None
    disturbed: int = 0
    unfiltered: float = math.nan
    undisturbed: bool = False
    groups: tuple[Group, ...] = ()

    @property
    def p_value(self) -> float:
        """The two-sided p-value of "no difference"."""
        if not self.error:
            return 0.0 if self.difference else 1.0
        t = self.difference / self.error
        if self.rejected is None:
            return rejection.student_p(t, self.freedom)
        if self.groups:
            return (
                self._solve_p_value()
                if self.rejected
                else min(1.0, rejection.student_p(t, self.freedom) / rejection.PLAIN_ERROR_SHARE)
            )
        p = rejection.p_value(t, self.rounds, self.rejected)
        if not (share := self._usual_share):
            return p
        moderated_p = rejection.student_p(self.difference / self._moderated_error, self.freedom + PRIOR_FREEDOM)
        return min(1.0, p / (1 - share), moderated_p / share)

    def half_width(self, level: float) -> float:
        """Return half the width of the interval with the error `level`."""
        if not self.error:
            return 0.0
        if self.rejected is None:
            return self.error * t_quantile(self.freedom, level)
        if self.groups and not self.rejected:
            return self.error * t_quantile(self.freedom, level * rejection.PLAIN_ERROR_SHARE)
        if self.groups:
            error, freedom = _combine([(each.variance_at(level), each.freedom) for each in self.groups])
            return error * t_quantile(freedom, level)
        share = self._usual_share
        half = self.error * rejection.critical_value(self.rounds, self.rejected, level * (1 - share))
        if not share:
            return half
        return min(half, self._moderated_error * t_quantile(self.freedom + PRIOR_FREEDOM, level * share))

    def _solve_p_value(self) -> float:
        """Return the level whose interval ends at 0."""
        from scipy.optimize import brentq

        if self.half_width(MAX_P) >= abs(self.difference):
            return 1.0
        if self.half_width(MIN_P) <= abs(self.difference):
            return MIN_P
        root = brentq(
            lambda log: self.half_width(math.exp(log)) - abs(self.difference), math.log(MIN_P), math.log(MAX_P)
        )
        return math.exp(root)

    @property
    def _usual_share(self) -> float:
        return PRIOR_ERROR_SHARE.get(self.rounds, 0.0) if self.undisturbed and not self.rejected else 0.0

    @property
    def _moderated_error(self) -> float:
        """Standard error from own and prior spread (moderated t: Smyth 2004)."""
        freedom = self.freedom + PRIOR_FREEDOM
        variance = (self.freedom * self.spread**2 + PRIOR_FREEDOM * PRIOR_SPREAD**2) / freedom
        return math.sqrt(variance / self.rounds)

    @property
    def looks(self) -> int:
        """Number of rounds at this look."""
        return max(self.rounds, self.rounds_seen)

    @property
    def single(self) -> bool:
        """Whether the ratio has no error estimate."""
        return not self.freedom > 0


def pair_evidence(logs: Sequence[float], are_rounds: bool = True) -> Evidence | None:
    """Return the evidence on two interleaved trials; None without rounds.

    `logs` holds for each round (a fresh process of each) the median over blocks of log(reference / own seconds), so
    that the machine's effect on both cancels. Disturbed rounds are rejected, unless `logs` are means of several rounds
    each.
    """
    if not len(logs):
        return None
    values = np.asarray(logs, np.float64)
    n = len(values)
    if n < 2:
        return Evidence(float(values.mean()), math.nan, math.nan, n, IN_TURNS)
    kept_values = rejection.keep_undisturbed(values) if are_rounds else values
    spread = compute_std(kept_values)
    rejected = n - len(kept_values) if are_rounds else None
    error, freedom = spread / math.sqrt(len(kept_values)), len(kept_values) - 1
    mean, unfiltered = float(kept_values.mean()), float(values.mean())
    return Evidence(mean, error, freedom, n, IN_TURNS, spread, rejected=rejected, unfiltered=unfiltered)


def collect_evidence(medians: Sequence[float], reference: Sequence[float], are_rounds: bool = True) -> Evidence | None:
    """Collect the evidence from two uninterleaved trials: one median latency per round of each, in seconds.

    Standard error and degrees of freedom are Welch's (1947) and Satterthwaite's (1946); None if either has no rounds.
    Disturbed rounds of each trial are rejected, unless the medians are means of several rounds each.
    """
    if not len(medians) or not len(reference):
        return None
    all_logs = np.log(medians), np.log(reference)
    unfiltered, rounds = float(all_logs[1].mean() - all_logs[0].mean()), min(map(len, all_logs))
    if rounds < 2:
        return Evidence(unfiltered, math.nan, math.nan, rounds, ONE_AFTER_ANOTHER)
    kept_logs = [rejection.keep_undisturbed(logs) if are_rounds else logs for logs in all_logs]
    groups = tuple(
        Group(len(logs), len(logs) - len(rest), float(rest.mean()), compute_std(rest))
        for logs, rest in zip(all_logs, kept_logs, strict=True)
    )
    difference, variances = groups[1].mean - groups[0].mean, [group.spread**2 for group in groups]
    may_reject = are_rounds and max(map(len, all_logs)) >= rejection.MIN_ROUNDS
    rejected = sum(group.rejected for group in groups) if may_reject else None
    evidence = Evidence(difference, 0.0, len(kept_logs[0]) + len(kept_logs[1]) - 2, rounds, ONE_AFTER_ANOTHER, 0.0, 2.0,
                     rejected=rejected, unfiltered=unfiltered, groups=groups)  # fmt: skip
    if not sum(variances) > 0:
        return evidence
    error, freedom = _combine([(group.variance, group.freedom) for group in groups])
    parts = sum(variances) ** 2 / sum(variance**2 for variance in variances)
    return replace(evidence, error=error, freedom=freedom, spread=math.sqrt(sum(variances)), parts=parts)


def _combine(means: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the standard error of a difference of means and its degrees of freedom (Satterthwaite 1946).

    `means` holds the variance and degrees of freedom of each mean.
    """
    total = sum(variance for variance, _ in means)
    return math.sqrt(total), total**2 / sum(variance**2 / freedom for variance, freedom in means)


MIN_SESSIONS = 3  # fewest sessions of a machine for a variance between them


def between_sessions(evidence: Evidence, sessions: int, spread: float) -> Evidence:
    """Return the evidence on trials of two sessions of a machine, from the `spread` of `sessions` earlier ones.

    Each trial's mean has its session's deviation in addition to its rounds': a session is the highest level, and one
    observation (Kalibera and Jones 2013). `spread` is the standard deviation of a session's log latency; degrees of
    freedom are Satterthwaite's (1946). With fewer than MIN_SESSIONS sessions nothing is judged (NaN).
    """
    if evidence.single or sessions < MIN_SESSIONS or not spread > 0:
        return replace(evidence, error=math.nan, freedom=math.nan, groups=(), measured=IN_TWO_SESSIONS)
    within, between = evidence.error**2, 2 * spread**2
    freedom = (within + between) ** 2 / (within**2 / evidence.freedom + between**2 / (sessions - 1))
    return replace(
        evidence, error=math.sqrt(within + between), freedom=freedom, rejected=None, groups=(), measured=IN_TWO_SESSIONS
    )
