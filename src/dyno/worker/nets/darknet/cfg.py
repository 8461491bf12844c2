"""Darknet's .cfg files: sections of options, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dyno.worker.spec import UserError

Value = TypeVar("Value", int, float)
MOST_SECTIONS = 1_000
MOST_BYTES = 1 << 20
NETWORK = ("net", "network")


@dataclass
class CfgSection:
    """`[kind]` and its options as text; `line` is where it begins, counted from 1, in the file `path`."""

    kind: str
    path: str
    line: int
    options: dict[str, str] = field(default_factory=dict)

    def error(self, text: str) -> UserError:
        """Return an error that names the place."""
        return UserError(f"{self.path}, [{self.kind}] in line {self.line}: {text}")

    def text(self, name: str, default: str = "") -> str:
        """Return an option, or its default if it isn't set."""
        return self.options.get(name, default)

    def number(self, name: str, default: int | None = None, least: int = 0, most: int = 1 << 16) -> int:
        """Return an option as a whole number.

        Raises an error if it is missing without a default, no number, or beyond the limits.
        """
        return self._read_number(name, default, int, least, most)

    def real(self, name: str, default: float) -> float:
        """Return an option as a number."""
        return self._read_number(name, default, float, -1e9, 1e9)

    def numbers(self, name: str) -> list[int]:
        """Return an option's whole numbers, separated by commas; [] if it isn't set."""
        return self._read_list(name, int)

    def reals(self, name: str) -> list[float]:
        """Return an option's numbers, separated by commas; [] if it isn't set."""
        return self._read_list(name, float)

    def _read_number(
        self, name: str, default: Value | None, read: Callable[[str], Value], least: float, most: float
    ) -> Value:
        text = self.options.get(name)
        if text is None:
            if default is None:
                raise self.error(f"{name} is missing")
            return default
        value = self._parse_value(name, text, read)
        if not least <= value <= most:
            raise self.error(f"{name}={text} must be between {least:g} and {most:g}")
        return value

    def _read_list(self, name: str, read: Callable[[str], Value]) -> list[Value]:
        parts = [part.strip() for part in self.text(name).split(",")]
        return [self._parse_value(name, part, read) for part in parts if part]

    def _parse_value(self, name: str, text: str, read: Callable[[str], Value]) -> Value:
        try:
            return read(text)
        except (ValueError, OverflowError):
            raise self.error(f"{name}={text[:40]} is not a number") from None


def read(path: str) -> list[CfgSection]:
    """Read the sections of the file, `[net]` first; raise a `UserError` for a file that isn't Darknet's."""
    file = Path(path)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is larger than any architecture; give Darknet's .cfg")
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} can't be read: {e}; give Darknet's .cfg") from e
    sections: list[CfgSection] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].split(";")[0].strip()
        if text.startswith("[") and text.endswith("]"):
            sections.append(CfgSection(text[1:-1].strip(), path, number))
        elif text:
            name, equals, value = text.partition("=")
            if not equals or not sections:
                raise UserError(f"{path}, line {number}: {text[:60]!r} is neither [SECTION] nor NAME=VALUE")
            sections[-1].options[name.strip()] = value.strip()
    if not sections or sections[0].kind not in NETWORK:
        raise UserError(f"{path} doesn't begin with [net], so it is not a network of Darknet's")
    if not 1 < len(sections) <= MOST_SECTIONS:
        raise UserError(f"{path} has {len(sections) - 1} layers; it must have between 1 and {MOST_SECTIONS - 1}")
    return sections
