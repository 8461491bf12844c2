"""Cache of decoded data sets on disk, keyed by everything that shapes them; complete ones are renamed into place."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.data import rows
from dyno.data.decode import count_threads
from dyno.data.rows import Source
from dyno.worker.inputs.specs import load_array
from dyno.worker.record import lock, read_json, write_json, write_text
from dyno.worker.spec import UserError

CACHE_VERSION = 3  # version of the data set folder; part of every key
UNSURE_NS = (
    2_000_000_000  # a file changed this shortly before it was hashed may have changed again with the same time stamp
)
HASH_CHUNK = 32  # files hashed per task, so that threads rarely wait for the interpreter's lock
NAMES_FILE = "names.json"
META_TYPES = {
    "classes": list,
    "splits": dict,
    "count": int,
    "sha256": str,
    "files": list,
    "bytes": int,
    "unreadable": list,
}
STALE_S = 7 * 24 * 3600  # time for which a killed run can be resumed


@dataclass(frozen=True)
class Content:
    """Content of a data set to be stored.

    `rows` yields an image, or the reason if unreadable, for each row from an index on. `columns` has an array with an
    entry per row for each further file, including `labels`. `check` takes the reasons by row; it raises, or returns
    lines for meta.json. `make_extras` makes further JSON files, by name, from the kept rows. `names` of photographs
    (empty: unnamed) are for people and change no hash.
    """

    rows: Source
    shape: tuple[int, ...]
    columns: dict[str, np.ndarray]
    splits: dict[str, np.ndarray]
    meta: dict[str, Any]
    check: Callable[[dict[int, str]], list[str]] = lambda unreadable: list(unreadable.values())
    make_extras: Callable[[np.ndarray], dict[str, Any]] = lambda kept: {}
    names: tuple[str, ...] = ()


def make_key(*parts: Any) -> str:
    """Return the key of a data set with these parts: the beginning of a sha256 over their JSON."""
    return hashlib.sha256(json.dumps([CACHE_VERSION, *parts], sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def hash_code() -> str:
    """Return the sha256 of Dyno's readers of images and labels, as other versions may read files differently."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def find_folder(cache: Path, key: str) -> Path | None:
    """Find the data set's folder; None if it is missing, or if a file is missing or truncated."""
    folder = Path(cache) / key
    try:
        meta = read_meta(folder)
        is_valid = all(isinstance(meta[key], kind) for key, kind in META_TYPES.items())
        is_valid = is_valid and (folder / "images.npy").stat().st_size == meta["bytes"]
        is_valid = is_valid and all((folder / name).exists() for name in meta["files"])
        is_valid = is_valid and _has_numbers(folder / "labels.npy", meta["count"])
        splits = meta["splits"].items() if is_valid else ()
        is_valid = is_valid and all(_has_numbers(folder / f"{name}.npy", size, meta["count"]) for name, size in splits)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if is_valid else None


def _has_numbers(path: Path, size: int, limit: int | None = None) -> bool:
    """Return whether the file holds `size` integers, each from 0 to `limit` - 1 if given."""
    array = load_array(path)
    is_valid = array.shape == (size,) and array.dtype.kind == "i"
    return is_valid and (limit is None or not size or bool(array.min() >= 0 and array.max() < limit))


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the data set's meta.json."""
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return meta


def write_folder(cache: Path, key: str, content: Content) -> Path:
    """Store the data set under its key and return its folder; raise `UserError` on a full disk or an unwritable cache.

    Only one process writes at a time, and others wait for its result. A killed run is resumed.
    """
    byte_count = len(content.columns["labels"]) * int(np.prod(content.shape))
    with _explain_file_errors(cache, byte_count):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        part_folder = cache / f".part-{key}"
        with lock(part_folder / "lock"):  # removed together with the folder
            try:
                target = find_folder(cache, key) or _make_folder(part_folder, cache / key, content, byte_count)
            except OSError:
                shutil.rmtree(part_folder, ignore_errors=True)
                raise
            shutil.rmtree(part_folder, ignore_errors=True)
            return target


def _make_folder(part_folder: Path, target: Path, content: Content, byte_count: int) -> Path:
    folder = part_folder / "data"
    folder.mkdir(exist_ok=True)
    stored_bytes = sum(path.stat().st_size for path in folder.iterdir())
    if shutil.disk_usage(part_folder).free < byte_count - stored_bytes:
        raise OSError(errno.ENOSPC, "")
    _fill_folder(folder, part_folder / "journal", content)
    if target.exists():  # damaged
        target.rename(folder.with_name("damaged"))
    return folder.rename(target)


def _fill_folder(folder: Path, journal: Path, content: Content) -> None:
    count = len(content.columns["labels"])
    state = rows.write_rows(folder / "images.npy", journal, content.shape, count, content.rows)
    sha, unreadable = state.sha, state.unreadable
    lines = content.check(unreadable) if unreadable else []
    kept_rows = np.array([i for i in range(count) if i not in unreadable], np.int64)
    new_index = np.full(count, -1, np.int64)
    new_index[kept_rows] = np.arange(len(kept_rows))
    splits = {name: split[split >= 0] for name, index in content.splits.items() if len(split := new_index[index])}
    files = ["images.npy"]
    for name, array in {**{name: column[kept_rows] for name, column in content.columns.items()}, **splits}.items():
        sha.update(f"{name} {array.shape}".encode() + array.astype("<i8").tobytes())
        np.save(folder / f"{name}.npy", array)
        files.append(f"{name}.npy")
    for name, value in content.make_extras(kept_rows).items():
        text = json.dumps(value)
        sha.update(f"{name} {text}".encode())
        (folder / name).write_text(text, encoding="utf-8")
        files.append(name)
    if content.names:
        write_json(folder / NAMES_FILE, {"names": [content.names[i] for i in kept_rows]})
    meta = {
        **content.meta,
        "sha256": sha.hexdigest(),
        "count": len(kept_rows),
        "splits": {name: len(index) for name, index in splits.items()},
        "unreadable": lines,
        "decode_s": state.seconds / max(state.kept, 1),
        "files": files,
        "bytes": (folder / "images.npy").stat().st_size,
    }
    write_json(folder / "meta.json", meta)


def _remove_abandoned(cache: Path) -> None:
    """Remove parts left by killed processes if they have not changed for a week."""
    for part_folder in cache.glob(".part-*"):
        with suppress(OSError):
            last_change = max(path.stat().st_mtime for path in (part_folder, *part_folder.rglob("*")))
            if time.time() - last_change > STALE_S:
                shutil.rmtree(part_folder, ignore_errors=True)


@contextmanager
def _explain_file_errors(cache: Path, byte_count: int = 0) -> Iterator[None]:
    """Turn file system errors of the cache into one line for the user."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            line = f"the decoded images need {byte_count / 1e6:,.0f} MB in {cache}, and the disk has too little room"
            raise UserError(f"{line}; free some, or choose another cache folder") from e
        raise UserError(f"the image cache {cache} can't be written: {e.strerror or e}") from e


def hash_contents(paths: list[Path], cache: Path, folder: Path) -> list[str]:
    """Return the sha256 of every file; "" for an unreadable file.

    An index keeps 50,000 images cheap: a file with unchanged inode, size, modification and change time is not read
    again, unless it changed less than two seconds before it was hashed.
    """
    index = Path(cache) / "hashes" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]}.json"
    cached = _read_index(index)
    parts = [paths[first : first + HASH_CHUNK] for first in range(0, len(paths), HASH_CHUNK)]
    with ThreadPoolExecutor(count_threads()) as pool:
        entry_lists = pool.map(lambda part: [_make_entry(path, cached.get(str(path))) for path in part], parts)
        entries = [entry for part in entry_lists for entry in part]
    # Entries of other files stay, as a folder may be listed with or without its training images.
    unreadable = {str(path) for path, entry in zip(paths, entries, strict=True) if not entry}
    new_entries = {str(path): entry for path, entry in zip(paths, entries, strict=True) if entry}
    new_entries = {**{path: entry for path, entry in cached.items() if path not in unreadable}, **new_entries}
    if new_entries != cached:
        with _explain_file_errors(Path(cache)), lock(index.with_suffix(".lock")):
            write_text(index, json.dumps(new_entries))  # without indentation: json writes it ten times as fast
    return [entry[-1] if entry else "" for entry in entries]


def _read_index(path: Path) -> dict[str, list[Any]]:
    """Read the index's entries that have valid types: see `_make_entry`."""
    try:
        entries = read_json(path)
    except (OSError, ValueError):
        return {}
    kinds = [*5 * [int], str]
    return {name: entry for name, entry in entries.items() if isinstance(entry, list) and [*map(type, entry)] == kinds}


def _make_entry(path: Path, cached: list[Any] | None) -> list[Any] | None:
    """Return [inode, size, mtime, ctime, time of hashing, sha256] of a file, times in ns; None if unreadable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        state = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        if cached and cached[:4] == state and max(state[2:]) + UNSURE_NS < cached[4]:
            return cached
        hash_time = time.time_ns()
        with open(path, "rb") as f:
            return [*state, hash_time, hashlib.file_digest(f, "sha256").hexdigest()]
    except OSError:
        return None
