"""Studies and results as Python objects."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dyno.devices import spread
from dyno.jobs.progress import Progress
from dyno.runner.run_folder import choose_folder
from dyno.study.defaults import parse_trackers
from dyno.study.study import Study as StudyData
from dyno.worker.option_values import check_types
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import pandas as pd

    from dyno.results.metrics.accuracy import Confusion
    from dyno.results.run_data import RunData
    from dyno.results.trial_result import Results, TrialResult
    from dyno.table import Table
    from dyno.winner import ExportResult

# A study's stored result, for Python users.

OUT = str | Path | None  # type of where a result is written


class Result:
    """Content of a run folder, read once on first use, without measuring."""

    def __init__(self, folder: str | Path) -> None:
        check_types({"folder": folder}, {"folder": str | Path})
        self.folder = Path(folder)

    @cached_property
    def records(self) -> Results:
        """Trials, rounds, raw samples and outputs."""
        from dyno.results.trial_result import load_run
        from dyno.runner import self_test

        return self_test.attach(load_run(self.folder))

    @cached_property
    def data(self) -> RunData:
        """Records with their table, the source of tables, verdict, charts and report."""
        from dyno.report.tables import trial_table

        return trial_table.read_trials(self.records)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per trial, with the columns of `results.csv`."""
        return self.data.frame.copy()

    def table(self, name: str = "trials") -> Table:
        """Return the table of this name, like `dyno show --table NAME`: its rows, its notes, and `to_pandas()`."""
        from dyno.report import tables

        (table,) = tables.make_tables(self.data, name)
        return table

    def warnings(self, trial: str = "") -> list[str]:
        """Return the distinct warnings of a trial, by its id (default: of all trials)."""
        check_types({"trial": trial}, {"trial": str})
        from dyno.results import remarks

        trials = [self.records.trial(trial)] if trial else self.records.trials
        return list(dict.fromkeys(warning for t in trials for warning in remarks.list_warnings(t)))

    def confusion(self, trial: str = "") -> pd.DataFrame:
        """Return the number of images by label (row) and predicted class (column).

        `trial` is the id of a trial (default: the first).
        """
        return self._find_confusion(trial).to_pandas()

    def per_class(self, trial: str = "") -> pd.DataFrame:
        """Return the accuracy of each class in a trial, the worst first: `Confusion.per_class`."""
        return self._find_confusion(trial).per_class()

    def _find_confusion(self, trial: str) -> Confusion:
        from dyno.results.metrics import accuracy

        check_types({"trial": trial}, {"trial": str | None})
        records = self.records
        matrices = (accuracy.read_confusion(t) for t in ([records.trial(trial)] if trial else records))
        first = next((matrix for matrix in matrices if matrix), None)
        if first is None:
            raise UserError(f"{self.folder} has no classifier's answers to labelled images")
        return first

    def export(self, trial: str = "", out: str | Path | None = None) -> ExportResult:
        """Write the winner's file, or a trial's (by id or BACKEND/PRECISION), with a script; return both paths.

        As in `dyno export`: `out` is the file (default: MODEL-BACKEND-PRECISION here).
        """
        from dyno import winner

        check_types({"trial": trial, "out": out}, {"trial": str | None, "out": OUT})
        return winner.export_winner(self.data, trial, Path(out) if out else None)

    def report(self, out: str | Path | None = None) -> Path:
        """Write report.html, charts and results.csv into the folder (default: the run's own); return the page."""
        from dyno.report.report import write_report
        from dyno.store import check_own

        check_types({"out": out}, {"out": OUT})
        folder = Path(out) if out else self.folder
        if folder.resolve() != self.folder.resolve():
            check_own(folder)
        return write_report([self.data], folder)

    def log_to(self, trackers: str) -> list[str]:
        """Log the trials to mlflow, wandb or tensorboard (with commas), like `dyno show --log`; return their places."""
        from dyno.report import tracking

        check_types({"trackers": trackers}, {"trackers": str})
        return [*tracking.log_run(self.data, parse_trackers(trackers))]

    @property
    def verdict(self) -> str:
        """Decision in sentences: the fastest trial, its certainty, its correctness, and the next step."""
        from dyno.report.verdict import verdict

        return "\n".join(verdict.read_verdict(self.data).lines)

    @property
    def winner(self) -> TrialResult | None:
        """Fastest trial, or the first candidate for it; None without one, or with several models."""
        from dyno.results.ranking import list_winners

        ids = [id for _, id in list_winners(self.data)]
        return self.records.trial(ids[0]) if len(ids) == 1 else None

    def __str__(self) -> str:
        from dyno.report.export import export
        from dyno.report.tables.trial_table import TRIALS

        return f"{export([TRIALS.table(self.data)])}\n{self.verdict}"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the decisions, the trials and one chart."""
        from dyno.report.report import make_cell

        return make_cell(self.data)

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r})"


def load(folder: str | Path) -> Result:
    """Read the result of an earlier study; raise `UserError` if the folder isn't a run folder."""
    result = Result(folder)
    _ = result.records
    return result


# `dyno.run`, and `dyno.Study` with its method `run`.


def run(study: StudyData, out: str | Path | None = None, *, quiet: bool = False, retry_failed: bool = False) -> Result:
    """Measure every trial that the folder `out` (default `runs/NAME`) lacks, and return the result.

    `retry_failed` measures all failed trials again; without it, only those whose failure may be temporary.
    """
    arguments = {"study": study, "out": out, "retry_failed": retry_failed}
    check_types(arguments, {"study": StudyData, "out": OUT, "retry_failed": bool})
    progress = Progress(quiet=quiet)
    folder, note = (Path(out), "") if out else choose_folder(study)
    if note:
        progress.note(note)
    try:
        spread.run(study, folder, progress, retry_failed=retry_failed)
    except (FileExistsError, NotADirectoryError) as e:
        if folder.is_dir():
            raise
        raise UserError(
            f"{e.filename} is a file, or a link to nothing, where a folder is needed; give another path"
        ) from e
    return Result(folder)


class Study(StudyData):
    __doc__ = StudyData.__doc__

    def run(self, out: str | Path | None = None, *, quiet: bool = False, retry_failed: bool = False) -> Result:
        """Measure every trial that the folder `out` (default `runs/NAME`) lacks, and return the result: `dyno.run`."""
        return run(self, out, quiet=quiet, retry_failed=retry_failed)
