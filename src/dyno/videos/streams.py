"""The oracle: what several videos would reach through one engine, from the stages measured alone.

Every stream has stages of its own but for inference, which all share, as all share the processors. What is lowest of
their rates bounds the whole (operational analysis; Denning and Buzen, Computing Surveys, 1978); a simulation says how
near the whole comes, and how long a frame takes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.results import stats
from dyno.videos.figures import PERCENTILES, SHARED, Stage, Video

# What a pipeline would do, from its stages alone: a simulation with bounded queues and shared processors.
#
# Work is a fluid: while the stages at work ask for more processors than there are, all get slower alike (processor
# sharing; Kleinrock, Queueing Systems II, 1976, 4.4), and somewhat sooner, as processors that work at the same time
# share caches and memory. So one clock of work done ends every piece in turn, and its speed says how long that takes.


@dataclass(frozen=True)
class Server:
    """A stage: seconds of each frame while nothing else slows its processors (used again from the beginning), how many
    of these it keeps busy meanwhile, and whether all streams share it."""

    seconds: np.ndarray
    processors: float
    shared: bool = False


@dataclass(frozen=True)
class SimulationResult:
    """Frames per second of all streams together, and the seconds from a frame's reading until its boxes are known."""

    rate: float
    latencies: np.ndarray


class Simulation:
    """Streams of so many frames each through the servers; `known` is the number of the one that ends with boxes, and
    `crowding` how many times the time work takes while so many processors are busy."""

    def __init__(
        self, servers: Sequence[Server], known: int, streams: int, frames: int, processors: int, depth: int,
        crowding: Callable[[float], float] = lambda busy: 1.0,
    ) -> None:  # fmt: skip
        self._servers, self._known, self._frames = servers, known, frames
        self._processors, self._depth, self._streams, self._crowding = processors, depth, streams, crowding
        stages = range(len(servers))
        self._queues = [[deque[int]() for _ in stages] for _ in range(streams)]
        self._held = [[-1 for _ in stages] for _ in range(streams)]  # the frame that a stage has, -1 for none
        self._blocked = [[False for _ in stages] for _ in range(streams)]
        self._free = [True for _ in servers]
        self._waiting = [deque[int]() for _ in stages]  # streams that wait for a shared server
        self._next = [0] * streams
        self._began = np.zeros((streams, frames))
        self._latencies: list[float] = []
        self._heap: list[tuple[float, int, int]] = []  # the work done at which a piece ends, its stream and its stage
        self._asked = self._done = self._now = 0.0

    def run(self) -> SimulationResult:
        """Run until every frame has gone through."""
        for stream in range(self._streams):
            self._start_frame(stream, 0)
        while self._heap:
            done, stream, stage = heapq.heappop(self._heap)
            self._now += (done - self._done) * self._compute_slowdown()
            self._done = done
            self._finish_frame(stream, stage)
        return SimulationResult(self._streams * self._frames / self._now, np.array(self._latencies))

    def _compute_slowdown(self) -> float:
        return max(1.0, self._asked / self._processors) * self._crowding(self._asked)

    def _start_frame(self, stream: int, stage: int) -> None:
        """Begin the next frame that waits for the stage, where there is one and the stage is free."""
        queue = self._queues[stream][stage]
        if self._held[stream][stage] >= 0 or not (queue or (stage == 0 and self._next[stream] < self._frames)):
            return
        if stage == 0:
            frame, self._next[stream] = self._next[stream], self._next[stream] + 1
            self._began[stream, frame] = self._now
        else:
            frame = queue.popleft()
        self._held[stream][stage] = frame
        if stage and self._blocked[stream][stage - 1]:  # there is room for the one before
            self._hand_on(stream, stage - 1)
        if not self._servers[stage].shared:
            self._serve_frame(stream, stage)
        elif self._free[stage]:
            self._free[stage] = False
            self._serve_frame(stream, stage)
        else:
            self._waiting[stage].append(stream)

    def _serve_frame(self, stream: int, stage: int) -> None:
        server = self._servers[stage]
        self._asked += server.processors
        seconds = float(server.seconds[self._held[stream][stage] % len(server.seconds)])
        heapq.heappush(self._heap, (self._done + seconds, stream, stage))

    def _finish_frame(self, stream: int, stage: int) -> None:
        server = self._servers[stage]
        self._asked -= server.processors
        if server.shared and self._waiting[stage]:
            self._serve_frame(self._waiting[stage].popleft(), stage)
        else:
            self._free[stage] = True
        if stage == self._known:
            self._latencies.append(self._now - self._began[stream, self._held[stream][stage]])
        self._hand_on(stream, stage)

    def _hand_on(self, stream: int, stage: int) -> None:
        """Give the frame to the next stage, or keep it until there is room."""
        last = stage + 1 == len(self._servers)
        self._blocked[stream][stage] = not last and len(self._queues[stream][stage + 1]) >= self._depth
        if self._blocked[stream][stage]:
            return
        if not last:
            self._queues[stream][stage + 1].append(self._held[stream][stage])
        self._held[stream][stage] = -1
        if not last:
            self._start_frame(stream, stage + 1)
        self._start_frame(stream, stage)


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


def predict_streams(video: Video, streams: int) -> StreamPrediction:
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


def count_fitting(video: Video, rate: float) -> int:
    """Return how many streams at that rate each fit by the bounds, at most MOST_STREAMS; 0 if not even one fits."""
    fits = [k for k in range(1, MOST_STREAMS + 1) if min(video.limits(k).values()) / k >= rate]
    return max(fits, default=0)
