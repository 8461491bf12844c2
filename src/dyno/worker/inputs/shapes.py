"""From a file's free dimensions to the shapes of one trial, and from a feed to the array an engine reads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dyno.worker.inputs.layout import axes
from dyno.worker.spec import Dims, Tensor, UserError

Shape = tuple[int, ...]
# What a module raises at inputs of a shape that it doesn't take.
REFUSALS = (RuntimeError, ValueError, AssertionError, TypeError, IndexError, ZeroDivisionError)


def static_shapes(inputs: Iterable[Tensor], dims: Dims) -> dict[str, Shape]:
    """The shape of every input in this trial: free dimensions come from batch, height, width, or `dims.shapes`.

    A file that is fixed at another batch or size, or has a free dimension nobody gave, is a `UserError`. The size is
    that of the first image: a second one, a map or a mask of four dimensions may have its own.
    """
    tensors = list(inputs)
    unknown = sorted(set(dims.shapes) - {tensor.name for tensor in tensors})
    if unknown:
        names = ", ".join(tensor.name for tensor in tensors)
        raise UserError(f"the model has no input {unknown[0]!r}; its inputs: {names}")
    image = next((tensor.name for tensor in tensors if len(tensor.shape) == 4), "")
    return {tensor.name: _static(tensor, dims, tensor.name == image) for tensor in tensors}


def _static(tensor: Tensor, dims: Dims, first_image: bool) -> Shape:
    given = dims.shapes.get(tensor.name)
    wanted: dict[int, tuple[str, int]] = {0: ("batch", dims.batch)}
    if len(tensor.shape) == 4:
        _, height, width = axes(tensor.shape)
        wanted |= {height: ("height", dims.height), width: ("width", dims.width)}
    if given is not None:
        if len(given) != len(tensor.shape):
            raise UserError(f"input {tensor.name!r} has {len(tensor.shape)} dimensions, not {_text(given)}")
        wanted = {axis: (f"dimension {axis} of {tensor.name!r}", size) for axis, size in enumerate(given)}
    return tuple(
        _size(tensor, axis, known, wanted, first_image or given is not None) for axis, known in enumerate(tensor.shape)
    )


def _size(tensor: Tensor, axis: int, known: int | str, wanted: dict[int, tuple[str, int]], strict: bool) -> int:
    what, size = wanted.get(axis, ("", 0))
    if isinstance(known, str):
        if not what:
            raise UserError(
                f"input {tensor.name!r} has a free dimension {known or axis!r}; give its shape with --shapes"
            )
        return size
    # A fixed first dimension need not be the batch, unless the input is an image or its shape was asked for by name.
    if strict and what and known != size:
        how = "--batch dynamic" if what == "batch" else "the size you want"
        raise UserError(f"the file has a fixed {what} {known}, not {size}; export it with {how}")
    return known


def fitted(feed: np.ndarray, tensor: Tensor, shape: Shape) -> np.ndarray:
    """The feed in the engine's type and C order, copied only where it isn't so; a wrong shape is a `UserError`."""
    if feed.shape != shape:
        raise UserError(f"input {tensor.name!r} wants {_text(shape)}, but got {_text(feed.shape)}")
    return np.asarray(feed, tensor.dtype, order="C")  # ascontiguousarray would make a scalar a vector


def _text(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)
