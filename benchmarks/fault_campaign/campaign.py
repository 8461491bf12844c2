"""The state of a fault campaign: watched commands, and a list of failures."""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
from watched import Watch

LIMIT_S = 300.0  # a command that takes longer counts as hanging
MAX_MEMORY = 6 << 30  # bytes that a process may allocate, so that a greedy file can't exhaust the machine's memory
CODES = (0, 1, 2, 3)
INTERNAL = re.compile(
    r"\b(Attribute|Type|Key|Index|Name|Assertion|UnboundLocal|Recursion|ZeroDivision|Unicode\w*)Error\b"
)
STUDY = """models = ["fake:net"]
backends = ["fake@latency_ms=0.1", "fake@latency_ms=0.2"]
channels = 1
rounds = 3
seconds = 0.05
warmup = 0.02
threads = 1
"""


@dataclass
class Campaign:
    """Commands under test, a seeded random generator, and the failures found.

    With `server`, the socket of `tests/preloaded.py`, commands and their jobs are forked from a process that has the
    libraries imported. `expected` is what commands start, unpickle and run on whole files.
    """

    folder: Path
    seed: int = 0
    server: str = ""
    watch: Watch | None = None
    wrong: list[str] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._reading = threading.Lock()
        self.marker = self.folder / "executed"  # created when a planted file's code runs

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """Return the environment of commands: a separate cache, and the watch."""
        own = {"DYNO_CACHE": str(cache or self.folder / "cache"), "COLUMNS": "200"}
        return {**os.environ, **(self.watch.env if self.watch else {}), **own}

    def start(self, *words: object, **how: Any) -> subprocess.Popen[str]:
        """Start the command line as a new process (not forked), to be killed or limited."""
        how.setdefault("env", self.environment())
        command = [sys.executable, "-m", "dyno", *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, text=True, errors="replace", **pipes, **how)

    def run(self, what: str, *words: object, cache: Path | None = None) -> tuple[int, str, str]:
        """Run the command line to its end; return exit code and output, see `ended`."""
        if not self.server:
            return self.ended(self.start(*words, env=self.environment(cache)), what)
        try:
            done = preloaded.command(self.server, [*map(str, words)], self.folder, self.environment(cache), LIMIT_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{what}: hangs")
            return -1, "", ""
        return self.judged(what, done.returncode, done.stdout, done.stderr)

    def prepare(self, *words: object, cache: Path | None = None) -> None:
        """Run a command that makes files for later changes; raise RuntimeError if it fails."""
        code, _, err = self.run("in preparation", *words, cache=cache)
        if code:
            raise RuntimeError(f"dyno {' '.join(map(str, words))} ends with exit code {code}: {err}")

    def ended(self, process: subprocess.Popen[str], what: str) -> tuple[int, str, str]:
        """Wait for the process; return exit code and output. A hang, a traceback or death by a signal is recorded."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.wrong.append(f"{what}: hangs")
            return -1, "", ""
        return self.judged(what, process.returncode, out, err)

    def judged(self, what: str, code: int, out: str, err: str) -> tuple[int, str, str]:
        """Return exit code and output; record a forbidden ending in `wrong`."""
        last = (err.strip().splitlines() or [""])[-1]
        if "Traceback" in out + err or code not in CODES:
            self.wrong.append(f"{what}: exit code {code}: {last}")
        elif code == 2 and err.count("dyno: ") != 1:
            self.wrong.append(f"{what}: not one line: {err[-300:]!r}")
        elif internal := INTERNAL.search(out + err):
            printed = (out + err)[max(internal.start() - 200, 0) : internal.end() + 200]
            self.wrong.append(f"{what}: an internal error is shown: {printed!r}")
        if "\x1b" in out + err:
            self.wrong.append(f"{what}: escape codes are printed")
        if self.marker.exists():
            self.marker.unlink()
            self.wrong.append(f"{what}: code in a file was executed")
        return code, out, err

    def kept(self) -> Path:
        """Return the folder for files that caused a failure."""
        folder = self.folder / "wrong"
        folder.mkdir(exist_ok=True)
        return folder

    def noted(self) -> set[str]:
        """Return the watched events since the last call, without the parts that vary between runs."""
        found = set()
        for path in self.watch.notes() if self.watch else ():
            with self._reading, suppress(FileNotFoundError):
                taken = path.rename(path.with_name(path.name + ".read"))  # the writer reopens it for each line
                kind = path.name.rpartition(".")[2]
                found |= {f"{kind}: {_lasting(line)}" for line in taken.read_text(errors="replace").splitlines()}
        return found

    def unexpected(self, what: str) -> None:
        """Record unexpected events in `wrong`."""
        self.wrong += [f"{what}: {line}" for line in sorted(self.noted() - self.expected)]


def _lasting(line: str) -> str:
    return re.sub(r"\d+|\b[0-9a-f]{8,}\b|tmp\w{8}", "#", line)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Limit the memory of processes started within the block to MAX_MEMORY bytes."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
