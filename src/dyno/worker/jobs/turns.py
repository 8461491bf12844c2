"""Interleaved measuring: the worker's side of a line-based protocol with the conductor.

The worker says `ready import` after importing its library, loads at `go` and says `ready load`. At the next `go` it
warms up and says `ready BOUNDARY`. At each `go CORE_LATENCY` (ns) it measures a block and answers `done DELAY` (see
`find_disturbed`), until `end`. Between two lines the conductor freezes it: several workers import or load at a time,
but only one warms up or measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from dyno.worker import system
from dyno.worker.spec import Plan

CONDUCTOR_VARIABLE = "DYNO_CONDUCTOR"  # environment variable with two inherited pipe ends, `READ,WRITE`
READY, GO, DONE, END = "ready", "go", "done", "end"
IMPORTED, LOADED = f"{READY} import", f"{READY} load"
MIN_BLOCKS = 3  # even if one block exceeds the time
# Share of a block's time and threads spent waiting for a processor. A virtual machine's kernel takes 2 to 4 % of some
# blocks of two threads on two processors; the median of a block's samples is unaffected.
BEARABLE_DELAY = 0.05
OWN_DELAY = 2.0  # multiple of the delay of an engine's quieter blocks
MAX_OWN_DELAY = 0.1  # longer delays have other causes than the engine


def find_disturbed(delays: Sequence[float], quiet: float | None = None) -> list[bool]:
    """Return for each block of a process whether other programs disturbed it.

    `delays` holds each block's share of time that the process's threads waited for a processor. An engine with more
    threads than processors delays itself, so the limit is BEARABLE_DELAY or, if larger, OWN_DELAY times its `quiet`
    delay (at most MAX_OWN_DELAY; default: the `delays` of these blocks).
    """
    quiet = quiet_delay(delays) if quiet is None else quiet
    limit = max(BEARABLE_DELAY, OWN_DELAY * min(quiet, MAX_OWN_DELAY))
    return [delay > limit for delay in delays]


def quiet_delay(delays: Sequence[float]) -> float:
    """Return the lower quartile of the delays."""
    return sorted(delays)[len(delays) // 4] if delays else 0.0


class Uninterleaved:
    """A single job without turns: its blocks follow each other."""

    conducted = False
    waited_s = 0.0
    together = 1  # jobs that load at the same time

    def __init__(self) -> None:
        self.delays: list[float] = []  # per block of the boundary: see `find_disturbed`
        self.core_latencies: list[int] = []  # per block of the boundary, in ns

    def imported(self) -> None:
        """Report that the library is imported; return when it is time to load."""

    def loaded(self) -> None:
        """Report that the engine is loaded; return when it is time to warm up."""

    def blocks(self, boundary: str, plan: Plan) -> Iterator[int]:
        """Yield a number for each block to measure now."""
        self.delays, self.core_latencies = [], []
        deadline = time.monotonic() + plan.seconds
        for index in range(plan.blocks):
            if index >= MIN_BLOCKS and time.monotonic() >= deadline:
                return
            yield from self._iter_watched(index)

    def _iter_watched(self, index: int) -> Iterator[int]:
        """Yield the block's number, then store the share of the block that each processor's thread waited."""
        start, before = time.monotonic(), system.run_delay()
        yield index
        delay, seconds = system.run_delay() - before, time.monotonic() - start
        self.delays.append(round(delay / max(seconds * len(os.sched_getaffinity(0)), 1e-9), 4))


class Interleaved(Uninterleaved):
    """An interleaved job: the conductor starts its blocks.

    `waited_s` is the time not its own: waiting, and its share of loading in parallel with others.
    """

    conducted = True

    def __init__(self, read_fd: int, write_fd: int) -> None:
        super().__init__()
        self._began = time.perf_counter()
        self._core_latency = 0  # received with the last message
        for descriptor in (read_fd, write_fd):
            os.set_inheritable(descriptor, False)
        self._commands, self._replies = os.fdopen(read_fd, "r"), os.fdopen(write_fd, "w", buffering=1)

    def imported(self) -> None:
        """See `Uninterleaved.imported`."""
        self._ask_conductor(IMPORTED)

    def loaded(self) -> None:
        """See `Uninterleaved.loaded`."""
        loading = time.perf_counter() - self._began - self.waited_s
        self.waited_s += loading * (1 - 1 / self.together)
        self._ask_conductor(LOADED)

    def blocks(self, boundary: str, plan: Plan) -> Iterator[int]:
        """See `Uninterleaved.blocks`."""
        self.delays, self.core_latencies = [], []
        index, message = 0, f"{READY} {boundary}"
        while self._ask_conductor(message) == GO:
            self.core_latencies.append(self._core_latency)
            yield from self._iter_watched(index)
            index, message = index + 1, f"{DONE} {self.delays[-1]:g}"

    def _ask_conductor(self, message: str) -> str:
        start = time.perf_counter()
        print(message, file=self._replies)
        reply, _, latency = self._commands.readline().strip().partition(" ")
        self._core_latency = int(latency or 0)
        self.waited_s += time.perf_counter() - start
        if reply not in (GO, END):  # conductor gone: no measurement without a turn
            raise EOFError("the process that directs this job's turns has ended")
        return reply


def find_conductor() -> Uninterleaved:
    """Return this process's turns: the conductor behind the inherited pipes, or an uninterleaved job."""
    descriptors = os.environ.pop(CONDUCTOR_VARIABLE, "")
    return Interleaved(*map(int, descriptors.split(","))) if descriptors else Uninterleaved()
