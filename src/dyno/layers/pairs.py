"""Two forms of a model with the times of their layers, measured in several processes each, and stored in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.layers.align import FormSet
from dyno.layers.times import LaunchTimes, Times
from dyno.worker.facts.job import LayerGraph
from dyno.worker.record import check_schema, read_json, write_json
from dyno.worker.spec import SCHEMA, UserError, from_json, to_json

PAIRS_DIR, ID_SEPARATOR = "explained", "--"  # a run's folder of pairs; separator of the trials' ids
FILE_KIND = "explained pair"  # kind of content, stored in the file
NS_PER_S = 1e9
NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class PairSide:
    """One side of a pair: the indices of its form, graph and module (None: there is none), its requested precision, and
    its times by process. `stored` is its median latency in the run, in seconds (None: not from a run)."""

    form: int
    precision: str
    processes: tuple[Times, ...]
    graph: int | None = None
    module: int | None = None
    stored: float | None = None


@dataclass(frozen=True)
class FormPair:
    """A and B; `forms` also holds the graphs through which their layers are aligned.

    `source` is the user's name of the model, `notes` are sentences on the measurement.
    """

    forms: tuple[LayerGraph, ...]
    a: PairSide
    b: PairSide
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[PairSide, PairSide]:
        """A and B."""
        return self.a, self.b

    @property
    def titles(self) -> tuple[str, str]:
        """Titles of A and B."""
        return self.forms[self.a.form].library, self.forms[self.b.form].library

    @property
    def form_set(self) -> FormSet:
        """The forms, with the graphs and modules of both sides."""
        graph_of = {side.form: side.graph for side in self.sides if side.graph is not None}
        module_of = {side.form: side.module for side in self.sides if side.module is not None}
        return FormSet(self.forms, graph_of, module_of)


def name_file(folder: Path, a: str, b: str) -> Path:
    """Return the path in a run folder for the pair of the trials with these ids."""
    return folder / PAIRS_DIR / f"{a}{ID_SEPARATOR}{b}.json"


def list_stored_pairs(folder: Path) -> list[tuple[Path, str, str]]:
    """Return the pair files in a run folder, each with the ids of its two trials."""
    files = sorted((folder / PAIRS_DIR).glob(f"*{ID_SEPARATOR}*.json"))
    return [(file, *file.stem.split(ID_SEPARATOR, 1)) for file in files]  # type: ignore[misc]


def write_pair(path: Path, pair: FormPair) -> None:
    """Store the pair, with times rounded to the nanosecond."""
    content = {"schema": SCHEMA, "kind": FILE_KIND, "source": pair.source, "notes": list(pair.notes),
               "forms": to_json(pair.forms), "a": _convert_side(pair.a), "b": _convert_side(pair.b)}  # fmt: skip
    write_json(path, content)


def _convert_side(side: PairSide) -> dict[str, Any]:
    processes = []
    for times in side.processes:
        gpu = times.gpu and {**_list_nanoseconds(times.gpu, GPU_ARRAYS), "kernels": times.gpu.kernels.tolist()}
        content = {"warnings": list(times.warnings), **({"gpu": gpu} if gpu else {})}
        processes.append({**_list_nanoseconds(times, ARRAY_NAMES), **content})
    return {**to_json(replace(side, processes=())), "processes": processes}


def _list_nanoseconds(times: Times | LaunchTimes, names: Sequence[str]) -> dict[str, Any]:
    return {name: np.rint(NS_PER_S * getattr(times, name)).astype(int).tolist() for name in names}


MAX_LATENCY_S = 1e6  # upper limit of a valid inference time
ARRAY_NAMES = ("unprofiled", "profiled", "layers")
GPU_ARRAYS = ("latency", "enqueue", "busy", "calls")


def read_pair(path: Path) -> FormPair:
    """Read a stored pair; raise `UserError` for a file without one or a damaged file."""
    data = read_json(path)
    if data.get("kind") != FILE_KIND:
        raise UserError(f"{path} holds no explained pair; `dyno explain MODEL A B --save FILE.json` writes one")
    check_schema(path, data)
    try:
        forms = tuple(from_json(LayerGraph, content) for content in data["forms"])
        pair = FormPair(forms, _read_side(data["a"]), _read_side(data["b"]), data["source"], tuple(data["notes"]))
        problem = _find_problem(pair)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as e:
        raise UserError(f"{path} is damaged: it isn't in Dyno's format; measure the pair again") from e
    if problem:
        raise UserError(f"{path} is damaged: {problem}; measure the pair again")
    return pair


def _read_side(data: Mapping[str, Any]) -> PairSide:
    processes = []
    for entry in data["processes"]:
        gpu = entry.get("gpu")  # None: on a CPU, or in a file of an older version
        launches = LaunchTimes(**_read_seconds(gpu, GPU_ARRAYS), kernels=np.array(gpu["kernels"])) if gpu else None
        processes.append(Times(**_read_seconds(entry, ARRAY_NAMES), warnings=tuple(entry["warnings"]), gpu=launches))
    return PairSide(**{**data, "processes": tuple(processes)})


def _read_seconds(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: np.array(data[name], float) / NS_PER_S for name in names}


def _find_problem(pair: FormPair) -> str:
    """Describe a mismatch of times and layers; "" without one. Raise IndexError for a missing form."""
    for side in pair.sides:
        layer_count = len(pair.forms[side.form].layers)
        if not side.processes or any(times.layers.shape[1:] != (layer_count,) for times in side.processes):
            return f"it has {layer_count} layers, but a different number of times"
        for times in side.processes:
            is_whole = (
                times.unprofiled.ndim == times.profiled.ndim == 1 and len(times.unprofiled) and len(times.profiled)
            )
            if not is_whole or not all(
                ((a >= 0) & (a < MAX_LATENCY_S)).all() for a in (getattr(times, n) for n in ARRAY_NAMES)
            ):
                return f"its times must be from 0 to {MAX_LATENCY_S:g} s"
        for index in (side.graph, side.module):
            if index is not None:
                pair.forms[index]
    return ""


def list_pair_warnings(side: PairSide) -> list[str]:
    """Return the warnings of the side's processes, with the number of processes per warning.

    Warnings that differ only in numbers are listed once.
    """
    groups: dict[str, list[str]] = {}
    for times in side.processes:
        for warning in times.warnings:
            groups.setdefault(NUMBER.sub("", warning), []).append(warning)
    count = len(side.processes)
    return [group[0] if count == 1 else f"{group[0]} ({len(group)} of {count} processes)" for group in groups.values()]
