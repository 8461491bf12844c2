"""What the device draws while nothing runs: watched once for a run folder, before its first job with `--energy`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dyno.analysis.telemetry.energy import IDLE
from dyno.engine.gpu_lock import held
from dyno.jobs.launcher import environment
from dyno.jobs.progress import Progress
from dyno.jobs.telemetry import Telemetry
from dyno.planning.interpreters import runtime_of
from dyno.study import Choice, Study

IDLE_S = 3.0
SUSTAINED_S = 3.0  # that a trial runs at full load


def keep_idle(study: Study, folder: Path, progress: Progress) -> None:
    """Telemetry of IDLE_S seconds without any job in the run folder, unless it is there."""
    path = folder / IDLE / "telemetry.npz"
    if path.is_file():
        return
    runtime = runtime_of(study, Choice("pytorch"))
    progress.other(f"{study.device} while idle")
    path.parent.mkdir(parents=True, exist_ok=True)
    with held(runtime, progress.waiting):
        telemetry = Telemetry(study.device, environment(runtime))
        telemetry.watch(os.getpid())
        time.sleep(IDLE_S)
        telemetry.stop(path)
