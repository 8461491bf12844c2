"""What a self-test measured, as it is stored: the machine, and for each round the log ratios of its pairs by block."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dyno.worker.spec import SCHEMA, UserError, from_json

LEAST_ROUNDS = 2  # for a spread
LARGEST = 20.0  # of a log ratio or a share: no two equal processes differ by a factor of a hundred million
MOST = 1e6  # no inference takes so many seconds, and no clock has so many MHz


@dataclass(frozen=True)
class ProcessPair:
    """Two processes of one trial that measured in turns, the second slowed down by a share (0: not at all).

    `logs` holds log(first / second seconds) of each block.
    """

    slowdown: float
    logs: tuple[float, ...]

    @cached_property
    def log(self) -> float:
        """The pair's log ratio, as studies have it: the median over blocks."""
        return statistics.median(self.logs)


@dataclass(frozen=True)
class TestRound:
    """A set of fresh processes: its pairs, and what the machine did meanwhile.

    `first_s` is the first process's median latency; `others` is how many processors other programs kept busy while a
    process measured, `steal` the share of the processors' time that the hypervisor gave to others, and `clock` the
    clock in MHz that each process ran at (() where the system has no such figure).
    """

    __test__ = False  # pytest would take it for a test

    first_s: float
    pairs: tuple[ProcessPair, ...]
    others: float = 0.0
    steal: float = 0.0
    clock: tuple[float, ...] = ()


@dataclass(frozen=True)
class StoredSelfTest:
    """A self-test: when, by which Dyno, on which machine and device, of what, and its rounds.

    `machine` is what identifies the machine; `versions` the libraries; `configuration` the model and how it was run;
    `threads`, `seconds` of each process and of each `block` how it was measured, and `study_rounds` the rounds that a
    study has unless told. With `builds` the two processes of a pair ran different builds of the
    engine, of their round's own.
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


def read(content: dict[str, Any]) -> StoredSelfTest | None:
    """Build the self-test from its JSON; None where it is another program's, a newer Dyno's or damaged."""
    try:
        stored = from_json(StoredSelfTest, content)
    except (UserError, TypeError, ValueError, KeyError):
        return None
    return stored if stored.schema == SCHEMA and _is_whole(stored) else None


def _is_whole(stored: StoredSelfTest) -> bool:
    """Return whether there are enough rounds for a spread, all of the same pairs, with numbers that can be measured."""
    rounds = stored.rounds
    layouts = {tuple(pair.slowdown for pair in one.pairs) for one in rounds}
    if len(rounds) < LEAST_ROUNDS or len(layouts) > 1:
        return False
    (layout,) = layouts
    if 0.0 not in layout or not all(0 <= slowdown <= LARGEST for slowdown in layout):
        return False
    logs = [pair.logs for one in rounds for pair in one.pairs]
    if not all(logs) or not all(abs(log) <= LARGEST for log in itertools.chain(*logs)):
        return False
    watched = [number for one in rounds for number in (one.others, one.steal, *one.clock)]
    return all(0 < one.first_s < MOST for one in rounds) and all(0 <= number < MOST for number in watched)
