"""A block's process from outside: started at its place, its lines passed on, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dyno.jobs.progress import Progress
from dyno.placement.block_process import BAD_INPUT, ORDER
from dyno.placement.places import Place
from dyno.study import Study
from dyno.worker.record import write_json, write_text
from dyno.worker.spec import SCHEMA, UserError

REQUEST, LOG = "request.toml", "block.log"
PATIENCE_S = 10.0  # that a process has to end its jobs after an interrupt


@dataclass
class BlockProcess:
    """A process that measures trials of one block into `folder`; `read` is how much of its log was passed on."""

    folder: Path
    place: Place
    process: subprocess.Popen[bytes]
    read: int = field(default=0)

    def pass_on(self, progress: Progress) -> None:
        """Print the whole lines that it has written since."""
        text = (self.folder / LOG).read_bytes()
        end = text.rfind(b"\n") + 1
        for line in text[self.read : end].decode("utf-8", "replace").splitlines():
            progress.relay(self.place.name, line)
        self.read = max(self.read, end)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def lost(self) -> str:
        """How it died before its work was done; "" where it ended by itself. A `UserError` where it had bad input."""
        code = self.process.returncode
        if code == 0:
            return ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no message"
        if code == BAD_INPUT:
            raise UserError(last)
        return f"exit code {code}: {last}"

    def end(self) -> None:
        """Interrupt it, and kill it if it doesn't end; its jobs die with it."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(folder: Path, study: Study, trials: Collection[str], place: Place, *, retry_failed: bool) -> BlockProcess:
    """Start measuring those trials of the study at the place, into the folder, which may hold some of them already."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / REQUEST, replace(study, device=place.device).to_toml())
    order = {
        "schema": SCHEMA, "study": REQUEST, "trials": sorted(trials), "cores": list(place.cores),
        "retry_failed": retry_failed, "driver": os.getpid(),
    }  # fmt: skip
    write_json(folder / ORDER, order)
    with open(folder / LOG, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dyno.placement.block_process", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **place.env}, start_new_session=True,
        )  # fmt: skip
    return BlockProcess(folder, place, process)
