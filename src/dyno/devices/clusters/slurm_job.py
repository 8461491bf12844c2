"""A Slurm job that holds one device and runs blocks that arrive as files, until a file asks it to end.

The nodes share a file system. Each job has a folder in the study's run folder, for the calls of the host where `dyno
run` was started and for this job's answers.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dyno.devices import places
from dyno.devices.clusters.node import Node
from dyno.worker import system
from dyno.worker.spec import UserError

POLL_INTERVAL_S = 0.5  # polling for a message
HEARTBEAT_INTERVAL_S = 2.0  # heartbeats of the command
REFRESH_S = 1.0
# files: the command's heartbeat, the job's start, the request to stop
DRIVER, STARTED, STOP = "driver", "begun", "over"
ASK, ANSWER, LEFT = "ask", "answer", "left"  # kinds of messages; the last one has the reason for a job's end
OF_LAUNCHERS = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_",
    "SUBMITIT_",
)  # prefixes of variables that a study on one host lacks


class Mail:
    """A folder of numbered messages, pickled like submitit's own; the driver makes it private to its user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._refreshed = 0.0

    def send(self, kind: str, number: int, message: Any) -> None:
        """Store a message atomically; unlike results, it needn't survive a crash of the machine."""
        partial_file = self.folder / f".{kind}.part"
        partial_file.write_bytes(pickle.dumps(message))
        os.replace(partial_file, self._name(kind, number))

    def _name(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number}"

    def receive(self, kind: str, number: int) -> tuple[Any] | None:
        """Remove and return the message with this number; None if it hasn't arrived."""
        if (message := self.read(kind, number)) is not None:
            self._name(kind, number).unlink()
        return message

    def read(self, kind: str, number: int = 0) -> tuple[Any] | None:
        """Return the message with this number, and keep it; None if it hasn't arrived."""
        self._refresh_folder()
        try:
            return (pickle.loads(self._name(kind, number).read_bytes()),)
        except OSError:  # also while a network file system sees it being replaced
            return None

    def _refresh_folder(self) -> None:
        """Make a network file system look again: it may remember for 30 s that a file is missing."""
        if time.monotonic() - self._refreshed > REFRESH_S:
            self._refreshed = time.monotonic()
            with suppress(OSError):
                self.folder.chmod(self.folder.stat().st_mode)


def main(folder: str, setting: dict[str, Any]) -> None:
    """Serve in this folder as the job's only task.

    `setting` has `silent_s`, the seconds without a heartbeat after which the driver counts as dead. For jobs on the
    driver's own host it also has `driver`, the process id; `share`, the number and count of shares of the processors;
    and `visible`, the GPU to use.
    """
    for name in list(os.environ):
        if name.startswith(OF_LAUNCHERS):
            del os.environ[name]
    if share := setting.get("share"):
        number, count = share
        threads = system.core_threads()
        os.sched_setaffinity(0, places.list_share(threads, len(threads) // count, number))
    if visible := setting.get("visible"):
        os.environ[places.VISIBLE_DEVICES] = visible
    pilot = Pilot(Path(folder), setting["silent_s"], setting.get("driver", 0))
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, pilot.interrupt)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal's, meant for the command; children would inherit SIG_IGN
    with suppress(FileExistsError):  # Slurm started the job again, and the study continues without it
        (pilot.mail.folder / STARTED).touch(exist_ok=False)
        pilot.serve()


class Pilot:
    """Server in a job: it answers the driver's calls."""

    def __init__(self, folder: Path, silent_s: float, driver: int) -> None:
        self.mail = Mail(folder)
        self._silent_s, self._driver = silent_s, driver
        self._node = Node()
        self._signal = ""
        self._last_beat: Any = None
        self._last_beat_at = time.monotonic()

    def interrupt(self, number: int, _frame: object) -> None:
        """Handle a signal, which Slurm sends to end a job."""
        self._signal = signal.Signals(number).name

    def serve(self) -> None:
        """Answer calls until the job must end; then end the block's process."""
        number, reason = 0, "it was interrupted"
        try:
            while not (end_reason := self._find_reason()):
                request = self.mail.receive(ASK, number + 1)
                if request is None:
                    time.sleep(POLL_INTERVAL_S)
                    continue
                number += 1
                self.mail.send(ANSWER, number, self._call_node(*request[0]))
            reason = end_reason
        except OSError as e:
            reason = f"it could not go on: {e}"
        finally:
            if not self._signal:  # otherwise Slurm kills the rest within 30 seconds
                self._node.end()
            with suppress(OSError):
                self.mail.send(LEFT, 0, reason)
            self._node.end()

    def _find_reason(self) -> str:
        """Return why the job must end; "" if it continues."""
        if self._signal:
            return f"it was ended by {self._signal}: cancelled, preempted, or past its time limit"
        if not self.mail.folder.is_dir() or any((f / STOP).exists() for f in (self.mail.folder, self._common)):
            return "it is over"
        if self._driver and not psutil.pid_exists(self._driver):
            return "the command that started it died"
        heartbeat = Mail(self._common).read(DRIVER)
        if heartbeat != self._last_beat:
            self._last_beat, self._last_beat_at = heartbeat, time.monotonic()
        silent_s = time.monotonic() - self._last_beat_at
        return f"the command that started it did not respond for {silent_s:.0f} s" if silent_s > self._silent_s else ""

    @property
    def _common(self) -> Path:
        return self.mail.folder.parent

    def _call_node(self, call: str, args: tuple[Any, ...]) -> Any:
        """Call the node's method; return its answer, or the error."""
        try:
            return getattr(self._node, call)(*args)
        except (OSError, UserError) as e:
            return e
