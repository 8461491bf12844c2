"""Which failures are worth another try: those whose reason may be gone."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from dyno.analysis.records.arrays import damage
from dyno.store import ROUND, Run, outside, versions, worker_code_sha256
from dyno.worker import registry
from dyno.worker.backend import Backend, Maker
from dyno.worker.record import Record, read_json, read_record, write_json
from dyno.worker.spec import Recipe, Runtime, Trial, UserError

MADE_WITH = "made-with.json"


def note(folder: Path, trial: Trial) -> None:
    """Keep beside a failed round what it failed with: Dyno's code and the libraries that the trial goes by."""
    write_json(folder / MADE_WITH, _with(trial))


def _with(trial: Trial) -> dict[str, Any]:
    used: list[tuple[Backend | Maker, Runtime]] = [(registry.find(trial.backend), trial.runtime)]
    recipe = trial.recipe
    while isinstance(recipe, Recipe):
        used.append((registry.maker(recipe.maker), recipe.runtime))
        recipe = recipe.parent
    found: dict[str, Any] = {"code": worker_code_sha256(*outside(*(each for each, _ in used)))}
    for each, runtime in used:
        found.setdefault(each.name, {}).update(versions(runtime, ("numpy", *each.requires)))
    return found


def clear(run: Run, trials: list[Trial], every: bool) -> list[str]:
    """Remove failed rounds whose reason may be gone, or `every` failed one, so that they are measured anew.

    Returns what was done, in sentences. Rounds that ended well stay, and so do rows that were refused.
    """
    why: Counter[str] = Counter()
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob(f"{ROUND}[0-9]*")):
            try:
                record = read_record(folder)
            except UserError:  # damaged, which is told where it is needed
                continue
            if record is None or record.status == "ok" or record.stage == "plan":
                continue
            if reason := "as you ask" if every else _gone(folder, record, trial):
                shutil.rmtree(folder)
                why[reason] += 1
    return [f"{n} failed job{'s' * (n != 1)} tried again: {reason}" for reason, n in why.items()]


def clear_damaged(run: Run, trials: list[Trial]) -> list[str]:
    """Remove rounds that ended well and whose samples or outputs can't be read any more, so that they are measured
    anew. Returns what was done, in sentences."""
    gone = []
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob("[rc][0-9]*")):
            with suppress(OSError, ValueError):
                record = read_json(folder / "record.json")
                if record.get("status") == "ok" and (name := damage(folder)):
                    shutil.rmtree(folder)
                    gone.append(f"{trial.label}: {folder.name}/{name} is damaged, so that round is measured again")
    return gone


def _gone(folder: Path, record: Record, trial: Trial) -> str:
    """Why the failure may not happen again, "" where nothing speaks for that."""
    if record.status == "timeout" and not record.stage.startswith("make"):
        allowed = _json(folder / "job.json").get("trial", {}).get("plan", {}).get("timeout_s", 0.0)
        if trial.plan.timeout_s > allowed:
            return f"{trial.plan.timeout_s:g} s instead of {allowed:g} s"
    before, now = _json(folder / MADE_WITH), _with(trial)
    if not before or before == now:
        return ""
    changed = {
        name: version
        for key, libraries in now.items()
        if isinstance(libraries, dict)
        for name, version in libraries.items()
        if before.get(key, {}).get(name) != version
    }
    return ", ".join(f"{name} is {version} now" for name, version in changed.items()) or "other code since then"


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
