"""Each stage by itself on the first frames, with nothing beside it: its seconds, and the processor time it takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from dyno.worker import measure
from dyno.worker.backend import Arrays, Session
from dyno.worker.spec import Plan
from dyno.worker.video import steps
from dyno.worker.video.drawing import draw
from dyno.worker.video.ends import Batch, Frame, Sink, Source, now
from dyno.worker.video.preparing import Preparation

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

    @contextmanager
    def timing(self, frames: int = 1) -> Iterator[None]:
        """The block's seconds count for so many frames."""
        cpu, began = time.process_time(), now()
        yield
        self.seconds += [(now() - began) / 1e9 / frames] * frames
        self.cpu += time.process_time() - cpu

    def result(self) -> Alone:
        return Alone(np.asarray(self.seconds), self.cpu / max(1, len(self.seconds)))


def decode(source: Source, seconds: float, most: int) -> tuple[list[Frame], Alone]:
    """The first frames of the source, as many as there is time and room for, at most so many (0: FRAMES).

    A frame counts from when its reading began, which of a live source is when it had arrived.
    """
    frames, spent, held = list[Frame](), list[float](), 0
    until, cpu = time.perf_counter() + seconds, time.process_time()
    for frame in source.read():
        spent.append((now() - frame.began) / 1e9)
        frames.append(frame)
        held += frame.image.nbytes
        full = held > BYTES or time.perf_counter() > until
        if len(frames) == (most or FRAMES) or (len(frames) >= LEAST and full):
            break
    return frames, Alone(np.asarray(spent), (time.process_time() - cpu) / max(1, len(frames)))


def prepare(frames: Sequence[Frame], preparation: Preparation, feeds: Sequence[Arrays]) -> Alone:
    """The frames into batches, into one array after the other, all of which are full afterwards."""
    preparation.write(frames[0].image, feeds[0], 0)  # what is allocated once
    clock, size = _Clock(), preparation.batch
    for k in range(max(len(frames), size * len(feeds))):
        with clock.timing():
            preparation.write(frames[k % len(frames)].image, feeds[k // size % len(feeds)], k % size)
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
            with clock.timing(len(batch.frames)):
                step.work(batch)
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
        with clock.timing():
            draw(frame.image, frame.detections)
    return clock.result()


def encoded(frames: Iterable[Frame], sink: Sink) -> Alone:
    """Writing; what the encoder holds back until the end is shared out among the frames."""
    clock, held = _Clock(), _Clock()
    for frame in frames:
        with clock.timing():
            sink.write(replace(frame, packets=[]))
    with held.timing():
        sink.close()
    count = max(1, len(clock.seconds))
    return Alone(np.asarray(clock.seconds) + held.seconds[0] / count, (clock.cpu + held.cpu) / count)
