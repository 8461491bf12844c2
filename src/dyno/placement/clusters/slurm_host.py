"""A job of Slurm as a host: asked through files, and taken for lost when it or Slurm says so, or nothing is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from dyno.placement.clusters.node import FolderUpdate, NodeDescription
from dyno.placement.clusters.remote import NodeLost, RemoteHost
from dyno.placement.clusters.slurm_job import ANSWER, ASK, NODE, OVER, Mail
from dyno.worker.spec import UserError, plain

JOB_NAME = "dyno"
DEAD_S = 120.0  # without a sign of life, after which either side takes the other for dead
SUSPECT_S = 10.0  # after which Slurm is asked
QUEUE_S = 10.0  # between two questions to Slurm
LOOK_S = 0.5  # between two looks for a job's sign of life
COMMAND_S = 60.0  # that a command of Slurm may take
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


class SlurmHost(RemoteHost):
    """A job and its device; `local` where it is a process on this host, as submitit has it without Slurm."""

    def __init__(self, job: Any, mail: Mail, *, local: bool) -> None:
        super().__init__()
        self.job, self.mail, self.local = job, mail, local
        self._number, self._call = 0, ""
        self._beat: Any = None
        self._heard = self._looked = self._asked = time.monotonic()

    @property
    def id(self) -> str:
        return str(self.job.job_id)

    @property
    def name(self) -> str:
        return f"job {self.id}"

    @property
    def gone(self) -> bool:
        if not self._gone:
            with suppress(NodeLost):
                self._check_job()
        return self._gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self._gone = gone

    @property
    def dead(self) -> bool:
        """Whether it is a process on this host that has ended; what became of Slurm's jobs, Slurm says."""
        return self.local and bool(self.job.done())

    @property
    def started(self) -> bool:
        return self.mail.beat(NODE) is not None

    @property
    def ended(self) -> bool:
        """Whether it has started, and has nothing more to do."""
        return self.dead or bool((self.mail.beat(NODE) or {}).get("left"))

    def ask(self, call: str, *given: Any) -> None:
        self._number, self._call = self._number + 1, call
        packed, rest = (given[0], given[1:]) if call == "begin" else (b"", given)
        try:
            self.mail.send(ASK, self._number, {"call": call, "given": rest}, packed)
        except OSError as e:
            raise UserError(f"the run folder can't be written to: {e}") from e

    def answer(self) -> tuple[Any] | None:
        found = self.mail.receive(ANSWER, self._number)
        if found is None:
            self._check_job()
            return None
        message, packed = found
        if "error" in message:
            raise self._end_job(message["error"])
        if self._call == "news":
            return (FolderUpdate(packed, tuple(message["names"]), message["code"]),)
        if self._call == "describe":
            cores = tuple(tuple(core) for core in message["cores"])
            return (NodeDescription(**{**message, "cores": cores}),)
        return (None,)

    def _check_job(self) -> None:
        """See whether the job is still there; raises `NodeLost`."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        beat = self.mail.beat(NODE)
        if beat is not None and beat != self._beat:
            self._beat, self._heard = beat, now
            if left := beat.get("left"):
                raise self._end_job(left)
        if self.dead:
            raise self._end_job("its process was killed")
        silent = now - self._heard
        if not self.local and silent > SUSPECT_S and now - self._asked > QUEUE_S:
            self._asked = now
            state, _ = states([self]).get(self.id, ("", ""))
            if over(state):
                raise self._end_job(f"Slurm says that it is {state.lower()}")
        if silent > DEAD_S:
            raise self._end_job(f"it gave no sign of life for {silent:.0f} s")

    def _end_job(self, why: str) -> NodeLost:
        """End the job, whether it still exists or not, and return the error."""
        self.gone = True
        with suppress(OSError):
            (self.mail.folder / OVER).touch()
        self.cancel()
        return NodeLost(f"{self.name}: {why}")

    def cancel(self) -> None:
        """Take the job from Slurm."""
        if not self.local:
            cancel([self.id])
        elif not self.dead:  # submitit's own way is an interrupt, on which its process prints where it was
            with suppress(ProcessLookupError):
                os.kill(int(self.id), signal.SIGTERM)

    def last_words(self) -> str:
        """Return the last line of the job's log, or a hint if it wrote none."""
        for path in (self.job.paths.stderr, self.job.paths.stdout):
            with suppress(OSError):
                if lines := path.read_text(encoding="utf-8", errors="replace").strip().splitlines():
                    return plain(lines[-1])
        return "it wrote no log; is the run folder on a file system that the nodes have too?"


def cancel(ids: Sequence[str]) -> None:
    """Cancel the jobs in Slurm; submitit's own method prints scancel's messages on those that have ended."""
    if ids:
        with suppress(OSError, subprocess.SubprocessError):
            command = ["scancel", "--quiet", f"--name={JOB_NAME}", *ids]
            subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False)


def over(state: str) -> bool:
    """Return whether a job in this state is over; "" is an unknown state."""
    return state not in ("", *WAITING, *ALIVE)


def states(hosts: Iterable[SlurmHost]) -> dict[str, tuple[str, str]]:
    """Return Slurm's state of each job with its reason; `FORGOTTEN` for an unknown job, empty if Slurm doesn't answer.

    Asked of `squeue`, because `sacct` knows nothing on clusters without accounting, and never why a job waits.
    """
    ids = [host.id for host in hosts]
    command = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    if done.returncode and "Invalid job id" not in done.stderr:
        return {}
    found = {}
    for line in done.stdout.splitlines():
        number, state, reason = (part.strip() for part in line.split("|", 2))
        found[number] = state, reason
    return {one: found.get(one, ("FORGOTTEN", "")) for one in ids}
