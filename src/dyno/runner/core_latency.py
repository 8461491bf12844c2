"""Core-to-core latency: the time of a signal from one processor to another and back.

A hypervisor moves a virtual machine's processors between the host's cores. If two of them no longer share a cache, each
synchronisation of an engine's threads takes several times as long, for seconds to minutes, and no counter of the guest
shows it. Seen on two processors of an AMD EPYC: 0.17 and 0.58 µs; a network's latency differs 1.8-fold between them in
ONNX Runtime, 1.4-fold in PyTorch.

Two processes on different processors alternately write to shared memory: this one, and one that runs this file.
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

REQUEST_OFFSET, ANSWER_OFFSET, READY_OFFSET = 0, 64, 128  # offsets in the shared memory, each in its own cache line
LEAVE_SIGNAL = 255
SIGNALS_PER_REPEAT, REPEATS = 100, 3
MAX_NEIGHBOURS = 4  # processors to signal
TAKEN_TIMEOUT_S = 0.005  # a processor silent for longer runs another program
MAX_LIFETIME_S = 1  # the answering process then ends by itself


class CoreLatency:
    """Meter of the latency from the first of these processors to the others."""

    def __init__(self, processors: Sequence[int]) -> None:
        self._own_core, *neighbours = processors
        self._neighbours = neighbours[:: max(1, -(-len(neighbours) // MAX_NEIGHBOURS))]
        self._answering: subprocess.Popen[bytes] | None = None
        if not neighbours:
            return
        with suppress(OSError, AttributeError):  # a system without memory files
            memory_fd = os.memfd_create("dyno")
            try:
                os.ftruncate(memory_fd, mmap.PAGESIZE)
                self._memory = mmap.mmap(memory_fd, mmap.PAGESIZE)
                command = [sys.executable, "-I", "-S", __file__, str(memory_fd)]
                self._answering = subprocess.Popen(
                    command, 0, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[memory_fd]
                )
            finally:
                os.close(memory_fd)

    def measure(self) -> int:
        """Return the round-trip nanoseconds to the furthest processor; 0 if a processor was taken.

        Takes about 0.3 ms for each of at most MAX_NEIGHBOURS others.
        """
        if self._answering is None:
            return 0
        affinity = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, [self._own_core])
            latencies = [self._measure_to(processor) for processor in self._neighbours]
            return max(latencies) if all(latencies) else 0
        except OSError:
            self.close()
            return 0
        finally:
            os.sched_setaffinity(0, affinity)

    def _measure_to(self, processor: int) -> int:
        assert self._answering is not None and self._answering.stdin is not None
        memory, clock = self._memory, time.perf_counter_ns
        best, deadline = 0, clock() + round(TAKEN_TIMEOUT_S * 1e9)
        while memory[READY_OFFSET] and clock() < deadline:  # it is still on the previous processor
            pass
        memory[REQUEST_OFFSET] = memory[ANSWER_OFFSET] = 0
        self._answering.stdin.write(f"{processor}\n".encode())
        while not memory[READY_OFFSET] and clock() < deadline:
            pass
        for _ in range(REPEATS if memory[READY_OFFSET] else 0):
            begin = clock()
            for index in range(SIGNALS_PER_REPEAT):
                memory[REQUEST_OFFSET] = request = 1 + index % 2
                while memory[ANSWER_OFFSET] != request:
                    if clock() > deadline:
                        memory[REQUEST_OFFSET] = LEAVE_SIGNAL
                        return 0
            latency = (clock() - begin) // SIGNALS_PER_REPEAT
            best = min(best or latency, latency)
        memory[REQUEST_OFFSET] = LEAVE_SIGNAL
        return best

    def close(self) -> None:
        """End the answering process."""
        if self._answering is not None:
            with self._answering as process:  # closes its pipe, and waits
                process.kill()
            self._answering = None


def answer(memory_fd: int) -> None:
    """Answer each signal in the shared memory, on the processors named by lines of standard input."""
    memory = mmap.mmap(memory_fd, mmap.PAGESIZE)
    while line := sys.stdin.readline():
        os.sched_setaffinity(0, [int(line)])
        signal.alarm(MAX_LIFETIME_S)
        memory[READY_OFFSET] = 1
        while (request := memory[REQUEST_OFFSET]) != LEAVE_SIGNAL:
            memory[ANSWER_OFFSET] = request
        memory[READY_OFFSET] = 0
        signal.alarm(0)


if __name__ == "__main__":
    answer(int(sys.argv[1]))
