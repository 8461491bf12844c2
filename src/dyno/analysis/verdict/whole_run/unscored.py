"""Outputs from which no accuracy was measured: no class scores for labelled images, or no boxes in a known layout."""

from __future__ import annotations

from collections.abc import Iterator

from dyno.analysis.records import remarks
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.verdict.findings import WARNING, Finding
from dyno.worker.tasks.classify import UNSCORED
from dyno.worker.tasks.layouts import UNREAD


def findings(run: RunData) -> Iterator[Finding]:
    """Yield a warning for each model without class scores or boxes.

    With a budget it adds that this was not checked: no trial of the model has failed it.
    """
    budget = "; the budget was not checked" if run.budgets else ""
    sentences = ((t.given, sentence) for t in run.records if t.good and (sentence := unscored(t)))
    for model, sentence in dict.fromkeys(sentences):
        yield Finding(WARNING, f"{model}: {sentence}{budget}.")


def unscored(t: TrialResult) -> str:
    """Return the trial's warning on outputs that can't be scored, "" without one."""
    marked = ((warning, warning.find(mark)) for warning in remarks.list_warnings(t) for mark in (UNSCORED, UNREAD))
    return next((warning[place:] for warning, place in marked if place >= 0), "")  # behind the stage that it is of
