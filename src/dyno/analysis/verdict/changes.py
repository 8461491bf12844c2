"""What else differs between two trials that are compared: facts that may explain their speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dyno.analysis.formatting import show
from dyno.analysis.metrics.precision import truth
from dyno.analysis.records.results import TrialResult

UNKNOWN = "unknown"  # of layers that can't be watched, as TorchScript's


def changes(a: TrialResult, b: TrialResult) -> list[str]:
    """Return each fact of the engine that differs in B, as `layers 41 to 44`: versions, types, layers, file size."""
    if not (a.good and b.good):
        return []
    before, after = dict(_list_facts(a)), dict(_list_facts(b))
    return [
        f"{name} {before.get(name, 'none')} to {after.get(name, 'none')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def _list_facts(t: TrialResult) -> Iterator[tuple[str, str]]:
    system: Mapping[str, Any] = t.good[0].record.system
    if python := system.get("python"):
        yield "Python", str(python)
    for name, version in (system.get("versions") or {}).items():
        yield str(name), str(version)
    if types := truth(t):
        yield "ran as", str(types) or UNKNOWN
    for name in ("layers", "parameters"):
        count = t.count(name)
        yield name, UNKNOWN if count is None else f"{count:,}"
    size = t.artifact.bytes if t.artifact else t.value("file_size")
    if size:
        yield "file size", show(float(size), "bytes")
    if t.facts.threads is not None:
        yield "threads", str(t.facts.threads)
