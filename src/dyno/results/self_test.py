"""Figures of a self-test: error rates, smallest visible difference, limiting noise, and grade."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dyno.results import stats
from dyno.results.stats import CONFIDENCE, Interval, t_quantile
from dyno.worker.spec import SCHEMA, UserError, from_json

# Power of the tests behind "faster", and the smallest difference that is probably detected. Power is computed for the
# observed noise, by drawing studies from it (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 25).
# On a shared machine a few rounds are outliers, and power from their variance alone, as for normal noise, would be
# several times too low. Of scipy only `scipy.special` is imported; the rest is heavy.

TARGET_POWER = 0.8  # power for the smallest visible difference (the usual one; Cohen 1988)
# simulated studies; for limits: sets of rounds, and studies per set
DRAWN_STUDIES, DRAWN_SETS, STUDIES_PER_SET = 4000, 200, 1000
MIN_ROUNDS_FOR_LIMITS = 10  # fewer rounds give too similar sets


class Studies:
    """Studies drawn from a noise: the true difference that each needs to detect it.

    `noise` holds log ratios less their true values. Both signs are equally likely, because the order of two equal
    processes is arbitrary. With `paired`, a study draws `rounds` of them and is judged as interleaved; else it draws
    two groups of that many processes, with the noise as their difference. Disturbed rounds are rejected.
    """

    def __init__(
        self, noise: np.ndarray, rounds: int, paired: bool = True, draws: int = DRAWN_STUDIES, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        noise = np.concatenate([noise, -noise])
        if paired:
            mean, half = stats.judge_studies(rng.choice(noise, (draws, rounds)), 1 - CONFIDENCE)
        else:
            groups = rng.choice(noise / math.sqrt(2), (2, draws, rounds))
            mean, half = stats.judge_apart(groups, 1 - CONFIDENCE)
        self._seen_from, self._called_below = np.sort(half - mean), np.sort(-half - mean)

    def detection_rate(self, difference: float) -> float:
        """Return the share of studies that call a true difference of the logs slower."""
        return float(np.searchsorted(self._seen_from, difference) / len(self._seen_from))

    @property
    def false_alarms(self) -> float:
        """Share of studies that call equal processes faster or slower."""
        return self.detection_rate(0.0) + 1 - float(np.searchsorted(self._called_below, 0.0) / len(self._called_below))

    @property
    def smallest(self) -> float:
        """Smallest slow-down, as a share (0.02 is 2 %), detected by four studies of five; at least 0."""
        return max(0.0, math.expm1(float(np.quantile(self._seen_from, TARGET_POWER))))


def find_smallest(noise: np.ndarray, rounds: int, paired: bool = True) -> float:
    """Return the smallest slow-down that `rounds` rounds detect (see `Studies`).

    Infinite with one round, NaN without enough noise.
    """
    if rounds < 2:
        return math.inf
    return Studies(noise, rounds, paired).smallest if len(noise) > 1 else math.nan


def smallest_with_limits(noise: np.ndarray, rounds: int) -> Interval:
    """Return `find_smallest` for interleaved rounds, with its 95 % bootstrap interval over rounds (rows of `noise`).

    NaN limits with few rounds.
    """
    value = find_smallest(noise.ravel(), rounds)
    if len(noise) < MIN_ROUNDS_FOR_LIMITS:
        return Interval(value, math.nan, math.nan)
    rng = np.random.default_rng(1)
    sets = (noise[rng.integers(len(noise), size=len(noise))].ravel() for _ in range(DRAWN_SETS))
    values = [Studies(sample, rounds, draws=STUDIES_PER_SET, seed=seed).smallest for seed, sample in enumerate(sets)]
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(np.quantile(values, share)) for share in (tail, 1 - tail))
    return Interval(value, min(low, value), max(high, value))


def spread_interval(spread: float, freedom: int) -> Interval:
    """Return a standard deviation with its 95 % interval, by the chi-square distribution (normal values)."""
    from scipy.special import chdtri

    tail = (1 - CONFIDENCE) / 2
    if freedom < 1:
        return Interval(spread, math.nan, math.nan)
    low, high = (spread * math.sqrt(freedom / float(chdtri(freedom, p))) for p in (tail, 1 - tail))
    return Interval(spread, low, high)


def at_most(hits: int, count: int) -> float:
    """Return the one-sided upper 95 % limit of a share (Clopper and Pearson 1934), valid for any count."""
    from scipy.special import betaincinv

    return 1.0 if hits >= count else float(betaincinv(hits + 1, count - hits, CONFIDENCE))


# Stored measurements of a self-test: the machine, and each round's log ratios of pairs by block.

MIN_ROUNDS = 2  # fewest rounds for a spread
MAX_LOG_RATIO = 20.0  # no two equal processes differ by a factor of e^20
MAX_QUANTITY = 1e6  # exceeds any inference time in s and any clock in MHz


@dataclass(frozen=True)
class ProcessPair:
    """Two interleaved processes of one trial, the second slowed down by a share (0: not at all).

    `logs` holds log(first / second seconds) of each block.
    """

    slowdown: float
    logs: tuple[float, ...]

    @cached_property
    def log(self) -> float:
        """Log ratio of the pair, as in studies: the median over blocks."""
        return statistics.median(self.logs)


@dataclass(frozen=True)
class TestRound:
    """A set of fresh processes: its pairs, and the machine's state meanwhile.

    `first_s` is the first process's median latency. `others` is the number of processors kept busy by other programs,
    `steal` the share of processor time that the hypervisor gave to others, and `clock` the clock in MHz of each process
    (() if the system doesn't report it).
    """

    __test__ = False  # pytest would take it for a test

    first_s: float
    pairs: tuple[ProcessPair, ...]
    others: float = 0.0
    steal: float = 0.0
    clock: tuple[float, ...] = ()


@dataclass(frozen=True)
class StoredSelfTest:
    """A stored self-test: date, Dyno version, machine, device, measured configuration, and rounds.

    `machine` identifies the machine; `versions` are the libraries'; `configuration` is the model and how it ran.
    `threads` and the `seconds` of each process and `block` define the measurement; `study_rounds` is a study's default
    number of rounds. With `builds`, the two processes of a pair ran different builds of the engine, made for their
    round. `sessions` holds the log latencies of earlier self-tests of the same kind.
    """

    date: str
    version: str
    machine: dict[str, Any]
    device: str
    configuration: str
    threads: int
    seconds: float
    block: float
    study_rounds: int
    rounds: tuple[TestRound, ...]
    versions: dict[str, str] = field(default_factory=dict)
    builds: bool = False
    schema: int = SCHEMA
    sessions: tuple[float, ...] = ()

    def is_like(self, other: StoredSelfTest) -> bool:
        """Return whether both measured the same, so that latencies differ only by session."""
        names = ("machine", "device", "configuration", "threads", "versions", "builds")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def read(content: dict[str, Any]) -> StoredSelfTest | None:
    """Build the self-test from its JSON; None if it is from another program or a newer Dyno, or damaged."""
    try:
        stored = from_json(StoredSelfTest, content)
    except (UserError, TypeError, ValueError, KeyError):
        return None
    return stored if stored.schema == SCHEMA and _is_whole(stored) else None


def _is_whole(stored: StoredSelfTest) -> bool:
    """Return whether there are enough rounds for a spread, all with the same pairs and plausible numbers."""
    rounds = stored.rounds
    layouts = {tuple(pair.slowdown for pair in r.pairs) for r in rounds}
    if len(rounds) < MIN_ROUNDS or len(layouts) > 1:
        return False
    (layout,) = layouts
    if 0.0 not in layout or not all(0 <= slowdown <= MAX_LOG_RATIO for slowdown in layout):
        return False
    logs = [pair.logs for r in rounds for pair in r.pairs]
    if not all(logs) or not all(abs(log) <= MAX_LOG_RATIO for log in itertools.chain(*logs)):
        return False
    readings = [reading for r in rounds for reading in (r.others, r.steal, *r.clock)]
    return all(0 < r.first_s < MAX_QUANTITY for r in rounds) and all(
        0 <= reading < MAX_QUANTITY for reading in readings
    )


POWER_CURVE_ROUNDS = (3, 5, 10)  # rounds at which the power is printed
SUMMED_UP = (2, 3, 4, 5, 6, 7, 8, 10, 15, 20)  # rounds in a run's summary
# Grades by the smallest difference visible to a study with the default number of rounds.
GRADES = {"A": 0.01, "B": 0.02, "C": 0.05, "D": 0.10}
WORST_GRADE = "E"
# Thresholds above which a watched quantity may explain the noise: processors; share of their time; relative spread of
# the clock.
BUSY_CORES, STOLEN_SHARE, CLOCK_SPREAD = 0.2, 0.01, 0.02


@dataclass(frozen=True)
class Rate:
    """Frequency of an event, with Wilson's interval."""

    hits: int
    count: int

    @cached_property
    def interval(self) -> stats.Interval:
        """Share with its limits."""
        return stats.compute_wilson(self.hits, self.count)

    @property
    def at_most(self) -> float:
        """One-sided upper 95 % limit."""
        return at_most(self.hits, self.count)


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of studies with `rounds` rounds on pairs whose second process was slowed down by a share.

    Studies are consecutive rounds of the self-test, each used once. `predicted` is the share expected to say slower
    (for equal pairs: slower or faster), given all observed noise.
    """

    slowdown: float
    rounds: int
    slower: Rate
    faster: Rate
    covered: Rate
    predicted: float

    @property
    def false(self) -> Rate:
        """Wrong verdicts: any verdict on equal pairs, `faster` on others."""
        extra = 0 if self.slowdown else self.slower.hits
        return Rate(self.faster.hits + extra, self.faster.count)


@dataclass(frozen=True)
class PairVariances:
    """Variances of a pair's log ratio by source: fresh processes, and blocks within them."""

    process: float
    block: float

    @property
    def largest(self) -> str:
        return "process" if self.process >= self.block else "block"


@dataclass(frozen=True)
class SelfTestSummary:
    """A run's copy of the machine's self-test: smallest visible slow-downs by number of rounds.

    `turns` is for interleaved rounds, `apart` for one after the other; processes measured for `seconds`. `block` is the
    blocks' share of the variance. `sessions` self-tests of this `machine` have log latencies with the standard
    deviation `session_spread`.
    """

    date: str
    grade: str
    configuration: str
    seconds: float
    block: float
    turns: dict[str, float]
    apart: dict[str, float]
    machine: dict[str, Any] = field(default_factory=dict)
    sessions: int = 1
    session_spread: float = 0.0


def find_visible(
    summary: SelfTestSummary, rounds: int, seconds: float, in_turns: bool, level: float = 1 - CONFIDENCE
) -> float:
    """Return the smallest slow-down that a run of `rounds` rounds detects with 80 % power; infinite if none.

    `level` is the error that a pair may spend: below 5 % if several pairs are judged together or at several looks. A
    run with fewer seconds than the self-test has fewer blocks, so their part of the noise grows; more seconds promise
    nothing beyond the tested range. NaN if its way of measuring wasn't tested.
    """
    if rounds < 2:
        return math.inf
    by_rounds = summary.turns if in_turns else summary.apart
    smallest = {int(count): value for count, value in by_rounds.items() if count.isdecimal()}
    nearest_count = max((count for count in smallest if count <= rounds), default=0)
    if not nearest_count:
        return math.nan
    extrapolation = math.sqrt(nearest_count / rounds)  # extrapolation to more rounds than tabled
    block_factor = max(1.0, summary.seconds / seconds) if in_turns and seconds > 0 else 1.0
    freedom = (1 if in_turns else 2) * (rounds - 1)
    level_factor = _compute_reach(freedom, level) / _compute_reach(freedom, 1 - CONFIDENCE)
    return smallest[nearest_count] * extrapolation * math.sqrt(1 + summary.block * (block_factor - 1)) * level_factor


def _compute_reach(freedom: int, level: float) -> float:
    """Return the standard errors of a difference that a t test at this level detects with 80 % power (noncentral t)."""
    from scipy.special import nctdtrinc

    return float(nctdtrinc(freedom, 1 - TARGET_POWER, t_quantile(freedom, level)))


class SelfTest:
    """Figures of a self-test, computed from its stored measurements."""

    def __init__(self, stored: StoredSelfTest) -> None:
        self.stored = stored
        self._visible: dict[int, stats.Interval] = {}

    @property
    def rounds(self) -> Sequence[TestRound]:
        """Rounds in order of measurement."""
        return self.stored.rounds

    @cached_property
    def slowdowns(self) -> list[float]:
        """Slow-downs of processes as shares, including 0, in order."""
        return sorted({pair.slowdown for r in self.rounds for pair in r.pairs})

    def list_pairs(self, slowdown: float) -> list[ProcessPair]:
        """Return the pairs with that slow-down, in the order of rounds."""
        return [pair for r in self.rounds for pair in r.pairs if pair.slowdown == slowdown]

    @cached_property
    def spread(self) -> stats.Interval:
        """Standard deviation of the log ratio of two interleaved processes, pooled over all slow-downs.

        Its interval counts only rounds: the pairs of a round may share a process.
        """
        groups = [[pair.log for pair in self.list_pairs(slowdown)] for slowdown in self.slowdowns]
        squares = sum((len(logs) - 1) * statistics.variance(logs) for logs in groups)
        value = math.sqrt(squares / sum(len(logs) - 1 for logs in groups))
        return spread_interval(value, len(self.rounds) - 1)

    @cached_property
    def noise(self) -> np.ndarray:
        """Log ratios of each round less the true ones, float64 [rounds, pairs]."""
        return np.array([[pair.log + math.log1p(pair.slowdown) for pair in r.pairs] for r in self.rounds])

    @cached_property
    def steps(self) -> np.ndarray:
        """Log ratios of uninterleaved processes: first processes of consecutive rounds, float64 [rounds - 1]."""
        return np.diff(np.log([r.first_s for r in self.rounds]))

    @cached_property
    def apart(self) -> float:
        """Spread of uninterleaved processes."""
        return math.sqrt(float(np.mean(self.steps**2)))

    @property
    def sessions(self) -> tuple[float, ...]:
        """Log latency of each self-test of this kind, this one's last."""
        return (*self.stored.sessions, statistics.median(math.log(r.first_s) for r in self.rounds))

    @property
    def session_spread(self) -> float:
        """Standard deviation of `sessions`; 0 for a single one."""
        return statistics.stdev(self.sessions) if len(self.sessions) > 1 else 0.0

    @cached_property
    def equal(self) -> stats.Speedup:
        """The speed-up of equal processes over all rounds; it should be 1."""
        return stats.paired_speedup([pair.log for pair in self.list_pairs(0.0)])

    @cached_property
    def levels(self) -> PairVariances:
        """Sources of the spread of interleaved processes.

        The blocks' part comes from halves: the difference between a pair's medians over even and over odd blocks has
        four times the variance that blocks alone give the median over all.
        """
        halves = [
            (statistics.median(pair.logs[::2]) - statistics.median(pair.logs[1::2])) ** 2 / 4
            for r in self.rounds for pair in r.pairs if len(pair.logs) > 1
        ]  # fmt: skip
        total = self.spread.value**2
        block = min(total, statistics.fmean(halves)) if halves else 0.0
        return PairVariances(total - block, block)

    @cached_property
    def verdicts(self) -> list[Verdicts]:
        """Verdicts of studies of 3, 5 and 10 rounds for each slow-down, if there are rounds for at least one study."""
        return [self._count_verdicts(slowdown, rounds) for slowdown in self.slowdowns for rounds in POWER_CURVE_ROUNDS
                if len(self.rounds) >= rounds]  # fmt: skip

    def _count_verdicts(self, slowdown: float, rounds: int) -> Verdicts:
        decisions = [stats.paired_speedup(logs) for logs in self._split_studies(slowdown, rounds)]
        verdicts = [decision.verdict for decision in decisions]
        truth = 1 / (1 + slowdown)
        covered = sum(decision.low <= truth <= decision.high for decision in decisions)
        studies = Studies(self.noise.ravel(), rounds)
        predicted = studies.detection_rate(math.log1p(slowdown)) if slowdown else studies.false_alarms
        slower, faster = (Rate(verdicts.count(verdict), len(verdicts)) for verdict in (stats.SLOWER, stats.FASTER))
        return Verdicts(slowdown, rounds, slower, faster, Rate(covered, len(verdicts)), predicted)

    def _split_studies(self, slowdown: float, rounds: int) -> list[list[float]]:
        """Return the log ratios of disjoint studies of `rounds` rounds, from the pairs of one slow-down."""
        logs_by_round = [[pair.log for pair in r.pairs if pair.slowdown == slowdown] for r in self.rounds]
        starts = range(0, len(logs_by_round) - rounds + 1, rounds)
        return [list(logs) for start in starts for logs in zip(*logs_by_round[start : start + rounds], strict=False)]

    @cached_property
    def coverage(self) -> Rate:
        """Rate of the shortest studies whose interval holds the true ratio."""
        rates = [one.covered for one in self.verdicts if one.rounds == POWER_CURVE_ROUNDS[0]]
        return Rate(sum(one.hits for one in rates), sum(one.count for one in rates))

    def false_alarms(self, rounds: int = POWER_CURVE_ROUNDS[0]) -> Rate:
        """Return the rate of studies of `rounds` rounds that called equal processes faster or slower."""
        rates = [v.false for v in self.verdicts if not v.slowdown and v.rounds == rounds]
        return rates[0] if rates else Rate(0, 0)

    def find_visible(self, rounds: int) -> stats.Interval:
        """Return the smallest slow-down (a share) that `rounds` interleaved rounds detect with 80 % power."""
        if rounds not in self._visible:
            self._visible[rounds] = smallest_with_limits(self.noise, rounds)
        return self._visible[rounds]

    def visible_apart(self, rounds: int) -> float:
        """Return the smallest slow-down that `rounds` uninterleaved rounds detect with 80 % power."""
        return find_smallest(self.steps, rounds, paired=False)

    @cached_property
    def grade(self) -> str:
        """Grade by what a study of the default number of rounds detects: A 1 %, B 2 %, C 5 %, D 10 %, else E."""
        smallest = self.find_visible(self.stored.study_rounds).value
        return next((letter for letter, limit in GRADES.items() if smallest <= limit), WORST_GRADE)

    @cached_property
    def bound_by(self) -> str:
        """Limiting noise: process, neighbours, clocks, or block if no watched quantity explains it."""
        if self.levels.largest == "process":
            return "process"
        others, steal = (statistics.fmean(getattr(r, name) for r in self.rounds) for name in ("others", "steal"))
        if others > BUSY_CORES or steal > STOLEN_SHARE:
            return "neighbours"
        return "clocks" if self.clock_spread > CLOCK_SPREAD else "block"

    @cached_property
    def clock_spread(self) -> float:
        """Relative standard deviation of the clock between processes; 0 if unknown."""
        clocks = [clock for r in self.rounds for clock in r.clock if clock > 0]
        return statistics.stdev(clocks) / statistics.fmean(clocks) if len(clocks) > 1 else 0.0

    def summary(self) -> SelfTestSummary:
        """Return the summary that a run keeps."""
        stored, total = self.stored, self.levels.process + self.levels.block
        turns = {str(n): find_smallest(self.noise.ravel(), n) for n in SUMMED_UP}
        apart = {str(n): self.visible_apart(n) for n in SUMMED_UP}
        share = self.levels.block / total if total else 0.0
        return SelfTestSummary(
            stored.date, self.grade, stored.configuration, stored.seconds, share, turns, apart,
            stored.machine, len(self.sessions), self.session_spread,
        )  # fmt: skip
