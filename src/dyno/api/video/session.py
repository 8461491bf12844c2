"""Run a video through each engine that is compared, in rounds, and read what that says."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.api.result import Result
from dyno.api.video.jobs import STDIN, VideoJobSpec
from dyno.engine.execute import execute
from dyno.engine.run_folder import measured
from dyno.jobs.progress import Progress
from dyno.planning.defaults import folder_for, study_of_own_jobs
from dyno.store import Run, begun, check_writable
from dyno.study import Study
from dyno.worker.option_values import check_types
from dyno.worker.record import read_json, write_json, write_text
from dyno.worker.spec import UserError
from dyno.worker.tasks.layouts import UNREAD
from dyno.worker.video.options import IMAGES, OPENING, VIDEOS, VideoOptions

if TYPE_CHECKING:
    from dyno.analysis.presentation.table import Table

TRACE, EXPORTER = ".trace.json", "dyno"
ABOUT = "video.json"  # in the run folder: which video it is of


@dataclass(frozen=True)
class VideoResult(Result):
    """A video that went through one or several engines: its run folder, whether the user stopped it, and the requested
    files that were not written, because the rounds that write them were measured before."""

    folder: Path
    stopped: bool = False
    unwritten: tuple[str, ...] = ()

    @property
    def refused(self) -> str:
        """Why the source, or the boxes in the networks' outputs, can't be read; "" if they can."""
        worst = [trial.worst for trial in self.records]
        refused = all(
            w is not None and w.status == "failed" and (w.record.stage == OPENING or UNREAD in w.record.reason)
            for w in worst
        )
        return worst[0].record.reason if worst and worst[0] is not None and refused else ""

    @cached_property
    def tables(self) -> list[Table]:
        """End to end by engine, the stages of each, and how many streams would fit."""
        return [self.table(name) for name in ("video", "video-stages", "video-streams")]

    @cached_property
    def sentences(self) -> list[str]:
        """For each engine how fast it is, what limits it, and what a change would gain."""
        from dyno.analysis.video import runs, words

        return words.of_run(runs.of_run(self.data))

    def save(self, path: Path) -> None:
        """Write the pipeline's trace: a track for each stage and each frame of each engine's typical round."""
        from dyno.analysis.video import runs, traces

        write_text(path, json.dumps(traces.chrome(runs.of_run(self.data), EXPORTER)) + "\n")


def video(
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
    """Answer a video with a detector, in every engine that `settings` (fields of `Study`) name.

    `source` is a video, an image, a folder of images, a URL, camera:0, or - for raw frames from standard input;
    `output` the annotated video, image or folder ("": nothing is written), and `boxes` a file of JSON lines, one per
    frame; `save` is a file for the pipeline's trace. The run folder is `out`, or a new one below runs/video. Raises
    `UserError`, one line.
    """
    check_types({"options": options}, {"options": VideoOptions | None})
    study, several = study_of_own_jobs(model, 1, settings)
    (name,) = study.models
    shot = VideoJobSpec(_make_absolute(source), str(output or ""), str(boxes or ""), options or VideoOptions(), several)
    _check_options(shot, study)
    if save and not str(save).endswith(TRACE):
        raise UserError(f"{str(save)!r} can't be saved; end its name in {TRACE} (Perfetto)")
    if save:
        check_writable(Path(save))
    folder = folder_for(out, "video", [name])
    stopped = False
    try:
        with begun(folder):
            _store_video(shot, folder)
            execute(study, folder, Progress(quiet=quiet), retry_failed=True, launch=shot.launch)
    except KeyboardInterrupt:
        if not list(folder.glob("trials/*/r*/video.npz")):
            raise
        stopped = True
    filmed = VideoResult(folder, stopped=stopped)
    if not stopped and all(trial.status == "ok" for trial in filmed.records):
        filmed = replace(filmed, unwritten=shot.unwritten())
    if save:
        filmed.save(Path(save))
    return filmed


def _make_absolute(source: str | Path) -> str:
    """Return a path made absolute, because jobs may run elsewhere; anything else unchanged."""
    text = str(source)
    return text if text == STDIN or ":" in text.split("/")[0] else str(Path(text).absolute())


def _check_options(shot: VideoJobSpec, study: Study) -> None:
    """Raise `UserError` for options that can't work, before anything is started."""
    if shot.source == STDIN and (shot.several or study.rounds > 1):
        raise UserError("standard input can be read only once; give one backend and --rounds 1")
    if shot.source == STDIN and not shot.options.width:
        raise UserError("raw frames don't say how large they are; give --frame-size WIDTHxHEIGHT")
    if shot.options.streams > 1 and (shot.source == STDIN or shot.source.startswith("camera:")):
        raise UserError(f"{shot.source} can be read only once; omit --streams")
    path = Path(shot.source)
    local = shot.source != STDIN and ":" not in shot.source.split("/")[0]
    if local and not path.exists():
        raise UserError(f"{path} does not exist; give a video, an image, a folder of images, a URL, camera:0 or -")
    for written in filter(None, (shot.output, shot.boxes)):
        for kind, read in (("source", shot.source if local else ""), ("model", *study.models)):
            if read and Path(read).exists() and Path(written).resolve() == Path(read).resolve():
                raise UserError(f"{written} is the {kind} itself; give another name for what is written")
    if shot.output:
        _check_output(Path(shot.output), path if local else None)
    if shot.boxes:
        check_writable(Path(shot.boxes), making=True)


def _check_output(output: Path, source: Path | None) -> None:
    """Raise `UserError` for a suffix or a folder that can't be written, and for images if `source` has none."""
    suffix = output.suffix.lower()
    images = source is not None and (source.is_dir() or source.suffix.lower() in IMAGES)
    if images and not suffix:
        check_writable(output / "*", making=True)
        if source is not None and output.resolve() == source.resolve().parent:
            raise UserError(f"{source.name} lies in {output}, and would be written over; give another folder")
        return
    if suffix not in (*VIDEOS, *(IMAGES if images else ())):
        others = "a folder, .png, .jpg, " if images else ""
        raise UserError(f"{output} can't be written: {suffix or 'a name without a suffix'} is not a video container; "
                        f"give {others}.mp4, .mkv, .webm or .avi")  # fmt: skip
    if suffix in IMAGES and source is not None and source.is_dir():
        count = sum(file.suffix.lower() in IMAGES for file in source.iterdir())
        if count > 1:
            raise UserError(f"{source.name} has {count} images; give a folder or a video, not {output.name}")
    check_writable(output, making=True)


def _store_video(shot: VideoJobSpec, folder: Path) -> None:
    """Store which video the folder is of; a folder of another one is refused."""
    about, path = shot.settings(), folder / ABOUT
    stored = read_json(path) if path.is_file() else {}
    other = any(stored.get(key, value) != value for key, value in about.items())
    if other and measured(folder):
        raise UserError(f"{folder} is of another video, or of other settings; give another --out")
    if (folder / "study.toml").is_file() and not path.is_file():
        raise UserError(f"{folder} is of a run without a video; give another --out")
    with Run(folder).locked():  # makes the folder Dyno's, too
        write_json(path, about)
