"""Arrays by name from files that anybody may have made."""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# What NumPy passes on from each step of reading a zip file and the header of an array.
DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, TypeError, AttributeError, SyntaxError,
    tokenize.TokenError, KeyError, MemoryError,
)  # fmt: skip


def load_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file (only `names`, or all).

    Raises a ValueError with the reason for a file that can't be read, such as one with Python objects, and OSError for
    a file that can't be opened.
    """
    with _errors_explained(), np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files if names is None or name in names}


def load_array(path: Path) -> np.ndarray:
    """Return the array of an npy file; errors as for `load_arrays`."""
    with _errors_explained():
        array: np.ndarray = np.load(path, allow_pickle=False)
        return np.asarray(array[...])  # an npz file has none


@contextmanager
def _errors_explained() -> Iterator[None]:
    try:
        yield
    except DAMAGED as e:
        raise ValueError(str(e).strip().partition("\n")[0] or type(e).__name__) from e
