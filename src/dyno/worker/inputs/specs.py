"""What a described module is fed: shapes in a trial, values in their range, and how forward takes them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.inputs.shapes import Shape
from dyno.worker.spec import Dims, InputSpec, Tensor, UserError

BATCH = "batch"
SYMBOLS = (BATCH, "height", "width")


def resolved(shape: Sequence[int | str], batch: int) -> Shape:
    """The shape that the user gave a file's input, with this batch where it says `batch`."""
    if wrong := [axis for axis in shape if isinstance(axis, str) and axis != BATCH]:
        raise UserError(f"a file's shapes are numbers, or {BATCH} for the batch, not {wrong[0]}")
    return tuple(batch if isinstance(axis, str) else axis for axis in shape)


def shape_of(spec: InputSpec, dims: Dims) -> Shape:
    """The input's shape in a trial of these dims."""
    lengths = {BATCH: dims.batch, "height": dims.height, "width": dims.width}
    return tuple(lengths[axis] if isinstance(axis, str) else axis for axis in spec.shape)


def tensors(specs: Sequence[InputSpec], dims: Dims) -> tuple[Tensor, ...]:
    """The arguments that are tensors, in the trial's shapes."""
    return tuple(Tensor(spec.name, spec.dtype, shape_of(spec, dims)) for spec in specs if spec.dtype)


def has_batch(specs: Sequence[InputSpec]) -> bool:
    """Whether the batch is free: an axis of any input is named after it."""
    return any(BATCH in spec.shape for spec in specs)


def arguments(specs: Sequence[InputSpec], given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of forward, tensors taken from `given`; without specs there is one, `input`."""
    if not specs:
        return [given["input"]], {}
    values = {spec.name: given[spec.name] if spec.dtype else spec.value for spec in specs}
    keywords = {spec.name for spec in specs if spec.keyword}
    return [v for name, v in values.items() if name not in keywords], {name: values[name] for name in sorted(keywords)}


class Values:
    """Values for described inputs, the same for every backend: each input has its own random numbers, from the seed.

    `usual` draws what has no range: it is given random numbers, a type and a shape.
    """

    def __init__(self, specs: Sequence[InputSpec], seed: int, usual: Callable[..., np.ndarray]) -> None:
        self._specs = {spec.name: spec for spec in specs if spec.dtype}
        self._rng = {name: np.random.default_rng([seed, zlib.crc32(name.encode())]) for name in self._specs}
        self._usual = usual
        self._arrays: dict[str, np.ndarray] = {}

    def batches(
        self, shapes: Mapping[str, Shape], read: Mapping[str, str], count: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """`count` feeds of these shapes; `read` is the type in which an engine reads an input."""
        for turn in range(count):
            yield {
                name: self._one(self._specs[name], shape, read.get(name, ""), turn) for name, shape in shapes.items()
            }

    def _one(self, spec: InputSpec, shape: Shape, read: str, turn: int) -> np.ndarray:
        pixels = read == "uint8" and spec.dtype.startswith("float")
        if pixels and (spec.feeds or spec.low is not None):
            raise UserError(f"input=uint8 reads pixels of images, but {spec.name!r} has values of its own; omit it")
        if spec.feeds:
            return self._stored(spec, shape, turn)
        rng = self._rng[spec.name]
        if spec.low is not None and spec.high is not None:
            if spec.dtype.startswith("float"):
                return rng.uniform(spec.low, spec.high, shape).astype(spec.dtype)
            return rng.integers(int(spec.low), int(spec.high), shape, endpoint=True).astype(spec.dtype)
        if "mask" in spec.name.lower() and shape and not spec.dtype.startswith("float"):
            return _mask(rng, spec.dtype, shape)
        return self._usual(rng, "uint8" if pixels else spec.dtype, shape)

    def _stored(self, spec: InputSpec, shape: Shape, turn: int) -> np.ndarray:
        """Rows of the user's array, wrapping around; the whole of one that has no batch."""
        if spec.name not in self._arrays:
            self._arrays[spec.name] = _read(spec)
        array = self._arrays[spec.name]
        if array.shape != shape and array.ndim and array.shape[1:] == shape[1:]:
            array = array[np.arange(turn * shape[0], (turn + 1) * shape[0]) % len(array)]
        if array.shape != shape:
            raise UserError(f"{spec.feeds} has {spec.name!r} as {array.shape}, but the model wants {shape}")
        return array.astype(spec.dtype)


def _mask(rng: np.random.Generator, dtype: str, shape: Shape) -> np.ndarray:
    """Ones up to a length of at least half, then zeros, as padding is told apart; never a row of zeros alone.

    A bool mask always has both: in some networks True is what counts, in others what doesn't.
    """
    longest = shape[-1]
    most = longest - 1 if dtype == "bool" and longest > 1 else longest
    lengths = rng.integers(max(1, longest // 2), most, (*shape[:-1], 1), endpoint=True)
    made: np.ndarray = np.broadcast_to(np.arange(longest), shape) < lengths
    return made.astype(dtype)


def rows(spec: InputSpec) -> int:
    """How many rows the user's array of an input has; 1 of a number."""
    array = _read(spec)
    return len(array) if array.ndim else 1


def _read(spec: InputSpec) -> np.ndarray:
    try:
        with np.load(spec.feeds, allow_pickle=False) as stored:
            found: np.ndarray = stored[spec.name]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{spec.feeds} can't be read for input {spec.name!r}: {e}") from e
    return found
