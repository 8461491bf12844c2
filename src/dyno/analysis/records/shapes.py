"""What a stored job and models.json have to look like, as far as tables read them: a folder from elsewhere may hold
anything."""

from __future__ import annotations

from typing import Any

from dyno.worker.facts.json_values import LARGEST, fits

NUMBER = (int, float)
TRIAL = {
    "model": {"name": str, "source": str, "task": str, "precision": str}, "backend": str, "precision": str,
    "dims": {"batch": int, "height": int, "width": int}, "options": {"": (str, int, float, bool)},
    "runtime": {"device": str, "name": str, "python": str}, "data": {"name": str, "sha256": str, "folder": str},
    "plan": {
        "boundaries": [str], "rounds": int, "builds": int, "blocks": int, "min_samples": int, "max_samples": int,
        **dict.fromkeys(("warmup_s", "seconds", "interval", "timeout_s", "block_s"), NUMBER),
    },
    "recipe": {},
}  # fmt: skip
SETTINGS = {
    "budget": {"": NUMBER}, "reference": str, "equivalent": NUMBER, "rounds": int, "until": str, "sizes": [(str, int)],
}  # fmt: skip
JOB = {"trial": TRIAL, "round": int}
PLACEMENT = {"place": str, "card": str, "lost": [str], "trials": [str]}
TIMED = {"place": str, "card": str, "alone": [NUMBER], "beside": [NUMBER], "ratios": [NUMBER]}
DEVICES_MEASURED = {"anchor": str, "side_by_side": bool, "equivalent": NUMBER, "devices": [TIMED]}
ROUTE_TRIED = {"route": str, "ratio": NUMBER, "outcome": str, "reason": str}
ATTEMPT = {"key": str, "model": str, "configuration": str, "batch": int, "routes": [ROUTE_TRIED]}
ROUTES_TRIED = {"attempts": [ATTEMPT]}
MODELS = {
    "models": [
        {"model": str, "size": str, "flops": NUMBER, "parameters": NUMBER, "file": str, "preprocess_guessed": bool}
    ]
}


def wrong(data: Any, shape: Any, where: str = "") -> str:
    """Return the place where data has another type than its shape, or a number too large for a table; "" where it fits.

    Null is allowed, as is any key that the shape doesn't name.

    A shape is a type, a list with the shape of each item, or a table of shapes by key, "" for those of any key.
    """
    if data is None:
        return ""
    if isinstance(shape, dict):
        if not isinstance(data, dict):
            return where or "it"
        for key, item in data.items():
            expected = shape.get(key, shape.get(""))
            if expected is not None and (place := wrong(item, expected, key)):
                return place
        return ""
    if isinstance(shape, list):
        if not isinstance(data, list) or None in data:
            return where or "it"
        return next((place for item in data if (place := wrong(item, shape[0], where))), "")
    too_large = isinstance(data, int) and abs(data) >= LARGEST
    return where or "it" if too_large or not fits(data, shape) else ""
