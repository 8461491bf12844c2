"""Which failed rounds are measured again: those whose cause may be gone."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from dyno.analysis.records.arrays import read_samples
from dyno.engine.run_folder import archive_round
from dyno.store import ROUND, Run, outside, versions, worker_code_sha256
from dyno.worker import registry
from dyno.worker.backend import Backend, Maker
from dyno.worker.record import OUT_OF_MEMORY, DamagedRecord, Record, read_json, read_record, write_json
from dyno.worker.spec import Recipe, Runtime, Trial, UserError

MADE_WITH = "made-with.json"
LIMIT = "build_timeout_s"


def note(folder: Path, trial: Trial, *, unmade: bool = False) -> None:
    """Store the circumstances of a failure beside the failed round.

    They are the versions of Dyno's code and the trial's libraries, and the timeout in seconds of its file if that was
    not made.
    """
    write_json(folder / MADE_WITH, _made_with(trial) | ({LIMIT: trial.plan.build_timeout_s} if unmade else {}))


def _made_with(trial: Trial) -> dict[str, Any]:
    used: list[tuple[Backend | Maker, Runtime]] = [(registry.find(trial.backend), trial.runtime)]
    recipe = trial.recipe
    while isinstance(recipe, Recipe):
        used.append((registry.maker(recipe.maker), recipe.runtime))
        recipe = recipe.parent
    versions_: dict[str, Any] = {"code": worker_code_sha256(*outside(*(user for user, _ in used)))}
    for user, runtime in used:
        versions_.setdefault(user.name, {}).update(versions(runtime, ("numpy", *user.requires)))
    return versions_


def clear(run: Run, trials: list[Trial], all_failed: bool) -> list[str]:
    """Remove failed rounds whose cause may be gone, or with `all_failed` every one, so that they are measured again.

    Returns what was done, in sentences. Successful rounds stay, and so do refused rows.
    """
    reasons: Counter[str] = Counter()
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob(f"{ROUND}[0-9]*")):
            try:
                record = read_record(folder)
            except UserError:  # damaged (see `clear_damaged`), or another Dyno's, which is said where it is needed
                continue
            if record is None or record.status == "ok" or record.stage == "plan":
                continue
            if reason := "as requested" if all_failed else _reason_to_retry(folder, record, trial):
                shutil.rmtree(folder)
                reasons[reason] += 1
    return [f"{n} failed job{'s' * (n != 1)} tried again: {reason}" for reason, n in reasons.items()]


def clear_damaged(run: Run, trials: list[Trial]) -> list[str]:
    """Archive rounds whose record, samples or outputs can't be read any more, so that they are measured again.

    Returns a sentence for each.
    """
    notes = []
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob("[rct][0-9]*")):
            if name := _find_damaged(folder):
                said = f"{trial.label}: {folder.name}/{name} is damaged, so that round is measured again"
                notes.append(f"{said}; what is left of it lies in {archive_round(run, folder)}")
    return notes


def _find_damaged(folder: Path) -> str:
    """Return the name of the round's unreadable file, or ""."""
    try:
        record = read_record(folder)
    except DamagedRecord:
        return "record.json"
    except UserError:
        return ""
    return read_samples(folder)[1] if record is not None and record.status == "ok" else ""


def clear_stopped(run: Run, trials: list[Trial]) -> list[str]:
    """Remove rounds of a video that the user stopped before its end, so that they are measured again.

    The rate of its first frames is not that of the whole. A live source has no end, so its rounds stay. Returns a
    sentence for each.
    """
    notes = []
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob(f"{ROUND}[0-9]*")):
            video = _load_json(folder / "record.json").get("facts", {}).get("video") or {}
            if video.get("stopped") and not video.get("live"):
                shutil.rmtree(folder)
                notes.append(f"{trial.label}: {folder.name} was stopped before the video's end and is measured again")
    return notes


def _reason_to_retry(folder: Path, record: Record, trial: Trial) -> str:
    """Return why the failure may not happen again, or "" if there is no reason."""
    if record.was_killed or record.reason == OUT_OF_MEMORY:
        return record.reason
    before, now = _load_json(folder / MADE_WITH), _made_with(trial)
    earlier, limit = before.pop(LIMIT, None), trial.plan.build_timeout_s
    if record.status == "timeout":
        if earlier is None:  # its file was there
            plan = _load_json(folder / "job.json").get("trial", {}).get("plan", {})
            earlier, limit = plan.get("timeout_s", 0.0), trial.plan.timeout_s
        if limit > earlier:
            return f"{limit:g} s instead of {earlier:g} s"
    if not before or before == now:
        return ""
    changed = {
        name: version
        for key, libraries in now.items()
        if isinstance(libraries, dict)
        for name, version in libraries.items()
        if before.get(key, {}).get(name) != version
    }
    return ", ".join(f"{name} is {version} now" for name, version in changed.items()) or "Dyno's code has changed"


def _load_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
