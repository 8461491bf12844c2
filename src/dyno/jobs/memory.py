"""How much memory new processes can take."""

from __future__ import annotations

from pathlib import Path

import psutil

ROOM = 1.5  # times what the largest process took, that have to be free before another one is started
UNKNOWN_B = 1 << 30  # what a process is taken to need before any was seen


def available() -> int:
    """Return the bytes that new processes can take: those of the machine, or the rest of the container's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
