"""Peak rates of the device, measured once per machine, driver, PyTorch and threads and cached; and its idle power."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.jobs.launcher import make_environment
from dyno.jobs.progress import Progress
from dyno.jobs.telemetry import Telemetry
from dyno.results.energy import IDLE_DIR
from dyno.runner.device_lock import hold_device, launch_in_turn
from dyno.store import (
    copy_folder,
    find_remembered,
    find_versions,
    good_record,
    gpu_identity,
    remember,
    worker_code_sha256,
)
from dyno.study.interpreters import runtime_of
from dyno.study.study import Choice, Study
from dyno.worker import system
from dyno.worker.record import Record
from dyno.worker.spec import Job, Runtime

TIMEOUT_S = 300.0
IDLE_S = 3.0
ENERGY_LOAD_S = 3.0  # seconds of full load per trial, for its energy per image


def find_peak(study: Study, folder: Path, progress: Progress) -> Record:
    """Return the peak in the study's folder: reused if it is good, else from the cache, else measured.

    A disturbed measurement is stored but not cached. A failure is a record with the reason.
    """
    if (stored_record := good_record(folder)) is not None:
        return stored_record
    runtime = replace(runtime_of(study, Choice("pytorch")), threads=study.threads or system.physical_cores())
    key = _compute_key(runtime)
    cache_folder = find_remembered("peaks", key)
    if good_record(cache_folder) is None:
        progress.show_step(f"peak of {runtime.device}")
        shutil.rmtree(folder, ignore_errors=True)
        record = launch_in_turn(Job("peak", runtime), folder, TIMEOUT_S, progress)
        if record.status == "ok" and not record.warnings:
            remember(folder, "peaks", key)
        return record
    shutil.rmtree(folder, ignore_errors=True)
    copy_folder(cache_folder, folder)
    return good_record(folder) or Record("failed", "peak", "the peak could not be copied from the cache")


def find_ceilings(runtime: Runtime, types: Collection[str], folder: Path, progress: Progress) -> Record:
    """Measure the highest rates of products in these types and of a copy on the runtime's device.

    A failure is a record with the reason.
    """
    progress.show_step(f"ceilings of {runtime.device}")
    job = Job("peak", runtime, options={"types": sorted(types), "copy": True})
    return launch_in_turn(job, folder, TIMEOUT_S, progress)


def keep_idle(study: Study, folder: Path, progress: Progress) -> None:
    """Record IDLE_S seconds of telemetry without any job in the run folder, unless it is already there."""
    path = folder / IDLE_DIR / "telemetry.npz"
    if path.is_file():
        return
    runtime = runtime_of(study, Choice("pytorch"))
    progress.show_step(f"power of {study.device} while idle")
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_device(runtime, progress.show_waiting):
        telemetry = Telemetry(study.device, make_environment(runtime))
        telemetry.watch(os.getpid())
        time.sleep(IDLE_S)
        telemetry.stop(path)


def _compute_key(runtime: Runtime) -> str:
    """Return a hash of everything that the peak depends on."""
    machine = system.describe()
    facts: dict[str, Any] = {
        "cpu": [machine["cpu"], machine["cpu_flags"], machine["cores"]],
        "device": [runtime.device, gpu_identity(runtime.device) if runtime.device != "cpu" else ""],
        "threads": runtime.threads,
        "code": worker_code_sha256(),
        "torch": find_versions(runtime, ("torch",)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
