"""`dyno cold-start`: how long each form of a model takes from the start of a process to its first answer."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis.inside import cold
from dyno.analysis.inside.cold import COLD, WARM, ColdStartSamples
from dyno.analysis.presentation.table import Table
from dyno.api.inside import forms
from dyno.api.inside.profiling import engines
from dyno.engine.device_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.planning.defaults import one_model
from dyno.study import Study
from dyno.worker import registry
from dyno.worker.facts.job import ColdStart
from dyno.worker.option_values import at_least
from dyno.worker.spec import Artifact, Job, Recipe, Trial, UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 5
FILES = {"memory": (WARM,), "disk": (COLD,), "both": (WARM, COLD)}


@dataclass(frozen=True)
class ColdStarts:
    """The cold starts of forms of a model: `starts` has those of each form and place of its files, `left_out` names the
    forms that can't be made or don't answer, with the reason."""

    starts: tuple[ColdStartSamples, ...]
    left_out: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """A row for each form and place of its files."""
        return cold.table(self.starts)

    @property
    def sentences(self) -> list[str]:
        """What takes longest before the first answer, and how a later call compares."""
        return cold.sentences(self.starts)

    def to_pandas(self) -> pd.DataFrame:
        """Return the table's rows."""
        return self.table.to_pandas()


def cold_start(
    model: Any,
    *others: Any,
    batch: int = 1,
    rounds: int = ROUNDS,
    files: str = "both",
    quiet: bool = True,
    **settings: Any,
) -> ColdStarts:
    """Measure how long each form of a model takes from process start to its first answer, part by part.

    `model` and `others` are as in `dyno.inspect`, but a backend must be able to run each. Every form starts once
    unmeasured, and then in `rounds` separate processes, in shuffled order, with its code and model in the kernel's
    cache (`files` "memory"), dropped from it ("disk"), or one after the other ("both"). `settings` are fields of
    `dyno.Study`. Forms that can't be made or don't answer are left out; raises `UserError` if no form is left.
    """
    batch, rounds = at_least(1, batch=batch, rounds=rounds)
    check_known("files", files, FILES)
    if COLD in FILES[files] and not hasattr(os, "posix_fadvise"):
        raise UserError("this system can't drop files from its cache; give --files memory")
    study, progress = one_model(model, settings), Progress(quiet=quiet)
    reading = ColdStartReader(study, batch, progress)
    sides = engines(forms.sides(study, others))
    if any(side.choice.name == forms.ONNX for side in sides):
        raise UserError("an ONNX graph doesn't run by itself; name a backend, such as onnxruntime")
    reading.read_all(sides)
    with progress.running([]):
        started, failed = _start_forms(reading.trials, progress)
        starts = tuple(_measure_starts(started, rounds, FILES[files], progress))
    return ColdStarts(starts, (*reading.left_out, *failed))


class ColdStartReader(forms.FormReader):
    """Makes what forms run, and reads nothing."""

    def __init__(self, study: Study, batch: int, progress: Progress) -> None:
        super().__init__(study, batch, progress)
        self.trials: list[tuple[Trial, Artifact | None]] = []

    def module(self, study: Study, side: forms.FormRequest, trial: Trial) -> None:
        """Start a module as PyTorch runs it."""
        self.engine(study, side, trial)

    def built(self, study: Study, side: forms.FormRequest, trial: Trial) -> None:
        """Start a built engine, whose shapes are read by inspecting its file."""
        self.engine(study, side, trial)

    def made(self, trial: Trial, recipe: Recipe | None, artifact: Artifact | None) -> None:
        """Add the trial and its file to those to start, once per trial."""
        if reason := registry.find(trial.backend).refuse(trial):
            raise forms.no_form(trial, reason)
        if trial.id not in {other.id for other, _ in self.trials}:
            self.trials.append((trial, artifact))


@dataclass
class ColdStartForm:
    """What is started, and what came of it; `read` are the files that a start reads."""

    title: str
    trial: Trial
    artifact: Artifact | None
    read: tuple[str, ...] = ()
    rounds: dict[str, list[ColdStart]] = field(default_factory=dict)


def _start_forms(
    trials: Sequence[tuple[Trial, Artifact | None]], progress: Progress
) -> tuple[list[ColdStartForm], list[str]]:
    """Return the forms that answer an unmeasured start, and why the others don't; raise `UserError` if all fail."""
    several = len({trial.model.name for trial, _ in trials}) > 1
    found, errors = [], list[UserError]()
    for trial, artifact in trials:
        form = ColdStartForm(_format_title(trial, several), trial, artifact)
        progress.other(f"start {form.title} unmeasured")
        try:
            form.read = _measure_start(form, progress).files
            found.append(form)
        except UserError as e:
            errors.append(e)
    if not found:
        raise errors[0]
    return found, [str(e) for e in errors]


def _measure_starts(
    each: Sequence[ColdStartForm], rounds: int, states: Sequence[str], progress: Progress
) -> Iterator[ColdStartSamples]:
    for number in range(rounds):
        order = [(form, state) for form in each for state in states]
        random.Random(number).shuffle(order)
        for form, state in order:
            progress.other(f"start {form.title}, files {state}, round {number + 1} of {rounds}")
            if state == COLD:
                drop(form.read)
            form.rounds.setdefault(state, []).append(_measure_start(form, progress))
    return (ColdStartSamples(form.title, state, tuple(form.rounds[state])) for form in each for state in states)


def _format_title(trial: Trial, several: bool) -> str:
    return f"{f'{trial.model.name} ' if several else ''}{trial.variant} {trial.precision}"


def _measure_start(form: ColdStartForm, progress: Progress) -> ColdStart:
    """Measure one start in a fresh process; raise `UserError` if it doesn't answer."""
    job = Job("cold_start", form.trial.runtime, form.trial, artifact=form.artifact)
    with tempfile.TemporaryDirectory() as scratch:
        record = launch_in_turn(job, Path(scratch) / "job", form.trial.plan.timeout_s, progress)
    if record.status != "ok" or record.facts.cold_start is None:
        raise UserError(f"{form.title}: {record.reason or record.status}")
    return record.facts.cold_start


def drop(files: Iterable[str]) -> None:
    """Ask the kernel to drop these files from its cache; pages that another process has mapped stay."""
    for path in files:
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)  # what isn't written yet can't be dropped
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
