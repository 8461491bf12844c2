"""The head of a run's tables in JSON: run, date, machine, study and verdict."""

from __future__ import annotations

from typing import Any

from dyno.analysis.records.results import Results
from dyno.analysis.records.run_data import RunData
from dyno.analysis.self_test import words
from dyno.analysis.verdict import verdict


def about(run: RunData) -> dict[str, Any]:
    """The run's name, when its first job began (ISO 8601), machine, study, which differences it can see
    (`visible`, None where that isn't known), and verdict."""
    records = run.records
    return {
        "run": records.name,
        "date": began(records) or None,
        "machine": records.environment,
        "study": records.settings,
        "visible": words.of_run(records) or None,
        "verdict": verdict.sentences(run),
    }


def began(results: Results) -> str:
    """When the first job of a run began (ISO 8601 with its offset); "" where no record says so."""
    return min((r.record.started for t in results for r in t.rounds if r.record.started), default="")
