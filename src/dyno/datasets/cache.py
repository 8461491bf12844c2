"""Decoded data sets on disk, found by what went into them: written beside, then renamed into place whole."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.datasets.decode import Row
from dyno.worker.spec import UserError

FORMAT = 1  # of the data set folder; part of every key
UNSURE_NS = (
    2_000_000_000  # a file changed this shortly before it was hashed may have changed again with the same time stamp
)
STALE_S = 24 * 3600


@dataclass(frozen=True)
class Content:
    """What a data set is made of. `rows` yields an image, or why it can't be read, for every label.

    `check` is told the reasons by row; it raises, or returns them as the lines that meta.json lists.
    """

    rows: Iterable[Row]
    shape: tuple[int, ...]
    labels: np.ndarray
    splits: dict[str, np.ndarray]
    meta: dict[str, Any]
    check: Callable[[dict[int, str]], list[str]] = lambda unreadable: list(unreadable.values())


def key_of(*parts: Any) -> str:
    """Name of the data set made from these: a sha256 over their JSON."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True).encode()).hexdigest()[:24]


def find(cache: Path, key: str) -> Path | None:
    """The data set's folder, or None when it has to be made, or made again because a file is missing or cut short."""
    folder = Path(cache) / key
    try:
        found = meta(folder)
        whole = (folder / "images.npy").stat().st_size == found["bytes"]
        whole = whole and all((folder / f"{name}.npy").exists() for name in ("labels", *found["splits"]))
    except (OSError, ValueError, KeyError):
        return None
    return folder if whole else None


def meta(folder: Path) -> dict[str, Any]:
    """The data set's meta.json."""
    found: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return found


def write(cache: Path, key: str, content: Content) -> Path:
    """Store the data set under its key and return its folder; raises `UserError` on a full disk or an unwritable cache.

    Two processes may do this at once: each writes its own copy, the first to be done stays.
    """
    needed = len(content.labels) * int(np.prod(content.shape))
    with _explained(cache, needed):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        if shutil.disk_usage(cache).free < needed:
            raise OSError(errno.ENOSPC, "")
        part = cache / f".part-{key}-{uuid.uuid4().hex}"
        part.mkdir()
        try:
            _fill(part, content)
            return _into_place(part, cache / key, cache)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _fill(part: Path, content: Content) -> None:
    sha = hashlib.sha256()
    unreadable = _write_images(part / "images.npy", content, sha)
    lines = content.check(unreadable) if unreadable else []
    kept = np.array([i for i in range(len(content.labels)) if i not in unreadable], np.int64)
    new_place = np.full(len(content.labels), -1, np.int64)
    new_place[kept] = np.arange(len(kept))
    splits = {name: place[place >= 0] for name, index in content.splits.items() if len(place := new_place[index])}
    for name, array in {"labels": content.labels[kept], **splits}.items():
        sha.update(f"{name} {array.shape}".encode() + array.astype("<i8").tobytes())
        np.save(part / f"{name}.npy", array)
    about = {
        **content.meta,
        "sha256": sha.hexdigest(),
        "count": len(kept),
        "splits": {name: len(index) for name, index in splits.items()},
        "unreadable": lines,
        "bytes": (part / "images.npy").stat().st_size,
    }
    with open(part / "meta.json", "w", encoding="utf-8") as f:
        json.dump(about, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def _write_images(path: Path, content: Content, sha: Any) -> dict[int, str]:
    """Append the images that can be read; returns why the others can't, by row. Plain writes, because writing to mapped
    memory on a full disk would kill the process."""
    unreadable: dict[int, str] = {}
    kept = 0
    with open(path, "wb") as f:
        f.write(_header(len(content.labels), content.shape))
        for i, row in enumerate(content.rows):
            if isinstance(row, str):
                unreadable[i] = row
                continue
            sha.update(row.data)
            f.write(row.data)
            kept += 1
        f.seek(0)
        f.write(_header(kept, content.shape))
        f.flush()
        os.fsync(f.fileno())
    sha.update(f"{kept} {content.shape}".encode())
    return unreadable


def _header(count: int, shape: tuple[int, ...]) -> bytes:
    """The .npy header; numpy pads it so that its length doesn't depend on the first axis."""
    beginning = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    np.lib.format.write_array_header_1_0(beginning, about)
    return beginning.getvalue()


def _into_place(part: Path, target: Path, cache: Path) -> Path:
    try:
        part.rename(target)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if find(cache, target.name) is None:  # what lies there is damaged
            target.rename(part.with_name(part.name + "-damaged"))
            shutil.rmtree(part.with_name(part.name + "-damaged"), ignore_errors=True)
            part.rename(target)
    return target


def _remove_abandoned(cache: Path) -> None:
    """Remove what killed processes left behind: parts in which nothing has been written for a day."""
    for part in cache.glob(".part-*"):
        with suppress(OSError):
            touched = max(path.stat().st_mtime for path in (part, *part.iterdir()))
            if time.time() - touched > STALE_S:
                shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _explained(cache: Path, needed: int = 0) -> Iterator[None]:
    """Turn what the file system says about the cache into one line for the user."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            line = f"the decoded images need {needed / 1e6:,.0f} MB in {cache}, and the disk has too little room"
            raise UserError(f"{line}; free some, or choose another cache folder") from e
        raise UserError(f"the image cache {cache} can't be written: {e.strerror or e}") from e


def content_hashes(paths: list[Path], cache: Path, folder: Path) -> list[str]:
    """sha256 of every file, "" where it can't be read.

    An index keeps 50,000 images cheap: a file whose inode, size, modification and change time are as they were is not
    read again, unless it had changed less than two seconds before it was hashed.
    """
    index = Path(cache) / "hashes" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]}.json"
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        entries = list(pool.map(lambda path: _entry(path, known.get(str(path))), paths))
    fresh = {str(path): entry for path, entry in zip(paths, entries, strict=True) if entry}
    if fresh != known:
        with _explained(Path(cache)):
            index.parent.mkdir(parents=True, exist_ok=True)
            beside = index.with_name(f"{index.name}.{uuid.uuid4().hex}")
            beside.write_text(json.dumps(fresh), encoding="utf-8")
            beside.replace(index)
    return [entry[-1] if entry else "" for entry in entries]


def _entry(path: Path, known: list[Any] | None) -> list[Any] | None:
    """[inode, size, mtime, ctime, when it was hashed, sha256] of a file; times in ns."""
    try:
        now = path.stat()
        if not stat.S_ISREG(now.st_mode):
            return None
        seen = [now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]
        if known and known[:4] == seen and max(seen[2:]) + UNSURE_NS < known[4]:
            return known
        when = time.time_ns()
        with open(path, "rb") as f:
            return [*seen, when, hashlib.file_digest(f, "sha256").hexdigest()]
    except OSError:
        return None
