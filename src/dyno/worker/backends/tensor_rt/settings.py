"""The options of a trial that shape its engine: the values and the default of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dyno.worker.spec import Option, UserError

RUNNING = ("graph", "slots")  # options of the runner, which don't change the engine
ROUTES = ("auto", "graph", "flags", "calibrator")
CALIBRATORS = ("entropy", "minmax")
STATIC = "static"


@dataclass(frozen=True)
class Settings:
    """How an engine is built, with the defaults.

    `profile`: see `profiles`. `optimization` 0-5 is the builder's level, `workspace_mb` its scratch memory (0: all the
    GPU has), `tactics` its tactic sources joined by `+` ("": the default of TensorRT 10, `none`: none of them).
    `route` says where types come from: the graph, builder flags, or flags and a calibrator. `build` distinguishes
    builds with the same settings.
    """

    profile: str = STATIC
    optimization: int = 3
    workspace_mb: int = 0
    tactics: str = ""
    timing_cache: bool = True
    version_compatible: bool = False
    hardware_compatible: str = ""
    refit: bool = False
    weight_streaming: bool = False
    route: str = "auto"
    calibrator: str = "entropy"
    allow_mixed: bool = False
    build: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Option]) -> Settings:
        """Return the settings among a trial's or a recipe's options; raise a `UserError` for an invalid value."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in options:
                values[field.name] = _convert_value(field.name, options[field.name], field.default)
        settings = cls(**values)
        _check_choice("route", settings.route, ROUTES)
        _check_choice("calibrator", settings.calibrator, CALIBRATORS)
        if not 0 <= settings.optimization <= 5:
            raise UserError(f"optimization must be a level from 0 to 5, not {settings.optimization}")
        if settings.workspace_mb < 0:
            raise UserError(f"workspace_mb must be a size in MiB, not {settings.workspace_mb}")
        return settings

    def options(self) -> dict[str, Option]:
        """Return the settings that differ from the defaults, as options of a recipe."""
        defaults = Settings()
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(defaults, field.name)
        }


NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def _convert_value(name: str, value: Option, default: Any) -> Option:
    if name == "hardware_compatible" and isinstance(value, bool):
        return "ampere_plus" if value else ""
    if isinstance(default, str):
        return str(value)  # the command line reads `profile=8` as a number
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number"}[type(default)]
        raise UserError(f"{name} must be {kind}, not {value!r}")
    return value


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"unknown {name} {value!r}; known: {', '.join(choices)}")
