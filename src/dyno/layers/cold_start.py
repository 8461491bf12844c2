"""`dyno bench cold-start`: how long each form of a model takes from the start of a process to its first answer."""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.formatting import format_number
from dyno.jobs.progress import Progress
from dyno.layers import forms
from dyno.layers.profiling import choose_engines
from dyno.report.tables import TableKind
from dyno.results import stats
from dyno.runner.device_lock import launch_in_turn
from dyno.study.defaults import one_model
from dyno.table import COUNT, RATIO, TEXT, Column, Row, Table, compare_cells, keep_printed, limit_cells, with_limits
from dyno.worker.facts.job import ColdStart
from dyno.worker.option_values import at_least
from dyno.worker.spec import Artifact, Job, Recipe, Trial, UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

# Cold starts of a model's forms, part by part, in one table.

COLD_START = TableKind("cold-start", "Cold start",
                       "Time from the start of a process to an engine's first answer, part by part.",
                       command="dyno bench cold-start MODEL")  # fmt: skip
WARM, COLD = "in memory", "on disk"  # location of the files that a process reads
PARTS = {
    "start": "start of Python and of Dyno's worker",
    "imports": "import of libraries",
    "context": "making the GPU's context",
    "load": "loading the engine, without imports",
    "inputs": "reading or drawing the inputs",
    "first_call": "the first call, from host to host",
}


COLUMNS = (
    Column("form", "which engine", kind=TEXT, identity=True),
    Column("files", "where code and model lie when the process starts", kind=TEXT, title="files are"),
    *with_limits(Column("first_answer_ms", "from the start of the process to its first answer: the mean over rounds",
                        "ms", title="first answer, ms")),
    *(Column(f"{name}_ms", f"{meaning}, in the median round", "ms", title=name.replace("_", " "), rank=1)
      for name, meaning in PARTS.items()),
    Column("rest_ms", "what lies between the parts", "ms", title="rest", rank=2),
    Column("later_ms", "a later call, from host to host: the median", "ms", title="later, ms"),
    Column("read_mb", "read from disk for the process, in the median round", "MB", title="read, MB", rank=1),
    *with_limits(Column("speedup", "ratio of the first form's first answer to this one's, over rounds", kind=RATIO,
                        title="speed-up")),
    Column("verdict", "whether that is real", kind=TEXT),
    Column("rounds", "processes", kind=COUNT, rank=3),
)  # fmt: skip
PRINTED = keep_printed(COLUMNS)
TABLE_NOTE = "Parts, in ms, are those of the median round; with the rest they sum to its first answer."
MAX_PARTS_NAMED = 2  # parts named in a sentence
MIN_UNCOMPILED_SHARE = 0.1  # smallest share that is reported: a program's own few files don't matter


@dataclass(frozen=True)
class ColdStartSamples:
    """A form's cold starts, one process per round. `files` is the place of its files at the start: WARM or COLD."""

    title: str
    files: str
    rounds: tuple[ColdStart, ...]

    @property
    def wholes(self) -> list[float]:
        """Seconds to the first answer, by round."""
        return [start.first_answer for start in self.rounds]

    @property
    def later(self) -> float:
        """Median seconds of a later call."""
        return statistics.median(value for start in self.rounds for value in start.later)

    @property
    def middle(self) -> ColdStart:
        """Round with the median first answer; of two, the slower one."""
        return sorted(self.rounds, key=lambda start: start.first_answer)[len(self.rounds) // 2]

    def describe(self) -> str:
        """Describe the longest parts before the first answer, and a later call."""
        middle = self.middle
        largest = sorted(middle.parts.items(), key=lambda item: -item[1])[:MAX_PARTS_NAMED]
        part_text = " and ".join(f"{PARTS[name]} ({100 * s / middle.first_answer:.0f} %)" for name, s in largest)
        ratio = format_number(stats.find_center(self.wholes).value / self.later)
        return f"{self.title}, files {self.files}: most of it is {part_text}; a later call takes 1/{ratio} of it."

    def describe_uncompiled(self) -> str:
        """Return a sentence on libraries without byte-code, with the remedy; "" if only a few modules lack it."""
        if problem := without_byte_code(self.middle.modules, self.middle.uncompiled):
            remedy = "omit PYTHONDONTWRITEBYTECODE, or run python -m compileall on the libraries once"
            return f"{self.title}, files {self.files}: {problem}; {remedy}."
        return ""


@dataclass(frozen=True)
class ColdStarts:
    """Cold starts of a model's forms: `starts` has an entry per form and place of its files. `left_out` lists the forms
    that can't be made or don't answer, with reasons."""

    starts: tuple[ColdStartSamples, ...]
    left_out: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """A row per form and place of its files.

        Each is compared with the first form of the same place, in one family of tests.
        """
        references = {start.files: start for start in reversed(self.starts)}
        evidence = [
            stats.pair_evidence([math.log(a / b) for a, b in zip(reference.wholes, start.wholes, strict=True)])
            if (reference := references[start.files]) is not start else None
            for start in self.starts
        ]  # fmt: skip
        decisions = zip(self.starts, evidence, stats.decide_family(evidence), strict=True)
        rows = [_make_row(start, speedup if e else None) for start, e, speedup in decisions]
        return COLD_START.build(COLUMNS, rows, notes=(TABLE_NOTE, *self.sentences), printed=PRINTED)

    @property
    def sentences(self) -> list[str]:
        """Sentences per form: its longest parts, a comparison with a later call, libraries without byte-code."""
        return [*(one.describe() for one in self.starts), *filter(None, (o.describe_uncompiled() for o in self.starts))]

    def to_pandas(self) -> pd.DataFrame:
        """Return the table's rows."""
        return self.table.to_pandas()


def without_byte_code(modules: int, uncompiled: int) -> str:
    """Describe how many of a process's modules lack byte-code; "" for shares up to MIN_UNCOMPILED_SHARE."""
    if uncompiled <= MIN_UNCOMPILED_SHARE * modules:
        return ""
    return f"{uncompiled:,} of {modules:,} Python modules have no byte-code, so each process compiles them"


def _make_row(samples: ColdStartSamples, speedup: stats.Speedup | None) -> Row:
    middle = samples.middle
    parts = {f"{name}_ms": 1e3 * seconds for name, seconds in middle.parts.items()}
    row: Row = {
        "form": samples.title, "files": samples.files,
        **limit_cells("first_answer_ms", stats.find_center(samples.wholes), 1e3), **parts,
        "rest_ms": 1e3 * (middle.first_answer - sum(middle.parts.values())),
        "later_ms": 1e3 * samples.later,
        "read_mb": None if middle.read_bytes is None else middle.read_bytes / 1e6, "rounds": len(samples.rounds),
    }  # fmt: skip
    return row | (compare_cells(speedup, False) or {"verdict": "reference"})


DEFAULT_ROUNDS = 5
FILE_STATES = {"memory": (WARM,), "disk": (COLD,), "both": (WARM, COLD)}


def bench_cold_start(
    model: Any,
    *others: Any,
    batch: int = 1,
    rounds: int = DEFAULT_ROUNDS,
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
    check_known("files", files, FILE_STATES)
    if COLD in FILE_STATES[files] and not hasattr(os, "posix_fadvise"):
        raise UserError("this system can't drop files from its cache; give --files memory")
    study, progress = one_model(model, settings), Progress(quiet=quiet)
    reader = ColdStartReader(study, batch, progress)
    requests = choose_engines(forms.list_forms(study, others))
    if any(request.choice.name == forms.ONNX_FORM for request in requests):
        raise UserError("an ONNX graph doesn't run by itself; name a backend, such as onnxruntime")
    reader.read_all(requests)
    with progress.show_study([]):
        started_forms, errors = _start_forms(reader.trials, progress)
        starts = _measure_starts(started_forms, rounds, FILE_STATES[files], progress)
    return ColdStarts(starts, (*reader.left_out, *errors))


class ColdStartReader(forms.FormReader):
    """Reader that makes the forms' files without inspecting them."""

    runs_all = True

    def read_trial(self, trial: Trial, recipe: Recipe | None, artifact: Artifact | None) -> None:
        """Add the trial and its file to the forms to start, once per trial."""
        if trial.id not in {other.id for other, _ in self.trials}:
            self.trials.append((trial, artifact))


@dataclass
class _StartedForm:
    """A form that answers: its title, trial and file, and all files that a start reads."""

    title: str
    trial: Trial
    artifact: Artifact | None
    read: tuple[str, ...] = ()


def _start_forms(
    trials: Sequence[tuple[Trial, Artifact | None]], progress: Progress
) -> tuple[list[_StartedForm], list[str]]:
    """Return the forms that answer an unmeasured start, and the errors of the others; raise `UserError` if all fail."""
    has_many_models = len({trial.model.name for trial, _ in trials}) > 1
    started_forms, errors = [], list[UserError]()
    for trial, artifact in trials:
        model = f"{trial.model.name} " if has_many_models else ""
        form = _StartedForm(f"{model}{trial.variant} {trial.precision}", trial, artifact)
        progress.show_step(f"start {form.title} unmeasured")
        try:
            form.read = _measure_start(form, progress).files
            started_forms.append(form)
        except UserError as e:
            errors.append(e)
    if not started_forms:
        raise errors[0]
    return started_forms, [str(e) for e in errors]


def _measure_starts(
    started_forms: Sequence[_StartedForm], rounds: int, states: Sequence[str], progress: Progress
) -> tuple[ColdStartSamples, ...]:
    rounds_of: dict[tuple[str, str], list[ColdStart]] = {}
    for round_index in range(rounds):
        order = [(form, state) for form in started_forms for state in states]
        random.Random(round_index).shuffle(order)
        for form, state in order:
            progress.show_step(f"start {form.title}, files {state}, round {round_index + 1} of {rounds}")
            if state == COLD:
                drop(form.read)
            rounds_of.setdefault((form.title, state), []).append(_measure_start(form, progress))
    return tuple(
        ColdStartSamples(form.title, state, tuple(rounds_of[form.title, state]))
        for form in started_forms
        for state in states
    )


def _measure_start(form: _StartedForm, progress: Progress) -> ColdStart:
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
                os.fsync(file)  # only written pages can be dropped from the cache
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
