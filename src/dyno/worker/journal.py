"""What a job has measured so far, kept on disk after every stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import measure
from dyno.worker.evaluation import evaluate
from dyno.worker.record import Measurement, Record, save_arrays, write_json
from dyno.worker.spec import Job, to_json


class Journal:
    """What the job has found so far, on disk after every stage, so that a crash later loses nothing."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self.record = Record(
            "crashed", started=datetime.now(timezone.utc).isoformat(timespec="seconds"), round=job.round
        )
        if job.trial is not None:
            self.record = replace(self.record, trial=job.trial.id)
        self.samples: dict[str, np.ndarray] = {}

    def stage(self, name: str) -> None:
        """Say what comes next, for the progress display and for whoever reads the record of a crash."""
        self.record = replace(self.record, stage=name)
        (self.folder / "stage").write_text(name)
        self._write()

    def add(self, *found: Measurement) -> None:
        """Keep measurements."""
        self.record = replace(self.record, measurements=(*self.record.measurements, *found))
        self._write()

    def _write(self) -> None:
        write_json(self.folder / "partial.json", to_json(self.record))

    def sampled(self, tag: str, boundary: str, unit: str, hint: str, found: measure.Sampling) -> None:
        """Keep raw samples, when they were taken, and the measurements that name them."""
        name = tag if tag == boundary else f"{tag}_{boundary}"
        self.facts(timed={**self.record.facts.timed, boundary: found.window})
        made = [Measurement(tag, unit, hint, found.value, name, boundary, "host", found.stopped)]
        self.samples[name] = found.samples
        if found.block is not None:
            self.samples[f"{name}_block"] = found.block
            self.facts(blocks={**self.record.facts.blocks, boundary: tuple(found.windows)})
        if found.gpu is not None:
            self.samples[f"{name}_gpu"] = found.gpu
            made.append(Measurement(tag, unit, hint, None, f"{name}_gpu", boundary, "gpu", found.stopped))
        save_arrays(self.folder / "samples.npz", self.samples)
        self.add(*made)

    def parted(self, found: dict[str, np.ndarray]) -> None:
        """Keep the parts of one inference from host to host."""
        self.samples.update(found)
        save_arrays(self.folder / "samples.npz", self.samples)
        clocks = {name: "host" if name == "enqueue" else "gpu" for name in found}
        self.add(*(Measurement(name, "s", "duration", None, name, "all", clocks[name]) for name in found))

    def evaluated(self, found: evaluate.Evaluation) -> None:
        """Keep how fast the evaluation went, and its stages."""
        if found.stages:
            self.samples.update(found.stages)
            save_arrays(self.folder / "samples.npz", self.samples)
        if told := found.facts():
            self.facts(evaluation=told)
        self.add(*found.measurements())

    def timed(self, tag: str, stage: str, action: Callable[[], Any]) -> Any:
        """Run the action as a stage and keep its seconds under the tag."""
        self.stage(stage)
        start = time.perf_counter()
        result = action()
        self.add(Measurement(tag, "s", "duration", time.perf_counter() - start, clock="host"))
        return result

    def facts(self, **found: Any) -> None:
        """Keep facts, by the names of the fields of `Facts`."""
        self.record = replace(self.record, facts=replace(self.record.facts, **found))

    def warn(self, sentence: str) -> None:
        """Keep a warning for the reader of the numbers."""
        self.record = replace(self.record, warnings=(*self.record.warnings, sentence))
