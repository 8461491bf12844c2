"""What was measured: a record is a list of self-describing values and says how the job ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dyno.worker.spec import SCHEMA, Artifact, UserError, from_json, to_json

STATUSES = ("ok", "skipped", "failed", "oom", "timeout", "crashed")
TIMING = "DYNO_TIMING"  # the variable that tells a job where builders keep timings between jobs; unset: nowhere


@dataclass(frozen=True)
class Measurement:
    """One value, or the name of an array of raw samples in samples.npz.

    `tag` names what was measured (latency, throughput, load, first_call, build, file_size, parameters, peak_memory…),
    `unit` is SI (s, B, 1/s, 1), `hint` tells a printer how to show it (duration, bytes, rate, count, percentage),
    `boundary` is model, all or throughput, `clock` is host or gpu, `stopped` says what ended the sampling.
    """

    tag: str
    unit: str
    hint: str
    value: float | None = None
    samples: str = ""
    boundary: str = ""
    clock: str = ""
    stopped: str = ""


@dataclass(frozen=True)
class Record:
    """How one job ended and all that it measured; written once, never changed.

    `stage` is where it was when it ended, `reason` one line that says why it isn't ok. `system` is the machine and
    versions, `facts` what the engine says of itself (layers by type, nodes per provider, options taken, hashes).
    """

    status: str
    stage: str = ""
    reason: str = ""
    trial: str = ""
    round: int = 0
    started: str = ""
    seconds: float = 0.0
    measurements: tuple[Measurement, ...] = ()
    warnings: tuple[str, ...] = ()
    system: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    artifact: Artifact | None = None
    schema: int = SCHEMA

    def value(self, tag: str, boundary: str = "") -> float | None:
        """The single value measured under this tag and boundary, or None."""
        found = (m.value for m in self.measurements if m.tag == tag and m.boundary == boundary)
        return next(found, None)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, flushed to disk and renamed into place at the end: a reader sees the whole new one or none
    of it, and an error leaves what was there."""
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


def write_json(path: Path, value: Any) -> None:
    """Store the value as JSON; see `replacing`."""
    with replacing(path) as f:
        f.write(json.dumps(value, indent=1).encode())


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Store arrays by name as an npz file; see `replacing`."""
    with replacing(path) as f:
        np.savez(f, **arrays)


def write_record(folder: Path, record: Record) -> None:
    """Store the record as FOLDER/record.json, atomically."""
    write_json(folder / "record.json", to_json(record))


def read_record(folder: Path) -> Record | None:
    """The record in the folder, or None when the job left none; one that can't be read is a `UserError`."""
    try:
        text = (folder / "record.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return from_json(Record, json.loads(text))
    except ValueError as e:
        raise UserError(f"{folder / 'record.json'} is damaged ({e}); remove that folder to measure it again") from e
