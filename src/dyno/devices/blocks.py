"""Blocks of trials that are compared, so measured on one device, and the anchor trial that all devices repeat.

python -m dyno.devices.blocks FOLDER is the process of one block; it reads block.json there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dyno.devices.places import BAD_INPUT, LOG_FILE, Place, RunningBlock
from dyno.jobs.progress import Progress
from dyno.runner import ensemble
from dyno.runner.execute import execute
from dyno.study.plan import PlannedTrial, TrialSelection
from dyno.study.study import Study
from dyno.worker import system
from dyno.worker.record import read_json, write_bytes, write_json, write_text
from dyno.worker.spec import SCHEMA, Trial, UserError, digest


@dataclass(frozen=True)
class Block:
    """All trials of one model, batch and size: they are measured interleaved, always on one device."""

    trials: tuple[Trial, ...]
    source: str  # their model's source in the study

    @property
    def id(self) -> str:
        """Hash of what its trials share; it stays the same when a study gets more backends or precisions."""
        first = self.trials[0]
        return digest([first.model.name, first.dims])[:12]

    @property
    def selection(self) -> TrialSelection:
        """The block's selection from the study's plan."""
        return TrialSelection([trial.id for trial in self.trials], [self.source])

    @property
    def label(self) -> str:
        """Short name for progress lines."""
        dims = self.trials[0].dims
        return f"{self.trials[0].model.name} b{dims.batch} {dims.label}".rstrip()


def split_blocks(planned: Sequence[PlannedTrial]) -> list[Block]:
    """Return the blocks of the trials that can run, in order; each trial is in exactly one."""
    sources = {entry.trial.id: entry.source for entry in planned}
    groups = ensemble.group_trials([entry.trial for entry in planned if not entry.refusal])
    return [Block(tuple(group), sources[group[0].id]) for group in groups]


def find_anchor(planned: Sequence[PlannedTrial]) -> PlannedTrial | None:
    """Return the trial repeated on every device: the reference of the study's first block; None without a block."""
    trial = next((ensemble.choose_reference(block.trials, None) for block in split_blocks(planned)), None)
    return next((entry for entry in planned if entry.trial == trial), None)


# A block's process from outside: its request, its start on this host and its end.

BLOCK_FILE, REQUEST_FILE = "block.json", "request.toml"
SHUTDOWN_TIMEOUT_S = 10.0  # grace period after an interrupt


def start_process(
    folder: Path, study: Study, selection: TrialSelection, place: Place, *, retry_failed: bool
) -> RunningBlock:
    """Start measuring the selection at the place, into the folder, which may already hold some of it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / REQUEST_FILE, replace(study, device=place.device).to_toml())
    order = {
        "schema": SCHEMA, "study": REQUEST_FILE, "sources": list(selection.sources), "trials": sorted(selection.trials),
        "cores": list(place.cores), "retry_failed": retry_failed,
    }  # fmt: skip
    write_json(folder / BLOCK_FILE, order)
    write_bytes(folder / LOG_FILE, b"")
    return place.host.begin(folder, place) if place.host else BlockProcess(folder, place)


class BlockProcess(RunningBlock):
    """A block's process on this host."""

    def __init__(self, folder: Path, place: Place) -> None:
        super().__init__(folder, place)
        self.process = start_block(folder, place.env)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        end_process(self.process)


def start_block(folder: Path, env: Mapping[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Start the process that measures the folder's request; it dies with its caller."""
    write_json(folder / BLOCK_FILE, {**read_json(folder / BLOCK_FILE), "driver": os.getpid()})
    with open(folder / LOG_FILE, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dyno.devices.blocks", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **env}, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process; kill it if it doesn't end."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(SHUTDOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# A block's process from inside: confined to its place, it measures the trials into a separate run folder.


def main(folder: Path) -> int:
    """Measure the trials requested in the folder's block.json that the folder lacks; return the exit code."""
    order: dict[str, Any] = read_json(folder / BLOCK_FILE)
    system.die_with_parent(order["driver"])
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    progress = Progress(console=Console(stderr=True, no_color=True, soft_wrap=True, force_terminal=False))
    try:
        study, selection = Study.from_toml(folder / order["study"]), TrialSelection(order["trials"], order["sources"])
        execute(study, folder, progress, retry_failed=order["retry_failed"], only=selection)
    except UserError as e:
        print(e, file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
