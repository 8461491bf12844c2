"""Reading npz files three times as fast as `numpy.load`, which parses every array's header as Python source.

A run folder has thousands of small arrays with a handful of different headers, so parsed headers are remembered.
"""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np

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
