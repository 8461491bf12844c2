"""What the value of each TensorRT option may be, for planning to check by name."""

from __future__ import annotations

import dataclasses
import re

from dyno.worker.backends.tensor_rt.profiles import batch_range
from dyno.worker.backends.tensor_rt.settings import CALIBRATORS, NAMES, ROUTES, STATIC, Settings
from dyno.worker.option_values import Check, flag, whole
from dyno.worker.spec import Option, UserError

SHAPES = re.compile(r".+:\d[\dx,]*")  # NAME:MIN,OPT,MAX, perhaps of several inputs


def _make_check(name: str) -> Check:
    """Return a check of this option alone, with the complaint of `Settings.of`."""

    def check_value(value: Option) -> str:
        try:
            made = Settings.of({name: value})
            if name == "profile":
                for part in made.profile.split("|"):
                    if made.profile != STATIC and not batch_range(part) and not SHAPES.fullmatch(part):
                        return KINDS[name]
        except UserError as e:
            return KINDS.get(name) or str(e)
        return ""

    return check_value


KINDS = {
    "route": f"one of {', '.join(ROUTES)}",
    "calibrator": f"one of {', '.join(CALIBRATORS)}",
    "optimization": "a level from 0 to 5",
    "workspace_mb": "a size in MiB",
    "profile": f"{STATIC}, batches MIN:OPT:MAX such as 1:8:16, or NAME:MIN,OPT,MAX shapes",
    **{field.name: "true or false" for field in dataclasses.fields(Settings) if isinstance(field.default, bool)},
    "build": "a whole number",
}
VALUES: dict[str, Check] = {**{name: _make_check(name) for name in NAMES}, "graph": flag, "slots": whole(1)}
