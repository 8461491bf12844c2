"""Where the blocks of a study were measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dyno.analysis.records.shapes import PLACEMENT
from dyno.analysis.records.stored import read_table

PLACEMENTS = "placements"  # in a run folder


@dataclass(frozen=True)
class Placement:
    """A block's device by name (`cuda:1`), its card, and the places whose process it lost, with the reasons."""

    place: str
    card: str
    lost: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What a row of the block has to say of it."""
        return [f"begun anew on {self.place}, as its process was lost on {lost}" for lost in self.lost]


def placements(run: Path, problems: list[str]) -> dict[str, Placement]:
    """Read the placement of each trial, by its id; empty for a study on one device."""
    found: dict[str, Placement] = {}
    for path in sorted((run / PLACEMENTS).glob("*.json")):
        if note := read_table(path, problems, PLACEMENT):
            one = Placement(note.get("place", ""), note.get("card", ""), tuple(note.get("lost", ())))
            found |= dict.fromkeys(note.get("trials", ()), one)
    return found
