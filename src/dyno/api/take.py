"""`dyno take`: the file that won, and beside it a script that runs it in its own library as it was measured."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dyno.analysis.formatting import show
from dyno.analysis.ranking import contests
from dyno.analysis.ranking.contention import crowding
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.engine.execute import Files
from dyno.jobs.launcher import launch
from dyno.jobs.progress import Progress
from dyno.store import copy, sha256_of
from dyno.worker import registry
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Trial, UserError, from_json

STATE = ".pt"
MARK = "Written by `dyno take`"
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Taken:
    """What was taken: the trial's id and label, its file (for a module its weights), the script, and what to know.

    `bytes` is of the file with what belongs to it, such as an IR's .bin.
    """

    trial: str
    label: str
    file: Path
    script: Path
    bytes: int
    notes: tuple[str, ...] = ()


def take(run: RunData, which: str = "", out: Path | None = None) -> Taken:
    """Write a trial's file to `out` and a script that runs it beside that, with the same name and .py.

    `which` is a trial's id or its beginning, or BACKEND/PRECISION; "" is the verdict's winner. `out` is by default
    MODEL-BACKEND-PRECISION in the current folder. A file that is gone from the cache is made again. Raises `UserError`.
    """
    loaded = run.records
    found = _chosen(run, which)
    trial = from_json(Trial, found.job["trial"])
    made, notes = _file(found, trial)
    file = _place(out or Path(_name(found)), Path(made.path).suffix if made else STATE)
    script = file.with_suffix(".py")
    _check_free(file, script, made)
    about = {
        "file": file.name,
        "script": script.name,
        "story": _story(found, loaded),
        "outputs": list(found.outputs()) or [t.name for t in (made.outputs if made else ())],
        "options": found.facts.get("options", {}),
        "weights_sha256": found.facts.get("weights_sha256", ""),
    }
    with tempfile.TemporaryDirectory() as scratch:
        record = launch(Job("take", trial.runtime, trial, artifact=made, options=about), Path(scratch), TIMEOUT_S)
        if record.status != "ok":
            raise UserError(f"{found.label} can't be taken: {record.reason}")
        _put(Path(scratch), record.facts["files"], made, file, script)
    size = made.bytes if made else file.stat().st_size
    return Taken(found.id, found.label, file, script, size, (*notes, *_doubts(loaded, which)))


def _put(written: Path, names: list[str], made: Artifact | None, file: Path, script: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if made is not None:
        copy(Path(made.path), file)
    places = {"script.py": script, "state.pt": file, "model.py": _copied_code(script)}
    for name in names:
        shutil.copyfile(written / name, places[name])


def _copied_code(script: Path) -> Path:
    return script.with_name(f"{script.stem}_model.py")


def winners(run: RunData) -> Iterator[tuple[str, str]]:
    """For each contest that has a winner: where it was held, and the winner's id."""
    for contest in contests.contests(run):
        ranked = contest.fastest
        if len(ranked):
            yield contest.where, str(ranked.iloc[0]["trial"])


def commands(run: RunData) -> list[str]:
    """What to type to take each winner of a run home."""
    every, folder = list(winners(run)), run.records.folder
    if every and (crowd := crowding(run.records)) and crowd.mostly:
        return [f"take one: dyno take {folder} BACKEND/PRECISION"]
    if len(every) == 1:
        return [f"take it: dyno take {folder}"]
    return [f"take it: dyno take {folder} {id}  ({where})" for where, id in every]


def _chosen(run: RunData, which: str) -> TrialResult:
    """The trial that is meant, which must have run."""
    found = _named(run.records, which) if which else _winner(run)
    if not found.good:
        raise UserError(f"{found.label} did not run ({found.status}: {found.reason}), so there is nothing to take")
    return found


def _winner(run: RunData) -> TrialResult:
    every, loaded = list(winners(run)), run.records
    if not every:
        raise UserError(f"the verdict of {loaded.folder} names no winner; say which to take, as BACKEND/PRECISION")
    if len(every) > 1:
        named = ", ".join(f"{id} ({where})" for where, id in every)
        raise UserError(f"{loaded.folder} has several winners; say which to take: {named}")
    return loaded.trial(every[0][1])


def _doubts(loaded: Results, which: str) -> list[str]:
    """What to say where nobody chose and the verdict names no winner."""
    crowd = None if which else crowding(loaded)
    return [f"{crowd.sentence} This was the fastest measured."] if crowd and crowd.mostly else []


def _named(loaded: Results, which: str) -> TrialResult:
    """By its id, or by backend and precision: then the one that ran at the smallest batch."""
    name, _, precision = which.replace("/", ":").rpartition(":") if "/" in which else (which, "", "")
    fitting = [t for t in loaded if name in (t.backend, t.variant) and precision in ("", t.precision)]
    fitting = [t for t in fitting if t.good] or fitting
    ways = [t for t in fitting if t.variant == name] or fitting
    if not ways and re.fullmatch("[0-9a-f]{4,12}", which):
        return loaded.trial(which)
    if not ways:
        there = ", ".join(dict.fromkeys(f"{t.variant}/{t.precision}" for t in loaded))
        raise UserError(f"no trial of {loaded.folder} is {which!r}; there are {there}")
    models = dict.fromkeys((t.model, t.size) for t in ways)
    kinds = dict.fromkeys((t.variant, t.precision) for t in ways)
    if len(models) > 1 or len(kinds) > 1:
        named = ", ".join(f"{t.id} ({t.label})" for t in ways)
        raise UserError(f"{which!r} fits several trials of {loaded.folder}; say which by its id: {named}")
    return min(ways, key=lambda t: (not t.good, t.batch))


def _file(found: TrialResult, trial: Trial) -> tuple[Artifact | None, list[str]]:
    """The very file that was measured; where it is gone or changed, the same made again. None for a module."""
    stored = found.artifact
    if stored and Path(stored["path"]).is_file() and sha256_of(Path(stored["path"])) == stored["sha256"]:
        return from_json(Artifact, stored), []
    if trial.recipe is None:
        if not trial.model.file:
            return None, []
        raise UserError(f"{trial.model.file} is gone or was changed since it was measured; run the study again")
    made = Files(Progress()).file(trial.recipe)
    if isinstance(made, Record):
        raise UserError(f"the file of {found.label} is gone from the cache and can't be made again: {made.reason}")
    same = made.sha256 == stored.get("sha256")
    return made, [] if same else ["the file was made again and is not the one that was measured, byte for byte"]


def _name(found: TrialResult) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{found.model}-{found.backend}-{found.precision}").strip("-.")


def _place(out: Path, suffix: str) -> Path:
    """The file to write, with the suffix of its kind."""
    if out.suffix == suffix:
        return out
    known = {*registry.suffixes(), STATE, ".py", ".pth", ".safetensors"}
    if out.suffix in known:
        raise UserError(
            f"what was measured is a {suffix} file; give -o {out.with_suffix(suffix).name}, or a name alone"
        )
    if out.is_dir():
        raise UserError(f"-o {out} is a folder; give the file's name, like {out / 'best'}{suffix}")
    return out.with_name(out.name + suffix)


def _check_free(file: Path, script: Path, made: Artifact | None) -> None:
    """Refuse to write over the model itself, or over a script that somebody else wrote."""
    if made and file.exists() and file.samefile(made.path):
        raise UserError(f"{file} is the file that was measured; give another with -o")
    if script.exists():
        if MARK not in script.read_text(encoding="utf-8", errors="replace"):
            raise UserError(f"{script} is there already, and not by `dyno take`; give another name with -o")
    elif made is None and _copied_code(script).exists():
        raise UserError(f"{_copied_code(script)} is there already; give another name with -o")


def _story(found: TrialResult, loaded: Results) -> str:
    """The script's first line: what it is and how fast it was."""
    versions = (found.good[0].raw.get("system") or {}).get("versions", {})
    library = next((f" ({name} {v})" for name, v in versions.items() if name != "numpy"), "")
    medians = found.medians("model")
    taken = f": {show(sorted(medians)[len(medians) // 2], 'duration')}" if medians else ""
    return f"{found.label}{library}{taken} as measured in {loaded.name}, trial {found.id}."
