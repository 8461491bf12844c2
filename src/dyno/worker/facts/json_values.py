"""Reading dataclasses from JSON, by their annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, TypeVar, Union, cast

# Records stored by their set fields, extensible by plug-ins

S = TypeVar("S", bound="Sparse")


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A record stored without the fields at their default.

    `other` has the additions of a plug-in's backend or maker under its own names: in JSON its keys stand among the
    fields, and a key without a field is read into it.
    """

    other: dict[str, Any] = field(default_factory=dict)

    def set_fields(self, names: Iterable[str] = ()) -> dict[str, Any]:
        """Return the fields that aren't at their default, including `other`; with `names`, only these."""
        selection, cls = set(names), cast(Any, type(self))
        return {
            name: value
            for name, default in read_defaults(cls).items()
            if (not selection or name in selection) and _differs(value := getattr(self, name), default)
        }

    def merge(self: S, update: Sparse) -> S:
        """Return this record, updated by the set fields of `update`, which has the same or fewer fields."""
        return replace(self, **{**update.set_fields(), "other": {**self.other, **update.other}})


def _differs(value: Any, default: Any) -> bool:
    """Return whether a value isn't the default; a NumPy value would be compared with each part of a tuple."""
    return (isinstance(default, tuple) and not isinstance(value, tuple)) or bool(value != default)


@lru_cache(maxsize=64)
def read_defaults(kind: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass with defaults for all fields."""
    instance = kind()
    return {f.name: getattr(instance, f.name) for f in fields(kind)}


INTEGER_LIMIT = 2**64  # limit of integers in arrays
EARLIER_NAME = "earlier name"  # metadata key of a field: its name in older records


class Misfit(Exception):
    """An error in a value, and its place, which grows while it propagates."""

    def __init__(self, message: str) -> None:
        self.what, self.place = message, ""


@lru_cache(maxsize=256)
def make_reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that reads JSON as the annotation `kind`: dataclass, tuple, dict, union or plain value.

    It is cached by kind: a run folder has thousands of records.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin in (Union, types.UnionType):
        members = [a for a in args if a is not type(None)]
        read = make_reader(members[0]) if len(members) == 1 else _plain_reader(tuple(members))
        return lambda data: None if data is None and len(members) < len(args) else read(data)
    if origin is tuple:
        return _tuple_reader(args)
    if origin is dict:
        return _dict_reader(make_reader(args[1]))
    if kind in (int, float):
        return _number_reader((float, int) if kind is float else int)
    return _plain_reader(object if kind is Any else kind)


def fits(data: Any, expected: Any) -> bool:
    """Return whether the data is of the type, or one of a tuple of types; booleans don't count as numbers."""
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return isinstance(data, kinds) and (not isinstance(data, bool) or bool in kinds or object in kinds)


def _plain_reader(expected: Any) -> Callable[[Any], Any]:
    def read_plain(data: Any) -> Any:
        if not fits(data, expected):
            raise Misfit(f" is of type {type(data).__name__}, which is wrong here")
        return data

    return read_plain


def _number_reader(expected: Any) -> Callable[[Any], Any]:
    check = _plain_reader(expected)

    def read_number(data: Any) -> Any:
        if isinstance(check(data), int) and abs(data) >= INTEGER_LIMIT:
            raise Misfit(" is larger than any number that is stored here")
        return data

    return read_number


def _tuple_reader(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    check, length = _plain_reader((list, tuple)), None if args[-1] is Ellipsis else len(args)
    read = make_reader(args[0])  # all values have one type

    def read_all(data: Any) -> Any:
        if length not in (None, len(check(data))):
            raise Misfit(f" has {len(data)} values, and not {length}")
        return tuple(map(read, data))

    return read_all


def _dict_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    check = _plain_reader(dict)

    def read_all(data: Any) -> Any:
        values = {}
        for key, item in check(data).items():
            try:
                values[key] = read(item)
            except Misfit as e:
                e.place = f".{key}{e.place}"
                raise
        return values

    return read_all


def _dataclass_reader(kind: Any) -> Callable[[Any], Any]:
    is_sparse, check = issubclass(kind, Sparse), _plain_reader(dict)
    names = [f.name for f in dataclasses.fields(kind) if not (is_sparse and f.name == "other")]
    current_names = {f.metadata[EARLIER_NAME]: f.name for f in dataclasses.fields(kind) if EARLIER_NAME in f.metadata}
    readers: dict[str, Callable[[Any], Any]] = {}

    def read_dataclass(data: Any) -> Any:
        if not readers:  # built on first use: a kind may contain itself
            hints = typing.get_type_hints(kind)
            readers.update({name: make_reader(hints[name]) for name in names})
        values, other = {}, {}
        for key, item in check(data).items():
            name = current_names.get(key, key)
            read_field = readers.get(name)
            if read_field is None:
                other[key] = item
                continue
            try:
                values[name] = read_field(item)
            except Misfit as e:
                e.place = f".{key}{e.place}"
                raise
        if other and not is_sparse:
            raise Misfit(f" has an unknown key {min(other)!r}; known keys: {', '.join(names)}")
        try:
            return kind(**values, **({"other": other} if other else {}))
        except TypeError as e:
            raise Misfit(f" is incomplete: {e}") from e

    return read_dataclass
