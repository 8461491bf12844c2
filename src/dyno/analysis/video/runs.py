"""The videos of a run: those of each trial, with how fast it is and whether that is more than the reference's."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from dyno.analysis import stats
from dyno.analysis.records.arrays import read_npz
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.stats import Interval, Speedup
from dyno.analysis.video.figures import Video

ARRAYS = "video.npz"
REFERENCE = "pytorch"  # the others are compared with it where it is among them


@dataclass(frozen=True)
class VideoRun:
    """A trial's network with the video, once for each round."""

    trial: TrialResult
    videos: tuple[Video, ...]

    @cached_property
    def typical(self) -> Video:
        """The round whose rate is the median: the one that details are shown of."""
        middle = statistics.median_low(video.rate for video in self.videos)
        return next(video for video in self.videos if video.rate == middle)

    @cached_property
    def rate(self) -> Interval:
        """Frames per second end to end: the geometric mean of the rounds with its 95 % interval."""
        return stats.center([video.rate for video in self.videos])

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the rounds warn of, each sentence once."""
        return tuple(dict.fromkeys(warning for r in self.trial.good for warning in r.warnings))

    @property
    def seconds(self) -> list[float]:
        """Seconds per frame end to end, of each round."""
        return [1 / video.rate for video in self.videos]


def of_run(run: RunData) -> list[VideoRun]:
    """Return each trial that answered a video, in the order of the trials."""
    return [each for trial in run.records if (each := filmed(trial)) is not None]


def filmed(trial: TrialResult) -> VideoRun | None:
    """Return the trial with its videos; None where it answered none."""
    videos = tuple(
        Video(r.facts.video, read_npz(r.folder / ARRAYS), r.facts.others_busy.get("video", 0.0))
        for r in trial.good
        if r.facts.video is not None and (r.folder / ARRAYS).is_file()
    )
    whole = tuple(video for video in videos if not video.facts.stopped)
    # A rate of the first frames is not one of the whole.
    return VideoRun(trial, whole or videos) if videos else None


def reference(filmed: list[VideoRun]) -> VideoRun:
    """Return the reference of the others: PyTorch, else the first."""
    return next((each for each in filmed if each.trial.backend == REFERENCE), filmed[0])


def speedups(filmed: list[VideoRun], run: RunData) -> list[Speedup | None]:
    """Return how many times faster each is than the reference, end to end, with a verdict; None for the reference."""
    first = reference(filmed)
    others = [each for each in filmed if each is not first]
    decided = iter(stats.decide_family([stats.unpaired(each.seconds, first.seconds) for each in others], run.rule))
    return [None if each is first else next(decided) for each in filmed]
