"""Layout, channels and size of the images that a model file takes, from its inputs and its metadata."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from dyno.worker.inputs.layout import axes, image_of
from dyno.worker.inspection import Inspection
from dyno.worker.nets import ultralytics_models
from dyno.worker.spec import ModelSpec, Tensor, UserError

DEFAULT_SIZE = 224
KEYS = ("imgsz", "batch", "stride")  # of a file's metadata, as ultralytics writes them


def read(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of a file's metadata under KEYS, as Python values."""
    values = {key: _parse_literal(metadata[key]) for key in KEYS if key in metadata}
    return {key: value for key, value in values.items() if value}


def image_facts(
    model: ModelSpec,
    tensors: Sequence[Tensor],
    shapes: Mapping[str, Sequence[int | str]],
    sizes: Sequence[Sequence[int]],
    metadata: Mapping[str, Any],
) -> Inspection:
    """Return for the inspection the image's size and whether it is fixed, its channels and the usual batch.

    The size, (0, 0) without an image, is that of the file's first image if fixed, else that of `shapes`, else the
    metadata's `imgsz`, else DEFAULT_SIZE. One of the user's `sizes` that contradicts `shapes`, or that the network's
    stride doesn't divide, is a `UserError`.
    """
    image = image_of(tensors)
    if image is None:
        return Inspection()
    channel, *sides = axes(image.shape)
    fixed = [_read_length(image.shape[side]) for side in sides]
    given = shapes.get(image.name, ())
    requested = [_read_length(given[side]) for side in sides] if len(given) == 4 else [0, 0]
    default = _parse_size(metadata.get("imgsz")) or [DEFAULT_SIZE, DEFAULT_SIZE]
    height, width = (side or shape or own for side, shape, own in zip(fixed, requested, default, strict=True))
    usual = metadata.get("batch")
    _check_sizes(model, sizes, requested, metadata.get("stride"))
    return Inspection(
        size=(height, width),
        fixed_size=all(fixed) or all(requested),
        channels=_read_length(image.shape[channel]) or None,
        usual_batch=usual if isinstance(usual, int) and not _read_length(image.shape[0]) else None,
    )


def normalised(tensors: Sequence[Tensor]) -> bool:
    """Return whether a file's image is fed as normalised numbers: one of uint8 takes the pixels as they are."""
    image = image_of(tensors)
    return image is not None and image.dtype != "uint8"


def _check_sizes(model: ModelSpec, sizes: Sequence[Sequence[int]], requested: Sequence[int], stride: Any) -> None:
    for height, width in sizes:
        if all(requested) and [height, width] != [*requested]:
            raise UserError(
                f"shapes give the image {requested[0]}x{requested[1]} pixels, and sizes {height}x{width}; "
                "omit one of them"
            )
        if isinstance(stride, int):
            ultralytics_models.check_size(model.name, stride, height, width)


def _parse_size(size: Any) -> list[int] | None:
    """Return height and width from `[480, 640]` or 640; None for anything else."""
    both = [size, size] if isinstance(size, int) else size
    fits = isinstance(both, (list, tuple)) and len(both) == 2 and all(isinstance(n, int) and n > 0 for n in both)
    return [*both] if fits else None


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _read_length(length: int | str) -> int:
    return length if isinstance(length, int) else 0
