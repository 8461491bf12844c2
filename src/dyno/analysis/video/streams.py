"""The oracle: what several videos would reach through one engine, from the stages measured alone.

Every stream has stages of its own but for inference, which all share, as all share the processors. What is lowest of
their rates bounds the whole (operational analysis; Denning and Buzen, Computing Surveys, 1978); a simulation says how
near the whole comes, and how long a frame takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dyno.analysis import stats
from dyno.analysis.video.figures import PERCENTILES, SHARED, Stage, Video
from dyno.analysis.video.simulation import Server, Simulation

MOST_STREAMS = 32
KNOWN = ("postprocess", "track")  # after the last of them a frame's boxes are known
FRAMES, PIECES = 400, 6400  # that are simulated: of a stream at most, and of all about


@dataclass(frozen=True)
class StreamPrediction:
    """So many streams at once: frames per second of all together, what bounds them, and the 99th percentile of the
    seconds from a frame's reading until its boxes are known."""

    streams: int
    rate: float
    p99: float
    bound: str

    @property
    def each(self) -> float:
        """Frames per second of one stream."""
        return self.rate / self.streams


def predict(video: Video, streams: int) -> StreamPrediction:
    """Predict the result of `streams` streams, each like this one and read as fast as it is taken."""
    servers = [_make_server(video, stage) for stage in video.stages]
    known = max(place for place, stage in enumerate(video.stages) if stage.name in KNOWN)
    frames = max(len(video.stages), min(FRAMES, PIECES // streams))
    facts = video.facts
    found = Simulation(servers, known, streams, frames, facts.processors, facts.depth, video.crowding).run()
    latency = stats.percentile_of(found.latencies, PERCENTILES[-1])
    more_in_flight = (facts.slots - 1) * next(s.alone.value for s in video.stages if s.name == SHARED)
    rates = video.limits(streams)
    return StreamPrediction(streams, found.rate, latency + more_in_flight, min(rates, key=lambda name: rates[name]))


def _make_server(video: Video, stage: Stage) -> Server:
    """Return the stage as a server of the simulation; the engine answers one frame after the other, at its throughput.

    The simulation slows all stages down alike, so these seconds include the stage's own slow-down under full CPU load.
    """
    in_crowd = stage.crowded / stage.cpu / video.crowding(video.facts.processors) if stage.cpu else 1.0
    handed = video.facts.hand_over if stage is not video.stages[0] else 0.0
    seconds = video.arrays[f"alone_{stage.name}"] * in_crowd + handed
    processors = (stage.cpu + handed) / (stage.alone.value + handed)
    return Server(seconds, processors, stage.name == SHARED)


def fitting(video: Video, rate: float) -> int:
    """Return how many streams at that rate each fit by the bounds, at most MOST_STREAMS; 0 if not even one fits."""
    fits = [k for k in range(1, MOST_STREAMS + 1) if min(video.limits(k).values()) / k >= rate]
    return max(fits, default=0)
