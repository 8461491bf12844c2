"""Static shapes of a trial from a file's free dimensions, and feeds as the arrays that an engine reads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dyno.worker.inputs.layout import axes, image_of, is_image
from dyno.worker.spec import Dims, Tensor, UserError

Shape = tuple[int, ...]
# Exceptions of modules at inputs of a shape that they don't accept.
REFUSALS = (RuntimeError, ValueError, AssertionError, TypeError, IndexError, ZeroDivisionError)


def static_shapes(inputs: Iterable[Tensor], dims: Dims) -> dict[str, Shape]:
    """Return the shape of every input in this trial; free dimensions come from batch, height, width, or `dims.shapes`.

    `dims.shapes` may describe inputs that an engine dropped. Raises a `UserError` for a file that is fixed at another
    batch or size, or has a free dimension without a length. The size is that of the first image: a second one, a map or
    a mask of four dimensions may have its own.
    """
    tensors = list(inputs)
    image = image_of(tensors)
    return {tensor.name: _resolve_shape(tensor, dims, tensor == image) for tensor in tensors}


def _resolve_shape(tensor: Tensor, dims: Dims, first_image: bool) -> Shape:
    described = dims.shapes.get(tensor.name)
    requested = None if described is None else dims.resolve(described)
    lengths = {dims.batch_axis(tensor.name, tensor.shape) or 0: ("batch", dims.batch)}
    if is_image(tensor) and dims.height:  # of a server's model no size is known before it describes itself
        _, height, width = axes(tensor.shape)
        lengths |= {height: ("height", dims.height), width: ("width", dims.width)}
    if requested is not None:
        if len(requested) != len(tensor.shape):
            raise UserError(f"input {tensor.name!r} has {len(tensor.shape)} dimensions, not {_format_shape(requested)}")
        lengths = {axis: (f"dimension {axis} of {tensor.name!r}", size) for axis, size in enumerate(requested)}
    return tuple(
        _resolve_length(tensor, axis, length, lengths, first_image or requested is not None)
        for axis, length in enumerate(tensor.shape)
    )


def _resolve_length(
    tensor: Tensor, axis: int, length: int | str, lengths: dict[int, tuple[str, int]], strict: bool
) -> int:
    dimension, size = lengths.get(axis, ("", 0))
    if isinstance(length, str):
        if not dimension:
            raise UserError(
                f"input {tensor.name!r} has a free dimension {length or axis!r}; give its shape with --shapes"
            )
        return size
    # A fixed first dimension need not be the batch, unless the input is an image or its shape was given by name.
    if strict and dimension and length != size:
        option = "--batch dynamic" if dimension == "batch" else "the size you want"
        raise UserError(f"the file has a fixed {dimension} {length}, not {size}; export it with {option}")
    return length


def fitted(feed: np.ndarray, tensor: Tensor, shape: Shape) -> np.ndarray:
    """Return the feed in the engine's type and C order, copied if needed; raise a `UserError` for a wrong shape."""
    if feed.shape != shape:
        raise UserError(f"input {tensor.name!r} wants {_format_shape(shape)}, but got {_format_shape(feed.shape)}")
    return np.asarray(feed, tensor.dtype, order="C")  # ascontiguousarray would make a scalar a vector


def _format_shape(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)
