"""A video through a trial's engine: the pipeline, and each stage alone before and after it."""

from __future__ import annotations

import gc
import itertools
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import measure, system, tasks
from dyno.worker.backend import DeviceBinding
from dyno.worker.evaluation.evaluate import find_rows
from dyno.worker.extras import install
from dyno.worker.facts.job import DEVICE, HOST, VideoFacts
from dyno.worker.journal import Journal
from dyno.worker.record import save_arrays
from dyno.worker.registry import find
from dyno.worker.spec import Job, Trial, Unavailable, UserError
from dyno.worker.tasks.detect import BoxReader, Detect
from dyno.worker.video import alone, on_device, stages, steps
from dyno.worker.video.drawing import Tracker, draw_detections
from dyno.worker.video.media import Batch, Frame, Preparation, Sink, Source, codec_threads, disk_full, lanes_beside, now
from dyno.worker.video.opening import describe_old_pyav, has_pyav, open_sink, open_source, prepare_libraries
from dyno.worker.video.options import OPENING_STAGE, VideoOptions

# Frames decoded in advance, for the rate of the stages after the decoder


class MemorySource(Source):
    """The first `max_frames` frames of another source, repeated until `count` frames (0: once each).

    Times follow the source's average rate; there is no sound.
    """

    def __init__(self, source: Source, max_frames: int, count: int) -> None:
        super().__init__(source.name)
        self.images, self.rate = source.images, source.rate
        self._pictures = [(frame.picture, frame.name) for frame in itertools.islice(source.read(), max_frames)]
        self.notes = source.notes
        if not self._pictures:
            raise UserError(f"{source.name} has no frames")
        self.count = count or len(self._pictures)

    def read(self, sound: bool = False) -> Iterator[Frame]:
        for index, (picture, name) in enumerate(itertools.islice(itertools.cycle(self._pictures), self.count)):
            began, seconds = now(), index / self.rate if self.rate else None
            yield Frame(index, picture.reopen(), began, None, seconds, name)


ARRAYS_FILE = "video.npz"
REQUIRES = ("numpy", "av", "opencv-python")
AVERAGED_TICKS = 8  # ticks averaged by the progress display


def video(job: Job, journal: Journal) -> None:
    """Measure the stages alone, run them as a pipeline, and measure them again.

    A slow change of the machine's speed so affects both alike. Options of the job: `settings` of `VideoOptions`,
    `source`, `output` and `boxes` (files, "" for none), and `scratch`: remove both files in the end, for rounds that
    only measure.
    """
    assert job.trial is not None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    trial, backend = job.trial, find(job.trial.backend)
    prepare_libraries()
    if sentence := describe_old_pyav():
        journal.warn(sentence)
    options = VideoOptions(**job.options["settings"])
    libraries = (*REQUIRES, *(("trackers",) if options.track else ()), *backend.requires)
    journal.record = replace(journal.record, system=system.describe(libraries))
    journal.stage(OPENING_STAGE)
    source = open_source(str(job.options["source"]), options, _choose_decoder(options, trial))
    if suffix := Path(job.options["output"]).suffix:  # a missing codec is noticed before measuring
        path = journal.folder / f"opened{suffix}"
        open_sink(path, source, options.codec).close()
        _remove_path(path)
    if options.preload:
        journal.stage("decode")
        source = MemorySource(source, options.preload, options.frames)
    on_cpu = trial.runtime.device == "cpu"
    engine = steps.SessionThread(
        lambda: journal.time_stage("load", "load", lambda: backend.load(trial, job.artifact)),
        on_cpu,
        lanes_beside(on_cpu),
    )
    if job.round == 0:
        engine.call(lambda: find_rows(engine.session, trial, trial.dims.batch))
    video_job = _VideoJob(job, options, engine, source, journal)
    video_job.measure_alone()
    video_job.run_pipeline()
    video_job.repeat_alone()
    journal.record = replace(journal.record, facts=journal.record.facts.merge(engine.call(engine.session.facts)))
    engine.call(engine.session.close)


class _VideoJob:
    """One job: its session, its source, and their stored results."""

    def __init__(
        self, job: Job, options: VideoOptions, engine: steps.SessionThread, source: Source, journal: Journal
    ) -> None:
        assert job.trial is not None
        self._trial, self._options = job.trial, options
        self._engine, self._source, self._journal = engine, source, journal
        session = self._host = engine.session
        self._ends = self._reach_device()
        model = job.trial.model
        limits: dict[str, Any] = {
            "confidence": options.confidence,
            "iou": options.iou,
            "max_detections": options.max_detections,
        }
        self._reader = BoxReader(_find_task(job.trial), model.classes or 0, model.keypoints, **limits)
        if self._ends is not None:
            reduce_outputs = on_device.drop_low_scores(self._ends.torch, self._reader)
            engine.session = on_device.OnDeviceSession(session, self._ends, reduce_outputs)
        self._output, self._boxes = (Path(job.options[k]) if job.options[k] else None for k in ("output", "boxes"))
        self._scratch, self._source_text = bool(job.options["scratch"]), str(job.options["source"])
        self._lanes = lanes_beside(job.trial.runtime.device == "cpu")
        self._preparation = self._new_preparation()
        self._arrays: dict[str, np.ndarray] = {}
        self._measurements: list[alone.StageMeasurement] = []
        self._facts = VideoFacts(
            source.name, job.options["output"], job.options["boxes"], slots=session.slots, live=source.live,
            tracker=options.track, expected=source.count, rate=source.rate,
            lanes=self._lanes, preloaded=options.preload, processors=len(journal.record.facts.affinity),
            prepared=HOST if self._ends is None else DEVICE,
        )  # fmt: skip

    def _reach_device(self) -> DeviceBinding | None:
        """Return the engine's device binding if frames are to be prepared on the device; else None.

        Raise a `UserError` if that was requested and PyTorch can't reach the inputs.
        """
        prepare = self._options.prepare
        is_default = self._host.takes_frames and self._trial.runtime.device != "cpu"
        if prepare == HOST or not (prepare or is_default):
            return None
        binding = self._engine.call(self._host.on_device)
        if binding is None and prepare:
            raise UserError(
                f"prepare is {prepare}, and PyTorch can't reach this engine's inputs where it computes; omit --prepare"
            )
        return binding

    def measure_alone(self) -> None:
        """Measure every stage alone, and all under full CPU load; store latency and throughput as in any record."""
        journal = self._journal
        journal.stage("each stage alone")
        contention = system.CpuContention()
        times, bench, rate = self._engine.call(self._measure_alone)
        feeds = bench.feeds
        if self._ends is not None:  # records are from host to host
            feeds = self._engine.call(lambda: [self._host.stage(feed.arrays()) for feed in bench.feeds])
            batch, plan = self._preparation.batch, self._trial.plan
            rate = self._engine.call(lambda: measure.measure_throughput(self._host, feeds, batch, plan))
        run_step = measure.make_step(self._host, "all", feeds)
        latency = self._engine.call(lambda: measure.measure_latency(run_step, self._trial.plan))
        journal.store_samples("latency", "all", "s", "duration", latency)
        journal.store_samples("throughput", "throughput", "1/s", "rate", rate)
        journal.record_contention(
            "all", contention.count_busy(), self._trial.runtime.device, contention.count_withheld()
        )
        assert bench.first is not None
        height, width = bench.first.size
        self._facts = replace(self._facts, height=height, width=width)
        self._measurements = [
            alone.StageMeasurement(
                times, self._measure_contention(bench.answered), alone.measure_hand_over(len(times) - 1)
            )
        ]

    def repeat_alone(self) -> None:
        """Repeat the isolated measurements if the source can be read again and the user didn't stop the video."""
        if self._facts.stopped or self._source.is_single_pass:
            return
        self._journal.stage("each stage alone")
        # Only the video's own reading of the source counts for its notes.
        damaged_count, packets = self._source.damaged, self._source.left
        with suppress(KeyboardInterrupt):
            times, bench, _ = self._engine.call(self._measure_alone)
            cost = self._measure_contention(bench.answered)
            self._measurements.append(alone.StageMeasurement(times, cost, alone.measure_hand_over(len(times) - 1)))
        self._source.damaged, self._source.left = damaged_count, packets
        self._store_found()

    def _measure_alone(self) -> tuple[dict[str, alone.IsolatedTimes], alone.Bench, measure.Sampling]:
        """Measure every stage alone, in the engine's thread."""
        journal, session, is_first = self._journal, self._engine.session, not self._measurements
        path = journal.folder / f"alone{self._output.suffix}" if self._output else None
        sink = open_sink(path, self._source, self._options.codec) if path else None
        preparations, tracker = self._new_preparations(), self._new_tracker()
        bench = alone.Bench(self._source, self._engine, preparations, self._reader, tracker, sink)
        if is_first:
            journal.time_stage("first_call", "first call", measure.make_step(session, "all", bench.feeds))
            journal.stage("each stage alone")
        bench.run(self._options.frames)
        if path:
            _remove_path(path)
        if bench.first is None:
            raise UserError(f"{self._source.name} has no frames")
        inference, rate = alone.measure_inference(self._engine, bench.feeds, self._trial.plan, self._preparation.batch)
        return {**bench.results(), steps.INFER: inference}, bench, rate

    def _measure_contention(self, batches: list[Batch]) -> alone.ContentionCost | None:
        """Measure stages' processor time under full CPU load (`alone.measure_contention`); None on one processor."""
        count = min(len(steps.STAGES), self._facts.processors // codec_threads())
        if self._facts.processors == 1:
            return None
        suffix = self._output.suffix if self._output else ""
        paths = [self._journal.folder / f"copy{index}{suffix}" for index in range(count)] if self._output else []
        preparations = [self._new_preparation() for _ in range(count)]
        sinks: list[Sink | None] = [open_sink(path, self._source, self._options.codec) for path in paths]
        copies = [alone.StageCopy(self._source, preparation, self._reader, self._new_tracker(), sink, batches[0])
                  for preparation, sink in zip(preparations, sinks or [None] * count, strict=True)]  # fmt: skip
        try:
            return alone.measure_contention(copies, self._engine, batches)
        finally:
            for copy in copies:
                copy.close()
            for path in paths:
                _remove_path(path)

    def _store_found(self) -> None:
        """Store the results of the isolated stages so far, and of the video if it has run."""
        measurement = alone.join_measurements(self._measurements)
        self._arrays |= {f"alone_{name}": stage.seconds for name, stage in measurement.stages.items()}
        cpu = {name: stage.cpu for name, stage in measurement.stages.items()}
        self._facts = replace(self._facts, cpu=cpu, hand_over=measurement.hand_over)
        if (cost := measurement.contention) is not None:
            self._facts = replace(self._facts, crowding=cost.factor, cpu_inference=cost.inference)
        save_arrays(self._journal.folder / ARRAYS_FILE, self._arrays)
        self._journal.facts(video=self._facts)

    def _new_preparation(self) -> Preparation:
        args = self._trial.model.preprocess, self._engine.session.inputs, self._trial.dims
        return Preparation(*args) if self._ends is None else on_device.DevicePreparation(*args, self._ends)

    def _new_preparations(self) -> list[Preparation]:
        return [self._new_preparation() for _ in range(self._lanes)]

    def _new_tracker(self) -> Tracker | None:
        options = self._options
        min_score = options.track_confidence or options.confidence
        return Tracker(options.track, self._source.rate, min_score) if options.track else None

    def run_pipeline(self) -> None:
        """Run the whole video through all stages at once; if the user stops it, keep the frames written so far."""
        journal = self._journal
        streams = [self._engine.call(partial(self._build_line, index)) for index in range(self._options.streams)]
        journal.stage("video")
        gc.collect()
        gc.freeze()  # a collection would visit all the libraries' objects again and again
        contention, cpu, start_ns = system.CpuContention(), time.process_time(), now()
        stopped = False
        try:
            stages.run_pipelines(
                [stream.stages for stream in streams], _make_ticker(journal, streams, self._options.frames, start_ns)
            )
        except KeyboardInterrupt:
            stopped = True
        except OSError as e:
            raise self._explain_error(e, streams[0].sink) from e
        finally:
            notes = self._close_lines(streams)
        seconds, cpu = (now() - start_ns) / 1e9, time.process_time() - cpu
        journal.record_contention(
            "video", contention.count_busy(), self._trial.runtime.device, contention.count_withheld()
        )
        self._store_times(streams[0], start_ns)
        counts = [stream.sink.written if self._output else stream.answered for stream in streams]
        self._facts = replace(
            self._facts, frames=counts[0], answered=sum(counts), streams=len(streams), seconds=seconds, stopped=stopped,
            dropped=sum(stream.stages.dropped for stream in streams), cpu_whole=cpu / max(1, sum(counts)),
            depth=stages.QUEUE_DEPTH, objects=streams[0].tracker.counts if streams[0].tracker else {},
            rate=self._source.rate,
        )  # fmt: skip
        self._store_found()
        for sentence in (*self._source.notes, *notes, *self._find_oddities(counts[0], stopped)):
            journal.warn(sentence)
        for path in filter(None, (self._output, self._boxes) if self._scratch else ()):
            _remove_path(path)

    def _build_line(self, index: int) -> _VideoStream:
        """Build the stages of one stream; streams after the first are only load, and their output is removed."""
        is_first, output = index == 0, self._output
        if output and not is_first:
            output = self._journal.folder / f"stream{index}{output.suffix}"
        is_preloaded = isinstance(self._source, MemorySource)
        source_args = self._source_text, self._options, _choose_decoder(self._options, self._trial)
        source = self._source if is_first or is_preloaded else open_source(*source_args)
        sink = open_sink(output, source, self._options.codec)
        recorder = steps.DetectionRecorder(self._boxes if is_first else None)
        preparations, tracker, engine = self._new_preparations(), self._new_tracker(), self._engine
        is_shared, batch, size = self._options.streams > 1, preparations[0].batch, preparations[0].size
        feeds = steps.PreparationStage.arrays(preparations[0], engine, self._lanes)
        chain: list[stages.PipelineStage] = [
            steps.PreparationStage(preparations, feeds), steps.InferenceStage(engine, is_shared, batch),
            steps.PostprocessingStage(self._reader, size, recorder if tracker is None else None, batch, self._lanes,
                              engine.take_back),
        ]  # fmt: skip
        if tracker:
            chain.append(steps.FrameStage(steps.TRACK, tracker.identify, recorder.add))
        if output:
            chain += [steps.FrameStage(steps.DRAW, draw_detections), steps.FrameStage(steps.ENCODE, sink.write)]
        frames = itertools.islice(source.read(sound=output is not None), self._options.frames or None)
        pipeline = stages.VideoPipeline(steps.DECODE, frames, chain, source.live)
        return _VideoStream(source, sink, recorder, tracker, pipeline, output if output != self._output else None)

    def _close_lines(self, streams: list[_VideoStream]) -> list[str]:
        """Close every file; return the first stream's notes on differences from the source."""
        try:
            notes, *_ = [stream.close() for stream in streams]
        except OSError as e:
            raise self._explain_error(e, streams[0].sink) from e
        return notes

    def _explain_error(self, e: OSError, sink: Sink) -> Exception:
        """Return a one-line error if the disk is full; else the error unchanged."""
        if not disk_full(e):
            return e
        return UserError(f"the disk is full: {self._output} ends after about {sink.written} frames; free some space")

    def _find_oddities(self, count: int, is_stopped: bool) -> Iterator[str]:
        source, expected = self._source, self._source.count
        is_complete = not is_stopped and not self._options.frames and not source.live
        if is_stopped:
            yield f"stopped by the user after {count} frames"
        if source.damaged:
            pieces = "piece" if source.damaged == 1 else "pieces"
            yield f"{source.damaged} {pieces} of {source.name} can't be decoded and were left out"
        elif is_complete and expected and count != expected:
            yield f"{source.name} says that it has {expected} frames, and {count} were found"

    def _store_times(self, stream: _VideoStream, start_ns: int) -> None:
        """Store the times of all stages and frames of the stream, in seconds since the pipeline's start."""
        recorder, timestamps = stream.keep, stream.stages.timed
        for name, stage_times in timestamps.items():
            self._arrays |= {f"{name}_{key}": array for key, array in stage_times.arrays(start_ns).items()}
        began, known, boxes = (
            np.asarray(each, np.int64) for each in (recorder.began, recorder.known_times, recorder.boxes)
        )
        self._arrays |= {"frame_began": (began - start_ns) / 1e9, "frame_known": (known - start_ns) / 1e9,
                         "frame_boxes": boxes}  # fmt: skip


@dataclass(frozen=True)
class _VideoStream:
    """One stream from its source to its sink; `scratch` is removed on closing."""

    source: Source
    sink: Sink
    keep: steps.DetectionRecorder
    tracker: Tracker | None
    stages: stages.VideoPipeline
    scratch: Path | None

    @property
    def answered(self) -> int:
        """Frames with known boxes."""
        return len(self.keep.boxes)

    def close(self) -> list[str]:
        """Complete the written files; see `Sink.close`."""
        self.keep.close()
        notes = self.sink.close(self.source.left)
        if self.scratch:
            _remove_path(self.scratch)
        return notes


def _choose_decoder(options: VideoOptions, trial: Trial) -> str:
    """Return the GPU for decoding, "" for none; raise an error if it was requested and is impossible."""
    if options.decode != DEVICE:
        return ""
    if trial.runtime.device == "cpu":
        raise UserError(f"decode is {DEVICE}, and that needs a GPU's decoder; omit it, or give --device cuda:0")
    if find_spec("torch") is None or not has_pyav():
        raise Unavailable(f"decode is {DEVICE}, which needs PyTorch and PyAV; {install('torch', 'av')}")
    return trial.runtime.device


def _find_task(trial: Trial) -> Detect:
    task = tasks.find_task(trial.model.task)
    if not isinstance(task, Detect):
        raise UserError(f"{trial.model.name} is for {task.name}, which has no boxes; see --task")
    return task


def _make_ticker(journal: Journal, streams: list[_VideoStream], max_frames: int, start_ns: int) -> Callable[[], None]:
    history: list[tuple[int, int]] = [(start_ns, 0)]
    expected = len(streams) * (max_frames or streams[0].source.count)

    def write_progress() -> None:
        history.append((now(), sum(stream.answered for stream in streams)))
        (begin_ns, before), (end_ns, after) = history[max(0, len(history) - 1 - AVERAGED_TICKS)], history[-1]
        total_text = f" of {expected}" if expected else ""
        rate = (after - before) / max((end_ns - begin_ns) / 1e9, 1e-9)
        (journal.folder / "stage").write_text(f"frame {after}{total_text}, {rate:.1f} frames/s")

    return write_progress


def _remove_path(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
