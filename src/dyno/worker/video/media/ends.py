"""The ends of the pipeline: a frame, what frames are read from, and what they are written to."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyno.worker.tasks.postprocess import Detections
from dyno.worker.video.media.pictures import Picture

now = time.perf_counter_ns
SHARE, MOST_THREADS = 4, 8  # of the processors that a codec's own threads take, and how many at most
SHARE_OF_LANES = 4, 8  # of the processors that preparing and post-processing take each: beside a GPU, and beside a CPU


def codec_threads() -> int:
    """Return a codec's number of threads: the stages are threads already, and a codec's cost processor time."""
    return min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // SHARE))


def lanes_beside(on_cpu: bool) -> int:
    """Return the number of threads that prepare frames, and of those that post-process them.

    On a CPU the engine takes the processors.
    """
    share = SHARE_OF_LANES[on_cpu]
    return min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // share))


@dataclass
class Frame:
    """One frame, whose `picture` belongs to it, so it may be drawn on.

    `pts` counts in the source's time base (None: the source has none), `seconds` is the same time; `name` is that of an
    image file. `packets` of sound come before it in the source. `began` is when its reading began, in ns of
    `perf_counter_ns`; of a live source it is when the frame had arrived. `identities` are those of the objects that
    its detections are of (-1: of none yet), where they are tracked.
    """

    index: int
    picture: Picture
    began: int
    pts: int | None = None
    seconds: float | None = None
    name: str = ""
    packets: list[Any] = field(default_factory=list)
    detections: Detections | None = None
    identities: np.ndarray | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, in pixels."""
        return self.picture.height, self.picture.width


@dataclass
class Batch:
    """Frames that go through the network together: the arrays it reads, and later its outputs (copies) and their
    names."""

    frames: list[Frame]
    feed: Any
    outputs: list[np.ndarray] = field(default_factory=list)
    names: tuple[str, ...] = ()


class Source(ABC):
    """What frames are read from. `name` is for messages.

    `count` is the number of frames as far as the source says (0: it doesn't), `rate` its average per second (0: none).
    `live` frames come when they come, and each is an image file of its own with `images`. Some can be read only
    `once`, or should be: they can't be read twice at the same time. After reading, `damaged` is how many pieces could
    not be decoded, `left` are packets of sound behind the last frame, and `notes` are sentences on how it was read.
    """

    count = 0
    rate = 0.0
    live = False
    images = False
    once = False
    damaged = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.left: list[Any] = []
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    @abstractmethod
    def read(self, sound: bool = False) -> Iterator[Frame]:
        """Yield the frames in order, from the beginning at every call.

        With `sound`, the packets of sound before each frame come with it.
        """

    def template(self) -> Any:
        """Return a container of the same streams, as a template for writing; None if the source is no container."""
        return None


class Sink:
    """Where frames go; the base class drops them."""

    written = 0

    def write(self, frame: Frame) -> None:
        """Take the next frame."""
        self.written += 1

    def close(self, left: list[Any] | None = None) -> list[str]:
        """Complete what was written, also after an error; `left` are packets of sound behind the last frame.

        Returns sentences on what differs from the source.
        """
        return []


def disk_full(e: BaseException) -> bool:
    """Return whether a full disk is the cause; FFmpeg's errors have the same numbers."""
    return getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
