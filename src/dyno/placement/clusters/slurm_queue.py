"""Waiting for jobs of Slurm to start: what is said meanwhile, and which ones the study goes on without."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dyno.jobs.progress import Progress
from dyno.placement.clusters.slurm_host import QUEUE_S, WAITING, SlurmHost, over, states
from dyno.worker.spec import UserError

POLL_S = 0.2


class Queue:
    """Jobs on their way to a node."""

    def __init__(self, jobs: Sequence[SlurmHost], progress: Progress) -> None:
        self.jobs, self.progress = jobs, progress
        self._waiting, self._running = list(jobs), list[SlurmHost]()
        self._states: dict[str, tuple[str, str]] = {}
        self._asked = self._first = 0.0
        self._why, self._said = "", list[str]()

    def started(self, wait_s: float) -> list[SlurmHost]:
        """Wait until each job has started or never will, and return those that have started.

        After the first start, the others have `wait_s` seconds. Raises `UserError` if no job starts.
        """
        while self._waiting:
            self._sort_jobs()
            if self._running:
                self._first = self._first or time.monotonic()
                if time.monotonic() - self._first > wait_s:
                    self._leave_out(self._waiting, "did not start in time")
            if self._waiting:
                self._show_reasons()
                time.sleep(POLL_S)
        if not self._running:
            raise UserError(f"no job of --on slurm has started: {self._why}")
        return [host for host in self.jobs if host in self._running]

    def _sort_jobs(self) -> None:
        """Sort out those that have started, and those that never will."""
        if not self._waiting[0].local and time.monotonic() - self._asked > QUEUE_S:
            self._asked, self._states = time.monotonic(), states(self._waiting)
        ended = [host for host in self._waiting if host.dead or over(self._find_state(host)[0])]
        self._running += [host for host in self._waiting if host.started]  # a job may do so and end at once
        self._waiting = [host for host in self._waiting if not host.started]
        for host in ended:
            if host in self._waiting:
                state = self._find_state(host)[0].lower() or "ended"
                self._leave_out([host], f"did not start: it is {state} ({host.last_words()})")

    def _find_state(self, host: SlurmHost) -> tuple[str, str]:
        return self._states.get(host.id, ("", ""))

    def _leave_out(self, hosts: Sequence[SlurmHost], why: str) -> None:
        self._waiting = [host for host in self._waiting if host not in hosts]
        for host in hosts:
            host.gone = True
            host.cancel()
            state, reason = self._find_state(host)
            reason = "" if over(state) else reason
            self._why = f"{host.name} {why}" + (f" ({reason})" if reason else "")
            self.progress.note(f"{self._why}; the study goes on without it")

    def _show_reasons(self) -> None:
        """Show what the jobs are waiting for, as Slurm reports it, whenever that changes."""
        words = []
        for host in self._waiting:
            state, reason = self._find_state(host)
            if state in WAITING:
                words.append(f"{host.name} waits in the queue ({state.lower() if reason in ('', 'None') else reason})")
        if words and words != self._said:
            self._said = words
            self.progress.other(f"{len(self._running)} of {len(self.jobs)} jobs have started; {', '.join(words)}")
