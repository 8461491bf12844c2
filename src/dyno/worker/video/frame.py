"""One frame on its way through the stages, and those of a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyno.worker.tasks.postprocess import Detections


@dataclass
class Frame:
    """One frame: `image` is uint8, height x width x RGB, and belongs to it, so it may be drawn on.

    `pts` counts in the source's time base (None: the source has none), `seconds` is the same time; `name` is that of an
    image file. `packets` of sound come before it in the source. `began` is when its reading began, in ns of
    `perf_counter_ns`.
    """

    index: int
    image: np.ndarray
    began: int
    pts: int | None = None
    seconds: float | None = None
    name: str = ""
    packets: list[Any] = field(default_factory=list)
    detections: Detections | None = None


@dataclass
class Batch:
    """Frames that go through the network together: the arrays it reads, and later its outputs (copies)."""

    frames: list[Frame]
    feed: Any
    outputs: list[np.ndarray] = field(default_factory=list)


now = time.perf_counter_ns
