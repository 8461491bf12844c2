"""`dyno.Study`, which has a method `run`, and `dyno.run`."""

from __future__ import annotations

from pathlib import Path

from dyno.api.result import Result
from dyno.engine.run_names import choose_folder
from dyno.jobs.progress import Progress
from dyno.placement import spread
from dyno.study import Study as StudyData
from dyno.worker.option_values import check_types


def run(study: StudyData, out: str | Path | None = None, *, quiet: bool = False, retry_failed: bool = False) -> Result:
    """Measure every trial that the folder `out` (default `runs/NAME`) lacks, and return the result.

    `retry_failed` measures all failed trials again; without it, only those whose failure may be temporary.
    """
    check_types({"study": study, "out": out}, {"study": StudyData, "out": str | Path | None})
    progress = Progress(quiet=quiet)
    folder, note = (Path(out), "") if out else choose_folder(study)
    if note:
        progress.note(note)
    spread.run(study, folder, progress, retry_failed=retry_failed)
    return Result(folder)


class Study(StudyData):
    __doc__ = StudyData.__doc__

    def run(self, out: str | Path | None = None, *, quiet: bool = False, retry_failed: bool = False) -> Result:
        """Measure every trial that the folder `out` (default `runs/NAME`) lacks, and return the result: `dyno.run`."""
        return run(self, out, quiet=quiet, retry_failed=retry_failed)
