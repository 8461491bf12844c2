"""Sentences on a study's devices: how much they differ, and whether they were used in parallel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from dyno.analysis import stats
from dyno.analysis.records.notes.devices import AnchorDevices, center, devices, percent_slower
from dyno.analysis.records.results import Results
from dyno.analysis.verdict.findings import NOTE, Finding


def findings(results: Results) -> Iterator[Finding]:
    """Yield a sentence on the devices' difference and one on their parallel use; none for a study on one device."""
    found = devices(results.folder)
    if found is None:
        return
    if difference := _describe_difference(found):
        yield Finding(NOTE, difference)
    yield Finding(NOTE, _describe_company(found))


def _describe_difference(found: AnchorDevices) -> str:
    """Describe how far the slowest device is from the fastest, by the anchor trial alone on each."""
    if found.extremes is None:
        return ""
    fastest, slowest, real = found.extremes
    percent = 100 * (center(slowest) / center(fastest) - 1)
    noise = "" if real else "; that is within the noise of its rounds"
    names = f"{slowest.place} is the slowest, {fastest.place} the fastest"
    return f"Cards differ by {percent:.2g} % ({found.anchor}, repeated on each: {names}{noise})."


def _describe_company(found: AnchorDevices) -> str:
    """Describe whether devices worked side by side, and how much slower that was than each device alone."""
    if not found.side_by_side:
        by = f" ({found.anchor}: {_format_slowdowns(found.disturbed)})" if found.disturbed else ""
        return f"Blocks were measured one at a time where devices were slower beside each other than alone{by}."
    if found.devices and not found.speedups:
        return "Devices worked side by side: each is on a different host."
    certain = {place: one for place, one in found.speedups.items() if one.verdict == stats.SLOWER}
    if certain:
        equal = f"up to {found.equivalent:g} % count as equal"
        each = f"{found.anchor}: {_format_slowdowns(certain)}"
        return f"Devices worked side by side: they were hardly slower so than alone ({each}; {equal})."
    worst = min((one.low for one in found.speedups.values()), default=math.nan)
    bound = f" (by less than {percent_slower(worst):.2g} %, with 95 % confidence)" if 0.5 < worst < 1 else ""
    return f"Devices worked side by side: none was measurably slower so than alone{bound}."


def _format_slowdowns(speedups: Mapping[str, stats.Speedup]) -> str:
    return ", ".join(f"{place} by {percent_slower(one.value):.2g} %" for place, one in speedups.items())
