"""How many streams fit: what several videos would reach through one engine, from the stages measured alone.

Every stream has stages of its own but for inference, which all share, as all share the processors. No queue loses work,
so the lowest bound is the rate (operational analysis; Denning and Buzen, Computing Surveys, 1978).
"""

from __future__ import annotations

from dataclasses import dataclass

from dyno.analysis.video.figures import PROCESSORS, Video

MOST_STREAMS = 32
SHARED = "inference"


@dataclass(frozen=True)
class Predicted:
    """So many streams at once: frames per second of all together, and what bounds them."""

    streams: int
    rate: float
    bound: str

    @property
    def each(self) -> float:
        """Frames per second of one stream."""
        return self.rate / self.streams


def predict(video: Video, streams: int) -> Predicted:
    """What so many streams reach, each like this one."""
    rates = {s.name: (1 if s.name == SHARED else streams) / s.alone.value for s in video.stages}
    rates[PROCESSORS] = video.by_processors.rate.value
    bound = min(rates, key=lambda name: rates[name])
    return Predicted(streams, rates[bound], bound)


def fitting(video: Video, rate: float) -> int:
    """How many streams fit at that rate each, at most MOST_STREAMS; 0 where not even one does."""
    fits = [k for k in range(1, MOST_STREAMS + 1) if predict(video, k).each >= rate]
    return max(fits, default=0)


def error(video: Video) -> float:
    """How far the prediction for the one stream that ran is from what it reached: predicted / reached - 1."""
    return predict(video, 1).rate / video.rate - 1
