"""`dyno export RUN`: the winner's file, and a script that runs it as it was measured."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dyno.formatting import show
from dyno.jobs.launcher import launch
from dyno.jobs.progress import Progress
from dyno.results.ranking import cpu_contention, list_winners
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, TrialResult, by_build, find_trial
from dyno.runner.execute import Files
from dyno.store import copy, sha256_of
from dyno.worker import registry
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Trial, UserError

STATE_SUFFIX = ".pt"
SCRIPT_MARK = "Written by `dyno export`"  # first line of scripts
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class ExportResult:
    """An exported winner: the trial's id and label, its file (for a module its weights), the script, and notes.

    `bytes` is the size of the file with its companions, such as an IR's .bin.
    """

    trial: str
    label: str
    file: Path
    script: Path
    bytes: int
    notes: tuple[str, ...] = ()


def export_winner(run: RunData, choice: str = "", out: Path | None = None) -> ExportResult:
    """Write a trial's file to `out`, and next to it a script that runs it, with the same name and .py.

    `choice` is a trial's id or its beginning, or BACKEND/PRECISION; "" is the verdict's winner. `out` is by default
    MODEL-BACKEND-PRECISION in the current folder. A file missing from the cache is built again. Raises `UserError`.
    """
    results = run.records
    result = _choose_trial(run, choice)
    trial = result.spec
    artifact, notes = measured_file(result, trial)
    file = _choose_path(out or Path(_format_name(result)), Path(artifact.path).suffix if artifact else STATE_SUFFIX)
    script = file.with_suffix(".py")
    _check_free(file, script, artifact)
    details = {
        "file": file.name,
        "script": script.name,
        "story": _format_heading(result, results, float(run.frame.set_index("trial")["latency_ms"][result.id])),
        "outputs": list(result.outputs()) or [t.name for t in (artifact.outputs if artifact else ())],
        "options": result.facts.options,
        "weights_sha256": result.facts.weights_sha256,
    }
    with tempfile.TemporaryDirectory() as scratch:
        record = launch(Job("take", trial.runtime, trial, artifact=artifact, options=details), Path(scratch), TIMEOUT_S)
        if record.status != "ok":
            raise UserError(f"{result.label} can't be exported: {record.reason}")
        _write_files(Path(scratch), record.facts.files, artifact, file, script)
    size = artifact.bytes if artifact else file.stat().st_size
    return ExportResult(result.id, result.label, file, script, size, (*notes, *_list_caveats(results, choice)))


def _write_files(scratch: Path, names: Sequence[str], artifact: Artifact | None, file: Path, script: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if artifact is not None:
        copy(Path(artifact.path), file)
    targets = {"script.py": script, "state.pt": file, "model.py": _copied_code(script)}
    for name in names:
        copy(scratch / name, targets[name])


def _copied_code(script: Path) -> Path:
    return script.with_name(f"{script.stem}_model.py")


def _choose_trial(run: RunData, choice: str) -> TrialResult:
    """Return the chosen trial; raise `UserError` if it did not run."""
    result = find_trial(run.records, choice) if choice else _find_winner(run)
    if not result.good:
        raise UserError(f"{result.label} did not run ({result.status}: {result.reason}), so there is nothing to export")
    return result


def _find_winner(run: RunData) -> TrialResult:
    all_winners, results = list(list_winners(run)), run.records
    if not all_winners:
        raise UserError(f"the verdict of {results.folder} names no winner; choose a trial as BACKEND/PRECISION")
    if len(all_winners) > 1:
        choices = ", ".join(f"{id} ({where})" for where, id in all_winners)
        raise UserError(f"{results.folder} has several winners; choose one: {choices}")
    return results.trial(all_winners[0][1])


def _list_caveats(results: Results, choice: str) -> list[str]:
    """Return a note if no trial was chosen and the verdict names no winner because of CPU contention."""
    contention = None if choice else cpu_contention(results)
    return [f"{contention.sentence} This was the fastest measured."] if contention and contention.mostly else []


def measured_file(result: TrialResult, trial: Trial) -> tuple[Artifact | None, list[str]]:
    """Return the measured file (the fastest of several builds) with notes; build it again if missing or changed.

    None for a module.
    """
    if fastest := _fastest_build(result):
        artifact = Files(Progress()).get(trial, fastest.round_index)
        if isinstance(artifact, Artifact):
            return artifact, [f"build {fastest.build} of {result.builds}, the fastest; the verdict covers all of them"]
        raise _not_built(result, artifact)
    original = result.artifact
    if original and Path(original.path).is_file() and sha256_of(Path(original.path)) == original.sha256:
        return original, []
    if trial.recipe is None:
        if not trial.model.file:
            return None, []
        raise UserError(f"{trial.model.file} is missing or was changed since it was measured; run the study again")
    artifact = Files(Progress()).get(trial, 0)
    assert artifact is not None
    if isinstance(artifact, Record):
        raise _not_built(result, artifact)
    is_same = original is not None and artifact.sha256 == original.sha256
    return artifact, [] if is_same else ["the file was built again and differs from the one that was measured"]


def _fastest_build(result: TrialResult) -> Round | None:
    """Return a round of the build with the shortest latency, by the geometric mean; None if all ran the same file."""
    seconds: dict[int, list[tuple[Round, float]]] = {}
    for r in result.good:
        if r.build and (median := r.median("model")) is not None:
            seconds.setdefault(r.build, []).append((r, median))
    if not seconds:
        return None
    return min(seconds.values(), key=lambda rounds: by_build(rounds)[0])[0][0]


def _not_built(result: TrialResult, failure: Record | None) -> UserError:
    reason = failure.reason if failure else "it has no recipe"
    return UserError(f"the file of {result.label} is missing from the cache and can't be built again: {reason}")


def _format_name(trial: TrialResult) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{trial.model}-{trial.backend}-{trial.precision}").strip("-.")


def _choose_path(out: Path, suffix: str) -> Path:
    if out.suffix == suffix:
        return out
    suffixes = {*registry.list_suffixes(), STATE_SUFFIX, ".py", ".pth", ".safetensors"}
    if out.suffix in suffixes:
        raise UserError(
            f"the measured file is {suffix}; give -o {out.with_suffix(suffix).name}, or a name without suffix"
        )
    if out.is_dir():
        raise UserError(f"-o {out} is a folder; give the file's name, like {out / 'best'}{suffix}")
    return out.with_name(out.name + suffix)


def _check_free(file: Path, script: Path, artifact: Artifact | None) -> None:
    """Refuse to overwrite the model itself, or a script of another origin."""
    if artifact and file.exists() and file.samefile(artifact.path):
        raise UserError(f"{file} is the file that was measured; give another with -o")
    if script.exists():
        if SCRIPT_MARK not in script.read_text(encoding="utf-8", errors="replace"):
            raise UserError(f"{script} exists already and was not written by `dyno export`; give another name with -o")
    elif artifact is None and _copied_code(script).exists():
        raise UserError(f"{_copied_code(script)} exists already; give another name with -o")


def _format_heading(trial: TrialResult, results: Results, latency_ms: float) -> str:
    """Return the script's first line: the trial and its latency, as in the table (NaN: unknown)."""
    versions = trial.good[0].record.system.get("versions", {})
    library = next((f" ({name} {v})" for name, v in versions.items() if name != "numpy"), "")
    latency = "" if latency_ms != latency_ms else f": {show(latency_ms * 1e-3, 'duration')}"
    return f"{trial.label}{library}{latency} as measured in {results.name}, trial {trial.id}."
