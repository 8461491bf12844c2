"""Objects that are declared once and found by name: at the top of a package's modules, or by another's entry points."""

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
    """Return objects by name: instances of `kind` at the top of modules, then the entry points of a group, if any.

    A place is a package, of which every module counts, or the name of a module. What a place declares wins over an
    entry point of the same name. An entry point that can't be loaded, or that gives another kind of object, is left out
    here and named by `list_broken`.
    """
    own: dict[str, Declared] = {}
    for place in places if isinstance(places, tuple) else (places,):
        for module in [importlib.import_module(place)] if isinstance(place, str) else _import_modules(place):
            own |= {value.name: value for value in vars(module).values() if isinstance(value, kind)}  # type: ignore[attr-defined]
    loaded = _load_group(group).values() if group else ()
    others = {value.name: value for value in loaded if isinstance(value, kind)}  # type: ignore[attr-defined]
    return {**others, **own}


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
    """Load each entry point of the group; the reason, as text, stands for one that can't be loaded."""
    return {point.name: _load_object(point) for point in _read_entry_points().select(group=group)}


@cache
def _read_entry_points() -> Any:
    """Return `EntryPoints` of every group (in Python 3.10 `SelectableGroups`).

    Finding a single group reads all distributions.
    """
    from importlib import metadata  # slow to import, and `dyno --help` asks for nothing

    return metadata.entry_points()


def _load_object(point: metadata.EntryPoint) -> object:
    try:
        return point.load()
    except Exception as e:  # someone else's code: whatever it raises is what is wrong with it
        return f"can't be loaded: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
