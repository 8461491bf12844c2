"""`dyno build --repeat`: the same engine built several times, to show how much builds differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dyno.analysis.presentation.export import export as export_tables
from dyno.analysis.tables import variance_tables
from dyno.api.runnable import run
from dyno.store import copy
from dyno.study import Study
from dyno.worker.backend import Backend
from dyno.worker.spec import BUILD, FIXED, TIMING_CACHE, Option, UserError

ROUNDS = 3


def compare(study: Study, engine: Backend, options: Mapping[str, Option], batch: int, repeat: int, out: Path) -> int:
    """Build `repeat` times, each from nothing, time every build in fresh processes, write the fastest to `out`.

    Prints a row per build (layers, parameters, size, build seconds, latency) and whether builds differ beyond noise.
    The records stay beside `out`, in a folder with the suffix .builds.
    """
    if BUILD not in engine.options:
        raise UserError(
            f"{engine.name} makes the same file every time; --repeat is for engines that are tuned by timing"
        )
    fresh = {**options, TIMING_CACHE: False}
    suffix = "".join(f"@{key}={value}" for key, value in fresh.items())
    builds = tuple(f"{engine.name}{suffix}@{BUILD}={k}" for k in range(1, repeat + 1))
    rounds = max(ROUNDS, study.rounds)
    repeated = replace(
        study, backends=builds, batches=(batch,), rounds=rounds, until=FIXED, turns=False, boundaries=("model",)
    )
    data = run(repeated, out.with_suffix(".builds")).data
    print(export_tables([variance_tables.BUILDS.table(data)]), end="")
    best = variance_tables.fastest(data.records)
    if best is None or best.artifact is None:
        raise UserError(f"no build could be timed; `dyno show {out.with_suffix('.builds')}` has the reasons")
    copy(Path(best.artifact.path), out)
    print(f"{out}  the fastest, {best.backend}")
    return 0
