"""Frames from a video file, an image or a folder of images, in order, with the sound that lies between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.extras import install
from dyno.worker.spec import Unavailable, UserError
from dyno.worker.video.frame import Frame, now

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
TURNS = {90: "ROTATE_90_COUNTERCLOCKWISE", 180: "ROTATE_180", 270: "ROTATE_90_CLOCKWISE"}


def library() -> Any:
    """PyAV, silent; `Unavailable` with what to install where it or OpenCV is missing."""
    try:
        import av
        import cv2
    except ImportError as e:
        raise Unavailable(f"video needs PyAV and OpenCV: {e}; {install('av', 'opencv-python')}") from e
    av.logging.set_level(av.logging.PANIC)  # what is wrong is said in one line, by Dyno
    cv2.setNumThreads(1)  # a stage is a thread already, and OpenCV's own would take the engine's processors
    return av


@dataclass
class Source:
    """What is read: a video, or the images of a folder. `read` may be called several times, and begins anew.

    `count` is the number of frames as far as the file says (0: it doesn't), `rate` its average of frames per second.
    After reading, `damaged` is how many packets could not be decoded, and `left` are packets of sound behind the last
    frame.
    """

    path: Path
    files: list[Path] = field(default_factory=list)
    count: int = 0
    rate: float = 0.0
    damaged: int = 0
    left: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Source:
        """The source at the path; a `UserError` in one line for what can't be read as one."""
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGES)
            if not files:
                raise UserError(f"{path} has no images ({', '.join(IMAGES)}); give a video, an image or a folder of them")
            return cls(path, files, len(files))
        if path.suffix.lower() in IMAGES:
            return cls(path, [path], 1)
        with opened(path) as container:
            stream = container.streams.video[0]
            return cls(path, [], int(stream.frames or 0), float(stream.average_rate or 0))

    @property
    def images(self) -> bool:
        """Whether each frame is an image file."""
        return bool(self.files)

    def read(self, most: int = 0, sound: bool = False) -> Iterator[Frame]:
        """The frames, at most so many (0: all); with `sound` also the packets of sound before each."""
        frames = self._of_files() if self.files else self._of_video(sound)
        for frame in frames:
            yield frame
            if most and frame.index + 1 >= most:
                break
        frames.close()

    def _of_files(self) -> Iterator[Frame]:
        import cv2

        for index, file in enumerate(self.files):
            began = now()
            image = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR) if file.stat().st_size else None
            if image is None:
                raise UserError(f"{file} can't be read as an image; remove it")
            yield Frame(index, cv2.cvtColor(image, cv2.COLOR_BGR2RGB), began, name=file.name)

    def _of_video(self, sound: bool) -> Iterator[Frame]:
        self.damaged = 0
        with opened(self.path) as container:
            video = container.streams.video[0]
            video.thread_type = "AUTO"
            heard = container.streams.audio[:1] if sound else []
            convert, index, packets, began = _Converter(), 0, [], now()
            for packet in self._packets(container, [video, *heard]):
                if packet.stream.type == "audio":
                    if packet.dts is not None:  # the last one is empty
                        packets.append(packet)
                    continue
                for decoded in self._decoded(packet):
                    seconds = None if decoded.pts is None else float(decoded.pts * decoded.time_base)
                    yield Frame(index, convert(decoded), began, decoded.pts, seconds, packets=packets)
                    index, packets, began = index + 1, [], now()
            if not index:
                raise UserError(f"{self.path} has no frame that can be decoded; it is empty or damaged")
            self.left = packets

    def _packets(self, container: Any, streams: list[Any]) -> Iterator[Any]:
        """The packets until the file ends, be it in the middle of one."""
        packets = container.demux(streams)
        while True:
            try:
                packet = next(packets, None)
            except _errors():
                self.damaged += 1
                return
            if packet is None:
                return
            yield packet

    def _decoded(self, packet: Any) -> list[Any]:
        try:
            return list(packet.decode())
        except _errors():
            self.damaged += 1
            return []


def _errors() -> tuple[type[BaseException], ...]:
    import av

    return (av.error.InvalidDataError, av.error.EOFError, av.error.UndefinedError, av.error.UnknownError)


def opened(path: Path) -> Any:
    """The container of a video file; a `UserError` for a file that is none, has no pictures or an unknown codec."""
    av = library()
    try:
        container = av.open(str(path))
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror}") from e
    except ValueError as e:
        empty = path.is_file() and not path.stat().st_size
        what = "is empty" if empty else "is no video that FFmpeg knows, or its end is missing"
        raise UserError(f"{path} {what}; give a video, an image or a folder of images") from e
    problem = ""
    if not container.streams.video:
        problem = f"{path} has no pictures, only {', '.join(sorted({s.type for s in container.streams})) or 'nothing'}"
    elif container.streams.video[0].codec_context is None:
        problem = f"this FFmpeg has no decoder for the pictures of {path}; convert it, e.g. to H.264"
    if problem:
        container.close()
        raise UserError(problem)
    return container


class _Converter:
    """Decoded frames as arrays of RGB, upright; one object for all, so that the conversion is set up once."""

    def __init__(self) -> None:
        import av

        self._reformat = av.video.reformatter.VideoReformatter()

    def __call__(self, decoded: Any) -> np.ndarray:
        import cv2

        image: np.ndarray = self._reformat.reformat(decoded, format="rgb24").to_ndarray()
        turn = None
        with suppress(AttributeError):
            turn = TURNS.get(int(decoded.rotation) % 360)
        return image if turn is None else np.asarray(cv2.rotate(image, getattr(cv2, turn)))
