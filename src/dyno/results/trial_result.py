"""Stored records, read back: a run folder becomes trials; each has rounds, and arrays loaded on first use.

Records become dataclasses. Of a job (the request), only fields that a table needs are read, because `dyno show` opens
thousands.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from dyno.formatting import NO_IMAGE
from dyno.results import stats, timeline
from dyno.results.files import read_job, read_measured, read_round, read_settings, read_stored, read_table, trials_in
from dyno.results.notes import NOTE_TYPES, FactsBySize, ModelFacts, Placement, list_placements, read_models
from dyno.results.rounds import GPU, HOST, Round
from dyno.results.self_test import SelfTestSummary
from dyno.worker import tasks
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import NO_VALUES, SAME_OUTPUTS, Facts
from dyno.worker.record import LOCK_FILE, Record, lock_owner
from dyno.worker.spec import PRECISIONS, Artifact, Job, Trial, UserError, usual_name
from dyno.worker.tasks import Task

# Files of a run that are forms of one network: one table, one reference.

MAX_FILES_NAMED = 3  # files listed in a network's name
FILE_OPTION = "file"  # option that holds the file's name
SAME_WORK = 0.01  # relative difference of operation counts within one network


@dataclass(frozen=True)
class Form:
    """A file among the files of one network: the network's name, the file's name in tables, and its place.

    The two sides of a comparison are forms of one network, told apart by `option`.
    """

    network: str
    file: str
    position: int
    option: str = FILE_OPTION


def name_sides(names: Mapping[str, str]) -> dict[str, Form]:
    """Return the form of each side of a comparison, by its letter; `names` are model names by side."""
    network = " and ".join(dict.fromkeys(names[side] for side in sorted(names)))
    return {side: Form(network, side.upper(), index, "side") for index, side in enumerate(sorted(names))}


def find_forms(models: FactsBySize) -> dict[str, Form]:
    """Return the form of each file that shares its network with another file, by model name.

    `models` are those of models.json by name and size, in the order given by the user. Files are one network if their
    inputs and outputs agree in number and shapes, under any names, and their operation counts agree. Whether they
    compute the same is decided later, by their outputs.
    """
    groups: list[list[str]] = []
    facts_by_name: dict[str, dict[str, ModelFacts]] = {}
    for (name, size), facts in models.items():
        if facts.signature:
            facts_by_name.setdefault(name, {})[size] = facts
    for name, size_facts in facts_by_name.items():
        network_group = next((group for group in groups if _is_alike(facts_by_name[group[0]], size_facts)), None)
        if network_group is None:
            groups.append([name])
        else:
            network_group.append(name)
    return {name: form for group in groups if len(group) > 1 for name, form in _make_forms(group, facts_by_name)}


def _make_forms(group: list[str], facts_by_name: Mapping[str, Mapping[str, ModelFacts]]) -> list[tuple[str, Form]]:
    files = {name: next(iter(facts_by_name[name].values())).file or name for name in group}
    counts = Counter(files.values())
    label_of = {name: file if counts[file] == 1 else name for name, file in files.items()}
    stems = {Path(file).stem for file in files.values()}
    labels = list(label_of.values())
    label_text = " and ".join(labels) if len(labels) <= MAX_FILES_NAMED else f"{labels[0]} and {len(labels) - 1} more"
    network = stems.pop() if len(stems) == 1 else label_text
    return [(name, Form(network, label_of[name], index)) for index, name in enumerate(group)]


def _is_alike(a: Mapping[str, ModelFacts], b: Mapping[str, ModelFacts]) -> bool:
    left, right = (next(iter(rows.values())).signature for rows in (a, b))
    try:
        can_fit = all(_can_fit(x, y) for x, y in zip(left, right, strict=True))
    except ValueError:
        return False
    return can_fit and all(_same_work(a[size], b[size]) for size in a.keys() & b.keys())


def _can_fit(a: Any, b: Any) -> bool:
    """Return whether two lists of shapes may describe the same tensors; free dimensions (text) fit any other."""
    return len(a) == len(b) and all(
        len(x) == len(y) and all(m == n or isinstance(m, str) or isinstance(n, str) for m, n in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


def _same_work(a: ModelFacts, b: ModelFacts) -> bool:
    return not (a.flops and b.flops) or abs(a.flops - b.flops) <= SAME_WORK * max(a.flops, b.flops)


SELF_TEST_FILE = "self-test.json"  # the self-test's summary in a run folder
# a trial has the status of its worst round; UNFINISHED: no round has a record
UNFINISHED = "unfinished"
MEASURING_REASON = "process {} is measuring this run"
STATUS_SEVERITY = ("ok", UNFINISHED, "skipped", "failed", "timeout", "oom", "crashed")


@dataclass(repr=False)
class TrialResult:
    """A trial and all of its rounds; `spec` is the trial as planned.

    `confirmations` are rounds measured after selection by `rounds`; no statistic mixes the two. `companions` are
    further processes of the trial that other trials were interleaved with; only comparisons with those (`blocks`) use
    them. `sustained` are interleaved rounds with turns of several seconds.
    """

    id: str
    spec: Trial
    rounds: list[Round] = field(default_factory=list)
    confirmations: list[Round] = field(default_factory=list)
    companions: list[Round] = field(default_factory=list)
    sustained: list[Round] = field(default_factory=list)
    job_artifact: Artifact | None = None  # file named in the job
    run: Path = Path()  # run folder
    form: Form | None = None  # if the network has several files
    placement: Placement | None = None  # in a study on several devices
    # cache of medians of these rounds
    computed: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        return f"TrialResult({self.id!r}, {self.label!r}, {self.status!r})"

    @property
    def model(self) -> str:
        """Model name in tables; if several files of one network are compared, the network's name."""
        return self.form.network if self.form else self.model_name

    @property
    def model_name(self) -> str:
        """The model's own name, even if the network has several files."""
        return self.spec.model.name

    @property
    def backend(self) -> str:
        return self.spec.backend

    @property
    def precision(self) -> str:
        return self.spec.precision

    @property
    def task(self) -> Task:
        return tasks.find_task(self.spec.model.task)

    @property
    def batch(self) -> int:
        return self.spec.dims.batch

    @property
    def size(self) -> str:
        return self.spec.dims.size

    @property
    def device(self) -> str:
        return self.spec.runtime.device

    @property
    def runtime(self) -> str:
        return self.spec.runtime.name

    @property
    def options(self) -> dict[str, Any]:
        """The backend's options; the file's name as well if several files of one network are compared."""
        return {self.form.option: self.form.file, **self.spec.options} if self.form else self.spec.options

    @property
    def side(self) -> str:
        """`a` (the baseline) or `b` in a comparison, else ""."""
        return self.spec.side

    @property
    def pair(self) -> str:
        """The configuration common to both sides of a comparison, "" outside a comparison."""
        return self.configuration.replace(f"@side={self.side.upper()}", "") if self.side else ""

    @property
    def group(self) -> tuple[str, str, int, str, str]:
        """Key of trials whose speeds are comparable: model, size, batch, device; in a comparison also the pair."""
        return self.model, self.size, self.batch, self.device, self.pair

    @property
    def variant(self) -> str:
        """Backend, options, and a runtime other than `main`, in the format of `Trial.variant`."""
        options = self.options if self.runtime == "main" else {**self.options, "runtime": self.runtime}
        return self.backend + "".join(f"@{key}={value}" for key, value in sorted(options.items()))

    @property
    def configuration(self) -> str:
        """Variant and precision: the trial's name within its group."""
        return f"{self.variant} {self.precision}"

    @property
    def label(self) -> str:
        return f"{self.model} {self.configuration} b{self.batch} {self.size}".removesuffix(f" {NO_IMAGE}")

    @cached_property
    def good(self) -> list[Round]:
        return [r for r in self.rounds if r.ok]

    @property
    def versions(self) -> dict[str, str]:
        """Library versions in the trial's process, by name; empty if no round is good."""
        return dict(self.good[0].record.system.get("versions") or {}) if self.good else {}

    @property
    def described_versions(self) -> str:
        """Library versions as text, separated by commas."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def worst(self) -> Round | None:
        return max(self.rounds, key=lambda r: STATUS_SEVERITY.index(r.status), default=None)

    @property
    def status(self) -> str:
        return self.worst.status if self.worst else UNFINISHED

    @property
    def reason(self) -> str:
        """Why the trial isn't ok, one line, with the stage reached and the number of good rounds."""
        worst = self.worst
        if worst is None:
            return "not measured so far"
        if worst.ok:
            return ""
        stage = worst.record.stage
        text = " ".join((worst.record.reason or "no reason recorded").split())
        text = f"{stage}: {text}" if stage not in ("", "plan") and worst.status != "skipped" else text
        text = f"{text} ({len(self.good)} of {len(self.rounds)} rounds good)" if self.good else text
        if worst.record.was_killed:
            return f"{text}; the same `dyno run` measures that round again"
        return f"{text}; log: {self.log}" if self.log else text

    @property
    def log(self) -> str:
        """The path of the worst round's error log within the run folder; "" without one."""
        path = self.worst.folder / "stderr.log" if self.worst else None
        if path is None or self.status in ("ok", "skipped") or not path.is_file() or not path.stat().st_size:
            return ""
        return path.relative_to(self.run).as_posix()

    @property
    def facts(self) -> Facts:
        """Facts of the first good round, else of the first round."""
        rounds = self.good or self.rounds
        return rounds[0].facts if rounds else Facts()

    @property
    def finite(self) -> bool:
        """Whether no good round found NaN or infinity in the outputs."""
        return all(each.facts.finite for each in self.good)

    @property
    def oddity(self) -> str:
        """Why comparing its outputs proves little, or "": random or constant outputs, or NaN."""
        if self.facts.random_outputs:
            return "its outputs change from call to call, so they can't be compared"
        warnings = [line for each in self.good for line in each.record.warnings]
        if any(line.startswith(NO_VALUES) for line in warnings):
            return f"{NO_VALUES}, so nothing is compared; --input gives others"
        if any(line.startswith(SAME_OUTPUTS) for line in warnings):
            return f"{SAME_OUTPUTS}, so agreement proves little"
        nan = self.facts.nan_share
        return f"{nan:.2%} of the output values are NaN, where agreement proves nothing" if nan else ""

    @property
    def artifact(self) -> Artifact | None:
        """The file that the trial ran, from its job or its records; None if it needs no file."""
        return self.job_artifact or next((r.record.artifact for r in self.rounds if r.record.artifact), None)

    @property
    def builds(self) -> int:
        """Number of planned builds of its engine, 0 if every build would be the same file."""
        return self.spec.plan.builds

    @property
    def planned_rounds(self) -> int:
        """Number of planned rounds: the study's, or the backend's (`@rounds=`)."""
        return self.spec.plan.rounds

    @property
    def is_cut_short(self) -> bool:
        """Whether the study was stopped before all of the trial's rounds."""
        return self.status == "ok" and len(self.rounds) < self.planned_rounds

    @property
    def made_by(self) -> MakerFacts:
        """Maker facts of the artifact; empty without an artifact."""
        return self.artifact.made_by if self.artifact else MakerFacts()

    @cached_property
    def answers(self) -> dict[str, np.ndarray]:
        """A classifier's answers from the first good round that has any."""
        return next((r.answers for r in self.good if r.answers), {})

    def stored(self, *names: str) -> dict[str, np.ndarray]:
        """Return arrays of outputs.npz from the round of `answers`."""
        return next((r.read_arrays("outputs.npz", names) for r in self.good if r.answers), {})

    def outputs(self) -> dict[str, np.ndarray]:
        """Return the raw outputs of the first good round that has any."""
        return next((outputs for r in self.good if (outputs := r.outputs())), {})

    def output_rows(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return the number of rows per batch or input, for `outputs` whose first axis isn't the inputs."""
        return next((rows for r in self.good if (rows := r.output_rows(names))), {})

    @cached_property
    def gpu(self) -> timeline.TelemetrySummary | None:
        """Summary of the GPU's telemetry in the good rounds; None on a CPU or if nothing was stored."""
        traces = [(r.trace, list(r.facts.timed.values())) for r in self.good if r.trace is not None]
        return timeline.join_timelines([timeline.summarise_timeline(trace, windows) for trace, windows in traces])

    def value(self, tag: str, boundary: str = "") -> float | None:
        """Return the median of a single value over the good rounds, or None."""
        values = [v for r in self.good if (v := r.value(tag, boundary)) is not None]
        return statistics.median(values) if values else None

    def count(self, tag: str) -> int | None:
        """Return the median count over the good rounds (builds may differ), the lower of two middle ones; or None."""
        counts = [v for r in self.good if (v := r.value(tag)) is not None]
        return int(statistics.median_low(counts)) if counts else None

    def samples(self, tag: str, boundary: str, clock: str = "") -> np.ndarray:
        """Return the samples of all good rounds, concatenated, float64, in SI units.

        Latencies are by the trial's own clock unless `clock` names another.
        """
        parts = self.parts(tag, boundary, clock)
        return np.concatenate(parts) if parts else np.empty(0)

    def parts(self, tag: str, boundary: str, clock: str = "") -> list[np.ndarray]:
        """Return the samples of each good round that has any."""
        return [samples for _, samples in self.list_sampled(tag, boundary, clock)]

    def list_sampled(self, tag: str, boundary: str, clock: str = "") -> list[tuple[Round, np.ndarray]]:
        """Return each good round that has samples, with them."""
        clock = clock or (clock_of(boundary, self) if tag == "latency" else "")
        return [(r, s) for r in self.good if (s := r.samples(tag, boundary, clock)).size]

    def medians(self, boundary: str, clock: str = "", folder_names: Collection[str] | None = None) -> list[float]:
        """Return the median latency in seconds of each good round, or of rounds in the folders `folder_names`.

        If rounds go through several builds, one value per build. Comparisons between processes use these values.
        """
        medians = self.round_medians(boundary, clock)
        names = medians.keys() if folder_names is None else medians.keys() & folder_names
        return by_build((r, medians[r.folder.name]) for r in self.good if r.folder.name in names)

    def round_medians(self, boundary: str, clock: str = "") -> dict[str, float]:
        """Return the median latency in seconds of each good round, by folder name."""
        clock = clock or clock_of(boundary, self)
        return {r.folder.name: m for r in self.good if (m := r.median(boundary, clock)) is not None}


def by_build(values: Iterable[tuple[Round, float]]) -> list[float]:
    """Return one value per round; if rounds go through builds of the engine, the geometric mean per build."""
    rounds = list(values)
    if not any(r.build for r, _ in rounds):
        return [value for _, value in rounds]
    return [math.exp(log) for log in stats.over_units([(r.build, math.log(value)) for r, value in rounds])]


def clock_of(boundary: str, *trials: TrialResult) -> str:
    """Return the clock by which these trials' latencies are shown and compared.

    GPU if every timed round has it, else HOST, so that a time with launch overhead is never compared with one without.
    """
    timed_rounds = [r for t in trials for r in t.good if r.find_measurement("latency", boundary)]
    return GPU if timed_rounds and all(r.find_measurement("latency", boundary, GPU) for r in timed_rounds) else HOST


@dataclass(repr=False)
class Results:
    """A run folder: its trials in a stable order, its environment, and problems of reading it.

    `models` holds counts per model name and size (`flops` of one image, `parameters`). `peak` is the record of the
    device's peak and `self_test` the summary of the machine's self-test, None if not run. `owner` is the id of the
    process that is measuring in the folder, "" if there is none.
    """

    folder: Path
    trials: list[TrialResult]
    environment: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    study: str = ""
    models: FactsBySize = field(default_factory=dict)
    peak: Record | None = None
    self_test: SelfTestSummary | None = None
    owner: str = ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """study.toml as a table; empty if it is missing, unreadable or not written by Dyno."""
        return read_settings(self.study)

    def model_facts(self, trial: TrialResult) -> ModelFacts:
        """Return the facts of the trial's model at its size."""
        return self.models.get((trial.model_name, trial.size), ModelFacts())

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def __repr__(self) -> str:
        return f"Results({str(self.folder)!r}, {len(self)} trials)"

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.trials)

    def __len__(self) -> int:
        return len(self.trials)

    @overload
    def __getitem__(self, place: int) -> TrialResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[TrialResult]: ...

    def __getitem__(self, place: int | slice) -> TrialResult | list[TrialResult]:
        return self.trials[place]

    @property
    def failed_additions(self) -> list[TrialResult]:
        """Failed trials in a precision that Dyno added, if the backend didn't fail in the model's own precision."""
        if any(self.settings.get(name) for name in ("backends", "precisions", "baseline")):
            return []

        def fails(t: TrialResult, *, is_own: bool) -> bool:
            return t.status == "failed" and (t.precision == (t.spec.model.precision or "fp32")) is is_own

        failed_keys = {(t.model, t.backend, t.batch, t.size) for t in self if fails(t, is_own=True)}
        return [t for t in self if fails(t, is_own=False) and (t.model, t.backend, t.batch, t.size) not in failed_keys]

    def trial(self, id: str) -> TrialResult:
        """Return the trial whose id equals or begins with `id`; UserError unless exactly one matches."""
        matches = [t for t in self.trials if t.id.startswith(id)]
        if len(matches) != 1:
            raise UserError(f"{len(matches) or 'no'} trials in {self.folder} have an id that begins with {id!r}")
        return matches[0]


def load_run(run: Path) -> Results:
    """Read a run folder.

    A record that is broken or written by a newer Dyno becomes one line in `problems`; the rest is shown. Raises
    UserError, one line, if the folder is not a run folder, is empty, or holds nothing readable.
    """
    run = Path(run)
    if not run.is_dir():
        raise UserError(f"{run} is not a folder; give the folder that `dyno run` wrote, such as runs/demo")
    if not (run / "trials").is_dir():
        raise UserError(f"{run} is not a run folder: it has no trials/; give the folder that `dyno run` wrote")
    problems: list[str] = []
    owner = lock_owner(run / LOCK_FILE)
    trials = [t for folder in trials_in(run) if (t := _read_trial(folder, problems))]
    if problems and not any(t.rounds for t in trials):
        raise UserError(f"nothing in {run} can be read: {problems[0]}")
    if not trials:
        raise UserError(
            f"{run} has no trials yet; {MEASURING_REASON.format(owner) if owner else 'run the study first'}"
        )
    study = run / "study.toml"
    models = read_models(run, problems)
    file_forms = find_forms(models)
    placements = {id: placement for placement in list_placements(run, problems) for id in placement.trials}
    side_forms = name_sides({t.side: t.model_name for t in trials if t.side})
    for t in trials:
        t.run, t.form, t.placement = run, side_forms.get(t.side) or file_forms.get(t.model_name), placements.get(t.id)
    results = Results(
        folder=run,
        trials=sorted(trials, key=_make_sort_key),
        environment=read_table(run / "environment.json", problems) or {},
        problems=problems,
        study=study.read_text(encoding="utf-8", errors="replace") if study.is_file() else "",
        models=models,
        peak=read_round(run / "peak", problems),
        self_test=read_stored(run / SELF_TEST_FILE, SelfTestSummary, problems),
        owner=owner,
    )
    for name, kind in NOTE_TYPES.items():  # validated here, read again where needed
        read_stored(run / name, kind, problems)
    if results.study.strip() and not results.settings:
        problems.append(f"{study} is damaged, or wasn't written by Dyno; its settings are left out")
    return results


def _read_trial(folder: Path, problems: list[str]) -> TrialResult | None:
    job: Job | None = None
    rounds: dict[str, list[Round]] = {kind: [] for kind in "rcts"}  # by first letter of the folder name
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        problems.append(f"{folder} can't be read (permission denied); it is left out")
    for path in sorted(folder.glob("[rcst][0-9]*"), key=lambda p: (p.name[0] != "r", len(p.name), p.name)):
        if job is None:
            job = read_job(path / "job.json", problems)
        record = read_round(path, problems)
        if record:
            record, samples = read_measured(path, record)
            if record.status == "ok" and not samples and any(m.samples for m in record.measurements):
                problems.append(f"{path / 'samples.npz'} is missing, and the latencies of that round with it")
            rounds[path.name[0]].append(
                Round(path, record.round, record, job.runtime.device if job else "cpu", samples)
            )
    if job is None or job.trial is None:
        return None
    return TrialResult(folder.name, job.trial, rounds["r"], rounds["c"], rounds["t"], rounds["s"], job.artifact)


def _make_sort_key(trial: TrialResult) -> tuple[Any, ...]:
    dims, index = trial.spec.dims, trial.form.position if trial.form else 0
    return (trial.model, dims.height, dims.width, trial.batch, index, *place_in_group(trial))


def place_in_group(trial: Trial | TrialResult) -> tuple[Any, ...]:
    """Return a trial's sort key within its group: backend, PyTorch first; precision; options."""
    precision = PRECISIONS.index(trial.precision) if trial.precision in PRECISIONS else len(PRECISIONS)
    return trial.backend != "pytorch", trial.backend, precision, trial.variant, trial.precision, trial.id


def find_trial(results: Results, choice: str) -> TrialResult:
    """Find a trial by its id, or by backend and precision; among several batches, the smallest that ran."""
    name, candidates = match_form(results, choice)
    candidates = [t for t in candidates if t.good] or candidates
    matches = [t for t in candidates if t.variant == name] or candidates
    if not matches and re.fullmatch("[0-9a-f]{4,12}", choice):
        return results.trial(choice)
    if not matches:
        available = ", ".join(dict.fromkeys(f"{t.variant}/{t.precision}" for t in results))
        raise UserError(f"no trial of {results.folder} is {choice!r}; there are {available}")
    models = dict.fromkeys((t.model, t.size) for t in matches)
    variants = dict.fromkeys((t.variant, t.precision) for t in matches)
    if len(models) > 1 or len(variants) > 1:
        labels = ", ".join(f"{t.id} ({t.label})" for t in matches)
        raise UserError(f"{choice!r} fits several trials of {results.folder}; choose one by its id: {labels}")
    return min(matches, key=lambda t: t.batch)


def match_form(results: Results, text: str) -> tuple[str, list[TrialResult]]:
    """Return the backend (with or without options) named by BACKEND/PRECISION, and the matching trials."""
    name, _, precision = text.replace("/", ":").rpartition(":") if "/" in text else (text, "", "")
    name, precision = usual_name(name), usual_name(precision)
    return name, [t for t in results if name in (t.backend, t.variant) and precision in ("", t.precision)]
