"""What stands in front of a run's tables in JSON: whose numbers they are, from when, and what they say."""

from __future__ import annotations

from typing import Any

from dyno.analysis.records.run_data import RunData
from dyno.analysis.verdict import verdict


def about(run: RunData) -> dict[str, Any]:
    """The run's name, when its first job began (local time, ISO 8601), machine, study and verdict."""
    records = run.records
    started = [str(r.raw["started"]) for t in records for r in t.rounds if r.raw.get("started")]
    return {
        "run": records.name,
        "date": min(started, default=None),
        "machine": records.environment,
        "study": records.settings,
        "verdict": verdict.sentences(run),
    }
