"""From a frame to what the network reads: letterboxed and normalised as everywhere in Dyno, by OpenCV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import channels_first, channels_last, geometry, static_shapes
from dyno.worker.spec import Dims, Preprocess, Tensor
from dyno.worker.video.media import Picture

GREY = 114  # around the picture


class Preparation:
    """Writes frames into a network's input; not for several threads at once."""

    def __init__(self, preprocess: Preprocess, inputs: Sequence[Tensor], dims: Dims) -> None:
        self.name, self.shape = input_data.image_input(inputs, static_shapes(inputs, dims))
        self._last, self._raw = channels_last(self.shape), inputs[0].dtype == "uint8"
        self.batch, channels, height, width = channels_first(self.shape)
        self.size = height, width
        self._canvas = np.full((height, width, channels) if channels > 1 else (height, width), GREY, np.uint8)
        mean, std = input_data.normalisation(preprocess, channels)
        # A value for each of the 256 of a pixel, worked out as the evaluation does it: the same bits, at a look-up.
        values = np.arange(256, dtype=np.float32).reshape(1, 1, 1, 256) / 255
        self._table = np.ascontiguousarray(((values - mean) / std).reshape(channels, 256).T)[None]
        self._filled: tuple[int, int, int, int] | None = None

    def new_feed(self) -> Any:
        """Return memory for one batch, which a session stages and binds."""
        return {self.name: np.zeros(self.shape, np.uint8 if self._raw else np.float32)}

    def write(self, picture: Picture, feed: Any, place: int) -> None:
        """Write one picture into that place of the batch."""
        import cv2

        image, canvas, target = picture.rgb(), self._canvas, feed[self.name][place]
        if canvas.ndim == 2:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        rows, columns = image.shape[:2]
        _, height, width, top, left = geometry(rows, columns * float(picture.aspect), *self.size)
        if self._filled != (height, width, top, left):
            canvas[:] = GREY
            self._filled = (height, width, top, left)
        cv2.resize(image, (width, height), canvas[top : top + height, left : left + width],
                   interpolation=cv2.INTER_LINEAR)  # fmt: skip
        if self._last:
            np.copyto(target, self._apply_table(cv2, canvas).reshape(target.shape))
            return
        for channel, plane in enumerate(cv2.split(canvas)):
            if not self._raw and target.dtype == np.float32:
                cv2.LUT(plane, self._table[..., channel], target[channel])
            else:  # where an engine keeps its inputs in another type, that is converted to
                np.copyto(target[channel], plane if self._raw else cv2.LUT(plane, self._table[..., channel]))

    def complete(self, feed: Any, count: int) -> None:
        """Finish the feed after its first `count` places were written, perhaps by another thread."""

    def settle(self, feed: Any) -> None:
        """Return when the batch is there: of one that is prepared elsewhere the work is only queued."""

    def _apply_table(self, cv2: Any, canvas: np.ndarray) -> np.ndarray:
        return canvas if self._raw else np.asarray(cv2.LUT(canvas, self._table))
