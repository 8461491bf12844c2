"""PyTorch's trace of a GPU, read: which kernels each call of a module's parts launched, and when none ran.

The trace is the JSON that `torch.profiler` exports, with a range (`user_annotation`) around each run and each call. A
kernel names the operator that launched it ("External id"), and both the operator and the ranges have the host's clock,
so that a kernel belongs to the innermost call in which its operator began.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.kernels import short

RUN, CALL = "dyno run", "dyno call "  # names of ranges; behind CALL stands the part's name
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cuda_runtime", "cuda_driver")
WAITS = "Synchronize"  # in the name of a call that only waits for the GPU
Event = Mapping[str, Any]
Rows = Mapping[tuple[str, int], int]  # the row of each call, by the part's name and which of its calls it is


@dataclass
class TracedRun:
    """One run: seconds of the GPU's work by row, and of each kernel by row.

    `busy` is the time in which the GPU did any work, `calls` that in which the host was inside calls of CUDA other than
    waits, both in seconds, and `kernels` how many were launched.
    """

    seconds: list[float]
    by_kernel: dict[tuple[int, str], float] = field(default_factory=dict)
    busy: float = 0.0
    calls: float = 0.0
    kernels: int = 0


@dataclass
class _Range:
    begin: float
    end: float
    name: str
    run: int = -1  # number of the run that it is in, -1 for none
    around: int = -1  # the range around it
    row: int = -1


def read(events: Sequence[Event], rows: Rows, count: int) -> list[TracedRun]:
    """Return the runs of a trace in order, with `count` rows each; work of a call without a row is its caller's."""
    owners = _Owners(events, rows)
    runs = [TracedRun([0.0] * count) for _ in range(owners.runs)]
    begun = {e["args"]["External id"]: e["ts"] for e in events if is_kind(e, ("cpu_op", "user_annotation"))}
    launched = {e["args"]["correlation"]: e["ts"] for e in events if is_kind(e, HOST) and "correlation" in e["args"]}
    work: list[list[Event]] = [[] for _ in runs]
    for event in (e for e in events if is_kind(e, WORK)):
        details = event["args"]
        moment = begun.get(details.get("External id"), launched.get(details.get("correlation"), -math.inf))
        run, row = owners.at(moment)
        if run >= 0:
            work[run].append(event)
            if row >= 0:
                _add_event(runs[run], row, event)
    calls: list[list[Event]] = [[] for _ in runs]
    for event in (e for e in events if is_kind(e, HOST) and WAITS not in e["name"]):
        run, _ = owners.at(event["ts"])
        if run >= 0:
            calls[run].append(event)
    for each, own, made in zip(runs, work, calls, strict=True):
        each.busy, each.calls = covered(own), covered(made)
        each.kernels = sum(e["cat"] == "kernel" for e in own)
    return runs


def _add_event(run: TracedRun, row: int, event: Event) -> None:
    seconds, name = event["dur"] * 1e-6, short(event["name"])
    run.seconds[row] += seconds
    run.by_kernel[row, name] = run.by_kernel.get((row, name), 0.0) + seconds


def is_kind(event: Event, kinds: Sequence[str]) -> bool:
    """Return whether it is an event with a duration, of one of these categories."""
    return event.get("ph") == "X" and event.get("cat", "") in kinds


class _Owners:
    """Which call is the innermost at any moment of the host."""

    def __init__(self, events: Sequence[Event], rows: Rows) -> None:
        named = [e for e in events if is_kind(e, ("user_annotation",)) and e["name"].startswith((RUN, CALL))]
        ranges = [_Range(e["ts"], e["ts"] + e["dur"], e["name"]) for e in named]
        self._ranges = sorted(ranges, key=lambda one: (one.begin, -one.end))
        self._times, self._owners = [-math.inf], [-1]
        self.runs = 0
        self._nest_ranges()
        self._number_rows(rows)

    def _nest_ranges(self) -> None:
        calling: list[int] = []

        def end_range() -> None:
            self._mark_owner(self._ranges[calling.pop()].end, calling[-1] if calling else -1)

        for k, one in enumerate(self._ranges):
            while calling and self._ranges[calling[-1]].end <= one.begin:
                end_range()
            one.around = calling[-1] if calling else -1
            one.run = self.runs if one.name == RUN else self._ranges[one.around].run if calling else -1
            self.runs += one.name == RUN
            calling.append(k)
            self._mark_owner(one.begin, k)
        while calling:
            end_range()

    def _mark_owner(self, moment: float, owner: int) -> None:
        self._times.append(moment)
        self._owners.append(owner)

    def _number_rows(self, rows: Rows) -> None:
        """Number the rows by the calls of the same part that ended before in the run."""
        seen: Counter[tuple[int, str]] = Counter()
        for one in sorted(self._ranges, key=lambda one: one.end):
            name = one.name.removeprefix(CALL)
            one.row = rows.get((name, seen[one.run, name]), -1) if one.name != RUN else -1
            seen[one.run, name] += 1
        for one in self._ranges:  # enclosing ranges come first
            if one.row < 0 and one.around >= 0:
                one.row = self._ranges[one.around].row

    def at(self, moment: float) -> tuple[int, int]:
        """Return the numbers of the run and row of the innermost call, -1 for none."""
        owner = self._owners[bisect_right(self._times, moment) - 1]
        return (self._ranges[owner].run, self._ranges[owner].row) if owner >= 0 else (-1, -1)


def covered(events: Iterable[Event]) -> float:
    """Return the seconds in which at least one of the events was going on."""
    total, until = 0.0, -math.inf
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total * 1e-6


def labels(runs: Sequence[TracedRun], count: int) -> list[str]:
    """Return the kernels of each row, the slowest first."""
    total: dict[tuple[int, str], float] = {}
    for run in runs:
        for key, seconds in run.by_kernel.items():
            total[key] = total.get(key, 0.0) + seconds
    names: list[list[str]] = [[] for _ in range(count)]
    for row, name in sorted(total, key=lambda key: -total[key]):
        names[row].append(name)
    return [" + ".join(each) for each in names]
