"""Frames without a container: image files, read and written, and raw frames from a pipe."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dyno.worker.spec import UserError
from dyno.worker.video.media.ends import Frame, Sink, Source, now
from dyno.worker.video.media.pictures import Rgb
from dyno.worker.video.options import IMAGES

SEVERAL = (".png", ".webp", ".tif", ".tiff")  # what may hold more than one picture


class ImageSource(Source):
    """An image, or those of a folder in the order of their names."""

    images = True

    def __init__(self, path: Path, rate: float) -> None:
        super().__init__(path.name)
        self.files = sorted(f for f in path.iterdir() if f.suffix.lower() in IMAGES) if path.is_dir() else [path]
        if not self.files:
            raise UserError(f"{path} has no images ({', '.join(IMAGES)}); give a video, an image or a folder of them")
        self.count, self.rate = len(self.files), rate

    def read(self, sound: bool = False) -> Iterator[Frame]:
        import cv2

        for index, file in enumerate(self.files):
            began = now()
            image = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR) if file.stat().st_size else None
            if image is None:
                raise UserError(f"{file} can't be read as an image; remove it")
            if file.suffix.lower() in SEVERAL and (count := cv2.imcount(str(file))) > 1:
                self.note(f"{file.name} holds {count} pictures; the first is used")
            seconds = index / self.rate
            yield Frame(index, Rgb(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)), began, None, seconds, name=file.name)


class RawSource(Source):
    """Frames from a file descriptor, three bytes for each pixel, row by row; it can be read only once.

    What the first reading took comes again at the beginning of the next.
    """

    once = True

    def __init__(self, descriptor: int, width: int, height: int, rate: float) -> None:
        super().__init__("standard input")
        if not width:
            raise UserError("raw frames don't say how large they are; give --frame-size WIDTHxHEIGHT")
        self._descriptor, self._shape, self.rate = descriptor, (height, width, 3), rate
        self._seen = deque[np.ndarray]()
        self._readings = 0

    def read(self, sound: bool = False) -> Iterator[Frame]:
        index, kept = 0, not self._readings
        self._readings += 1
        while (began := now()) and (image := self._read_frame()) is not None:
            if kept:
                self._seen.append(image.copy())
            yield Frame(index, Rgb(image), began, None, index / self.rate)
            index += 1

    def _read_frame(self) -> np.ndarray | None:
        """Return the next frame, None at the end; a frame that ends too early counts as damaged."""
        if self._seen and self._readings > 1:
            return self._seen.popleft()
        size = int(np.prod(self._shape))
        parts, left = [], size
        while left and (part := os.read(self._descriptor, left)):
            parts.append(part)
            left -= len(part)
        self.damaged += 0 < left < size
        return None if left else np.frombuffer(bytearray(b"".join(parts)), np.uint8).reshape(self._shape)


class ImageSink(Sink):
    """Images of the source's names into a folder, or one image into a file."""

    def __init__(self, path: Path, single: bool) -> None:
        self._path, self._single = path, single
        if not single:
            path.mkdir(parents=True, exist_ok=True)

    def write(self, frame: Frame) -> None:
        import cv2

        file = self._path if self._single else self._path / frame.name
        done, encoded = cv2.imencode(file.suffix, cv2.cvtColor(frame.picture.rgb(), cv2.COLOR_RGB2BGR))
        if not done:
            raise UserError(f"OpenCV can't write {file}; give another suffix, such as .png")
        file.write_bytes(encoded.tobytes())
        self.written += 1
