"""What is said of a study's devices: how far they differ, and whether they were used side by side."""

from __future__ import annotations

from collections.abc import Iterator

from dyno.analysis import stats
from dyno.analysis.records.notes.placements import Device, Devices, devices
from dyno.analysis.records.results import Results
from dyno.analysis.verdict.findings import NOTE, Finding


def findings(results: Results) -> Iterator[Finding]:
    """A sentence on the devices' difference and one on their company; none for a study on one device."""
    found = devices(results.folder)
    if found is None:
        return
    if difference := _difference(found):
        yield Finding(NOTE, difference)
    if found.side_by_side:
        yield Finding(NOTE, "Devices worked side by side: none was measurably slower so than alone.")
    else:
        yield Finding(NOTE, "Blocks were measured one at a time: devices beside each other were slower than alone.")


def _difference(found: Devices) -> str:
    """How far the slowest device is from the fastest, by the anchor trial alone on each."""
    timed = sorted((d for d in found.devices if d.alone), key=_center)
    if len(timed) < 2:
        return ""
    fastest, slowest = timed[0], timed[-1]
    percent = 100 * (_center(slowest) / _center(fastest) - 1)
    real = stats.speedup(fastest.alone, slowest.alone).verdict == stats.FASTER
    noise = "" if real else "; that is within the noise of its rounds"
    names = f"{slowest.place} is the slowest, {fastest.place} the fastest"
    return f"Cards differ by {percent:.2g} % ({found.anchor}, repeated on each: {names}{noise})."


def _center(device: Device) -> float:
    return stats.center(device.alone).value
