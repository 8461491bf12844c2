"""Declared objects: those of a package's modules, and those that another distribution's entry points name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from dyno.worker import plugins

KINDS = """
from dataclasses import dataclass
@dataclass
class Colour:
    name: str
    by: str
"""


@dataclass
class Place:
    """A package of colours, and where distributions are installed."""

    package: ModuleType
    kind: type
    site: Path

    def install(self, name: str, entry_points: str, code: str) -> None:
        """A distribution as pip leaves one."""
        (self.site / f"{name}.py").write_text(code)
        info = self.site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[test.colours]\n{entry_points}\n")
        importlib.invalidate_caches()

    def names(self) -> dict[str, str]:
        return {name: colour.by for name, colour in plugins.declared(self.package, self.kind, "test.colours").items()}

    def broken(self) -> dict[str, str]:
        return plugins.broken("test.colours", self.kind)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    package = tmp_path / "colours"
    package.mkdir()
    (tmp_path / "colour_kind.py").write_text(KINDS)
    (package / "__init__.py").write_text("")
    (package / "warm.py").write_text("from colour_kind import Colour\nRED = Colour('red', 'own')\nOTHER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    for cached in ("_load_group", "_read_entry_points"):  # each test installs others
        monkeypatch.setattr(plugins, cached, getattr(plugins, cached).__wrapped__)
    kind = importlib.import_module("colour_kind").Colour
    yield Place(importlib.import_module("colours"), kind, tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] in ("colours", "colour_kind", "shop", "bad")]:
        del sys.modules[name]


def test_a_packages_own_objects_and_a_distributions(place: Place) -> None:
    place.install(
        "shop",
        "blue = shop:BLUE\nred = shop:RED",
        "from colour_kind import Colour\nBLUE = Colour('blue', 'shop')\nRED = Colour('red', 'shop')\n",
    )
    assert place.names() == {"red": "own", "blue": "shop"}
    assert not place.broken()


def test_what_cannot_be_loaded_hides_nothing_and_is_named(place: Place) -> None:
    place.install("bad", "gone = bad:GONE\nraises = bad.no_module:X\nnumber = bad:NUMBER", "NUMBER = 5\n")
    assert place.names() == {"red": "own"}
    reasons = place.broken()
    assert reasons.keys() == {"gone", "raises", "number"}
    assert "int" in reasons["number"] and "GONE" in reasons["gone"]
