"""The steps of each frame after reading: prepare, infer, post-process, track, draw, write."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.tasks.detect import BoxReader
from dyno.worker.video.drawing import NO_OBJECT
from dyno.worker.video.media import SQUARE_PIXELS, Batch, Frame, Preparation, now
from dyno.worker.video.stages import ITEMS_AHEAD, QUEUE_DEPTH, PipelineStage, make_number_array

DECODE, PREPARE, INFER, POSTPROCESS, TRACK, DRAW, ENCODE = STAGES = (
    "decode", "preprocess", "inference", "postprocess", "track", "draw", "encode",
)  # fmt: skip

PARALLEL_COPY_B = 1 << 20  # smaller outputs are copied by one thread
T = TypeVar("T")


def count_room(batch: int) -> int:
    """Return the number of batches that may wait for a stage: the usual number of frames, at least two batches."""
    return max(2, QUEUE_DEPTH // batch)


class PreparationStage(PipelineStage):
    """The stage that makes batches of frames, letterboxed into a few reused arrays.

    With several preparations, that many threads write into a batch while the next batch's frames arrive.
    """

    name = PREPARE

    def __init__(self, preparations: Sequence[Preparation], feeds: Sequence[Any]) -> None:
        self._feeds, self._batch, self._threads = feeds, preparations[0].batch, len(preparations)
        self._first_preparation = preparations[0]
        self._free_preparations: SimpleQueue[Preparation] = SimpleQueue()
        for preparation in preparations:
            self._free_preparations.put(preparation)
        self._pool = ThreadPoolExecutor(self._threads, self.name) if self._threads > 1 else None
        self._turn, self._frames = 0, list[Frame]()
        self._filling: deque[tuple[Batch, list[Future[None]]]] = deque()

    @staticmethod
    def arrays(preparation: Preparation, engine: SessionThread, threads: int) -> list[Any]:
        """Return enough arrays that each is free again before its next use.

        Arrays wait, are in flight, are being filled by `threads` threads, or are being read.
        """
        session = engine.session
        in_flight = ITEMS_AHEAD * engine.lanes if engine.lanes > 1 else session.slots
        count = count_room(preparation.batch) + in_flight + (count_filling(preparation.batch, threads) + 1) + 1
        return [session.stage(preparation.new_feed()) for _ in range(count)]

    def work(self, item: Any) -> Iterable[Batch]:
        if self._pool is None:
            self._write_frames([item], self._feeds[self._turn % len(self._feeds)], len(self._frames))
        self._frames.append(item)
        if len(self._frames) < self._batch:
            return ()
        batch, futures = self._next_batch()
        if self._pool is None:
            return (self._complete_batch(batch),)
        self._filling.append((batch, futures))
        return self._take_full_batches(count_filling(self._batch, self._threads))

    @property
    def holds(self) -> bool:
        return bool(self._filling)

    def flush(self) -> Iterable[Batch]:
        if self._filling:
            return self._take_full_batches(len(self._filling) - 1)
        if not self._frames:
            return ()
        return (self._complete_batch(*self._next_batch()),)

    def _take_full_batches(self, max_filling: int) -> list[Batch]:
        """Return the full batches, leaving at most `max_filling` being filled."""
        batches = []
        while self._filling and (len(self._filling) > max_filling or all(each.done() for each in self._filling[0][1])):
            batches.append(self._complete_batch(*self._filling.popleft()))
        return batches

    def _complete_batch(self, batch: Batch, futures: Iterable[Future[None]] = ()) -> Batch:
        for future in futures:
            future.result()
        self._first_preparation.complete(batch.feed, len(batch.frames))
        return batch

    def _next_batch(self) -> tuple[Batch, list[Future[None]]]:
        """Return the pending frames as a batch, and the futures of the threads that write it."""
        frames, feed = self._frames, self._feeds[self._turn % len(self._feeds)]
        self._turn, self._frames = self._turn + 1, []
        if self._pool is None:
            return Batch(frames, feed), []
        chunk_size, submit = -(-len(frames) // self._threads), self._pool.submit
        starts = range(0, len(frames), chunk_size)
        return Batch(frames, feed), [submit(self._write_frames, frames[k : k + chunk_size], feed, k) for k in starts]

    def _write_frames(self, frames: list[Frame], feed: Any, start: int) -> None:
        preparation = self._free_preparations.get()
        try:
            for offset, frame in enumerate(frames):
                preparation.write(frame.picture, feed, start + offset)
        finally:
            self._free_preparations.put(preparation)


def count_filling(batch: int, threads: int) -> int:
    """Return the number of batches of `batch` frames that `threads` threads write in parallel; 0 for one thread."""
    return -(-threads // min(threads, batch)) if threads > 1 else 0


class SessionThread:
    """A session with its own thread, which loads and calls it; several streams share it.

    OpenMP keeps a thread pool per calling thread; two pools on the same processors stop spinning, and PyTorch takes
    three times as long. A GPU's context belongs to a thread, too. An engine that answers several batches in parallel on
    a CPU does so in `lanes`, one calling thread each, which don't wait for each other. With several `copiers`, that
    many threads copy a GPU's outputs: one takes as long as a small network.
    """

    def __init__(self, load: Callable[[], Session], on_cpu: bool = True, copiers: int = 1) -> None:
        self._executor = ThreadPoolExecutor(1, "engine")
        self._copiers = ThreadPoolExecutor(copiers, "copy") if copiers > 1 and not on_cpu else None
        self._thread = self._executor.submit(threading.current_thread).result()
        self.session = self.call(load)
        self.lanes = self.session.slots if on_cpu and self.session.stream is None else 1
        self._free_slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(self.session.slots):
            self._free_slots.put(slot)
        self._spare: SimpleQueue[list[np.ndarray]] = SimpleQueue()
        self._names: tuple[str, ...] = ()

    def call(self, action: Callable[[], T]) -> T:
        """Run the action in the engine's thread and return its result."""
        is_inside = threading.current_thread() is self._thread
        return action() if is_inside else self._executor.submit(action).result()

    def answer(self, batch: Batch) -> Batch:
        """Return the batch with its outputs, computed in the calling thread, one of several lanes."""
        slot = self._free_slots.get()
        try:
            self.session.bind(batch.feed, slot)
            self.session.complete(slot)
            batch.outputs, batch.names = self._copy_outputs(slot), self._names
        finally:
            self._free_slots.put(slot)
        return batch

    def begin(self, batch: Batch, wait: bool) -> int | None:
        """Start the batch in a free slot and return the slot; without a free slot, `wait` for one or return None."""
        try:
            slot = self._free_slots.get(block=wait)
        except Empty:
            return None

        def start_batch() -> None:
            self.session.bind(batch.feed, slot)
            self.session.run(slot)

        self.call(start_batch)
        return slot

    def finish(self, batch: Batch, slot: int) -> Batch:
        """Return the batch with its outputs, and free the slot."""
        batch.outputs, batch.names = self.call(lambda: self._read_outputs(slot)), self._names
        self._free_slots.put(slot)
        return batch

    def _read_outputs(self, slot: int) -> list[np.ndarray]:
        self.session.wait(slot)
        return self._copy_outputs(slot)

    def take_back(self, outputs: list[np.ndarray]) -> None:
        """Take back outputs after use: a later batch's are written to the same memory."""
        self._spare.put(outputs)

    def _copy_outputs(self, slot: int) -> list[np.ndarray]:
        """Return a copy of the slot's outputs, valid after its next run."""
        outputs = self.session.fetch(slot)
        self._names, arrays = tuple(outputs), list(outputs.values())
        try:
            buffers = self._spare.get_nowait()
        except Empty:
            buffers = []
        if [(a.shape, a.dtype) for a in buffers] != [(a.shape, a.dtype) for a in arrays]:
            buffers = [np.empty(a.shape, a.dtype) for a in arrays]
        for target, array in zip(buffers, arrays, strict=True):
            if self._copiers is None or array.nbytes < PARALLEL_COPY_B or len(array) < 2:
                np.copyto(target, array)
            else:  # image by image
                list(self._copiers.map(np.copyto, target, array))
        return buffers


class InferenceStage(PipelineStage):
    """The stage that runs batches through the engine: in its lanes, or with a batch in flight per slot.

    If no other stream `shares` an engine of one lane, the stage runs in the engine's thread: handing each batch to
    another thread costs more than a small network's post-processing.
    """

    name = INFER

    def __init__(self, engine: SessionThread, shares: bool = True, batch: int = 1) -> None:
        self._engine, self._shares, self.lanes = engine, shares, engine.lanes
        self.room = count_room(batch)
        self._flying: deque[tuple[Batch, int]] = deque()

    def within(self, loop: Callable[[], None]) -> None:
        loop() if self._shares else self._engine.call(loop)

    def work(self, item: Any) -> Iterable[Batch]:
        if self.lanes > 1:
            return (self._engine.answer(item),)
        if self._engine.session.slots == 1:
            return self._engine.call(lambda: self._answer_batch(item))
        return self._answer_batch(item)

    def _answer_batch(self, item: Batch) -> list[Batch]:
        results = []
        # A waiting stream holds no slot, to avoid a deadlock between streams.
        while (slot := self._engine.begin(item, wait=not self._flying)) is None:
            results.append(self._finish_batch())
        self._flying.append((item, slot))
        return [*results, self._finish_batch()] if self._engine.session.slots == 1 else results

    @property
    def holds(self) -> bool:
        return bool(self._flying)

    def flush(self) -> Iterable[Batch]:
        return [self._finish_batch()] if self._flying else []

    def _finish_batch(self) -> Batch:
        return self._engine.finish(*self._flying.popleft())


class DetectionRecorder:
    """A writer of each frame's boxes as a line of JSON, and a record of its times.

    Stored are the start of its reading and the time when its boxes were known, in ns of `perf_counter_ns`, and their
    number.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = path.open("w", encoding="utf-8") if path else None
        self.began, self.known_times, self.boxes = make_number_array(), make_number_array(), make_number_array()

    def add(self, frame: Frame) -> None:
        """Add the next frame."""
        assert frame.detections is not None
        if self._file:
            self._file.write(json.dumps(describe_frame(frame)) + "\n")
        self.began.append(frame.began)
        self.known_times.append(now())
        self.boxes.append(len(frame.detections.scores))

    def close(self) -> None:
        """Write the buffered lines."""
        if self._file:
            self._file.close()


class PostprocessingStage(PipelineStage):
    """The stage that turns outputs into boxes, records them, and splits batches into frames.

    `read` takes back outputs after use.
    """

    name = POSTPROCESS

    def __init__(
        self, reader: BoxReader, size: tuple[int, int], recorder: DetectionRecorder | None = None,
        batch: int = 1, lanes: int = 1, read: Callable[[list[np.ndarray]], None] | None = None,
    ) -> None:  # fmt: skip
        self._reader, self._size, self._keep, self._read = reader, size, recorder, read
        self.room, self.lanes = count_room(batch), lanes

    def work(self, item: Any) -> Iterable[Frame]:
        outputs = dict(zip(item.names, item.outputs, strict=True))
        sizes, aspects = zip(*((frame.size, float(frame.picture.aspect)) for frame in item.frames), strict=True)
        results = self._reader.read_detections(outputs, np.array(sizes), self._size, aspects)
        for frame, detections in zip(item.frames, results, strict=True):
            frame.detections = detections
        if self._read is not None:
            arrays, item.outputs = item.outputs, []
            self._read(arrays)
        return list(item.frames)

    def in_order(self, results: Sequence[Frame]) -> None:
        if self._keep is not None:
            for frame in results:
                self._keep.add(frame)


class FrameStage(PipelineStage):
    """A stage that applies the actions to each frame, in order: tracking, drawing, encoding."""

    def __init__(self, name: str, *actions: Callable[[Frame], object]) -> None:
        self.name, self._actions = name, actions

    def work(self, item: Any) -> Iterable[Frame]:
        for action in self._actions:
            action(item)
        return (item,)


def describe_frame(frame: Frame) -> dict[str, Any]:
    """Return a frame's boxes as JSON: left, top, right and bottom in pixels of the frame.

    Also: the pixel aspect unless square, identities of tracked objects (null: not yet), masks as run lengths, and
    keypoints.
    """
    detections = frame.detections
    assert detections is not None
    boxes = []
    for k in range(len(detections.scores)):
        box: dict[str, Any] = {
            "box": [round(float(v), 2) for v in detections.boxes[k]],
            "score": round(float(detections.scores[k]), 4),
            "class": int(detections.classes[k]),
        }
        if frame.identities is not None:
            box["identity"] = int(frame.identities[k]) if frame.identities[k] != NO_OBJECT else None
        if detections.masks is not None:
            box["mask"] = {"size": list(frame.size), "counts": detections.masks[k].tolist()}
        if detections.keypoints is not None:
            box["keypoints"] = [[round(float(v), 2) for v in point] for point in detections.keypoints[k]]
        boxes.append(box)
    height, width = frame.size
    name_field: dict[str, Any] = {"name": frame.name} if frame.name else {}
    shape: dict[str, Any] = {"width": width, "height": height}
    if frame.picture.aspect != SQUARE_PIXELS:
        shape["pixel_aspect"] = round(float(frame.picture.aspect), 6)
    seconds = None if frame.seconds is None else round(frame.seconds, 6)
    return {"frame": frame.index, **name_field, "seconds": seconds, **shape, "boxes": boxes}
