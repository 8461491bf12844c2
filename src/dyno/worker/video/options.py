"""Settings of a video job: reading, detection and writing, checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dyno.worker.facts.job import DEVICE, HOST
from dyno.worker.option_values import at_least, option, settle
from dyno.worker.spec import UserError, check_known

SIZE_TEXT = re.compile(r"(\d+)x(\d+)")
# Tracking methods, and their classes in the library `trackers`
TRACKER_NAMES = {
    "bytetrack": "ByteTrackTracker",
    "sort": "SORTTracker",
    "ocsort": "OCSORTTracker",
    "botsort": "BoTSORTTracker",
}

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
# Containers that FFmpeg writes; OpenCV's are among them
VIDEO_SUFFIXES = (
    ".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".f4v", ".flv", ".gif", ".apng", ".avif", ".mpg", ".mpeg", ".vob",
    ".ts", ".mts", ".m2ts", ".mxf", ".nut", ".ogv", ".wmv", ".asf", ".3gp", ".3g2", ".m3u8", ".y4m", ".mjpeg", ".ivf",
    ".h264", ".264", ".h265", ".265", ".hevc",
)  # fmt: skip
OPENING_STAGE = "open the source"  # job stage that detects invalid sources


@dataclass(frozen=True)
class VideoOptions:
    """Video."""

    confidence: float = option(0.25, "Lowest score of a box that is kept.", common=True)
    iou: float = option(0.7, "Overlap above which the weaker of two boxes of a class is dropped.")
    max_detections: int = option(300, "Maximum number of boxes per frame.")
    frames: int = option(0, "Stop after this many frames.", "the whole video", common=True)
    streams: int = option(
        1, "Number of concurrent copies of the video through one engine; the first is written as OUT."
    )
    preload: int = option(
        0, "Decode this many frames into memory first and replay them until --frames, without decoding."
    )
    prepare: str = option(
        "",
        "Where frames become the network's input: host (OpenCV), or device (PyTorch, where the engine computes).",
        "device where PyTorch or ONNX Runtime is the engine, on a GPU; else host",
    )
    decode: str = option(
        "", "What decodes a video: host (FFmpeg), or device (the GPU's own decoder, whose frames stay there).", "host"
    )
    track: str = option(
        "", f"Follow objects, and count them, by this method: {', '.join(TRACKER_NAMES)}.", "boxes alone", common=True
    )
    track_confidence: float = option(
        0.0, "Lowest score of the box that begins a track; weaker boxes only continue it.", "--confidence"
    )
    codec: str = option("", "Codec to write with: h264, hevc, vp9, av1, mpeg4…", "the container's own")
    live: bool | None = option(
        None,
        "Drop the oldest waiting frame when frames come faster than they are answered, as from a camera.",
        "yes for cameras and streams, no for files",
    )
    frame_size: str = option(
        "", "Size of raw frames (IN is -): WIDTHxHEIGHT; three bytes, red, green, blue, per pixel."
    )
    frame_rate: float = option(30.0, "Frames per second of raw frames and folders of images.")

    def __post_init__(self) -> None:
        settle(self)
        for name in ("confidence", "iou", "track_confidence"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name):g}; it must be between 0 and 1")
        at_least(1, max_detections=self.max_detections, streams=self.streams)
        at_least(0, frames=self.frames, preload=self.preload)
        for name in ("decode", "prepare"):
            if getattr(self, name):
                check_known(f"place to {name} frames", getattr(self, name), (HOST, DEVICE))
        if self.track:
            check_known("tracker", self.track, TRACKER_NAMES)
        if self.track_confidence and not self.track:
            raise UserError(f"track_confidence needs a tracker; give --track with one of {', '.join(TRACKER_NAMES)}")
        if not 0 < self.frame_rate <= 1000:
            raise UserError(f"frame_rate is {self.frame_rate:g}; it must be more than 0 and at most 1000")
        if self.frame_size and not all(self.raw_size):
            raise UserError(f"frame_size is {self.frame_size!r}; it must be WIDTHxHEIGHT, such as 960x540")

    @property
    def raw_size(self) -> tuple[int, int]:
        """Width and height of raw frames in pixels; (0, 0) if unset."""
        match = SIZE_TEXT.fullmatch(self.frame_size)
        return (int(match[1]), int(match[2])) if match else (0, 0)
