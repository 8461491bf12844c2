"""Measuring in blocks, by turns with other workers: the worker's side of a conversation of one line at a time.

The worker says `ready import` once it has imported its library, loads at `go` and says `ready load`. It warms up at the
next `go`, says `ready BOUNDARY`, measures a block at each `go CORE_LATENCY` (ns) and answers `done DELAY`
(see `find_disturbed`), until `end`. Between two lines the conductor freezes it: several import or load at a time, but
one warms up or measures.
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
# Of a block's time and threads, waited for a processor. A virtual machine's own kernel takes 2 to 4 % of some blocks of
# two threads on two processors; a median over a block's samples doesn't feel it.
BEARABLE_DELAY = 0.05
OWN_DELAY = 2.0  # times what an engine's threads wait for each other in its quieter blocks
MAX_OWN_DELAY = 0.1  # longer delays have other causes than the engine


def find_disturbed(delays: Sequence[float], quiet: float | None = None) -> list[bool]:
    """Tell for each block of a process whether other programs disturbed it.

    `delays` holds for each block the share of its time that the process's threads waited for a processor. An engine
    with more threads than processors delays itself, so the limit is BEARABLE_DELAY, or OWN_DELAY times its `quiet`
    delay, where none is given that of these blocks, of which at most MOST_OWN_DELAY count.
    """
    quiet = quiet_delay(delays) if quiet is None else quiet
    limit = max(BEARABLE_DELAY, OWN_DELAY * min(quiet, MAX_OWN_DELAY))
    return [delay > limit for delay in delays]


def quiet_delay(delays: Sequence[float]) -> float:
    """Return the delay that a quarter of the blocks stay below."""
    return sorted(delays)[len(delays) // 4] if delays else 0.0


class Uninterleaved:
    """A single job without turns: its blocks follow each other."""

    conducted = False
    waited_s = 0.0
    together = 1  # jobs that load at the same time

    def __init__(self) -> None:
        self.delays: list[float] = []  # for the boundary's blocks so far: see `find_disturbed`
        self.core_latencies: list[int] = []  # for the same blocks, in ns

    def imported(self) -> None:
        """Report that the library is imported, and return when it is time to load."""

    def loaded(self) -> None:
        """Report that the engine is loaded, and return when it is time to warm up."""

    def blocks(self, boundary: str, plan: Plan) -> Iterator[int]:
        """Yield a number for each block to measure now."""
        self.delays, self.core_latencies = [], []
        deadline = time.monotonic() + plan.seconds
        for number in range(plan.blocks):
            if number >= MIN_BLOCKS and time.monotonic() >= deadline:
                return
            yield from self._iter_watched(number)

    def _iter_watched(self, number: int) -> Iterator[int]:
        """Yield the block's number, and keep what share of the block each processor's thread waited."""
        since, before = time.monotonic(), system.run_delay()
        yield number
        delay, seconds = system.run_delay() - before, time.monotonic() - since
        self.delays.append(round(delay / max(seconds * len(os.sched_getaffinity(0)), 1e-9), 4))


class Interleaved(Uninterleaved):
    """Blocks start when the conductor says so; `waited_s` is the time that is not the job's own: it waited, or others
    loaded at the same time."""

    conducted = True

    def __init__(self, read: int, write: int) -> None:
        super().__init__()
        self._began = time.perf_counter()
        self._core_latency = 0  # received with the last message
        for end in (read, write):
            os.set_inheritable(end, False)
        self._heard, self._said = os.fdopen(read, "r"), os.fdopen(write, "w", buffering=1)

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
        number, line = 0, f"{READY} {boundary}"
        while self._ask_conductor(line) == GO:
            self.core_latencies.append(self._core_latency)
            yield from self._iter_watched(number)
            number, line = number + 1, f"{DONE} {self.delays[-1]:g}"

    def _ask_conductor(self, line: str) -> str:
        since = time.perf_counter()
        print(line, file=self._said)
        word, _, latency = self._heard.readline().strip().partition(" ")
        self._core_latency = int(latency or 0)
        self.waited_s += time.perf_counter() - since
        if word not in (GO, END):  # the conductor is gone, and without a turn nothing may be measured
            raise EOFError("the process that conducts this job's turns is gone")
        return word


def find_conductor() -> Uninterleaved:
    """Return the source of this process's turns: the conductor behind the inherited pipes, or none."""
    ends = os.environ.pop(CONDUCTOR_VARIABLE, "")
    return Interleaved(*map(int, ends.split(","))) if ends else Uninterleaved()
