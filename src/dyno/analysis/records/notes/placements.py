"""Where the blocks of a study were measured, and what its devices did alone and beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dyno.analysis.records.shapes import DEVICES_MEASURED, PLACEMENT
from dyno.analysis.records.stored import read_table

PLACEMENTS, DEVICES = "placements", "devices.json"  # in a run folder


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


@dataclass(frozen=True)
class Device:
    """A device with the median latencies of the rounds of the study's anchor trial there, in seconds."""

    place: str
    card: str
    alone: tuple[float, ...]
    beside: tuple[float, ...]


@dataclass(frozen=True)
class Devices:
    """The devices of a study, the trial that all repeated, and whether blocks were measured side by side."""

    anchor: str
    side_by_side: bool
    devices: tuple[Device, ...]


def placements(run: Path, problems: list[str]) -> dict[str, Placement]:
    """Where each trial was measured, by its id; empty for a study on one device."""
    found: dict[str, Placement] = {}
    for path in sorted((run / PLACEMENTS).glob("*.json")):
        if note := read_table(path, problems, PLACEMENT):
            one = Placement(note.get("place", ""), note.get("card", ""), tuple(note.get("lost", ())))
            found |= dict.fromkeys(note.get("trials", ()), one)
    return found


def devices(run: Path) -> Devices | None:
    """What the anchor trial measured; None for a study on one device."""
    stored = read_table(run / DEVICES, [], DEVICES_MEASURED)
    if stored is None:
        return None
    rows = [
        Device(d.get("place", ""), d.get("card", ""), tuple(d.get("alone", ())), tuple(d.get("beside", ())))
        for d in stored.get("devices", ())
    ]
    return Devices(stored.get("anchor", ""), stored.get("side_by_side", False), tuple(rows))
