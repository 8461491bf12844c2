"""`dyno bisect`: the first version of a library with which a model is slower, by comparisons with the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dyno.analysis.gate.rules import SLOWER, Rules
from dyno.analysis.presentation.table import Row
from dyno.analysis.records.results import TrialResult
from dyno.analysis.tables.compare import RATIO_SHOWN
from dyno.analysis.verdict.changes import changes
from dyno.analysis.verdict.comparison import undecided
from dyno.api.comparison import Comparison, compare
from dyno.jobs.progress import Progress
from dyno.planning import environments
from dyno.planning.defaults import default_runner, new_folder
from dyno.planning.interpreters import missing
from dyno.sources import commits
from dyno.study import Choice, Study
from dyno.worker import registry
from dyno.worker.spec import Runtime, UserError

GOOD, BAD, SKIPPED, UNCLEAR = "good", "bad", "skipped", "can't tell"
USUAL = "slower=5%"


@dataclass(frozen=True)
class Step:
    """One version that was tried: what came of it, why, and the comparison with the first one where there is one."""

    name: str
    outcome: str
    why: str = ""
    comparison: Comparison | None = None

    @property
    def said(self) -> str:
        """The step in one line."""
        rows = self.comparison.rows if self.comparison else []
        ratio = ", ".join(f"{RATIO_SHOWN.text(r)} the latency" for r in rows if RATIO_SHOWN.text(r))
        return f"{self.name}: {self.outcome}" + "".join(f", {part}" for part in (ratio, self.why) if part)


@dataclass(frozen=True)
class Bisection:
    """What was tried, in order, and where it ended: `good` and `bad` are the last good and the first bad version, ""
    where there is none; `between` are those in between of which nothing is known."""

    steps: tuple[Step, ...]
    first: str
    good: str = ""
    bad: str = ""
    between: tuple[str, ...] = ()
    unclear: str = ""

    @property
    def exit_code(self) -> int:
        """0 none is slower, 1 the first bad version was found, 3 it can't be told."""
        return 3 if self.unclear else 1 if self.bad else 0

    @cached_property
    def changed(self) -> list[str]:
        """The facts of the engine that differ between the last good and the first bad version."""
        trials = [self._trial(self.good), self._trial(self.bad)]
        return changes(trials[0], trials[1]) if trials[0] and trials[1] else []

    def _trial(self, name: str) -> TrialResult | None:
        """The trial under that version; the first one's stands beside the first bad one's."""
        step = next((s for s in self.steps if s.name == (self.bad if name == self.first else name)), None)
        if step is None or step.comparison is None or step.comparison.result is None:
            return None
        side = "trial_a" if name == self.first else "trial_b"
        return next((step.comparison.result.records.trial(r[side]) for r in step.comparison.rows), None)

    @property
    def verdicts(self) -> list[str]:
        """The outcome in sentences."""
        found = [f"skipped {s.name}: {s.why}" for s in self.steps if s.outcome == SKIPPED]
        if self.unclear:
            return [*found, f"It can't be told: {self.unclear}."]
        if not self.bad:
            return [*found, f"No version is slower than {self.first}."]
        (step,) = (s for s in self.steps if s.name == self.bad)
        gap = f", or one of those that were skipped ({', '.join(self.between)})" if self.between else ""
        found.append(f"The first bad version is {self.bad}{gap}; the last good one is {self.good}.")
        found.append(f"Against {self.first}: {step.said.partition(', ')[2]}.")
        what = "; ".join(self.changed) or "nothing that the records have"
        return [*found, f"From {self.good} to {self.bad} there changed: {what}."]


def bisect(
    model: Any,
    *,
    library: str = "",
    versions: Sequence[str] = (),
    pythons: Mapping[str, str] | None = None,
    add: Sequence[str] = (),
    fail_on: str = USUAL,
    out: str | Path | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Bisection:
    """The first of several versions of a library, in order, under which a model is slower than under the first.

    Either `library` with `versions`, which uv installs into environments of their own together with the packages to
    `add`, or `pythons`, interpreters by name. Each is compared with the first one as `dyno.compare` does it, by halves:
    so it takes that versions are good up to one and bad from there. What can't be installed or run is skipped.
    `settings` are fields of `dyno.Study`. Run folders lie below `out`, or a new folder below runs/bisect.
    """
    rules = Rules(fail_on=(fail_on,))
    if not rules.gate or rules.fail_on != (SLOWER,):
        raise UserError(f"bisect looks for a slow-down; {fail_on!r} is none, write slower=5% or the like")
    if bool(pythons) == bool(library and versions):
        raise UserError("give either --library with --versions, or --pythons NAME=PATH,…")
    (source,) = Study(models=(model,)).models
    backend = _backend(source, library, settings.pop("backends", ()))
    if pythons:
        places: dict[str, Callable[[], str]] = {name: partial(str, path) for name, path in pythons.items()}
    else:
        needed = {version: [f"{library}=={version}", "numpy", *add] for version in versions}
        places = {version: partial(environments.made, packages) for version, packages in needed.items()}
    if len(places) < 2:
        raise UserError("there is nothing between one version and itself; give two or more, the good one first")
    folder = Path(out) if out else new_folder("bisect", [source])
    settings = {"backends": (backend,), **settings}
    search = Search(source, backend, places, folder, fail_on, settings, Progress(quiet=quiet))
    return search.run()


def _backend(source: str, library: str, asked: Sequence[str]) -> str:
    """The backend that runs the model with the library: the one asked for, else the usual one, else any."""
    if len(asked) > 1:
        raise UserError(f"bisect runs one backend, not {', '.join(asked)}")
    usual, _ = default_runner(commits.split(source)[0])
    if asked or not library:
        return asked[0] if asked else usual
    users = [name for name in (usual, *registry.names()) if _needs(name, library)]
    if not users:
        raise UserError(f"no backend needs {library}; give --backends")
    return users[0]


def _needs(name: str, library: str) -> bool:
    return any(library in either.split("|") for either in registry.find(name).requires)


@dataclass
class Search:
    """A binary search over versions, of which the first is good."""

    model: str
    backend: str
    places: Mapping[str, Callable[[], str]]
    folder: Path
    fail_on: str
    settings: Mapping[str, Any]
    progress: Progress
    steps: list[Step] = field(default_factory=list)
    pythons: dict[str, str] = field(default_factory=dict)

    def run(self) -> Bisection:
        """Try versions until the first bad one is known, or nothing more can be."""
        names = list(self.places)
        while names and (why := self._unusable(names[0])):
            self._keep(Step(names.pop(0), SKIPPED, why))
        if len(names) < 2:
            return Bisection(tuple(self.steps), "", unclear="fewer than two versions can be run")
        outcome, last = SKIPPED, len(names)
        while outcome == SKIPPED and last > 1:
            last -= 1
            outcome = self._tried(names[0], names[last])
        if outcome == BAD:
            return self._halved(names, last)
        reasons = {UNCLEAR: f"{names[last]} is neither slower nor not", SKIPPED: "no version but the first can be run"}
        return Bisection(tuple(self.steps), names[0], unclear=reasons.get(outcome, ""))

    def _halved(self, names: list[str], high: int) -> Bisection:
        """The first bad version between the first one, which is good, and that one, which is bad."""
        low, left, unclear = 0, list(range(1, high)), ""
        while left and not unclear:
            middle = left.pop(len(left) // 2)
            outcome = self._tried(names[0], names[middle])
            low, high = (middle, high) if outcome == GOOD else (low, middle) if outcome == BAD else (low, high)
            left = [k for k in left if low < k < high]
            if outcome == UNCLEAR:
                unclear = f"{names[middle]} is neither slower nor not; it lies between {names[low]}, which is good, "
                unclear += f"and {names[high]}, which is bad"
        skipped = {s.name for s in self.steps if s.outcome == SKIPPED}
        between = tuple(name for name in names[low + 1 : high] if name in skipped)
        return Bisection(tuple(self.steps), names[0], names[low], names[high], between, unclear)

    def _tried(self, first: str, name: str) -> str:
        """What came of the version, compared with the first."""
        if why := self._unusable(name):
            return self._keep(Step(name, SKIPPED, why))
        a, b = ({self._runtime: {"python": self.pythons[each]}} for each in (first, name))
        place = self.folder / "".join(c if c.isalnum() or c in ".-_" else "-" for c in name)
        found = compare(
            self.model, against=a, out=place, quiet=self.progress.quiet, fail_on=(self.fail_on,),
            **{**self.settings, "runtime": {**self.settings.get("runtime", {}), **b}},
        )  # fmt: skip
        return self._keep(_judged(name, first, found))

    @property
    def _runtime(self) -> str:
        choice = Choice.parse(self.backend)
        return choice.runtime or choice.name

    def _unusable(self, name: str) -> str:
        """Why the version can't be run, "" where it can."""
        if name in self.pythons:
            return ""
        try:
            python = self.places[name]()
            lacks = missing(Choice.parse(self.backend).name, Runtime(python=python))
        except UserError as e:
            return str(e)
        if lacks:
            return f"{lacks} is not installed in {python}"
        self.pythons[name] = python
        return ""

    def _keep(self, step: Step) -> str:
        self.steps.append(step)
        self.progress.note(step.said)
        return step.outcome


def _judged(name: str, first: str, found: Comparison) -> Step:
    """A version's step from its comparison: what failed, or computes something else, is skipped."""
    rows = found.rows
    if broken := next((r for r in rows if r["status_a"] != "ok"), None):
        return Step(name, UNCLEAR, f"{first} is {broken['status_a']}", found)
    if found.exit_code == 1:
        return Step(name, BAD, "", found)
    if found.exit_code == 0:
        return Step(name, GOOD, "", found)
    row: Row = next(r for r in rows if undecided(r))
    ran = row["status"] == "ok" and row["ratio"] == row["ratio"] and row["ratio"] is not None
    why = undecided(row) if row["status"] == "ok" else f"{row['status']}, {row['reason']}"
    return Step(name, UNCLEAR if ran else SKIPPED, why, found)
