"""Isolated measurements of each stage on the first frames: seconds and processor time, also under full CPU load.

Two processors are often two threads of one core, even if a virtual machine hides it, and all share caches and memory:
together they do less than each alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from dyno.worker import measure
from dyno.worker.backend import Arrays
from dyno.worker.inputs import input_data
from dyno.worker.spec import Plan
from dyno.worker.tasks.detect import BoxReader
from dyno.worker.video import steps
from dyno.worker.video.drawing import Tracker, draw_detections
from dyno.worker.video.media import Batch, Frame, Preparation, Sink, Source, now
from dyno.worker.video.stages import VideoPipeline, run_pipelines

# Limits of one measurement (one before the video, one after): frames, frames per turn, and seconds until the last turn
TIMED_FRAMES, CHUNK_FRAMES, MAX_SECONDS = 60, 12, 1.5
HANDOVER_ITEMS = 500  # items through idle stages
STAGE_TURNS = 3  # turns of all copies together; a copy writes no more than the isolated stages did


@dataclass(frozen=True)
class IsolatedTimes:
    """One isolated stage: seconds of each frame, and processor seconds per frame over all threads."""

    seconds: np.ndarray
    cpu: float


class _CostClock:
    """A counter of wall and processor seconds of work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def count_seconds(self, frames: int = 1) -> Iterator[None]:
        cpu, start = time.process_time(), now()
        yield
        self.add((now() - start) / 1e9, time.process_time() - cpu, frames)

    def add(self, seconds: float, cpu: float, frames: int = 1) -> None:
        self.seconds += [seconds / frames] * frames
        self.cpu += [cpu / frames] * frames

    def share(self, clock: _CostClock) -> None:
        """Distribute the time in `clock`, spent once for all frames, among them."""
        count = len(self.seconds)
        self.seconds = [value + sum(clock.seconds) / count for value in self.seconds]
        self.cpu = [value + sum(clock.cpu) / count for value in self.cpu]

    def result(self, chunk_size: int) -> IsolatedTimes:
        """Return samples and mean, without the first `chunk_size` frames if there are more.

        Libraries are set up in the first turn.
        """
        first = chunk_size if len(self.seconds) >= 2 * chunk_size else 0
        return IsolatedTimes(np.asarray(self.seconds[first:]), float(np.mean(self.cpu[first:])))


class Bench:
    """The stages on frames, each alone, in turns of a few frames.

    Turns reuse memory as in the pipeline, and the encoder sees consecutive frames.
    """

    def __init__(
        self,
        source: Source,
        engine: steps.SessionThread,
        preparations: Sequence[Preparation],
        reader: BoxReader,
        tracker: Tracker | None,
        sink: Sink | None,
    ) -> None:
        self._source, self._tracker, self._sink = source, tracker, sink
        self._engine = steps.InferenceStage(engine)
        self._answer = steps.PostprocessingStage(reader, preparations[0].size)
        self._clocks = {name: _CostClock() for name in steps.STAGES if name != steps.INFER}
        self._preparation, self._batch, self._lanes = preparations[0], preparations[0].batch, len(preparations)
        self._chunk = CHUNK_FRAMES if self._lanes == 1 else max(CHUNK_FRAMES, self._lanes * self._batch)
        count = -(-self._chunk // self._batch)
        count = max(count, input_data.FEED_COUNT)
        self.feeds: list[Any] = [engine.session.stage(preparations[0].new_feed()) for _ in range(count)]
        self._prepare = steps.PreparationStage(preparations, self.feeds)
        self.first: Frame | None = None
        self.answered: list[Batch] = []

    def run(self, max_frames: int) -> None:
        """Run the stages on at most `max_frames` first frames (0: `TIMED_FRAMES`, or more with several threads).

        Afterwards, `feeds` hold frames, and `answered` are the last batches, with outputs.
        """
        stream, max_frames, count = self._source.read(), max_frames or TIMED_FRAMES // CHUNK_FRAMES * self._chunk, 0
        deadline = time.perf_counter() + MAX_SECONDS
        while count < max_frames and (frames := self._decode_frames(stream, min(self._chunk, max_frames - count))):
            self._run_turn(frames)
            self.first = self.first or frames[0]
            count += len(frames)
            if time.perf_counter() > deadline:
                break
        if self._sink is not None:
            clock = _CostClock()
            with clock.count_seconds():
                self._sink.close()
            self._clocks[steps.ENCODE].share(clock)

    def results(self) -> dict[str, IsolatedTimes]:
        """Return the result of each stage except inference."""
        return {name: clock.result(self._chunk) for name, clock in self._clocks.items() if clock.seconds}

    def _decode_frames(self, stream: Iterator[Frame], count: int) -> list[Frame]:
        """Return the next frames; a live source's frame begins when it has arrived."""
        frames, cpu = list[Frame](), time.process_time()
        for frame in itertools.islice(stream, count):
            cpu_end = time.process_time()
            self._clocks[steps.DECODE].add((now() - frame.began) / 1e9, cpu_end - cpu)
            frames.append(frame)
            cpu = time.process_time()
        return frames

    def _run_turn(self, frames: list[Frame]) -> None:
        batches = self._prepare_batches(frames)
        self.answered = [result for batch in batches for result in (*self._engine.work(batch), *self._engine.flush())]
        self._postprocess_batches()
        if self._tracker is not None:
            for frame in frames:
                with self._clocks[steps.TRACK].count_seconds():
                    self._tracker.identify(frame)
        if self._sink is None:
            return
        for frame in frames:
            with self._clocks[steps.DRAW].count_seconds():
                draw_detections(frame)
        for frame in frames:
            with self._clocks[steps.ENCODE].count_seconds():
                self._sink.write(replace(frame, packets=[]))

    def _prepare_batches(self, frames: list[Frame]) -> list[Batch]:
        """Return the frames as batches; several preparing threads are timed together."""
        clock, size, batches = self._clocks[steps.PREPARE], self._batch, list[Batch]()
        group_size = size if self._lanes == 1 else len(frames)
        for start in range(0, len(frames), group_size):
            group = frames[start : start + group_size]
            with clock.count_seconds(len(group)):
                results = [batch for frame in group for batch in self._prepare.work(frame)]
                while self._prepare.holds:
                    results += self._prepare.flush()
                results += self._prepare.flush()
                for batch in results:
                    self._preparation.settle(batch.feed)
            batches += results
        return batches

    def _postprocess_batches(self) -> None:
        clock = self._clocks[steps.POSTPROCESS]
        if self._lanes == 1:
            for batch in self.answered:
                with clock.count_seconds(len(batch.frames)):
                    self._answer.work(batch)
            return
        with (
            ThreadPoolExecutor(self._lanes) as pool,
            clock.count_seconds(sum(len(batch.frames) for batch in self.answered)),
        ):
            list(pool.map(self._answer.work, self.answered))


def measure_inference(
    engine: steps.SessionThread, feeds: Sequence[Arrays], plan: Plan, size: int
) -> tuple[IsolatedTimes, measure.Sampling]:
    """Measure inference on the video's batches, with every slot or lane at work; return it with its sampling."""
    measure.warm_up(measure.make_step(engine.session, "all", feeds), plan)
    cpu, start = time.process_time(), time.perf_counter()
    if engine.lanes > 1:
        answer = lambda feed: engine.answer(Batch([], feed))  # noqa: E731
        sampling = measure.throughput_in_lanes(answer, engine.lanes, feeds, size, plan)
    else:
        sampling = measure.measure_throughput(engine.session, feeds, size, plan)
    processors = (time.process_time() - cpu) / (time.perf_counter() - start)  # busy processors
    assert sampling.value is not None
    return IsolatedTimes(1 / sampling.samples, processors / sampling.value), sampling


class StageCopy:
    """All stages except inference, on the source's frames repeated endlessly, with given answers."""

    def __init__(
        self,
        source: Source,
        preparation: Preparation,
        reader: BoxReader,
        tracker: Tracker | None,
        sink: Sink | None,
        batch: Batch,
    ) -> None:
        self._preparation, self._tracker, self._sink = preparation, tracker, sink
        self._feed, self._answer = preparation.new_feed(), steps.PostprocessingStage(reader, preparation.size)
        # Each copy draws on and writes its own frames.
        frames = [replace(frame, picture=frame.picture.copy()) for frame in batch.frames]
        self._answered = replace(batch, frames=frames)
        endless_frames = itertools.chain.from_iterable(source.read() for _ in itertools.count())
        self._reading: Iterator[Frame] = itertools.cycle(frames) if source.is_single_pass else endless_frames

    def turn(self) -> float:
        """Run a few frames through every stage; return this thread's processor time, in seconds."""
        start = time.thread_time()
        frames, size = list(itertools.islice(self._reading, CHUNK_FRAMES)), self._preparation.batch
        for index, frame in enumerate(frames):
            self._preparation.write(frame.picture, self._feed, index % size)
            if (index + 1) % size == 0 or index + 1 == len(frames):
                self._preparation.complete(self._feed, index % size + 1)
                self._answer.work(self._answered)
        # Masks have their frame's size: for images of several sizes, that frame itself is taken.
        pairs = zip(frames, itertools.cycle(self._answered.frames), strict=False)
        frames = [
            replace(frame if frame.size == template.size else template, packets=[], detections=template.detections)
            for frame, template in pairs
        ]
        if self._tracker is not None:
            for frame in frames:
                self._tracker.identify(frame)
        if self._sink is not None:
            for frame in frames:
                draw_detections(frame)
            for frame in frames:
                self._sink.write(frame)
        return time.thread_time() - start

    def close(self) -> None:
        """Close the output file."""
        if self._sink is not None:
            self._sink.close()


@dataclass(frozen=True)
class ContentionCost:
    """The effect of full CPU load.

    `factor` is the ratio of the other stages' processor time to that without load, `inference` the seconds of inference
    per frame.
    """

    factor: float
    inference: float


def measure_contention(
    copies: Sequence[StageCopy], engine: steps.SessionThread, batches: Sequence[Batch]
) -> ContentionCost:
    """Run all copies and the engine together, and compare them with one copy alone.

    The turns are: one, all, the next one, all… A first turn of all sets up libraries and doesn't count. A codec's own
    threads are assumed to slow down like their caller; the processor time beyond the copies' is the engine's.
    """
    single_cost, joint_cost = _CostClock(), _CostClock()
    single_seconds, joint_seconds, frames = 0.0, list[float](), 0
    batch_cycle, inference = itertools.cycle(batches), steps.InferenceStage(engine)
    with ThreadPoolExecutor(len(copies) + engine.lanes) as pool:

        def infer_until_done(turns: Sequence[Future[float]]) -> int:
            results: list[Batch] = []
            while not all(turn.done() for turn in turns):
                results += inference.work(replace(next(batch_cycle)))
            while inference.holds:
                results += inference.flush()
            return sum(len(batch.frames) for batch in results)

        def run_copies() -> int:
            turns = [pool.submit(copy.turn) for copy in copies]
            lanes = [pool.submit(infer_until_done, turns) for _ in range(engine.lanes - 1)]
            count = infer_until_done(turns)
            joint_seconds.extend(turn.result() for turn in turns)
            return count + sum(lane.result() for lane in lanes)

        engine.call(run_copies)
        joint_seconds.clear()
        for copy in itertools.islice(itertools.cycle(copies), STAGE_TURNS):
            with single_cost.count_seconds():
                single_seconds += pool.submit(copy.turn).result()
            with joint_cost.count_seconds():
                frames += engine.call(run_copies)
    factor = sum(joint_seconds) / single_seconds
    engine_seconds = max(0.0, sum(joint_cost.cpu) - factor * sum(single_cost.cpu))
    return ContentionCost(factor / len(copies), engine_seconds / frames)


def measure_hand_over(count: int) -> float:
    """Return the processor seconds of passing one item on, measured through `count` idle stages."""
    idle_stages = [steps.FrameStage(str(k)) for k in range(count)]
    cpu = time.process_time()
    run_pipelines(
        [VideoPipeline("source", itertools.repeat(SimpleNamespace(began=0), HANDOVER_ITEMS), idle_stages)], lambda: None
    )
    return (time.process_time() - cpu) / (HANDOVER_ITEMS * count)


@dataclass(frozen=True)
class StageMeasurement:
    """One measurement: each stage alone, all under full CPU load (None: one processor), and the hand-over.

    `hand_over` is the processor time of passing an item on, in seconds.
    """

    stages: dict[str, IsolatedTimes]
    contention: ContentionCost | None
    hand_over: float


def join_measurements(measurements: Sequence[StageMeasurement]) -> StageMeasurement:
    """Return several measurements as one: all seconds, and the means of processor times and factors."""
    stages = {}
    for name in measurements[0].stages:
        times = [measurement.stages[name] for measurement in measurements]
        stages[name] = IsolatedTimes(np.concatenate([a.seconds for a in times]), float(np.mean([a.cpu for a in times])))
    costs = [astuple(measurement.contention) for measurement in measurements if measurement.contention is not None]
    contention = ContentionCost(*np.mean(costs, axis=0).tolist()) if costs else None
    return StageMeasurement(stages, contention, float(np.mean([measurement.hand_over for measurement in measurements])))
