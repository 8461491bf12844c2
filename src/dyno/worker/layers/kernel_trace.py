"""PyTorch's GPU trace: the kernels launched by each call of a module's parts, and the times without a kernel.

The trace is the JSON exported by `torch.profiler`, with a range (`user_annotation`) around each run and each call. A
kernel names its launching operator ("External id"); operators and ranges have the host's clock, so a kernel belongs to
the innermost call in which its operator began.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.engine import shorten_kernel
from dyno.worker.facts.job import Function

RUN_RANGE, CALL_RANGE = "dyno run", "dyno call "  # names of ranges; the latter is followed by the part's name
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")
WAIT_CALL = "Synchronize"  # in names of calls that only wait for the GPU
Event = Mapping[str, Any]
Rows = Mapping[tuple[str, int], int]  # row by part's name and number of its call


@dataclass
class TracedRun:
    """One run: seconds of GPU work by row, and of each kernel by row.

    `busy` is the time in which the GPU did any work, `calls` the host's time in CUDA calls other than waits, both in
    seconds; `kernels` is the number of launches.
    """

    seconds: list[float]
    by_kernel: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    busy: float = 0.0
    calls: float = 0.0
    kernels: int = 0


@dataclass
class _Range:
    begin: float
    end: float
    name: str
    run: int = -1  # number of its run; -1: none
    parent: int = -1  # index of the enclosing range
    row: int = -1


def read_runs(events: Sequence[Event], rows: Rows, count: int) -> list[TracedRun]:
    """Return a trace's runs in order, with `count` rows each; a call without a row counts for its caller."""
    owners = _Owners(events, rows)
    runs = [TracedRun([0.0] * count) for _ in range(owners.runs)]
    starts = {e["args"]["External id"]: e["ts"] for e in events if is_kind(e, ("cpu_op", "user_annotation"))}
    launch_times = {
        e["args"]["correlation"]: e["ts"] for e in events if is_kind(e, HOST_CATEGORIES) and "correlation" in e["args"]
    }
    work: list[list[Event]] = [[] for _ in runs]
    for event in (e for e in events if is_kind(e, GPU_CATEGORIES)):
        details = event["args"]
        moment = starts.get(details.get("External id"), launch_times.get(details.get("correlation"), -math.inf))
        run, row = owners.find_owner(moment)
        if run >= 0:
            work[run].append(event)
            if row >= 0:
                seconds, key = event["dur"] * 1e-6, (row, shorten_kernel(event["name"]))
                runs[run].seconds[row] += seconds
                runs[run].by_kernel[key] += seconds
    calls: list[list[Event]] = [[] for _ in runs]
    for event in (e for e in events if is_kind(e, HOST_CATEGORIES) and WAIT_CALL not in e["name"]):
        run, _ = owners.find_owner(event["ts"])
        if run >= 0:
            calls[run].append(event)
    for traced_run, run_work, run_calls in zip(runs, work, calls, strict=True):
        traced_run.busy, traced_run.calls = sum_covered(run_work), sum_covered(run_calls)
        traced_run.kernels = sum(e["cat"] == "kernel" for e in run_work)
    return runs


def is_kind(event: Event, kinds: Sequence[str]) -> bool:
    """Return whether it is an event with a duration, of one of these categories."""
    return event.get("ph") == "X" and event.get("cat", "") in kinds


class _Owners:
    """The innermost call at any moment of the host."""

    def __init__(self, events: Sequence[Event], rows: Rows) -> None:
        annotations = (e for e in events if is_kind(e, ("user_annotation",)))
        range_events = (e for e in annotations if e["name"].startswith((RUN_RANGE, CALL_RANGE)))
        ranges = [_Range(e["ts"], e["ts"] + e["dur"], e["name"]) for e in range_events]
        self._ranges = sorted(ranges, key=lambda span: (span.begin, -span.end))
        self._times, self._owners = [-math.inf], [-1]
        self.runs = 0
        self._nest_ranges()
        self._number_rows(rows)

    def _nest_ranges(self) -> None:
        stack: list[int] = []

        def end_range() -> None:
            self._mark_owner(self._ranges[stack.pop()].end, stack[-1] if stack else -1)

        for k, span in enumerate(self._ranges):
            while stack and self._ranges[stack[-1]].end <= span.begin:
                end_range()
            span.parent = stack[-1] if stack else -1
            span.run = self.runs if span.name == RUN_RANGE else self._ranges[span.parent].run if stack else -1
            self.runs += span.name == RUN_RANGE
            stack.append(k)
            self._mark_owner(span.begin, k)
        while stack:
            end_range()

    def _mark_owner(self, moment: float, owner: int) -> None:
        self._times.append(moment)
        self._owners.append(owner)

    def _number_rows(self, rows: Rows) -> None:
        """Number the rows by earlier ended calls of the same part in the run."""
        counts: Counter[tuple[int, str]] = Counter()
        for span in sorted(self._ranges, key=lambda span: span.end):
            name = span.name.removeprefix(CALL_RANGE)
            span.row = rows.get((name, counts[span.run, name]), -1) if span.name != RUN_RANGE else -1
            counts[span.run, name] += 1
        for span in self._ranges:  # enclosing ranges come first
            if span.row < 0 and span.parent >= 0:
                span.row = self._ranges[span.parent].row

    def find_owner(self, moment: float) -> tuple[int, int]:
        """Return the run and row numbers of the innermost call; -1 if none."""
        owner = self._owners[bisect_right(self._times, moment) - 1]
        return (self._ranges[owner].run, self._ranges[owner].row) if owner >= 0 else (-1, -1)


def sum_covered(events: Iterable[Event]) -> float:
    """Return the seconds covered by at least one of the events."""
    total, last_end = 0.0, -math.inf
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        total += max(0.0, end - max(begin, last_end))
        last_end = max(last_end, end)
    return total * 1e-6


def list_kernels(runs: Sequence[TracedRun], count: int) -> list[str]:
    """Return the kernels of each row, the slowest first."""
    total: dict[tuple[int, str], float] = defaultdict(float)
    for run in runs:
        for key, seconds in run.by_kernel.items():
            total[key] += seconds
    names: list[list[str]] = [[] for _ in range(count)]
    for row, name in sorted(total, key=lambda key: -total[key]):
        names[row].append(name)
    return [" + ".join(each) for each in names]


# The critical path of a run on a GPU: the functions of host and GPU that would end it earlier if they were faster
#
# The path is walked back from the end of the run, over the trace. On the host it follows CUDA calls and the time
# between them. From a waiting call it moves to the awaited work. A kernel was delayed either by the previous work on
# its stream or by its launching call, whichever ended later, and the path continues there (critical-path analysis:
# Yang and Miller, ICDCS 1988). So all parts of the path add up to the run.

CALL, GPU, BETWEEN = "CUDA call", "GPU", "host"  # places where a function runs
OUTSIDE = "outside of CUDA"
LAUNCHING = "from a launch to the start"
GAP = "between work of a stream"
Key = tuple[str, str]  # where, and the function's name


@dataclass(frozen=True)
class _Piece:
    """A call or a piece of GPU work, in microseconds of the host's clock."""

    name: str
    begin: float
    end: float
    correlation: int
    stream: Any = None
    copies: bool = False


def list_functions(events: Sequence[Event], discarded: int) -> tuple[Function, ...]:
    """Return each function's times in a run; those with the largest share of the path come first.

    They are means in seconds over the trace's runs, without the first `discarded`.
    """
    run_events = (e for e in events if is_kind(e, ("user_annotation",)) and e["name"] == RUN_RANGE)
    bounds = sorted((e["ts"], e["ts"] + e["dur"]) for e in run_events)
    calls, launches = _find_outermost([_make_piece(e) for e in events if is_kind(e, HOST_CATEGORIES)])
    work = sorted((_make_piece(e) for e in events if is_kind(e, GPU_CATEGORIES)), key=lambda piece: piece.begin)
    runs = [
        _CriticalPath(begin, end, [c for c in calls if begin <= c.begin and c.end <= end], work, launches)
        for begin, end in bounds[discarded:]
    ]
    keys = sorted({key for run in runs for key in run.time}, key=lambda key: -sum(run.path[key] for run in runs))
    count = len(runs)
    return tuple(
        Function(name=name, where=where, calls=sum(run.calls[where, name] for run in runs) / count,
                 **{field: sum(getattr(run, field)[where, name] for run in runs) / count * 1e-6
                    for field in ("time", "path", "waiting")})
        for where, name in keys
    )  # fmt: skip


def _make_piece(event: Event) -> _Piece:
    details: Mapping[str, Any] = event["args"]
    name, kind = str(event["name"]), event["cat"]
    return _Piece(shorten_kernel(name) if kind in GPU_CATEGORIES else name, event["ts"], event["ts"] + event["dur"],
                  details.get("correlation", -1), details.get("stream"), kind == "gpu_memcpy")  # fmt: skip


def _find_outermost(calls: Sequence[_Piece]) -> tuple[list[_Piece], dict[int, _Piece]]:
    """Return the outermost calls in order, and by correlation the outermost call around each call."""
    outermost: list[_Piece] = []
    enclosing: dict[int, _Piece] = {}
    for call in sorted(calls, key=lambda piece: (piece.begin, -piece.end)):
        if not outermost or call.begin >= outermost[-1].end:
            outermost.append(call)
        enclosing[call.correlation] = outermost[-1]
    return outermost, enclosing


class _CriticalPath:
    """Each function's time in one run, in microseconds, found by walking back from the run's end."""

    def __init__(
        self, begin: float, end: float, calls: Sequence[_Piece], work: Sequence[_Piece], launches: Mapping[int, _Piece]
    ) -> None:
        self.calls: dict[Key, int] = defaultdict(int)
        self.time: dict[Key, float] = defaultdict(float)
        self.path: dict[Key, float] = defaultdict(float)
        self.waiting: dict[Key, float] = defaultdict(float)
        call_ids = {id(call) for call in calls}
        run_work = [piece for piece in work if id(launches.get(piece.correlation)) in call_ids]
        self._begin, self._calls, self._launches = begin, calls, launches
        self._begins = [call.begin for call in calls]
        self._work = sorted(run_work, key=lambda piece: piece.end)
        self._ends = [piece.end for piece in self._work]
        self._before: dict[int, _Piece] = {}  # previous work on the stream, by the identity of its successor
        last: dict[Any, _Piece] = {}
        for piece in run_work:
            if piece.stream in last:
                self._before[id(piece)] = last[piece.stream]
            last[piece.stream] = piece
        moment, current_work = end, None
        while moment > begin:
            moment, current_work = self._walk_work(current_work, moment) if current_work else self._walk_host(moment)
        for call in calls:
            self._add_piece(CALL, call)
            if awaited := self._find_awaited(call, call.end):
                self.waiting[CALL, call.name] += awaited.end - call.begin
        for piece in run_work:
            self._add_piece(GPU, piece)
            self.waiting[GPU, piece.name] += max(0.0, piece.begin - launches[piece.correlation].end)
        self.time[BETWEEN, OUTSIDE] = end - begin - sum(call.end - call.begin for call in calls)
        for key in self.path:
            self.time[key] = self.time[key] or self.path[key]

    def _add_piece(self, where: str, piece: _Piece) -> None:
        self.calls[where, piece.name] += 1
        self.time[where, piece.name] += piece.end - piece.begin

    def _walk_host(self, moment: float) -> tuple[float, _Piece | None]:
        index = bisect_left(self._begins, moment) - 1  # the last call that begins before
        if index < 0:
            return self._add_part(BETWEEN, OUTSIDE, moment, self._begin), None
        call = self._calls[index]
        if call.end < moment:
            return self._add_part(BETWEEN, OUTSIDE, moment, call.end), None
        if awaited := self._find_awaited(call, moment):
            return self._add_part(CALL, call.name, moment, awaited.end), awaited
        return self._add_part(CALL, call.name, moment, call.begin), None

    def _walk_work(self, current_work: _Piece, moment: float) -> tuple[float, _Piece | None]:
        begin = self._add_part(GPU, current_work.name, moment, max(current_work.begin, self._begin))
        launch, previous = self._launches[current_work.correlation], self._before.get(id(current_work))
        if previous is not None and previous.end >= launch.end:
            return self._add_part(GPU, GAP, begin, previous.end), previous
        return (self._add_part(GPU, LAUNCHING, begin, launch.end) if launch.end < begin else begin), None

    def _add_part(self, where: str, name: str, end: float, begin: float) -> float:
        begin = max(min(begin, end), self._begin)
        self.path[where, name] += end - begin
        return begin

    def _find_awaited(self, call: _Piece, moment: float) -> _Piece | None:
        """Return the last work that ended while the call waited for it; the call's own copy counts if it ended."""
        index = bisect_right(self._ends, moment) - 1
        while index >= 0 and self._ends[index] > call.begin:
            work = self._work[index]
            if WAIT_CALL in call.name or (work.copies and work.correlation == call.correlation):
                return work
            index -= 1
        return None
