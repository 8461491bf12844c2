"""What a self-test measured, as it is stored: the machine, and for each round the log ratios of its pairs by block."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dyno.worker.spec import SCHEMA, UserError, from_json


@dataclass(frozen=True)
class Pair:
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
    pairs: tuple[Pair, ...]
    others: float = 0.0
    steal: float = 0.0
    clock: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stored:
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


def read(content: dict[str, Any]) -> Stored | None:
    """The self-test from its JSON; None where it is another's, a newer Dyno's or damaged."""
    try:
        stored = from_json(Stored, content)
    except (UserError, TypeError, ValueError, KeyError):
        return None
    whole = stored.rounds and all(one.pairs and all(pair.logs for pair in one.pairs) for one in stored.rounds)
    return stored if whole and stored.schema == SCHEMA else None
