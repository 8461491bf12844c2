"""The bytes that a model is fed: real images from a decoded data set, or seeded random numbers, never zeros."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dyno.worker.shapes import static_shapes
from dyno.worker.spec import DataSpec, Dims, Preprocess, Tensor, UserError

FEEDS = 4  # different batches that timing with copies rotates through, so that no cache serves one batch for ever


class Images:
    """The split of a decoded data set, normalised as the model wants it; `len` is its number of images."""

    def __init__(self, data: DataSpec, preprocess: Preprocess) -> None:
        folder = Path(data.folder)
        try:
            self._pixels = np.load(folder / "images.npy", mmap_mode="r")
            self.labels = np.load(folder / "labels.npy")
            self.index = np.load(folder / f"{data.split}.npy")
        except (OSError, ValueError) as e:
            raise UserError(
                f"the decoded data set in {folder} can't be read ({e}); remove the folder to decode again"
            ) from e
        channels = self._pixels.shape[1]
        self._mean = np.resize(np.asarray(preprocess.mean, np.float32), channels).reshape(1, channels, 1, 1)
        self._std = np.resize(np.asarray(preprocess.std, np.float32), channels).reshape(1, channels, 1, 1)
        self.shape = tuple(int(n) for n in self._pixels.shape[1:])

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, start: int, count: int) -> np.ndarray:
        """`count` images from `start` on, wrapping around: float32, N x C x H x W."""
        chosen = self.index[np.arange(start, start + count) % len(self.index)]
        pixels: np.ndarray = self._pixels[chosen].astype(np.float32)
        pixels /= 255
        pixels -= self._mean
        pixels /= self._std
        return pixels


def batches(
    data: DataSpec, preprocess: Preprocess, tensors: Sequence[Tensor], dims: Dims, count: int
) -> Iterator[dict[str, np.ndarray]]:
    """The first `count` batches of the data, as feeds by input name.

    Real images go to the model's one image input. Random numbers are standard normal for floating-point inputs,
    0..255 for uint8 and 0..1 for other integers (token ids and masks that every vocabulary has).
    """
    wanted = static_shapes(tensors, dims)
    if data.folder:
        name, shape = _image_input(tensors, wanted)
        images = Images(data, preprocess)
        if images.shape != shape[1:]:
            has, wants = ("x".join(map(str, s)) for s in (images.shape, shape[1:]))
            raise UserError(f"the images are {has} but the model's input {name!r} is {wants}; give the --size it wants")
        for i in range(count):
            yield {name: images.batch(i * shape[0], shape[0])}
        return
    rng = np.random.default_rng(data.seed)
    kinds = {t.name: t.dtype for t in tensors}
    for _ in range(count):
        yield {name: _random(rng, kinds[name], shape) for name, shape in wanted.items()}


def _image_input(tensors: Sequence[Tensor], wanted: dict[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    if len(tensors) != 1 or len(wanted[tensors[0].name]) != 4:
        names = ", ".join(f"{name} {shape}" for name, shape in wanted.items())
        raise UserError(f"images fit a model with one N x C x H x W input; this one has {names}")
    return tensors[0].name, wanted[tensors[0].name]


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.startswith(("float", "bfloat")):
        return rng.standard_normal(shape, dtype=np.float32)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256 if dtype == "uint8" else 2, shape).astype(dtype)


def fingerprint(feeds: Sequence[dict[str, np.ndarray]]) -> str:
    """sha256 of the feeds' bytes: two runs with the same value were fed the same."""
    hashed = hashlib.sha256()
    for feed in feeds:
        for name in sorted(feed):
            hashed.update(name.encode())
            hashed.update(np.ascontiguousarray(feed[name]).tobytes())
    return hashed.hexdigest()
