"""`dyno time ENGINE --batches min,opt,max,random`: the stress test of a dynamic engine, in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.analysis.formatting import show
from dyno.analysis.presentation.export import export
from dyno.analysis.records.arrays import read_npz
from dyno.analysis.tables import stress_table
from dyno.engine.execute import Files
from dyno.engine.gpu_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.planning.plan import expand
from dyno.study import Study
from dyno.worker.record import Record
from dyno.worker.spec import STRETCHES, Artifact, Job, Trial, UserError

SLOWEST_S = 1.0  # per batch, its check included, before the job counts as hung
CHANGING = ("onnxruntime", "tensorrt", "tensorrt_rtx", "fake")
WHO = "ONNX Runtime and TensorRT"
REMEDY = "export or build it with a dynamic batch, or omit --batches"


def kinds_of(text: str) -> list[str]:
    """`min,opt,max,random` or numbers, as a list; anything else is a `UserError`."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [kind for kind in found if kind not in STRETCHES and not (kind.isdecimal() and int(kind) > 0)]
    if wrong or not found:
        raise UserError(
            f"--batches takes {', '.join(STRETCHES)} and numbers from 1 on, not {', '.join(wrong) or 'nothing'}"
        )
    return list(dict.fromkeys(found))


def run(study: Study, kinds: list[str], iterations: int, folder: Path) -> int:
    """Test every trial of the study, print its table; 0 when all held, 1 for a wrong output or growing memory, 3 when
    a test could not be finished."""
    if iterations < 1:
        raise UserError(f"--iterations is {iterations}; it must be at least 1")
    codes, progress = [], Progress()
    for number, one in enumerate(expand(study)):
        if one.refusal:
            raise UserError(one.refusal)
        trial = replace(one.trial, dims=replace(one.trial.dims, batch=0))
        if trial.backend not in CHANGING:
            raise UserError(f"--batches tests a session that takes several batches; {trial.backend} has none, {WHO} do")
        made = Files(progress).file(trial.recipe) if trial.recipe else None
        if isinstance(made, Record):
            raise UserError(f"{trial.label}: {made.reason}")
        _check_free(trial, made)
        where = folder / "endure" / str(number)
        job = Job("endure", trial.runtime, trial, artifact=made, options={"batches": kinds, "iterations": iterations})
        timeout = max(trial.plan.timeout_s, iterations * len(kinds) * SLOWEST_S)
        progress.start(trial, 0)
        record = launch_in_turn(job, where, timeout, progress)
        stored = where / "samples.npz"
        _print(trial.label, record, read_npz(stored) if stored.exists() else {})
        codes.append(_code(record))
    return max(codes, default=0)


def _check_free(trial: Trial, made: Artifact | None) -> None:
    """Refuse what takes one batch and no other, before a process is started for it."""
    first = [t.shape[0] for t in made.inputs if t.shape] if made else []
    if first and all(isinstance(size, int) for size in first):
        raise UserError(f"{trial.model.name} takes batch {first[0]} alone, so --batches can't change it; {REMEDY}")


def _code(record: Record) -> int:
    if record.status != "ok":
        return 3
    return int(not all(stretch["ok"] for stretch in record.facts["endurance"].values()))


def _print(title: str, record: Record, samples: dict[str, np.ndarray]) -> None:
    phases = record.facts.get("endurance", {})
    print(export([stress_table.table(title, phases, samples)]), end="")
    if record.status != "ok":
        print(f"{record.status}: {record.reason}")
    for kind, stretch in phases.items():
        print(_sentence(kind, stretch))


def _sentence(kind: str, stretch: dict[str, Any]) -> str:
    if stretch["wrong"]:
        return (
            f"{kind}: {stretch['wrong']} of {stretch['iterations']} batches differ from the reference by more than "
            f"{stretch['tolerance']:g} of its largest value"
        )
    grown = max(stretch["device_growth"], stretch["host_growth"])
    return f"{kind}: every output right" + ("" if stretch["ok"] else f", but memory grew by {show(grown, 'bytes')}")
