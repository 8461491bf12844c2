"""Reader of a run's files: records, arrays and notes; one clear line for damaged files."""

from __future__ import annotations

import io
import stat
import tomllib
import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from dyno.worker.record import Record, check_schema, read_json, read_record
from dyno.worker.spec import PRECISIONS, Job, T, UserError, check_known, from_json

# Reader of npz files, three times as fast as `numpy.load`, which parses every array's header as Python source. A run
# folder has thousands of small arrays with few different headers, so parsed headers are cached.

NPY_MAGIC = b"\x93NUMPY"
NUMERIC_KINDS = "fiub"  # NumPy kinds of real numbers
TEXT_ARRAYS = ("gpu_name", "gpu_uuid")  # text arrays in telemetry.npz
LAYERS_ARRAY = "layers"  # array of samples.npz with a row per sample
# A classifier's answers: NumPy kinds and number of axes.
RESULT_CLASSES = {
    "topk_index": ("iu", 2),
    "topk_score": ("f", 2),
    "label": ("iu", 1),
    "sample": ("iu", 1),
    "classes": ("U", 1),
}


def read_npz(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file (only `names`, or all), read-only; each member's checksum is verified.

    Raises OSError if the file can't be read. Raises ValueError if it is damaged, holds Python objects, or declares an
    unpacked size above the file's, which Dyno never writes.
    """
    arrays = {}
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(info.file_size for info in archive.infolist()) > status.st_size:
                raise ValueError(f"{path} would unpack to more than its size")
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if names is None or name in names:
                    arrays[name] = _parse_array(archive.read(info))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    return arrays


def _parse_array(data: bytes) -> np.ndarray:
    if data[:6] != NPY_MAGIC:
        raise ValueError("a member of the npz file is not an array")
    length_size = 2 if data[6] == 1 else 4
    start = 8 + length_size + int.from_bytes(data[8 : 8 + length_size], "little")
    shape, fortran, dtype = _parse_header(data[:start])
    if dtype.hasobject:
        raise ValueError("the npz file holds Python objects, which are never loaded")
    array = np.frombuffer(data, dtype, offset=start)
    return array.reshape(shape, order="F" if fortran else "C")


def read_samples(folder: Path) -> tuple[dict[str, np.ndarray], str]:
    """Read a round's samples; return them with the name of an unreadable array file, else "".

    A missing file isn't an error. samples.npz is read whole; of outputs.npz, perhaps large, only the directory.
    """
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for name, names in (("samples.npz", None), ("outputs.npz", ())):
        try:
            arrays[name] = read_npz(folder / name, names)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return {}, name
    samples = arrays.get("samples.npz", {})
    is_ok = all(a.dtype.kind in NUMERIC_KINDS and a.ndim == 1 + (name == LAYERS_ARRAY) for name, a in samples.items())
    return (samples, "") if is_ok else ({}, "samples.npz")


def read_numbers(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Read the columns (of equal length) and single numbers of telemetry.npz, without its texts.

    ValueError for any other content. See `read_npz`.
    """
    arrays = {name: a for name, a in read_npz(path, names).items() if name not in TEXT_ARRAYS}
    lengths = {len(a) for a in arrays.values() if a.ndim}
    if len(lengths) > 1 or any(a.dtype.kind not in NUMERIC_KINDS or a.ndim > 1 for a in arrays.values()):
        raise ValueError(f"{path} is damaged: its arrays are not columns of numbers")
    if arrays.get("epoch", np.empty(())).ndim or (arrays and not arrays.get("at", np.empty(0)).ndim):
        raise ValueError(f"{path} is damaged: its times are not numbers")
    return arrays


def read_answers(path: Path) -> dict[str, np.ndarray]:
    """Read a classifier's answers in outputs.npz, as far as present; ValueError if they don't fit each other.

    See `read_npz`.
    """
    arrays = read_npz(path, RESULT_CLASSES)
    rows = {len(a) for name, a in arrays.items() if a.ndim and name != "classes"}
    if len(rows) > 1 or any((a.dtype.kind not in RESULT_CLASSES[name][0], a.ndim) != (False, RESULT_CLASSES[name][1])
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


# Single files of a run folder; faults become a line of `problems`, and the rest is shown.

BLOCKS_DIR = "blocks"  # trials of a block until the block ends


def trials_in(run: Path) -> list[Path]:
    """Return the folders of the run's trials; OSError if listing is not permitted."""
    return sorted([*(run / "trials").iterdir(), *run.glob(f"{BLOCKS_DIR}/*/trials/*")])


def read_table(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Read any JSON object; None if the file is missing or unreadable."""
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
    return data


def read_round(folder: Path, problems: list[str]) -> Record | None:
    """Read the record in the folder; None if it is missing or damaged."""
    try:
        return read_record(folder)
    except UserError as e:
        problems.append(str(e))
    except OSError as e:
        problems.append(f"{folder / 'record.json'} can't be read ({e}); it is left out")
    return None


@dataclass(frozen=True)
class TypedSettings:
    """Settings of a study.toml that tables read, typed because foreign folders may hold values of any type."""

    budget: dict[str, float] = field(default_factory=dict)
    limit: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    equivalent: float = 0.0
    rounds: int = 0
    until: str = ""
    sizes: tuple[str | int, ...] = ()


def read_settings(text: str) -> dict[str, Any]:
    """Parse a study.toml as a table; empty if it can't be read or isn't in Dyno's form."""
    try:
        table = tomllib.loads(text)
        _read_fields(TypedSettings, table)
    except (tomllib.TOMLDecodeError, RecursionError, UserError):
        return {}
    return table


def read_job(path: Path, problems: list[str]) -> Job | None:
    """Read the job of a trial; None if it is missing or damaged."""
    job = read_stored(path, Job, problems)
    if job is None:
        return None
    if job.trial is None:
        problems.append(f"{path} describes no trial; it is left out")
        return None
    try:
        check_known("precision", job.trial.precision, PRECISIONS)
    except UserError as e:
        problems.append(f"{path} is damaged ({e}); it is left out")
        return None
    return job


def read_stored(path: Path, kind: type[T], problems: list[str] | None = None) -> T | None:
    """Read a JSON object as the dataclass `kind`; None if it is missing or damaged.

    Keys that are no fields of the dataclass, such as `schema`, are ignored.
    """
    problems = [] if problems is None else problems
    table = read_table(path, problems)
    if table is None:
        return None
    try:
        return _read_fields(kind, _without_nulls(table))
    except UserError as e:
        problems.append(f"{path} is damaged ({e}); it is left out")
        return None


def _read_fields(kind: type[T], table: dict[str, Any]) -> T:
    names = {f.name for f in fields(cast(Any, kind))}
    return from_json(kind, {key: value for key, value in table.items() if key in names})


def _without_nulls(data: Any) -> Any:
    """Remove keys with null values, at any depth: null means the same as a missing key."""
    if isinstance(data, list):
        return [_without_nulls(item) for item in data]
    if isinstance(data, dict):
        return {key: _without_nulls(value) for key, value in data.items() if value is not None}
    return data


def read_measured(folder: Path, record: Record) -> tuple[Record, dict[str, np.ndarray] | None]:
    """Return the record and its samples (None: not read); unreadable measurements turn the record into a failure."""
    if record.status != "ok":
        return record, None
    samples, damaged_file = read_samples(folder)
    if not damaged_file:
        return record, samples
    reason = f"{damaged_file} is damaged; the same `dyno run` measures this round again"
    return replace(record, status="failed", stage="", reason=reason), {}
