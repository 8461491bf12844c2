"""Networks of torchvision and timm by their names, read from the libraries' code: importing one takes seconds."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NETWORK_LIBRARIES = ("torchvision", "timm")
# A function below the decorator that adds a network to its library, perhaps with other decorators in between.
REGISTERED = re.compile(r"^@register_model\b.*\n(?:@.*\n(?:[ )].*\n)*)*def (\w+)\(", re.M)


@cache
def list_names(library: str) -> frozenset[str]:
    """Return the names of the library's networks, none where it is not installed."""
    found = find_spec(library)
    if found is None or not found.origin:
        return frozenset()
    files = (Path(found.origin).parent / "models").rglob("*.py")
    return frozenset(name for file in files for name in REGISTERED.findall(file.read_text(encoding="utf-8")))


def find_libraries(name: str) -> list[str]:
    """Return the installed libraries that have a network of this name."""
    return [library for library in NETWORK_LIBRARIES if name in list_names(library)]
