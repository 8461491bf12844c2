"""`dyno eval`: each model over labelled images, and its printed summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.api.runnable import run
from dyno.planning.defaults import EVALUATION, folder_for, study_of
from dyno.study import Study
from dyno.worker.spec import UserError
from dyno.worker.tasks.layouts import UNREAD

if TYPE_CHECKING:
    from dyno.api.result import Result


def evaluate(
    model: Any, data: str | Path, out: str | Path | None = None, *, quiet: bool = True, **settings: Any
) -> Result:
    """Measure the accuracy and speed of one model on the images of a data set; return the stored result.

    `settings` are fields of `Study`; by default the model runs in the default backend of its file format, in one round
    of batches of 8. The run folder is `out`, or a new one below runs/eval. `Result.confusion` and `Result.per_class`
    describe single classes. Raises `UserError`, one line.
    """
    source_settings = {name: settings[name] for name in ("shapes", "inputs", "sizes", "channels") if name in settings}
    (source,) = Study(models=(model,), **source_settings).models
    folder = folder_for(out, "eval", [source])
    return run(study_of(source, EVALUATION, {"data": data, **settings}), folder, quiet=quiet)


def show(folders: Sequence[Path], format: str, per_class: bool) -> int:
    """Print the tables of evaluated runs and a section for each trial, write their classes; return the exit code.

    Raises `UserError` for a model whose boxes no trial could read: what it is asked for is missing.
    """
    from dyno.analysis.metrics import confusion
    from dyno.analysis.presentation.export import export
    from dyno.analysis.presentation.table import joined
    from dyno.analysis.tables import trial_table
    from dyno.analysis.tables.trial_table import TRIALS
    from dyno.analysis.verdict import evaluation_summary
    from dyno.analysis.verdict.about import about
    from dyno.analysis.verdict.whole_run import pixels, unscored

    runs = [trial_table.read(folder) for folder in folders]
    table = joined([TRIALS.table(data) for data in runs])
    print(export([table], format, about=about(runs[0]) if len(runs) == 1 else {}), end="")
    for data in runs:
        if format in ("text", "markdown"):
            for t in (t for t in data.records if t.good):
                of_run = [text] if (text := pixels.guessed(t, data.records)) else []
                print("\n" + evaluation_summary.describe(t, format, per_class, of_run).rstrip("\n"))
        confusion.write(data.records, data.records.folder)
    for data in runs:
        reasons = [unscored.unscored(t) for t in data.records if t.good]
        if reasons and all(UNREAD in reason for reason in reasons):
            raise UserError(reasons[0])
    return trial_table.exit_code(table.to_pandas())
