"""Where a study lies when nobody says: under a readable name, and under another one where that name is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dyno.engine.run_folder import contradictions, differences, earlier, measured
from dyno.study import Study, model_name
from dyno.worker import registry
from dyno.worker.spec import UserError

RUNS = Path("runs")
LIBRARIES = ("torchvision", "timm", "ultralytics", "fake")  # whose models are known by their names alone
LONGEST = 80
HASH = re.compile("[0-9a-f]{16,}")  # where a module given in memory is kept: no name that says anything
OWN = {"lock"}  # what a study that was refused may have left in its folder


def folder_name(models: Sequence[str]) -> str:
    """`resnet18` for torchvision:resnet18, `m` for a/m.onnx, `net-build` for net.py:build; of several, all of them."""
    return _clean("-".join(map(_name, models)))


def _name(source: str) -> str:
    place, _, _ = source.rpartition(":")
    name = model_name(source)
    if place in ("", *LIBRARIES) or registry.format_of(source):
        return name
    module = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return name if module == name else f"{module}-{name}"


def _clean(name: str) -> str:
    return re.sub(r"[^\w.+=@-]+", "-", name)[:LONGEST].strip("-.") or "model"


def place(study: Study, first: Path | None = None) -> tuple[Path, str]:
    """The folder for the study, and one line where it is not the `first` (default runs/NAME): what lies there instead.

    A folder fits that is free, or of the same models with settings that don't contradict.
    """
    first = first or RUNS / folder_name(study.models)
    why = _taken(study, first)
    if not why:
        return first, ""
    others = list(_others(study, first))
    chosen = next((each for each in others if each.exists() and not _taken(study, each)), None)
    if chosen is not None:
        return chosen, f"{first} {why}: this goes on in {chosen}"
    chosen = next(each for each in others if not each.exists())
    return chosen, f"{first} {why}: this goes to {chosen}"


def _taken(study: Study, folder: Path) -> str:
    """Why the study can't have the folder, "" when it can."""
    if not folder.exists():
        return ""
    if not (folder / "study.toml").is_file():
        empty = folder.is_dir() and {path.name for path in folder.iterdir()} <= OWN
        return "" if empty else "is something else"
    try:
        before = earlier(folder)
    except UserError:
        return "holds a study that can't be read"
    if before is None:
        return ""
    if not measured(folder):
        return "" if set(study.models) <= set(before.models) else "was begun with other models"
    if not set(study.models) <= set(before.models):
        return f"holds {', '.join(before.models)}"
    found = contradictions(before, study)
    return differences(found) if found else ""


def _others(study: Study, first: Path) -> Iterator[Path]:
    """Other names: with what tells the study from the one that lies there, then with a number."""
    try:
        before = earlier(first)
    except UserError:
        before = None
    words = [first.name]
    if before is not None and len(study.models) == 1 and study.models[0] not in before.models:
        source = study.models[0]
        prefix = source.partition(":")[0] if ":" in source else Path(source).resolve().parent.name
        words = [prefix, *words] if not HASH.fullmatch(prefix) else words
    if before is not None and study.weights != before.weights:
        words.append(Path(study.weights).stem or "random")
    if before is not None and study.pretrained and not before.pretrained:
        words.append("pretrained")
    if len(words) > 1:
        yield first.with_name(_clean("-".join(words)))
    for number in range(2, 3 + len(list(first.parent.glob(f"{_globbed(first.name)}-*")))):
        yield first.with_name(f"{first.name}-{number}")


def _globbed(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
