"""Measuring in blocks, by turns with other workers: the worker's side of a conversation of one line at a time.

The worker says `ready import` once it has imported its library, and loads at `go`. It says `ready BOUNDARY` once it is
warm, measures a block at each `go` and answers `done`, until `end`. Between two lines it is frozen by the conductor,
which lets several import at a time, but one load or measure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from dyno.worker.spec import Plan

CONDUCTOR = "DYNO_CONDUCTOR"  # the variable with the numbers of two inherited pipe ends, `READ,WRITE`
READY, GO, DONE, END = "ready", "go", "done", "end"
IMPORTED = f"{READY} import"
LEAST_BLOCKS = 3  # even when one block outlasts the whole budget


class Alone:
    """Nobody to take turns with: all blocks follow each other."""

    conducted = False
    waited_s = 0.0

    def imported(self) -> None:
        """The library is imported: return when it is time to load."""

    def blocks(self, boundary: str, plan: Plan) -> Iterator[int]:
        """A number for each block that is to be measured now."""
        deadline = time.monotonic() + plan.seconds
        for number in range(plan.blocks):
            if number >= LEAST_BLOCKS and time.monotonic() >= deadline:
                return
            yield number


class Conducted(Alone):
    """The conductor says when; `waited_s` is how long this process waited, which is none of its own time."""

    conducted = True

    def __init__(self, read: int, write: int) -> None:
        for end in (read, write):
            os.set_inheritable(end, False)
        self._heard, self._said = os.fdopen(read, "r"), os.fdopen(write, "w", buffering=1)

    def imported(self) -> None:
        """See `Alone.imported`."""
        self._answer(IMPORTED)

    def blocks(self, boundary: str, plan: Plan) -> Iterator[int]:
        """See `Alone.blocks`."""
        number, line = 0, f"{READY} {boundary}"
        while self._answer(line) == GO:
            yield number
            number, line = number + 1, DONE

    def _answer(self, line: str) -> str:
        since = time.perf_counter()
        print(line, file=self._said)
        word = self._heard.readline().strip()
        self.waited_s += time.perf_counter() - since
        if word not in (GO, END):  # the conductor is gone, and whoever has no turn must not measure
            raise EOFError("whoever gave this job its turns is gone")
        return word


def conductor() -> Alone:
    """Who says when this process measures: the one it inherited pipes from, or nobody."""
    ends = os.environ.pop(CONDUCTOR, "")
    return Conducted(*map(int, ends.split(","))) if ends else Alone()
