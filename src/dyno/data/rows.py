"""Decoded images written in sequence with a journal, so that a killed run resumes where it stopped.

The journal has a line per row: its seconds, and the seal of its pixels or the reason if unreadable. It is checked
against the stored rows before any are added; the first incomplete row ends it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

Row = np.ndarray | str  # an image, or the reason if unreadable


class DecodedRow(NamedTuple):
    """A row, the seconds that one thread spent on it, and a hash of its pixels ("" if unreadable)."""

    row: Row
    seconds: float
    seal: str


Source = Callable[[int], Iterable[DecodedRow]]  # yields the rows from an index on


def seal_row(row: Row, seconds: float) -> DecodedRow:
    """Return the row with its seal, computed in the decoding thread: a single thread to seal all rows would hold it up.

    Blake2b takes half of sha256's time on processors without an instruction for the latter.
    """
    return DecodedRow(
        row, seconds, "" if isinstance(row, str) else hashlib.blake2b(row.data, digest_size=32).hexdigest()
    )


@dataclass
class RowFileState:
    """State of images.npy: sha256 of its rows' seals, number of rows, reasons for missing rows, seconds."""

    sha: Any = field(default_factory=hashlib.sha256)
    kept: int = 0
    unreadable: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Number of rows tried."""
        return self.kept + len(self.unreadable)

    def add(self, decoded: DecodedRow) -> None:
        """Count one more row."""
        if isinstance(decoded.row, str):
            self.unreadable[self.done] = decoded.row
            return
        self.sha.update(decoded.seal.encode())
        self.kept += 1
        self.seconds += decoded.seconds


def write_rows(images: Path, journal: Path, shape: tuple[int, ...], count: int, rows: Source) -> RowFileState:
    """Write `count` rows of `shape` to images.npy, resuming after the rows of a killed run.

    Plain writes are used, because writing to mapped memory on a full disk would kill the process.
    """
    state = RowFileState()
    for path in (images, journal):
        path.touch()
    with open(images, "r+b") as pixels, open(journal, "r+b") as lines:
        pixels.write(make_header(count, shape))
        _count_rows(pixels, lines, shape, state)
        for decoded in rows(state.done):
            if not isinstance(decoded.row, str):
                pixels.write(decoded.row.data)
                pixels.flush()
            lines.write(_format_line(decoded))
            lines.flush()
            state.add(decoded)
        pixels.seek(0)
        pixels.write(make_header(state.kept, shape))
        pixels.flush()
        os.fsync(pixels.fileno())
    state.sha.update(f"{state.kept} {shape}".encode())
    return state


def make_header(count: int, shape: tuple[int, ...]) -> bytes:
    """Return the .npy header; numpy pads it to a length independent of the first axis."""
    buffer = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def _count_rows(pixels: BinaryIO, lines: BinaryIO, shape: tuple[int, ...], state: RowFileState) -> None:
    """Count the rows that are complete in both files, and truncate both after them."""
    ends = pixels.tell(), 0
    for decoded in _iter_rows(pixels, lines, shape):
        state.add(decoded)
        ends = pixels.tell(), lines.tell()
    for file, end in zip((pixels, lines), ends, strict=True):
        file.seek(end)
        file.truncate()


def _iter_rows(pixels: BinaryIO, lines: BinaryIO, shape: tuple[int, ...]) -> Iterator[DecodedRow]:
    size = int(np.prod(shape))
    while (line := lines.readline()).endswith(b"\n"):
        try:
            seconds, seal, reason = json.loads(line)
        except ValueError:
            return
        decoded = seal_row(reason or np.frombuffer(pixels.read(size), np.uint8), seconds)
        if decoded.seal != seal:
            return
        yield decoded


def _format_line(decoded: DecodedRow) -> bytes:
    reason = decoded.row if isinstance(decoded.row, str) else ""
    return json.dumps([round(decoded.seconds, 9), decoded.seal, reason]).encode() + b"\n"
