"""One file of a run folder, read back; what is wrong with it becomes a line of `problems`, and the rest is shown."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.analysis.records.arrays import read_samples
from dyno.analysis.records.shapes import JOB, SETTINGS, wrong
from dyno.worker.record import Record, check_schema, read_json, read_record
from dyno.worker.spec import PRECISIONS, Artifact, UserError, check_known, from_json

BLOCKS = "blocks"  # a study on several devices has the trials of a block in its own folder until the block ends


def trials_in(run: Path) -> list[Path]:
    """Return the folders of the run's trials; OSError where the user may not list them."""
    return sorted([*(run / "trials").iterdir(), *run.glob(f"{BLOCKS}/*/trials/*")])


def read_table(path: Path, problems: list[str], shape: dict[str, Any]) -> dict[str, Any] | None:
    """Read the JSON object in the file, with values of the types in `shape`; None without one and if it is damaged."""
    try:
        data = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        problems.append(f"{path} can't be read ({e}); it is left out")
        return None
    try:
        check_schema(path, data)
    except UserError as e:
        problems.append(str(e))
        return None
    if place := wrong(data, shape):
        problems.append(f"{path} is damaged ({place!r} is of another type than Dyno writes); it is left out")
        return None
    return data


def read_round(folder: Path, problems: list[str]) -> Record | None:
    """Read the record in the folder; None without one, and where it is damaged."""
    try:
        return read_record(folder)
    except UserError as e:
        problems.append(str(e))
    except OSError as e:
        problems.append(f"{folder / 'record.json'} can't be read ({e}); it is left out")
    return None


def read_settings(text: str) -> dict[str, Any]:
    """Parse a study.toml as a table; empty where it can't be read or isn't in Dyno's form."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    return {} if wrong(table, SETTINGS) else table


def read_job(path: Path, problems: list[str]) -> tuple[dict[str, Any] | None, Artifact | None]:
    """Read the job as stored, and the file that it runs."""
    stored = read_table(path, problems, JOB)
    if stored is None:
        return None, None
    job = _without_nulls(stored)
    try:
        ran = from_json(Artifact, job["artifact"]) if job.get("artifact") else None
        trial = job["trial"]
        _ = trial["model"]["name"], trial["backend"], trial["precision"]
        check_known("precision", trial["precision"], PRECISIONS)
        _ = trial["dims"]["batch"], trial["dims"]["height"], trial["dims"]["width"]
    except (KeyError, TypeError):
        problems.append(f"{path} describes no trial; it is left out")
        return None, None
    except UserError as e:
        problems.append(f"{path} is damaged ({e}); it is left out")
        return None, None
    return job, ran


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """Return the object without keys whose value is null, at any depth: null means the same as a missing key."""
    kept = {key: value for key, value in data.items() if value is not None}
    return {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in kept.items()}


def measured(folder: Path, record: Record) -> tuple[Record, dict[str, np.ndarray] | None]:
    """Return the record and its samples (None: not read).

    Where the measurements can't be read any more, the record is of a failure.
    """
    if record.status != "ok":
        return record, None
    samples, damaged = read_samples(folder)
    if not damaged:
        return record, samples
    reason = f"{damaged} is damaged; the same `dyno run` measures this round again"
    return replace(record, status="failed", stage="", reason=reason), {}
