"""Training data: batches of a decoded data set in seeded order, cropped and mirrored as they are read.

Pixels stay uint8 until they are on the device, where they are normalised as everywhere else in Dyno.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs.input_data import normalisation
from dyno.worker.spec import DataSpec, Preprocess, UserError, numbered
from dyno.worker.training.options import TrainOptions

EVALUATED = 64  # images at a time, at the least
SHIFT = 10  # a tenth of the image is the furthest that `shift` moves it

Key = tuple[int, np.ndarray]  # the seed of a batch's augmentation, and rows of images.npy


@dataclass(frozen=True)
class Split:
    """One split of a decoded data set: memory-mapped pixels (uint8 N x C x H x W), labels, the split's rows, class
    names."""

    pixels: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    classes: tuple[str, ...]

    @classmethod
    def open(cls, data: DataSpec) -> Split:
        """Open the split named in the specification; raise a `UserError` if the folder lacks a part of it."""
        folder = Path(data.folder)
        for name in ("images.npy", "labels.npy", f"{data.split}.npy", "meta.json"):
            if not data.folder or not (folder / name).is_file():
                location = data.folder or data.name
                raise UserError(f"data set {location!r} has no {name}; training needs images with labels")
        metadata = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        pixels = np.load(folder / "images.npy", mmap_mode="r")
        index = np.load(folder / f"{data.split}.npy")
        if len(index) < 2:
            purpose = "test" if data.split == "test" else "train"
            raise UserError(
                f"data set {data.name} has {numbered(len(index), 'image')} to {purpose} on; it takes 2 or more"
            )
        return cls(pixels, np.load(folder / "labels.npy"), index, tuple(metadata["classes"]))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed for everything random in an epoch: it doesn't depend on whether earlier epochs ran here."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def batches(split: Split, options: TrainOptions, epoch: int) -> list[Key]:
    """Return the batches of an epoch; a last batch of one joins the one before it: batch norm can't train on one."""
    rng = np.random.default_rng(epoch_seed(options.seed, epoch))
    order = rng.permutation(split.index)
    edges = list(range(0, len(order), options.batch))
    if len(edges) > 1 and len(order) - edges[-1] == 1:
        edges.pop()
    seeds = rng.integers(0, 2**63 - 1, len(edges))
    ends = [*edges[1:], len(order)]
    return [(int(seed), order[a:b]) for seed, a, b in zip(seeds, edges, ends, strict=True)]


def plain_batches(split: Split, size: int) -> list[Key]:
    """Return all images of the split in their order, in batches of that size."""
    return [(0, split.index[start : start + size]) for start in range(0, len(split.index), size)]


def augmentation(kind: str, size: tuple[int, int]) -> Callable[[Any], Any] | None:
    """Return torchvision's transforms from a cached image to a training image of `size` (height, width).

    Return None for `none`.
    """
    from torchvision.transforms import v2

    if kind == "none":
        return None
    if kind == "shift":
        padding = [max(1, size[1] // SHIFT), max(1, size[0] // SHIFT)]
        shift: Callable[[Any], Any] = v2.RandomCrop(size, padding=padding, padding_mode="edge")
        return shift
    crop = v2.RandomCrop(size) if kind == "light" else v2.RandomResizedCrop(size, antialias=True)
    combined: Callable[[Any], Any] = v2.Compose([crop, v2.RandomHorizontalFlip()])
    return combined


class BatchDataset:
    """A data set for torch's DataLoader whose item is a whole batch: pixels uint8 B x C x H x W, labels int64.

    An augmentation draws from the batch's own seed and restores torch's generator, so that neither the number of
    workers nor earlier batches change an image.
    """

    def __init__(self, split: Split, change: Callable[[Any], Any] | None = None) -> None:
        self._split, self._change = split, change

    def __getitem__(self, key: Key) -> tuple[Any, Any]:
        import torch

        seed, rows = key
        pixels = torch.from_numpy(np.asarray(self._split.pixels[rows]))
        labels = torch.from_numpy(self._split.labels[rows].astype(np.int64))
        if self._change is None:
            return pixels, labels
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed)
        changed = torch.stack([self._change(image) for image in pixels])
        generator.set_state(before)
        return changed, labels


class Epochs:
    """The DataLoader's sampler: the batches of whichever epoch was set last, so that workers live through all."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def _keep_batch(batch: Any) -> Any:
    return batch


class BatchReader:
    """Batches of a split by torch's DataLoader, in its workers where there are any, normalised on the device."""

    def __init__(
        self, split: Split, preprocess: Preprocess, options: TrainOptions, change: Callable[[Any], Any] | None = None
    ) -> None:
        import torch

        self._device = torch.device(options.device)
        mean, std = normalisation(preprocess, split.pixels.shape[1])
        self._mean, self._std = (torch.from_numpy(v).to(self._device) for v in (mean, std))
        self._epochs = Epochs()
        self._loader = torch.utils.data.DataLoader(
            BatchDataset(split, change),
            batch_size=None,  # an item is a batch already
            sampler=self._epochs,
            collate_fn=_keep_batch,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            pin_memory=self._device.type == "cuda",
            # Drawn once at the beginning, it must not touch the generator that dropout draws from.
            generator=torch.Generator().manual_seed(options.seed),
        )

    def __call__(self, keys: list[Key]) -> Iterator[tuple[Any, Any]]:
        """Inputs as the network reads them (float32, channels last) and labels, of each of the batches."""
        import torch

        self._epochs.keys = keys
        for pixels, labels in self._loader:
            x = pixels.to(self._device, non_blocking=True)
            x = x.to(torch.float32, memory_format=torch.channels_last)
            x = x.div_(255).sub_(self._mean).div_(self._std)
            yield x, labels.to(self._device, non_blocking=True)
