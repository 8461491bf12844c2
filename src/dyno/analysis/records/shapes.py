"""What stored JSON has to look like, as far as tables read it: a folder from elsewhere may hold anything."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)
MEASUREMENT = {"tag": str, "value": NUMBER, "samples": str, "boundary": str, "clock": str}
ARTIFACT = {"made_by": {"warnings": [str]}, "bytes": NUMBER, "format": str, "path": str}
FACTS = {
    "timed": {"": [NUMBER]}, "calibration": {}, "notes": [str], "evaluation": {}, "options": {}, "data": {},
    "others_busy": {"": NUMBER}, "others_bearable": NUMBER, "peak": {"": {}}, "layers_by_type": {"": NUMBER},
    "slowest_layers": [{}], "nodes_by_provider": {}, "precision_truth": {}, "stress": {"": {}},
}  # fmt: skip
RECORD = {
    "status": str, "stage": str, "reason": str, "round": int, "seconds": NUMBER, "measurements": [MEASUREMENT],
    "warnings": [str], "system": {}, "facts": FACTS, "artifact": ARTIFACT,
}  # fmt: skip
TRIAL = {
    "model": {"name": str, "source": str, "task": str, "precision": str}, "backend": str, "precision": str,
    "dims": {"batch": int, "height": int, "width": int}, "options": {"": (str, int, float)},
    "runtime": {"device": str, "name": str, "python": str}, "data": {"name": str, "sha256": str, "folder": str},
    "plan": {"boundaries": [str], "seconds": NUMBER, "rounds": int}, "recipe": {},
}  # fmt: skip
JOB = {"trial": TRIAL, "artifact": ARTIFACT, "round": int}
MODELS = {"models": [{"model": str, "size": str, "flops": NUMBER, "parameters": NUMBER, "file": str}]}


def wrong(data: Any, shape: Any, where: str = "") -> str:
    """Where data has another type than its shape, "" where it fits; null and whatever the shape doesn't name may be.

    A shape is a type, a list with the shape of each item, or a table of shapes by key, "" for those of any key.
    """
    if data is None:
        return ""
    if isinstance(shape, dict):
        if not isinstance(data, dict):
            return where or "it"
        parts = ((key, item, shape.get(key, shape.get(""))) for key, item in data.items())
        return next((found for key, item, of in parts if of is not None and (found := wrong(item, of, key))), "")
    if isinstance(shape, list):
        if not isinstance(data, list):
            return where or "it"
        if None in data:
            return where or "it"
        return next((found for item in data if (found := wrong(item, shape[0], where))), "")
    return "" if isinstance(data, shape) else where or "it"
