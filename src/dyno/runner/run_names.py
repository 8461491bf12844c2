"""The default run folder of a study: under a readable name, and under another one where that is in use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dyno.runner.run_folder import contradictions, differences, earlier, measured
from dyno.study.study import Study, model_name
from dyno.worker import registry
from dyno.worker.spec import NETWORK_FILES, UserError

RUNS = Path("runs")
LIBRARIES = (
    "torchvision",
    "timm",
    *NETWORK_FILES,
    "fake",
    "endpoint",
)  # whose models are identified by their names alone
LONGEST = 80
HASH = re.compile("[0-9a-f]{16,}")  # a folder named by a hash, as of modules in memory: not a readable name
OWN = {"lock"}  # files that a refused study may have left in its folder


def folder_name(models: Sequence[str]) -> str:
    """Return a folder's name: `resnet18` for torchvision:resnet18, `m` for a/m.onnx, `net-build` for net.py:build.

    Several models are joined by a hyphen.
    """
    return _clean_name("-".join(map(_name_model, models)))


def _name_model(source: str) -> str:
    module_path, _, _ = source.rpartition(":")
    name = model_name(source)
    if module_path in ("", *LIBRARIES) or registry.format_of(source):
        return name
    module = Path(module_path).stem if module_path.endswith(".py") else module_path.rpartition(".")[2]
    return name if module == name else f"{module}-{name}"


def _clean_name(name: str) -> str:
    return re.sub(r"[^\w.+=@-]+", "-", name)[:LONGEST].strip("-.") or "model"


def choose_folder(study: Study, preferred: Path | None = None) -> tuple[Path, str]:
    """Choose the folder for the study; return it and one line on why it is not the `preferred` one (default runs/NAME).

    A folder fits if it is free, or holds the same models with settings that may share it. The line is "" if the
    preferred folder is chosen.
    """
    preferred = preferred or RUNS / folder_name(study.models)
    reason = _in_use(study, preferred)
    if not reason:
        return preferred, ""
    alternatives = list(_iter_alternatives(study, preferred))
    chosen = next((folder for folder in alternatives if folder.exists() and not _in_use(study, folder)), None)
    if chosen is not None:
        return chosen, f"{preferred} {reason}: continuing in {chosen}"
    chosen = next(folder for folder in alternatives if not folder.exists())
    return chosen, f"{preferred} {reason}: writing to {chosen}"


def _in_use(study: Study, folder: Path) -> str:
    """Return why the study can't use the folder, or "" if it can."""
    if not folder.exists():
        return ""
    if not (folder / "study.toml").is_file():
        empty = folder.is_dir() and {path.name for path in folder.iterdir()} <= OWN
        return "" if empty else "is not a run folder"
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
    settings = contradictions(before, study)
    return differences(settings) if settings else ""


def _iter_alternatives(study: Study, preferred: Path) -> Iterator[Path]:
    """Yield other folders, named by what distinguishes the study from the one in `preferred`, then with a number."""
    try:
        before = earlier(preferred)
    except UserError:
        before = None
    parts = [preferred.name]
    if before is not None and len(study.models) == 1 and study.models[0] not in before.models:
        source = study.models[0]
        prefix = source.partition(":")[0] if ":" in source else Path(source).resolve().parent.name
        parts = [prefix, *parts] if not HASH.fullmatch(prefix) else parts
    if before is not None and study.weights != before.weights:
        parts.append(Path(study.weights).stem or "random")
    if before is not None and study.pretrained and not before.pretrained:
        parts.append("pretrained")
    if len(parts) > 1:
        yield preferred.with_name(_clean_name("-".join(parts)))
    for number in range(2, 3 + len(list(preferred.parent.glob(f"{_escape_glob(preferred.name)}-*")))):
        yield preferred.with_name(f"{preferred.name}-{number}")


def _escape_glob(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
