"""Checks of the values of a backend's options, which a backend declares by name and planning runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from dyno.worker.spec import Option, UserError

LARGEST = 2**31
Check = Callable[[Option], str]  # "" for a valid value, else a description of valid ones


def one_of(*names: str) -> Check:
    """One of these words."""

    def check(value: Option) -> str:
        if value in names:
            return ""
        similar = difflib.get_close_matches(str(value), names, 1)
        return f"one of {', '.join(names)}" + (f"; did you mean {similar[0]}?" if similar else "")

    return check


def flag(value: Option) -> str:
    """True or false."""
    return "" if isinstance(value, bool) else "true or false"


def whole(least: int, most: int | None = None) -> Check:
    """A whole number in that range."""

    def check(value: Option) -> str:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and value in range(least, LARGEST if most is None else most + 1):
            return ""
        return f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    return check


def number(least: float, most: float) -> Check:
    """Any number in that range."""

    def check(value: Option) -> str:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        return "" if fits else f"a number from {least:g} to {most:g}"

    return check


def check_values(backend: str, options: Mapping[str, Option], checks: Mapping[str, Check]) -> None:
    """A `UserError` with the option, its value and what it must be."""
    for name, value in options.items():
        if name in checks and (expected := checks[name](value)):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{name}={shown}: {backend}'s {name} must be {expected}")
