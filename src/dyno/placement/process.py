"""A block's process: what it is asked for, and the process on this host from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dyno.placement.block_process import ORDER
from dyno.placement.places import LOG, Place, RunningBlock
from dyno.planning.planned import TrialSelection
from dyno.study import Study
from dyno.worker.record import read_json, write_bytes, write_json, write_text
from dyno.worker.spec import SCHEMA

REQUEST = "request.toml"
PATIENCE_S = 10.0  # that a process has to end its jobs after an interrupt


def start(folder: Path, study: Study, part: TrialSelection, place: Place, *, retry_failed: bool) -> RunningBlock:
    """Start measuring that part of the study at the place, into the folder, which may hold some of it already."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / REQUEST, replace(study, device=place.device).to_toml())
    order = {
        "schema": SCHEMA, "study": REQUEST, "sources": list(part.sources), "trials": sorted(part.trials),
        "cores": list(place.cores), "retry_failed": retry_failed,
    }  # fmt: skip
    write_json(folder / ORDER, order)
    write_bytes(folder / LOG, b"")
    return place.host.begin(folder, place) if place.host else BlockProcess(folder, place)


class BlockProcess(RunningBlock):
    """A block's process on this host."""

    def __init__(self, folder: Path, place: Place) -> None:
        super().__init__(folder, place)
        self.process = popen(folder, place.env)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        end(self.process)


def popen(folder: Path, env: Mapping[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Start the process that measures what the folder's order asks for; it dies with its caller."""
    write_json(folder / ORDER, {**read_json(folder / ORDER), "driver": os.getpid()})
    with open(folder / LOG, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dyno.placement.block_process", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **env}, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, and kill it if it doesn't end."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
