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
        queue, index = self._shuffle_items("start", self.members), 0
        while queue:
            jobs: list[InterleavedJob] = []
            while queue and len(jobs) < self._at_once():
                is_first_queued = self.members[0] in queue[1:]
                group = jobs if self.together > 1 else ()
                if self.apart or not index or self._has_room([queue[0], *group], 1 + len(jobs) + is_first_queued):
                    self._start_member(queue[0], index)
                    jobs.append(queue[0])
                    index += 1
                elif jobs:  # their need is known after loading
                    break
                del queue[0]
            self._advance_members(jobs)
            imported = [member for member in jobs if member.last_message]
            if self.together > 1:
                self._load_engines(imported)
                for member in imported:
                    self._warm_members([member])
            elif self.apart:
                for round_index in sorted({member.round_index for member in imported}):  # rounds may share a device
                    round_jobs = [member for member in imported if member.round_index == round_index]
                    self._load_engines(round_jobs)
                    self._warm_members(round_jobs)
            else:
                self._load_in_turn(imported, queue)

    def _load_in_turn(self, jobs: Sequence[InterleavedJob], queue: Sequence[InterleavedJob]) -> None:
        """Load and warm up one job after the other, as far as there is room."""
        for index, member in enumerate(jobs):
            is_first_queued = self.members[0] in (*jobs[index + 1 :], *queue)
            if index and not self._has_room([member], 1 + is_first_queued):
                self._let_go(member)
                shutil.rmtree(member.folder)
                continue
            free_bytes = self.gpu.free() if self.gpu else 0.0
            self._load_engines([member])
            self._warm_members([member])
            if self.gpu and member.last_message:
                self.largest_on_gpu = max(self.largest_on_gpu, free_bytes - self.gpu.free())

    def _at_once(self) -> int:
        """Return how many jobs import in parallel.

        All jobs are pinned to the same processors, one per thread.
        """
        if self.apart or self.together > 1:
            return len(self.members)
        return max(1, min(len(os.sched_getaffinity(0)), self.members[0].job.runtime.threads))

    def _load_engines(self, members: Sequence[InterleavedJob]) -> None:
        for member in members:
            self.pids.add(_find_process(member).pid)
        for member in members:
            assert member.started is not None
            member.started.telemetry.note_loading()
            self.progress.start(member.trial, member.round_index)
        self._advance_members(members, GO)

    def _warm_members(self, members: Sequence[InterleavedJob]) -> None:
        self._advance_members([member for member in members if member.last_message], GO)

    def _has_room(self, members: Sequence[InterleavedJob], count: int) -> bool:
        """Return whether `count` processes of the largest member's size fit into free memory."""
        need = max(self.largest, *(member.memory for member in members)) or DEFAULT_PROCESS_B
        if self.gpu and self.gpu.free() < HEADROOM * self.largest_on_gpu * count:
            return False
        return nvml.read_available() > HEADROOM * need * count

    def _start_member(self, member: InterleavedJob, index: int) -> None:
        turns = {"set": self.name, "place": index, "together": self.together}
        job = member.job = replace(member.job, options={**member.job.options, "turns": turns})
        member.group = self
        self.progress.start(member.trial, member.round_index)
        input_read, input_write = os.pipe()
        output_read, output_write = os.pipe()
        try:
            variables = {CONDUCTOR_VARIABLE: f"{input_read},{output_write}"}
            with member.start_context():
                member.started = launcher.start(job, member.folder, variables, (input_read, output_write), self.pids)
        finally:
            os.close(input_read)
            os.close(output_write)
            member.pipes = (output_read, input_write)
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
        last_boundary = plan.boundaries[-1]
        seconds = plan.seconds * len(self.alive)
        for member in self.alive:
            member.delays.clear()
        times: list[float] = []  # by block
        while self.alive:
            disturbed_blocks = self._disturbed_blocks()
            disturbed_s = sum(times[block] for block in disturbed_blocks)
            valid_s, valid_blocks = sum(times) - disturbed_s, len(times) - len(disturbed_blocks)
            if valid_blocks >= min(plan.blocks, MIN_BLOCKS) and (valid_blocks >= plan.blocks or valid_s >= seconds):
                break
            if sum(times) >= (1 + MAX_REPEAT_SHARE) * seconds and len(times) >= min(plan.blocks, MIN_BLOCKS):
                break
            block, elapsed = len(times), sum(times)
            times.append(0.0)
            for turn in self._shuffle_items(f"{boundary} {block}", self.turns(self.alive)):
                self.progress.tick(f"{boundary} in turns, block {block + 1}", elapsed + times[block])
                times[block] += self._measure_block([member for member in turn if member in self.alive])
        order = self._shuffle_items(f"{boundary} end", self.alive)
        if boundary == last_boundary:  # the reference's record is stored first
            order.sort(key=lambda member: member is not self.members[0])
        groups = list_single_turns(order)
        if self.apart:
            groups = [order]
        elif self.together > 1 and boundary == last_boundary:
            groups = [order[:1], order[1:]]
        for group in filter(None, groups):
            self.progress.start(group[0].trial, group[0].round_index)
            self._advance_members(group, END)

    def _disturbed_blocks(self) -> set[int]:
        """Return the indices of this boundary's blocks in which other programs disturbed any member.

        Members measuring in parallel disturb each other, so then no block counts as disturbed.
        """
        flags = [find_disturbed(member.delays) for member in self.alive] if self.turns is list_single_turns else []
        return {block for member_flags in flags for block, is_disturbed in enumerate(member_flags) if is_disturbed}

    def _measure_block(self, members: Sequence[InterleavedJob]) -> float:
        """Measure a block with these jobs at once; return the sum of their running seconds."""
        before = sum(member.used_s for member in members)
        for member in members:
            member.active_counts.append(len(members))
        self._advance_members(members, GO)
        for member in members:
            answer, _, delay = member.last_message.partition(" ")
            if answer == DONE:
                member.last_message = DONE
                member.delays.append(float(delay or 0.0))
        return sum(member.used_s for member in members) - before

    def _shuffle_items(self, label: str, items: Sequence[T]) -> list[T]:
        return random.Random(f"{self.seed} {label}").sample(list(items), len(items))

    def _advance_members(self, members: Sequence[InterleavedJob], command: str = "") -> None:
        """Send `command` to the jobs and run them in parallel until each has answered or ended.

        No other dyno measures on these processors meanwhile.
        """
        if not members:
            return
        with processors_held(members[0].job.runtime, self.progress.report_sharing):
            self._run_members(members, command)

    def _run_members(self, members: Sequence[InterleavedJob], command: str) -> None:
        live_jobs, last_poll, elapsed = list(members), time.monotonic(), 0.0
        is_measuring = command == GO and any(member.last_message not in (IMPORTED, LOADED) for member in members)
        if is_measuring and self.core_latency:
            command = f"{GO} {self.core_latency.measure()}"
            last_poll = time.monotonic()
        if command:
            for member in live_jobs:
                _wake_member(member)
            for member in live_jobs:
                with suppress(BrokenPipeError):
                    os.write(member.pipes[1], f"{command}\n".encode())
        for member in live_jobs:
            member.last_message = ""
        while live_jobs:
            _read_lines(live_jobs)
            now = time.monotonic()
            elapsed, last_poll = elapsed + min(now - last_poll, MAX_POLL_GAP_S), now
            late = [p for p in live_jobs if not p.last_message and p.used_s + elapsed > p.trial.plan.timeout_s]
            for member in [p for p in live_jobs if p.last_message or p in late or _find_process(p).poll() is not None]:
                live_jobs.remove(member)
                self._stop_member(member, elapsed, member in late)
            for member in members:
                launcher.trim_logs(member.folder)
            if not is_measuring:
                self.progress.tick(launcher.read_stage(members[-1].folder), members[-1].used_s + elapsed)

    def _stop_member(self, member: InterleavedJob, elapsed: float, has_timed_out: bool) -> None:
        """Freeze the job if it answered, else take its record; `elapsed` is its running time since its last message."""
        job_process, group = member.started, member.group
        assert job_process is not None and group is not None
        if member.last_message:
            _send_signal(job_process, signal.SIGSTOP)
            job_process.telemetry.pause()
        member.used_s += elapsed
        if member.last_message:
            if member.last_message != IMPORTED and not member.last_message.startswith(DONE):
                group.largest = max(group.largest, _measure_resident(job_process.process.pid))
            return
        member.record = launcher.finish(job_process, member.trial.plan.timeout_s, has_timed_out)
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
        for index, member in enumerate(group._shuffle_items("start", group.members)):
            group._start_member(member, index)
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
    ready_fds, _, _ = select.select([member.pipes[0] for member in members], [], [], POLL_S)
    is_closed = False
    for member in members:
        if member.pipes[0] in ready_fds:
            data = os.read(member.pipes[0], 4096)
            member.buffer += data
            is_closed = is_closed or not data
        line, newline, rest = member.buffer.partition(b"\n")
        if newline:
            member.buffer, member.last_message = rest, line.decode()
    if is_closed and not any(member.last_message for member in members):  # a job is about to end
        time.sleep(POLL_S)


def _send_signal(job_process: launcher.JobProcess, signal_number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(job_process.process.pid, signal_number)


def _close_pipes(member: InterleavedJob) -> None:
    for fd in member.pipes:
        os.close(fd)


def _measure_resident(pid: int) -> int:
    """Return the resident bytes of the process and its children; 0 if it is gone."""
    try:
        root = psutil.Process(pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))
    except psutil.Error:
        return 0
