"""A video through a trial's engine: each stage alone on its first frames, then the whole as a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from dyno.worker.video.frame import Frame, now
from dyno.worker.video.preparing import Preparation
from dyno.worker.video.sink import Sink, disk_full, sink_for
from dyno.worker.video.source import Source, library
from dyno.worker.video.stages import Stages

ARRAYS = "video.npz"
REQUIRES = ("numpy", "av", "opencv-python")
ALONE_S = 2.0  # of decoding at most, for the frames on which each stage is measured alone


def video(job: Job, journal: Journal) -> None:
    """Measure the stages alone, then run them as a pipeline. Options of the job: `source`, `output`, `boxes`, `codec`,
    `confidence`, `iou`, `most`."""
    assert job.trial is not None
    trial, backend = job.trial, find(job.trial.backend)
    library()
    journal.record = replace(journal.record, system=system.describe((*REQUIRES, *backend.requires)))
    source = Source.of(Path(job.options["source"]))
    session: Session = journal.timed("load", "load", lambda: backend.load(trial, job.artifact))
    work = _Work(job, trial, session, source, journal)
    work.alone()
    work.pipeline()
    journal.stage("inspect")
    journal.record = replace(journal.record, facts=journal.record.facts.joined(session.facts()))
    session.close()


class _Work:
    """One job: its session, its source, and what is stored of them."""

    def __init__(self, job: Job, trial: Trial, session: Session, source: Source, journal: Journal) -> None:
        self._session, self._source, self._journal = session, source, journal
        self._plan, self._trial = trial.plan, trial
        options = job.options
        task = tasks.find(trial.model.task)
        if not isinstance(task, Detect):
            raise UserError(f"{trial.model.name} is for {task.name}, which has no boxes; see --task")
        self._answering = steps.Answering(task, trial, options["confidence"], options["iou"], options["most"])
        self._output, self._boxes = (Path(options[k]) if options[k] else None for k in ("output", "boxes"))
        self._codec = str(options["codec"])
        self._preparation = Preparation(trial.model.preprocess, session.inputs, trial.dims)
        self._arrays: dict[str, np.ndarray] = {}
        self._facts = VideoFacts(options["source"], options["output"], options["boxes"], slots=session.slots,
                                 processors=len(journal.record.facts.affinity))  # fmt: skip

    def alone(self) -> None:
        """Every stage by itself; the engine's latency and throughput are a record's like any other's."""
        journal, session, preparation = self._journal, self._session, self._preparation
        journal.stage("each stage alone")
        contention = system.CpuContention()
        found: dict[str, alone.Alone] = {}
        frames, found[steps.DECODE] = alone.decode(self._source, ALONE_S)
        if not frames:
            raise UserError(f"{self._source.path} has no frames")
        feeds = [session.stage(preparation.new_feed()) for _ in range(input_data.FEEDS)]
        found[steps.PREPARE] = alone.prepare(frames, preparation, feeds)
        once = measure.step(session, "all", feeds)
        journal.timed("first_call", "first call", once)
        journal.stage("each stage alone")
        found[steps.INFER], rate = alone.infer(session, feeds, self._plan, preparation.batch)
        journal.sampled("latency", "all", "s", "duration", measure.latency(once, self._plan))
        journal.sampled("throughput", "throughput", "1/s", "rate", rate)
        answering = steps.Postprocess(self._answering, preparation.size)
        found[steps.POSTPROCESS] = alone.answer(session, frames, preparation, feeds, answering)
        if self._output:
            found[steps.DRAW] = alone.drawn(frames)
            scratch = journal.folder / f"alone{self._output.suffix}"
            found[steps.ENCODE] = alone.encoded(frames, sink_for(scratch, self._source, self._codec))
            _remove(scratch)
        journal.contended("all", contention.busy(), self._trial.runtime.device)
        self._arrays |= {f"alone_{name}": one.seconds for name, one in found.items()}
        height, width = frames[0].image.shape[:2]
        self._facts = replace(self._facts, height=height, width=width, cpu={k: v.cpu for k, v in found.items()},
                              expected=self._source.count, rate=self._source.rate)  # fmt: skip

    def pipeline(self) -> None:
        """The whole video through all stages at once; stopped by the user, what was written until then."""
        journal = self._journal
        sink, keep = sink_for(self._output, self._source, self._codec), steps.Keep(self._boxes)
        chain = [steps.Prepare(self._preparation, self._session), steps.Infer(self._session),
                 steps.Postprocess(self._answering, self._preparation.size), keep]  # fmt: skip
        drawing = [steps.Draw(), steps.Encode(sink)] if self._output else []
        frames = self._source.read(sound=self._output is not None)
        stages = Stages(steps.DECODE, frames, [*chain, *drawing])
        journal.stage("video")
        contention, cpu, since = system.CpuContention(), time.process_time(), now()
        stopped = False
        try:
            stages.run(_ticker(journal, keep, self._source.count, since))
        except KeyboardInterrupt:
            stopped = True
        except OSError as e:
            if not disk_full(e):
                raise
            raise self._full(sink) from e
        finally:
            keep.close()
            notes = self._closed(sink)
        seconds, cpu = (now() - since) / 1e9, time.process_time() - cpu
        journal.contended("video", contention.busy(), self._trial.runtime.device)
        self._store(stages, keep, since)
        count = sink.written if self._output else len(keep.boxes)
        self._facts = replace(self._facts, frames=count, seconds=seconds, stopped=stopped,
                              cpu_whole=cpu / max(1, count))  # fmt: skip
        journal.facts(video=self._facts)
        for sentence in (*notes, *self._oddities(count, stopped)):
            journal.warn(sentence)

    def _closed(self, sink: Sink) -> list[str]:
        try:
            return sink.close(self._source.left)
        except OSError as e:
            if not disk_full(e):
                raise
            raise self._full(sink) from e

    def _full(self, sink: Sink) -> UserError:
        return UserError(f"the disk is full: {self._output} ends after about {sink.written} frames; free some space")

    def _oddities(self, count: int, stopped: bool) -> Iterator[str]:
        source = self._source
        if stopped:
            yield f"stopped by the user after {count} frames"
        if source.damaged:
            yield f"{source.damaged} packets of {source.path.name} can't be decoded and were left out"
        elif not stopped and source.count and count != source.count:
            yield f"{source.path.name} says that it has {source.count} frames, and {count} were found"

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




def _ticker(journal: Journal, keep: steps.Keep, expected: int, since: int) -> Callable[[], None]:
    """Says how far it is, and how fast at the moment, in the job's stage."""
    recent: list[tuple[int, int]] = [(since, 0)]

    def tick() -> None:
        recent.append((now(), len(keep.boxes)))
        (began, before), (at, done) = recent[max(0, len(recent) - 9)], recent[-1]
        of = f" of {expected}" if expected else ""
        rate = (done - before) / max((at - began) / 1e9, 1e-9)
        (journal.folder / "stage").write_text(f"frame {done}{of}, {rate:.1f} frames/s")

    return tick


def _remove(path: Path) -> None:
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
