"""What a study measures again once it has chosen, so that luck is not crowned."""

from __future__ import annotations

from pathlib import Path

from dyno.worker.spec import Trial


def finalists(folder: Path, trials: list[Trial]) -> list[Trial]:
    """The winners of a run, their runners-up and references, by the selection's rounds alone.

    Because confirmations never enter the selection, an interrupted study finds the same ones when it is run again.
    """
    from dyno.analysis.ranking import rankings
    from dyno.analysis.tables import trial_table

    chosen = rankings.finalists(trial_table.read(folder))
    known = {trial.id: trial for trial in trials}
    return [known[id] for id in chosen if id in known]
