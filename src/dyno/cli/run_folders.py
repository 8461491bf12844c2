"""`dyno runs`: run folders as they lie on disk."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dyno.cli import options
from dyno.worker.record import one_line
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    from dyno.results.run_data import RunData

Trials = Annotated[
    list[str], typer.Argument(help="Only these trials: ids or their beginnings, or BACKEND/PRECISION.", metavar="TRIAL")
]
LISTED_STATUSES = ("ok", "failed", "skipped", "unfinished")  # any other is a failure


def list_runs(
    folder: Annotated[Path, typer.Argument(help="Folder to search.", metavar="FOLDER")] = Path("runs"),
    format: options.Format = "text",
) -> None:
    """List run folders: models, trials, when, and what was fastest."""
    from dyno.report import tables
    from dyno.report.export import export

    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}; `dyno run` creates runs/; to look elsewhere: `dyno runs list FOLDER`"
        )
    folders = list(runs_below(folder))
    if not folders and format == "text":
        print(f"no run folder below {folder}")
        return
    print(export([tables.list_runs(str(folder), [(str(run), *_make_row(run)) for run in folders])], format), end="")


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield every run folder below `folder`, in alphabetical order; symbolic links are not followed."""
    from dyno.store import RUN_FOLDERS

    for path, subfolders, _ in os.walk(folder):
        is_run = why_no_run(Path(path)) == ""
        subfolders[:] = [name for name in sorted(subfolders) if not (is_run and name in RUN_FOLDERS)]
        if is_run:
            yield Path(path)


def why_no_run(folder: Path) -> str:
    """Return why the folder is not a run folder; "" if it is one."""
    from dyno.store import is_run

    if folder.is_symlink():
        return "is a symbolic link, which is not followed; give the folder itself"
    if not folder.is_dir():
        return "is not a folder" if folder.exists() else "does not exist"
    if not is_run(folder):
        return "is not a run folder: study.toml or trials/ is missing"
    return "has symbolic links where trials/ should be" if (folder / "trials").is_symlink() else ""


def find_latest() -> Path:
    """Return the run below runs/ that measured last, and print its name on standard error."""
    from dyno.runner.run_folder import RUNS_DIR

    folders = list(runs_below(RUNS_DIR))
    if not folders:
        raise UserError("there is no run below runs/; give a run folder, or measure one: dyno run MODEL")
    latest = max(
        folders, key=lambda run: max(path.stat().st_mtime for path in (run / "study.toml", *run.glob("trials/*")))
    )
    print(f"dyno: {latest}, the latest run", file=sys.stderr)
    return latest


def _make_row(run: Path) -> tuple[str, str, str, str]:
    from dyno.formatting import format_moment
    from dyno.report.tables import trial_table
    from dyno.report.verdict.verdict import read_start

    try:
        data = trial_table.read_trials(run)
    except UserError as e:
        _, colon, reason = str(e).partition(":")
        return "", "unreadable" if colon else "none yet", "", reason.strip()
    except Exception as e:  # one bad folder must not hide the others
        return "", "unreadable", "", f"{type(e).__name__}: {one_line(e)}"
    records = data.records
    models = dict.fromkeys(t.model for t in records)
    counts = Counter(t.status if t.status in LISTED_STATUSES else "failed" for t in records)
    trials = ", ".join(f"{counts[status]} {status}" for status in LISTED_STATUSES if counts[status])
    return ", ".join(models), trials, format_moment(read_start(records)), _find_fastest(data)


def _find_fastest(data: RunData) -> str:
    """Return the winner of the first ranking with a good trial, and its number of rivals; "" without one."""
    from dyno.formatting import format_number
    from dyno.results import ranking as results_ranking
    from dyno.results.ranking import LATENCY

    for ranking in results_ranking.rank_goals(data):
        ranked = ranking.fastest
        if len(ranked):
            best, rivals = ranked.iloc[0], results_ranking.compare_first(ranked, LATENCY, data).rivals
            rest = f" or {len(rivals)} more" if rivals else ""
            return f"{ranking.name_row(best)}{rest}, {format_number(best[LATENCY])} ms at batch {best['batch']}"
    return ""


def remove(
    run: options.RunFolder,
    trials: Trials = [],  # noqa: B006  (typer copies it)
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Don't ask for confirmation; without a terminal Dyno never asks.")
    ] = False,
) -> None:
    """Remove a run folder, or trials inside. What Dyno did not write stays."""
    from dyno.store import Run

    if reason := why_no_run(run):
        runs = [str(path) for path in runs_below(run)] if run.is_dir() and not run.is_symlink() else []
        hint = f"; the run folders in it: {', '.join(runs)}" if runs else ""
        raise UserError(f"{run} {reason}{hint}")
    target = f"{', '.join(trials)} of {run}" if trials else str(run)
    if sys.stdin.isatty() and not yes and not typer.confirm(f"Remove {target}?"):
        return
    with Run(run).hold_lock(is_removal=True):
        if trials:
            _remove_trials(run, trials)
        else:
            _remove_run(run)


def _remove_trials(run: Path, requested: list[str]) -> None:
    folders = [path for path in sorted((run / "trials").iterdir()) if path.is_dir() and not path.is_symlink()]
    targets = []
    for id in requested:
        matches = [path for path in folders if path.name.startswith(id)] if id else []
        matches = matches or _of_form(run, folders, id)
        if len(matches) != 1:
            ids = ", ".join(path.name for path in (matches or folders)[:5]) + (
                ", …" if len(matches or folders) > 5 else ""
            )
            raise UserError(
                f"{len(matches) or 'no'} trials of {run} have an id that begins with {id!r}; its ids are {ids}"
            )
        targets.append(matches[0])
    for path in dict.fromkeys(targets):
        shutil.rmtree(path)
        print(f"removed {path}")
    print(f"the report still shows them; `dyno report {shlex.quote(str(run))}` updates it")


def _of_form(run: Path, places: list[Path], text: str) -> list[Path]:
    """Return the folder of the trial of this backend and precision; raise `UserError` if several match."""
    from dyno.results.trial_result import load_run, match_form

    if not text or not places:
        return []
    _, matches = match_form(load_run(run), text)
    if len(matches) > 1:
        labels = ", ".join(f"{t.id} ({t.label})" for t in matches)
        raise UserError(f"{text!r} fits several trials of {run}; choose them by their ids: {labels}")
    return [path for path in places for t in matches if path.name == t.id]


def _remove_run(run: Path) -> None:
    from dyno.store import RUN_FILES, RUN_FOLDERS

    for name in RUN_FOLDERS:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    for name in RUN_FILES:
        path = run / name
        if path.is_file() or path.is_symlink():
            path.unlink()
    leftovers = sorted(path.name for path in run.iterdir())
    if leftovers:
        print(f"removed what Dyno wrote into {run}; kept files that Dyno did not write: {', '.join(leftovers)}")
        return
    run.rmdir()
    print(f"removed {run}")
