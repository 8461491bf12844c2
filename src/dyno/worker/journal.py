"""A job's measurements so far, kept on disk after every stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import measure, system
from dyno.worker.backend import GpuWork
from dyno.worker.evaluation import evaluate
from dyno.worker.record import Measurement, Record, save_arrays, write_json
from dyno.worker.spec import Job, to_json

MAX_WITHHELD_CORES = 0.05  # mean processors withheld by a limit; a warning above


def end_at_next_sample() -> None:
    """End a forked copy of this process when it returns to the timing loop, which reads the clock."""
    measure.now = system.end_copy


class Journal:
    """The job's results so far, written to disk after every stage, so that a later crash loses none."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self._process = folder, os.getpid()
        self.record = Record(
            "crashed", started=datetime.now(timezone.utc).isoformat(timespec="seconds"), round=job.round
        )
        if job.trial is not None:
            self.record = replace(self.record, trial=job.trial.id)
        self.samples: dict[str, np.ndarray] = {}

    def stage(self, name: str) -> None:
        """Begin a stage; the progress display and the record of a crash show its name."""
        self.record = replace(self.record, stage=name)
        self._write_partial()  # first: the stage "close" implies stored measurements
        (self.folder / "stage").write_text(name)

    def check_process(self) -> None:
        """End this process if it is a copy of the job's, forked by the model's code."""
        if os.getpid() != self._process:
            system.end_copy()

    def add(self, *measurements: Measurement) -> None:
        """Store measurements."""
        self.record = replace(self.record, measurements=(*self.record.measurements, *measurements))
        self._write_partial()

    def _write_partial(self) -> None:
        self.check_process()
        write_json(self.folder / "partial.json", to_json(self.record))

    def store_samples(self, tag: str, boundary: str, unit: str, hint: str, sampling: measure.Sampling) -> None:
        """Store raw samples, their time span, and the measurements that name them."""
        name = tag if tag == boundary else f"{tag}_{boundary}"
        self.facts(timed={**self.record.facts.timed, boundary: sampling.window})
        measurements = [Measurement(tag, unit, hint, sampling.value, name, boundary, "host", sampling.stopped)]
        self.samples[name] = sampling.samples
        if sampling.block is not None:
            self.samples[f"{name}_block"] = sampling.block
            self.facts(blocks={**self.record.facts.blocks, boundary: tuple(sampling.windows)})
        if sampling.gpu is not None:
            self.samples[f"{name}_gpu"] = sampling.gpu
            measurements.append(Measurement(tag, unit, hint, None, f"{name}_gpu", boundary, "gpu", sampling.stopped))
        save_arrays(self.folder / "samples.npz", self.samples)
        self.add(*measurements)

    def store_queued(self, seconds: np.ndarray) -> None:
        """Store the GPU's seconds of queued runs (see `measure.measure_queued`)."""
        self.samples["queued"] = seconds
        save_arrays(self.folder / "samples.npz", self.samples)
        self.add(Measurement("queued", "s", "duration", None, "queued", "model", "gpu"))

    def store_parts(self, seconds: dict[str, np.ndarray]) -> None:
        """Store the parts of one inference from host to host."""
        self.samples.update(seconds)
        save_arrays(self.folder / "samples.npz", self.samples)
        clocks = {name: "host" if name == "enqueue" else "gpu" for name in seconds}
        self.add(*(Measurement(name, "s", "duration", None, name, "all", clocks[name]) for name in seconds))

    def store_evaluation(self, evaluation: evaluate.Evaluation) -> None:
        """Store the evaluation's rate and its stages."""
        if evaluation.stages:
            self.samples.update(evaluation.stages)
            save_arrays(self.folder / "samples.npz", self.samples)
        if facts := evaluation.facts():
            self.facts(evaluation=facts)
        self.add(*evaluation.list_measurements())

    def store_profile(self, tag: str, run_seconds: np.ndarray, layers_tag: str, layers: np.ndarray) -> None:
        """Store the seconds of watched runs and of their layers [repeats, layers] under the tags."""
        self.samples.update({tag: run_seconds, layers_tag: layers})
        save_arrays(self.folder / "samples.npz", self.samples)
        self.add(*(Measurement(name, "s", "duration", None, name, "model", "host") for name in (tag, layers_tag)))

    def store_gpu_work(self, work: GpuWork) -> None:
        """Store the work of the GPU and the host in the watched runs."""
        self.samples.update({"gpu_busy": work.busy, "cuda_calls": work.calls, "kernels": work.kernels})
        save_arrays(self.folder / "samples.npz", self.samples)
        self.add(
            Measurement("gpu_busy", "s", "duration", None, "gpu_busy", "model", "gpu"),
            Measurement("cuda_calls", "s", "duration", None, "cuda_calls", "model", "host"),
            Measurement("kernels", "1", "count", None, "kernels", "model"),
        )

    def record_contention(
        self, boundary: str, busy: float, device: str, withheld: float = 0.0, overheated: int = 0
    ) -> None:
        """Record the CPU contention of this timing; warn if it was enough to change the timing.

        `busy` and `withheld` are in processors, `overheated` is a count: see `system.CpuContention`.
        """
        threshold = system.contention_threshold(device)
        busy_by_boundary = {**self.record.facts.others_busy, boundary: round(busy, 3)}
        self.facts(others_busy=busy_by_boundary, contention_threshold=threshold)
        if busy > threshold:
            count = len(system.shared_processors())
            self.warn(f"{boundary}: other programs kept {busy:.1f} of {count} processors busy meanwhile")
        if withheld > MAX_WITHHELD_CORES:
            limit = f"the limit of {system.cpu_quota():g} processors (a container's --cpus, or a control group's)"
            self.warn(f"{boundary}: {limit} stopped the engine's threads meanwhile; give fewer --threads or raise it")
        if overheated and device == "cpu":
            self.warn(f"{boundary}: the processors lowered their clock against heat {overheated} times meanwhile")

    def time_stage(self, tag: str, stage: str, action: Callable[[], Any]) -> Any:
        """Run the action as a stage and store its seconds under the tag."""
        self.stage(stage)
        start = time.perf_counter()
        result = action()
        self.add(Measurement(tag, "s", "duration", time.perf_counter() - start, clock="host"))
        return result

    def facts(self, **values: Any) -> None:
        """Store facts, by the names of the fields of `Facts`."""
        self.record = replace(self.record, facts=replace(self.record.facts, **values))

    def warn(self, sentence: str) -> None:
        """Store a warning for the reader of the numbers."""
        self.record = replace(self.record, warnings=(*self.record.warnings, sentence))
