"""Notes stored next to a run's trials: devices, routes tried, trials with fewer rounds, and placements."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from dyno.results import stats
from dyno.results.files import read_stored
from dyno.worker.facts.json_values import Sparse
from dyno.worker.record import write_json
from dyno.worker.spec import SCHEMA, to_json


def _store(path: Path, note: Any) -> None:
    write_json(path, {"schema": SCHEMA, **to_json(note)})


# Facts about models from inspection.

MODELS_FILE = "models.json"


@dataclass(frozen=True, kw_only=True)
class ModelFacts(Sparse):
    """Facts of a model at a size, as far as known.

    Operations of one image, parameters, file name, shapes of inputs and outputs, whether image size and normalisation
    are guesses, and why the image preparation couldn't be checked.
    """

    model: str = ""
    size: str = ""
    flops: float = 0.0
    parameters: float = 0.0
    file: str = ""
    signature: tuple[tuple[tuple[int | str, ...], ...], ...] = ()
    preprocess_guessed: bool = False
    size_guessed: bool = False
    images_unchecked: str = ""


@dataclass(frozen=True)
class Models:
    """Content of models.json."""

    models: tuple[ModelFacts, ...] = ()


FactsBySize = dict[tuple[str, str], ModelFacts]


def read_models(run: Path, problems: list[str] | None = None) -> FactsBySize:
    """Read the facts of a run's models by name and size, in the order given by the user."""
    stored = read_stored(run / MODELS_FILE, Models, problems) or Models()
    return {(facts.model, facts.size): facts for facts in stored.models}


def store_models(run: Path, facts: Iterable[ModelFacts]) -> None:
    """Write the facts into a run folder, keeping facts of other models and sizes."""
    if new_facts := {(entry.model, entry.size): entry for entry in facts}:
        _store(run / MODELS_FILE, Models(tuple({**read_models(run), **new_facts}.values())))


# Measurements of the anchor trial, which all devices of a study repeat: differences and mutual slow-downs.


@dataclass(frozen=True)
class AnchorDevice:
    """A device with its anchor trial's measurements, one number per round.

    `alone` and `beside` are median latencies in seconds, without and with load on the host's other devices (`beside` is
    empty if there are none). If one process measured both interleaved, `ratios` are beside / alone.
    """

    place: str = ""
    card: str = ""
    alone: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class AnchorDevices:
    """Devices of a study and the anchor trial repeated on all of them.

    `equivalent` is the percent within which speeds count as equal, `side_by_side` whether blocks were measured in
    parallel, and `key` a hash of the request.
    """

    anchor: str = ""
    devices: tuple[AnchorDevice, ...] = ()
    equivalent: float = 100 * stats.Rule.margin
    side_by_side: bool = True
    key: str = ""

    @property
    def speedups(self) -> dict[str, stats.Speedup]:
        """Speed of each place beside the others relative to the place alone, judged as one family."""
        devices = [d for d in self.devices if d.beside or d.ratios]
        family = [
            stats.pair_evidence([-math.log(ratio) for ratio in d.ratios])
            if d.ratios
            else stats.collect_evidence(d.beside, d.alone)
            for d in devices
        ]
        rule = stats.Rule(self.equivalent / 100)
        return dict(zip((d.place for d in devices), stats.decide_family(family, rule), strict=True))

    @property
    def disturbed(self) -> dict[str, stats.Speedup]:
        """Places that are slower beside the others than alone, with certainty and beyond `equivalent`."""
        limit = -stats.Rule(self.equivalent / 100).reach
        return {
            place: speedup
            for place, speedup in self.speedups.items()
            if speedup.verdict == stats.SLOWER and math.log(speedup.value) < limit
        }

    @property
    def slower(self) -> str:
        """Slow-downs of the disturbed places, as text."""
        text = ", ".join(
            f"{place} is {percent_slower(speedup.value):.2g} % slower" for place, speedup in self.disturbed.items()
        )
        return f"{text} beside the other devices than alone"

    @property
    def extremes(self) -> tuple[AnchorDevice, AnchorDevice, bool] | None:
        """The fastest and the slowest device alone, and whether they differ beyond the spread between processes.

        All pairs are judged as one family; None with fewer than two measured devices.
        """
        devices = sorted((d for d in self.devices if d.alone), key=estimate_latency)
        pairs = [*combinations(devices, 2)]
        if not pairs:
            return None
        speedups = stats.decide_family([stats.collect_evidence(fast.alone, slow.alone) for fast, slow in pairs])
        return devices[0], devices[-1], speedups[pairs.index((devices[0], devices[-1]))].verdict == stats.FASTER


def percent_slower(speedup: float) -> float:
    """Return the slow-down in percent of a device with `speedup` times another's speed."""
    return 100 * (1 / speedup - 1)


def estimate_latency(device: AnchorDevice) -> float:
    """Return the device's latency alone, in seconds."""
    return stats.find_center(device.alone).value


def read_devices(run: Path) -> AnchorDevices | None:
    """Read the measurements of the anchor trial; None for a study on one device."""
    stored = read_stored(run / DEVICES_FILE, AnchorDevices)
    if stored is None:
        return None
    rows = (AnchorDevice(d.place, d.card, *map(_filter_numbers, (d.alone, d.beside, d.ratios))) for d in stored.devices)
    return replace(stored, devices=tuple(rows), equivalent=max(0.0, stored.equivalent))


def store_devices(run: Path, devices: AnchorDevices) -> None:
    """Write the measurements of the anchor trial."""
    _store(run / DEVICES_FILE, devices)


def _filter_numbers(values: Sequence[float]) -> tuple[float, ...]:
    """Return the values that can be medians or ratios."""
    return tuple(float(x) for x in values if math.isfinite(x) and x > 0)


# Alternative routes to the ONNX file, and their outcomes.

ROUTE_KEPT, ROUTE_SLOWER, ROUTE_NOT_FASTER = "kept", "slower than another", "not proven faster"
ROUTE_WRONG, ROUTE_FAILED = "other outputs", "failed"


@dataclass(frozen=True)
class RouteAttempt:
    """A route by name, with the usual route's latency over its own (0: not measured), outcome, and cause of failure."""

    route: str
    ratio: float
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Attempt:
    """Routes tried for a configuration of a model.

    `key` identifies the model's content, `configuration` is backend with options and precision, as in tables.
    """

    key: str
    model: str
    configuration: str
    batch: int
    routes: tuple[RouteAttempt, ...] = ()

    @property
    def kept_route(self) -> RouteAttempt | None:
        """The route with separate rows; None if the usual one is as good."""
        return next((route for route in self.routes if route.outcome == ROUTE_KEPT), None)


@dataclass(frozen=True)
class Attempts:
    """Content of routes.json."""

    attempts: tuple[Attempt, ...] = ()


def read_attempts(run: Path) -> tuple[Attempt, ...]:
    """Read the attempts in a run folder; empty if nothing was tried or the file is damaged."""
    return (read_stored(run / ROUTES_FILE, Attempts) or Attempts()).attempts


def store(run: Path, attempts: tuple[Attempt, ...]) -> None:
    """Write the attempts into a run folder."""
    _store(run / ROUTES_FILE, Attempts(attempts))


# Trials without further rounds, because time was short and a winner leads them clearly.


@dataclass(frozen=True)
class DroppedTrials:
    """Ids of trials without further rounds, and whether planned rounds were omitted for lack of time (`is_over`)."""

    trials: tuple[str, ...] = ()
    is_over: bool = False


def read_dropped(run: Path) -> DroppedTrials:
    """Read which trials were left out; empty if all were measured."""
    return read_stored(run / FEWER_ROUNDS_FILE, DroppedTrials) or DroppedTrials()


def store_dropped(run: Path, ids: Collection[str], *, is_over: bool = False) -> None:
    """Write the ids of trials without further rounds, and whether time was over for all."""
    _store(run / FEWER_ROUNDS_FILE, DroppedTrials(tuple(sorted(ids)), is_over))


# Placements of a study's blocks on devices.

PLACEMENTS_DIR = "placements"  # subfolder of a run folder


@dataclass(frozen=True)
class Placement:
    """Placement of a block: device name (`cuda:1`), card, host, trials, and places that lost its process, with reasons.

    `done` is a hash of the request once the block has ended.
    """

    block: str = ""
    place: str = ""
    card: str = ""
    host: str = ""
    trials: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    done: str = ""

    @property
    def warnings(self) -> list[str]:
        """Warnings on the placement for a row of the block."""
        return [f"restarted on {self.place}, as its process was lost on {lost}" for lost in self.lost]


def list_placements(run: Path, problems: list[str] | None = None) -> list[Placement]:
    """Read the placements of a run's blocks; empty for a study on one device."""
    placements = (read_stored(path, Placement, problems) for path in sorted((run / PLACEMENTS_DIR).glob("*.json")))
    return [placement for placement in placements if placement]


def read_placement(run: Path, block: str) -> Placement | None:
    """Read the placement of the block with that id; None before it begins."""
    return read_stored(run / PLACEMENTS_DIR / f"{block}.json", Placement)


def store_placement(run: Path, block: str, placement: Placement) -> None:
    """Write the placement of the block with that id."""
    (run / PLACEMENTS_DIR).mkdir(exist_ok=True)
    _store(run / PLACEMENTS_DIR / f"{block}.json", placement)


# Note types by file.

DEVICES_FILE, ROUTES_FILE, FEWER_ROUNDS_FILE = "devices.json", "routes.json", "fewer-rounds.json"
NOTE_TYPES: dict[str, type] = {DEVICES_FILE: AnchorDevices, ROUTES_FILE: Attempts, FEWER_ROUNDS_FILE: DroppedTrials}
