"""Whether the answers to requests are right, as a run's table of trials has it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dyno.analysis.ranking.correctness import WRONG
from dyno.analysis.ranking.references import beside, incomparable
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.worker.spec import ENDPOINT


@dataclass(frozen=True)
class Outputs:
    """A trial's outputs against those of the trial called `against`: `word` is the table's ("" where they weren't
    compared), `error` the relative error, `labels_changed` the percent of labels that differ, `wrong` what is wrong
    with them, and `missing` why they weren't compared."""

    word: str = ""
    error: float = math.nan
    labels_changed: float = math.nan
    wrong: str = ""
    against: str = ""
    missing: str = ""


def of_run(run: RunData) -> dict[str, Outputs]:
    """Return the outputs' check of each trial of the run, by its id."""
    found = {}
    columns = [run.frame[name] for name in ("trial", "outputs", "output_error", "labels_changed", "verdict")]
    for id, word, error, labels, verdict in zip(*columns, strict=True):
        trial, other = run.trials[id], run.compared.get(id)
        if word and other:
            wrong = word == WRONG
            found[id] = Outputs(word, float(error), float(labels), verdict if wrong else "", other.configuration)
        else:
            found[id] = Outputs(missing=_explain_missing(trial, other, run))
    return found


def _explain_missing(trial: TrialResult, other: TrialResult | None, run: RunData) -> str:
    """Return the reason why the outputs were not compared; "" for the reference itself."""
    if str(trial.spec["model"]["source"]).startswith(ENDPOINT):
        return "what the server's model should answer isn't known here; give its file as MODEL"
    if other is None or other is trial:
        failed = (t for t in beside(run.records) if t.group == trial.group and not t.good)
        return next((f"{t.configuration} gave none ({t.status}: {t.reason})" for t in failed), "")
    return incomparable(trial, other) or "one of both left none"
