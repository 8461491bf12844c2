"""How long a signal takes from one processor to another and back.

A hypervisor moves a virtual machine's processors between the host's cores. Where two of them no longer share a cache,
each synchronisation of an engine's threads takes several times as long, for seconds to minutes, and no counter of the
guest shows it. Seen on two processors of an AMD EPYC: 0.17 and 0.58 µs, by which a network's latency in ONNX Runtime
differs 1.8-fold, in PyTorch 1.4-fold.

Two processes write to shared memory in turn, each on a separate processor: this one, and one that runs this file.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

ASKED, ANSWERED, IS_READY = 0, 64, 128  # bytes of the shared memory, each in a separate cache line
LEAVE = 255
SIGNALS, REPEATS = 100, 3
MOST_OTHERS = 4  # processors to which a signal goes
PATIENCE_S = 0.005  # until a processor counts as taken by another program
LONGEST_S = 1  # after which the answering process ends by itself


class CoreLatency:
    """Measure the latency from the first of these processors to the others, when asked to."""

    def __init__(self, processors: Sequence[int]) -> None:
        self._first, *others = processors
        self._others = others[:: max(1, -(-len(others) // MOST_OTHERS))]
        self._answering: subprocess.Popen[bytes] | None = None
        if not others:
            return
        with suppress(OSError, AttributeError):  # a system without such files
            shared = os.memfd_create("dyno")
            try:
                os.ftruncate(shared, mmap.PAGESIZE)
                self._memory = mmap.mmap(shared, mmap.PAGESIZE)
                command = [sys.executable, "-I", "-S", __file__, str(shared)]
                self._answering = subprocess.Popen(
                    command, 0, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[shared],
                    start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(shared)

    def measure(self) -> int:
        """Return the nanoseconds to the processor that is furthest away and back; 0 where a processor was taken.

        Takes about 0.3 ms for each of at most four others.
        """
        if self._answering is None:
            return 0
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, [self._first])
            found = [self._measure_to(other) for other in self._others]
            return max(found) if all(found) else 0
        except OSError:
            self.close()
            return 0
        finally:
            os.sched_setaffinity(0, allowed)

    def _measure_to(self, other: int) -> int:
        assert self._answering is not None and self._answering.stdin is not None
        memory, clock = self._memory, time.perf_counter_ns
        best, deadline = 0, clock() + round(PATIENCE_S * 1e9)
        while memory[IS_READY] and clock() < deadline:  # it hasn't left the processor before
            pass
        memory[ASKED] = memory[ANSWERED] = 0
        self._answering.stdin.write(f"{other}\n".encode())
        while not memory[IS_READY] and clock() < deadline:
            pass
        for _ in range(REPEATS if memory[IS_READY] else 0):
            begin = clock()
            for number in range(SIGNALS):
                memory[ASKED] = sent = 1 + number % 2
                while memory[ANSWERED] != sent:
                    if clock() > deadline:
                        memory[ASKED] = LEAVE
                        return 0
            took = (clock() - begin) // SIGNALS
            best = min(best or took, took)
        memory[ASKED] = LEAVE
        return best

    def close(self) -> None:
        """End the answering process."""
        if self._answering is not None:
            with self._answering as ended:  # closes its pipe, and waits
                ended.kill()
            self._answering = None


def answer(shared: int) -> None:
    """Answer each signal in the shared memory, on the processor that a line of the standard input names."""
    memory = mmap.mmap(shared, mmap.PAGESIZE)
    while line := sys.stdin.readline():
        os.sched_setaffinity(0, [int(line)])
        signal.alarm(LONGEST_S)
        memory[IS_READY] = 1
        while (sent := memory[ASKED]) != LEAVE:
            memory[ANSWERED] = sent
        memory[IS_READY] = 0
        signal.alarm(0)


if __name__ == "__main__":
    answer(int(sys.argv[1]))
