"""Inputs from their description: shapes in a trial, values within their range, and the arguments of forward."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs.array_files import load_arrays
from dyno.worker.inputs.shapes import Shape
from dyno.worker.spec import BATCH, Dims, InputSpec, Tensor, UserError


def tensors(specs: Sequence[InputSpec], dims: Dims) -> tuple[Tensor, ...]:
    """Return the arguments that are tensors, in the trial's shapes."""
    return tuple(Tensor(spec.name, spec.dtype, dims.resolve(spec.shape)) for spec in specs if spec.dtype)


def has_batch(specs: Sequence[InputSpec]) -> bool:
    """Return whether the batch is free: an axis of any input is named after it."""
    return any(BATCH in spec.shape for spec in specs)


def arguments(specs: Sequence[InputSpec], arrays: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return forward's positional and keyword arguments, tensors from `arrays`; without specs only `input`."""
    if not specs:
        return [arrays["input"]], {}
    values = {spec.name: arrays[spec.name] if spec.dtype else spec.value for spec in specs}
    keywords = {spec.name for spec in specs if spec.keyword}
    return [v for name, v in values.items() if name not in keywords], {name: values[name] for name in sorted(keywords)}


class InputValues:
    """Values for described inputs, the same for every backend: each input has its own random numbers, from the seed.

    `draw_default` draws inputs without a range, from a generator and a tensor of a type and a shape.
    """

    def __init__(self, specs: Sequence[InputSpec], seed: int, draw_default: Callable[..., np.ndarray]) -> None:
        self._specs = {spec.name: spec for spec in specs if spec.dtype}
        self._rng = {name: np.random.default_rng([seed, zlib.crc32(name.encode())]) for name in self._specs}
        self._draw_default = draw_default
        self._arrays: dict[str, np.ndarray] = {}

    def batches(
        self, shapes: Mapping[str, Shape], engine_types: Mapping[str, str], dims: Dims, count: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield `count` feeds of these shapes; `engine_types` are the types in which an engine reads them."""
        for number in range(count):
            yield {
                name: self._make_array(self._specs[name], shape, engine_types.get(name, ""), dims, number)
                for name, shape in shapes.items()
            }

    def _make_array(self, spec: InputSpec, shape: Shape, engine_type: str, dims: Dims, number: int) -> np.ndarray:
        pixels = engine_type == "uint8" and spec.dtype.startswith("float")
        if pixels and (spec.feeds or spec.low is not None):
            raise UserError(f"input=uint8 reads pixels of images, but {spec.name!r} has values of its own; omit it")
        if spec.feeds:
            return self._read_stored_rows(spec, shape, dims.batch_axis(spec.name, spec.shape), number)
        rng = self._rng[spec.name]
        if spec.low is not None and spec.high is not None:
            if spec.low == spec.high:
                return np.full(shape, spec.low, spec.dtype)
            if spec.dtype.startswith("float"):
                return rng.uniform(spec.low, spec.high, shape).astype(spec.dtype)
            widest = np.uint64 if spec.dtype == "uint64" else np.int64
            return rng.integers(int(spec.low), int(spec.high), shape, widest, endpoint=True).astype(spec.dtype)
        if "mask" in spec.name.lower() and shape and not spec.dtype.startswith("float"):
            return _make_mask(rng, spec.dtype, shape)
        return self._draw_default(rng, Tensor(spec.name, "uint8" if pixels else spec.dtype, shape))

    def _read_stored_rows(self, spec: InputSpec, shape: Shape, axis: int | None, number: int) -> np.ndarray:
        """Return rows of the user's array, wrapping around; the whole array if it has no batch."""
        if spec.name not in self._arrays:
            self._arrays[spec.name] = _read_array(spec)
        array = self._arrays[spec.name]
        if axis is not None and array.shape != shape and array.ndim == len(shape) and array.shape[axis]:
            rows = np.arange(number * shape[axis], (number + 1) * shape[axis]) % array.shape[axis]
            array = array.take(rows, axis)
        if array.shape != shape:
            raise UserError(f"{spec.feeds} has {spec.name!r} as {array.shape}, but the model takes {shape}")
        return cast_exactly(array, spec)


def check_values(spec: InputSpec) -> InputSpec:
    """Return the input; raise a `UserError` if its type can't represent the values given for it."""
    ends = [end for end in (spec.low, spec.high) if end is not None]
    try:
        kind = np.dtype(spec.dtype)
    except TypeError:
        raise UserError(
            f"input {spec.name!r} is {spec.dtype}, which NumPy doesn't have; give the model an input of float32"
        ) from None
    if kind.kind == "f":
        least, most = float(np.finfo(kind).min), float(np.finfo(kind).max)
    else:
        least, most = (0, 1) if kind.kind == "b" else (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    for end in ends:
        if kind.kind != "f" and end % 1:
            raise UserError(f"input {spec.name!r} is {spec.dtype}, so its values are whole numbers, not {end:g}")
        if not (least <= end <= most or (kind.kind == "f" and abs(end) == np.inf)):
            allowed = "true or false" if kind.kind == "b" else f"{least:g} to {most:g}"
            raise UserError(f"input {spec.name!r} is {spec.dtype}, whose values are {allowed}, not {end:g}")
    if spec.feeds:
        cast_exactly(_read_array(spec), spec)
    return spec


def cast_exactly(array: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return the array in the input's type; raise a `UserError` if that does more than round floats."""
    with np.errstate(invalid="ignore", over="ignore"):
        cast: np.ndarray = array.astype(spec.dtype)
    kept = np.isfinite(cast) == np.isfinite(array) if cast.dtype.kind == "f" else cast == array
    if not np.all(kept):
        value = array[~kept].flat[0]
        raise UserError(
            f"the array {spec.name!r} in {spec.feeds} has the value {value}, which {spec.dtype} doesn't have"
        )
    return cast


def _make_mask(rng: np.random.Generator, dtype: str, shape: Shape) -> np.ndarray:
    """Return ones up to a length of at least half, then zeros, as a padding mask; never a row of zeros alone.

    A bool mask always has both: in some networks True marks padding, in others the rest.
    """
    longest = shape[-1]
    most = longest - 1 if dtype == "bool" and longest > 1 else longest
    lengths = rng.integers(max(1, longest // 2), most, (*shape[:-1], 1), endpoint=True)
    mask: np.ndarray = np.broadcast_to(np.arange(longest), shape) < lengths
    return mask.astype(dtype)


def rows(spec: InputSpec, axis: int = 0) -> int:
    """Return the number of rows of the user's array for an input, on the batch's axis; 1 for a number."""
    array = _read_array(spec)
    return array.shape[axis] if axis < array.ndim else 1


def _read_array(spec: InputSpec) -> np.ndarray:
    try:
        array: np.ndarray = load_arrays(Path(spec.feeds), (spec.name,))[spec.name]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{spec.feeds} can't be read for input {spec.name!r}: {e}") from e
    return array
