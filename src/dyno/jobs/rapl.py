"""RAPL's counters of the processors' energy, below /sys/class/powercap; often root alone may read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Package:
    """One socket's counter: its file, where it starts again, its last value (all in uJ), and how often it started."""

    file: Path
    size: int
    last: int
    overflows: int = 0

    def joules(self) -> float:
        """Return the counter's value in joules, corrected for overflows, of which one may happen between two calls."""
        now = int(self.file.read_text())
        self.overflows += now < self.last
        self.last = now
        return 1e-6 * (now + self.overflows * self.size)


class Rapl:
    """The counters of all sockets together; memory is not in them, nor is a graphics card."""

    def __init__(self, packages: list[Package]) -> None:
        self._packages = packages

    def joules(self) -> float:
        """Return the joules since some moment in the past; NaN without a counter, or if one can no longer be read."""
        try:
            return sum(package.joules() for package in self._packages) if self._packages else math.nan
        except (OSError, ValueError):
            return math.nan


def find_rapl(root: Path | None = None) -> Rapl:
    """Find the sockets' counters that this process may read: all or none, because a part would pass for the whole.

    Processors of Intel and AMD have the same files.
    """
    try:
        zones = sorted((root or POWERCAP).glob("intel-rapl:*"))
        sockets = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
        return Rapl([_read_package(zone) for zone in sockets])
    except (OSError, ValueError):
        return Rapl([])


def _read_package(zone: Path) -> Package:
    file = zone / "energy_uj"
    return Package(file, int((zone / "max_energy_range_uj").read_text()), int(file.read_text()))
