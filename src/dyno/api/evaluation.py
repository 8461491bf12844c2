"""`dyno eval`: each model over labelled images, and what is printed of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.api.runnable import run
from dyno.planning.defaults import EVALUATION, new_folder, study_of
from dyno.study import Study
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    from dyno.api.result import Result


def evaluate(
    model: Any, data: str | Path, out: str | Path | None = None, *, quiet: bool = True, **settings: Any
) -> Result:
    """Accuracy and speed of one model on the images of a data set; returns what was stored.

    `settings` are fields of `Study`; without them the model runs under the backend its kind of file is for, in one
    round of batches of 8. The run folder is `out`, or a new one below runs/eval. `Result.confusion` and
    `Result.per_class` tell the classes apart. Raises `UserError`, one line.
    """
    said = {name: settings[name] for name in ("shapes", "inputs", "sizes", "channels") if name in settings}
    (source,) = Study(models=(model,), **said).models
    folder = Path(out) if out else new_folder("eval", [source])
    return run(study_of(source, EVALUATION, {"data": data, **settings}), folder, quiet=quiet)


def show(folders: Sequence[Path], format: str, per_class: bool) -> int:
    """Print the tables of evaluated runs and a section for each trial, write their classes; returns the exit code."""
    import pandas as pd

    from dyno.analysis.metrics import confusion
    from dyno.analysis.records import results
    from dyno.analysis.tables import trial_table
    from dyno.analysis.tables.render import FORMATS, render
    from dyno.analysis.verdict import evaluation_summary

    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    runs = [results.load(folder) for folder in folders]
    frame = pd.concat([trial_table.frame(run) for run in runs], ignore_index=True)
    print(render(frame, format), end="")
    if format in ("text", "markdown"):
        for t in (t for each in runs for t in each if t.good):
            print("\n" + evaluation_summary.told(t, format, per_class).rstrip("\n"))
    for each in runs:
        confusion.write(each, each.folder)
    return trial_table.exit_code(frame)
