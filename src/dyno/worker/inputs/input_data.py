"""Input data: real images from a decoded data set, or seeded random numbers, never zeros."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs.specs import (
    CHANNELS_LAST,
    MAX_CHANNELS,
    InputValues,
    arrange_channels,
    channels_first,
    channels_last,
    is_image,
    static_shapes,
)
from dyno.worker.spec import DataSpec, Dims, InputSpec, Option, Preprocess, Tensor, Trial, UserError, check_known

FEED_COUNT = 4  # batches fed in rotation, against cache effects
INPUT_NAME = "input"  # name of a module's single input, also in exported files
INPUT_TYPES = ("float32", "uint8")  # values of the option `input`: normalised images or raw pixels


class Images:
    """The split of a decoded data set, normalised for the model; `len` is its number of images.

    With `last`, batches are N x H x W x C.
    """

    def __init__(self, data: DataSpec, preprocess: Preprocess, last: bool = False) -> None:
        folder = Path(data.folder)
        try:
            self._pixels = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))  # views of a memmap are slow
            self.labels = np.load(folder / "labels.npy")
            self.index = np.load(folder / f"{data.split}.npy")
        except (OSError, ValueError) as e:
            raise UserError(
                f"the decoded data set in {folder} can't be read ({e}); remove the folder to decode again"
            ) from e
        self._preprocess, self._last = preprocess, last
        self.shape = tuple(int(n) for n in self._pixels.shape[1:])

    def __len__(self) -> int:
        return len(self.index)

    def read_batch(self, start: int, count: int, dtype: str = "float32") -> np.ndarray:
        """Return `count` images from `start` on, wrapping around: N x C x H x W, float32, or raw pixels for uint8."""
        return arrange_channels(
            _as_read(self._pixels[self._choose_rows(start, count)], self._preprocess, dtype), self._last
        )

    def read_into(self, target: np.ndarray, start: int) -> None:
        """Fill `target` with images, as from `read_batch`: raw pixels if it is uint8.

        Pixels are copied in one call, because every call briefly delays the engine's thread. Others are normalised
        image by image, so that the working set stays in the processor's cache.
        """
        target = target.transpose(CHANNELS_LAST) if self._last else target
        if target.dtype == np.uint8 and target.flags.c_contiguous:
            np.take(self._pixels, self._choose_rows(start, len(target)), axis=0, out=target, mode="clip")
            return
        mean, std = (array[0] for array in read_normalisation(self._preprocess, target.shape[1]))
        is_float32, is_uint8 = target.dtype == np.float32, target.dtype == np.uint8
        values: np.ndarray = np.empty(target.shape[1:], np.float32)
        for i, row in enumerate(self._choose_rows(start, len(target))):
            values = target[i] if is_float32 else values
            if is_uint8:
                target[i] = self._pixels[row]
                continue
            np.copyto(values, self._pixels[row])
            values /= 255
            values -= mean
            values /= std
            if not is_float32:
                np.copyto(target[i], values, casting="same_kind")

    def _choose_rows(self, start: int, count: int) -> np.ndarray:
        """Return the rows of `count` images of the split from `start` on, wrapping around."""
        rows: np.ndarray = self.index[np.arange(start, start + count) % len(self.index)]
        return rows


def read_metadata(data: DataSpec) -> dict[str, Any]:
    """Return the decoded data set's meta.json, which includes its classes; {} for data without a folder."""
    if not data.folder:
        return {}
    try:
        content: dict[str, Any] = json.loads((Path(data.folder) / "meta.json").read_bytes())
        return content
    except (OSError, ValueError):
        return {}


def read_normalisation(preprocess: Preprocess, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each channel's mean and standard deviation as float32, 1 x C x 1 x 1; single values are repeated."""
    mean, std = (np.resize(np.asarray(v, np.float32), channels) for v in (preprocess.mean, preprocess.std))
    return mean.reshape(1, channels, 1, 1), std.reshape(1, channels, 1, 1)


def pixel_scale(preprocess: Preprocess, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each channel's scale and offset as float32, 1 x C x 1 x 1.

    `pixel * scale + offset` is the normalised value.
    """
    mean, std = (array.astype(np.float64) for array in read_normalisation(preprocess, channels))
    return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


def wants_pixels(options: Mapping[str, Option]) -> bool:
    """Return whether the option `input` requests raw pixels; raise a `UserError` unless it is float32 or uint8."""
    value = str(options.get("input", "float32"))
    check_known("input", value, INPUT_TYPES)
    return value == "uint8"


def _as_read(pixels: np.ndarray, preprocess: Preprocess, dtype: str) -> np.ndarray:
    """Return the pixels for an input of that type: unchanged for uint8, else normalised to float32."""
    if dtype == "uint8":
        return np.ascontiguousarray(pixels)
    mean, std = read_normalisation(preprocess, pixels.shape[1])
    values: np.ndarray = pixels.astype(np.float32)
    values /= 255
    values -= mean
    values /= std
    return values


def read_trial_batches(
    trial: Trial, tensors: Sequence[Tensor], count: int = FEED_COUNT, batch: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first `count` batches of the trial's data for these tensors; `batch` replaces the trial's."""
    dims = trial.dims if batch is None else replace(trial.dims, batch=batch)
    return read_batches(trial.data, trial.model.preprocess, tensors, dims, count, trial.model.inputs)


def read_batches(
    data: DataSpec,
    preprocess: Preprocess,
    tensors: Sequence[Tensor],
    dims: Dims,
    count: int,
    specs: Sequence[InputSpec] = (),
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first `count` batches of the data, as feeds by input name.

    Images, real or random, are fed in the input's form: raw for uint8, else normalised, so both forms get the same
    picture. Random images are uniform pixels. Other random numbers are standard normal for floating-point inputs,
    0..255 for uint8, -128..127 for int8 and 0..1 for other integers (valid token ids and masks in every vocabulary).
    With `specs`, all described inputs are fed with their values, even if an engine dropped them as unused.
    """
    shapes = static_shapes(tensors, dims)
    if data.folder:
        image, shape, images = open_images(data, preprocess, tensors, dims, specs)
        fixed_feeds = fixed_inputs(tensors, shapes, specs)
        for i in range(count):
            yield {image.name: images.read_batch(i * shape[0], shape[0], image.dtype), **fixed_feeds}
        return
    kinds = {t.name: t.dtype for t in tensors}
    if specs:
        dropped_tensors = [Tensor(s.name, s.dtype, s.shape) for s in specs if s.dtype and s.name not in shapes]
        fed_shapes = {**shapes, **static_shapes(dropped_tensors, dims)}
        yield from InputValues(specs, data.seed, partial(_make_random_values, preprocess=preprocess)).batches(
            fed_shapes, kinds, dims, count
        )
        return
    rng = np.random.default_rng(data.seed)
    for _ in range(count):
        yield {
            name: _make_random_values(rng, Tensor(name, kinds[name], shape), preprocess)
            for name, shape in sorted(shapes.items())  # independent of the file's order
        }


def open_images(
    data: DataSpec, preprocess: Preprocess, tensors: Sequence[Tensor], dims: Dims, specs: Sequence[InputSpec] = ()
) -> tuple[Tensor, tuple[int, ...], Images]:
    """Return the image input, its shape, and the images; `specs` give all other inputs one value each.

    Raise a `UserError` if the images don't fit.
    """
    image, shape = image_input(tensors, static_shapes(tensors, dims), specs)
    images, expected = Images(data, preprocess, channels_last(shape)), channels_first(shape)[1:]
    if images.shape != expected:
        image_size, input_size = ("x".join(map(str, s)) for s in (images.shape, expected))
        hint = "set --size to match" if images.shape[0] == expected[0] else f"set --channels {expected[0]}"
        raise UserError(f"the images are {image_size} but the model's input {image.name!r} is {input_size}; {hint}")
    return image, shape, images


def image_input(
    tensors: Sequence[Tensor], shapes: dict[str, tuple[int, ...]], specs: Sequence[InputSpec] = ()
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the image input, the only one without a single value in `specs`, and its shape.

    Raise a `UserError` without an image input, or with another free input.
    """
    fixed_feeds = fixed_inputs(tensors, shapes, specs)
    inputs = [tensor for tensor in tensors if tensor.name not in fixed_feeds]
    if len(inputs) != 1 or len(shapes[inputs[0].name]) != 4:
        names = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        rest = [tensor.name for tensor in inputs if len(shapes[tensor.name]) != 4]
        hint = "; give " + " ".join(f"--input {name}=VALUE" for name in rest) if len(inputs) == len(rest) + 1 else ""
        raise UserError(f"images fit a model with one N x C x H x W input; this one has {names}{hint}")
    return inputs[0], shapes[inputs[0].name]


def fixed_inputs(
    tensors: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]], specs: Sequence[InputSpec]
) -> dict[str, np.ndarray]:
    """Return the inputs with one value everywhere, such as the size of the image."""
    values = {spec.name: spec.low for spec in specs if spec.low is not None and spec.low == spec.high}
    return {t.name: np.full(shapes[t.name], values[t.name], t.dtype) for t in tensors if t.name in values}


def _make_random_values(rng: np.random.Generator, tensor: Tensor, preprocess: Preprocess) -> np.ndarray:
    dtype, shape = tensor.dtype, tuple(map(int, tensor.shape))
    is_float = dtype.startswith(("float", "bfloat"))
    if is_image(tensor) and channels_first(shape)[1] <= MAX_CHANNELS:
        pixels = rng.integers(0, 256, channels_first(shape), np.uint8)
        return arrange_channels(_as_read(pixels, preprocess, dtype), channels_last(shape))
    if is_float:
        return rng.standard_normal(shape, dtype=np.float32)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "int8" and "mask" not in tensor.name.lower():
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.integers(0, 256 if dtype == "uint8" else 2, shape).astype(dtype)


def repeat_input(
    feeds: Mapping[str, np.ndarray], batch_axes: Mapping[str, int | None], row: int
) -> dict[str, np.ndarray]:
    """Return the feeds with the batch's row `row` in all its rows; `batch_axes` are the batch's axes."""
    result = dict(feeds)
    for name, array in feeds.items():
        if (axis := batch_axes.get(name)) is not None:
            result[name] = np.ascontiguousarray(array.take([row] * array.shape[axis], axis))
    return result


def relative_change(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a - b| / |a| in the 2-norm; for labels (whole numbers and text), the share that differs."""
    if a.dtype.kind != "f":
        return float((a != b).mean()) if a.size else 0.0
    a, b = (np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0) for array in (a, b))
    return float(np.linalg.norm((a - b).ravel()) / max(np.linalg.norm(a.ravel()), np.finfo(np.float64).tiny))


def hash_feeds(feeds: Sequence[dict[str, np.ndarray]], preprocess: Preprocess | None = None) -> str:
    """Return the sha256 of the feeds' bytes: equal for two runs with the same feeds.

    With `preprocess`, raw images are normalised first, so that an image has the same hash in both forms. The name of a
    single input is left out: it doesn't change the feed.
    """
    hasher = hashlib.sha256()
    for feed in feeds:
        for name in sorted(feed):
            array = feed[name]
            if preprocess is not None and array.ndim == 4 and array.dtype == np.uint8:
                is_last = channels_last(array.shape)
                pixels = array.transpose(CHANNELS_LAST) if is_last else array
                array = arrange_channels(_as_read(pixels, preprocess, "float32"), is_last)
            hasher.update((name if len(feed) > 1 else INPUT_NAME).encode())
            hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
