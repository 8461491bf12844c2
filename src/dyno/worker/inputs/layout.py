"""Which inputs are images, and how they lie: channels first (N x C x H x W, as in PyTorch) or last (N x H x W x C,
TensorFlow)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dyno.worker.spec import Tensor

MOST_CHANNELS = 4  # of an image; a four-dimensional input with more is something else
CHANNELS_LAST = (0, 3, 1, 2)  # the axes of N x H x W x C in the order of N x C x H x W
# Names of axes that are lengths of sequences, and of inputs that are kept from step to step.
LENGTH = re.compile(
    r"(^|[_\W])(time|times|seq|sequence|len|length|lengths|steps?|tokens?|past|total|t|l)\d*($|[_\W])|seq(uence)?_?len"
    r"|past_|total_seq",
    re.IGNORECASE,
)
SIDE = re.compile(r"(^|[_\W])(h|w|height|width)\d*($|[_\W])", re.IGNORECASE)
CACHE = re.compile(r"past|present|cache|(^|[._/])kv([._/\d]|$)|(^|[./])(key|value|state)s?([._/\d]|$)", re.IGNORECASE)
PICTURE = re.compile("image|img|pixel|photo|frame", re.IGNORECASE)


def is_length(axis: int | str) -> bool:
    """Return whether a free axis is named after the length of a sequence."""
    return isinstance(axis, str) and bool(LENGTH.search(axis))


def is_side(axis: int | str) -> bool:
    """Return whether a free axis is named after an image's height or width."""
    return isinstance(axis, str) and bool(SIDE.search(axis))


def is_image(tensor: Tensor) -> bool:
    """Return whether shape, type and name are an image's: four axes, none a sequence's length, and no cache."""
    return (
        len(tensor.shape) == 4
        and 0 not in tensor.shape
        and tensor.dtype.startswith(("float", "bfloat", "uint8"))
        and not CACHE.search(tensor.name)
        and not any(map(is_length, tensor.shape))
    )


def image_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the first image among a model's inputs; beside token ids only one that is named so, or has as few channels
    as images have."""
    beside_tokens = any(len(t.shape) == 2 and t.dtype.startswith("int") for t in tensors)
    images = [tensor for tensor in tensors if is_image(tensor)]
    if beside_tokens:
        images = [t for t in images if PICTURE.search(t.name) or t.shape[axes(t.shape)[0]] in (1, 3)]
    return images[0] if images else None


def channels_last(shape: Sequence[int | str]) -> bool:
    """Return whether the shape is N x H x W x C: few channels last, more sizes or a free length for both sides."""
    return (
        len(shape) == 4
        and _is_channel_count(shape[3])
        and not _is_channel_count(shape[1])
        and not _is_channel_count(shape[2])
    )


def _is_channel_count(length: int | str) -> bool:
    return isinstance(length, int) and 1 <= length <= MOST_CHANNELS


def axes(shape: Sequence[int | str]) -> tuple[int, int, int]:
    """Return the axes of an image's channels, height and width."""
    return (3, 1, 2) if channels_last(shape) else (1, 2, 3)


def channels_first(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the same sizes as N x C x H x W."""
    c, h, w = axes(shape)
    return shape[0], shape[c], shape[h], shape[w]


def arranged(images: np.ndarray, last: bool) -> np.ndarray:
    """Return images N x C x H x W, with channels last if `last`; contiguous."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if last else images
