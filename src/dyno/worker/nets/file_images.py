"""What a file says of the images that it takes: layout, channels and size, by its inputs and its metadata."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from dyno.worker.inputs.layout import axes
from dyno.worker.inputs.shapes import Shape
from dyno.worker.nets import ultralytics_models
from dyno.worker.spec import ModelSpec, Tensor, UserError

DEFAULT_SIZE = 224
KEYS = ("imgsz", "batch", "stride")  # of an ONNX file's metadata, as ultralytics writes them


def metadata(path: str) -> dict[str, Any]:
    """Those of KEYS that an ONNX file has, as Python values."""
    import onnx

    said = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    found = {key: _literal(said[key]) for key in KEYS if key in said}
    return {key: value for key, value in found.items() if value}


def described(
    model: ModelSpec,
    tensors: Sequence[Tensor],
    shapes: Mapping[str, Shape],
    sizes: Sequence[Sequence[int]],
    said: Mapping[str, Any],
) -> dict[str, Any]:
    """Facts of a look: `size` [h, w] ([0, 0] without an image), `fixed_size`, `channels` and `usual_batch`.

    The size is that of the file's first image where it is fixed, else what `shapes` give it, else the `imgsz` of what
    the file `said`, else DEFAULT_SIZE. Of `sizes`, which the user asked for, one that the shapes contradict, or that
    the network's stride doesn't divide, is a `UserError`.
    """
    image = next((tensor for tensor in tensors if len(tensor.shape) == 4), None)
    if image is None:
        return {"size": [0, 0]}
    channel, *sides = axes(image.shape)
    fixed = [_number(image.shape[side]) for side in sides]
    given = [shapes[image.name][side] for side in sides] if len(shapes.get(image.name, ())) == 4 else [0, 0]
    found: dict[str, Any] = {"fixed_size": all(fixed) or all(given)}
    usual = _pair(said.get("imgsz")) or [DEFAULT_SIZE, DEFAULT_SIZE]
    found["size"] = [side or shape or own for side, shape, own in zip(fixed, given, usual, strict=True)]
    if channels := _number(image.shape[channel]):
        found["channels"] = channels
    if isinstance(said.get("batch"), int) and not _number(image.shape[0]):
        found["usual_batch"] = said["batch"]
    _check(model, sizes, given, said.get("stride"))
    return found


def _check(model: ModelSpec, sizes: Sequence[Sequence[int]], given: Sequence[int], stride: Any) -> None:
    for height, width in sizes:
        if all(given) and [height, width] != [*given]:
            raise UserError(
                f"shapes give the image {given[0]}x{given[1]} pixels, and sizes {height}x{width}; omit one of them"
            )
        if isinstance(stride, int):
            ultralytics_models.check_size(model.name, stride, height, width)


def _pair(size: Any) -> list[int] | None:
    """Height and width from `[480, 640]` or 640."""
    both = [size, size] if isinstance(size, int) else size
    fits = isinstance(both, (list, tuple)) and len(both) == 2 and all(isinstance(n, int) and n > 0 for n in both)
    return [*both] if fits else None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _number(length: int | str) -> int:
    return length if isinstance(length, int) else 0
