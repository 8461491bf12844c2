"""What a campaign has at hand: commands under watch, and a list of what was found wrong."""

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

LIMIT_S = 300.0  # a command that takes longer hangs
MOST_MEMORY = 6 << 30  # bytes that a process may write to: a file that asks for more must not end the machine
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
    """What is under test, by chance that can be repeated, and what was found wrong.

    With `server`, the socket of `tests/preloaded.py`, commands and their jobs are forked from a process that has the
    libraries imported. `expected` is what commands start, unpickle and run when their files are whole.
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
        self.marker = self.folder / "executed"  # what a planted file leaves where its code is run

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """Of commands: a separate cache, and the watch."""
        own = {"DYNO_CACHE": str(cache or self.folder / "cache"), "COLUMNS": "200"}
        return {**os.environ, **(self.watch.env if self.watch else {}), **own}

    def start(self, *words: object, **how: Any) -> subprocess.Popen[str]:
        """The command line in a process that is started, not forked: one to be killed or bounded."""
        how.setdefault("env", self.environment())
        command = [sys.executable, "-m", "dyno", *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, text=True, errors="replace", **pipes, **how)

    def run(self, what: str, *words: object, cache: Path | None = None) -> tuple[int, str, str]:
        """The command line, to its end: exit code and what it printed; see `ended`."""
        if not self.server:
            return self.ended(self.start(*words, env=self.environment(cache)), what)
        try:
            done = preloaded.command(self.server, [*map(str, words)], self.folder, self.environment(cache), LIMIT_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{what}: hangs")
            return -1, "", ""
        return self.judged(what, done.returncode, done.stdout, done.stderr)

    def prepare(self, *words: object, cache: Path | None = None) -> None:
        """A command whose files are to be changed; one that doesn't end well ends the campaign."""
        code, _, err = self.run("in preparation", *words, cache=cache)
        if code:
            raise RuntimeError(f"dyno {' '.join(map(str, words))} ends with exit code {code}: {err}")

    def ended(self, process: subprocess.Popen[str], what: str) -> tuple[int, str, str]:
        """Exit code and what it printed; a hang, a traceback or a death by a signal is kept as wrong."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.wrong.append(f"{what}: hangs")
            return -1, "", ""
        return self.judged(what, process.returncode, out, err)

    def judged(self, what: str, code: int, out: str, err: str) -> tuple[int, str, str]:
        """The same; how a command must not end is kept as wrong."""
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
        """The folder for files that broke something."""
        folder = self.folder / "wrong"
        folder.mkdir(exist_ok=True)
        return folder

    def noted(self) -> set[str]:
        """What was looked up, started, unpickled and run since it was last asked, less what changes from run to run."""
        found = set()
        for path in self.watch.notes() if self.watch else ():
            with self._reading, suppress(FileNotFoundError):
                taken = path.rename(path.with_name(path.name + ".read"))  # its writer opens it anew for each line
                kind = path.name.rpartition(".")[2]
                found |= {f"{kind}: {_lasting(line)}" for line in taken.read_text(errors="replace").splitlines()}
        return found

    def unexpected(self, what: str) -> None:
        """What has happened beyond the expected is kept as wrong."""
        self.wrong += [f"{what}: {line}" for line in sorted(self.noted() - self.expected)]


def _lasting(line: str) -> str:
    return re.sub(r"\d+|\b[0-9a-f]{8,}\b|tmp\w{8}", "#", line)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What is started meanwhile may write to so much memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
