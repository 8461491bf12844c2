"""Sessions of a video through each compared engine, in rounds."""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.api import Result
from dyno.jobs.launcher import Interrupted, launch
from dyno.jobs.progress import Progress
from dyno.runner.device_lock import hold_device
from dyno.runner.execute import execute
from dyno.runner.run_folder import is_measured
from dyno.store import Run, check_writable, guard_start
from dyno.study.defaults import folder_for, study_of_own_jobs
from dyno.study.study import Study
from dyno.worker.option_values import check_types
from dyno.worker.record import Record, read_json, write_json, write_text
from dyno.worker.spec import Job, Trial, UserError
from dyno.worker.tasks.layouts import NO_BOXES
from dyno.worker.video.options import IMAGE_SUFFIXES, OPENING_STAGE, VIDEO_SUFFIXES, VideoOptions

if TYPE_CHECKING:
    from dyno.table import Table

# Jobs of a video: output paths, launch, interruption by the user, and results.

STDIN_SOURCE = "-"
# OpenMP's threads spin while waiting, and so take processors from other stages: with one busy thread more than
# processors, PyTorch takes seven times as long.
SHARED_PROCESSORS = {"OMP_WAIT_POLICY": "passive"}
SHUTDOWN_TIMEOUT_S = 20.0  # seconds for an interrupted job to close its video


@dataclass(frozen=True)
class VideoJobSpec:
    """Settings common to all jobs of a video: source, files to write ("" for none), options.

    With `several` trials, each writes to its own name; rounds after the first keep nothing.
    """

    source: str
    output: str
    boxes: str
    options: VideoOptions
    several: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings stored in the run folder, which refuses another video."""
        path = Path(self.source)
        content = {"bytes": path.stat().st_size} if path.is_file() else {}
        options = dataclasses.asdict(self.options)
        return {"source": self.source, "options": options, "written": bool(self.output), **content}

    def list_unwritten(self) -> tuple[str, ...]:
        """Return the requested files that don't exist."""
        paths = [Path(path) for path in (self.output, self.boxes) if path]
        written_paths = [p for p in paths if p.exists() or (self.several and any(p.parent.glob(
            f"{glob.escape(p.stem)}-*{glob.escape(p.suffix)}")))]  # fmt: skip
        return tuple(str(path) for path in paths if path not in written_paths)

    def name_output(self, path: str, trial: Trial) -> str:
        if not path or not self.several:
            return path
        target = Path(path)
        return str(target.with_name(f"{target.stem}-{trial.variant}-{trial.precision}{target.suffix}"))

    def make_job(self, job: Job, folder: Path) -> Job:
        """Return a round's job with the video in place of the usual measurement."""
        assert job.trial is not None
        outputs = [self.name_output(path, job.trial) for path in (self.output, self.boxes)]
        if scratch := job.round > 0:
            outputs = [str(folder.resolve() / f"scratch{Path(path).suffix}") if path else "" for path in outputs]
        output, boxes = (str(Path(path).resolve()) if path else "" for path in outputs)
        source = f"pipe:{os.dup(0)}" if self.source == STDIN_SOURCE else self.source
        video: Mapping[str, Any] = {"source": source, "output": output, "boxes": boxes, "scratch": scratch,
                                    "settings": dataclasses.asdict(self.options)}  # fmt: skip
        return dataclasses.replace(job, kind="video", options={**job.options, **video})

    def launch(self, job: Job, folder: Path, timeout_s: float, progress: Progress) -> Record:
        """Run the job and return its record; videos have any length, so there is no timeout.

        After an interrupt the job closes its file, and its record is stored before the interrupt is raised again.
        """
        new_job = self.make_job(job, folder)
        pipe = new_job.options["source"]
        inherited = [int(pipe.removeprefix("pipe:"))] if pipe.startswith("pipe:") else []
        try:
            with hold_device(new_job.runtime, progress.show_waiting):
                return launch(new_job, folder, math.inf, progress.tick, share_processors(new_job), fds=inherited,
                              patience_s=SHUTDOWN_TIMEOUT_S)  # fmt: skip
        except Interrupted as e:
            progress.done(job.trial, e.record) if job.trial else None
            raise
        finally:
            for descriptor in inherited:
                os.close(descriptor)


def share_processors(job: Job) -> dict[str, str]:
    """Return environment variables for a job whose threads share processors, unless set by the user."""
    environment = {**os.environ, **dict(job.runtime.env)}
    return {name: value for name, value in SHARED_PROCESSORS.items() if name not in environment}


TRACE_SUFFIX = ".trace.json"
VIDEO_FILE = "video.json"  # in the run folder: the measured video


@dataclass(frozen=True)
class LoadResult(Result):
    """Run folder of one or several engines under load."""

    folder: Path

    @cached_property
    def _leading(self) -> tuple[list[Table], list[str]]:
        from dyno.report import tables

        return tables.list_leading(self.data)

    @property
    def tables(self) -> list[Table]:
        """Tables on the load: a row for each engine, then details."""
        return self._leading[0]

    @property
    def sentences(self) -> list[str]:
        """For each engine its result, its limit, and reasons for doubt, or why it has none."""
        return [*self._leading[1], *self.failures]

    @property
    def failures(self) -> list[str]:
        """Why each trial that isn't ok has no result, or only some of its rounds."""
        return [f"{trial.label}: {trial.reason}" for trial in self.records if trial.status != "ok"]


@dataclass(frozen=True)
class VideoResult(LoadResult):
    """Run folder of a video with one or several engines, and whether the user `stopped` it.

    `unwritten` are requested files of rounds that were measured before, and so not written now.
    """

    stopped: bool = False
    unwritten: tuple[str, ...] = ()

    @property
    def refused(self) -> str:
        """Why the source, or the boxes in the networks' outputs, can't be read; "" if they can."""
        records = [trial.worst.record if trial.worst else None for trial in self.records]
        failures = [r for r in records if r is not None and r.status == "failed"]
        reasons = [r.reason for r in failures if r.stage == OPENING_STAGE or NO_BOXES in r.reason]
        return reasons[0] if reasons and len(reasons) == len(records) else ""

    def save(self, path: Path) -> None:
        """Write the pipeline's trace: a track for each stage and frame of each engine's typical round."""
        from dyno.video import figures, words

        write_text(path, json.dumps(words.chrome_trace(figures.list_runs(self.data))) + "\n")


def bench_video(
    source: str | Path,
    output: str | Path = "",
    *,
    model: Any,
    boxes: str | Path = "",
    save: str | Path = "",
    out: str | Path | None = None,
    options: VideoOptions | None = None,
    quiet: bool = True,
    **settings: Any,
) -> VideoResult:
    """Answer a video with a detector, in every engine named by `settings` (fields of `Study`).

    `source` is a video, an image, a folder of images, a URL, camera:0, or - for raw frames from standard input;
    `output` the annotated video, image or folder ("": nothing is written), and `boxes` a file of JSON lines, one per
    frame; `save` is a file for the pipeline's trace. The run folder is `out`, or a new one below runs/video. Raises
    `UserError`, one line.
    """
    check_types({"options": options}, {"options": VideoOptions | None})
    study, several = study_of_own_jobs(model, 1, settings)
    (name,) = study.models
    file_names = str(output or ""), str(boxes or "")
    job_spec = VideoJobSpec(_make_absolute(source), *file_names, options or VideoOptions(), several)
    _check_options(job_spec, study)
    if save and not str(save).endswith(TRACE_SUFFIX):
        raise UserError(f"{str(save)!r} can't be saved; end its name in {TRACE_SUFFIX} (Perfetto)")
    if save:
        check_writable(Path(save))
    folder = folder_for(out, "video", [name])
    stopped = False
    try:
        with guard_start(folder):
            store_about(
                folder, VIDEO_FILE, job_spec.settings(), "of another video, or of other settings", "without a video"
            )
            execute(study, folder, Progress(quiet=quiet), retry_failed=True, launch=job_spec.launch)
    except KeyboardInterrupt:
        if not list(folder.glob("trials/*/r*/video.npz")):
            raise
        stopped = True
    result = VideoResult(folder, stopped=stopped)
    if not stopped and all(trial.status == "ok" for trial in result.records):
        result = replace(result, unwritten=job_spec.list_unwritten())
    if save:
        result.save(Path(save))
    return result


def _make_absolute(source: str | Path) -> str:
    """Return a path made absolute, because jobs may run elsewhere; other sources unchanged."""
    text = str(source)
    return str(Path(text).absolute()) if _is_path(text) else text


def _is_path(source: str) -> bool:
    return source != STDIN_SOURCE and ":" not in source.split("/")[0]


def _check_options(job_spec: VideoJobSpec, study: Study) -> None:
    """Raise `UserError` for impossible options, before anything is started."""
    if job_spec.source == STDIN_SOURCE and (job_spec.several or study.rounds > 1):
        raise UserError("standard input can be read only once; give one backend and --rounds 1")
    if job_spec.source == STDIN_SOURCE and not job_spec.options.frame_size:
        raise UserError("raw frames don't say how large they are; give --frame-size WIDTHxHEIGHT")
    if job_spec.options.streams > 1 and (job_spec.source == STDIN_SOURCE or job_spec.source.startswith("camera:")):
        raise UserError(f"{job_spec.source} can be read only once; omit --streams")
    path, is_local = Path(job_spec.source), _is_path(job_spec.source)
    if is_local and not path.exists():
        raise UserError(f"{path} does not exist; give a video, an image, a folder of images, a URL, camera:0 or -")
    for target in filter(None, (job_spec.output, job_spec.boxes)):
        for kind, origin in (("source", job_spec.source if is_local else ""), ("model", *study.models)):
            if origin and Path(origin).exists() and Path(target).resolve() == Path(origin).resolve():
                raise UserError(f"{target} is the {kind} itself; give another name for the output")
    if job_spec.output:
        _check_output(Path(job_spec.output), path if is_local else None)
    if job_spec.boxes:
        check_writable(Path(job_spec.boxes), parents=True)


def _check_output(output: Path, source: Path | None) -> None:
    """Raise `UserError` for an unwritable suffix or folder, and for image output if `source` has no images."""
    suffix = output.suffix.lower()
    has_images = source is not None and (source.is_dir() or source.suffix.lower() in IMAGE_SUFFIXES)
    if has_images and not suffix:
        check_writable(output / "*", parents=True)
        if source is not None and output.resolve() == source.resolve().parent:
            raise UserError(f"{source.name} lies in {output}, and would be overwritten; give another folder")
        return
    if suffix not in (*VIDEO_SUFFIXES, *(IMAGE_SUFFIXES if has_images else ())):
        choices = "a folder, .png, .jpg, " if has_images else ""
        raise UserError(f"{output} can't be written: {suffix or 'a name without a suffix'} is not a video container; "
                        f"give {choices}.mp4, .mkv, .webm or .avi")  # fmt: skip
    if suffix in IMAGE_SUFFIXES and source is not None and source.is_dir():
        count = sum(file.suffix.lower() in IMAGE_SUFFIXES for file in source.iterdir())
        if count > 1:
            raise UserError(f"{source.name} has {count} images; give a folder or a video, not {output.name}")
    check_writable(output, parents=True)


def store_about(folder: Path, name: str, description: Mapping[str, Any], mismatch_text: str, missing_text: str) -> None:
    """Store `description` in the folder's file `name`; UserError if the folder was measured with other values.

    `mismatch_text` and `missing_text` complete the error messages, for other values and for a folder without the file.
    """
    path = folder / name
    content = read_json(path) if path.is_file() else {}
    if any(content.get(key, value) != value for key, value in description.items()) and is_measured(folder):
        raise UserError(f"{folder} is {mismatch_text}; give another --out")
    if (folder / "study.toml").is_file() and not path.is_file():
        raise UserError(f"{folder} is of a run {missing_text}; give another --out")
    with Run(folder).hold_lock():  # also makes the folder Dyno's
        write_json(path, description)
