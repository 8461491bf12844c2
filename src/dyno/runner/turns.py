"""Interleaved jobs: all are alive, and one runs while the others are frozen, in short blocks in shuffled order.

Changes of the machine's speed affect all of them alike, so that their ratio holds.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import psutil

from dyno.jobs import launcher, nvml
from dyno.jobs.nvml import DEFAULT_PROCESS_B, HEADROOM, Gpu, find_gpu
from dyno.jobs.progress import Progress
from dyno.runner.core_latency import CoreLatency
from dyno.runner.device_lock import processors_held
from dyno.worker.jobs.turns import (
    CONDUCTOR_VARIABLE,
    DONE,
    END,
    GO,
    IMPORTED,
    LOADED,
    MIN_BLOCKS,
    READY,
    find_disturbed,
)
from dyno.worker.record import Record
from dyno.worker.spec import Job, Trial
from dyno.worker.system import list_cores

T = TypeVar("T")
POLL_S = 0.05
MAX_POLL_GAP_S = 1.0  # a longer gap between two polls means that Dyno was suspended (Ctrl-Z)
MAX_REPEAT_SHARE = 1.0  # repeated blocks as a share of a boundary's time


@dataclass
class InterleavedJob:
    """A job interleaved with others: its folder, round (-1: outside the study), and memory in bytes (0: unknown).

    It is started in the context `start_context`, which may confine it. The other fields are its state: `last_message`
    ("" before the first and after its end), running time `used_s`, and `pipes` with the unread `buffer`. Per block,
    `active_counts` is the number of jobs that measured at once, and `delays` the share of the block that its threads
    waited for a processor (this boundary only).
    """

    job: Job
    folder: Path
    round_index: int
    memory: int = 0
    start_context: Callable[[], AbstractContextManager[None]] = nullcontext
    last_message: str = ""
    used_s: float = 0.0
    active_counts: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    record: Record | None = None
    started: launcher.JobProcess | None = None
    group: InterleavedGroup | None = None  # the group that started it
    pipes: tuple[int, int] = (-1, -1)
    buffer: bytes = b""

    @property
    def trial(self) -> Trial:
        assert self.job.trial is not None
        return self.job.trial


def list_single_turns(members: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return one turn per job."""
    return [[member] for member in members]


def list_single_and_joint_turns(members: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return one turn per job, and one for all jobs at once."""
    return [*list_single_turns(members), list(members)]


@dataclass
class InterleavedGroup:
    """Jobs that are compared with each other, above all with the first one.

    `turns` lists which live jobs measure together in a block; turns are shuffled. Jobs on different devices are
    `apart`: they start and end at once, without waiting for memory, and jobs of one round warm up at once. Other jobs
    load one after the other in their first round, which reveals loading time and memory. In later rounds on a CPU they
    import, load and end in parallel. They always warm up in turn.
    """

    members: Sequence[InterleavedJob]
    seed: str
    progress: Progress
    on_end: Callable[[InterleavedJob], None]
    turns: Callable[[Sequence[InterleavedJob]], list[list[InterleavedJob]]] = list_single_turns
    apart: bool = False
    name: str = field(default_factory=lambda: uuid4().hex[:12])  # id of this set of processes in their records
    alive: list[InterleavedJob] = field(default_factory=list)
    core_latency: CoreLatency | None = None  # only for jobs on this process's processors
    largest: int = 0  # bytes of the largest process
    largest_on_gpu: float = 0.0
    gpu: Gpu | None = None
    together: int = 1  # jobs loading in parallel, in all groups
    is_loaded: bool = False
    pids: set[int] = field(default_factory=set)  # processes that began to load

    def run(self) -> None:
        """Measure as many jobs as memory holds, including the first; call `ended` for each job with its record.

        Jobs without room get no record; neither does a job that ran out of memory beside others.
        """
        runtime = self.members[0].job.runtime
        self.gpu = find_gpu(runtime.device, launcher.make_environment(runtime))
        if runtime.device == "cpu" and all(member.start_context is nullcontext for member in self.members):
            self.core_latency = CoreLatency(list_cores()[: max(1, runtime.threads)])
        try:
            if self.is_loaded:
                for member in list(self.alive):
                    self._warm_members([member])
            else:
                self._load_members()
            while self.alive:
                self._measure_boundary()
        finally:
            self.end()
            for tool in (self.gpu, self.core_latency):
                if tool:
                    tool.close()

    def end(self) -> None:
        """End the remaining processes, without records."""
        for member in list(self.alive):
            self._let_go(member)

    def loads_in_parallel(self) -> bool:
        """Return whether the jobs load in parallel: on a CPU, if every job's memory is known."""
        is_on_cpu = all(member.job.runtime.device == "cpu" for member in self.members)
        return not self.apart and is_on_cpu and all(member.memory for member in self.members)

    def _load_members(self) -> None:
        """Start jobs in shuffled order until memory is full: import several at once, then load and warm up each."""
        self.together = len(self.members) if self.loads_in_parallel() else 1
        waiting, place = self._shuffle_items("start", self.members), 0
        while waiting:
            together: list[InterleavedJob] = []
            while waiting and len(together) < self._at_once():
                first_waits = self.members[0] in waiting[1:]
                group = together if self.together > 1 else ()
                if self.apart or not place or self._has_room([waiting[0], *group], 1 + len(together) + first_waits):
                    self._start_member(waiting[0], place)
                    together.append(waiting[0])
                    place += 1
                elif together:  # their need is known after loading
                    break
                del waiting[0]
            self._advance_members(together)
            imported = [member for member in together if member.last_message]
            if self.together > 1:
                self._load_engines(imported)
                for member in imported:
                    self._warm_members([member])
            elif self.apart:
                for number in sorted({member.round_index for member in imported}):  # rounds may share a device
                    one_round = [member for member in imported if member.round_index == number]
                    self._load_engines(one_round)
                    self._warm_members(one_round)
            else:
                self._load_in_turn(imported, waiting)

    def _load_in_turn(self, imported: Sequence[InterleavedJob], waiting: Sequence[InterleavedJob]) -> None:
        """Load and warm up one job after the other, as far as there is room."""
        for number, member in enumerate(imported):
            first_waits = self.members[0] in (*imported[number + 1 :], *waiting)
            if number and not self._has_room([member], 1 + first_waits):
                self._let_go(member)
                shutil.rmtree(member.folder)
                continue
            free = self.gpu.free() if self.gpu else 0.0
            self._load_engines([member])
            self._warm_members([member])
            if self.gpu and member.last_message:
                self.largest_on_gpu = max(self.largest_on_gpu, free - self.gpu.free())

    def _at_once(self) -> int:
        """Return how many jobs import in parallel.

        All jobs are pinned to the same processors, one per thread.
        """
        if self.apart or self.together > 1:
            return len(self.members)
        return max(1, min(len(os.sched_getaffinity(0)), self.members[0].job.runtime.threads))

    def _load_engines(self, members: Sequence[InterleavedJob]) -> None:
        """Load the engines of imported jobs in parallel."""
        for member in members:
            self.pids.add(_find_process(member).pid)
        for member in members:
            assert member.started is not None
            member.started.telemetry.note_loading()
            self.progress.start(member.trial, member.round_index)
        self._advance_members(members, GO)

    def _warm_members(self, members: Sequence[InterleavedJob]) -> None:
        """Warm up loaded jobs in parallel."""
        self._advance_members([member for member in members if member.last_message], GO)

    def _has_room(self, members: Sequence[InterleavedJob], count: int) -> bool:
        """Return whether `count` processes of the largest member's size fit into free memory."""
        need = max(self.largest, *(member.memory for member in members)) or DEFAULT_PROCESS_B
        if self.gpu and self.gpu.free() < HEADROOM * self.largest_on_gpu * count:
            return False
        return nvml.read_available() > HEADROOM * need * count

    def _start_member(self, member: InterleavedJob, place: int) -> None:
        turns = {"set": self.name, "place": place, "together": self.together}
        job = member.job = replace(member.job, options={**member.job.options, "turns": turns})
        member.group = self
        self.progress.start(member.trial, member.round_index)
        hear, tell = os.pipe()
        listen, say = os.pipe()
        try:
            extra = {CONDUCTOR_VARIABLE: f"{hear},{say}"}
            with member.start_context():
                member.started = launcher.start(job, member.folder, extra, (hear, say), self.pids)
        finally:
            os.close(hear)
            os.close(say)
            member.pipes = (listen, tell)
        self.alive.append(member)

    def _let_go(self, member: InterleavedJob) -> None:
        """End the member's process, without a record."""
        assert member.started is not None
        self.alive.remove(member)
        launcher.abandon(member.started)
        _close_pipes(member)

    def _measure_boundary(self) -> None:
        """Measure one boundary's blocks for all live members, then advance each to its next boundary or its end.

        Blocks in which other programs disturbed a member are repeated by all, within MAX_REPEAT_SHARE.
        """
        plan, boundary = self.alive[0].job.plan, self.alive[0].last_message.removeprefix(READY).strip()
        last = plan.boundaries[-1]
        seconds = plan.seconds * len(self.alive)
        for member in self.alive:
            member.delays.clear()
        spent: list[float] = []  # by block
        while self.alive:
            disturbed = self._disturbed_blocks()
            again = sum(spent[number] for number in disturbed)
            counted, left = sum(spent) - again, len(spent) - len(disturbed)
            if left >= min(plan.blocks, MIN_BLOCKS) and (left >= plan.blocks or counted >= seconds):
                break
            if sum(spent) >= (1 + MAX_REPEAT_SHARE) * seconds and len(spent) >= min(plan.blocks, MIN_BLOCKS):
                break
            number, begun = len(spent), sum(spent)
            spent.append(0.0)
            for turn in self._shuffle_items(f"{boundary} {number}", self.turns(self.alive)):
                self.progress.tick(f"{boundary} in turns, block {number + 1}", begun + spent[number])
                spent[number] += self._measure_block([member for member in turn if member in self.alive])
        order = self._shuffle_items(f"{boundary} end", self.alive)
        if boundary == last:  # the reference's record is stored first
            order.sort(key=lambda member: member is not self.members[0])
        groups = list_single_turns(order)
        if self.apart:
            groups = [order]
        elif self.together > 1 and boundary == last:
            groups = [order[:1], order[1:]]
        for group in filter(None, groups):
            self.progress.start(group[0].trial, group[0].round_index)
            self._advance_members(group, END)

    def _disturbed_blocks(self) -> set[int]:
        """Return the indices of this boundary's blocks in which other programs disturbed any member.

        Members measuring in parallel disturb each other, so then no block counts as disturbed.
        """
        flags = [find_disturbed(member.delays) for member in self.alive] if self.turns is list_single_turns else []
        return {number for own in flags for number, is_disturbed in enumerate(own) if is_disturbed}

    def _measure_block(self, members: Sequence[InterleavedJob]) -> float:
        """Measure a block with these jobs at once; return the sum of their running seconds."""
        before = sum(member.used_s for member in members)
        for member in members:
            member.active_counts.append(len(members))
        self._advance_members(members, GO)
        for member in members:
            word, _, delay = member.last_message.partition(" ")
            if word == DONE:
                member.last_message = DONE
                member.delays.append(float(delay or 0.0))
        return sum(member.used_s for member in members) - before

    def _shuffle_items(self, what: str, listed: Sequence[T]) -> list[T]:
        return random.Random(f"{self.seed} {what}").sample(list(listed), len(listed))

    def _advance_members(self, members: Sequence[InterleavedJob], word: str = "") -> None:
        """Send `word` to the jobs and run them in parallel until each has answered or ended.

        No other dyno measures on these processors meanwhile.
        """
        if not members:
            return
        with processors_held(members[0].job.runtime, self.progress.report_sharing):
            self._run_members(members, word)

    def _run_members(self, members: Sequence[InterleavedJob], word: str) -> None:
        running, looked, elapsed = list(members), time.monotonic(), 0.0
        measuring = word == GO and any(member.last_message not in (IMPORTED, LOADED) for member in members)
        if measuring and self.core_latency:
            word = f"{GO} {self.core_latency.measure()}"
            looked = time.monotonic()
        if word:
            for member in running:
                _wake_member(member)
            for member in running:
                with suppress(BrokenPipeError):
                    os.write(member.pipes[1], f"{word}\n".encode())
        for member in running:
            member.last_message = ""
        while running:
            _read_lines(running)
            now = time.monotonic()
            elapsed, looked = elapsed + min(now - looked, MAX_POLL_GAP_S), now
            late = [p for p in running if not p.last_message and p.used_s + elapsed > p.trial.plan.timeout_s]
            for member in [p for p in running if p.last_message or p in late or _find_process(p).poll() is not None]:
                running.remove(member)
                self._stop_member(member, elapsed, member in late)
            for member in members:
                launcher.trim_logs(member.folder)
            if not measuring:
                self.progress.tick(launcher.read_stage(members[-1].folder), members[-1].used_s + elapsed)

    def _stop_member(self, member: InterleavedJob, elapsed: float, timed_out: bool) -> None:
        """Freeze the job if it answered, else take its record; `elapsed` is its running time since its last message."""
        started, group = member.started, member.group
        assert started is not None and group is not None
        if member.last_message:
            _send_signal(started, signal.SIGSTOP)
            started.telemetry.pause()
        member.used_s += elapsed
        if member.last_message:
            if member.last_message != IMPORTED and not member.last_message.startswith(DONE):
                group.largest = max(group.largest, _measure_resident(started.process.pid))
            return
        member.record = launcher.finish(started, member.trial.plan.timeout_s, timed_out)
        group.alive.remove(member)
        _close_pipes(member)
        if member.record.status == "oom" and group.alive:  # alone it may have enough memory
            shutil.rmtree(member.folder)
        else:
            group.on_end(member)


def load_in_parallel(groups: Sequence[InterleavedGroup]) -> None:
    """Load all groups' jobs at once, on all processors, before the first group measures, if memory holds them.

    A compiling job keeps one processor busy while others would wait; frozen jobs don't disturb. Groups on a GPU, and
    groups with unknown memory, load when it is their turn.
    """
    members = [member for group in groups for member in group.members]
    need = HEADROOM * sum(member.memory for member in members)
    if len(groups) < 2 or not all(group.loads_in_parallel() for group in groups) or nvml.read_available() < need:
        return
    for group in groups:
        group.together, group.is_loaded = len(members), True
        for place, member in enumerate(group._shuffle_items("start", group.members)):
            group._start_member(member, place)
    groups[0]._advance_members(members)
    groups[0]._load_engines([member for member in members if member.last_message])


def _wake_member(member: InterleavedJob) -> None:
    assert member.started is not None
    _send_signal(member.started, signal.SIGCONT)
    member.started.telemetry.resume()


def _find_process(member: InterleavedJob) -> subprocess.Popen[bytes]:
    assert member.started is not None
    return member.started.process


def _read_lines(members: Sequence[InterleavedJob]) -> None:
    """Read the next line of each job that has one within POLL_S."""
    ready, _, _ = select.select([member.pipes[0] for member in members], [], [], POLL_S)
    closed = False
    for member in members:
        if member.pipes[0] in ready:
            more = os.read(member.pipes[0], 4096)
            member.buffer += more
            closed = closed or not more
        line, newline, rest = member.buffer.partition(b"\n")
        if newline:
            member.buffer, member.last_message = rest, line.decode()
    if closed and not any(member.last_message for member in members):  # a job is about to end
        time.sleep(POLL_S)


def _send_signal(started: launcher.JobProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.process.pid, number)


def _close_pipes(member: InterleavedJob) -> None:
    for end in member.pipes:
        os.close(end)


def _measure_resident(pid: int) -> int:
    """Return the resident bytes of the process and its children; 0 if it is gone."""
    try:
        root = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))
    except psutil.Error:
        return 0
