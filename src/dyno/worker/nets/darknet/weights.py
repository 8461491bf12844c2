"""Darknet's .weights files: a header, then the values of each convolution in the order of the network's layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import UserError

SUFFIX = ".weights"
FLOAT = np.dtype("<f4")


class WeightReader:
    """The values of a file, handed out in their order without reading what isn't asked for."""

    def __init__(self, path: str) -> None:
        self.path, file = path, Path(path)
        size = file.stat().st_size if file.is_file() else -1
        if size < 0:
            raise UserError(f"checkpoint {path} doesn't exist")
        header = np.fromfile(file, "<i4", 3)
        if header.size < 3:
            raise UserError(f"checkpoint {path} is too short to be weights of Darknet's")
        major, minor, _ = (int(n) for n in header)
        # The number of images seen has eight bytes since version 0.2.
        begin = 12 + (8 if major * 10 + minor >= 2 and major < 1000 and minor < 1000 else 4)
        if size < begin or (size - begin) % FLOAT.itemsize:
            raise UserError(f"checkpoint {path} is cut short or not Darknet's: its {size} bytes end within a value")
        self.left = (size - begin) // FLOAT.itemsize
        self._values = np.memmap(file, FLOAT, "r", begin, (self.left,)) if self.left else np.empty(0, FLOAT)

    def take(self, shape: tuple[int, ...], what: str) -> np.ndarray:
        """Return the next values in that shape; raise a `UserError`, with their purpose `what`, if too few are left."""
        count = int(np.prod(shape))
        if count > self.left:
            raise UserError(
                f"the weights in {self.path} don't fit the model: they end in {what}, which needs {count:,} values "
                f"where {self.left:,} are left"
            )
        start = len(self._values) - self.left
        self.left -= count
        return np.array(self._values[start : start + count]).reshape(shape)


def load(layers: Any, path: str, lines: Sequence[int], cfg: str) -> None:
    """Put the file's values into the convolutions of a network, whose layers begin in these lines of the .cfg.

    A `UserError` says in which layer the values end, or how many are left over.
    """
    import torch

    values = WeightReader(path)
    for number, layer in layers.named_children():
        convolution = getattr(layer, "conv", None)
        if convolution is None:
            continue
        what = f"layer {number} ([convolutional] in line {lines[int(number)]} of {cfg})"
        norm = getattr(layer, "norm", None)
        # Darknet's order: bias, then scale, mean and variance of a batch norm, then the weights.
        first = [convolution.bias] if norm is None else [norm.bias, norm.weight, norm.running_mean, norm.running_var]
        with torch.no_grad():
            for target in (*first, convolution.weight):
                target.copy_(torch.from_numpy(values.take(tuple(target.shape), what)))
    if values.left:
        raise UserError(
            f"the weights in {path} don't fit the model: {values.left:,} values are left over behind the last layer of "
            f"{cfg}"
        )
