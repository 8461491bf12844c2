"""Memory layout of image inputs: channels first (N x C x H x W, as in PyTorch) or last (N x H x W x C, TensorFlow)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_CHANNELS = 4  # of an image; a four-dimensional input with more is something else
CHANNELS_LAST = (0, 3, 1, 2)  # the axes of N x H x W x C in the order of N x C x H x W


def channels_last(shape: Sequence[int | str]) -> bool:
    """Whether the shape is N x H x W x C: few channels at its end, and more, or a free length, for both sides."""
    return len(shape) == 4 and _few(shape[3]) and not _few(shape[1]) and not _few(shape[2])


def _few(length: int | str) -> bool:
    return isinstance(length, int) and 1 <= length <= MOST_CHANNELS


def axes(shape: Sequence[int | str]) -> tuple[int, int, int]:
    """The axes of an image's channels, height and width."""
    return (3, 1, 2) if channels_last(shape) else (1, 2, 3)


def channels_first(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """The same sizes as N x C x H x W."""
    c, h, w = axes(shape)
    return shape[0], shape[c], shape[h], shape[w]


def arranged(images: np.ndarray, last: bool) -> np.ndarray:
    """Images N x C x H x W, with channels last if `last`; contiguous."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if last else images
