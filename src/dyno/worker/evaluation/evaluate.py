"""Evaluation of every image: outputs for accuracy and agreement, and the throughput of the pipeline after decoding."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyno.worker import tasks
from dyno.worker.backend import Session, answer_feeds
from dyno.worker.facts import job as facts
from dyno.worker.facts.engine import QUANTISED_PRECISIONS
from dyno.worker.inputs import input_data
from dyno.worker.inputs.input_data import relative_change
from dyno.worker.inputs.specs import channels_first, image_of, static_shapes
from dyno.worker.record import Measurement
from dyno.worker.spec import BATCH_AXIS, Trial, UserError, add_noun
from dyno.worker.tasks import Collector, EvaluationInputs

# Batches through a session with all its slots in flight: the next batches are read and earlier outputs processed
# while it runs, so that the engine is the bottleneck of an evaluation.

# Sources of a pipeline's batches: images of a decoded data set, read in several threads, or random numbers.

Feed = Mapping[str, np.ndarray]


class BatchSource:
    """Batches by number; a batch is filled in `parts`, in parallel threads if there are several."""

    parts = 1

    def new_arrays(self) -> dict[str, np.ndarray]:
        """Return new arrays for one batch, in the engine's form."""
        raise NotImplementedError

    def fill(self, feed: Feed, index: int, part: int) -> None:
        """Write one part of the batch into arrays from `new_arrays`."""
        raise NotImplementedError


class DecodedImages(BatchSource):
    """Images of a decoded data set, repeated from the first after the last, so that every batch is full."""

    def __init__(self, session: Session, trial: Trial, threads: int) -> None:
        specs, tensors = trial.model.inputs, session.inputs
        image, self.shape, self.images = input_data.open_images(
            trial.data, trial.model.preprocess, tensors, trial.dims, specs
        )
        self.name, self._dtype = image.name, "uint8" if image.dtype == "uint8" else "float32"
        self._other_feeds = input_data.fixed_inputs(tensors, static_shapes(tensors, trial.dims), specs)
        self.parts = min(threads, self.shape[0])

    def new_arrays(self) -> dict[str, np.ndarray]:
        return {self.name: np.zeros(self.shape, self._dtype), **self._other_feeds}

    def fill(self, feed: Feed, index: int, part: int) -> None:
        batch = self.shape[0]
        begin, end = (batch * i // self.parts for i in (part, part + 1))
        self.images.read_into(feed[self.name][begin:end], index * batch + begin)


class RandomInputs(BatchSource):
    """Random inputs, drawn in order from the data's seed, so that every run has the same."""

    def __init__(self, session: Session, trial: Trial, count: int) -> None:
        self._batches = list(input_data.read_trial_batches(trial, session.inputs, count))

    def new_arrays(self) -> dict[str, np.ndarray]:
        return {name: np.zeros_like(array) for name, array in self._batches[0].items()}

    def fill(self, feed: Feed, index: int, part: int) -> None:
        for name, array in self._batches[index % len(self._batches)].items():
            np.copyto(feed[name], array)


Outputs = dict[str, np.ndarray]
Keep = Callable[[int, Outputs], None]
Work = Callable[[int, Outputs], Any]

BATCHES_AHEAD = 2  # batches read or ready while every slot is busy
MAX_BACKLOG = 8  # batches with outputs waiting for processing
COPIED_OUTPUT_B = 4 << 20  # outputs up to this size are copied, which frees the slot at once
MIN_SAMPLES = 3  # per stage


@dataclass(frozen=True)
class PipelineResult:
    """Results of `work` on each batch's outputs, in order, and the seconds from the last warm-up batch to the end."""

    results: list[Any]
    seconds: float


class Pipeline:
    """A pipeline from a source of batches to a session; buffers are allocated once, in the session's fastest memory."""

    def __init__(self, session: Session, source: BatchSource, helpers: int = 1) -> None:
        self.session, self.source, self.helpers = session, source, helpers
        self.buffers = [session.stage(source.new_arrays()) for _ in range(session.slots + BATCHES_AHEAD)]

    def run(self, count: int, keep: Keep, work: Work, warm_up: int = 0) -> PipelineResult:
        """Run `count` batches, after the first `warm_up` of them as warm-up.

        `keep` is called in order and at once, `work` in other threads; the outputs are valid until they return. The
        clock starts when the last warm-up batch is fetched and the next are in flight, so that the time to fill the
        pipeline is excluded and the time to drain it included. Without warm-up, both are included.
        """
        return _PipelineRun(self, [*range(warm_up), *range(count)], keep, work).run(warm_up)

    def stages(self, work: Work, seconds: float) -> dict[str, np.ndarray]:
        """Return the seconds per batch of each stage, one batch at a time in one thread, without overlap of stages.

        `preprocess` ends with the input bound, `inference` with the outputs in host memory, `postprocess` with `work`.
        On a GPU `bind` only queues the copy of the input, so its time is part of `inference`.
        """
        now, times, feed = time.perf_counter, [], self.buffers[0]
        deadline, index = now() + seconds, 0
        while index < MIN_SAMPLES or now() < deadline:
            start = now()
            for part in range(self.source.parts):
                self.source.fill(feed, index, part)
            self.session.bind(feed)
            bind_end = now()
            self.session.run()
            self.session.wait()
            outputs = self.session.fetch()
            run_end = now()
            work(index, outputs)
            times.append((bind_end - start, run_end - bind_end, now() - run_end))
            index += 1
        columns = np.asarray(times, np.float64).T
        return dict(zip(("preprocess", "inference", "postprocess"), columns, strict=True))


class _PipelineRun:
    """One run of a pipeline: batches are read in order into recycled buffers, ahead of the free slots."""

    def __init__(self, pipeline: Pipeline, numbers: Sequence[int], keep: Keep, work: Work) -> None:
        self._session, self._source, self._free_feeds = pipeline.session, pipeline.source, deque(pipeline.buffers)
        self._readers, self._workers = (ThreadPoolExecutor(pipeline.helpers) for _ in range(2))
        self._numbers, self._unread, self._keep, self._work = numbers, iter(numbers), keep, work
        self._ready: deque[tuple[Any, list[Future[None]]]] = deque()
        self._fed: list[Any] = [None] * self._session.slots
        self._reading: list[Future[Any] | None] = [None] * self._session.slots  # work reading the slot's outputs
        self._results: list[Future[Any]] = []

    def run(self, warm_up: int) -> PipelineResult:
        slots, count = self._session.slots, len(self._numbers)
        with self._readers, self._workers:
            self._read_ahead()
            start = time.perf_counter()
            for step in range(count + slots):
                if step >= slots:
                    self._finish_step(step - slots, is_counted=step - slots >= warm_up)
                    if step - slots == warm_up - 1:
                        start = time.perf_counter()
                if step < count:
                    self._start_slot(step % slots)
            results = [result.result() for result in self._results]
            return PipelineResult(results[warm_up:], time.perf_counter() - start)

    def _read_ahead(self) -> None:
        while self._free_feeds and (index := next(self._unread, None)) is not None:
            feed, parts = self._free_feeds.popleft(), range(self._source.parts)
            self._ready.append((feed, [self._readers.submit(self._source.fill, feed, index, part) for part in parts]))

    def _start_slot(self, slot: int) -> None:
        feed, futures = self._ready.popleft()
        for future in futures:
            future.result()
        self._fed[slot] = feed
        self._session.bind(feed, slot)
        if (reader := self._reading[slot]) is not None:
            reader.result()
        self._session.run(slot)

    def _finish_step(self, step: int, is_counted: bool) -> None:
        slot, index = step % self._session.slots, self._numbers[step]
        self._session.wait(slot)
        arrays, feed = self._session.fetch(slot), self._fed[slot]
        if is_counted:
            self._keep(index, arrays)
        # With one slot the next run starts at once, and a copy of small outputs costs less than waiting. An output may
        # lie in an input's buffer, which is refilled once it is free.
        is_small = self._session.slots == 1 or sum(a.nbytes for a in arrays.values()) <= COPIED_OUTPUT_B
        is_copied = is_small or any(np.may_share_memory(a, array) for a in arrays.values() for array in feed.values())
        outputs = {name: np.array(a) for name, a in arrays.items()} if is_copied else arrays
        self._free_feeds.append(feed)
        self._read_ahead()
        result = self._workers.submit(self._work, index, outputs)
        self._reading[slot] = None if is_copied else result
        self._results.append(result)
        if len(self._results) > MAX_BACKLOG:
            self._results[-MAX_BACKLOG - 1].result()


# Rows of an engine's outputs, one for each input of a batch, and their axis: tested by values, since a length fixed
# inside a network may merge or mix the inputs of a batch.

Arrays = Mapping[str, np.ndarray]
# Largest relative change of an input's outputs with the other inputs of its batch: rounding changes little, but INT8
# may take its ranges from the whole batch.
TOLERANCES = {"fp32": 0.02, "tf32": 0.1, "fp16": 0.1, "bf16": 0.2, **dict.fromkeys(QUANTISED_PRECISIONS, 0.3)}
EQUAL_ERROR = 1e-6


@dataclass(frozen=True)
class Rows:
    """Batch axis of each output (None: no batch), and a `warning` if inputs influence each other, else ""."""

    axes: dict[str, int | None] = field(default_factory=dict)
    warning: str = ""

    def arrange_rows(self, outputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs with the batch as their first axis."""
        return {name: np.moveaxis(a, k, 0) if (k := self.axes.get(name)) else a for name, a in outputs.items()}


def find_rows(session: Session, trial: Trial, batch: int) -> Rows:
    """Return the rows of the outputs; raise a `UserError` if they aren't those of the batch's inputs.

    The session answers a batch, and a batch that repeats one of its inputs; that input's outputs must stay the same. An
    output's batch axis, if declared in the file, must have the batch's length. Outputs without a declaration may have
    no batch (a loss, a table, detections of any number), unless all have none and they change with the input.
    """
    declared_axes = {t.name: [k for k, axis in enumerate(t.shape) if axis == BATCH_AXIS] for t in trial.model.outputs}
    if batch < 2:
        return Rows({name: axes[0] for name, axes in declared_axes.items()})
    return _RowTest(session, trial, batch, declared_axes).run()


class _RowTest:
    """Test of a session by two batches with one input in common."""

    def __init__(self, session: Session, trial: Trial, batch: int, declared: Mapping[str, Sequence[int]]) -> None:
        self._session, self._trial, self._batch, self._declared = session, trial, batch, declared
        self._row = batch // 2
        first, second = input_data.read_trial_batches(trial, session.inputs, 2)
        self._feeds, self._second_feeds = first, second
        repeated = input_data.repeat_input(
            first, {n: trial.dims.batch_axis(n, a.shape) for n, a in first.items()}, self._row
        )
        self._differ = any(not np.array_equal(a, repeated[name]) for name, a in first.items())
        self._answers, self._repeats = self._run_batch(first), self._run_batch(repeated)
        self._limit = max(TOLERANCES[name] for name in (trial.precision, trial.model.precision or "fp32"))

    def run(self) -> Rows:
        """Return the rows, or raise a `UserError`."""
        axes, max_change = dict[str, "int | None"](), 0.0
        for name, a in self._answers.items():
            candidates = self._find_batch_axes(name, a)
            if candidates is None:
                raise UserError(self._not_declared(name, a))
            choices = [*([k] for k in candidates), *([candidates] if len(candidates) > 1 else [])]  # pairs: the last
            changes = [self._measure_change(name, choice) for choice in choices]
            best = min(range(len(choices)), key=lambda k: (changes[k] > self._limit, k), default=None)
            axes[name] = None if best is None else choices[best][0]
            max_change = max(max_change, changes[best] if best is not None else 0.0)
            if best is not None:
                self._refuse_ignored(name, choices[best][0])
        if not any(self._can_have_rows(name, a) for name, a in self._answers.items()):
            self._refuse_merged()
        is_mixed = max_change > self._limit and (max_change > TOLERANCES["int8"] or not self._is_quantised)
        return Rows(axes, self._explain_mixing(max_change) if is_mixed else "")

    @property
    def _is_quantised(self) -> bool:
        """Whether layers ran quantised, even without a quantised precision (a module that PyTorch quantised)."""
        return any(kind in QUANTISED_PRECISIONS for kind in self._session.facts().layers_by_type)

    def _find_batch_axes(self, name: str, a: np.ndarray) -> list[int] | None:
        """Return the possible batch axes, [] without any; None if the output contradicts the file's declaration."""
        axes = [k for k in self._declared.get(name, ()) if k < a.ndim]
        if axes and all(a.shape[k] == self._batch for k in axes):
            return axes
        if axes and not self._has_variable_rows(name, a):
            return None
        return [k for k, n in enumerate(a.shape) if n == self._batch]

    def _can_have_rows(self, name: str, a: np.ndarray) -> bool:
        """Return whether the output may hold a row for each input, in any form, or needs none."""
        free = next((any(isinstance(n, str) for n in t.shape) for t in self._session.outputs if t.name == name), False)
        # 1 x 40 for eight inputs is one row of their five values each; 1 x 1 x 1600 x 7 may be detections of a batch.
        is_row = a.ndim == 2 and len(a) == 1 and self._batch not in a.shape
        has_groups = not is_row and any(n and n % self._batch == 0 for n in a.shape)
        if free or a.size < 2 or has_groups or self._has_variable_rows(name, a):
            return True
        return not self._differ or relative_change(a, self._repeats[name]) <= EQUAL_ERROR

    def _has_variable_rows(self, name: str, a: np.ndarray) -> bool:
        """Return whether an output's number of rows depends on values, as for detections; true for an empty output."""
        return (
            not a.size
            or a.shape != self._repeats[name].shape
            or a.shape != self._run_batch(self._second_feeds)[name].shape
        )

    def _measure_change(self, name: str, axes: Sequence[int]) -> float:
        """Return the relative change of one input's outputs with the other inputs of its batch."""
        a, b = self._answers[name], self._repeats[name]
        if a.shape != b.shape or not self._differ:
            return 0.0
        index = tuple(self._row if k in axes else slice(None) for k in range(a.ndim))
        return relative_change(a[index], b[index])

    def _refuse_ignored(self, name: str, axis: int) -> None:
        """Raise a `UserError` if one input's outputs differ between places, and those at some place never change."""
        a, b = self._answers[name], self._repeats[name]
        if a.shape != b.shape or np.array_equal(a, b):
            return
        rows = {k: b.take(k, axis) for k in (0, self._row, self._batch - 1)}
        if all(relative_change(rows[0], row) <= self._limit for row in rows.values()):
            return
        c = self._run_batch(self._second_feeds)[name]
        if any(all(answer.shape == b.shape and np.array_equal(row, answer.take(k, axis)) for answer in (a, c))
               for k, row in rows.items()):  # fmt: skip
            raise UserError(
                f"in a batch of {self._batch} some inputs are ignored: the outputs at their places never change; a "
                "length is fixed inside the model: measure it with a smaller batch"
            )

    def _explain_mixing(self, change: float) -> str:
        """Return a warning on mixed inputs, "" if the model draws random numbers; raise it for a known batch axis."""
        repeat = self._run_batch(self._feeds)
        if any(a.shape != repeat[name].shape or relative_change(a, repeat[name]) > self._limit / 2 for name, a in
               self._answers.items()):  # fmt: skip
            return ""
        text = (
            f"the outputs for one input change by {change:.0%} of their size with the other inputs of its batch of "
            f"{self._batch}"
        )
        trial, has_image = self._trial, image_of(self._session.inputs) is not None
        if has_image or trial.model.outputs or any(BATCH_AXIS in shape for shape in trial.dims.shapes.values()):
            raise UserError(
                f"{text}: the model mixes them, so they aren't those of each alone; measure it with --batch 1"
            )
        return f"{text}: the model mixes them, or the batch is another axis, which --shapes NAME:50xbatchx16 names"

    def _not_declared(self, name: str, a: np.ndarray) -> str:
        shape = next(t.shape for t in self._trial.model.outputs if t.name == name)
        suffix = f" for {name!r}" if len(self._answers) > 1 else ""
        return (
            f"the file says {_format_shape(shape)}{suffix}, but gave {_format_shape(a.shape)} for a batch of "
            f"{self._batch}: a length is fixed inside the file; measure it with --batch 1, or export it again with a "
            "free batch"
        )

    def _refuse_merged(self) -> None:
        """Raise a `UserError` for outputs without a row for each input if no axes are declared."""
        shapes = ", ".join(_format_shape(a.shape) for a in self._answers.values())
        raise UserError(
            f"the outputs are {shapes} for a batch of {self._batch}, which has no row for each input: a length is "
            "fixed inside the model (measure it with --batch 1), or the batch is another axis, which --shapes "
            "NAME:50xbatchx16 names"
        )

    def _run_batch(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return answer_feeds(self._session, self._session.stage(feeds))


def _format_shape(shape: Sequence[int | str]) -> str:
    return " x ".join(map(str, shape)) or "a number"


RAW_BYTES = 64 * 2**20  # raw outputs kept per trial; classes and scores are kept for every image
WARM_UP = 0.1  # share of the data, run before the clock starts
MAX_WARM_UP = 400  # images
MAX_STAGE_S = 0.5  # and at most the plan's seconds
CHECK_INTERVAL_S = 0.5  # interval of checks for other programs
NEGLIGIBLE_CORES = 0.25  # load by other programs, in processors


class ThreadLimiter:
    """Limit of the engine's threads to the processors left free by other programs, during an evaluation.

    PyTorch's OpenMP threads spin while they wait for each other: with one busy program on two processors, two threads
    took 27.5 s for work that takes one thread 4.2 s. `count_busy` returns the number of processors kept busy by other
    programs so far, and `others_busy` is the load at which threads were limited, 0 if they weren't.
    """

    def __init__(self, session: Session, threads: int, count_busy: Callable[[], float]) -> None:
        self._session, self._threads = session, threads
        self._count_busy, self._checked = count_busy, time.monotonic()
        self.others_busy = 0.0

    def check_load(self) -> None:
        """Limit the threads once if other programs keep processors busy; check twice a second."""
        if self.others_busy or time.monotonic() - self._checked < CHECK_INTERVAL_S:
            return
        self._checked = time.monotonic()
        busy = self._count_busy()
        thread_count = max(1, self._threads - math.ceil(busy - NEGLIGIBLE_CORES))
        if thread_count < self._threads and self._session.limit_threads(thread_count):
            self.others_busy = busy

    def restore_threads(self) -> None:
        """Let the engine use all its threads again."""
        if self.others_busy:
            self._session.limit_threads(self._threads)


@dataclass(frozen=True)
class Evaluation:
    """Arrays for outputs.npz, with times and warnings of their evaluation."""

    arrays: dict[str, np.ndarray]
    images: int = 0
    warm_up: int = 0  # images of the warm-up
    seconds: float = 0.0  # for all images; 0 if not measured
    decode: float = 0.0  # seconds per image
    stages: dict[str, np.ndarray] = field(default_factory=dict)  # seconds per image, one sample per batch
    oddities: tuple[str, ...] = ()
    others_busy: float = 0.0  # as in `ThreadLimiter`

    @property
    def warnings(self) -> list[str]:
        """Oddities of the data and the loop, as sentences."""
        sentences = [f"data: {oddity}" for oddity in self.oddities]
        if self.others_busy:
            sentences.append(
                f"the pipeline's images/s were not measured: other programs kept {self.others_busy:.1f} processors "
                "busy, so the images were answered with fewer threads"
            )
        return sentences

    def list_measurements(self) -> list[Measurement]:
        """Return the pipeline's throughput and the stages' times, with samples stored under the stages' names."""
        measurements = [Measurement(name, "s", "duration", None, name, clock="host") for name in self.stages]
        if self.decode:
            measurements.insert(0, Measurement("decode", "s", "duration", self.decode, clock="host"))
        if self.seconds:
            measurements.append(Measurement("pipeline", "1/s", "rate", self.images / self.seconds, clock="host"))
        return measurements

    def facts(self) -> facts.PipelineFacts | None:
        """Return the images and seconds of the throughput, and the images of warm-up."""
        return facts.PipelineFacts(self.images, self.seconds, self.warm_up) if self.seconds else None


def evaluate(
    session: Session, trial: Trial, timed: bool = True, count_busy: Callable[[], float] = lambda: 0.0
) -> Evaluation:
    """Run every image of the data through the session, at the trial's own batch, in a pipeline.

    Arrays are raw `output:NAME` (with `rows:NAME` if the number of rows varies between inputs), `sample`, `label`, and
    `topk_index` and `topk_score` of a classifier or the detections of a detector. The last batch is padded with the
    first images and cut again. Real images are timed: a tenth of them warms the pipeline up, and a few batches
    afterwards time the stages separately; neither counts. `count_busy` as in `ThreadLimiter`.
    """
    batch, threads = _find_batch(session, trial), max(1, trial.runtime.threads)
    # The engine keeps the processors busy on a CPU, but not on a GPU.
    helpers = threads if session.stream is not None else max(1, threads // 4)
    source = DecodedImages(session, trial, helpers) if trial.data.folder else None
    count = min(trial.data.count, len(source.images)) if source else trial.data.count
    batches = math.ceil(count / batch)
    pipeline = Pipeline(session, source or RandomInputs(session, trial, batches), helpers if source else 1)
    collector = tasks.find_task(trial.model.task).collector(_describe_evaluation(trial, source, batch, count))
    warm_up = min(batches, math.ceil(min(MAX_WARM_UP, WARM_UP * count) / batch)) if source and timed else 0
    raw_outputs, rows = _RawOutputs(collector), find_rows(session, trial, batch)

    limiter = ThreadLimiter(session, threads, count_busy)

    def keep_outputs(index: int, outputs: Outputs) -> None:
        raw_outputs.add(index, rows.arrange_rows(outputs))
        limiter.check_load()

    def evaluate_batch(index: int, outputs: Outputs) -> Any:
        return collector.collect(index, rows.arrange_rows(outputs))

    result = pipeline.run(batches, keep_outputs, evaluate_batch, warm_up)
    limiter.restore_threads()
    seconds, stages = 0.0, {}
    if source and timed:
        seconds = 0.0 if limiter.others_busy else result.seconds
        stages = {
            name: s / batch for name, s in pipeline.stages(evaluate_batch, min(MAX_STAGE_S, trial.plan.seconds)).items()
        }
    metadata = input_data.read_metadata(trial.data)
    arrays = {**raw_outputs.arrays(), **collector.arrays(result.results), **_identify_rows(source, count, metadata)}
    decode = float(metadata.get("decode_s") or 0)
    oddities = (*metadata.get("warnings", ()), *_left_out(metadata.get("unreadable", ())))
    oddities += (rows.warning,) if rows.warning else ()
    oddities += (*collector.oddities(result.results),)
    return Evaluation(
        arrays, count, min(warm_up * batch, count), seconds, decode, stages, oddities, limiter.others_busy
    )


def _identify_rows(source: DecodedImages | None, count: int, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the image index of each row of the outputs, its label, and the class names."""
    if source is None:
        return {"sample": np.arange(count, dtype=np.int64)}
    sample = source.images.index[:count]
    names = {"classes": np.array(metadata["classes"], np.str_)} if metadata.get("classes") else {}
    return {"sample": sample, "label": source.images.labels[sample], **names}


def _left_out(unreadable: Sequence[str]) -> list[str]:
    names = ", ".join(unreadable[:3]) + (", …" if len(unreadable) > 3 else "")
    return [f"{add_noun(len(unreadable), 'image')} can't be read, left out: {names}"] if unreadable else []


def _find_batch(session: Session, trial: Trial) -> int:
    first_shape = next((shape for shape in static_shapes(session.inputs, trial.dims).values() if shape), (1,))
    return trial.dims.batch or first_shape[0]


def _describe_evaluation(trial: Trial, source: DecodedImages | None, batch: int, count: int) -> EvaluationInputs:
    if source is None:
        return EvaluationInputs(trial, batch, count, input_size=(trial.dims.height, trial.dims.width))
    height, width = channels_first(source.shape)[2:]
    return EvaluationInputs(trial, batch, count, source.images.index[:count], (height, width))


class _RawOutputs:
    """Raw outputs in order, up to RAW_BYTES."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._raw: dict[str, list[np.ndarray]] = {}
        self._images: list[int] = []
        self._bytes = 0

    def add(self, index: int, outputs: Outputs) -> None:
        if self._bytes >= RAW_BYTES:
            return
        real_outputs = self._collector.cut(index, outputs)
        size = sum(a.nbytes for a in real_outputs.values())
        if self._bytes + size > RAW_BYTES:
            self._bytes = RAW_BYTES  # a later, smaller batch must not leave a hole
            return
        self._bytes += size
        self._images.append(self._collector.images(index))
        for name, a in real_outputs.items():
            self._raw.setdefault(name, []).append(np.atleast_1d(np.array(a)))

    def arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for name, batches in self._raw.items():
            arrays[f"output:{name}"], rows = _join_outputs(batches, self._images)
            if rows is not None:
                arrays[f"rows:{name}"] = rows
        return arrays


def _join_outputs(arrays: Sequence[np.ndarray], images: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
    """Join an output of all batches; return it with its row counts, or None if its first axis counts the inputs.

    Non-maximum suppression inside a network leaves a variable number of boxes: n x 4 per batch, or batch x n x 6.
    """
    is_batched = all(len(array) == count for array, count in zip(arrays, images, strict=True))
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays), None if is_batched else np.array([len(array) for array in arrays], np.int64)
    if is_batched and len({array.shape[2:] for array in arrays}) == 1:
        rows = np.repeat([array.shape[1] for array in arrays], images).astype(np.int64)
        return np.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays]), rows
    return np.concatenate([array.ravel() for array in arrays]), np.array([array.size for array in arrays], np.int64)
