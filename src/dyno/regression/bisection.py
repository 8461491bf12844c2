"""`dyno compare --bisect`: the first version of a library with which a model is slower, less accurate or different."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dyno.jobs.progress import Progress
from dyno.regression.compare_table import RATIO_SHOWN
from dyno.regression.comparison import Comparison, compare, explain_failure, explain_undecided
from dyno.regression.rules import DISAGREE, LESS_ACCURATE, SLOWER, GateRules, list_changes
from dyno.results.trial_result import TrialResult
from dyno.study import commits
from dyno.study import interpreters as study_interpreters
from dyno.study.defaults import default_runner, folder_for, one_model
from dyno.study.interpreters import find_missing as missing_library
from dyno.study.study import Choice, name_fields
from dyno.table import Row, is_missing
from dyno.worker import registry
from dyno.worker.spec import Runtime, UserError, check_known

GOOD, BAD, SKIPPED, UNDECIDED = "good", "bad", "skipped", "undecided"


@dataclass(frozen=True)
class Criterion:
    """Test for a bad version: the gate's condition, its default, its verb for sentences, and the deciding column."""

    condition: str
    fail_on: str
    text: str
    column: str
    rules: Mapping[str, Any] = field(default_factory=dict)


CRITERIA = {
    "speed": Criterion(SLOWER, "slower=5%", "is slower than", "ratio"),
    "accuracy": Criterion(LESS_ACCURATE, LESS_ACCURATE, "is less accurate than", "accuracy", {"any_outputs": True}),
    "agreement": Criterion(DISAGREE, DISAGREE, "disagrees with", "close", {"any_outputs": True, "least": 0.999}),
}


@dataclass(frozen=True)
class BisectionStep:
    """One version: its outcome, the reason, and its comparison with the first version (None: not compared)."""

    name: str
    outcome: str
    reason: str = ""
    comparison: Comparison | None = None

    @property
    def line(self) -> str:
        """The step as one line of text."""
        rows = self.comparison.rows if self.comparison else []
        ratio = ", ".join(f"{RATIO_SHOWN.text(r)} the latency" for r in rows if RATIO_SHOWN.text(r))
        reasons = [explain_failure(r) for r in rows if r["failed"] not in ("", SLOWER)]
        return f"{self.name}: {self.outcome}" + "".join(f", {part}" for part in (ratio, *reasons, self.reason) if part)


@dataclass(frozen=True)
class Bisection:
    """Steps in order, and the result: `good` and `bad` are the last good and first bad version ("": unknown). `between`
    lists skipped versions between them; `undecided` is the reason for a missing answer."""

    steps: tuple[BisectionStep, ...]
    first: str
    good: str = ""
    bad: str = ""
    between: tuple[str, ...] = ()
    undecided: str = ""
    by: str = "speed"

    @property
    def exit_code(self) -> int:
        """0 without a bad version, 1 with a first bad version, 3 if undecided."""
        return 3 if self.undecided else 1 if self.bad else 0

    @cached_property
    def changed(self) -> list[str]:
        """Facts of the engine that differ between the last good and the first bad version."""
        trials = [self._find_trial(self.good), self._find_trial(self.bad)]
        return list_changes(trials[0], trials[1]) if trials[0] and trials[1] else []

    def _find_trial(self, name: str) -> TrialResult | None:
        """Return the version's trial; the first version's comes from its comparison with the first bad one."""
        step = next((s for s in self.steps if s.name == (self.bad if name == self.first else name)), None)
        if step is None or step.comparison is None or step.comparison.result is None:
            return None
        column = "trial_a" if name == self.first else "trial_b"
        return next((step.comparison.result.records.trial(r[column]) for r in step.comparison.rows), None)

    @property
    def verdicts(self) -> list[str]:
        """The outcome in sentences."""
        sentences = [f"skipped {s.name}: {s.reason}" for s in self.steps if s.outcome == SKIPPED]
        if self.undecided:
            return [*sentences, f"Undecided: {self.undecided}."]
        if not self.bad:
            return [*sentences, f"No version {CRITERIA[self.by].text} {self.first}."]
        (step,) = (s for s in self.steps if s.name == self.bad)
        gap = f", or one of the skipped ones ({', '.join(self.between)})" if self.between else ""
        sentences.append(f"The first bad version is {self.bad}{gap}; the last good one is {self.good}.")
        sentences.append(f"Against {self.first}: {step.line.partition(', ')[2]}.")
        changes = "; ".join(self.changed) or "nothing in the records"
        return [*sentences, f"Changed from {self.good} to {self.bad}: {changes}."]


def bisect(
    model: Any,
    *,
    library: str = "",
    versions: Sequence[str] = (),
    pythons: Mapping[str, str] | None = None,
    add: Sequence[str] = (),
    by: str = "speed",
    fail_on: str = "",
    out: str | Path | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Bisection:
    """Find the first version of a library, in order, under which a model is worse than under the first version.

    `by` is the criterion: speed, accuracy on labelled images (`data`), or agreement of outputs. `fail_on` is the limit
    (slower=5%, less-accurate=0.5), and `least` the share of output values that agree (default: 0.999).

    Give either `library` with `versions`, which uv installs into separate environments together with the packages in
    `add`, or `pythons`, which maps names to interpreters. Each version is compared with the first one as in
    `dyno.compare`, in a binary search: all versions are assumed good up to some version and bad from there on. Versions
    that can't be installed or run are skipped. `settings` are fields of `dyno.Study`. Run folders lie below `out`, or
    below a new folder in runs/bisect.
    """
    settings = name_fields(settings)
    check_known("criterion", by, CRITERIA)
    criterion = CRITERIA[by]
    settings, fail_on = {**criterion.rules, **settings}, fail_on or criterion.fail_on
    rules = GateRules(fail_on=(fail_on,), least=settings.get("least", 0.0))
    if rules.fail_on != (criterion.condition,) or (by == "speed" and not rules.gate):
        raise UserError(f"bisect by {by} needs a limit such as {criterion.fail_on}, not {fail_on!r}")
    if by == "accuracy" and not settings.get("data"):
        raise UserError("bisect by accuracy needs labelled images; give --data")
    if bool(pythons) == bool(library and versions):
        raise UserError("give either --library with --versions, or --pythons NAME=PATH,…")
    (source,) = one_model(model, {k: v for k, v in settings.items() if k == "device"}).models
    backend = _choose_backend(source, library, settings.pop("backends", ()))
    if pythons:
        interpreters: dict[str, Callable[[], str]] = {name: partial(str, path) for name, path in pythons.items()}
    else:
        packages_of = {version: [f"{library}=={version}", "numpy", *add] for version in versions}
        make = study_interpreters.python_with
        interpreters = {version: partial(make, packages) for version, packages in packages_of.items()}
    if len(interpreters) < 2:
        raise UserError("bisect needs two or more versions, the good one first")
    folder = folder_for(out, "bisect", [source])
    settings = {"backends": (backend,), **settings}
    search = BisectionSearch(source, backend, interpreters, folder, fail_on, settings, Progress(quiet=quiet), by)
    return replace(search.run(), by=by)


def _choose_backend(source: str, library: str, backends: Sequence[str]) -> str:
    """Return the backend for the model: the chosen one, else the default, or the first that needs the library."""
    if len(backends) > 1:
        raise UserError(f"bisect runs one backend, not {', '.join(backends)}")
    default, _ = default_runner(commits.split_commit(source)[0])
    if backends or not library:
        return backends[0] if backends else default
    for name in (default, *registry.list_backends()):
        if any(library in requirement.split("|") for requirement in registry.find(name).requires):
            return name
    raise UserError(f"no backend needs {library}; give --backend")


@dataclass
class BisectionSearch:
    """Binary search over versions; the first runnable one counts as good."""

    model: str
    backend: str
    interpreters: Mapping[str, Callable[[], str]]
    folder: Path
    fail_on: str
    settings: Mapping[str, Any]
    progress: Progress
    by: str = "speed"
    steps: list[BisectionStep] = field(default_factory=list)
    pythons: dict[str, str] = field(default_factory=dict)

    def run(self) -> Bisection:
        """Find the first bad version."""
        names = list(self.interpreters)
        while names and (reason := self._check_version(names[0])):
            self._record_step(BisectionStep(names.pop(0), SKIPPED, reason))
        if len(names) < 2:
            return Bisection(tuple(self.steps), "", undecided="fewer than two versions can be run")
        outcome, high = SKIPPED, len(names)
        while outcome == SKIPPED and high > 1:
            high -= 1
            outcome = self._compare_version(names[0], names[high])
        if outcome == BAD:
            return self._bisect_versions(names, high)
        reasons = {
            UNDECIDED: f"whether {names[high]} {CRITERIA[self.by].text} {names[0]} is not known",
            SKIPPED: "only the first version can be run",
        }
        return Bisection(tuple(self.steps), names[0], undecided=reasons.get(outcome, ""))

    def _bisect_versions(self, names: list[str], high: int) -> Bisection:
        """Find the first bad version between the first version (good) and the version at index `high` (bad)."""
        low, candidates, reason = 0, list(range(1, high)), ""
        while candidates and not reason:
            middle = candidates.pop(len(candidates) // 2)
            outcome = self._compare_version(names[0], names[middle])
            low, high = (middle, high) if outcome == GOOD else (low, middle) if outcome == BAD else (low, high)
            candidates = [k for k in candidates if low < k < high]
            if outcome == UNDECIDED:
                reason = f"{names[middle]} is undecided; it lies between {names[low]}, which is good, "
                reason += f"and {names[high]}, which is bad"
        skipped_names = {s.name for s in self.steps if s.outcome == SKIPPED}
        between = tuple(name for name in names[low + 1 : high] if name in skipped_names)
        return Bisection(tuple(self.steps), names[0], names[low], names[high], between, reason)

    def _compare_version(self, first: str, name: str) -> str:
        if reason := self._check_version(name):
            return self._record_step(BisectionStep(name, SKIPPED, reason))
        choice = Choice.parse(self.backend)
        runtime = choice.runtime or choice.name
        a, b = ({runtime: {"python": self.pythons[version]}} for version in (first, name))
        folder = self.folder / "".join(c if c.isalnum() or c in ".-_" else "-" for c in name)
        comparison = compare(
            self.model, baseline_python=a, out=folder, quiet=self.progress.quiet, fail_on=(self.fail_on,),
            **{**self.settings, "runtime": {**self.settings.get("runtime", {}), **b}},
        )  # fmt: skip
        return self._record_step(_judge_version(name, first, comparison, CRITERIA[self.by].column))

    def _check_version(self, name: str) -> str:
        """Return why the version can't be run; "" if it can."""
        if name in self.pythons:
            return ""
        try:
            python = self.interpreters[name]()
            library = missing_library(Choice.parse(self.backend).name, Runtime(python=python))
        except UserError as e:
            return str(e)
        if library:
            return f"{library} is not installed in {python}"
        self.pythons[name] = python
        return ""

    def _record_step(self, step: BisectionStep) -> str:
        self.steps.append(step)
        self.progress.note(step.line)
        return step.outcome


def _judge_version(name: str, first: str, comparison: Comparison, column: str) -> BisectionStep:
    """Return a version's step, judged by its comparison; a failed trial means skipped or undecided."""
    rows = comparison.rows
    if failed_row := next((r for r in rows if r["status_a"] != "ok"), None):
        return BisectionStep(name, UNDECIDED, f"{first} is {failed_row['status_a']}", comparison)
    broken_row = next((r for r in rows if r["status"] != "ok"), None)
    if broken_row and column != "ratio":
        return BisectionStep(name, SKIPPED, f"{broken_row['status']}, {broken_row['reason']}", comparison)
    if column != "ratio" and any(is_missing(r[column]) or r[column] == "" for r in rows):
        return BisectionStep(name, UNDECIDED, "it has no value to judge it by", comparison)
    if comparison.exit_code == 1:
        return BisectionStep(name, BAD, "", comparison)
    if comparison.exit_code == 0:
        return BisectionStep(name, GOOD, "", comparison)
    row: Row = next(filter(explain_undecided, rows), rows[0])
    has_ratio = row["status"] == "ok" and row["ratio"] == row["ratio"] and row["ratio"] is not None
    reason = explain_undecided(row) if row["status"] == "ok" else f"{row['status']}, {row['reason']}"
    return BisectionStep(name, UNDECIDED if has_ratio else SKIPPED, reason, comparison)
