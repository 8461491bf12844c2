"""Trials that measure in turns: all alive, one runs while the others are frozen, in short blocks in shuffled order.

What the machine does to one it then does to all, so that their ratio holds although its speed changes.
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
from dyno.jobs.nvml import ROOM, UNKNOWN_B, Gpu, find_gpu
from dyno.jobs.progress import Progress
from dyno.runner.device_lock import processors_held
from dyno.worker.jobs.turns import CONDUCTOR, DONE, END, GO, IMPORTED, LEAST_BLOCKS, LOADED, READY, find_disturbed
from dyno.worker.record import Record
from dyno.worker.spec import Job, Trial

T = TypeVar("T")
POLL_S = 0.05
MOST_AGAIN = 1.0  # of a boundary's time, for blocks in place of disturbed ones


@dataclass
class InterleavedJob:
    """A job that measures in turns, its folder, its round (-1: not a round of the study) and the most memory it is
    known to need (bytes, 0: unknown). It is started within `where`, which may confine what is started there.

    The rest is what became of it: `said` is its last word, "" before any and once it has ended; `used_s` is the time
    that it ran; `company` has for each of its blocks how many measured then, itself included; `delays` what share of
    each block of this boundary its threads waited for a processor.
    """

    job: Job
    folder: Path
    number: int
    memory: int = 0
    where: Callable[[], AbstractContextManager[None]] = nullcontext
    said: str = ""
    used_s: float = 0.0
    company: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    record: Record | None = None
    started: launcher.JobProcess | None = None
    ends: tuple[int, int] = (-1, -1)
    heard: bytes = b""

    @property
    def trial(self) -> Trial:
        assert self.job.trial is not None
        return self.job.trial


def each(players: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return one turn per job."""
    return [[player] for player in players]


def each_and_all(players: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return one turn per job, and one for all jobs at once."""
    return [*each(players), list(players)]


@dataclass
class InterleavedGroup:
    """Jobs that are compared with each other, the first of them with all others.

    `turns` lists which of the live jobs measure together in a block; the turns are then shuffled. Jobs on different
    devices are `apart`: they start and end at once, those of one round warm up at once, and no job waits for another's
    memory. The others load one after the other in their first round, which shows how long that takes and how much
    memory they need. In later rounds on a CPU they import, load and end in parallel. They always warm up in turn.
    """

    players: Sequence[InterleavedJob]
    seed: str
    progress: Progress
    ended: Callable[[InterleavedJob], None]
    turns: Callable[[Sequence[InterleavedJob]], list[list[InterleavedJob]]] = each
    apart: bool = False
    name: str = field(default_factory=lambda: uuid4().hex[:12])  # of this set of processes, kept in their records
    alive: list[InterleavedJob] = field(default_factory=list)
    largest: int = 0  # bytes that a process took
    largest_on_gpu: float = 0.0
    gpu: Gpu | None = None
    together: bool = False  # whether jobs load in parallel
    pids: set[int] = field(default_factory=set)  # of all that began to load

    def play(self) -> None:
        """Measure as many jobs as memory holds, the first among them; `ended` is given each once it has its record.

        Those that had no room keep none, nor does one that ran out of memory beside others.
        """
        runtime = self.players[0].job.runtime
        self.gpu = find_gpu(runtime.device, launcher.environment(runtime))
        try:
            self._load_players()
            while self.alive:
                self._measure_boundary()
        finally:
            for player in list(self.alive):
                self._let_go(player)
            if self.gpu:
                self.gpu.close()

    def _load_players(self) -> None:
        """Start them in shuffled order until memory is full: those that import at once, then each until it is warm."""
        self.together = not self.apart and not self.gpu and all(player.memory for player in self.players)
        waiting, place = self._shuffle_items("start", self.players), 0
        while waiting:
            together: list[InterleavedJob] = []
            while waiting and len(together) < self._at_once():
                first_waits = self.players[0] in waiting[1:]
                group = together if self.together else ()
                if self.apart or not place or self._has_room([waiting[0], *group], 1 + len(together) + first_waits):
                    self._start_player(waiting[0], place)
                    together.append(waiting[0])
                    place += 1
                elif together:  # how much they need is known once they have loaded
                    break
                del waiting[0]
            self._advance_players(together)
            imported = [player for player in together if player.said]
            if self.together:
                self._load_engines(imported)
                for player in imported:
                    self._warm_players([player])
            elif self.apart:
                for number in sorted({player.number for player in imported}):  # those of several rounds share a device
                    one_round = [player for player in imported if player.number == number]
                    self._load_engines(one_round)
                    self._warm_players(one_round)
            else:
                self._load_in_turn(imported, waiting)

    def _load_in_turn(self, imported: Sequence[InterleavedJob], waiting: Sequence[InterleavedJob]) -> None:
        """Let one after the other load and warm up, those that have room beside all that have."""
        for number, player in enumerate(imported):
            first_waits = self.players[0] in (*imported[number + 1 :], *waiting)
            if number and not self._has_room([player], 1 + first_waits):
                self._let_go(player)
                shutil.rmtree(player.folder)
                continue
            free = self.gpu.free() if self.gpu else 0.0
            self._load_engines([player])
            self._warm_players([player])
            if self.gpu and player.said:
                self.largest_on_gpu = max(self.largest_on_gpu, free - self.gpu.free())

    def _at_once(self) -> int:
        """Return how many jobs import in parallel.

        A job is pinned to as many processors as it has threads, and all jobs to the same ones.
        """
        if self.apart or self.together:
            return len(self.players)
        return max(1, min(len(os.sched_getaffinity(0)), self.players[0].job.runtime.threads))

    def _load_engines(self, players: Sequence[InterleavedJob]) -> None:
        """Let jobs that have imported load in parallel."""
        for player in players:
            self.pids.add(_find_process(player).pid)
        for player in players:
            assert player.started is not None
            player.started.telemetry.loads()
            self.progress.start(player.trial, player.number)
        self._advance_players(players, GO)

    def _warm_players(self, players: Sequence[InterleavedJob]) -> None:
        """Let jobs that have loaded warm up in parallel."""
        self._advance_players([player for player in players if player.said], GO)

    def _has_room(self, players: Sequence[InterleavedJob], count: int) -> bool:
        """Return whether `count` processes of the largest player's size fit into the free memory."""
        need = max(self.largest, *(player.memory for player in players)) or UNKNOWN_B
        if self.gpu and self.gpu.free() < ROOM * self.largest_on_gpu * count:
            return False
        return nvml.read_available() > ROOM * need * count

    def _start_player(self, player: InterleavedJob, place: int) -> None:
        together = len(self.players) if self.together else 1
        job = player.job = replace(
            player.job,
            options={**player.job.options, "turns": {"set": self.name, "place": place, "together": together}},
        )
        self.progress.start(player.trial, player.number)
        hear, tell = os.pipe()
        listen, say = os.pipe()
        try:
            extra = {CONDUCTOR: f"{hear},{say}"}
            with player.where():
                player.started = launcher.start(job, player.folder, extra, (hear, say), self.pids)
        finally:
            os.close(hear)
            os.close(say)
            player.ends = (listen, tell)
        self.alive.append(player)

    def _let_go(self, player: InterleavedJob) -> None:
        """End the player's process, without a record."""
        assert player.started is not None
        self.alive.remove(player)
        launcher.abandon(player.started)
        _close_pipes(player)

    def _measure_boundary(self) -> None:
        """Measure one boundary's blocks for all live players, then advance each to its next boundary or its end.

        A block in which other programs disturbed a player is measured again by all, within MOST_AGAIN.
        """
        plan, boundary = self.alive[0].trial.plan, self.alive[0].said.removeprefix(READY).strip()
        last = self.alive[0].job.boundaries[-1]
        seconds = plan.seconds * len(self.alive)
        for player in self.alive:
            player.delays.clear()
        spent: list[float] = []  # by each block
        while self.alive:
            disturbed = self._disturbed_blocks()
            again = sum(spent[number] for number in disturbed)
            counted, left = sum(spent) - again, len(spent) - len(disturbed)
            if left >= min(plan.blocks, LEAST_BLOCKS) and (left >= plan.blocks or counted >= seconds):
                break
            if sum(spent) >= (1 + MOST_AGAIN) * seconds and len(spent) >= min(plan.blocks, LEAST_BLOCKS):
                break
            number, begun = len(spent), sum(spent)
            spent.append(0.0)
            for turn in self._shuffle_items(f"{boundary} {number}", self.turns(self.alive)):
                self.progress.tick(f"{boundary} in turns, block {number + 1}", begun + spent[number])
                spent[number] += self._measure_block([player for player in turn if player in self.alive])
        order = self._shuffle_items(f"{boundary} end", self.alive)
        if boundary == last:  # the first is what others are compared with: its record is on disk first
            order.sort(key=lambda player: player is not self.players[0])
        groups = each(order)
        if self.apart:
            groups = [order]
        elif self.together and boundary == last:
            groups = [order[:1], order[1:]]
        for group in filter(None, groups):
            self.progress.start(group[0].trial, group[0].number)
            self._advance_players(group, END)

    def _disturbed_blocks(self) -> set[int]:
        """Return the numbers of this boundary's blocks in which other programs disturbed any of the players.

        Players that measure in parallel disturb each other, so no block of theirs counts as disturbed.
        """
        flags = [find_disturbed(player.delays) for player in self.alive] if self.turns is each else []
        return {number for own in flags for number, is_disturbed in enumerate(own) if is_disturbed}

    def _measure_block(self, players: Sequence[InterleavedJob]) -> float:
        """Measure a block with these jobs at once; return the sum of the seconds that they ran."""
        before = sum(player.used_s for player in players)
        for player in players:
            player.company.append(len(players))
        self._advance_players(players, GO)
        for player in players:
            word, _, delay = player.said.partition(" ")
            if word == DONE:
                player.said = DONE
                player.delays.append(float(delay or 0.0))
        return sum(player.used_s for player in players) - before

    def _shuffle_items(self, what: str, listed: Sequence[T]) -> list[T]:
        return random.Random(f"{self.seed} {what}").sample(list(listed), len(listed))

    def _advance_players(self, players: Sequence[InterleavedJob], word: str = "") -> None:
        """Send the jobs the word and let them run in parallel until each has answered or ended.

        No other dyno measures on these processors meanwhile.
        """
        if not players:
            return
        with processors_held(players[0].job.runtime, self.progress.sharing):
            self._run_players(players, word)

    def _run_players(self, players: Sequence[InterleavedJob], word: str) -> None:
        running, begin = list(players), time.monotonic()
        measuring = word == GO and any(player.said not in (IMPORTED, LOADED) for player in players)
        if word:
            for player in running:
                _wake_player(player)
            for player in running:
                with suppress(BrokenPipeError):
                    os.write(player.ends[1], f"{word}\n".encode())
        for player in running:
            player.said = ""
        while running:
            _read_lines(running)
            elapsed = time.monotonic() - begin
            late = [p for p in running if not p.said and p.used_s + elapsed > p.trial.plan.timeout_s]
            for player in [p for p in running if p.said or p in late or _find_process(p).poll() is not None]:
                running.remove(player)
                self._stop_player(player, elapsed, player in late)
            for player in players:
                launcher.trim_logs(player.folder)
            if not measuring:
                self.progress.tick(launcher.read_stage(players[-1].folder), players[-1].used_s + elapsed)

    def _stop_player(self, player: InterleavedJob, elapsed: float, timed_out: bool) -> None:
        """Freeze the job if it spoke, else take its record; it ran for so long since it spoke last."""
        started = player.started
        assert started is not None
        if player.said:
            _send_signal(started, signal.SIGSTOP)
            started.telemetry.pause()
        player.used_s += elapsed
        if player.said:
            if player.said != IMPORTED and not player.said.startswith(DONE):
                self.largest = max(self.largest, _measure_resident(started.process.pid))
            return
        player.record = launcher.finish(started, player.trial.plan.timeout_s, timed_out)
        self.alive.remove(player)
        _close_pipes(player)
        if player.record.status == "oom" and self.alive:  # by itself it may have enough
            shutil.rmtree(player.folder)
        else:
            self.ended(player)


def _wake_player(player: InterleavedJob) -> None:
    assert player.started is not None
    _send_signal(player.started, signal.SIGCONT)
    player.started.telemetry.resume()


def _find_process(player: InterleavedJob) -> subprocess.Popen[bytes]:
    assert player.started is not None
    return player.started.process


def _read_lines(players: Sequence[InterleavedJob]) -> None:
    """Take down the next line of each job that has one within POLL_S."""
    ready, _, _ = select.select([player.ends[0] for player in players], [], [], POLL_S)
    closed = False
    for player in players:
        if player.ends[0] in ready:
            more = os.read(player.ends[0], 4096)
            player.heard += more
            closed = closed or not more
        line, newline, rest = player.heard.partition(b"\n")
        if newline:
            player.heard, player.said = rest, line.decode()
    if closed and not any(player.said for player in players):  # one is about to end
        time.sleep(POLL_S)


def _send_signal(started: launcher.JobProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.process.pid, number)


def _close_pipes(player: InterleavedJob) -> None:
    for end in player.ends:
        os.close(end)


def _measure_resident(pid: int) -> int:
    """Return the resident bytes of the process and its children; 0 once it is gone."""
    try:
        root = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))
    except psutil.Error:
        return 0
