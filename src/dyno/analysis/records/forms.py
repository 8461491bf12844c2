"""Files of a run that are forms of one network, so that they belong into one table with one reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED = 3  # files that the name of their network lists
FILE = "file"  # the option that tells files apart
SAME_WORK = 0.01  # relative difference of counted operations within which two files may be the same network

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """What a file is among its network's files: the network's name, the file as tables show it, and its place.

    In a comparison the two sides are forms of one network, told apart by `option`.
    """

    network: str
    file: str
    place: int
    option: str = FILE


def sides(names: Mapping[str, str]) -> dict[str, Form]:
    """Return the form of each side of a comparison, by its letter; `names` are the models' by side."""
    network = " and ".join(dict.fromkeys(names[side] for side in sorted(names)))
    return {side: Form(network, side.upper(), place, "side") for place, side in enumerate(sorted(names))}


def forms(models: Mapping[tuple[str, str], Row]) -> dict[str, Form]:
    """Return the form of each file that has another of the same network beside it, by the model's name.

    `models` are the rows of models.json by name and size, in the order in which the files were given. Files count as
    one network when their inputs and outputs have the same number and shapes, under any names, and when the same number
    of operations was counted in each; their outputs decide whether they compute the same.
    """
    groups: list[list[str]] = []
    sized: dict[str, dict[str, Row]] = {}
    for (name, size), row in models.items():
        if row.get("signature"):
            sized.setdefault(name, {})[size] = row
    for name, rows in sized.items():
        same_network = next((group for group in groups if _is_alike(sized[group[0]], rows)), None)
        if same_network is None:
            groups.append([name])
        else:
            same_network.append(name)
    return {name: form for group in groups if len(group) > 1 for name, form in _make_forms(group, sized)}


def _make_forms(group: list[str], sized: Mapping[str, Mapping[str, Row]]) -> list[tuple[str, Form]]:
    files = {name: str(next(iter(sized[name].values())).get("file") or name) for name in group}
    counted = Counter(files.values())
    shown = {name: file if counted[file] == 1 else name for name, file in files.items()}
    stems = {Path(file).stem for file in files.values()}
    first = list(shown.values())
    listed = " and ".join(first) if len(first) <= NAMED else f"{first[0]} and {len(first) - 1} more"
    network = stems.pop() if len(stems) == 1 else listed
    return [(name, Form(network, shown[name], place)) for place, name in enumerate(group)]


def _is_alike(a: Mapping[str, Row], b: Mapping[str, Row]) -> bool:
    left, right = (next(iter(rows.values()))["signature"] for rows in (a, b))
    try:
        fits = all(_can_fit(x, y) for x, y in zip(left, right, strict=True))
    except (TypeError, ValueError):
        return False
    return fits and all(_same_work(a[size], b[size]) for size in a.keys() & b.keys())


def _can_fit(a: Any, b: Any) -> bool:
    """Return whether two lists of shapes may be of the same tensors: a dimension that is free fits any other."""
    return len(a) == len(b) and all(
        len(x) == len(y) and all(m == n or isinstance(m, str) or isinstance(n, str) for m, n in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


def _same_work(a: Row, b: Row) -> bool:
    left, right = float(a.get("flops") or 0), float(b.get("flops") or 0)
    return not (left and right) or abs(left - right) <= SAME_WORK * max(left, right)
