"""Which boxes of a video are of the same object, by the trackers of the library `trackers`."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from typing import Any

import numpy as np

from dyno.worker.extras import install
from dyno.worker.spec import Unavailable
from dyno.worker.video.media.ends import Frame
from dyno.worker.video.options import TRACKERS

NOBODY = -1  # the library's identity of a box that is of no object yet
USUAL_RATE = 30.0  # frames per second of a source that doesn't say
THRESHOLDS = ("track_activation_threshold", "high_conf_det_threshold")


class Tracker:
    """The identities of one video's boxes, from frame to frame in their order.

    A box of at least the score `least` may begin an identity; a weaker one only carries one on, where the method does
    so. `rate` is the source's, per second (0: unknown). Raises `Unavailable` without the library.
    """

    def __init__(self, name: str, rate: float, least: float) -> None:
        try:
            import supervision
            import trackers
        except ImportError as e:
            raise Unavailable(f"tracking needs the library trackers: {e}; {install('trackers')}") from e
        kind: Any = getattr(trackers, TRACKERS[name])
        taken = inspect.signature(kind.__init__).parameters
        self._period, self._seconds = 1 / (rate or USUAL_RATE), -math.inf
        self._tracker = kind(frame_rate=1 / self._period, **{key: least for key in THRESHOLDS if key in taken})
        self._boxes: Any = supervision.Detections
        self._sees = "enable_cmc" in taken  # it estimates the camera's motion from the pictures
        self._classes: dict[int, Counter[int]] = {}

    def identify(self, frame: Frame) -> None:
        """Set the frame's `identities`: whole numbers, one for each of its detections, `NOBODY` where there is none."""
        found = frame.detections
        assert found is not None
        count = len(found.scores)
        boxes = self._boxes(
            xyxy=np.asarray(found.boxes, np.float32).reshape(count, 4), confidence=np.asarray(found.scores, np.float32),
            class_id=np.asarray(found.classes, int), data={"place": np.arange(count)},
        )  # fmt: skip
        tracked = self._tracker.update(
            boxes, frame=frame.picture.rgb() if self._sees else None, timestamp=self._compute_time(frame)
        )
        frame.identities = np.full(count, NOBODY)
        if len(tracked):
            frame.identities[tracked.data["place"]] = tracked.tracker_id
        for identity, kind in zip(frame.identities, found.classes, strict=True):
            if identity != NOBODY:
                self._classes.setdefault(int(identity), Counter())[int(kind)] += 1

    @property
    def counts(self) -> dict[str, int]:
        """How many objects there were of each class, the class that most of an object's boxes have."""
        counted = Counter(classes.most_common(1)[0][0] for classes in self._classes.values())
        return {str(kind): counted[kind] for kind in sorted(counted)}

    def _compute_time(self, frame: Frame) -> float:
        """Return the frame's time in seconds; a period after the last one if the source has none, or an earlier one."""
        if frame.seconds is not None and frame.seconds > self._seconds:
            self._seconds = frame.seconds
        else:
            self._seconds = self._seconds + self._period if math.isfinite(self._seconds) else 0.0
        return self._seconds
