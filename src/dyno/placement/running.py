"""A block that is being measured somewhere: the lines it writes, and how it ended."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from pathlib import Path

from dyno.jobs.progress import Progress
from dyno.placement.block_process import BAD_INPUT
from dyno.placement.places import Place
from dyno.worker.spec import UserError

LOG = "block.log"


class RunningBlock(ABC):
    """The process that measures trials of one block into `folder`, here or on another host, whose files it then has."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.folder, self.place = folder, place
        self._read = 0

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Its exit code, that of the signal that killed it as a negative number; None while it runs."""

    @abstractmethod
    def end(self) -> None:
        """Interrupt it, and kill it if it doesn't end; its jobs die with it."""

    @property
    def ended(self) -> bool:
        return self.code is not None

    @property
    def lost(self) -> str:
        """How it died before its work was done; "" where it ended by itself. A `UserError` where it had bad input."""
        code = self.code or 0
        if code == 0:
            return ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no message"
        if code == BAD_INPUT:
            raise UserError(last)
        return f"exit code {code}: {last}"

    def pass_on(self, progress: Progress) -> None:
        """Print the whole lines that it has written since."""
        text = (self.folder / LOG).read_bytes()
        end = text.rfind(b"\n") + 1
        for line in text[self._read : end].decode("utf-8", "replace").splitlines():
            progress.relay(self.place.name, line)
        self._read = max(self._read, end)
