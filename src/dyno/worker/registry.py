"""Which backends there are, and how one is found: by its class's name among the files of `backends/` and `makers/`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dyno.worker import backends, makers
from dyno.worker.backend import Backend
from dyno.worker.spec import UserError, check_known


def find(name: str) -> Backend:
    """The backend of that name, or the class at `module:Class`; an unknown name is a `UserError` with the nearest."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)()
        except Exception as e:  # someone else's code: whatever it raises is what is wrong with it
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise UserError(f"backend {name!r} can't be loaded: {reason}") from e
        if not isinstance(made, Backend):
            raise UserError(f"backend {name!r} is not a dyno.worker.backend.Backend")
        return made
    if name not in _all():  # makers are found, but aren't named: nobody runs a model with one
        check_known("backend", name, names())
    return _all()[name]()


def names() -> list[str]:
    """Names of the backends that run models, in alphabetical order; scripted ones (`fake`) left out."""
    return sorted(name for name, cls in _all().items() if cls.runs and not name.startswith("fake"))


@lru_cache(maxsize=1)
def _all() -> dict[str, type[Backend]]:
    return {cls.name: cls for module in _modules() for cls in _classes(module)}


def _modules() -> Iterator[Any]:
    for room in (backends, makers):
        for info in pkgutil.iter_modules(room.__path__):
            yield importlib.import_module(f"{room.__name__}.{info.name}")


def _classes(module: Any) -> Iterator[type[Backend]]:
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, Backend) and cls.name and cls.__module__.startswith(module.__name__):
            yield cls
