"""Dyno, a dynamometer for inference engines: `Study(...).run()` measures, `load(folder)` reads what was measured.

This file is also imported inside workers, under other Pythons: it imports nothing until a name is asked for.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from dyno.api.evaluation import evaluate as evaluate
    from dyno.api.result import Result as Result
    from dyno.api.result import compare as compare
    from dyno.api.result import load as load
    from dyno.api.runnable import Study as Study
    from dyno.api.runnable import run as run
    from dyno.training.session import TrainingResult as TrainingResult
    from dyno.training.session import train as train
    from dyno.worker.spec import UserError as UserError

__version__ = "0.1.0"
__all__ = ["Result", "Study", "TrainingResult", "UserError", "compare", "evaluate", "load", "run", "train"]

_HOMES = {
    "Study": "dyno.api.runnable",
    "run": "dyno.api.runnable",
    "Result": "dyno.api.result",
    "UserError": "dyno.worker.spec",
    "compare": "dyno.api.result",
    "evaluate": "dyno.api.evaluation",
    "load": "dyno.api.result",
    "train": "dyno.training.session",
    "TrainingResult": "dyno.training.session",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dyno' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
