"""What a trial's records say beside its numbers: warnings, and reasons for its speed."""

from __future__ import annotations

from dyno.analysis.records import gpu_remarks
from dyno.analysis.records.results import TrialResult


def list_warnings(t: TrialResult) -> list[str]:
    """Return the warnings of all rounds and of the file's makers, each once, in order."""
    stored = [w for r in t.rounds for w in r.warnings] + [*t.made_by.warnings]
    moved = t.placement.warnings if t.placement else []
    return list(dict.fromkeys([*stored, *moved, *gpu_remarks.warnings(t)]))


def list_notes(t: TrialResult) -> list[str]:
    """Return explanations of the numbers: the reasons, and INT8's calibration data where it isn't real images."""
    calibration = t.facts.calibration
    return [*([calibration.note] if calibration and calibration.note else []), *list_reasons(t)]


def list_reasons(t: TrialResult) -> list[str]:
    """Return explanations of the speed: the engine's own notes, and remarks from the GPU's clock and telemetry."""
    return [*t.facts.notes, *gpu_remarks.notes(t)]
