"""The head of a run's tables in JSON: run, date, machine, study and verdict."""

from __future__ import annotations

from typing import Any

from dyno.analysis.records.results import Results
from dyno.analysis.records.run_data import RunData
from dyno.analysis.self_test import words
from dyno.analysis.verdict import verdict


def about(run: RunData) -> dict[str, Any]:
    """Return the run's name, date, machine, study, visible differences and verdict.

    `date` is the start of its first job (ISO 8601), `visible` the differences it can see, None where that isn't known.
    """
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
    """Return the start of a run's first job (ISO 8601 with its offset); "" where no record has it."""
    return min((r.record.started for t in results for r in t.rounds if r.record.started), default="")
