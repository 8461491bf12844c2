"""Notes that a run keeps beside its trials: devices, routes to ONNX that were tried, and trials with fewer rounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dyno.results import stats
from dyno.results.blocks import within
from dyno.results.files import DEVICES, FEWER_ROUNDS, NOTES, ROUTES, read_table
from dyno.worker.record import write_json
from dyno.worker.spec import SCHEMA, to_json


def _read(run: Path, name: str) -> dict[str, Any]:
    """Read a note; empty without one, and where it is damaged, which `load_run` reports."""
    return read_table(run / name, [], NOTES[name]) or {}


# What the trial that all devices of a study repeat measured: how they differ, and what they do to each other.


@dataclass(frozen=True)
class AnchorDevice:
    """A device with what the study's anchor trial measured there, a number for each round: its median latencies alone
    and beside the others of its host, in seconds (no `beside` where it has the host to itself), and, where it measured
    both in turns in one process, the `ratios` beside / alone.
    """

    place: str
    card: str
    alone: tuple[float, ...]
    beside: tuple[float, ...]
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class AnchorDevices:
    """The devices of a study, the trial that all repeated, the percent by which two speeds count as equal, and whether
    blocks were measured side by side."""

    anchor: str
    devices: tuple[AnchorDevice, ...]
    equivalent: float = 100 * stats.Rule.margin
    side_by_side: bool = True

    @property
    def speedups(self) -> dict[str, stats.Speedup]:
        """How many times as fast each place that has others beside it is so as alone, judged as one family."""
        timed = [d for d in self.devices if d.beside or d.ratios]
        family = [
            stats.paired([-math.log(ratio) for ratio in d.ratios]) if d.ratios else stats.unpaired(d.beside, d.alone)
            for d in timed
        ]
        rule = stats.Rule(self.equivalent / 100)
        return dict(zip((d.place for d in timed), stats.decide_family(family, rule), strict=True))

    @property
    def disturbed(self) -> dict[str, stats.Speedup]:
        """The places that are slower beside the others than alone, with certainty, and by more than counts as equal."""
        limit = -stats.Rule(self.equivalent / 100).reach
        return {
            place: found
            for place, found in self.speedups.items()
            if found.verdict == stats.SLOWER and math.log(found.value) < limit
        }

    @property
    def slower(self) -> str:
        """The disturbed places with by how much, in words."""
        each = ", ".join(
            f"{place} is {percent_slower(one.value):.2g} % slower" for place, one in self.disturbed.items()
        )
        return f"{each} beside the other devices than alone"

    @property
    def extremes(self) -> tuple[AnchorDevice, AnchorDevice, bool] | None:
        """The fastest and the slowest alone, and whether they differ beyond the spread between processes, of all pairs
        judged as one family; None where fewer than two were measured."""
        timed = sorted((d for d in self.devices if d.alone), key=center)
        pairs = [*combinations(timed, 2)]
        if not pairs:
            return None
        judged = stats.decide_family([stats.unpaired(fast.alone, slow.alone) for fast, slow in pairs])
        return timed[0], timed[-1], judged[pairs.index((timed[0], timed[-1]))].verdict == stats.FASTER


def percent_slower(speedup: float) -> float:
    """Return by how many percent a device with `speedup` times another's speed is slower than it."""
    return 100 * (1 / speedup - 1)


def center(device: AnchorDevice) -> float:
    """Return the device's latency alone, in seconds."""
    return stats.center(device.alone).value


def of_rounds(place: str, card: str, rounds: Sequence[tuple[Mapping[int, float], Sequence[int]]]) -> AnchorDevice:
    """Build the device from processes that measured in turns.

    Each has the median seconds of its blocks by number, and the number of devices that measured in each block, one or
    all. Two consecutive blocks are one of each kind.
    """
    alone, beside, ratios = [], [], []
    for medians, company in rounds:
        own = {number // 2: seconds for number, seconds in medians.items() if company[number] == 1}
        all_at_once = {number // 2: seconds for number, seconds in medians.items() if company[number] > 1}
        logs = within(all_at_once, own)
        if logs.size:  # else throttling left no pair
            alone.append(float(np.median([*own.values()])))
            beside.append(float(np.median([*all_at_once.values()])))
            ratios.append(math.exp(float(np.median(logs))))
    return AnchorDevice(place, card, tuple(alone), tuple(beside), tuple(ratios))


def devices(run: Path) -> AnchorDevices | None:
    """Read the measurements of the anchor trial; None for a study on one device."""
    stored = _read(run, DEVICES)
    if not stored:
        return None
    rows = [
        AnchorDevice(
            d.get("place") or "",
            d.get("card") or "",
            *(_filter_numbers(d.get(key)) for key in ("alone", "beside", "ratios")),
        )
        for d in stored.get("devices") or ()
    ]
    equivalent = stored.get("equivalent")
    return AnchorDevices(
        stored.get("anchor") or "",
        tuple(rows),
        AnchorDevices.equivalent if equivalent is None else max(0.0, equivalent),
        bool(stored.get("side_by_side")),
    )


def _filter_numbers(stored: Sequence[float] | None) -> tuple[float, ...]:
    """Return the values that can be medians or ratios."""
    return tuple(float(x) for x in stored or () if math.isfinite(x) and x > 0)


# Which routes to the ONNX file were tried beside the usual one, and what came of each.

KEPT, BEATEN, NOT_FASTER = "kept", "slower than another", "not proven faster"
WRONG, FAILED = "other outputs", "failed"


@dataclass(frozen=True)
class RouteAttempt:
    """A route by its name, the usual one's latency over its own (0: none was measured), what came of it, and why it
    failed."""

    route: str
    ratio: float
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Attempt:
    """The routes that were tried for a configuration of a model: `key` is of the model's content, `configuration` is
    the backend with its options and the precision, as in tables."""

    key: str
    model: str
    configuration: str
    batch: int
    routes: tuple[RouteAttempt, ...] = ()

    @property
    def kept(self) -> RouteAttempt | None:
        """The route with separate rows; None where the usual one is as good."""
        return next((one for one in self.routes if one.outcome == KEPT), None)


def attempts(run: Path) -> tuple[Attempt, ...]:
    """Read the attempts in a run folder; empty where nothing was tried, and where the file is damaged."""
    return tuple(map(_parse_attempt, _read(run, ROUTES).get("attempts") or ()))


def store(run: Path, attempts: tuple[Attempt, ...]) -> None:
    """Write the attempts into a run folder."""
    write_json(run / ROUTES, {"schema": SCHEMA, "attempts": [to_json(one) for one in attempts]})


def _parse_attempt(row: dict[str, Any]) -> Attempt:
    routes = (
        RouteAttempt(one.get("route", ""), one.get("ratio", 0.0), one.get("outcome", ""), one.get("reason", ""))
        for one in row.get("routes", ())
    )
    key, model, configuration = (row.get(name, "") for name in ("key", "model", "configuration"))
    return Attempt(key, model, configuration, row.get("batch", 0), tuple(routes))


# Which trials got no further rounds, because the time was short and a winner leads them clearly.


def read_dropped(run: Path) -> frozenset[str]:
    """Return the ids of the trials that further rounds left out; empty where all were measured."""
    return frozenset(_read(run, FEWER_ROUNDS).get("trials") or ())


def is_time_over(run: Path) -> bool:
    """Return whether planned rounds were not begun, because they would have taken longer than the study may."""
    return bool(_read(run, FEWER_ROUNDS).get("is_over"))


def store_dropped(run: Path, ids: Collection[str], *, is_over: bool = False) -> None:
    """Write the ids of the trials that further rounds leave out, and whether time was over for all."""
    write_json(run / FEWER_ROUNDS, {"schema": SCHEMA, "trials": sorted(ids), "is_over": is_over})
