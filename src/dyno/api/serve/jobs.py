"""The jobs of requests: how one is launched, with what all of a run have in common."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.api.video.jobs import SHARED_PROCESSORS
from dyno.engine.device_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.worker.record import Record
from dyno.worker.serve.options import ServeOptions
from dyno.worker.spec import Job, to_json


@dataclass(frozen=True)
class Requests:
    """When requests come, how they are batched, and the sha256 of a trace ("" without one), which lies at `path`.

    `least` is how many the percentile needs.
    """

    options: ServeOptions
    least: int
    path: str = ""
    sha256: str = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings stored in the run folder, which refuses requests with other settings."""
        settings = to_json(self.options)
        return {"options": {**settings, "trace": Path(self.options.trace).name}, "trace_sha256": self.sha256}

    def launch(self, job: Job, folder: Path, timeout_s: float, progress: Progress) -> Record:
        """Run the job and return its record; the rates decide how long it takes, so it has no timeout."""
        options = {"settings": to_json(self.options), "least": self.least, "trace": self.path}
        own = dataclasses.replace(job, kind="serve", options={**job.options, **options})
        said = {**os.environ, **own.runtime.env}
        several = SHARED_PROCESSORS.items() if self.options.instances > 1 else ()
        extra = {name: value for name, value in several if name not in said}
        return launch_in_turn(own, folder, math.inf, progress, extra)
