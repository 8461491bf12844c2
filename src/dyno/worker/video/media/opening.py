"""What a source's and an output's name mean: which reader and which writer they get."""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path

from dyno.worker.extras import install
from dyno.worker.spec import Unavailable, UserError
from dyno.worker.video.media.decoding import VideoSource
from dyno.worker.video.media.encoding import VideoSink
from dyno.worker.video.media.ends import Sink, Source
from dyno.worker.video.media.images import ImageSink, ImageSource, RawSource
from dyno.worker.video.media.opencv import CaptureSource, WriterSink
from dyno.worker.video.options import IMAGES, VideoOptions

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # glibc's numbers of them, in malloc.h
LARGEST, KEPT = 32 << 20, 1 << 30  # bytes: of one piece, glibc's own limit, and in all
CAMERA, PIPE = "camera:", "pipe:"
# Of PyAV, the first version whose MP4 files in pieces become whole ones, as its FFmpeg is new enough; what 17.0 writes
# can't be decoded.
PYAV = 17, 1
STREAMS = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "udp", "tcp", "srt", "mms")


def prepare_libraries() -> None:
    """Set OpenCV to one thread; raise `Unavailable` with the package to install if it is missing.

    FFmpeg is silent, PyAV's default: at any level its threads would call Python, and wait for threads that wait for
    them.
    """
    try:
        import cv2
    except ImportError as e:
        raise Unavailable(f"video needs OpenCV: {e}; {install('opencv-python')}") from e
    _keep_memory()
    cv2.setNumThreads(1)  # a stage is a thread already, and OpenCV's own would take the engine's processors


def _keep_memory() -> None:
    """Have glibc keep what frames free: given back to the kernel, every next one would be zeroed page by page.

    All threads share one heap: those of other threads are given back whatever the thresholds say, and what one stage
    frees would be of no use to another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(ARENA_MAX, 1)


def has_pyav() -> bool:
    """Return whether PyAV is installed, in a sufficient version."""
    return _read_pyav_version() >= PYAV


def old_pyav() -> str:
    """Return a sentence if the installed PyAV is too old to be used; "" otherwise."""
    if not (0,) < _read_pyav_version() < PYAV:
        return ""
    least = ".".join(map(str, PYAV))
    return (
        f"PyAV {metadata.version('av')} is too old, so OpenCV reads and writes; {install('av')} brings {least} or newer"
    )


def _read_pyav_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed PyAV; (0,) without one."""
    try:
        return tuple(map(int, metadata.version("av").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):
        return (0,)


def source_of(text: str, options: VideoOptions, device: str = "") -> Source:
    """Return the reader of a source: a path, a URL, `camera:0`, or `pipe:3` for raw frames from that file descriptor.

    A GPU named as `device` (`cuda:0`) decodes the streams that it can.
    """
    if text.startswith(PIPE):
        return RawSource(int(text.removeprefix(PIPE)), options.width, options.height, options.frame_rate)
    if text.startswith(CAMERA):
        number = text.removeprefix(CAMERA)
        if not number.isdecimal():
            raise UserError(f"{text!r} is not a camera; give camera:0 for the first one")
        return CaptureSource(int(number), live=options.live is not False)
    if "://" in text:
        live = text.split("://")[0].lower() in STREAMS if options.live is None else options.live
        return VideoSource(text, live, device) if has_pyav() else CaptureSource(text, live)
    path = Path(text)
    if not path.exists():
        raise UserError(f"{text} does not exist; give a video, an image, a folder of images, a URL or camera:0")
    if path.is_dir() or path.suffix.lower() in IMAGES:
        return ImageSource(path, options.frame_rate)
    return VideoSource(text, bool(options.live), device) if has_pyav() else CaptureSource(text, bool(options.live))


def sink_of(path: Path | None, source: Source, codec: str) -> Sink:
    """Return the writer to that path, by the kind of the source and by the path's suffix."""
    if path is None:
        return Sink()
    if source.images and path.suffix.lower() in IMAGES:
        return ImageSink(path, single=True)
    if source.images and not path.suffix:
        return ImageSink(path, single=False)
    return VideoSink(path, source, codec) if has_pyav() else WriterSink(path, source)
