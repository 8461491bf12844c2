"""Each stage by itself on the first frames, with nothing beside it: its seconds, and the processor time it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dyno.worker import measure
from dyno.worker.backend import Arrays, Session
from dyno.worker.spec import Plan
from dyno.worker.video import steps
from dyno.worker.video.drawing import draw
from dyno.worker.video.frame import Batch, Frame, now
from dyno.worker.video.preparing import Preparation
from dyno.worker.video.sink import Sink
from dyno.worker.video.source import Source

FRAMES, BYTES, LEAST = 120, 256 << 20, 8  # of the source that are kept for this, at most and at least


@dataclass(frozen=True)
class Alone:
    """One stage alone: seconds of each frame, and seconds of processor time per frame, all threads together."""

    seconds: np.ndarray
    cpu: float


class _Clock:
    """Seconds and processor time of pieces of work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu = 0.0

    def time(self, action: Callable[[], Any], frames: int = 1) -> Any:
        """The action's result; its seconds count for so many frames."""
        cpu, began = time.process_time(), now()
        result = action()
        self.seconds += [(now() - began) / 1e9 / frames] * frames
        self.cpu += time.process_time() - cpu
        return result

    def result(self) -> Alone:
        return Alone(np.asarray(self.seconds), self.cpu / max(1, len(self.seconds)))


def decode(source: Source, seconds: float) -> tuple[list[Frame], Alone]:
    """The first frames of the source, as many as there is time and room for."""
    clock, frames, held = _Clock(), list[Frame](), 0
    reading = source.read()
    until = time.perf_counter() + seconds
    while len(frames) < FRAMES and (len(frames) < LEAST or (held < BYTES and time.perf_counter() < until)):
        frame = clock.time(lambda: next(reading, None))
        if frame is None:
            clock.seconds.pop()
            break
        frames.append(frame)
        held += frame.image.nbytes
    reading.close()
    return frames, clock.result()


def prepare(frames: Sequence[Frame], preparation: Preparation, feeds: Sequence[Arrays]) -> Alone:
    """The frames into batches, into one array after the other, all of which are full afterwards."""
    preparation.write(frames[0].image, feeds[0], 0)  # what is allocated once
    clock, size = _Clock(), preparation.batch
    for k in range(max(len(frames), size * len(feeds))):
        image, feed = frames[k % len(frames)].image, feeds[k // size % len(feeds)]
        clock.time(lambda image=image, feed=feed, k=k: preparation.write(image, feed, k % size))
    return clock.result()


def infer(session: Session, feeds: Sequence[Arrays], plan: Plan, size: int) -> tuple[Alone, measure.Sampling]:
    """Inference with every slot in flight, on batches of the video, and the sampling that says so."""
    measure.warm_up(measure.step(session, "all", feeds), plan)
    cpu, began = time.process_time(), time.perf_counter()
    sampling = measure.throughput(session, feeds, size, plan)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)  # processors kept busy
    assert sampling.value is not None
    return Alone(1 / sampling.samples, share / sampling.value), sampling


def answer(
    session: Session,
    frames: Sequence[Frame],
    preparation: Preparation,
    feeds: Sequence[Arrays],
    step: steps.Postprocess,
) -> Alone:
    """Post-processing of the frames' own outputs; several batches run first, so that the engine rests meanwhile."""
    engine, clock, size = steps.Infer(session), _Clock(), preparation.batch
    list(step.work(_answered(engine, frames[:size], preparation, feeds[0])))  # what is imported and allocated once
    for first in range(0, len(frames), size * len(feeds)):
        groups = [frames[k : k + size] for k in range(first, min(first + size * len(feeds), len(frames)), size)]
        pairs = zip(groups, feeds, strict=False)
        for batch in [_answered(engine, group, preparation, feed) for group, feed in pairs]:
            clock.time(lambda b=batch: list(step.work(b)), len(batch.frames))
    return clock.result()


def _answered(engine: steps.Infer, frames: Sequence[Frame], preparation: Preparation, feed: Arrays) -> Batch:
    """The frames as a batch with its outputs."""
    for place, frame in enumerate(frames):
        preparation.write(frame.image, feed, place)
    (batch,) = [*engine.work(Batch(list(frames), feed)), *engine.rest()]
    return batch


def drawn(frames: Sequence[Frame]) -> Alone:
    """Drawing; the frames are drawn on afterwards."""
    clock = _Clock()
    for frame in frames:
        assert frame.detections is not None
        clock.time(lambda f=frame: draw(f.image, f.detections))
    return clock.result()


def encoded(frames: Iterable[Frame], sink: Sink) -> Alone:
    """Writing; what the encoder holds back until the end is shared out among the frames."""
    clock = _Clock()
    for frame in frames:
        clock.time(lambda f=frame: sink.write(replace(f, packets=[])))
    held = _Clock()
    held.time(sink.close)
    count = max(1, len(clock.seconds))
    return Alone(np.asarray(clock.seconds) + held.seconds[0] / count, (clock.cpu + held.cpu) / count)


