"""Run a study: for each model its files first, then each trial in several fresh processes, in shuffled rounds."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from dyno.analysis.ranking import references
from dyno.analysis.records import gpu_remarks, timeline
from dyno.engine import ensemble, further_rounds, precision_search, retry, self_test
from dyno.engine.gpu_lock import launch_in_turn
from dyno.engine.peak import find_peak
from dyno.engine.run_folder import prepare_folder, refuse_other
from dyno.jobs.progress import Progress
from dyno.planning.checks import check_device
from dyno.planning.plan import expand
from dyno.planning.planned import Planned
from dyno.store import CONFIRMATION, FOLDERS, Cache, Run
from dyno.study import Study
from dyno.worker import system
from dyno.worker.facts.job import Facts
from dyno.worker.record import TIMING, Record, refuse_links, write_bytes, write_record, write_text
from dyno.worker.spec import Artifact, Job, Recipe, Trial

Fits = Callable[[Trial], bool] | None  # whether a trial is the reference that was requested; None: nothing was

MAKE_TIMEOUT_S = 3600.0
OTHER_ROUTE = ("failed", "crashed", "timeout")  # how a route ends behind which another may lead on
LONGEST_LOG = 100_000  # characters


def execute(
    study: Study, folder: Path, progress: Progress, *, retry_failed: bool = False, only: Container[str] | None = None
) -> None:
    """Measure whatever the folder doesn't hold yet; of what is stored only failures whose reason may be gone are tried
    again, or all of them with `retry_failed`. With `only`, trials of other ids are left as they are."""
    check_device(study)
    refuse_other(study, folder)
    planned = expand(study)
    run = Run(folder)
    with run.locked():
        refuse_links(folder, FOLDERS)
        planned, said = prepare_folder(study, run, planned)
        _refuse(run, planned)
        _keep_truth(run, planned)
        self_test.keep_in(run.folder, study.device)
        todo = [one.trial for one in planned if not one.refusal and (only is None or one.trial.id in only)]
        for line in (*said, *retry.clear(run, todo, retry_failed), *retry.clear_damaged(run, todo)):
            progress.note(line)
        files = Files(progress)
        if study.peak:
            with progress.running([]):
                find_peak(study, run.folder / "peak", progress)

        fits = references.matcher(study.reference, todo) if study.reference else None

        def rounds(trials: list[Trial]) -> None:
            _rounds(run, trials, files, progress, fits)

        rounds(todo)
        if study.searches:
            todo += precision_search.search(study, folder, todo, rounds)
        if study.until:

            def once(trials: list[Trial], number: int) -> None:
                _further(run, trials, number, files, progress, fits)

            further_rounds.go_on(study, run, todo, once, progress)
        if study.confirmations:
            _confirm(run, further_rounds.finalists(folder, todo), study.confirmations, files, progress)
        for trial in todo:
            shutil.rmtree(run.round_folder(trial, 0).parent / "compiler", ignore_errors=True)


def _rounds(run: Run, trials: list[Trial], files: Files, progress: Progress, fits: Fits) -> None:
    """Every round of the trials that isn't stored yet, one model after the other.

    Nothing compares two models, and whoever stops a long study early has some of them whole.
    """
    models: dict[str, list[Trial]] = {}
    for trial in trials:
        models.setdefault(ensemble.company(trial), []).append(trial)
    orders = [_order(own) for own in models.values()]
    with progress.running([trial for order in orders for trial, _ in order]):
        for own, order in zip(models.values(), orders, strict=True):
            left = [trial for trial in own if _left(run, trial)]
            turns = bool(own[0].plan.blocks)
            made = files.all(own if turns and left else left)  # whose rounds are stored may be measured beside others
            if turns:
                _turns(run, own, made, progress, fits)
                continue
            for trial, number in order:
                _round(run, trial, number, made.get(trial.id), progress)


def _turns(
    run: Run, trials: list[Trial], made: Mapping[str, Artifact | Record], progress: Progress, fits: Fits
) -> None:
    """Every round of a model's trials, those that are compared in turns."""
    for number in range(max(trial.plan.rounds for trial in trials)):
        _turn(run, [t for t in trials if number < t.plan.rounds], number, made, progress, fits)


def _turn(
    run: Run,
    trials: list[Trial],
    number: int,
    made: Mapping[str, Artifact | Record],
    progress: Progress,
    fits: Fits,
) -> None:
    """One round of a model's trials, those that are compared in turns."""
    groups = ensemble.groups(trials)
    random.Random(number).shuffle(groups)
    for group in groups:
        left = []
        for trial in group:
            if _stored(run, trial, number) is None and not isinstance(made.get(trial.id), Record):
                left.append(trial)
            else:
                _round(run, trial, number, made.get(trial.id), progress)
        known = {trial.id: _stored(run, trial, number) for trial in group}
        first = ensemble.reference([t for t in group if (r := known[t.id]) is None or r.status == "ok"], fits)
        for trial in ensemble.measure(run, left, first, number, made, progress):
            _round(run, trial, number, made.get(trial.id), progress)


def _further(run: Run, trials: list[Trial], number: int, files: Files, progress: Progress, fits: Fits) -> None:
    """One more round, of that number, of trials of one model."""
    again = [replace(trial, plan=replace(trial.plan, rounds=number + 1)) for trial in trials]
    random.Random(number).shuffle(again)
    with progress.running(again):
        made = files.all(again)
        if again[0].plan.blocks:
            _turn(run, again, number, made, progress, fits)
            return
        for trial in again:
            _round(run, trial, number, made.get(trial.id), progress)


def _confirm(run: Run, trials: list[Trial], times: int, files: Files, progress: Progress) -> None:
    """Measure the trials again, interleaved, beside the rounds that they were selected by."""
    order = [(t, k) for t, k in _order([replace(t, plan=replace(t.plan, rounds=times)) for t in trials])
             if run.record(t, k, CONFIRMATION) is None]  # fmt: skip
    with progress.running([trial for trial, _ in order]):
        for trial, number in order:
            made = files.file(trial.recipe) if trial.recipe else None
            if isinstance(made, Record):
                run.store(trial, number, made, CONFIRMATION)
                continue
            folder = run.fresh(trial, number, CONFIRMATION)
            progress.start(trial, number, "confirmation")
            # Counted from 1: round 0 is the one that answers all images, and that is known of a confirmed trial.
            job = Job("run", trial.runtime, trial, number + 1, artifact=made)
            progress.done(trial, launch_in_turn(job, folder, trial.plan.timeout_s, progress))


def _refuse(run: Run, planned: list[Planned]) -> None:
    """Store a row for each trial that will not run."""
    for one in planned:
        if one.refusal:
            stored = run.record(one.trial, 0)
            if stored is None or (stored.stage == "plan" and stored.reason != one.refusal):
                run.store(one.trial, 0, Record(one.status, "plan", one.refusal))


def _keep_truth(run: Run, planned: list[Planned]) -> None:
    """What is to be found in a detector's images travels with the run, so that its accuracy can be read anywhere."""
    for data in {one.trial.data for one in planned if one.trial.data.folder}:
        source, kept = Path(data.folder) / "truth.json", run.folder / "truth" / f"{data.sha256[:12]}.json"
        if source.is_file() and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(kept, source.read_bytes())


def _order(trials: list[Trial]) -> list[tuple[Trial, int]]:
    """Every job of these trials: round by round, each round shuffled in its own way, the same on every machine."""
    order = []
    for number in range(max((trial.plan.rounds for trial in trials), default=0)):
        jobs = [(trial, number) for trial in trials if number < trial.plan.rounds]
        random.Random(number).shuffle(jobs)
        order += jobs
    return order


def _stored(run: Run, trial: Trial, number: int) -> Record | None:
    """What is known of that round: its own record, or the one of an earlier round that ended badly."""
    known = [run.record(trial, k) for k in range(number + 1)]
    return known[-1] or next((record for record in known if record is not None and record.status != "ok"), None)


def _left(run: Run, trial: Trial) -> bool:
    """Whether a round of the trial is still to be measured."""
    return any(_stored(run, trial, number) is None for number in range(trial.plan.rounds))


def _round(run: Run, trial: Trial, number: int, made: Artifact | Record | None, progress: Progress) -> None:
    """One round of one trial, unless it is stored already or an earlier round showed that it can't run."""
    if (stored := _stored(run, trial, number)) is not None:
        progress.done(trial, stored, stored=True)
        return
    folder = run.fresh(trial, number)
    if isinstance(made, Record):
        record = replace(made, facts=Facts())
        run.store(trial, number, record)
        if made.facts.printed:
            write_text(folder / "stderr.log", made.facts.printed)
    else:
        progress.start(trial, number)
        job = Job("run", trial.runtime, trial, number, artifact=made)
        record = launch_in_turn(job, folder, trial.plan.timeout_s, progress)
    if record.status != "ok":
        retry.note(folder, trial)
    progress.done(trial, record)


class Files:
    """Makes the files that trials need, each once, or takes them from the cache."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.cache = Cache()
        self.made: dict[str, Artifact | Record] = {}
        self.built = 0  # files that were made and not found in the cache

    def all(self, trials: Iterable[Trial]) -> dict[str, Artifact | Record]:
        """The file of each trial by the trial's id; a record that says why where it could not be made."""
        return {trial.id: self.file(trial.recipe) for trial in trials if trial.recipe is not None}

    def file(self, recipe: Recipe) -> Artifact | Record:
        """The file this recipe makes, from the cache when everything that shaped it is the same."""
        key = self.cache.key(recipe)
        if key not in self.made:
            self.made[key] = self._make(recipe, key)
        return self.made[key]

    def _make(self, recipe: Recipe, key: str) -> Artifact | Record:
        stored, wrong = self.cache.find(key)
        if stored is not None:
            return stored
        made = self._by(recipe, key, wrong)
        if isinstance(made, Artifact) or recipe.fallback is None:
            return made
        if made.status not in OTHER_ROUTE or made.facts.no_route:
            return made
        other = self.file(recipe.fallback)
        # What the last route says is left to do: it has the fixed batch that those before it may have asked for.
        return other if isinstance(other, Record) else self._instead(other, made, key)

    def _instead(self, other: Artifact, failed: Record, key: str) -> Artifact:
        """Another route's file in place of the one that could not be made; kept, so that nobody tries that again."""
        said = f"made by another route ({other.made_by.onnx_route or 'not folded'}), because the usual one "
        said += f"ended as {failed.status} at {failed.stage}: {failed.reason}"
        made = replace(other, made_by=replace(other.made_by, warnings=(*other.made_by.warnings, said)))
        with self.cache.making(key) as folder:
            write_record(folder, Record("ok", artifact=made))
        return made

    def _by(self, recipe: Recipe, key: str, wrong: str) -> Artifact | Record:
        """The file by this recipe alone."""
        parent = self.file(recipe.parent) if recipe.parent else None
        if isinstance(parent, Record):
            return parent
        self.progress.making(recipe, wrong)
        with self.cache.making(key) as folder:
            # Nothing is timed meanwhile, so a file that nobody gave threads for takes every core.
            runtime = replace(recipe.runtime, threads=max(recipe.runtime.threads, system.physical_cores()))
            job = Job("make", runtime, recipe=recipe, artifact=parent)
            timing = {TIMING: str(self.cache.timing)}
            record = launch_in_turn(job, folder, MAKE_TIMEOUT_S, self.progress, timing)
            _say_shared(folder, record)
            said = Facts(no_route=record.facts.no_route, printed=_printed(folder))  # its folder is gone after this
        if record.status != "ok":
            return Record(record.status, record.stage, record.reason, system=record.system, facts=said)
        self.built += 1
        made, wrong = self.cache.find(key)
        return made or Record("failed", record.stage, wrong or "the file was made but is not in the cache")


def _printed(folder: Path) -> str:
    """The end of what a job that made a file printed as errors, to be kept where it failed."""
    path = folder / "stderr.log"
    return path.read_text(encoding="utf-8", errors="replace")[-LONGEST_LOG:] if path.is_file() else ""


def _say_shared(folder: Path, record: Record) -> None:
    """A builder that timed its kernels beside somebody else's work may have picked the wrong ones: a warning."""
    trace = timeline.read(folder)
    others = timeline.most_others(trace) if trace else 0
    if record.artifact is None or not others:
        return
    made_by = record.artifact.made_by
    said = f"{gpu_remarks.meanwhile(others)}: kernels were timed beside it and may not be the fastest"
    made_by = replace(made_by, warnings=tuple(dict.fromkeys((*made_by.warnings, said))))  # a parent's are among them
    write_record(folder, replace(record, artifact=replace(record.artifact, made_by=made_by)))
