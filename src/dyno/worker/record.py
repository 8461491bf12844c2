"""Records: a list of self-describing measurements, and the outcome of the job."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from dyno.worker.facts.job import Facts
from dyno.worker.inspection import Inspection
from dyno.worker.spec import SCHEMA, Artifact, UserError, from_json, shorten, to_json

STATUSES = ("ok", "skipped", "failed", "oom", "timeout", "crashed")
OUT_OF_MEMORY = "killed by the kernel because memory ran out"
CLOSE_STAGE = "close"  # stage of a trial's job that measures and closes the engine
KILLED_REASONS = ("killed by SIGKILL", "killed by SIGTERM")  # reasons of jobs ended by another program or a person
TIMING_VARIABLE = "DYNO_TIMING"  # environment variable: folder of the builders' shared timings; unset: none


@dataclass(frozen=True)
class Measurement:
    """One value, or the name of an array of raw samples in samples.npz.

    `tag` names the measured quantity (latency, throughput, load, first_call, build, file_size, parameters,
    peak_memory…), `unit` is SI (s, B, 1/s, 1), `hint` is the printer's format (duration, bytes, rate, count,
    percentage), `boundary` is model, all or throughput, `clock` is host or gpu, `stopped` is the reason that sampling
    ended.
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
    """The outcome and measurements of one job; written once, never changed.

    `stage` is the last stage, `reason` why the status isn't ok, in one line. `trial` is the trial's id, `started` in
    UTC (ISO 8601), `seconds` the whole job in its process. `system` describes the machine and versions, `facts` the
    engine and its timing; `artifact` is the file made, and `inspection` the result of inspecting a model.
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
    facts: Facts = field(default_factory=Facts)
    artifact: Artifact | None = None
    inspection: Inspection | None = None
    schema: int = SCHEMA

    @property
    def was_killed(self) -> bool:
        """Whether another program or a person ended the job, which is not the trial's fault."""
        return self.status == "crashed" and self.reason in KILLED_REASONS

    def value(self, tag: str, boundary: str = "") -> float | None:
        """Return the single value measured under this tag and boundary, or None."""
        values = (m.value for m in self.measurements if m.tag == tag and m.boundary == boundary)
        return next(values, None)


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; at the end of the block flush it to disk and rename it into place.

    A reader sees the whole new file or the previous one; an error keeps the previous file. A link of that name is
    replaced and its target kept.
    """
    part_path = path.with_name(path.name + ".part")
    part_path.unlink(missing_ok=True)  # left by a killed process, or a link
    try:
        with open(os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part_path, path)
    except OSError as e:
        with suppress(OSError):  # useless on a full disk
            part_path.unlink(missing_ok=True)
        e.filename = e.filename or str(path)
        raise


LOCK_FILE = "lock"  # file held while working in a folder


@contextmanager
def lock(path: Path, on_busy: Callable[[str], None] = lambda owner: None) -> Iterator[None]:
    """Hold the lock file; if another process has it, call `on_busy` with its id, then wait unless `on_busy` raises.

    The lock ends with the process, however it ends. The folder may be removed with it: a waiting process then locks a
    new file.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or not (path.is_file() or not path.exists()):  # a folder from elsewhere may hold anything
            raise UserError(f"{path} is not a regular file, so it can't be locked; remove it")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # folder removed meanwhile
            continue
        with open(descriptor, "a+") as f:
            if os.fstat(descriptor).st_nlink > 1:  # writing would overwrite its other names
                raise UserError(f"{path} is a hard link to another file, so it can't be locked; remove it")
            is_mine = _try_lock(f)
            if not is_mine:
                time.sleep(0.02)  # `lock_owner` holds a file briefly
                is_mine = _try_lock(f)
            if not is_mine:
                f.seek(0)
                on_busy(f.read(20).strip() or "unknown")
                fcntl.flock(f, fcntl.LOCK_EX)
            if not _is_at(f, path):
                continue
            f.truncate(0)
            f.write(str(os.getpid()))
            f.flush()
            yield
            return


def _try_lock(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_owner(path: Path) -> str:
    """Return the id of the process that holds the lock; "" without one or if the file can't be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(descriptor) as f:
        try:
            return "" if _try_lock(f, fcntl.LOCK_SH) else f.read(20).strip() or "unknown"
        except OSError:  # file systems without locks
            return ""


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Store the bytes; see `replace_file`."""
    with replace_file(path) as f:
        f.write(content)


def write_text(path: Path, text: str) -> None:
    """Store the text as UTF-8, with escapes for characters outside UTF-8; see `replace_file`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Store the value as JSON; see `replace_file`."""
    write_bytes(path, json.dumps(value, indent=1).encode())


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in the text; raise a ValueError with the reason if it has none.

    Brackets that are nested too deeply raise it too.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise OSError if it can't be read, ValueError if it holds no object."""
    return parse_json(read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Return the file's content; raise a ValueError for a pipe or a device, which would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    return path.read_bytes()


def check_regular(path: Path, noun: str) -> Path:
    """Return the path; raise a `UserError` for a pipe, a socket or a device, which would block."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{noun} {path} is not a regular file; give a file")
    return path


def refuse_pointer(path: Path, noun: str) -> None:
    """Raise a `UserError` if Git LFS has left a pointer in place of the file."""
    mark = b"version https://git-lfs"
    with open(path, "rb") as file:
        if file.read(len(mark)) == mark:
            raise UserError(f"{path} is a Git LFS pointer, not the {noun} itself; fetch it with git lfs pull")


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Raise a `UserError` if a folder in `names`, or one below it, is a symbolic link.

    Files would be written through the link into another place.
    """
    for folder_path in (folder / name for name in names):
        subfolders = (Path(parent, path) for parent, folders, _ in os.walk(folder_path) for path in folders)
        for path in (folder_path, *subfolders):
            if path.is_symlink():
                raise UserError(f"{path} is a symbolic link, and nothing is written through one; remove it")


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Store arrays by name as an npz file; see `replace_file`."""
    import numpy as np  # slow to import: a third of the start of `dyno --help`

    with replace_file(path) as f:
        np.savez(f, **arrays)


def write_record(folder: Path, record: Record) -> None:
    """Store the record as FOLDER/record.json, atomically.

    A field that `read_record` would refuse is a fault of Dyno or a plug-in: it is left out, and the status becomes
    failed.
    """
    data: dict[str, Any] = to_json(record)
    faults = {name: fault for name, item in data.items() if (fault := _find_fault(name, item))}
    if faults:
        reason = f"a fault of Dyno or of a plug-in, please report it: {'; '.join(faults.values())}"
        data = {**{name: item for name, item in data.items() if name not in faults}, "status": "failed"}
        data["reason"] = f"{record.reason}; {reason}" if data.get("reason") else reason
    write_json(folder / "record.json", data)


def _find_fault(name: str, item: Any) -> str:
    """Return why a record with this field value couldn't be read back; "" if it can."""
    try:
        from_json(Record, json.loads(json.dumps({"status": "ok", name: item})))
    except UserError as e:
        return str(e)
    except (TypeError, ValueError) as e:  # not a JSON value
        return f"Record.{name}: {e}"
    return ""


def check_schema(path: Path, data: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a file written by an older or a newer Dyno."""
    schema = data.get("schema", SCHEMA)
    if schema == SCHEMA:
        return
    if isinstance(schema, int) and schema < SCHEMA:
        raise UserError(
            f"{path} was written by an older Dyno (schema {schema}, this one reads {SCHEMA}); measure into a new folder"
        )
    raise UserError(f"{path} was written by a newer Dyno (schema {schema}, this one reads {SCHEMA}); update Dyno")


class DamagedRecord(UserError):
    """A record that was cut short or is invalid; `description` describes the damage without advice."""

    def __init__(self, path: Path, reason: object) -> None:
        self.description = f"{path} is damaged ({reason})"
        super().__init__(f"{self.description}; the same `dyno run` measures this round again")


def read_record(folder: Path) -> Record | None:
    """Return the record in the folder; None if the job left none.

    Raise `DamagedRecord` if it can't be read, another `UserError` if another version of Dyno wrote it.
    """
    path = folder / "record.json"
    try:
        data = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise DamagedRecord(path, e) from e
    check_schema(path, data)
    try:
        record = from_json(Record, data)
    except UserError as e:
        raise DamagedRecord(path, e) from e
    if record.status not in STATUSES:
        raise DamagedRecord(path, f"its status is {record.status!r}")
    return record


def describe_close(error: str) -> str:
    """Return the warning about an engine that failed while closing."""
    return f"the engine failed as it was closed, after everything was measured: {error}"


def one_line(e: BaseException) -> str:
    """Return an exception's first line, joined with the next line while it ends with a colon.

    Some libraries begin a message with the place in their code.
    """
    lines: list[str] = []
    for line in (line.strip() for line in str(e).splitlines() if line.strip()):
        lines.append(line)
        if not line.endswith(":"):
            break
    return shorten(" ".join(lines)) or "(no message)"
