"""Frames from a camera, and from and to video files where PyAV is missing, by OpenCV: without sound."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.extras import install
from dyno.worker.spec import UserError
from dyno.worker.video.media.ends import Frame, Sink, Source, now
from dyno.worker.video.media.pictures import SQUARE, Rgb

FOURCC = {".mp4": "mp4v", ".mov": "mp4v", ".m4v": "mp4v", ".mkv": "mp4v", ".avi": "MJPG", ".webm": "VP80"}
USUAL_RATE = 30.0  # of a source that doesn't say
COVER_RATE = 90_000  # frames per second that FFmpeg gives to cover art


class CaptureSource(Source):
    """A camera by its number, or a video by its path or URL."""

    def __init__(self, place: int | str, live: bool) -> None:
        import cv2

        super().__init__(f"camera {place}" if isinstance(place, int) else Path(place).name)
        self._place, self.live, self.once = place, live, isinstance(place, int) or "://" in place
        capture = self._open_capture()
        self.rate = max(0.0, float(capture.get(cv2.CAP_PROP_FPS)))
        if self.rate >= COVER_RATE:
            raise UserError(
                f"OpenCV reads the cover art of {self.name} in place of its video; PyAV reads that: {install('av')}"
            )
        self._aspect = _read_aspect(capture)
        if not live:
            self.count = max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        capture.release()

    def _open_capture(self) -> Any:
        import cv2

        capture = cv2.VideoCapture(self._place)
        if not capture.isOpened():
            raise UserError(f"{self.name} can't be opened; check that it is there and that nothing else uses it")
        return capture

    def read(self, sound: bool = False) -> Iterator[Frame]:
        import cv2

        capture, index = self._open_capture(), 0
        try:
            began = now()
            while capture.grab():
                began = now() if self.live else began  # waiting for the camera isn't work
                done, image = capture.retrieve()
                if not done:
                    self.damaged += 1
                    continue
                seconds = index / self.rate if self.rate else None
                picture = Rgb(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), self._aspect)
                yield Frame(index, picture, began, None, seconds)
                index, began = index + 1, now()
            if not index:
                raise UserError(f"{self.name} has no frame that can be decoded; it is empty or damaged")
        finally:
            capture.release()


def _read_aspect(capture: Any) -> Fraction:
    """Return the width of a pixel over its height in the frames that OpenCV gives, which are turned upright."""
    import cv2

    parts = [round(capture.get(each)) for each in (cv2.CAP_PROP_SAR_NUM, cv2.CAP_PROP_SAR_DEN)]
    if min(parts) < 1:
        return SQUARE
    sideways = round(capture.get(cv2.CAP_PROP_ORIENTATION_META)) % 180
    return Fraction(*(reversed(parts) if sideways else parts))


class WriterSink(Sink):
    """A video file of the source's average rate, of square pixels; its sound is left out."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self._rate = path, source.rate or USUAL_RATE
        self._writer: Any = None
        self._size = (0, 0)
        if path.suffix.lower() not in FOURCC:
            raise UserError(f"OpenCV can't write {path}; give {', '.join(FOURCC)}")
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, frame: Frame) -> None:
        import cv2

        height, width = frame.size
        if self._writer is None:
            self._size = (max(1, round(width * frame.picture.aspect)), height)
            code = cv2.VideoWriter.fourcc(*FOURCC[self._path.suffix.lower()])
            self._writer = cv2.VideoWriter(str(self._path), code, self._rate, self._size)
            if not self._writer.isOpened():
                raise UserError(f"{self._path} can't be written by OpenCV; give .avi, or install PyAV")
        image = frame.picture.rgb()
        if (width, height) != self._size:
            image = cv2.resize(image, self._size)
        self._writer.write(cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2BGR))
        self.written += 1

    def close(self, left: list[Any] | None = None) -> list[str]:
        if self._writer is not None:
            self._writer.release()
        return ["written by OpenCV, without sound and at a constant rate; PyAV keeps both"]
