"""The jobs of a video: where each writes, and how one is launched, ended by the user, and read."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.engine.device_lock import held
from dyno.jobs.launcher import Interrupted, launch
from dyno.jobs.progress import Progress
from dyno.worker.record import Record
from dyno.worker.spec import Job, Trial
from dyno.worker.video.options import VideoOptions

STDIN = "-"
# OpenMP's threads spin while they wait for each other, and here would take the processors from the other stages: with
# one more busy thread than processors PyTorch takes seven times as long.
SHARED_PROCESSORS = {"OMP_WAIT_POLICY": "passive"}
PATIENCE_S = 20.0  # that an interrupted job has to close its video


@dataclass(frozen=True)
class VideoJobSpec:
    """What the jobs of a video have in common: the source, what is written ("" for nothing), the settings.

    With `several` trials each writes to a different name; rounds after the first keep nothing.
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

    def unwritten(self) -> tuple[str, ...]:
        """Return the requested files that don't exist."""
        wanted = [Path(path) for path in (self.output, self.boxes) if path]
        kept = [p for p in wanted if not p.exists() and not (self.several and [*p.parent.glob(self._make_pattern(p))])]
        return tuple(map(str, kept))

    def _make_pattern(self, path: Path) -> str:
        """Return a glob pattern of the file names that the trials write to."""
        return f"{glob.escape(path.stem)}-*{glob.escape(path.suffix)}"

    def named(self, path: str, trial: Trial) -> str:
        """Return the output path of this trial."""
        if not path or not self.several:
            return path
        whole = Path(path)
        return str(whole.with_name(f"{whole.stem}-{trial.variant}-{trial.precision}{whole.suffix}"))

    def job(self, job: Job, folder: Path) -> Job:
        """Return a round's job with the video in place of the usual measurement."""
        assert job.trial is not None
        outputs = [self.named(path, job.trial) for path in (self.output, self.boxes)]
        if scratch := job.round > 0:
            outputs = [str(folder.resolve() / f"scratch{Path(path).suffix}") if path else "" for path in outputs]
        output, boxes = (str(Path(path).resolve()) if path else "" for path in outputs)
        source = f"pipe:{os.dup(0)}" if self.source == STDIN else self.source
        video: Mapping[str, Any] = {"source": source, "output": output, "boxes": boxes, "scratch": scratch,
                                    "settings": dataclasses.asdict(self.options)}  # fmt: skip
        return dataclasses.replace(job, kind="video", options={**job.options, **video})

    def launch(self, job: Job, folder: Path, timeout_s: float, progress: Progress) -> Record:
        """Run the job and return its record; it has no timeout, however long the video is.

        If it is interrupted, it closes its file, and its record is stored before the interrupt goes on.
        """
        own = self.job(job, folder)
        pipe = own.options["source"]
        inherited = [int(pipe.removeprefix("pipe:"))] if pipe.startswith("pipe:") else []
        try:
            with held(own.runtime, progress.waiting):
                return launch(own, folder, math.inf, progress.tick, _make_environment(own), inherited=inherited,
                              patience_s=PATIENCE_S)  # fmt: skip
        except Interrupted as e:
            progress.done(job.trial, e.record) if job.trial else None
            raise
        finally:
            for descriptor in inherited:
                os.close(descriptor)


def _make_environment(job: Job) -> dict[str, str]:
    """Return the extra environment variables of a pipeline's job, except those that the user has set."""
    said = {**os.environ, **dict(job.runtime.env)}
    return {name: value for name, value in SHARED_PROCESSORS.items() if name not in said}
