"""Frames that a GPU's own decoder leaves in its memory, and how a video is opened so that they stay there."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from dyno.worker.video.media.pictures import (
    ITU_601,
    PIXELS,
    SQUARE,
    UNKNOWN,
    Picture,
    PicturePlane,
    Pixels,
    Planes,
    blank,
    planes_of,
    tags,
)

FORMAT = "cuda"  # FFmpeg's name of the decoder, and of the pixels it gives


def accelerator(device: str) -> Any:
    """Return for `av.open` in this thread the decoder of that GPU (`cuda:0`); frames stay in PyTorch's context.

    FFmpeg's own decoder takes over for a stream that the GPU can't decode, and frames are as always.
    """
    import torch
    from av.codec.hwaccel import HWAccel

    if torch.cuda.is_available():
        torch.empty(1, device=device)  # its context is this thread's from now on
    # Asked for the primary context itself, FFmpeg wants flags that PyTorch has not set.
    context: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
    number = device.partition(":")[2] or "0"
    return HWAccel(FORMAT, device=number, allow_software_fallback=True, options=context, is_hw_owned=True)


def suits(context: Any) -> bool:
    """Return whether frames of a codec's context can be `Surface`s: eight bits, 4:2:0, of even height and width."""
    return (
        context.format is not None and context.format.name == PIXELS and not (context.width % 2 or context.height % 2)
    )


class Surface(Picture):
    """A frame in a GPU's memory: brightness, and both colours side by side at half the height and width (NV12).

    It is copied to the host as soon as someone there wants to see it or draws on it.
    """

    def __init__(self, decoded: Any, convert: Callable[[Any], np.ndarray], aspect: Fraction = SQUARE) -> None:
        self.height, self.width, self.aspect = decoded.height, decoded.width, aspect
        self._tags = tags(decoded)
        self._decoded, self._convert = decoded, convert
        self._host: Planes | None = None

    @property
    def matrix(self) -> int:
        """FFmpeg's number of the matrix; see `Planes.pixels`."""
        return ITU_601 if self._tags[0] == UNKNOWN else self._tags[0]

    def tensors(self) -> list[Any]:
        """Return height x width, and half of that x two, uint8, on the GPU.

        They are valid behind the work queued on PyTorch's default stream.
        """
        from torch.utils.dlpack import from_dlpack

        # The capsule itself: PyAV has no order of streams, and refuses the one that PyTorch would ask for.
        return [from_dlpack(plane.__dlpack__()) for plane in self._decoded.planes]

    def host(self) -> Planes:
        """Return the same picture in the host's memory."""
        if self._host is None:
            light, colours = (tensor.cpu().numpy() for tensor in self.tensors())
            copied = blank(self.height, self.width)
            for target, values in zip(planes_of(copied), (light, colours[..., 0], colours[..., 1]), strict=True):
                np.copyto(target, values)
            copied.colorspace, copied.color_range = self._decoded.colorspace, self._decoded.color_range
            self._host = Planes(copied, self._convert, self.aspect)
            self._host.tags = self._tags
        return self._host

    def rgb(self) -> np.ndarray:
        return self.host().rgb()

    def pixels(self) -> Pixels:
        return self.host().pixels()

    def layers(self) -> tuple[PicturePlane, ...]:
        return self.host().layers()

    def copy(self) -> Planes:
        return self.host().copy()

    def again(self) -> Surface:
        return Surface(self._decoded, self._convert, self.aspect)

    def planes(self) -> Planes:
        return self.host()
