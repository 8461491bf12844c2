"""Parser of the input options `--shapes` and `--input`: text becomes overrides by input name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dyno.store import sha256_of
from dyno.worker.facts.json_values import INTEGER_LIMIT
from dyno.worker.inputs.specs import load_arrays
from dyno.worker.record import check_regular
from dyno.worker.spec import UserError, check_known, make_absolute

INPUT_TYPES = (
    "float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
AXIS_PATTERN = r"(?:batch|height|width|\d+)"
SHAPE_PATTERN = re.compile(rf"(.+):({AXIS_PATTERN}(?:x{AXIS_PATTERN})*|(?=:))(?::([A-Za-z]\w*))?")
BOOL_WORDS = {"true": True, "false": False}
OTHER_KINDS = {"U": "text", "S": "text", "c": "complex numbers", "M": "dates", "m": "durations",
               "V": "values of a type that NumPy doesn't have"}  # fmt: skip


def parse_overrides(inputs: Iterable[str], input_shapes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse the options into overrides by input name.

    Keys: `shape` (numbers, batch, height, width), `dtype`, `low` and `high`, a constant's `value`, `feeds`.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for text in inputs:
        for name, override in (_read_arrays(Path(text)) if text.endswith(".npz") else _parse_values(text)).items():
            by_name.setdefault(name, {}).update(override)
    for name, override in parse_shapes(input_shapes).items():
        by_name.setdefault(name, {}).update(override)
    return by_name


def parse_shapes(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse shape and type by input from `NAME:1x3x224x224`, `NAME:batchx128:int64` or, for a scalar, `NAME::int64`."""
    by_name: dict[str, dict[str, Any]] = {}
    for text in texts:
        match = SHAPE_PATTERN.fullmatch(text)
        axes = [int(axis) if axis.isdecimal() else axis for axis in re.findall(AXIS_PATTERN, match[2])] if match else []
        if match is None or axes[:1] == [0] or axes.count("batch") > 1:
            raise UserError(f"shape {text!r} is not NAME:1x3x224x224 or NAME:batchx128:int64, with one batch")
        if match[3] is not None:
            check_known(f"type of input {match[1]!r}", match[3], INPUT_TYPES)
        by_name[match[1]] = {"shape": axes, **({"dtype": match[3]} if match[3] else {})}
    return by_name


def _parse_values(text: str) -> dict[str, dict[str, Any]]:
    """Parse a constant from `sr=16000`, or a range from `ids=0..30521`."""
    name, equals, value = text.partition("=")
    low, dots, high = value.partition("..")
    numbers = [BOOL_WORDS.get(part.lower(), _parse_number(part)) for part in ((low, high) if dots else (low,))]
    if not (name and equals) or None in numbers or (dots and any(isinstance(n, bool) for n in numbers)):
        raise UserError(
            f"input {text!r} is not NAME=VALUE such as sr=16000, NAME=LOW..HIGH such as ids=0..30521, or FILE.npz"
        )
    if any(n != n or (dots and abs(n) == math.inf) for n in numbers):
        raise UserError(f"input {text!r} has values that can't be drawn; give finite numbers")
    if any(isinstance(n, int) and abs(n) >= INTEGER_LIMIT for n in numbers):
        raise UserError(f"input {text!r} is larger than any number of an input; give one below 2**64")
    if dots and numbers[0] > numbers[1]:
        raise UserError(f"input {text!r} has a range whose end is below its start; write NAME=LOW..HIGH")
    bounds = [int(n) if isinstance(n, bool) else n for n in numbers]  # numbers, as in a record
    value_range = {"low": bounds[0], "high": bounds[-1]}
    return {name: value_range if dots else {**value_range, "value": numbers[0]}}


def _parse_number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _read_arrays(path: Path) -> dict[str, dict[str, Any]]:
    """Return the shape, type and place of each array of an .npz file.

    The first axis is the batch for arrays as long as the first one, unless the model's file names another (`array` is
    the numeric shape).
    """
    try:
        contents = load_arrays(check_regular(path, "array file"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path} can't be read as arrays by input name (numpy.savez): {e}") from e
    if empty_names := [name for name, a in contents.items() if a.ndim and not len(a)]:
        raise UserError(f"the array {empty_names[0]!r} in {path} is empty; give one with values")
    # Infinite values are valid, e.g. in attention masks.
    if nan_names := [name for name, a in contents.items() if a.dtype.kind == "f" and np.isnan(a).any()]:
        raise UserError(f"the array {nan_names[0]!r} in {path} has values that are not numbers (NaN); replace them")
    arrays = {name: (a.shape, str(a.dtype)) for name, a in contents.items()}
    rows = next((shape[0] for shape, _ in arrays.values() if shape), 0)
    sha256, by_name = sha256_of(path), {}
    for name, (shape, dtype) in arrays.items():
        axes = ["batch", *shape[1:]] if shape and shape[0] == rows else [*shape]
        if not dtype.startswith("float") and dtype not in INPUT_TYPES:
            raise UserError(
                f"the array {name!r} in {path.name} holds {OTHER_KINDS.get(np.dtype(dtype).kind, dtype)}; "
                "give numbers or booleans"
            )
        kind = "float32" if dtype.startswith("float") else dtype
        by_name[name] = {
            "shape": axes,
            "array": [*shape],
            "dtype": kind,
            "feeds": str(make_absolute(path)),
            "feeds_sha256": sha256,
        }
    return by_name
