"""Backends, makers and file formats, found by name in Dyno's packages or in plug-ins."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path, PurePath
from typing import TypeVar

from dyno.worker import backends, makers, plugins
from dyno.worker.backend import Backend, FileFormat, Maker
from dyno.worker.spec import UserError, check_known

Kind = TypeVar("Kind", Backend, Maker, FileFormat)
PLUGIN_PACKAGES = (makers, backends)  # packages of Dyno's own plug-ins
ENTRY_POINT_GROUPS: dict[str, type] = {"dyno.backends": Backend, "dyno.makers": Maker, "dyno.formats": FileFormat}


def find(name: str) -> Backend:
    """Return the backend of that name, or the object at `module:NAME`.

    Raise a `UserError` with the nearest spelling for an unknown name.
    """
    if ":" in name:
        return _import_object(name, Backend, "backend")  # type: ignore[type-abstract]
    if name not in _load_backends():
        backend, _, precision = name.partition("/")
        if precision and backend in _load_backends():
            raise UserError(f"{name!r} is a backend and a precision; give --backend {backend} --precision {precision}")
        check_known("backend", name, list_backends())
    return _load_backends()[name]


def list_backends() -> list[str]:
    """Return the names of the offered backends, in alphabetical order."""
    return sorted(name for name, backend in _load_backends().items() if backend.offered)


def get_maker(name: str) -> Maker:
    """Return the maker of that name, or the object at `module:NAME`."""
    if ":" in name:
        return _import_object(name, Maker, "maker")  # type: ignore[type-abstract]
    check_known("maker", name, _load_makers())
    return _load_makers()[name]


@cache
def list_formats() -> dict[str, FileFormat]:
    """Return all file formats by name."""
    return plugins.list_declared(PLUGIN_PACKAGES, FileFormat, "dyno.formats")  # type: ignore[type-abstract]


def format_of(path: str | PurePath) -> FileFormat | None:
    """Return the format of the model file by its suffix and, if needed, its content; else None."""
    formats = () if str(path).startswith("saved:") else list_formats().values()
    candidates = (file_format for file_format in formats if str(path).endswith(file_format.suffixes))
    return next((file_format for file_format in candidates if file_format.fits(Path(path))), None)


def list_suffixes() -> tuple[str, ...]:
    """Return the suffixes of model files."""
    return tuple(suffix for file_format in list_formats().values() for suffix in file_format.suffixes)


@cache
def _load_backends() -> dict[str, Backend]:
    return plugins.list_declared(PLUGIN_PACKAGES, Backend, "dyno.backends")  # type: ignore[type-abstract]


@cache
def _load_makers() -> dict[str, Maker]:
    return plugins.list_declared(PLUGIN_PACKAGES, Maker, "dyno.makers")  # type: ignore[type-abstract]


def _import_object(name: str, kind: type[Kind], noun: str) -> Kind:
    """Return the object at `module:NAME`, or an instance if it is a class."""
    module, _, attribute = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute)
        value = value() if isinstance(value, type) else value
    except Exception as e:  # foreign code may raise anything
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise UserError(f"{noun} {name!r} can't be loaded: {reason}") from e
    if not isinstance(value, kind):
        raise UserError(f"{noun} {name!r} is not a {kind.__module__}.{kind.__name__}")
    return value
