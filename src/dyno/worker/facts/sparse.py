"""Records of which only the set fields are stored, and which a plug-in may add to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

S = TypeVar("S", bound="Sparse")


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Stored without the fields that are at their default.

    `other` is what a plug-in's backend or maker adds under names of its own: in JSON its keys are among the fields; a
    key without a field is read into it.
    """

    other: dict[str, Any] = field(default_factory=dict)

    def set_fields(self, names: Iterable[str] = ()) -> dict[str, Any]:
        """Return the fields that aren't at their default, `other` included; with `names`, only these."""
        chosen, cls = set(names), cast(Any, type(self))
        return {
            name: value
            for name, default in defaults(cls).items()
            if (not chosen or name in chosen) and (value := getattr(self, name)) != default
        }

    def joined(self: S, later: Sparse) -> S:
        """Return this record, updated by the set fields of `later`, which has the same fields or fewer."""
        return replace(self, **{**later.set_fields(), "other": {**self.other, **later.other}})


@lru_cache(maxsize=64)
def defaults(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass in which every field has one."""
    blank = kind()
    return {f.name: getattr(blank, f.name) for f in fields(kind)}
