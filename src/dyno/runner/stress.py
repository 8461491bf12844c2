"""`dyno bench stress`: stress test of a dynamic engine, in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np

from dyno.formatting import show
from dyno.jobs.progress import Progress
from dyno.report.tables import gpu_table
from dyno.results.files import read_npz
from dyno.runner.device_lock import launch_in_turn
from dyno.runner.execute import Files
from dyno.store import Run, guard_start
from dyno.study.plan import PlannedTrial, expand
from dyno.study.study import Study
from dyno.table import Table
from dyno.worker.facts.job import StressPhase
from dyno.worker.record import Record, refuse_links
from dyno.worker.spec import BATCH_AXIS, STRESS_PHASES, Artifact, Job, Trial, UserError

SLOWEST_S = 1.0  # seconds per batch and its check, beyond which the job counts as hung
DYNAMIC_BACKENDS = ("onnxruntime", "tensorrt", "tensorrt_rtx", "fake")
DYNAMIC_ENGINES = "ONNX Runtime and TensorRT"
DYNAMIC_REMEDY = "export or build it with a dynamic batch"


def phases_of(text: str) -> list[str]:
    """Parse `min,opt,max,random` or numbers into a list; raise `UserError` for anything else."""
    names = [item.strip() for item in text.split(",") if item.strip()]
    unknown_names = [name for name in names if name not in STRESS_PHASES and not (name.isdecimal() and int(name) > 0)]
    if unknown_names or not names:
        raise UserError(
            f"--phases takes {', '.join(STRESS_PHASES)} and numbers of at least 1, not "
            f"{', '.join(unknown_names) or 'nothing'}"
        )
    return list(dict.fromkeys(names))


class StressDescription(TypedDict):
    """The head of the table of stress tests in JSON."""

    sentences: list[str]


@dataclass(frozen=True)
class StressResult:
    """A stress test: its phases, sentences on them, and an exit code.

    0 if all passed, 1 for a wrong output or growing memory, 3 if it was not finished.
    """

    table: Table
    sentences: tuple[str, ...]
    exit_code: int


def run(study: Study, phases: list[str], iterations: int, folder: Path) -> Iterator[StressResult]:
    """Stress-test every trial of the study, and yield each result."""
    if iterations < 1:
        raise UserError(f"--iterations is {iterations}; it must be at least 1")
    with guard_start(folder):
        yield from _test_trials(expand(study), phases, iterations, folder)


def _test_trials(
    planned: list[PlannedTrial], phases: list[str], iterations: int, folder: Path
) -> Iterator[StressResult]:
    progress = Progress()
    for index, entry in enumerate(planned):
        if entry.refusal:
            raise UserError(entry.refusal)
        trial = replace(entry.trial, dims=replace(entry.trial.dims, batch=0))
        if trial.backend not in DYNAMIC_BACKENDS:
            raise UserError(
                f"a stress test changes the batch; {trial.backend} takes only one, {DYNAMIC_ENGINES} take several"
            )
        if any(BATCH_AXIS in shape[1:] for shape in trial.dims.shapes.values()):
            raise UserError(f"{trial.model.name}: a stress test needs the batch as the first axis of the inputs")
        artifact = Files(progress, trial.plan.build_timeout_s).make_file(trial.recipe) if trial.recipe else None
        if isinstance(artifact, Record):
            raise UserError(f"{trial.label}: {artifact.reason}")
        _check_free(trial, artifact)
        job_folder = folder / "stress" / str(index)
        refuse_links(folder, ("stress",))
        job = Job(
            "stress", trial.runtime, trial, artifact=artifact, options={"phases": phases, "iterations": iterations}
        )
        timeout = max(trial.plan.timeout_s, iterations * len(phases) * SLOWEST_S)
        with progress.show_study([]):
            progress.show_step(f"stress test of {trial.label}: {len(phases)} phases of {iterations:,} batches")
            with Run(folder).hold_lock():
                record = launch_in_turn(job, job_folder, timeout, progress)
        samples_path = job_folder / "samples.npz"
        yield _describe_test(trial.label, record, read_npz(samples_path) if samples_path.exists() else {})


def _check_free(trial: Trial, artifact: Artifact | None) -> None:
    """Raise UserError for a file with a fixed batch, before a process is started."""
    batches = [t.shape[0] for t in artifact.inputs if t.shape] if artifact else []
    if batches and all(isinstance(size, int) for size in batches):
        raise UserError(
            f"{trial.model.name} takes only batch {batches[0]}, and a stress test changes it; {DYNAMIC_REMEDY}"
        )


def _describe_test(title: str, record: Record, samples: dict[str, np.ndarray]) -> StressResult:
    phases = record.facts.stress
    sentences = [f"{record.status}: {record.reason}"] if record.status != "ok" else []
    sentences += [_format_sentence(name, phase) for name, phase in phases.items()]
    exit_code = 3 if record.status != "ok" else int(not all(phase.ok for phase in phases.values()))
    return StressResult(gpu_table.make_stress_table(title, phases, samples), tuple(sentences), exit_code)


def _format_sentence(name: str, phase: StressPhase) -> str:
    if phase.wrong:
        return (
            f"{name}: {phase.wrong} of {phase.iterations} batches differ from the reference by more than "
            f"{phase.tolerance:g} of its largest value"
        )
    growth = max(phase.device_growth, phase.host_growth)
    return f"{name}: every output right" + ("" if phase.ok else f", but memory grew by {show(growth, 'bytes')}")
