"""Decisions on a pair: faster, slower, equivalent, or undecided and how many more rounds would settle it.

One interval decides each pair: above 1 it is faster, below slower, within the margin equivalent (two one-sided tests,
Schuirmann 1987), else undecided. So no verdict contradicts the interval printed with it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dyno.results.stats import rejection
from dyno.results.stats.evidence import ONE_AFTER_ANOTHER, Evidence, collect_evidence, pair_evidence
from dyno.results.stats.intervals import CONFIDENCE, Interval, t_quantile

# Sequential testing: the share of the error that each look may spend.


def share_error(rounds: int, first: int) -> float:
    """Return the share of the error that the look after `rounds` rounds may spend; 1 if `first` is 0 (a single look).

    The first look comes after `first` rounds, and every further round counts as a look, so that a run may be read or
    stopped at any time. Successive looks share nearly all their rounds, so the shares sum to more than 1. Simulation
    confirms that they keep the error (benchmarks/critical_values.py), for an error of 5 to 0.05 % and 200 further
    rounds. Half goes to the first look, where few degrees of freedom make a small share most expensive. Later shares
    fall with the logarithm of the rounds, as boundaries for any number of looks must (Darling and Robbins 1967).
    """
    if not first:
        return 1.0
    if rounds <= first:
        return 0.5
    return 0.22 / (1 + math.log(rounds / first)) ** 3


# Rounds needed to settle an undecided pair.

TARGET_POWER = 0.8
MAX_ROUNDS = 100  # no advice to measure more rounds than this
MAX_STANDARD_ERRORS = 50.0  # standard errors from 0 at which power is 1


def more_rounds(evidence: Evidence, reach: float, level: float, first: int) -> int:
    """Return how many more rounds decide the pair with 80 % power, if its true difference and spread are as observed.

    At most MAX_ROUNDS; MAX_ROUNDS + 1 if they are not enough. `reach` is the log ratio up to which speeds are
    equivalent, `level` the error of the pair's claim over all looks, `first` as in `share_error`.
    """

    def compute_power(more: int) -> float:
        return predict_power(evidence, evidence.rounds + more, reach, level, first)

    return 1 + bisect_left(range(1, MAX_ROUNDS + 1), TARGET_POWER, key=compute_power)


def predict_power(evidence: Evidence, rounds: int, reach: float, level: float, first: int) -> float:
    """Return the probability that `rounds` in all decide the pair, if its true difference and spread are as observed.

    Covers the t test and the two one-sided tests, by the noncentral t distribution. Both can only succeed together if
    the interval is so narrow that one of them always does.
    """
    from scipy.special import nctdtr

    freedom = evidence.parts * (rounds - 1)
    error = max(evidence.spread, 1e-9) / math.sqrt(rounds)
    seen_rounds = rounds + evidence.looks - evidence.rounds
    reserved_share = 0.0 if evidence.rejected is None else rejection.REJECTION_ERROR_SHARE
    critical = t_quantile(freedom, level * share_error(seen_rounds, first) * (1 - reserved_share))

    def compute_chance(difference: float, limit: float) -> float:
        return float(nctdtr(freedom, min(MAX_STANDARD_ERRORS, max(-MAX_STANDARD_ERRORS, difference / error)), limit))

    gap = abs(evidence.difference)
    power = 1 - compute_chance(gap, critical)
    if gap >= reach or power >= TARGET_POWER:
        return power
    return min(1.0, power + max(0.0, compute_chance(gap - reach, -critical) - compute_chance(gap + reach, critical)))


ALPHA = 1 - CONFIDENCE
FASTER, SLOWER, EQUIVALENT, UNDECIDED, ONE_ROUND = (
    "faster", "slower", "equivalent", "undecided", "one round only",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Decision rule for pairs: ratios between 1 / (1 + margin) and 1 + margin are equivalent.

    In an adaptive study, `first` is the number of rounds before the first look, else 0. `looks` divides the error: a
    gate judges its pairs at most twice.
    """

    margin: float = 0.02
    first: int = 0
    looks: int = 1

    @property
    def reach(self) -> float:
        """The margin as a log ratio."""
        return math.log1p(self.margin)

    def share(self, rounds: int) -> float:
        """Return the share of the error that a look after these rounds may spend."""
        return share_error(rounds, self.first) / self.looks


@dataclass(frozen=True)
class Speedup(Interval):
    """Speed-up of A over B (reference seconds / own seconds), its verdict, and how both were measured.

    `p` is the p-value of "no difference", adjusted for the family and for looks (NaN with one round). `more` rounds
    would settle an undecided pair (MAX_ROUNDS + 1: more than that); with `builds`, `more` counts builds. `rejected`
    disturbed rounds are left out; with them the value is `unfiltered`.
    """

    verdict: str
    measured: str = ONE_AFTER_ANOTHER
    p: float = math.nan
    more: int | None = None
    builds: int = 0
    rejected: int = 0
    unfiltered: float = math.nan

    @property
    def decided(self) -> bool:
        """Whether more rounds are useless."""
        return self.verdict in (FASTER, SLOWER, EQUIVALENT)

    @property
    def inverse(self) -> Speedup:
        """Speed-up of B over A."""
        verdict = {FASTER: SLOWER, SLOWER: FASTER}.get(self.verdict, self.verdict)
        value, low, high, unfiltered = (1 / each if each else math.inf for each in (
            self.value, self.high, self.low, self.unfiltered))  # fmt: skip
        return replace(self, value=value, low=low, high=high, unfiltered=unfiltered, verdict=verdict)


def decide(evidence: Evidence | None, rule: Rule | None = None) -> Speedup:
    """Decide a single pair, at 5 %."""
    return decide_family([evidence], rule)[0]


def decide_family(family: Sequence[Evidence | None], rule: Rule | None = None) -> list[Speedup]:
    """Decide pairs that are read together, such as the rows of a table against one reference.

    With 95 % confidence, no pair of equal speeds is called faster or slower (Holm 1979). With 95 % confidence, no pair
    that differs by the margin or more is called equivalent (Bonferroni). A faster or slower pair has the interval of
    its step in Holm's procedure, all others the simultaneous one, so each covers its ratio in at least 95 % of studies.
    With several looks, that holds over all of them.
    """
    rule = rule or Rule()
    pairs = [e for e in family if e is not None and not e.single]
    steps = _apply_holm([e.p_value / rule.share(e.looks) for e in pairs])
    speedups = {id(e): _judge_pair(e, rule, *step, len(pairs)) for e, step in zip(pairs, steps, strict=True)}
    return [speedups.get(id(e)) or _make_unjudged(e) for e in family]


def decide_apart(medians: Sequence[float], reference: Sequence[float], rule: Rule | None = None) -> Speedup:
    """Decide (`decide`) on two uninterleaved trials: one median latency per round of each, in seconds."""
    return decide(collect_evidence(medians, reference), rule)


def paired_speedup(logs: Sequence[float], rule: Rule | None = None) -> Speedup:
    """Decide (`decide`) on two interleaved trials: log(reference / own seconds) of each round."""
    return decide(pair_evidence(logs), rule)


def _make_unjudged(e: Evidence | None) -> Speedup:
    if e is None:
        return Speedup(math.nan, math.nan, math.nan, "")
    return Speedup(math.exp(e.difference), math.nan, math.nan, ONE_ROUND, e.measured, builds=e.builds)


def _judge_pair(e: Evidence, rule: Rule, level: float, p: float, count: int) -> Speedup:
    """Judge one of `count` pairs by its adjusted p-value and the level of its Holm step (0: not rejected)."""
    family_level = ALPHA / count
    spent_level = rule.share(e.looks) * (level or family_level)
    half = e.half_width(spent_level)
    low, high = e.difference - half, e.difference + half
    more = None
    if level:
        verdict = FASTER if e.difference > 0 else SLOWER
    elif max(-low, high) <= rule.reach:
        verdict = EQUIVALENT
    else:
        verdict, more = UNDECIDED, more_rounds(e, rule.reach, family_level, rule.first)
    ratio, unfiltered, rejected = math.exp(e.difference), math.exp(e.unfiltered), (e.rejected or 0) + e.disturbed
    return Speedup(
        ratio, _compute_ratio(low), _compute_ratio(high), verdict, e.measured, p, more, e.builds, rejected, unfiltered
    )


def _apply_holm(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return for each p-value the level of the step that rejected it (0: none) and its adjusted value (Holm 1979)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    steps, adjusted = [(0.0, 1.0)] * len(values), 0.0
    for rank, i in enumerate(order):
        open_count = len(values) - rank
        adjusted = min(1.0, max(adjusted, open_count * values[i]))
        steps[i] = (ALPHA / open_count if adjusted <= ALPHA else 0.0, adjusted)
    return steps


def _compute_ratio(log: float) -> float:
    """Return the ratio of a log, capped to the range of floats (limits from few rounds may be huge)."""
    return math.exp(min(log, 700.0))
