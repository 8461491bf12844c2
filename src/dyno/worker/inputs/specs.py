"""Inputs from their description: a trial's shapes, values in their range, and forward's arguments."""

from __future__ import annotations

import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import BATCH_AXIS, Dims, InputSpec, Preprocess, Tensor, UserError

# Image inputs and their layout: channels first (N x C x H x W, as in PyTorch) or last (N x H x W x C, as in TensorFlow)

MAX_CHANNELS = 4  # channels of an image; other four-dimensional inputs have more
CHANNELS_LAST = (0, 3, 1, 2)  # axes of N x H x W x C in the order of N x C x H x W
# Names of axes that are sequence lengths, and of inputs cached between steps
LENGTH_AXIS = re.compile(
    r"(^|[_\W])(time|times|seq|sequence|len|length|lengths|steps?|tokens?|past|total|t|l)\d*($|[_\W])|seq(uence)?_?len"
    r"|past_|total_seq",
    re.IGNORECASE,
)
CACHE_NAME = re.compile(
    r"past|present|cache|(^|[._/])kv([._/\d]|$)|(^|[./])(key|value|state)s?([._/\d]|$)", re.IGNORECASE
)
# Frames are lengths, except on the first axis (a video's images); sounds aren't images
FRAMES_AXIS = re.compile(r"(^|[_\W])(n|num)?_?frames?\d*($|[_\W])", re.IGNORECASE)
SOUND_NAME = re.compile(
    r"audio|sound|speech|wave?form|(^|[_\W])(wav|mel|mels|pcm|fbank|mfcc)\d*($|[_\W])|spectro", re.IGNORECASE
)
PICTURE_NAME = re.compile("image|img|pixel|photo|frame", re.IGNORECASE)


def is_length(axis: int | str) -> bool:
    """Return whether a free axis is named after the length of a sequence."""
    return isinstance(axis, str) and bool(LENGTH_AXIS.search(axis))


def is_image(tensor: Tensor) -> bool:
    """Return whether shape, type and name are an image's: four axes, no sequence length, no cache, no sound."""
    return (
        len(tensor.shape) == 4
        and 0 not in tensor.shape
        and tensor.dtype.startswith(("float", "bfloat", "uint8"))
        and not CACHE_NAME.search(tensor.name)
        and not SOUND_NAME.search(tensor.name)
        and not any(map(is_length, tensor.shape))
        and not any(isinstance(axis, str) and FRAMES_AXIS.search(axis) for axis in tensor.shape[1:])
    )


def image_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the first image among a model's inputs.

    Beside token ids, an image must have a picture's name or one or three channels.
    """
    has_tokens = any(len(t.shape) == 2 and t.dtype.startswith("int") for t in tensors)
    images = [tensor for tensor in tensors if is_image(tensor)]
    if has_tokens:
        images = [t for t in images if PICTURE_NAME.search(t.name) or t.shape[find_axes(t.shape)[0]] in (1, 3)]
    return images[0] if images else None


def channels_last(shape: Sequence[int | str]) -> bool:
    """Return whether the shape is N x H x W x C: few channels last, and large or free sides."""
    return len(shape) == 4 and _is_channel_count(shape[3]) and not any(map(_is_channel_count, shape[1:3]))


def _is_channel_count(length: int | str) -> bool:
    return isinstance(length, int) and 1 <= length <= MAX_CHANNELS


SIDE_AXIS = re.compile(r"(^|[_\W])(h|w|height|width)\d*($|[_\W])", re.IGNORECASE)


def is_side(axis: int | str) -> bool:
    """Return whether a free axis is named after an image's height or width."""
    return isinstance(axis, str) and bool(SIDE_AXIS.search(axis))


def find_axes(shape: Sequence[int | str]) -> tuple[int, int, int]:
    """Return the axes of an image's channels, height and width."""
    return (3, 1, 2) if channels_last(shape) else (1, 2, 3)


# Normalised images: largest number, its range for pixels from 0 to the largest, a mean over its deviation, channels
MAX_NORMALISED, MIN_SPAN, MAX_SPAN, MIN_MEAN_OVER_STD, MIN_STD_SPAN, MAX_IMAGE_CHANNELS = 4.0, 0.9, 8.0, 0.4, 1.5, 4


def find_largest_pixel(steps: Iterable[tuple[str, np.ndarray]]) -> float:
    """Return the largest pixel, 1 or 255, of images that a graph normalises by its first steps; 0 if that is unclear.

    Steps are ONNX operators with constants, in float64. For only one of the two ranges they give normalised numbers.
    """
    scale, offset = np.ones(1), np.zeros(1)
    for operator, value in steps:
        if len({scale.size, offset.size, value.size} - {1}) > 1:
            return 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = {"Mul": value, "Div": 1 / value}.get(operator, np.ones(1))
        scale, offset = scale * factor, offset * factor + {"Add": value, "Sub": -value}.get(operator, np.zeros(1))
    is_centred = bool((np.abs(offset) <= MAX_NORMALISED).all())
    if is_centred and ((255 * scale >= MIN_SPAN) & (255 * scale <= MAX_SPAN)).all():
        return 255.0
    has_mean = bool((offset <= -MIN_MEAN_OVER_STD).all() and ((scale >= MIN_STD_SPAN) & (scale <= MAX_SPAN)).all())
    return 1.0 if is_centred and has_mean else 0.0


def channels_first(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the same sizes as N x C x H x W."""
    c, h, w = find_axes(shape)
    return shape[0], shape[c], shape[h], shape[w]


def arrange_channels(images: np.ndarray, is_last: bool) -> np.ndarray:
    """Return images N x C x H x W, with channels last if `is_last`; contiguous."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if is_last else images


# Static shapes of a trial from a file's free dimensions, and feeds as an engine's arrays

Shape = tuple[int, ...]
# Modules' exceptions for unsuitable input shapes
INPUT_ERRORS = (RuntimeError, ValueError, AssertionError, TypeError, IndexError, ZeroDivisionError)


def static_shapes(inputs: Iterable[Tensor], dims: Dims) -> dict[str, Shape]:
    """Return every input's shape in this trial; free dimensions come from batch, height, width, or `dims.shapes`.

    `dims.shapes` may include inputs that an engine dropped. Raise a `UserError` for a file with another fixed batch or
    size, or a free dimension without a length. The size is that of the first image: a second image, map or mask of four
    dimensions may have its own.
    """
    tensors = list(inputs)
    image = image_of(tensors)
    return {tensor.name: _resolve_shape(tensor, dims, tensor == image) for tensor in tensors}


def _resolve_shape(tensor: Tensor, dims: Dims, is_first_image: bool) -> Shape:
    symbols = dims.shapes.get(tensor.name)
    shape = None if symbols is None else dims.resolve(symbols)
    lengths = {dims.batch_axis(tensor.name, tensor.shape) or 0: ("batch", dims.batch)}
    if is_image(tensor) and dims.height:  # unknown for a server before its description
        _, height, width = find_axes(tensor.shape)
        lengths |= {height: ("height", dims.height), width: ("width", dims.width)}
    if shape is not None:
        if len(shape) != len(tensor.shape):
            raise UserError(f"input {tensor.name!r} has {len(tensor.shape)} dimensions, not {_format_shape(shape)}")
        lengths = {axis: (f"dimension {axis} of {tensor.name!r}", size) for axis, size in enumerate(shape)}
    return tuple(
        _resolve_length(tensor, axis, length, lengths, is_first_image or shape is not None)
        for axis, length in enumerate(tensor.shape)
    )


def _resolve_length(
    tensor: Tensor, axis: int, length: int | str, lengths: dict[int, tuple[str, int]], is_strict: bool
) -> int:
    dimension, size = lengths.get(axis, ("", 0))
    if isinstance(length, str):
        if not dimension:
            raise UserError(
                f"input {tensor.name!r} has a free dimension {length or axis!r}; give its shape with --shapes"
            )
        return size
    # A fixed first dimension need not be the batch, unless the input is an image or the user named its shape.
    if is_strict and dimension and length != size:
        option = "--batch dynamic" if dimension == "batch" else "the size you want"
        raise UserError(f"the file has a fixed {dimension} {length}, not {size}; export it with {option}")
    return length


def fit_feed(feeds: Mapping[str, np.ndarray], tensor: Tensor, shape: Shape) -> np.ndarray:
    """Return the tensor's feed in the engine's type and C order, copied if needed.

    Raise a `UserError` for a feed that is missing or has another shape.
    """
    if (feed := feeds.get(tensor.name)) is None:
        raise UserError(f"input {tensor.name!r} was not fed, only {', '.join(feeds) or 'nothing'}")
    if feed.shape != shape:
        raise UserError(f"input {tensor.name!r} wants {_format_shape(shape)}, but got {_format_shape(feed.shape)}")
    return np.asarray(feed, tensor.dtype, order="C")  # ascontiguousarray would turn a scalar into a vector


def _format_shape(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)


# Arrays by name from files that anybody may have made.

# NumPy's errors from reading a zip file and an array's header
DAMAGED_FILE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, TypeError, AttributeError, SyntaxError,
    tokenize.TokenError, KeyError, MemoryError,
)  # fmt: skip


INPUT_ALIAS = "input"  # option name of a module's single input


def load_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file (only `names`, or all).

    Raise a ValueError with the reason for an unreadable file, such as one with Python objects, and OSError for a file
    that can't be opened.
    """
    with _errors_explained(), np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if names is None or name in names}


def load_array(path: Path) -> np.ndarray:
    """Return the array of an npy file; errors as for `load_arrays`."""
    with _errors_explained():
        array: np.ndarray = np.load(path, allow_pickle=False)
        return np.asarray(array[...])  # fails for an npz file


@contextmanager
def _errors_explained() -> Iterator[None]:
    try:
        yield
    except DAMAGED_FILE as e:
        raise ValueError(str(e).strip().partition("\n")[0] or type(e).__name__) from e


def list_tensors(specs: Sequence[InputSpec], dims: Dims) -> tuple[Tensor, ...]:
    """Return the tensor arguments, in the trial's shapes."""
    return tuple(Tensor(spec.name, spec.dtype, dims.resolve(spec.shape)) for spec in specs if spec.dtype)


def has_batch(specs: Sequence[InputSpec]) -> bool:
    """Return whether the batch is free: any input has an axis named after it."""
    return any(BATCH_AXIS in spec.shape for spec in specs)


def make_arguments(specs: Sequence[InputSpec], arrays: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return forward's positional and keyword arguments, tensors from `arrays`; without specs only `input`."""
    if not specs:
        return [arrays["input"]], {}
    values = {spec.name: arrays[spec.name] if spec.dtype else spec.value for spec in specs}
    keywords = {spec.name for spec in specs if spec.keyword}
    return [v for name, v in values.items() if name not in keywords], {name: values[name] for name in sorted(keywords)}


class InputValues:
    """Values of described inputs, equal for every backend: each input has its own random numbers, from the seed.

    `draw_default` draws values for inputs without a range, from a generator and a tensor's type and shape.
    """

    def __init__(self, specs: Sequence[InputSpec], seed: int, draw_default: Callable[..., np.ndarray]) -> None:
        self._specs = {spec.name: spec for spec in specs if spec.dtype}
        self._rng = {name: np.random.default_rng([seed, zlib.crc32(name.encode())]) for name in self._specs}
        self._draw_default = draw_default
        self._arrays: dict[str, np.ndarray] = {}

    def batches(
        self, shapes: Mapping[str, Shape], engine_types: Mapping[str, str], dims: Dims, count: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield `count` feeds of these shapes; `engine_types` are the engine's input types."""
        for batch_index in range(count):
            yield {
                name: self._make_array(self._specs[name], shape, engine_types.get(name, ""), dims, batch_index)
                for name, shape in shapes.items()
            }

    def _make_array(self, spec: InputSpec, shape: Shape, engine_type: str, dims: Dims, batch_index: int) -> np.ndarray:
        has_pixels = engine_type == "uint8" and spec.dtype.startswith("float")
        if has_pixels and (spec.feeds or spec.low is not None):
            raise UserError(f"input=uint8 reads pixels of images, but {spec.name!r} has given values; omit it")
        if spec.feeds:
            return self._read_stored_rows(spec, shape, dims.batch_axis(spec.name, spec.shape), batch_index)
        rng = self._rng[spec.name]
        if spec.low is not None and spec.high is not None:
            if spec.low == spec.high:
                return np.full(shape, spec.low, spec.dtype)
            if spec.dtype.startswith("float"):
                return rng.uniform(spec.low, spec.high, shape).astype(spec.dtype)
            draw_type = np.uint64 if spec.dtype == "uint64" else np.int64
            return rng.integers(int(spec.low), int(spec.high), shape, draw_type, endpoint=True).astype(spec.dtype)
        if "mask" in spec.name.lower() and shape and not spec.dtype.startswith("float"):
            return _make_mask(rng, spec.dtype, shape)
        return self._draw_default(rng, Tensor(spec.name, "uint8" if has_pixels else spec.dtype, shape))

    def _read_stored_rows(self, spec: InputSpec, shape: Shape, axis: int | None, batch_index: int) -> np.ndarray:
        """Return rows of the user's array, wrapping around; the whole array if it has no batch."""
        if spec.name not in self._arrays:
            self._arrays[spec.name] = _read_array(spec)
        array = self._arrays[spec.name]
        if axis is not None and array.shape != shape and array.ndim == len(shape) and array.shape[axis]:
            rows = np.arange(batch_index * shape[axis], (batch_index + 1) * shape[axis]) % array.shape[axis]
            array = array.take(rows, axis)
        if array.shape != shape:
            raise UserError(f"{spec.feeds} has {spec.name!r} as {array.shape}, but the model takes {shape}")
        return cast_exactly(array, spec)


def check_values(spec: InputSpec) -> InputSpec:
    """Return the input; raise a `UserError` if its type can't represent its values."""
    bounds = [bound for bound in (spec.low, spec.high) if bound is not None]
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        raise UserError(
            f"input {spec.name!r} is {spec.dtype}, which NumPy doesn't have; give the model an input of float32"
        ) from None
    if dtype.kind == "f":
        low, high = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    else:
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for bound in bounds:
        if dtype.kind != "f" and bound % 1:
            raise UserError(f"input {spec.name!r} is {spec.dtype}, so its values are whole numbers, not {bound:g}")
        if not (low <= bound <= high or (dtype.kind == "f" and abs(bound) == np.inf)):
            limits = "true or false" if dtype.kind == "b" else f"{low:g} to {high:g}"
            raise UserError(f"input {spec.name!r} is {spec.dtype}, whose values are {limits}, not {bound:g}")
    if spec.feeds:
        cast_exactly(_read_array(spec), spec)
    return spec


def cast_exactly(array: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return the array in the input's type; raise a `UserError` if that does more than round floats."""
    with np.errstate(invalid="ignore", over="ignore"):
        cast: np.ndarray = array.astype(spec.dtype)
    is_exact = np.isfinite(cast) == np.isfinite(array) if cast.dtype.kind == "f" else cast == array
    if not np.all(is_exact):
        value = array[~is_exact].flat[0]
        raise UserError(
            f"the array {spec.name!r} in {spec.feeds} has the value {value}, which {spec.dtype} doesn't have"
        )
    return cast


def _make_mask(rng: np.random.Generator, dtype: str, shape: Shape) -> np.ndarray:
    """Return ones up to a length of at least half, then zeros, as a padding mask; never a row of only zeros.

    A bool mask always has both: True marks padding in some networks, and the rest in others.
    """
    length = shape[-1]
    max_length = length - 1 if dtype == "bool" and length > 1 else length
    lengths = rng.integers(max(1, length // 2), max_length, (*shape[:-1], 1), endpoint=True)
    mask: np.ndarray = np.broadcast_to(np.arange(length), shape) < lengths
    return mask.astype(dtype)


def count_rows(spec: InputSpec, axis: int = 0) -> int:
    """Return the number of rows of the user's array for an input, on the batch's axis; 1 for a number."""
    array = _read_array(spec)
    return array.shape[axis] if axis < array.ndim else 1


def _read_array(spec: InputSpec) -> np.ndarray:
    try:
        arrays = load_arrays(Path(spec.feeds), (spec.name, INPUT_ALIAS))
        array: np.ndarray = arrays[spec.name if spec.name in arrays else INPUT_ALIAS]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{spec.feeds} can't be read for input {spec.name!r}: {e}") from e
    return array


# Geometry of images: before a centre crop, and of a letterbox (the longer side fits; grey fills the rest on both sides)

RATIO_TOLERANCE_PX = 1e-6  # rounding tolerance of products


def size_before_crop(size: tuple[int, int], crop: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Return (width, height) of the resize before the crop, truncated as in torchvision, timm and transformers."""
    if not preprocess.resize:
        return crop
    (width, height), (to_width, to_height) = size, (int(side * preprocess.resize + RATIO_TOLERANCE_PX) for side in crop)
    if preprocess.squash:
        return to_width, to_height
    if width * to_height <= height * to_width:
        return to_width, to_width * height // width
    return to_height * width // height, to_height


def fit_geometry(height: float, width: float, to_height: int, to_width: int) -> tuple[float, int, int, int, int]:
    """Return scale, new height and width, top and left margin of an image (square pixels) inside its letterbox.

    The numbers serve both directions: into the network, and from its boxes back to the image.
    """
    scale = min(to_height / height, to_width / width)
    new_height, new_width = max(round(height * scale), 1), max(round(width * scale), 1)
    top, left = round((to_height - new_height) / 2 - 0.1), round((to_width - new_width) / 2 - 0.1)
    return scale, new_height, new_width, top, left
