"""Run folders: which studies may share one, and which rows belong to the models' current files."""

from __future__ import annotations

import glob
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dyno import __version__
from dyno.formatting import format_count
from dyno.results.notes import store_models
from dyno.store import Run, gpu_identity, sha256_of
from dyno.study.commits import find_head
from dyno.study.model_names import model_name
from dyno.study.plan import PlannedTrial, place_of, rename_model
from dyno.study.study import Choice, Study
from dyno.worker import registry, system
from dyno.worker.nets.local_code import sha256_with_imports
from dyno.worker.record import DamagedRecord, read_json, read_record, write_json, write_text
from dyno.worker.spec import (
    ADAPTIVE_RULES,
    FIXED,
    NETWORK_FILES,
    NETWORK_LIBRARIES,
    Job,
    ModelSpec,
    Trial,
    UserError,
    digest,
    from_json,
)

RECORDED_DISTRIBUTIONS = ("numpy", "torch", "torchvision", "timm", "onnx", "onnxruntime", "openvino")
# Settings that may differ between studies in one folder: they change no stored number.
REPEATABLE_SETTINGS = (
    "rounds", "timeout", "build_timeout", "budget", "limit", "reference", "confirm", "sustained", "search", "peak",
    "energy", "routes", "equivalent", "minutes", "until",
)  # fmt: skip
# Values of settings missing in folders older than these settings' defaults.
EARLIER_DEFAULTS = {"until": FIXED, "turns": False}
STUDY_AXES = ("models", "backends", "precisions", "batches", "sizes")  # settings with further values in one folder
ARCHIVE_DIR, REPLACED_DIR, DAMAGED_DIR = "archive", "replaced", "damaged"


@dataclass(frozen=True)
class StoredTrial:
    """A trial's folder, and the trial as in its jobs."""

    folder: Path
    trial: Trial

    @property
    def question(self) -> str:
        return hash_question(self.trial)

    @property
    def refused(self) -> str:
        """Status of a row that was never started, else ""."""
        try:
            record = read_record(self.folder / "r0")
        except DamagedRecord:  # measured again
            return ""
        return record.status if record is not None and record.stage == "plan" else ""


def hash_question(trial: Trial) -> str:
    """Return a hash of what a trial measures, independent of how its file is made."""
    return digest(replace(trial, recipe=None))


def list_stored(folder: Path) -> list[StoredTrial]:
    """Return the trials below a folder; unreadable ones are left out (`load_run` reports them)."""
    trials = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        for job in sorted(path.glob("[rc][0-9]*/job.json")):
            try:
                trial = from_json(Job, read_json(job)).trial
            except (OSError, ValueError, TypeError, AttributeError, UserError):
                continue
            if trial is not None:
                trials.append(StoredTrial(path, trial))
                break
    return trials


def read_earlier(folder: Path) -> Study | None:
    """Return the folder's study, or None if it has none."""
    path = folder / "study.toml"
    return Study.from_toml(path, defaults=EARLIER_DEFAULTS) if path.is_file() else None


def is_measured(folder: Path) -> bool:
    """Return whether the folder has any successful measurement."""
    return any(_is_good(record) for top in ("", "blocks/*/") for record in folder.glob(f"{top}trials/*/*/record.json"))


def _is_good(record: Path) -> bool:
    try:
        return bool(read_json(record).get("status") == "ok")
    except (OSError, ValueError):  # damage is reported by the reader
        return True


def list_contradictions(before: Study, study: Study) -> list[tuple[str, Any, Any]]:
    """Return the settings that keep two studies from sharing a folder: (name, before, now)."""
    # Adaptive rounds are judged by the number of rounds before the first look.
    fixed_names = ("rounds", "until") if before.until in ADAPTIVE_RULES else ()
    free_names = {*STUDY_AXES, *REPEATABLE_SETTINGS, "runtime"}.difference(fixed_names)
    names = [f.name for f in fields(Study) if f.name not in free_names]
    settings = [(name, a, b) for name in names if (a := getattr(before, name)) != (b := getattr(study, name))]
    comparisons = {"weights": _same_content, "on": _same_kind}
    settings = [(name, a, b) for name, a, b in settings if name not in comparisons or not comparisons[name](a, b)]
    for name in before.runtime.keys() & study.runtime.keys():
        if before.runtime[name] != study.runtime[name]:
            a, b = (one.runtime[name].get("python", "") for one in (before, study))
            settings.append((f"interpreter of {name}", a, b))
    return settings


def _same_content(a: str, b: str) -> bool:
    return all(path and Path(path).is_file() for path in (a, b)) and sha256_of(Path(a)) == sha256_of(Path(b))


def _same_kind(a: str, b: str) -> bool:
    """Return whether both name the same kind of cluster (at any address), or neither a cluster."""
    return a.partition("=")[0] == b.partition("=")[0]


def describe_differences(settings: Iterable[tuple[str, Any, Any]]) -> str:
    """Describe these settings: `was measured with seconds=3, this command says seconds=1`."""
    before, now = ([_format_setting(name, pair[i]) for name, *pair in settings] for i in (0, 1))
    return f"was measured with {', '.join(before)}, this command says {', '.join(now)}"


def _format_setting(name: str, value: Any) -> str:
    if value in ("", (), None, {}):
        return f"no {name}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{name}={f'{value:g}' if isinstance(value, float) else value}"


def refuse_other(study: Study, folder: Path) -> None:
    """Raise `UserError` if the folder was measured with contradicting settings."""
    before = read_earlier(folder)
    if before is not None and (settings := list_contradictions(before, study)) and is_measured(folder):
        command = f"dyno runs rm {shlex.quote(str(folder))}"
        raise UserError(
            f"{folder} {describe_differences(settings)}; give another --out, or remove it with `{command}` first"
        )


def prepare_folder(study: Study, run: Run, planned: list[PlannedTrial]) -> tuple[list[PlannedTrial], list[str]]:
    """Fit the folder to the study: archive rows of other code or weights, and restore archived rows of current ones.

    Returns the trials, with the folder's names for their models, and sentences on what was done.
    """
    refuse_other(study, run.folder)
    before, stored_trials = read_earlier(run.folder), list_stored(run.folder / "trials")
    if before is not None and list_contradictions(before, study):  # changed settings before anything was measured
        before = None
        for row in stored_trials:
            move_folder(row.folder, run.folder / ARCHIVE_DIR / REPLACED_DIR)
        stored_trials = []
    _refuse_other_threads(run.folder, stored_trials, planned)
    entries = _name_models(planned, stored_trials)
    notes = [*_archive_rows(run, stored_trials, entries), *_restore_rows(run, entries)]
    stored_trials = list_stored(run.folder / "trials")
    (run.folder / "trials").mkdir(parents=True, exist_ok=True)
    write_text(
        run.folder / "study.toml", (_join_studies(before, study, stored_trials, entries) if before else study).to_toml()
    )
    gpu = {"gpu": gpu_identity(study.device)} if study.device != "cpu" else {}
    commit = {"commit": head} if (head := find_head()) else {}
    machine = system.describe(RECORDED_DISTRIBUTIONS)
    machine["versions"] = {"inference-dyno": __version__, **machine["versions"]}
    write_json(run.folder / "environment.json", {**machine, **gpu, **commit})
    inspected_entries = (entry for entry in entries if entry.model_facts.set_fields())
    store_models(
        run.folder,
        [replace(e.model_facts, model=e.trial.model.name, size=e.trial.dims.size) for e in inspected_entries],
    )
    return entries, notes


def _refuse_other_threads(folder: Path, stored_trials: list[StoredTrial], planned: list[PlannedTrial]) -> None:
    """Raise `UserError` if the default number of threads has changed, as rows of both would have one name."""
    before = {row.trial.runtime.threads for row in stored_trials}
    now = {entry.trial.runtime.threads for entry in planned}
    if before and now and before.isdisjoint(now) and is_measured(folder):
        raise UserError(
            f"{folder} was measured with {format_count(min(before), 'thread')}, but the processors allowed now give "
            f"{min(now)}; allow as many, or give another --out"
        )


def _join_studies(before: Study, study: Study, stored_trials: list[StoredTrial], planned: list[PlannedTrial]) -> Study:
    """Join both studies into one with all combinations.

    An axis left open by only one of the studies gets the values of its trials.
    """
    trials = [entry.trial for entry in stored_trials], [entry.trial for entry in planned]
    settings: dict[str, Any] = {"runtime": {**before.runtime, **study.runtime}}
    for name in STUDY_AXES:
        values = getattr(before, name), getattr(study, name)
        if any(values) and not all(values):
            values = (values[0] or _values_of(name, before, trials[0]), values[1] or _values_of(name, study, trials[1]))
        settings[name] = tuple(dict.fromkeys((*values[0], *values[1])))
    return replace(study, **settings)


def _values_of(axis: str, study: Study, trials: list[Trial]) -> tuple[Any, ...]:
    """Return the values of an open axis, from the study's trials."""
    model_trials = [t for t in trials if t.model.name in map(model_name, study.models)] or trials
    if axis == "backends":
        return tuple(dict.fromkeys(t.backend for t in model_trials if not t.options))
    if axis == "precisions":
        backends = {Choice.parse(text).name for text in study.backends if Choice.parse(text).precisions}
        return tuple(dict.fromkeys(t.model.precision or "fp32" for t in model_trials if t.backend not in backends))
    if axis == "batches":
        return tuple(dict.fromkeys(t.dims.batch for t in model_trials))
    return tuple(dict.fromkeys(t.dims.size for t in model_trials if t.dims.height))


def _name_models(planned: list[PlannedTrial], stored_trials: list[StoredTrial]) -> list[PlannedTrial]:
    """Return the trials with the folder's names for their models.

    A new model is named by its source if its name is in use.
    """
    names = {row.trial.model.source: row.trial.model.name for row in stored_trials}
    models = {row.trial.model.name: row.trial.model for row in reversed(stored_trials)}
    entries = []
    for entry in planned:
        model = entry.trial.model
        namesake = models.get(model.name)
        name = names.get(model.source, model.name)
        if namesake is not None and model.source not in names and not _has_moved(namesake, model):
            name = place_of(model)
        entries.append(entry if name == model.name else replace(entry, trial=rename_model(entry.trial, name)))
    return entries


def _has_moved(old: ModelSpec, new: ModelSpec) -> bool:
    """Return whether the new model replaces the old one: the old file is gone, or both have the same content."""
    path = _find_file(old)
    is_gone = (path.suffix == ".py" or registry.format_of(path)) and not path.exists()
    return old.name == new.name and (is_gone or _identify_content(old) == _identify_content(new))


def _identify_content(model: ModelSpec) -> tuple[str, ...]:
    kind = "file" if model.file else model.source.rpartition(":")[2]
    return kind, model.source_sha256, model.weights_sha256


def _archive_rows(run: Run, stored_trials: list[StoredTrial], planned: list[PlannedTrial]) -> list[str]:
    """Archive rows of other versions of the models, and rows whose trial is now measured differently."""
    current = {entry.trial.model.name: entry for entry in planned}
    planned_ids = {hash_question(entry.trial): entry.trial.id for entry in planned if not entry.refusal}
    other_models = {row.trial.model for row in stored_trials if row.trial.model.name not in current}
    overwritten_files = {model: find_overwritten(model) for model in other_models}
    counts: dict[tuple[str, Path], int] = {}
    for row in stored_trials:
        old, new = row.trial.model, current.get(row.trial.model.name)
        changed_file = _what_changed(old, new) if new is not None else overwritten_files[old]
        has_changed = bool(changed_file)
        should_restart = bool(row.refused) and (
            row.question in planned_ids or (new is not None and not new.uninspected and row.refused != "skipped")
        )
        if not has_changed and not should_restart and planned_ids.get(row.question, row.trial.id) == row.trial.id:
            continue
        if row.refused:
            shutil.rmtree(row.folder)
            continue
        archive = run.folder / ARCHIVE_DIR / (digest(old)[:12] if has_changed else REPLACED_DIR)
        move_folder(row.folder, archive)
        reason = f"of an earlier {changed_file}" if has_changed else "measured differently now"
        counts[reason, archive] = counts.get((reason, archive), 0) + 1
    return [f"{_format_count(n)} {reason}: moved to {archive}" for (reason, archive), n in counts.items()]


def _what_changed(old: ModelSpec, entry: PlannedTrial) -> str:
    """Return the file in which the planned model differs from the old one, or "".

    A model that could not be inspected is compared only by its file.
    """
    new = entry.trial.model
    if _identify_content(old) == _identify_content(new) if entry.uninspected else digest(old) == digest(new):
        return ""
    if entry.uninspected and not new.source_sha256:
        return ""
    if old.weights_sha256 != new.weights_sha256:
        return Path(new.weights or old.weights).name
    return _find_file(old).name if old.source_sha256 != new.source_sha256 and _find_file(old).name else old.name


def find_overwritten(model: ModelSpec) -> str:
    """Return the file of an unplanned model if its content has changed, else ""."""
    path, weights = _find_file(model), Path(model.weights)
    if model.source_sha256 and path.is_file():
        sha256 = sha256_with_imports(path) if path.suffix == ".py" else sha256_of(path)
        if sha256 != model.source_sha256:
            return path.name
    has_changed = model.weights_sha256 and weights.is_file() and sha256_of(weights) != model.weights_sha256
    return weights.name if has_changed else ""


def _find_file(model: ModelSpec) -> Path:
    """Return the file named by a model's source, if any."""
    before, _, after = model.source.rpartition(":")
    return Path(model.file or (after if before in NETWORK_FILES else before))


def _restore_rows(run: Run, planned: list[PlannedTrial]) -> list[str]:
    """Restore archived rows of the models' current files."""
    planned_ids = {hash_question(entry.trial): entry.trial.id for entry in planned if not entry.refusal}
    names = {digest(entry.trial.model)[:12] for entry in planned if not entry.uninspected} | {REPLACED_DIR}
    restored_ids: list[str] = []
    for path in sorted(run.folder / ARCHIVE_DIR / name for name in names):
        for row in list_stored(path):
            is_current = (
                planned_ids.get(row.question, "" if path.name == REPLACED_DIR else row.trial.id) == row.trial.id
            )
            target = run.folder / "trials" / row.trial.id
            if is_current and not target.exists():
                row.folder.rename(target)
                restored_ids.append(target.name)
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return (
        [f"{_format_count(len(restored_ids))} of the current files: restored from {run.folder / ARCHIVE_DIR}"]
        if restored_ids
        else []
    )


def archive_round(run: Run, folder: Path) -> Path:
    """Move an unreadable round to the archive; return its new place."""
    return move_folder(folder, run.folder / ARCHIVE_DIR / DAMAGED_DIR / folder.parent.name)


def _format_count(count: int) -> str:
    return f"{count} trial{'s' * (count != 1)}"


def move_folder(folder: Path, destination: Path) -> Path:
    """Move a folder to `destination`, numbered if its name is in use; return its new place."""
    destination.mkdir(parents=True, exist_ok=True)
    target, number = destination / folder.name, 2
    while target.exists():
        target, number = destination / f"{folder.name}-{number}", number + 1
    folder.rename(target)
    return target


# Default run folder of a study: a readable name, or another one if it is in use.

RUNS_DIR = Path("runs")
NAMED_SOURCES = (*NETWORK_LIBRARIES, *NETWORK_FILES, "fake", "endpoint")  # sources identified by name alone
MAX_NAME_LENGTH = 80
HASH_NAME = re.compile("[0-9a-f]{16,}")  # folder named by a hash, as for modules in memory
REFUSED_STUDY_FILES = {"lock"}  # files left by a refused study


def folder_name(models: Sequence[str]) -> str:
    """Return a folder name: `resnet18` for torchvision:resnet18, `m` for a/m.onnx, `net-f` for net.py:f.

    Several models' names are joined by hyphens.
    """
    return _clean_name("-".join(map(_name_model, models)))


def _name_model(source: str) -> str:
    module_path, _, _ = source.rpartition(":")
    name = model_name(source)
    if module_path in ("", *NAMED_SOURCES) or registry.format_of(source):
        return name
    module = Path(module_path).stem if module_path.endswith(".py") else module_path.rpartition(".")[2]
    return name if module == name.partition("(")[0] else f"{module}-{name}"


def _clean_name(name: str) -> str:
    return re.sub(r"[^\w.+=@-]+", "-", name)[:MAX_NAME_LENGTH].strip("-.") or "model"


def choose_folder(study: Study, preferred: Path | None = None) -> tuple[Path, str]:
    """Choose the study's folder; return it and one line on why it is not the `preferred` one (default runs/NAME).

    A folder fits if it is free, or holds the same models with compatible settings. The line is "" for the preferred
    folder.
    """
    preferred = preferred or RUNS_DIR / folder_name(study.models)
    reason = _in_use(study, preferred)
    if not reason:
        return preferred, ""
    alternatives = list(_iter_alternatives(study, preferred))
    folder = next((folder for folder in alternatives if folder.exists() and not _in_use(study, folder)), None)
    if folder is not None:
        return folder, f"{preferred} {reason}: continuing in {folder}"
    folder = next(folder for folder in alternatives if not folder.exists())
    return folder, f"{preferred} {reason}: writing to {folder}"


def _in_use(study: Study, folder: Path) -> str:
    """Return why the study can't use the folder, else ""."""
    if not folder.exists():
        return ""
    if not (folder / "study.toml").is_file():
        is_unused = folder.is_dir() and {path.name for path in folder.iterdir()} <= REFUSED_STUDY_FILES
        return "" if is_unused else "is not a run folder"
    try:
        before = read_earlier(folder)
    except UserError:
        return "holds a study that can't be read"
    if before is None:
        return ""
    if not is_measured(folder):
        return "" if set(study.models) <= set(before.models) else "was begun with other models"
    if not set(study.models) <= set(before.models):
        return f"holds {', '.join(before.models)}"
    settings = list_contradictions(before, study)
    return describe_differences(settings) if settings else ""


def _iter_alternatives(study: Study, preferred: Path) -> Iterator[Path]:
    """Yield other folders, named by what distinguishes the study from the one in `preferred`, then numbered."""
    try:
        before = read_earlier(preferred)
    except UserError:
        before = None
    parts = [preferred.name]
    if before is not None and len(study.models) == 1 and study.models[0] not in before.models:
        source = study.models[0]
        prefix = source.partition(":")[0] if ":" in source else Path(source).resolve().parent.name
        parts = [prefix, *parts] if not HASH_NAME.fullmatch(prefix) else parts
    if before is not None and study.weights != before.weights:
        parts.append(Path(study.weights).stem or "random")
    if before is not None and study.pretrained and not before.pretrained:
        parts.append("pretrained")
    if len(parts) > 1:
        yield preferred.with_name(_clean_name("-".join(parts)))
    for number in range(2, 3 + len(list(preferred.parent.glob(f"{glob.escape(preferred.name)}-*")))):
        yield preferred.with_name(f"{preferred.name}-{number}")
