"""Objects declared once and found by name: at the top of a package's modules, or by another package's entry points."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib import metadata

Declared = TypeVar("Declared")


def list_declared(
    places: ModuleType | tuple[ModuleType | str, ...], kind: type[Declared], group: str = ""
) -> dict[str, Declared]:
    """Return objects by name: instances of `kind` at the top of modules, then a group's entry points, if given.

    A place is a package (with all modules) or the name of a module. A place wins over an entry point of the same name.
    Entry points that can't be loaded, or give another kind of object, are left out; `list_broken` names them.
    """
    objects: dict[str, Declared] = {}
    for place in places if isinstance(places, tuple) else (places,):
        for module in [importlib.import_module(place)] if isinstance(place, str) else _import_modules(place):
            objects |= {value.name: value for value in vars(module).values() if isinstance(value, kind)}  # type: ignore[attr-defined]
    values = _load_group(group).values() if group else ()
    plugins = {value.name: value for value in values if isinstance(value, kind)}  # type: ignore[attr-defined]
    return {**plugins, **objects}


def _import_modules(package: ModuleType) -> list[ModuleType]:
    return [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]


def list_broken(group: str, kind: type) -> dict[str, str]:
    """Return the entry points that give no object of `kind`, each with the reason in one line."""
    return {
        name: value if isinstance(value, str) else f"is {type(value).__name__}, not {kind.__name__}"
        for name, value in _load_group(group).items()
        if not isinstance(value, kind)
    }


@cache
def _load_group(group: str) -> dict[str, object]:
    """Load each entry point of the group; a text with the reason stands for a failed import."""
    return {point.name: _load_object(point) for point in _read_entry_points().select(group=group)}


@cache
def _read_entry_points() -> Any:
    """Return `EntryPoints` of all groups (in Python 3.10 `SelectableGroups`).

    A search for a single group reads all distributions as well.
    """
    from importlib import metadata  # slow to import, and unused by `dyno --help`

    return metadata.entry_points()


def _load_object(point: metadata.EntryPoint) -> object:
    try:
        return point.load()
    except Exception as e:  # foreign code may raise anything
        return f"can't be loaded: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
