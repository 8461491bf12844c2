"""Interleaved trials: their ratio within each block, where both ran under the same conditions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from dyno.formatting import format_count
from dyno.results import stats
from dyno.results.rounds import ANY_LATENCY, Round
from dyno.results.trial_result import TrialResult
from dyno.worker.jobs.turns import quiet_delay

MIN_QUIET_BLOCKS = 2  # fewest quiet blocks for a round's quiet ratio
MIN_QUIET_ROUNDS = 2
MIN_UNDISTURBED_BLOCKS = 3  # fewest undisturbed blocks (and half of all) for a round's median to count as quiet
MIN_DRIFT_ROUNDS, MIN_DRIFT_BLOCKS = 3, 4
CACHE_DISTANCE_RATIO = 2.0  # processors beyond this multiple of the lowest core-to-core latency share no cache
MIN_DRIFT, DRIFT_ERROR_RATE = 0.02, 0.01  # smallest drift that matters, and the error rate of its interval


class RoundRatios(NamedTuple):
    """Ratios of two trials in one interleaved set of fresh processes.

    `builds` are the build numbers of both, None if neither has several. `logs` holds log(a / b) per block, float64
    [blocks]; if the set `is_quiet`, of undisturbed blocks only. `has_delays` tells whether the system counted
    scheduling delays of both: without them every set looks quiet.
    """

    builds: tuple[int, int] | None
    logs: np.ndarray
    is_quiet: bool
    has_delays: bool


def log_ratios(
    a: TrialResult, b: TrialResult, boundary: str, clock: str = "", keep_disturbed: bool = False
) -> list[float]:
    """Return the median log ratio of each interleaved set of fresh processes.

    If rounds go through builds of either engine, sets of the same builds are averaged. Sets with fewer than two
    undisturbed blocks are left out, unless only one set would be left.
    """
    return average_rounds(block_ratios(a, b, boundary, clock, keep_disturbed))


def are_quiet(sets: Sequence[RoundRatios]) -> bool:
    """Return whether enough sets are undisturbed to leave out the others."""
    return sum(each.is_quiet for each in sets) >= MIN_QUIET_ROUNDS


def average_rounds(sets: Sequence[RoundRatios]) -> list[float]:
    """Return the median log ratio of each set, or for each build the mean of its sets' medians."""
    if are_quiet(sets):
        sets = [each for each in sets if each.is_quiet]
    return stats.over_units([(each.builds or f"set {k}", float(np.median(each.logs))) for k, each in enumerate(sets)])


def block_ratios(
    a: TrialResult, b: TrialResult, boundary: str, clock: str, keep_disturbed: bool = False, *, settled: bool = False
) -> list[RoundRatios]:
    """Return the ratios of each interleaved set of fresh processes.

    a and b are medians of a block's latencies at the boundary (images per second for throughput). Blocks are left out
    if the counters of either process report a disturbance; latencies play no part in that. Sets in which both trials
    accompanied a third one don't count. `settled` is passed to `Round.block_medians`.
    """
    tag = _name_tag(boundary)
    rounds_of_b = {r.turns: r for r in b.rounds if r.ok and r.turns}
    all_of_b = rounds_of_b | {r.turns: r for r in b.companions if r.ok and r.turns}
    pairs = [
        (x, ys[x.turns])
        for x, ys in (*((x, all_of_b) for x in a.rounds), *((x, rounds_of_b) for x in a.companions))
        if x.ok and x.turns in ys
    ]
    quiet_a, quiet_b = (_quiet_delay(t, boundary) for t in (a, b))
    span = _find_usual_latencies((r for pair in pairs for r in pair), boundary)
    sets = []
    for x, y in pairs:
        medians_x, medians_y = (r.block_medians(tag, boundary, clock, settled=settled) for r in (x, y))
        logs = compare_blocks(medians_x, medians_y)
        disturbed = set[int]()
        if not keep_disturbed:
            disturbed = x.disturbed_blocks(boundary, quiet_a, span) | y.disturbed_blocks(boundary, quiet_b, span)
        quiet_logs = compare_blocks(medians_x, medians_y, disturbed)
        is_quiet = len(quiet_logs) >= min(MIN_QUIET_BLOCKS, len(logs))
        if logs.size:
            builds = (x.build, y.build) if x.build or y.build else None
            has_delays = all(r.facts.delays.get(boundary) for r in (x, y))
            sets.append(RoundRatios(builds, quiet_logs if is_quiet else logs, is_quiet, has_delays))
    return sets


class ApartJobs(NamedTuple):
    """Number of jobs whose processors were mostly far `apart`, out of `jobs`, with core-to-core latencies in ns.

    `latency` is the median of those jobs, `near` the lowest of all.
    """

    apart: int
    jobs: int
    latency: float
    near: float

    @property
    def clause(self) -> str:
        """Clause on the distance of the processors, without a full stop."""
        return (
            f"processors were further apart during {self.apart} of {format_count(self.jobs, 'job')} (a signal from "
            f"one to another and back took {self.latency:.0f} ns instead of {self.near:.0f}), as when a host moves a "
            f"virtual machine's processors"
        )


def find_apart_jobs(trials: Iterable[TrialResult]) -> ApartJobs | None:
    """Return the jobs whose processors were further apart than in others; None without any."""
    medians = [latency for t in trials for latency in list_core_latencies(t)]
    near = min(medians, default=0.0)
    far_latencies = [latency for latency in medians if latency > CACHE_DISTANCE_RATIO * near]
    return ApartJobs(len(far_latencies), len(medians), float(np.median(far_latencies)), near) if far_latencies else None


def list_core_latencies(trial: TrialResult) -> list[float]:
    """Return the median core-to-core latency of each good round that measured it, in ns."""
    round_latencies = ([n for each in r.facts.core_latencies.values() for n in each if n] for r in trial.good)
    return [float(np.median(latencies)) for latencies in round_latencies if latencies]


def find_drift(a: TrialResult, b: TrialResult, boundary: str, clock: str = "") -> stats.Interval | None:
    """Return the relative change of a / b from a round's first block to its last, with its 99 % interval.

    Slow-downs of the whole machine cancel within a block; the rest is an engine that is not warm or heats up. A round's
    change is Theil and Sen's slope (Sen 1968), robust to single odd blocks, times its blocks; the interval is Student's
    over rounds. None if fewer than three rounds have four blocks that count.
    """
    rounds = [each.logs for each in block_ratios(a, b, boundary, clock) if len(each.logs) >= MIN_DRIFT_BLOCKS]
    if len(rounds) < MIN_DRIFT_ROUNDS:
        return None
    from scipy.stats import theilslopes

    changes = np.array([theilslopes(logs).slope * (len(logs) - 1) for logs in rounds])
    half = stats.t_quantile(len(changes) - 1, DRIFT_ERROR_RATE) * changes.std(ddof=1) / math.sqrt(len(changes))
    return stats.Interval(*(math.expm1(changes.mean() + sign * half) for sign in (0, -1, 1)))


class SustainedRatio(NamedTuple):
    """Ratio a / b under sustained load, the `short` ratio in short turns, and whether they differ (`has_moved`)."""

    value: float
    short: float
    has_moved: bool


def compare_sustained(
    a: TrialResult, b: TrialResult, boundary: str, clock: str, margin: float
) -> SustainedRatio | None:
    """Compare the ratio a / b under sustained load with that in short turns; None if either wasn't measured.

    In short turns, engines alternate, so heat and a power limit affect all of them. The ratio `has_moved` if it differs
    by more than the `margin` and lies outside the 95 % prediction interval of a further round (Student's, from the
    spread of the rounds). None also with a single round.
    """
    sustained_a, sustained_b = (replace(t, rounds=t.sustained, companions=[]) for t in (a, b))
    sustained = average_rounds(block_ratios(sustained_a, sustained_b, boundary, clock, settled=True))
    rounds = np.array(log_ratios(a, b, boundary, clock))
    if len(rounds) < MIN_QUIET_ROUNDS or not sustained:
        return None
    logs = np.delete(rounds, stats.find_rejected(rounds))
    usual_log, shift = float(np.mean(logs)), float(np.mean(sustained) - np.mean(logs))
    spread = float(np.std(logs, ddof=1)) * math.sqrt(1 / len(sustained) + 1 / len(logs))
    has_moved = abs(shift) > max(math.log1p(margin), stats.t_quantile(len(logs) - 1) * spread)
    return SustainedRatio(math.exp(usual_log + shift), math.exp(usual_log), has_moved)


def list_quiet_rounds(
    trials: Sequence[TrialResult], boundary: str, min_rounds: int = MIN_QUIET_ROUNDS
) -> list[list[Round]]:
    """Return each trial's good rounds that timed the boundary undisturbed by other programs.

    Their processors were at the distance (near or apart) that most blocks of all trials had. If a trial has fewer than
    `min_rounds` of them, all timed rounds of every trial are returned.
    """
    timed_rounds = [[r for r in t.good if r.find_measurement(_name_tag(boundary), boundary)] for t in trials]
    span = _find_usual_latencies((r for rounds in timed_rounds for r in rounds), boundary)
    quiet_rounds = []
    for t, rounds in zip(trials, timed_rounds, strict=True):
        delay = _quiet_delay(t, boundary)
        quiet_rounds.append([r for r in rounds if _is_undisturbed(r, boundary, delay, span)])
    return quiet_rounds if min(map(len, quiet_rounds)) >= min_rounds else timed_rounds


def find_quiet_rounds(trial: TrialResult, boundary: str, min_rounds: int = 1) -> list[Round]:
    """Return one trial's undisturbed rounds (`list_quiet_rounds`), cached."""
    key = "quiet rounds", boundary, min_rounds
    if key not in trial.computed:
        [trial.computed[key]] = list_quiet_rounds([trial], boundary, min_rounds)
    return cast("list[Round]", trial.computed[key])


def quiet_medians(trial: TrialResult, boundary: str, clock: str = "") -> list[float]:
    """Return the median latency in seconds of each undisturbed round, by that clock; without any, of all rounds.

    If rounds go through several builds, one value per build.
    """
    key = "quiet medians", boundary, clock
    if key not in trial.computed:
        names = {r.folder.name for r in find_quiet_rounds(trial, boundary)}
        trial.computed[key] = trial.medians(boundary, clock, names)
    return cast("list[float]", trial.computed[key])


def _is_undisturbed(r: Round, boundary: str, delay: float | None, span: tuple[float, float]) -> bool:
    """Return whether enough blocks are undisturbed for the round's median to be a quiet machine's."""
    count = len(r.facts.delays.get(boundary, ()))
    return count - len(r.disturbed_blocks(boundary, delay, span)) >= max(min(MIN_UNDISTURBED_BLOCKS, count), count / 2)


def _name_tag(boundary: str) -> str:
    return "throughput" if boundary == "throughput" else "latency"


def _quiet_delay(trial: TrialResult, boundary: str) -> float | None:
    """Return the delay of the trial's quietest round; a round disturbed throughout looks quiet by itself."""
    delays = [r.facts.delays.get(boundary, ()) for r in (*trial.rounds, *trial.companions) if r.ok]
    return min((quiet_delay(each) for each in delays if each), default=None)


def _find_usual_latencies(rounds: Iterable[Round], boundary: str) -> tuple[float, float]:
    """Return the range of core-to-core latencies, ns, of most blocks: processors near each other, or apart."""
    latencies = [[n for n in r.facts.core_latencies.get(boundary, ()) if n] for r in rounds]
    near = min((quiet_delay(each) for each in latencies if each), default=0.0)
    low, high = ANY_LATENCY
    limit = CACHE_DISTANCE_RATIO * near or high
    is_apart = [n > limit for each in latencies for n in each]
    return (limit, high) if sum(is_apart) > len(is_apart) / 2 else (low, limit)


def compare_blocks(a: Mapping[int, float], b: Mapping[int, float], disturbed: Collection[int] = ()) -> np.ndarray:
    """Return log(a / b) of each common block outside `disturbed`, float64 [blocks]."""
    return np.array([math.log(a[k] / b[k]) for k in sorted(a.keys() & b.keys()) if k not in disturbed])
