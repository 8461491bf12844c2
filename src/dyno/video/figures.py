"""Figures of a video with one trial's network, as pure functions of the stored times."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from dyno.results import stats
from dyno.results.files import read_npz
from dyno.results.run_data import RunData
from dyno.results.stats import Interval, Rule, Speedup
from dyno.results.trial_result import TrialResult
from dyno.worker.facts.job import VideoFacts

STAGES = ("decode", "preprocess", "inference", "postprocess", "track", "draw", "encode")
PROCESSORS = "processors"
SHARED_STAGE = "inference"  # shared by all streams, like the processors; other stages exist per stream
INTERVAL_SECTIONS = 10  # sections of consecutive frames or requests in an interval estimate
PERCENTILES = (0.5, 0.95, 0.99)
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline.

    Mean seconds per frame with 95 % intervals: `alone`, and `in_pipeline` the other stages in the pipeline. Processor
    time per frame: `cpu` alone, and `cpu_under_load` with every processor at work. Shares of the pipeline's time:
    `working`, `starved` (its queue was empty) and `blocked` (the next queue was full). `queue` is the mean number of
    waiting items.
    """

    name: str
    alone: Interval
    in_pipeline: Interval
    cpu: float
    cpu_under_load: float
    working: float
    starved: float
    blocked: float
    queue: float


@dataclass(frozen=True)
class StageTimeline:
    """A stage's pieces of work by start: when each `began`, `ended`, and was `handed` on, and items `waiting` then."""

    name: str
    began: np.ndarray
    ended: np.ndarray
    handed: np.ndarray
    waiting: np.ndarray

    def find_last(self, times: np.ndarray, limit: float, stop: int) -> int:
        """Return the index below `stop` of the latest time not after the limit; -1 without any."""
        candidates = np.where(times[:stop] <= limit, times[:stop], -np.inf)
        return int(candidates.argmax()) if len(candidates) and np.isfinite(candidates.max()) else -1


@dataclass(frozen=True)
class Bound:
    """An upper limit on frames per second, and its cause."""

    name: str
    rate: float

    def share(self, rate: float) -> float:
        return rate / self.rate


def _find_lowest(rates: Mapping[str, float]) -> Bound:
    name = min(rates, key=lambda each: rates[each])
    return Bound(name, rates[name])


@dataclass(frozen=True)
class Video:
    """One round of a trial's network on a video; other programs kept `other_load` processors busy."""

    facts: VideoFacts
    arrays: Arrays
    other_load: float = 0.0

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Existing stages, in the order of the pipeline."""
        return tuple(self._make_stage(name) for name in STAGES if f"alone_{name}" in self.arrays)

    @cached_property
    def rate(self) -> float:
        """Frames per second of all streams together, from the first frame's reading to the closed file."""
        return self.facts.answered / self.facts.seconds

    @property
    def inference_rate(self) -> float:
        """Frames per second of inference alone."""
        return 1 / self._find_stage(SHARED_STAGE).alone.value

    @property
    def inference_beside(self) -> float:
        """Frames per second of inference beside the other stages, over the time in which it had work."""
        return self.facts.streams / self._find_stage(SHARED_STAGE).in_pipeline.value

    def _find_stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def slowest(self) -> Stage:
        """The stage with the lowest limit, alone."""
        return self._find_stage(self.by_stage.name)

    @cached_property
    def by_stage(self) -> Bound:
        """Limit of the slowest stage, if all others cost nothing."""
        return _find_lowest({k: v for k, v in self.find_limits(self.facts.streams).items() if k != PROCESSORS})

    def find_limits(self, streams: int, shares: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
        """Return the frames/s that each stage and the processors allow for `streams` streams together.

        `shares` scale the time and processor time of stages.
        """
        rates = {
            s.name: (1 if s.name == SHARED_STAGE else streams) / (s.alone.value * shares.get(s.name, 1.0))
            for s in self.stages
        }
        seconds = sum(s.cpu_under_load * shares.get(s.name, 1.0) for s in self.stages)
        return rates | {PROCESSORS: self.facts.processors / seconds if seconds > 0 else math.inf}

    def find_percentile(self, q: float, event: str = "known") -> float | None:
        """Return a percentile of the latencies; None with too few frames. The median needs only one frame."""
        samples = self.list_latencies(event)
        min_count = 1 if q == PERCENTILES[0] else stats.samples_for(q)
        return stats.percentile_of(samples, q) if len(samples) >= min_count else None

    @property
    def utilization(self) -> float:
        """Share of the processors' time used by the pipeline."""
        return self.facts.cpu_whole * self.rate / self.facts.processors

    @property
    def cpu_under_load(self) -> float:
        """Processor time per frame of all stages with every processor at work, in seconds."""
        return sum(stage.cpu_under_load for stage in self.stages)

    def find_crowding(self, busy_count: float) -> float:
        """Return the factor on processor time while `busy_count` processors are busy.

        As measured if all are busy; proportional between that and one.
        """
        other_count = self.facts.processors - 1
        share = min(max((busy_count - 1) / other_count, 0.0), 1.0) if other_count else 0.0
        return 1 + (max(self.facts.crowding, 1.0) - 1) * share

    @property
    def bound(self) -> Bound:
        """Lower of the limits of the slowest stage and of the processors."""
        return _find_lowest(self.find_limits(self.facts.streams))

    def find_bound(self, name: str, share: float) -> Bound:
        """Return the bound if that stage took only a `share` of its time and processor time."""
        return _find_lowest(self.find_limits(self.facts.streams, {name: share}))

    def list_latencies(self, event: str) -> np.ndarray:
        """Return the seconds from the start of reading a frame until its boxes are `known`, or it is `written`."""
        began = self.arrays["frame_began"]
        ended = self.arrays["frame_known"] if event == "known" else self.arrays.get("encode_ended", np.empty(0))
        count = min(len(began), len(ended))
        return np.asarray(ended[:count] - began[:count])

    def read_timeline(self, name: str) -> StageTimeline:
        """Return the stored times of the stage, sorted by start."""
        times = [self.arrays[f"{name}_{key}"] for key in ("began", "ended", "handed", "waiting")]
        order = np.argsort(times[0], kind="stable")
        return StageTimeline(name, *(array[order] for array in times))

    def _make_stage(self, name: str) -> Stage:
        timeline = self.read_timeline(name)
        began, ended, handed, waiting = timeline.began, timeline.ended, timeline.handed, timeline.waiting
        frames, total = max(1, len(self.arrays["frame_known"])), self.facts.seconds
        starved = began[1:] - handed[:-1]
        cpu = self.facts.cpu.get(name, 0.0)
        cpu_under_load = cpu * self.find_crowding(self.facts.processors)
        if name == SHARED_STAGE and self.facts.cpu_inference:  # measured separately
            cpu_under_load = max(cpu, self.facts.cpu_inference)
        parts = ended - began, starved, handed - ended
        working, empty, blocked = (float(seconds.sum() / total) for seconds in parts)
        alone, beside = mean_interval(self.arrays[f"alone_{name}"]), mean_interval(ended - began, len(began) / frames)
        queue = float(waiting.mean()) if len(waiting) else 0.0
        return Stage(name, alone, beside, cpu, cpu_under_load, working, empty, blocked, queue)


def section_interval(samples: np.ndarray, estimate: Callable[[np.ndarray], float], min_count: int) -> Interval:
    """Compute an estimate with its 95 % interval from ten sections of consecutive samples, by Student's t.

    Consecutive samples are correlated, so a section counts as one observation (sectioning; Asmussen and Glynn,
    Stochastic Simulation, 2007, III.5; of means: Law, Simulation Modeling and Analysis, 2015, 9.5.3). NaN limits if a
    section has fewer than `min_count` samples, or an estimate isn't finite.
    """
    value = estimate(samples)
    estimates = (
        [estimate(part) for part in np.array_split(samples, INTERVAL_SECTIONS)]
        if len(samples) >= min_count * INTERVAL_SECTIONS
        else []
    )
    if not estimates or not np.isfinite([value, *estimates]).all():
        return Interval(value, math.nan, math.nan)
    spread = math.sqrt(sum((section_value - value) ** 2 for section_value in estimates) / (INTERVAL_SECTIONS - 1))
    reach = stats.t_quantile(INTERVAL_SECTIONS - 1) * spread / math.sqrt(INTERVAL_SECTIONS)
    return Interval(value, max(0.0, value - reach), value + reach)


def mean_interval(samples: np.ndarray, scale: float = 1.0) -> Interval:
    """Compute `scale` times the mean with its interval; NaN limits with fewer than two frames per section."""
    return section_interval(samples, lambda part: scale * float(np.mean(part)) if len(part) else math.nan, 2)


# Videos of a run: each trial's videos, speeds, and speed-ups over the reference.

ARRAYS_FILE = "video.npz"
REFERENCE_BACKEND = "pytorch"  # preferred reference


@dataclass(frozen=True)
class LoadRun:
    """A trial under load: a video, or requests."""

    trial: TrialResult

    @property
    def warnings(self) -> tuple[str, ...]:
        """Distinct warnings of all rounds."""
        return tuple(dict.fromkeys(warning for r in self.trial.good for warning in r.warnings))

    @property
    def seconds(self) -> list[float]:
        """Seconds per frame, or per request at the highest rate, of each round."""
        raise NotImplementedError


Run = TypeVar("Run", bound=LoadRun)


def find_reference(runs: Sequence[Run]) -> Run:
    """Return the reference run: PyTorch, else the first."""
    return next((run for run in runs if run.trial.backend == REFERENCE_BACKEND), runs[0])


def list_speedups(runs: Sequence[Run], rule: Rule) -> list[Speedup | None]:
    """Return the speed-up of each run over the reference, with a verdict; None for the reference."""
    reference = find_reference(runs)
    rest = [run for run in runs if run is not reference]
    speedups = iter(stats.decide_family([stats.collect_evidence(run.seconds, reference.seconds) for run in rest], rule))
    return [None if run is reference else next(speedups) for run in runs]


@dataclass(frozen=True)
class VideoRun(LoadRun):
    """A trial with its videos, one per round."""

    videos: tuple[Video, ...]

    @cached_property
    def typical(self) -> Video:
        """The round of median rate, for details."""
        median_rate = statistics.median_low(video.rate for video in self.videos)
        return next(video for video in self.videos if video.rate == median_rate)

    @cached_property
    def rate(self) -> Interval:
        """Frames per second end to end: the rounds' geometric mean with its 95 % interval."""
        return stats.find_center([video.rate for video in self.videos])

    @property
    def seconds(self) -> list[float]:
        return [1 / video.rate for video in self.videos]


def list_runs(run: RunData) -> list[VideoRun]:
    """Return each trial that answered a video, in the order of the trials."""
    return [video_run for trial in run.records if (video_run := list_videos(trial)) is not None]


def list_videos(trial: TrialResult) -> VideoRun | None:
    """Return the trial with its videos; None without any."""
    videos = tuple(
        Video(r.facts.video, read_npz(r.folder / ARRAYS_FILE), r.facts.others_busy.get("video", 0.0))
        for r in trial.good
        if r.facts.video is not None and (r.folder / ARRAYS_FILE).is_file()
    )
    full_videos = tuple(video for video in videos if not video.facts.stopped)
    # The rate of the first frames is not that of the whole video.
    return VideoRun(trial, full_videos or videos) if videos else None


# Prediction for several videos through one engine, from the stages measured alone. Every stream has its own stages;
# inference and the processors are shared by all. The lowest of their rates bounds the whole (operational analysis;
# Denning and Buzen, Computing Surveys, 1978). A simulation tells how close to the bound the whole comes, and how long a
# frame takes.

# Simulation of the pipeline from its stages alone, with bounded queues and shared processors. Work is a fluid: if
# active stages need more processors than there are, all slow down alike (processor sharing; Kleinrock, Queueing Systems
# II, 1976, 4.4). They slow down somewhat earlier, because busy processors share caches and memory. So a single clock of
# work done orders the ends of all pieces, and its speed gives their duration.


@dataclass(frozen=True)
class Server:
    """A stage of the simulation: seconds per frame at full speed (repeated cyclically), and its busy `processors`.

    `shared` stages serve all streams.
    """

    seconds: np.ndarray
    processors: float
    shared: bool = False


@dataclass(frozen=True)
class SimulationResult:
    """Frames per second of all streams together, and the seconds from a frame's reading until its boxes are known."""

    rate: float
    latencies: np.ndarray


class Simulation:
    """Simulation of streams of `frames` frames each through the servers.

    `known` is the index of the server that completes the boxes; `crowding` is the factor on time by busy processors.
    """

    def __init__(
        self, servers: Sequence[Server], box_stage: int, streams: int, frames: int, processors: int, depth: int,
        crowding: Callable[[float], float] = lambda busy: 1.0,
    ) -> None:  # fmt: skip
        self._servers, self._known_stage, self._frames = servers, box_stage, frames
        self._processors, self._depth, self._streams, self._crowding = processors, depth, streams, crowding
        # Frames begun, ended and handed on, by stream and stage, in order.
        self._started_counts, self._finished_counts, self._handed_counts = (
            [[0] * len(servers) for _ in range(streams)] for _ in range(3)
        )
        self._idle = [True for _ in servers]
        self._waiting = [deque[int]() for _ in servers]  # streams waiting for a shared server
        self._start_times = np.zeros((streams, frames))
        self._latencies: list[float] = []
        self._heap: list[tuple[float, int, int]] = []  # work clock at the end of a piece, its stream and stage
        self._requested_processors = self._work_done = self._now = 0.0

    def run(self) -> SimulationResult:
        """Run until every frame has gone through."""
        for stream in range(self._streams):
            self._start_frame(stream, 0)
        while self._heap:
            end, stream, stage = heapq.heappop(self._heap)
            slowdown = max(1.0, self._requested_processors / self._processors) * self._crowding(
                self._requested_processors
            )
            self._now += (end - self._work_done) * slowdown
            self._work_done = end
            self._finish_frame(stream, stage)
        return SimulationResult(self._streams * self._frames / self._now, np.array(self._latencies))

    def _start_frame(self, stream: int, stage: int) -> None:
        """Begin the next frame waiting for the stage, if there is one and the stage is free."""
        frame, arrived_count = (
            self._started_counts[stream][stage],
            self._handed_counts[stream][stage - 1] if stage else self._frames,
        )
        if frame > self._handed_counts[stream][stage] or frame == arrived_count:
            return
        self._started_counts[stream][stage] += 1
        if stage:
            self._hand_on(stream, stage - 1)  # room for the previous stage's next frame
        else:
            self._start_times[stream, frame] = self._now
        if not self._servers[stage].shared:
            self._serve_frame(stream, stage)
        elif self._idle[stage]:
            self._idle[stage] = False
            self._serve_frame(stream, stage)
        else:
            self._waiting[stage].append(stream)

    def _serve_frame(self, stream: int, stage: int) -> None:
        server = self._servers[stage]
        self._requested_processors += server.processors
        seconds = float(server.seconds[self._finished_counts[stream][stage] % len(server.seconds)])
        heapq.heappush(self._heap, (self._work_done + seconds, stream, stage))

    def _finish_frame(self, stream: int, stage: int) -> None:
        server = self._servers[stage]
        self._requested_processors -= server.processors
        if server.shared and self._waiting[stage]:
            self._serve_frame(self._waiting[stage].popleft(), stage)
        else:
            self._idle[stage] = True
        if stage == self._known_stage:
            self._latencies.append(self._now - self._start_times[stream, self._finished_counts[stream][stage]])
        self._finished_counts[stream][stage] += 1
        self._hand_on(stream, stage)

    def _hand_on(self, stream: int, stage: int) -> None:
        """Hand an ended frame to the next stage, or keep it until there is room."""
        is_last, handed = stage + 1 == len(self._servers), self._handed_counts[stream]
        is_full = not is_last and handed[stage] - self._started_counts[stream][stage + 1] >= self._depth
        if is_full or handed[stage] == self._finished_counts[stream][stage]:
            return
        handed[stage] += 1
        if not is_last:
            self._start_frame(stream, stage + 1)
        self._start_frame(stream, stage)


MAX_STREAMS = 32
BOX_STAGES = ("postprocess", "track")  # boxes are known after the last of these
MAX_FRAMES_PER_STREAM, MAX_SIMULATED_FRAMES = 400, 6400  # simulated frames per stream, and in all


@dataclass(frozen=True)
class StreamPrediction:
    """Prediction for concurrent streams: frames per second of all together, their bound, and p99 latency in seconds.

    Latency is from a frame's reading until its boxes are known.
    """

    streams: int
    rate: float
    p99: float
    bound: str

    @property
    def stream_rate(self) -> float:
        """Frames per second of one stream."""
        return self.rate / self.streams


def predict_streams(video: Video, streams: int) -> StreamPrediction:
    """Predict the result of `streams` streams like this one, each read as fast as the pipeline takes it."""
    servers = [_make_server(video, stage) for stage in video.stages]
    box_stage = max(index for index, stage in enumerate(video.stages) if stage.name in BOX_STAGES)
    frames = max(len(video.stages), min(MAX_FRAMES_PER_STREAM, MAX_SIMULATED_FRAMES // streams))
    facts = video.facts
    result = Simulation(servers, box_stage, streams, frames, facts.processors, facts.depth, video.find_crowding).run()
    latency = stats.percentile_of(result.latencies, PERCENTILES[-1])
    slot_seconds = (facts.slots - 1) * next(s.alone.value for s in video.stages if s.name == SHARED_STAGE)
    bound = _find_lowest(video.find_limits(streams))
    return StreamPrediction(streams, result.rate, latency + slot_seconds, bound.name)


def _make_server(video: Video, stage: Stage) -> Server:
    """Return the stage as a simulated server; the engine answers frames one at a time, at its throughput.

    The simulation slows all stages alike, so these seconds include the stage's own slow-down under full CPU load.
    """
    slowdown = stage.cpu_under_load / stage.cpu / video.find_crowding(video.facts.processors) if stage.cpu else 1.0
    hand_over = video.facts.hand_over if stage is not video.stages[0] else 0.0
    seconds = video.arrays[f"alone_{stage.name}"] * slowdown + hand_over
    processors = (stage.cpu + hand_over) / (stage.alone.value + hand_over)
    return Server(seconds, processors, stage.name == SHARED_STAGE)


def count_fitting(video: Video, rate: float) -> int:
    """Return how many streams at that rate each fit by the bounds, at most MAX_STREAMS; 0 if none fits."""
    counts = [k for k in range(1, MAX_STREAMS + 1) if min(video.find_limits(k).values()) / k >= rate]
    return max(counts, default=0)
