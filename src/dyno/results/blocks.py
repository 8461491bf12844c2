"""Two trials that measured in turns: their ratio within each block, where both had the same machine."""

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

MIN_QUIET_BLOCKS = 2  # fewer quiet blocks give no quiet-machine figure of a round
MIN_QUIET_ROUNDS = 2
MIN_UNDISTURBED_BLOCKS = 3  # undisturbed blocks (and half of all) whose median counts as a quiet machine's
MIN_DRIFT_ROUNDS, MIN_DRIFT_BLOCKS = 3, 4
CACHE_DISTANCE_RATIO = 2.0  # multiple of the lowest core-to-core latency at which processors share no cache
MIN_DRIFT, DRIFT_ERROR_RATE = 0.02, 0.01  # smallest drift that matters, and the error rate of its interval


class RoundRatios(NamedTuple):
    """The ratios of two trials in one set of fresh processes in which both took turns.

    `builds` are the builds of the two that ran, None where neither has several. `logs` holds log(a / b) of each block
    that counts, float64 [blocks]: where the set `is_quiet`, of the undisturbed ones. It `has_delays` if the system
    counted what both waited for a processor: without that every set looks quiet.
    """

    builds: tuple[int, int] | None
    logs: np.ndarray
    is_quiet: bool
    has_delays: bool


def log_ratios(
    a: TrialResult, b: TrialResult, boundary: str, clock: str = "", keep_disturbed: bool = False
) -> list[float]:
    """Return the median log ratio of each set of fresh processes in which both took turns.

    Where rounds go through builds of either engine, it is the mean of those for each build. Sets with fewer than two
    undisturbed blocks are left out, unless only one set would be left.
    """
    return average_rounds(block_ratios(a, b, boundary, clock, keep_disturbed))


def are_quiet(sets: Sequence[RoundRatios]) -> bool:
    """Return whether enough sets are undisturbed that the others are left out."""
    return sum(each.is_quiet for each in sets) >= MIN_QUIET_ROUNDS


def average_rounds(sets: Sequence[RoundRatios]) -> list[float]:
    """Return the median log ratio of each set, or for each build the mean of its sets' medians."""
    if are_quiet(sets):
        sets = [each for each in sets if each.is_quiet]
    return stats.over_units([(each.builds or f"set {k}", float(np.median(each.logs))) for k, each in enumerate(sets)])


def block_ratios(
    a: TrialResult, b: TrialResult, boundary: str, clock: str, keep_disturbed: bool = False, *, settled: bool = False
) -> list[RoundRatios]:
    """Return the ratios of each set of fresh processes in which both took turns.

    a and b are the medians of a block's latencies at the boundary (images per second, where that is throughput). A
    block is left out where the counters of either process say that other programs disturbed it; its latencies have no
    part in that. A set in which both accompanied a third trial doesn't count. `settled` is of `Round.block_medians`.
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
    usual = _find_usual_latencies((r for pair in pairs for r in pair), boundary)
    sets = []
    for x, y in pairs:
        of_x, of_y = (r.block_medians(tag, boundary, clock, settled=settled) for r in (x, y))
        logs = compare_blocks(of_x, of_y)
        disturbed = set[int]()
        if not keep_disturbed:
            disturbed = x.disturbed_blocks(boundary, quiet_a, usual) | y.disturbed_blocks(boundary, quiet_b, usual)
        quiet = compare_blocks(of_x, of_y, disturbed)
        is_quiet = len(quiet) >= min(MIN_QUIET_BLOCKS, len(logs))
        if logs.size:
            builds = (x.build, y.build) if x.build or y.build else None
            has_delays = all(r.facts.delays.get(boundary) for r in (x, y))
            sets.append(RoundRatios(builds, quiet if is_quiet else logs, is_quiet, has_delays))
    return sets


class ApartJobs(NamedTuple):
    """The jobs in most of whose blocks the processors were `apart`, of how many, and the core-to-core latencies, ns."""

    apart: int
    jobs: int
    latency: float
    near: float

    @property
    def clause(self) -> str:
        """How far apart the processors were, without an end, to stand in a sentence."""
        return (
            f"processors were further apart during {self.apart} of {format_count(self.jobs, 'job')} (a signal from "
            f"one to another and back took {self.latency:.0f} ns in place of {self.near:.0f}), as when a host moves "
            "those of a virtual machine"
        )


def find_apart_jobs(trials: Iterable[TrialResult]) -> ApartJobs | None:
    """Return in how many jobs the processors were further apart than in others; None if in none."""
    medians = [latency for t in trials for latency in list_core_latencies(t)]
    near = min(medians, default=0.0)
    apart = [latency for latency in medians if latency > CACHE_DISTANCE_RATIO * near]
    return ApartJobs(len(apart), len(medians), float(np.median(apart)), near) if apart else None


def list_core_latencies(t: TrialResult) -> list[float]:
    """Return the median core-to-core latency of each good round that knows it, in ns."""
    known = ([n for each in r.facts.core_latencies.values() for n in each if n] for r in t.good)
    return [float(np.median(latencies)) for latencies in known if latencies]


def find_drift(a: TrialResult, b: TrialResult, boundary: str, clock: str = "") -> stats.Interval | None:
    """Return how much a / b changes from a round's first block to its last, as a share, with its 99 % interval.

    What slows the whole machine cancels within a block; what is left is an engine that is not warm or heats up. The
    change of a round is Theil and Sen's slope (Sen 1968), which one odd block can't move, times its blocks; the
    interval is Student's over rounds. None with fewer than three rounds of four blocks that count.
    """
    rounds = [each.logs for each in block_ratios(a, b, boundary, clock) if len(each.logs) >= MIN_DRIFT_BLOCKS]
    if len(rounds) < MIN_DRIFT_ROUNDS:
        return None
    from scipy.stats import theilslopes

    changes = np.array([theilslopes(logs).slope * (len(logs) - 1) for logs in rounds])
    half = stats.t_quantile(len(changes) - 1, DRIFT_ERROR_RATE) * changes.std(ddof=1) / math.sqrt(len(changes))
    return stats.Interval(*(math.expm1(changes.mean() + side * half) for side in (0, -1, 1)))


class SustainedRatio(NamedTuple):
    """The ratio a / b of two trials under sustained load, `usual` that in short turns, and whether it `has_moved`."""

    value: float
    usual: float
    has_moved: bool


def compare_sustained(
    a: TrialResult, b: TrialResult, boundary: str, clock: str, margin: float
) -> SustainedRatio | None:
    """Compare the ratio a / b under sustained load with that in short turns; None where either wasn't measured.

    In short turns an engine runs a part of the time beside others, so that heat and a power limit hit the sum of all.
    The ratio has moved if it differs by more than the `margin` and lies outside the 95 % prediction interval of a
    further round (Student's, from the spread of the rounds); from one round alone there is none.
    """
    alone_a, alone_b = (replace(t, rounds=t.sustained, companions=[]) for t in (a, b))
    sustained = average_rounds(block_ratios(alone_a, alone_b, boundary, clock, settled=True))
    rounds = np.array(log_ratios(a, b, boundary, clock))
    if len(rounds) < MIN_QUIET_ROUNDS or not sustained:
        return None
    logs = np.delete(rounds, stats.find_rejected(rounds))
    usual, moved = float(np.mean(logs)), float(np.mean(sustained) - np.mean(logs))
    spread = float(np.std(logs, ddof=1)) * math.sqrt(1 / len(sustained) + 1 / len(logs))
    has_moved = abs(moved) > max(math.log1p(margin), stats.t_quantile(len(logs) - 1) * spread)
    return SustainedRatio(math.exp(usual + moved), math.exp(usual), has_moved)


def list_quiet_rounds(
    trials: Sequence[TrialResult], boundary: str, min_rounds: int = MIN_QUIET_ROUNDS
) -> list[list[Round]]:
    """Return each trial's good rounds that timed the boundary undisturbed by other programs.

    They had the processors at one distance from each other: the one that most blocks of all the trials had. Where a
    trial has fewer than `min_rounds` such rounds, all rounds of every trial are returned.
    """
    timed = [[r for r in t.good if r.find_measurement(_name_tag(boundary), boundary)] for t in trials]
    usual = _find_usual_latencies((r for rounds in timed for r in rounds), boundary)
    quiet = []
    for t, rounds in zip(trials, timed, strict=True):
        delay = _quiet_delay(t, boundary)
        quiet.append([r for r in rounds if _is_undisturbed(r, boundary, delay, usual)])
    return quiet if min(map(len, quiet)) >= min_rounds else timed


def find_quiet_rounds(t: TrialResult, boundary: str, min_rounds: int = 1) -> list[Round]:
    """Return a single trial's undisturbed rounds as `list_quiet_rounds` does, found once."""
    key = "quiet rounds", boundary, min_rounds
    if key not in t.computed:
        [t.computed[key]] = list_quiet_rounds([t], boundary, min_rounds)
    return cast("list[Round]", t.computed[key])


def quiet_medians(t: TrialResult, boundary: str, clock: str = "") -> list[float]:
    """Return the median latency in seconds of each undisturbed round, or of all if there is none, by that clock.

    Where rounds go through several builds there is one value per build.
    """
    key = "quiet medians", boundary, clock
    if key not in t.computed:
        names = {r.folder.name for r in find_quiet_rounds(t, boundary)}
        t.computed[key] = t.medians(boundary, clock, names)
    return cast("list[float]", t.computed[key])


def _is_undisturbed(r: Round, boundary: str, delay: float | None, usual: tuple[float, float]) -> bool:
    """Return whether other programs disturbed so few of its blocks that the median of all is a quiet machine's."""
    count = len(r.facts.delays.get(boundary, ()))
    return count - len(r.disturbed_blocks(boundary, delay, usual)) >= max(min(MIN_UNDISTURBED_BLOCKS, count), count / 2)


def _name_tag(boundary: str) -> str:
    return "throughput" if boundary == "throughput" else "latency"


def _quiet_delay(t: TrialResult, boundary: str) -> float | None:
    """Return the delay of the trial's quietest round: a round that is disturbed throughout looks even by itself."""
    delays = [r.facts.delays.get(boundary, ()) for r in (*t.rounds, *t.companions) if r.ok]
    return min((quiet_delay(each) for each in delays if each), default=None)


def _find_usual_latencies(rounds: Iterable[Round], boundary: str) -> tuple[float, float]:
    """Return the range of core-to-core latencies, ns, in which most blocks were measured: with processors near each
    other, or apart."""
    known = [[n for n in r.facts.core_latencies.get(boundary, ()) if n] for r in rounds]
    near = min((quiet_delay(each) for each in known if each), default=0.0)
    low, high = ANY_LATENCY
    limit = CACHE_DISTANCE_RATIO * near or high
    apart = [n > limit for each in known for n in each]
    return (limit, high) if sum(apart) > len(apart) / 2 else (low, limit)


def compare_blocks(a: Mapping[int, float], b: Mapping[int, float], left_out: Collection[int] = ()) -> np.ndarray:
    """Return log(a / b) of each block that both have and that isn't left out, float64 [blocks]."""
    return np.array([math.log(a[k] / b[k]) for k in sorted(a.keys() & b.keys()) if k not in left_out])
