"""The reader of a source and the writer of an output, chosen by their names."""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.extras import install, load_library
from dyno.worker.spec import UserError
from dyno.worker.video.decoding import VideoSource
from dyno.worker.video.encoding import VideoSink
from dyno.worker.video.media import SQUARE_PIXELS, Frame, Rgb, Sink, Source, now
from dyno.worker.video.options import IMAGE_SUFFIXES, VideoOptions

# Frames without a container: image files, read and written, and raw frames from a pipe

MULTIPAGE_SUFFIXES = (".png", ".webp", ".tif", ".tiff")  # formats with several pictures per file


class ImageSource(Source):
    """An image, or a folder's images in the order of their names, with numbers compared as numbers."""

    images = True

    def __init__(self, path: Path, rate: float) -> None:
        super().__init__(path.name)
        files = [f for f in path.iterdir() if f.suffix.lower() in IMAGE_SUFFIXES] if path.is_dir() else [path]
        self.files = sorted(files, key=lambda file: (_split_numbers(file.name), file.name))
        if not self.files:
            raise UserError(
                f"{path} has no images ({', '.join(IMAGE_SUFFIXES)}); give a video, an image or a folder of them"
            )
        self.count, self.rate = len(self.files), rate

    def read(self, sound: bool = False) -> Iterator[Frame]:
        import cv2

        for index, file in enumerate(self.files):
            began = now()
            image = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR) if file.stat().st_size else None
            if image is None:
                raise UserError(f"{file} can't be read as an image; remove it")
            if file.suffix.lower() in MULTIPAGE_SUFFIXES and (count := cv2.imcount(str(file))) > 1:
                self.note(f"{file.name} holds {count} pictures; the first is used")
            seconds = index / self.rate
            yield Frame(index, Rgb(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)), began, None, seconds, name=file.name)


def _split_numbers(name: str) -> list[str | int]:
    """Return the name's parts, texts and whole numbers alternating: 2.png comes before 10.png."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", name))]


class RawSource(Source):
    """Frames from a file descriptor, three bytes per pixel, row by row; readable only once.

    The second reading begins with the frames of the first.
    """

    is_single_pass = True

    def __init__(self, descriptor: int, size: tuple[int, int], rate: float) -> None:
        super().__init__("standard input")
        self._descriptor, self._shape, self.rate = descriptor, (*size[::-1], 3), rate
        self._replay = deque[np.ndarray]()
        self._readings = 0

    def read(self, sound: bool = False) -> Iterator[Frame]:
        index, should_keep = 0, not self._readings
        self._readings += 1
        while (began := now()) and (image := self._read_frame()) is not None:
            if should_keep:
                self._replay.append(image.copy())
            yield Frame(index, Rgb(image), began, None, index / self.rate)
            index += 1

    def _read_frame(self) -> np.ndarray | None:
        """Return the next frame, None at the end; an incomplete frame counts as damaged."""
        if self._replay and self._readings > 1:
            return self._replay.popleft()
        size = int(np.prod(self._shape))
        chunks, bytes_left = [], size
        while bytes_left and (chunk := os.read(self._descriptor, bytes_left)):
            chunks.append(chunk)
            bytes_left -= len(chunk)
        self.damaged += 0 < bytes_left < size
        return None if bytes_left else np.frombuffer(bytearray(b"".join(chunks)), np.uint8).reshape(self._shape)


class ImageSink(Sink):
    """Images with the source's names in a folder, or one image file."""

    def __init__(self, path: Path, single: bool) -> None:
        self._path, self._single = path, single
        if not single:
            path.mkdir(parents=True, exist_ok=True)

    def write(self, frame: Frame) -> None:
        import cv2

        file = self._path if self._single else self._path / frame.name
        is_encoded, encoded = cv2.imencode(file.suffix, cv2.cvtColor(frame.picture.rgb(), cv2.COLOR_RGB2BGR))
        if not is_encoded:
            raise UserError(f"OpenCV can't write {file}; give another suffix, such as .png")
        file.write_bytes(encoded.tobytes())
        self.written += 1


# Frames by OpenCV, without sound: from a camera, and from and to video files without PyAV

FOURCC = {".mp4": "mp4v", ".mov": "mp4v", ".m4v": "mp4v", ".mkv": "mp4v", ".avi": "MJPG", ".webm": "VP80"}
DEFAULT_RATE = 30.0  # of a source without a rate
COVER_RATE = 90_000  # FFmpeg's frames per second of cover art


class CaptureSource(Source):
    """A camera by its number, or a video by its path or URL."""

    def __init__(self, location: int | str, live: bool) -> None:
        import cv2

        super().__init__(f"camera {location}" if isinstance(location, int) else Path(location).name)
        self._location, self.live, self.is_single_pass = location, live, isinstance(location, int) or "://" in location
        capture = self._open_capture()
        self.rate = max(0.0, float(capture.get(cv2.CAP_PROP_FPS)))
        if self.rate >= COVER_RATE:
            problem = f"OpenCV reads the cover art of {self.name} in place of its video"
            raise UserError(f"{problem}; PyAV reads that: {install('av')}")
        self._aspect = _read_aspect(capture)
        if not live:
            self.count = max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        capture.release()

    def _open_capture(self) -> Any:
        import cv2

        capture = cv2.VideoCapture(self._location)
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
                is_decoded, image = capture.retrieve()
                if not is_decoded:
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
    """Return the pixel aspect (width over height) of OpenCV's frames, which are turned upright."""
    import cv2

    parts = [round(capture.get(key)) for key in (cv2.CAP_PROP_SAR_NUM, cv2.CAP_PROP_SAR_DEN)]
    if min(parts) < 1:
        return SQUARE_PIXELS
    rotation = round(capture.get(cv2.CAP_PROP_ORIENTATION_META)) % 180
    return Fraction(*(reversed(parts) if rotation else parts))


class WriterSink(Sink):
    """A video file of the source's average rate, with square pixels and without sound."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self._rate = path, source.rate or DEFAULT_RATE
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

    def close(self, last_packets: list[Any] | None = None) -> list[str]:
        if self._writer is not None:
            self._writer.release()
        return ["written by OpenCV, without sound and at a constant rate; PyAV keeps both"]


TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameter numbers in glibc's malloc.h
MAX_BLOCK_B, MAX_FREE_B = 32 << 20, 1 << 30  # bytes: largest block (glibc's limit), and limit of kept freed memory
CAMERA_PREFIX, PIPE_PREFIX = "camera:", "pipe:"
# First PyAV version with a new enough FFmpeg: fragmented MP4 files become whole ones. Files by 17.0 can't be decoded.
MIN_PYAV = 17, 1
STREAM_SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "udp", "tcp", "srt", "mms")


def prepare_libraries() -> None:
    """Set OpenCV to one thread; raise `Unavailable` with the package to install if it is missing.

    FFmpeg stays silent, PyAV's default: at any log level its threads would call Python and deadlock with waiting
    threads.
    """
    cv2 = load_library("cv2", "video")
    _keep_memory()
    cv2.setNumThreads(1)  # stages are threads already, and OpenCV's would take the engine's processors


def _keep_memory() -> None:
    """Make glibc keep freed frame memory: memory from the kernel would be zeroed page by page for every frame.

    All threads share one heap: other heaps return memory regardless of the thresholds, and one stage's freed memory
    would be useless to another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAX_BLOCK_B)
        mallopt(TRIM_THRESHOLD, MAX_FREE_B)
        mallopt(ARENA_MAX, 1)


def has_pyav() -> bool:
    """Return whether PyAV is installed, in a sufficient version."""
    return _read_pyav_version() >= MIN_PYAV


def describe_old_pyav() -> str:
    """Return a sentence if the installed PyAV is too old to be used; else ""."""
    if not (0,) < _read_pyav_version() < MIN_PYAV:
        return ""
    min_version, version = ".".join(map(str, MIN_PYAV)), metadata.version("av")
    return f"PyAV {version} is too old, so OpenCV reads and writes; {install('av')} brings {min_version} or newer"


def _read_pyav_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed PyAV; (0,) if it is missing."""
    try:
        return tuple(map(int, metadata.version("av").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):
        return (0,)


def open_source(text: str, options: VideoOptions, device: str = "") -> Source:
    """Return the reader of a source: a path, a URL, `camera:0`, or `pipe:3` for raw frames from that descriptor.

    The GPU `device` (`cuda:0`) decodes supported streams.
    """
    if text.startswith(PIPE_PREFIX):
        return RawSource(int(text.removeprefix(PIPE_PREFIX)), options.raw_size, options.frame_rate)
    if text.startswith(CAMERA_PREFIX):
        camera_number = text.removeprefix(CAMERA_PREFIX)
        if not camera_number.isdecimal():
            raise UserError(f"{text!r} is not a camera; give camera:0 for the first one")
        return CaptureSource(int(camera_number), live=options.live is not False)
    live, path = bool(options.live), Path(text)
    if "://" in text:
        live = text.split("://")[0].lower() in STREAM_SCHEMES if options.live is None else options.live
    elif not path.exists():
        raise UserError(f"{text} does not exist; give a video, an image, a folder of images, a URL or camera:0")
    elif path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageSource(path, options.frame_rate)
    return VideoSource(text, live, device) if has_pyav() else CaptureSource(text, live)


def open_sink(path: Path | None, source: Source, codec: str) -> Sink:
    """Return the writer to that path, by the kind of the source and the path's suffix."""
    if path is None:
        return Sink()
    if source.images and path.suffix.lower() in IMAGE_SUFFIXES:
        return ImageSink(path, single=True)
    if source.images and not path.suffix:
        return ImageSink(path, single=False)
    return VideoSink(path, source, codec) if has_pyav() else WriterSink(path, source)
