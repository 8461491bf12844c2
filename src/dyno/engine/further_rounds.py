"""Extra rounds for undecided pairs, until they are decided or the time is up; the finalists are measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dyno.engine.ensemble import model_key
from dyno.jobs.progress import Progress
from dyno.store import COMPANION, ROUND, Run
from dyno.study import Study
from dyno.worker.record import read_record
from dyno.worker.spec import Trial

if TYPE_CHECKING:
    from dyno.analysis.ranking.pending import UndecidedPair

# One round of these trials, of that number, in which these boundaries are timed.
Measure = Callable[[list[Trial], int, tuple[str, ...]], None]


def go_on(study: Study, run: Run, trials: Sequence[Trial], measure: Measure, progress: Progress) -> None:
    """Measure further rounds of the undecided pairs, one model after the other, within `study.minutes` in all.

    Only the boundary that a pair is compared at is measured. Earlier measurements count, so the same command again
    changes nothing, and one with more minutes goes on. A backend with its own number of rounds keeps to it.
    """
    trials = [trial for trial in trials if trial.plan.rounds == study.rounds]
    models = list(dict.fromkeys(model_key(trial) for trial in trials))
    for place, name in enumerate(models):
        own = [trial for trial in trials if model_key(trial) == name]
        allowed = _sum_seconds(run, own) + (60 * study.minutes - _sum_seconds(run, trials)) / (len(models) - place)
        while pairs := _find_pending(run.folder, own):
            ids = frozenset().union(*(pair.trials for pair in pairs))
            todo = [trial for trial in own if trial.id in ids]
            if _sum_seconds(run, own) + sum(_last_seconds(run, trial) for trial in todo) > allowed:
                minutes = f"{study.minutes:g} minute{'s' * (study.minutes != 1)}"
                progress.note(
                    f"{name or 'the comparison'}: {len(todo)} trials are left in pairs that {minutes} could not decide"
                )
                break
            last = max(_find_last_round(run, trial) for trial in todo)
            whole = all(_find_last_round(run, trial) == last for trial in todo)
            boundaries = tuple(name for name in study.boundaries if any(pair.boundary == name for pair in pairs))
            measure(todo, last + 1 if whole else last, boundaries)  # of one that was cut short, those that lack it


def finalists(folder: Path, trials: list[Trial]) -> list[Trial]:
    """Return the winners of a run, their runners-up and references, by the rounds of the selection alone.

    Because confirmations never enter the selection, an interrupted study finds the same ones when it is run again.
    """
    from dyno.analysis.ranking import rankings
    from dyno.analysis.tables import trial_table

    chosen = rankings.finalists(trial_table.read(folder))
    by_id = {trial.id: trial for trial in trials}
    return [by_id[id] for id in chosen if id in by_id]


def _find_pending(folder: Path, trials: Sequence[Trial]) -> list[UndecidedPair]:
    """Return the pairs of these trials that need another round.

    They are read from the folder, so a study that is killed loses nothing.
    """
    from dyno.analysis.ranking.pending import pending
    from dyno.analysis.tables import trial_table

    ids = {trial.id for trial in trials}
    return [pair for pair in pending(trial_table.read(folder)) if pair.trials <= ids]


def _list_folders(run: Run, trial: Trial, kind: str) -> list[Path]:
    return list(run.round_folder(trial, 0).parent.glob(f"{kind}[0-9]*"))


def _find_last_round(run: Run, trial: Trial) -> int:
    """Return the number of the last round that the trial has finished."""
    folders = _list_folders(run, trial, ROUND)
    return max(int(folder.name.removeprefix(ROUND)) for folder in folders if read_record(folder))


def _sum_seconds(run: Run, trials: Sequence[Trial]) -> float:
    """Return the seconds that the trials' processes have measured, one at a time."""
    folders = [folder for trial in trials for kind in (ROUND, COMPANION) for folder in _list_folders(run, trial, kind)]
    return sum(record.seconds for folder in folders if (record := read_record(folder)))


def _last_seconds(run: Run, trial: Trial) -> float:
    record = run.record(trial, _find_last_round(run, trial))
    return record.seconds if record else 0.0
