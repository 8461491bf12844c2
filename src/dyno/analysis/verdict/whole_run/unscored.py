"""Labelled images on which no accuracy was measured, since the network's first output isn't a classifier's."""

from __future__ import annotations

from collections.abc import Iterator

from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.verdict.findings import WARNING, Finding
from dyno.worker.tasks.classify import UNSCORED


def findings(run: RunData) -> Iterator[Finding]:
    """A warning for each model without class scores, and that a budget wasn't checked: none of its trials has lost."""
    budget = "; the budget was not checked" if run.budgets else ""
    for model in dict.fromkeys(t.given for t in run.records if t.good and _unscored(t)):
        yield Finding(WARNING, f"{model}: {UNSCORED}{budget}.")


def _unscored(t: TrialResult) -> bool:
    return any(warning.endswith(UNSCORED) for warning in t.warnings())  # behind the stage that it is of
