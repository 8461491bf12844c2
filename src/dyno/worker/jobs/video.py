"""A video through a trial's engine: each stage alone on its first frames, then the whole as a pipeline."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dyno.worker import measure, system, tasks
from dyno.worker.backend import Session
from dyno.worker.facts.video import VideoFacts
from dyno.worker.inputs import input_data
from dyno.worker.journal import Journal
from dyno.worker.record import save_arrays
from dyno.worker.registry import find
from dyno.worker.spec import Job, Trial, UserError
from dyno.worker.tasks.detect import Detect
from dyno.worker.video import alone, steps
from dyno.worker.video.ends import Sink, Source, disk_full, now
from dyno.worker.video.opening import prepare_libraries, sink_of, source_of
from dyno.worker.video.options import VideoOptions
from dyno.worker.video.preparing import Preparation
from dyno.worker.video.stages import Stages, Step

ARRAYS = "video.npz"
REQUIRES = ("numpy", "av", "opencv-python")
ALONE_S = 2.0  # of decoding at most, for the frames on which each stage is measured alone
RECENT = 8  # ticks over which the rate is said that the progress shows


def video(job: Job, journal: Journal) -> None:
    """Measure the stages alone, then run them as a pipeline.

    Options of the job: `settings` of `VideoOptions`, `source`, `output` and `boxes` (files, "" for none), and
    `scratch`: both are removed in the end, as of rounds that only measure.
    """
    assert job.trial is not None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    trial, backend = job.trial, find(job.trial.backend)
    prepare_libraries()
    journal.record = replace(journal.record, system=system.describe((*REQUIRES, *backend.requires)))
    options = VideoOptions(**job.options["settings"])
    source = source_of(str(job.options["source"]), options)
    session: Session = journal.timed("load", "load", lambda: backend.load(trial, job.artifact))
    work = _Work(job, options, session, source, journal)
    work.alone()
    work.pipeline()
    journal.record = replace(journal.record, facts=journal.record.facts.joined(session.facts()))
    session.close()


class _Work:
    """One job: its session, its source, and what is stored of them."""

    def __init__(self, job: Job, options: VideoOptions, session: Session, source: Source, journal: Journal) -> None:
        assert job.trial is not None
        self._trial, self._options = job.trial, options
        self._session, self._source, self._journal = session, source, journal
        self._answering = steps.Answering(_task(job.trial), job.trial, options.confidence, options.iou, options.most)
        self._output, self._boxes = (Path(job.options[k]) if job.options[k] else None for k in ("output", "boxes"))
        self._scratch = bool(job.options["scratch"])
        self._preparation = Preparation(job.trial.model.preprocess, session.inputs, job.trial.dims)
        self._arrays: dict[str, np.ndarray] = {}
        self._facts = VideoFacts(
            source.name, job.options["output"], job.options["boxes"], slots=session.slots, live=source.live,
            expected=source.count, rate=source.rate, processors=len(journal.record.facts.affinity),
        )  # fmt: skip

    def alone(self) -> None:
        """Every stage by itself; the engine's latency and throughput are a record's like any other's."""
        journal, session, preparation = self._journal, self._session, self._preparation
        journal.stage("each stage alone")
        contention = system.CpuContention()
        found: dict[str, alone.Alone] = {}
        frames, found[steps.DECODE] = alone.decode(self._source, ALONE_S, self._options.frames)
        if not frames:
            raise UserError(f"{self._source.name} has no frames")
        feeds = [session.stage(preparation.new_feed()) for _ in range(input_data.FEEDS)]
        found[steps.PREPARE] = alone.prepare(frames, preparation, feeds)
        once = measure.step(session, "all", feeds)
        journal.timed("first_call", "first call", once)
        journal.stage("each stage alone")
        found[steps.INFER], rate = alone.infer(session, feeds, self._trial.plan, preparation.batch)
        journal.sampled("latency", "all", "s", "duration", measure.latency(once, self._trial.plan))
        journal.sampled("throughput", "throughput", "1/s", "rate", rate)
        answering = steps.Postprocess(self._answering, preparation.size)
        found[steps.POSTPROCESS] = alone.answer(session, frames, preparation, feeds, answering)
        if self._output:
            found[steps.DRAW] = alone.drawn(frames)
            path = journal.folder / f"alone{self._output.suffix}"
            found[steps.ENCODE] = alone.encoded(frames, sink_of(path, self._source, self._options.codec))
            _remove(path)
        journal.contended("all", contention.busy(), self._trial.runtime.device)
        self._arrays |= {f"alone_{name}": one.seconds for name, one in found.items()}
        height, width = frames[0].image.shape[:2]
        self._facts = replace(self._facts, height=height, width=width, cpu={k: v.cpu for k, v in found.items()})

    def pipeline(self) -> None:
        """The whole video through all stages at once; stopped by the user, what was written until then."""
        journal, source = self._journal, self._source
        sink, keep = sink_of(self._output, source, self._options.codec), steps.Keep(self._boxes)
        reading = source.read(sound=self._output is not None)
        stages = Stages(steps.DECODE, itertools.islice(reading, self._options.frames or None),
                        self._chain(keep, sink), source.live)  # fmt: skip
        journal.stage("video")
        contention, cpu, since = system.CpuContention(), time.process_time(), now()
        stopped = False
        try:
            stages.run(_ticker(journal, keep, self._options.frames or source.count, since))
        except KeyboardInterrupt:
            stopped = True
        except OSError as e:
            raise self._full(e, sink) from e
        finally:
            keep.close()
            notes = self._closed(sink)
        seconds, cpu = (now() - since) / 1e9, time.process_time() - cpu
        journal.contended("video", contention.busy(), self._trial.runtime.device)
        self._store(stages, keep, since)
        count = sink.written if self._output else len(keep.boxes)
        self._facts = replace(self._facts, frames=count, dropped=stages.dropped, seconds=seconds, stopped=stopped,
                              cpu_whole=cpu / max(1, count))  # fmt: skip
        journal.facts(video=self._facts)
        for sentence in (*notes, *self._oddities(count, stopped)):
            journal.warn(sentence)
        if self._scratch:
            for path in filter(None, (self._output, self._boxes)):
                _remove(path)

    def _chain(self, keep: steps.Keep, sink: Sink) -> list[Step]:
        """The steps behind the reading; without an output nothing is drawn."""
        drawing = [steps.Draw(), steps.Encode(sink)] if self._output else []
        return [steps.Prepare(self._preparation, self._session), steps.Infer(self._session),
                steps.Postprocess(self._answering, self._preparation.size), keep, *drawing]  # fmt: skip

    def _closed(self, sink: Sink) -> list[str]:
        try:
            return sink.close(self._source.left)
        except OSError as e:
            raise self._full(e, sink) from e

    def _full(self, e: OSError, sink: Sink) -> Exception:
        """In one line where the disk is full; else the error as it is."""
        if not disk_full(e):
            return e
        return UserError(f"the disk is full: {self._output} ends after about {sink.written} frames; free some space")

    def _oddities(self, count: int, stopped: bool) -> Iterator[str]:
        source, expected = self._source, self._source.count
        whole = not stopped and not self._options.frames and not source.live
        if stopped:
            yield f"stopped by the user after {count} frames"
        if source.damaged:
            pieces = "piece" if source.damaged == 1 else "pieces"
            yield f"{source.damaged} {pieces} of {source.name} can't be decoded and were left out"
        elif whole and expected and count != expected:
            yield f"{source.name} says that it has {expected} frames, and {count} were found"

    def _store(self, stages: Stages, keep: steps.Keep, since: int) -> None:
        """The times of every stage and frame, in seconds since the pipeline began."""
        for name, timed in stages.timed.items():
            if name != keep.name:
                self._arrays |= {f"{name}_{key}": array for key, array in timed.arrays(since).items()}
        known = np.asarray(stages.timed[keep.name].ended[: len(keep.began)], np.int64)
        began = np.asarray(keep.began, np.int64)[: len(known)]
        self._arrays |= {"frame_began": (began - since) / 1e9, "frame_known": (known - since) / 1e9,
                         "frame_boxes": np.asarray(keep.boxes[: len(known)], np.int64)}  # fmt: skip
        save_arrays(self._journal.folder / ARRAYS, self._arrays)


def _task(trial: Trial) -> Detect:
    task = tasks.find(trial.model.task)
    if not isinstance(task, Detect):
        raise UserError(f"{trial.model.name} is for {task.name}, which has no boxes; see --task")
    return task


def _ticker(journal: Journal, keep: steps.Keep, expected: int, since: int) -> Callable[[], None]:
    """Says how far it is, and how fast at the moment, in the job's stage."""
    recent: list[tuple[int, int]] = [(since, 0)]

    def tick() -> None:
        recent.append((now(), len(keep.boxes)))
        (began, before), (at, done) = recent[max(0, len(recent) - 1 - RECENT)], recent[-1]
        of = f" of {expected}" if expected else ""
        rate = (done - before) / max((at - began) / 1e9, 1e-9)
        (journal.folder / "stage").write_text(f"frame {done}{of}, {rate:.1f} frames/s")

    return tick


def _remove(path: Path) -> None:
    """Remove a file or a folder of files, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
