"""Read a run's files: records, arrays and notes, with one clear line for what is damaged."""

from __future__ import annotations

import io
import stat
import tomllib
import zipfile
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.facts.json_values import LARGEST, fits
from dyno.worker.record import Record, check_schema, read_json, read_record
from dyno.worker.spec import PRECISIONS, Job, UserError, check_known, from_json

# Reading npz files three times as fast as `numpy.load`, which parses every array's header as Python source.
#
# A run folder has thousands of small arrays with a handful of different headers, so parsed headers are remembered.

MAGIC = b"\x93NUMPY"
NUMBERS = "fiub"  # kinds of NumPy's types that are real numbers
TEXTS = ("gpu_name", "gpu_uuid")  # in telemetry.npz, besides its numbers
LAYERS = "layers"  # the one array of samples.npz with a row for each sample
# A classifier's answers: what kinds of types they have, and how many axes.
ANSWERS = {
    "topk_index": ("iu", 2),
    "topk_score": ("f", 2),
    "label": ("iu", 1),
    "sample": ("iu", 1),
    "classes": ("U", 1),
}


def read_npz(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file (only `names`, or all), read-only; each member's checksum is verified.

    Raises OSError when the file can't be read and ValueError when it is damaged, holds Python objects, or declares a
    larger unpacked size than its own, which no file that Dyno wrote does.
    """
    arrays = {}
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is not a regular file")
    try:
        with zipfile.ZipFile(path) as stored:
            if sum(info.file_size for info in stored.infolist()) > about.st_size:
                raise ValueError(f"{path} would unpack to more than it is")
            for info in stored.infolist():
                name = info.filename.removesuffix(".npy")
                if names is None or name in names:
                    arrays[name] = _parse_array(stored.read(info))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    return arrays


def _parse_array(data: bytes) -> np.ndarray:
    if data[:6] != MAGIC:
        raise ValueError("a member of the npz file is not an array")
    wide = 2 if data[6] == 1 else 4
    start = 8 + wide + int.from_bytes(data[8 : 8 + wide], "little")
    shape, fortran, dtype = _parse_header(data[:start])
    if dtype.hasobject:
        raise ValueError("the npz file holds Python objects, which are never loaded")
    flat = np.frombuffer(data, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran else "C")


def read_samples(folder: Path) -> tuple[dict[str, np.ndarray], str]:
    """Read a round's samples; return them with the name of an unreadable array file, "" without one.

    A missing file isn't an error. samples.npz is read whole; of outputs.npz, which may be large, only the directory.
    """
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for name, only in (("samples.npz", None), ("outputs.npz", ())):
        try:
            arrays[name] = read_npz(folder / name, only)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return {}, name
    samples = arrays.get("samples.npz", {})
    whole = all(a.dtype.kind in NUMBERS and a.ndim == 1 + (name == LAYERS) for name, a in samples.items())
    return (samples, "") if whole else ({}, "samples.npz")


def read_numbers(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Read the columns of telemetry.npz, of one length, and its single numbers, without its texts.

    ValueError for any other content. See `read_npz`.
    """
    arrays = {name: a for name, a in read_npz(path, names).items() if name not in TEXTS}
    lengths = {len(a) for a in arrays.values() if a.ndim}
    if len(lengths) > 1 or any(a.dtype.kind not in NUMBERS or a.ndim > 1 for a in arrays.values()):
        raise ValueError(f"{path} is damaged: its arrays are not columns of numbers")
    if arrays.get("epoch", np.empty(())).ndim or (arrays and not arrays.get("at", np.empty(0)).ndim):
        raise ValueError(f"{path} is damaged: its times are not numbers")
    return arrays


def read_answers(path: Path) -> dict[str, np.ndarray]:
    """Read a classifier's answers in outputs.npz, as far as they exist; ValueError where they don't belong together.

    See `read_npz`.
    """
    arrays = read_npz(path, ANSWERS)
    rows = {len(a) for name, a in arrays.items() if a.ndim and name != "classes"}
    if len(rows) > 1 or any((a.dtype.kind not in ANSWERS[name][0], a.ndim) != (False, ANSWERS[name][1])
                            for name, a in arrays.items()):  # fmt: skip
        raise ValueError(f"{path} is damaged: its arrays don't fit each other")
    return arrays


@lru_cache(maxsize=1024)
def _parse_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return tuple(shape), fortran, dtype


# What the settings, the notes and models.json have to look like, as far as tables read them: a folder from elsewhere
# may hold anything.

NUMBER = (int, float)
SETTINGS = {
    "budget": {"": NUMBER}, "limit": {"": str}, "reference": str, "equivalent": NUMBER, "rounds": int, "until": str,
    "sizes": [(str, int)],
}  # fmt: skip
PLACEMENT = {"place": str, "card": str, "lost": [str], "trials": [str]}
TIMED = {"place": str, "card": str, "alone": [NUMBER], "beside": [NUMBER], "ratios": [NUMBER]}
DEVICES_MEASURED = {"anchor": str, "side_by_side": bool, "equivalent": NUMBER, "devices": [TIMED]}
ROUTE_TRIED = {"route": str, "ratio": NUMBER, "outcome": str, "reason": str}
ATTEMPT = {"key": str, "model": str, "configuration": str, "batch": int, "routes": [ROUTE_TRIED]}
ROUTES_TRIED = {"attempts": [ATTEMPT]}
DROPPED_TRIALS = {"trials": [str], "is_over": bool}
# Notes of a run folder by their file: see `results.notes`.
DEVICES, ROUTES, FEWER_ROUNDS = "devices.json", "routes.json", "fewer-rounds.json"
NOTES: dict[str, dict[str, Any]] = {DEVICES: DEVICES_MEASURED, ROUTES: ROUTES_TRIED, FEWER_ROUNDS: DROPPED_TRIALS}
MODELS = {
    "models": [
        {
            "model": str,
            "size": str,
            "flops": NUMBER,
            "parameters": NUMBER,
            "file": str,
            "preprocess_guessed": bool,
            "size_guessed": bool,
            "images_unchecked": str,
        }
    ]
}


def wrong(data: Any, shape: Any, where: str = "") -> str:
    """Return the place where data has another type than its shape, or a number too large for a table; "" where it fits.

    Null is allowed, as is any key that the shape doesn't name.

    A shape is a type, a list with the shape of each item, or a table of shapes by key, "" for those of any key.
    """
    if data is None:
        return ""
    if isinstance(shape, dict):
        if not isinstance(data, dict):
            return where or "it"
        for key, item in data.items():
            expected = shape.get(key, shape.get(""))
            if expected is not None and (place := wrong(item, expected, key)):
                return place
        return ""
    if isinstance(shape, list):
        if not isinstance(data, list) or None in data:
            return where or "it"
        return next((place for item in data if (place := wrong(item, shape[0], where))), "")
    too_large = isinstance(data, int) and abs(data) >= LARGEST
    return where or "it" if too_large or not fits(data, shape) else ""


# One file of a run folder, read back; what is wrong with it becomes a line of `problems`, and the rest is shown.

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


def read_job(path: Path, problems: list[str]) -> Job | None:
    """Read the job of a trial; None without one, and where it is damaged."""
    stored = read_table(path, problems, {})
    if stored is None:
        return None
    try:
        job = from_json(Job, _without_nulls(stored))
        if job.trial is None:
            problems.append(f"{path} describes no trial; it is left out")
            return None
        check_known("precision", job.trial.precision, PRECISIONS)
    except UserError as e:
        problems.append(f"{path} is damaged ({e}); it is left out")
        return None
    return job


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
