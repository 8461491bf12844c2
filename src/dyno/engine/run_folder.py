"""What a run folder holds: which studies may share it, and which of its rows are of the models as they are now."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dyno.planning.planned import Planned
from dyno.planning.sides import place_of, renamed
from dyno.store import Run, gpu_identity, sha256_of
from dyno.study import Choice, Study, model_name
from dyno.worker import registry, system
from dyno.worker.nets.local_code import sha256_with_imports
from dyno.worker.record import read_json, read_record, write_json, write_text
from dyno.worker.spec import SCHEMA, Job, ModelSpec, Trial, UserError, digest, from_json

DISTRIBUTIONS = ("inference-dyno", "numpy", "torch", "torchvision", "timm", "onnx", "onnxruntime", "openvino")
# What may differ when the same folder is used again: none of them changes a number that is already stored.
REPEATABLE = (
    "rounds",
    "timeout",
    "budget",
    "reference",
    "confirm",
    "search",
    "peak",
    "routes",
    "equivalent",
    "minutes",
    "until",
)
AXES = ("models", "backends", "precisions", "batches", "sizes")  # what a folder may have more of
ARCHIVE, REPLACED = "archive", "replaced"


@dataclass(frozen=True)
class Stored:
    """A trial's folder, and the trial as its jobs were told it."""

    folder: Path
    trial: Trial

    @property
    def question(self) -> str:
        return question(self.trial)

    @property
    def refused(self) -> str:
        """The status of a row that was never started, "" of any other."""
        record = read_record(self.folder / "r0")
        return record.status if record is not None and record.stage == "plan" else ""


def question(trial: Trial) -> str:
    """What a trial asks, whichever way its file is made."""
    return digest(replace(trial, recipe=None))


def stored(folder: Path) -> list[Stored]:
    """The trials below a folder; what can't be read is left for `analysis.results` to complain about."""
    found = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        for job in sorted(place.glob("[rc][0-9]*/job.json")):
            try:
                trial = from_json(Job, read_json(job)).trial
            except (OSError, ValueError, TypeError, AttributeError, UserError):
                continue
            if trial is not None:
                found.append(Stored(place, trial))
                break
    return found


def earlier(folder: Path) -> Study | None:
    """The study that the folder is of, None where it has none."""
    path = folder / "study.toml"
    return Study.from_toml(path) if path.is_file() else None


def measured(folder: Path) -> bool:
    """Whether the folder holds any measurement, which other settings would contradict."""
    return any(_good(record) for record in folder.glob("trials/*/*/record.json"))


def _good(record: Path) -> bool:
    try:
        return bool(read_json(record).get("status") == "ok")
    except (OSError, ValueError):  # a damaged one is told of when it is needed
        return True


def contradictions(before: Study, study: Study) -> list[tuple[str, Any, Any]]:
    """The settings by which the two studies' numbers would not belong together: (name, before, now)."""
    # Rounds that went on until pairs were decided are judged by when they were first looked at.
    fixed = ("rounds", "until") if before.until else ()
    free = {*AXES, *REPEATABLE, "runtime"}.difference(fixed)
    names = [f.name for f in fields(Study) if f.name not in free]
    found = [(name, a, b) for name in names if (a := getattr(before, name)) != (b := getattr(study, name))]
    found = [one for one in found if one[0] != "weights" or not _same_content(*one[1:])]
    for name in before.runtime.keys() & study.runtime.keys():
        if before.runtime[name] != study.runtime[name]:
            a, b = (one.runtime[name].get("python", "") for one in (before, study))
            found.append((f"interpreter of {name}", a, b))
    return found


def _same_content(a: str, b: str) -> bool:
    return all(path and Path(path).is_file() for path in (a, b)) and sha256_of(Path(a)) == sha256_of(Path(b))


def differences(found: Iterable[tuple[str, Any, Any]]) -> str:
    """`was measured with seconds=3, this command says seconds=1`, for what contradicts."""
    before, now = ([_said(name, pair[i]) for name, *pair in found] for i in (0, 1))
    return f"was measured with {', '.join(before)}, this command says {', '.join(now)}"


def _said(name: str, value: Any) -> str:
    if value in ("", (), None, {}):
        return f"no {name}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{name}={f'{value:g}' if isinstance(value, float) else value}"


def refuse_other(study: Study, folder: Path) -> None:
    """A `UserError` where the folder's numbers were measured with settings that the study contradicts."""
    before = earlier(folder)
    if before is not None and (found := contradictions(before, study)) and measured(folder):
        raise UserError(
            f"{folder} {differences(found)}; give another --out, or remove it with `dyno rm {folder}` first"
        )


def settle(study: Study, run: Run, planned: list[Planned]) -> tuple[list[Planned], list[str]]:
    """Make the folder one of the study: rows of other code or weights go to its archive, earlier ones of these return.

    Returns the trials, by the names that the folder knows their models by, and what was done, in sentences.
    """
    refuse_other(study, run.folder)
    before, there = earlier(run.folder), stored(run.folder / "trials")
    if before is not None and contradictions(before, study):  # under other settings, of which nothing could be measured
        before = None
        for each in there:
            _move(each.folder, run.folder / ARCHIVE / REPLACED)
        there = []
    named = _named(planned, there)
    said = [*_archive(run, there, named), *_restore(run, named)]
    there = stored(run.folder / "trials")
    write_text(run.folder / "study.toml", (_union(before, study, there, named) if before else study).to_toml())
    gpu = {"gpu": gpu_identity(study.device)} if study.device != "cpu" else {}
    write_json(run.folder / "environment.json", {**system.describe(DISTRIBUTIONS), **gpu})
    _models(run, named)
    return named, said


def _union(before: Study, study: Study, there: list[Stored], planned: list[Planned]) -> Study:
    """Every combination of what both ask for; where only one leaves an axis open, what that came to is written out."""
    trials = [each.trial for each in there], [each.trial for each in planned]
    joined: dict[str, Any] = {"runtime": {**before.runtime, **study.runtime}}
    for name in AXES:
        asked = getattr(before, name), getattr(study, name)
        if any(asked) and not all(asked):
            asked = (asked[0] or _came_to(name, before, trials[0]), asked[1] or _came_to(name, study, trials[1]))
        joined[name] = tuple(dict.fromkeys((*asked[0], *asked[1])))
    return replace(study, **joined)


def _came_to(axis: str, study: Study, trials: list[Trial]) -> tuple[Any, ...]:
    """What an axis that the study leaves open was, going by its trials."""
    own = [t for t in trials if t.model.name in map(model_name, study.models)] or trials
    if axis == "backends":
        return tuple(dict.fromkeys(t.backend for t in own if not t.options))
    if axis == "precisions":
        mixed = {Choice.parse(text).name for text in study.backends if Choice.parse(text).precisions}
        return tuple(dict.fromkeys(t.model.precision or "fp32" for t in own if t.backend not in mixed))
    if axis == "batches":
        return tuple(dict.fromkeys(t.dims.batch for t in own))
    return tuple(dict.fromkeys(t.dims.size for t in own if t.dims.height))


def _named(planned: list[Planned], there: list[Stored]) -> list[Planned]:
    """The trials under the names that the folder has for their models; another model of a taken name has its source."""
    known = {each.trial.model.source: each.trial.model.name for each in there}
    taken = {each.trial.model.name: each.trial.model for each in reversed(there)}
    found = []
    for one in planned:
        model = one.trial.model
        other = taken.get(model.name)
        name = known.get(model.source, model.name)
        if other is not None and model.source not in known and not _moved(other, model):
            name = place_of(model)
        found.append(one if name == model.name else replace(one, trial=renamed(one.trial, name)))
    return found


def _moved(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether the new model takes the old one's place: its file is gone, or both are the same wherever they lie."""
    place = _place(old)
    gone = (place.suffix == ".py" or registry.format_of(place)) and not place.exists()
    return old.name == new.name and (gone or _content(old) == _content(new))


def _content(model: ModelSpec) -> tuple[str, ...]:
    kind = "file" if model.file else model.source.rpartition(":")[2]
    return kind, model.source_sha256, model.weights_sha256


def _archive(run: Run, there: list[Stored], planned: list[Planned]) -> list[str]:
    """Move away what is not of the models as they are now, and what would be measured anew in another way."""
    now = {one.trial.model.name: one for one in planned}
    asked = {question(one.trial): one.trial.id for one in planned if not one.refusal}
    others = {each.trial.model for each in there if each.trial.model.name not in now}
    elsewhere = {model: overwritten(model) for model in others}
    moved: dict[tuple[str, Path], int] = {}
    for each in there:
        old, new = each.trial.model, now.get(each.trial.model.name)
        other = _what_changed(old, new) if new is not None else elsewhere[old]
        changed = bool(other)
        again = bool(each.refused) and (
            each.question in asked or (new is not None and not new.uninspected and each.refused != "skipped")
        )
        if not changed and not again and asked.get(each.question, each.trial.id) == each.trial.id:
            continue
        if each.refused:
            shutil.rmtree(each.folder)
            continue
        place = run.folder / ARCHIVE / (digest(old)[:12] if changed else REPLACED)
        _move(each.folder, place)
        words = f"of an earlier {other}" if changed else "made otherwise now"
        moved[words, place] = moved.get((words, place), 0) + 1
    return [f"{_trials(n)} {words}: moved to {place}" for (words, place), n in moved.items()]


def _what_changed(old: ModelSpec, now: Planned) -> str:
    """The file by which the planned model is another one than the old; "" where it is the same.

    Of one that could not be looked at, as far as its file tells.
    """
    new = now.trial.model
    if _content(old) == _content(new) if now.uninspected else digest(old) == digest(new):
        return ""
    if now.uninspected and not new.source_sha256:
        return ""
    if old.weights_sha256 != new.weights_sha256:
        return Path(new.weights or old.weights).name
    return _place(old).name if old.source_sha256 != new.source_sha256 and _place(old).name else old.name


def overwritten(model: ModelSpec) -> str:
    """The file of a model that is not planned now, where its content is another one; "" where it is as it was."""
    place, weights = _place(model), Path(model.weights)
    if model.source_sha256 and place.is_file():
        now = sha256_with_imports(place) if place.suffix == ".py" else sha256_of(place)
        if now != model.source_sha256:
            return place.name
    gone = model.weights_sha256 and weights.is_file() and sha256_of(weights) != model.weights_sha256
    return weights.name if gone else ""


def _place(model: ModelSpec) -> Path:
    """The file that a model's source names, as far as it does."""
    before, _, after = model.source.rpartition(":")
    return Path(model.file or (after if before == "ultralytics" else before))


def _restore(run: Run, planned: list[Planned]) -> list[str]:
    """Bring back what the archive holds of the models as they are now."""
    asked = {question(one.trial): one.trial.id for one in planned if not one.refusal}
    places = {digest(one.trial.model)[:12] for one in planned if not one.uninspected} | {REPLACED}
    back: list[str] = []
    for place in sorted(run.folder / ARCHIVE / name for name in places):
        for each in stored(place):
            fits = asked.get(each.question, "" if place.name == REPLACED else each.trial.id) == each.trial.id
            target = run.folder / "trials" / each.trial.id
            if fits and not target.exists():
                each.folder.rename(target)
                back.append(target.name)
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
    return [f"{_trials(len(back))} of these very files: brought back from {run.folder / ARCHIVE}"] if back else []


def _trials(count: int) -> str:
    return f"{count} trial{'s' * (count != 1)}"


def _move(folder: Path, place: Path) -> None:
    """Move a trial's folder into the place; a name that is taken there gets a number."""
    place.mkdir(parents=True, exist_ok=True)
    target, number = place / folder.name, 2
    while target.exists():
        target, number = place / f"{folder.name}-{number}", number + 1
    folder.rename(target)


def _models(run: Run, planned: list[Planned]) -> None:
    """Write down what the look at each model counted, by size: a trial's id has no place for it."""
    path = run.folder / "models.json"
    counted = {(one.trial.model.name, one.trial.dims.size): one.model_facts for one in planned if one.model_facts}
    try:
        rows = read_json(path)["models"]
        known = {(row.pop("model"), row.pop("size")): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = {}
    if counted:
        rows = [{"model": model, "size": size, **seen} for (model, size), seen in {**known, **counted}.items()]
        write_json(path, {"schema": SCHEMA, "models": rows})
