"""Checks of options' values: a backend's, declared by name and run in planning, and a dataclass's fields, by type."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from dyno.worker.spec import Option, UserError

INTEGER_LIMIT = 2**31
MAX_NUMBER = 1e9  # seconds, minutes and percent
MAX_EXACT_INTEGER = 2**53  # largest exact integer of JSON and tables
MAX_SHOWN_LENGTH = 80  # characters of a value in a message
TYPE_WORDS: dict[Any, str] = {
    str: "text", Path: "a path", int: "a whole number", float: "a number", bool: "true or false", Any: "any value",
}  # fmt: skip
Check = Callable[[Option], str]  # "" for a valid value, else the requirement


def option(default: Any, help: str, usual: str = "", *, flags: str | None = "", common: bool = False) -> Any:
    """Return a dataclass's field with its help; a required field if the default is MISSING.

    `usual` describes the default. `flags` are the names on the command line, the help's first ("": the field's name;
    None: not on the command line). `common` options appear in a command's short help.
    """
    metadata = {"help": help, "flags": flags, "usual": usual, "common": common}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*values: Option) -> Check:
    """Return a check for membership in these words or numbers."""
    names = [str(value) for value in values]

    def check_word(value: Option) -> str:
        if value in values:
            return ""
        similar = difflib.get_close_matches(str(value), names, 1)
        return f"one of {', '.join(names)}" + (f"; did you mean {similar[0]}?" if similar else "")

    return check_word


def flag(value: Option) -> str:
    """Check for true or false."""
    return "" if isinstance(value, bool) else "true or false"


def whole(minimum: int, maximum: int | None = None) -> Check:
    """Return a check for a whole number in that range."""

    def check_whole(value: Option) -> str:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and value in range(minimum, INTEGER_LIMIT if maximum is None else maximum + 1):
            return ""
        return (
            f"a whole number of at least {minimum}"
            if maximum is None
            else f"a whole number from {minimum} to {maximum}"
        )

    return check_whole


def number(minimum: float, maximum: float) -> Check:
    """Return a check for any number in that range."""

    def check_number(value: Option) -> str:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value <= maximum
        return "" if fits else f"a number from {minimum:g} to {maximum:g}"

    return check_number


def check_values(backend: str, options: Mapping[str, Option], checks: Mapping[str, Check]) -> None:
    """Raise a `UserError` for an invalid value, with the option, the value and the requirement."""
    for name, value in options.items():
        if name in checks and (expected := checks[name](value)):
            value_text = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{name}={value_text}: {backend}'s {name} must be {expected}")


def settle(options: Any) -> None:
    """Convert the fields of a frozen dataclass to plain values, and single values of tuple fields to tuples.

    Raise a `UserError` for a value of another type.
    """
    hints = typing.get_type_hints(type(options))
    for name, value in list(vars(options).items()):
        item = native(value)
        object.__setattr__(options, name, several(item) if typing.get_origin(hints[name]) is tuple else item)
    check_types(vars(options), hints)


def several(value: Any) -> tuple[Any, ...]:
    """Return the values as a tuple; a single value becomes a tuple of one."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else (value,)


def native(value: Any) -> Any:
    """Return the value in a form that a study file can store.

    Paths become text, and NumPy's numbers Python's: their `repr` isn't TOML.
    """
    if isinstance(value, dict):
        return {key: native(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(native, value))
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def check_types(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a value outside its annotation, or an integer above `MAX_EXACT_INTEGER`."""
    for name, value in values.items():
        if name in kinds and not _is_of_type(value, kinds[name]):
            raise UserError(f"{name} is {_format_value(value)}; it must be {_describe_kind(kinds[name])}")
        if name in kinds and any(abs(number) > MAX_EXACT_INTEGER for number in _whole_numbers(value)):
            raise UserError(f"{name} is {_format_value(value)}; it must be at most {MAX_EXACT_INTEGER:,}")


def check_range(name: str, value: float, minimum: float, maximum: float) -> None:
    """Raise a `UserError` for a number out of the range."""
    if not minimum <= value <= maximum:
        raise UserError(
            f"{name} is {value:,}; it must be "
            + (f"at least {minimum:,}" if value < minimum else f"at most {maximum:,}")
        )


def check_positive(name: str, value: float) -> None:
    """Raise a `UserError` for a number of seconds, minutes or percent that isn't positive or is absurd."""
    if not 0 < value <= MAX_NUMBER:
        raise UserError(f"{name} is {value}; it must be more than 0 and at most {MAX_NUMBER:,.0f}")


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers in a value, at any depth."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _whole_numbers(item)
    elif isinstance(value, dict):
        yield from _whole_numbers([*value.values()])


def at_least(minimum: int, kind: type = int, **values: Any) -> list[Any]:
    """Return the numbers as Python numbers; raise a `UserError` for another type or a value below `minimum`."""
    numbers = native(values)
    check_types(numbers, dict.fromkeys(numbers, kind))
    for name, value in numbers.items():
        if not value >= minimum:
            raise UserError(f"{name} is {value}; it must be at least {minimum}")
    return list(numbers.values())


def _is_of_type(value: Any, kind: Any) -> bool:
    """Return whether a value, perhaps from a TOML file, is of the annotated type."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return all(_is_of_type(item, args[0]) for item in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is_of_type(item, args[1]) for item in value.values())
    if args:
        return any(_is_of_type(value, arg) for arg in args)
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def _format_value(value: Any) -> str:
    """Return a short form of the value: a module's own text is pages long."""
    if isinstance(value, tuple):
        return ", ".join(map(_format_value, value))
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_LENGTH and "\n" not in text else f"a value of type {type(value).__name__}"


def _describe_kind(kind: Any) -> str:
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return f"{_describe_kind(args[0])}, or a list of such"
    if typing.get_origin(kind) is dict:
        return f"a table of: {_describe_kind(args[1])}"
    if args:
        return " or ".join(_describe_kind(arg) for arg in args if arg is not type(None))
    return TYPE_WORDS.get(kind) or f"of type {kind.__name__}"
