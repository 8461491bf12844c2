"""Execution of a study: each model's files first, then each trial in several fresh processes, in shuffled rounds."""

from __future__ import annotations

import hashlib
import itertools
import math
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.formatting import format_count
from dyno.jobs.launcher import LOGS, read_end
from dyno.jobs.progress import Progress
from dyno.results import correctness, remarks, timeline
from dyno.results.notes import FEWER_ROUNDS_FILE, read_dropped, read_models, store_dropped
from dyno.results.trial_result import find_forms
from dyno.runner import ensemble, search, self_test
from dyno.runner.device_lock import launch_in_turn
from dyno.runner.ensemble import Forms, model_key
from dyno.runner.peak import ENERGY_LOAD_S, find_peak, keep_idle
from dyno.runner.run_folder import prepare_folder, refuse_other
from dyno.store import COMPANION, CONFIRMATION, ROUND, RUN_FOLDERS, SUSTAINED, Cache, Run, check_own
from dyno.study.defaults import check_device
from dyno.study.plan import PlannedTrial, TrialSelection, expand
from dyno.study.study import Study
from dyno.worker import registry, system
from dyno.worker.facts.job import Facts
from dyno.worker.record import TIMING_VARIABLE, Record, read_record, refuse_links, write_bytes, write_record, write_text
from dyno.worker.spec import (
    ADAPTIVE_RULES,
    BUILD_OPTIONS,
    ENERGY_OPTION,
    PLAN_OPTION,
    TIMING_CACHE,
    Artifact,
    Job,
    Plan,
    Recipe,
    Trial,
    UserError,
)

if TYPE_CHECKING:
    from dyno.results.ranking import UndecidedPair

MAX_READING_S = 5.0  # slower answers are shown only at the end of a run
SUSTAINED_ROUNDS = 2  # per finalist
MIN_ROUNDS = 2  # rounds of every trial, whatever --minutes
FULL_ROUNDS = 3  # rounds of every trial within the minutes; later ones go to possible winners
PLANNED_ROUNDS_SHARE = 1 / 2  # share of the minutes for planned rounds; beyond it trials are dropped
FIRST_ANSWER_AFTER_S = 30.0  # after this time of making files, a first answer comes from the ready ones
Fits = Callable[[Trial], bool] | None  # test for the requested reference; None without a request
Launch = Callable[[Job, Path, float, Progress], Record]  # runs a round's job in a folder, with a time limit
RETRY_ROUTE_STATUSES = ("failed", "crashed", "timeout")  # statuses that lead to the next route
MAX_LOG_BYTES = 100_000  # bytes kept of a build's output


def execute(
    study: Study,
    folder: Path,
    progress: Progress,
    *,
    retry_failed: bool = False,
    only: TrialSelection | None = None,
    launch: Launch | None = None,
    other_routes: bool = False,
) -> None:
    """Measure the parts of the study that the folder doesn't hold yet.

    Stored failures are retried if their reason may be gone, or all of them with `retry_failed`. `only` restricts the
    trials; `UserError` if the study doesn't plan them here. `launch` runs jobs of rounds that are not interleaved
    (default: `launch_in_turn`), and may change their kind. `other_routes` tries other routes to the ONNX file after the
    first round, unless the study names routes.
    """
    check_device(study)
    if only is None:  # else part of a checked run
        check_own(folder)
    refuse_other(study, folder)
    planned = _plan(study, only)
    run = Run(folder)
    with run.hold_lock():
        planned = prepare(study, run, planned, progress)
        self_test.keep_in(run.folder, study.device)
        todo = [entry.trial for entry in planned if not entry.refusal and (not only or entry.trial.id in only.trials)]
        for line in (*ensemble.clear_failed(run, todo, retry_failed), *ensemble.clear_damaged(run, todo),
                     *ensemble.clear_stopped(run, todo)):  # fmt: skip
            progress.note(line)
        files = Files(progress, study.build_timeout_s)
        if study.energy:  # before the first job heats the device
            keep_idle(study, run.folder, progress)
        if study.peak:
            with progress.show_study([]):
                find_peak(study, run.folder / "peak", progress)
        fits = correctness.make_matcher(study.reference, todo) if study.reference else None
        forms = find_forms(read_models(run.folder))
        options = {ENERGY_OPTION: ENERGY_LOAD_S} if study.energy else {}
        limit_s = 60 * study.minutes if study.until in ADAPTIVE_RULES else math.inf
        rounds = Rounds(run, files, progress, fits, forms, launch, options, study.until not in ADAPTIVE_RULES, limit_s)
        if other_routes and not study.routes:
            rounds.measure_rounds(todo, max_rounds=1)  # a first answer, before exports by other routes
            measure = partial(execute, progress=progress)
            with progress.hidden_answers():
                todo += search.search_routes(study, run.folder, todo, files.make_file, progress, measure)
        rounds.measure_rounds(todo)
        if study.searches:
            todo += search.search_precisions(study, folder, todo, rounds.measure_rounds)
        if study.until in ADAPTIVE_RULES:
            go_on(study, run, todo, forms, rounds.measure_further_round, progress)
        if study.confirmations or study.sustained_s:
            Finalists(run, todo, list_finalists(folder), files, progress, fits, forms).measure(study)
        for trial in todo:
            shutil.rmtree(run.round_folder(trial, 0).parent / "compiler", ignore_errors=True)


def _plan(study: Study, only: TrialSelection | None) -> list[PlannedTrial]:
    """Return the study's trials on this host; raise `UserError` if trials of `only` aren't among them."""
    planned = expand(study, only.sources if only else ())
    if only and (unplanned := {*only.trials} - {entry.trial.id for entry in planned}):
        raise UserError(
            f"{platform.node()} plans other trials than requested ({len(unplanned)} differ); all hosts "
            "need the same Dyno, libraries, models and data, at the same paths"
        )
    return planned


def prepare(study: Study, run: Run, planned: list[PlannedTrial], progress: Progress) -> list[PlannedTrial]:
    """Fit the locked folder to the study (`prepare_folder`), and store rows of refused trials."""
    refuse_links(run.folder, RUN_FOLDERS)
    planned, notes = prepare_folder(study, run, planned)
    _store_refusals(run, planned)
    _copy_truth(run, planned)
    for line in notes:
        progress.note(line)
    return planned


@dataclass(frozen=True)
class Rounds:
    """Measurement of a study's rounds; `fits` selects the requested reference, and `options` are added to planned jobs.

    Ready trials are measured once, and a first answer shown, before slow steps: engines that compile while they load or
    build slowly, or files after FIRST_ANSWER_AFTER_S seconds of preparation. If the number of rounds `is_fixed`, no
    pair gets a further round for a missing one. After MIN_ROUNDS, a round that would exceed `limit_s` seconds in all
    drops trials that no longer contend; after FULL_ROUNDS, one beyond PLANNED_ROUNDS_SHARE of them does, and a round
    that would still exceed `limit_s` is not begun.
    """

    run: Run
    files: Files
    progress: Progress
    fits: Fits
    forms: Forms
    launch: Launch | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_fixed: bool = False
    limit_s: float = math.inf

    def measure_rounds(
        self, trials: list[Trial], rivals: Sequence[Trial] = (), *, max_rounds: int = sys.maxsize
    ) -> None:
        """Measure every missing round of the trials, up to `max_rounds`, one model after the other.

        Interleaved trials also run beside their reference among the `rivals`. Models are not compared with each other;
        if a long study is stopped early, some models are complete.
        """
        models: dict[str, list[Trial]] = {}
        for trial in trials:
            models.setdefault(model_key(trial, self.forms), []).append(trial)
        all_orders = [_order_jobs(model_trials) for model_trials in models.values()]
        orders = [[job for job in order if job[1] < max_rounds] for order in all_orders]
        later_trials = [trial for order in all_orders for trial, round_index in order if round_index >= max_rounds]
        with self.progress.show_study([trial for order in orders for trial, _ in order], later_trials):
            for (key, model_trials), order in zip(models.items(), orders, strict=True):
                incomplete = [trial for trial in model_trials if _is_incomplete(self.run, trial, max_rounds)]
                rounds = max(trial.plan.rounds for trial in model_trials)
                has_turns = bool(model_trials[0].plan.blocks)
                peers = [t for t in rivals if model_key(t, self.forms) == key] if has_turns else []
                # Interleaved trials with stored rounds may be measured again beside others.
                measured = self._make_files([*model_trials, *peers] if has_turns and incomplete else incomplete, peers)
                if has_turns:
                    todo = [trial for trial in model_trials if trial not in measured]
                    for round_index in range(min(rounds, max_rounds)):
                        is_new = any(_find_record(self.run, trial, round_index) is None for trial in incomplete)
                        self._in_turns(todo, round_index, peers, self.options, [] if round_index else measured)
                        next_trials = [trial for trial in model_trials if round_index + 1 < trial.plan.rounds]
                        if MIN_ROUNDS <= round_index + 1 < rounds:
                            next_trials = self._choose_trials(next_trials, round_index + 1, self.limit_s / len(models))
                        if is_new and todo and round_index < rounds - 1:
                            self._show_answer(round_index, rounds)
                        todo = next_trials
                    continue
                for round_index, jobs in itertools.groupby(order, key=lambda job: job[1]):
                    for trial, _ in jobs:
                        self._measure_alone(trial, round_index, self.options)
                    if incomplete and round_index < rounds - 1:
                        self._show_answer(round_index, rounds)

    def _choose_trials(self, trials: Sequence[Trial], round_index: int, limit_s: float) -> list[Trial]:
        """Return the trials for round `round_index`: all within the time limit, else possible winners, or none."""
        from dyno.report.tables import trial_table
        from dyno.results import ranking

        dropped_ids, spent_s = frozenset(read_dropped(self.run.folder).trials), _sum_seconds(self.run, trials)
        other_ids = dropped_ids.difference(trial.id for trial in trials)
        is_late = round_index >= FULL_ROUNDS
        if spent_s * (round_index + 1) / round_index <= limit_s * (PLANNED_ROUNDS_SHARE if is_late else 1):
            # the stored note may be damaged
            if is_late and (other_ids != dropped_ids or (self.run.folder / FEWER_ROUNDS_FILE).is_file()):
                store_dropped(self.run.folder, other_ids)
            return [*trials]
        if other_ids == dropped_ids and any(_find_record(self.run, trial, round_index) is None for trial in trials):
            contenders = ranking.list_contenders(trial_table.read_trials(self.run.folder))
            dropped_ids = other_ids.union(trial.id for trial in trials if trial.id not in contenders)
        next_trials = [trial for trial in trials if trial.id not in dropped_ids]
        is_over = is_late and spent_s + sum(_last_seconds(self.run, trial) for trial in next_trials) > limit_s
        store_dropped(self.run.folder, dropped_ids, is_over=is_over)
        for trial in trials:
            if is_over or trial not in next_trials:
                self.progress.leave_out(trial)
        return [] if is_over else next_trials

    def _make_files(self, trials: Sequence[Trial], peers: Sequence[Trial]) -> list[Trial]:
        """Make the trials' files; return the trials measured once meanwhile (see `Rounds`)."""
        references = [
            ensemble.choose_reference(group, self.fits, self.forms)
            for group in ensemble.group_trials(trials, self.forms)
        ]

        def delay(trial: Trial) -> int:
            if _builds_slowly(trial) and not self.files.has_file(trial):
                return 2
            return 1 if _compiles(trial) and trial not in references else 0

        ready: list[Trial] = []
        done: list[Trial] = []
        begin, max_delay = time.monotonic(), 0
        order = sorted(trials, key=lambda trial: (delay(trial), not self.files.has_file(trial)))
        with self.progress.pause_estimate():
            for index, trial in enumerate(order):
                needs_file = not self.files.has_file(trial)
                is_late = not done and needs_file and time.monotonic() - begin > FIRST_ANSWER_AFTER_S
                if delay(trial) > max_delay or is_late:
                    trial_count = format_count(len(order) - index, "trial")
                    state = "still without a file" if needs_file else "still to compile"
                    done += self._measure_ready(ready, peers, done, f"{trial_count} {state}")
                max_delay = max(max_delay, delay(trial))
                self.files.make_files([trial])
                ready.append(trial)
        return done

    def _measure_ready(
        self, trials: Sequence[Trial], peers: Sequence[Trial], done: Sequence[Trial], reason: str
    ) -> list[Trial]:
        """Measure the missing first rounds of these trials and show the answer; return the trials measured."""
        new_trials = [t for t in trials if t.plan.blocks and t not in peers and _find_record(self.run, t, 0) is None]
        if new_trials:
            self.progress.note(f"{reason}: the ready trials are measured once first")
            stored_trials = [trial for trial in trials if trial not in (*new_trials, *peers, *done)]
            self._in_turns(new_trials, 0, [*peers, *stored_trials], self.options, done)
            self._show_answer(0, is_part=True)
        return new_trials

    def measure_further_round(self, trials: list[Trial], round_index: int, boundaries: Sequence[str]) -> None:
        """Measure round `round_index` of trials of one model, at these boundaries only."""
        round_trials = [replace(trial, plan=replace(trial.plan, rounds=round_index + 1)) for trial in trials]
        random.Random(round_index).shuffle(round_trials)
        options = {PLAN_OPTION: {"boundaries": list(boundaries)}}
        with self.progress.show_study(round_trials):
            self.files.make_files(round_trials)
            if round_trials[0].plan.blocks:
                self._in_turns(round_trials, round_index, (), options)
                self._show_answer(round_index)
                return
            for trial in round_trials:
                self._measure_alone(trial, round_index, options)

    def _show_answer(self, round_index: int, rounds: int = 0, *, is_part: bool = False) -> None:
        """Show the study's answer after this round of the planned ones (0: a further round), or after a part of it."""
        from dyno.report.tables import trial_table
        from dyno.report.verdict import verdict

        previous_s = self.progress.answer_s
        if not self.progress.quiet and (previous_s or 0.0) < MAX_READING_S:
            begin = time.monotonic()
            answer = verdict.answer_so_far(trial_table.read_trials(self.run.folder))
            title = f"{'in' if is_part else 'after'} round {round_index + 1}" + (f" of {rounds}" if rounds else "")
            self.progress.show_answer(title, answer.sentences, answer.rows)
            self.progress.answer_s = 0.0 if previous_s is None else time.monotonic() - begin

    def _in_turns(
        self,
        trials: Sequence[Trial],
        round_index: int,
        peers: Sequence[Trial],
        options: Mapping[str, Any],
        done: Sequence[Trial] = (),
    ) -> None:
        """Measure one round of a model's trials, interleaving those that are compared.

        Stored trials join again as rivals: the finalists among `done`, or among all if no further round can follow
        (`is_fixed`). All of them join a new reference. In the first of several rounds of a fixed number, all of `done`
        join, so that every pair has as many rounds.
        """
        comparisons: list[ensemble.ComparedTrials] = []
        groups = ensemble.group_trials([*trials, *peers, *done], self.forms)
        random.Random(round_index).shuffle(groups)
        for group in groups:
            pending = []
            for trial in (t for t in group if t in trials):
                if _find_record(self.run, trial, round_index) is None and not isinstance(
                    self.files.get(trial, round_index), Record
                ):
                    pending.append(trial)
                else:
                    self._measure_alone(trial, round_index, options)
            if not pending:
                continue
            records = {trial.id: _find_record(self.run, trial, round_index) for trial in group}
            runnable = [t for t in group if (r := records[t.id]) is None or r.status == "ok"]
            reference = ensemble.choose_reference(runnable, self.fits, self.forms)
            candidates = [t for t in runnable if records[t.id] and t != reference and (self.is_fixed or t in done)]
            rivals = candidates
            if candidates and reference not in pending:
                fixed_rivals = done if self.is_fixed and candidates[0].plan.rounds > 1 else ()
                finalists = list_finalists(self.run.folder)
                rivals = [trial for trial in candidates if trial in fixed_rivals or trial.id in finalists]
            elif not candidates and pending == [reference]:  # others were measured beside it
                reference = ensemble.choose_reference([t for t in runnable if t != reference], self.fits, self.forms)
            comparisons.append(ensemble.ComparedTrials(pending, reference, rivals=rivals))
        # A first answer doesn't wait for other batches and sizes.
        for chunk in [comparisons] if round_index else [[comparison] for comparison in comparisons]:
            if chunk and chunk[0] is not comparisons[0]:
                self._show_answer(round_index, is_part=True)
            for trial in ensemble.measure(self.run, chunk, round_index, self.files.get, self.progress, options):
                self._measure_alone(trial, round_index, options)

    def _measure_alone(self, trial: Trial, round_index: int, options: Mapping[str, Any]) -> None:
        """Measure one round of one trial, unless it is stored or an earlier round failed."""
        if (stored_record := _find_record(self.run, trial, round_index)) is not None:
            self.progress.done(trial, stored_record, is_stored=True)
            return
        folder, artifact = self.run.create_round(trial, round_index), self.files.get(trial, round_index)
        if isinstance(artifact, Record):
            record = replace(artifact, facts=Facts())
            self.run.store(trial, round_index, record)
            if artifact.facts.printed:
                write_text(folder / LOGS[1], artifact.facts.printed)
        else:
            self.progress.start(trial, round_index)
            job = ensemble.make_job(trial, round_index, self.files.get, options)
            record = (self.launch or launch_in_turn)(job, folder, trial.plan.timeout_s, self.progress)
        if record.status != "ok":
            ensemble.note_retry(folder, trial, unmade=isinstance(artifact, Record))
        self.progress.done(trial, record)


@dataclass(frozen=True)
class Finalists:
    """Repeated measurement of the selected trials, stored apart from the selecting rounds.

    `boundaries` holds the boundaries at which each finalist was selected, by id.
    """

    run: Run
    trials: Sequence[Trial]
    boundaries: Mapping[str, set[str]]
    files: Files
    progress: Progress
    fits: Fits
    forms: Forms

    def measure(self, study: Study) -> None:
        """Confirm the finalists, then interleave them in unbroken turns of `study.sustained_s` seconds."""
        self._measure_rounds(study.confirmations, CONFIRMATION)
        if seconds := study.sustained_s:
            plan = {"blocks": SUSTAINED_ROUNDS, "block_s": seconds, "seconds": SUSTAINED_ROUNDS * seconds}
            self._measure_rounds(1, SUSTAINED, {PLAN_OPTION: plan})

    def _measure_rounds(self, rounds: int, kind: str, options: Mapping[str, Any] | None = None) -> None:
        finalists = [replace(t, plan=replace(t.plan, rounds=rounds)) for t in self.trials if t.id in self.boundaries]
        pending = [(t, k) for t, k in _order_jobs(finalists) if self.run.record(t, k, kind) is None]
        with self.progress.show_study([trial for trial, _ in pending]):
            self.files.make_files(trial for trial, _ in pending)
            for round_index in sorted({k for _, k in pending}):
                rest = self._measure_in_turns([t for t, k in pending if k == round_index], round_index, kind, options)
                if kind == CONFIRMATION:  # uninterleaved sustained load proves nothing: the machine may have changed
                    for trial in rest:
                        self._confirm_alone(trial, round_index)

    def _measure_in_turns(
        self, trials: Sequence[Trial], round_index: int, kind: str, options: Mapping[str, Any] | None
    ) -> list[Trial]:
        """Measure one round of trials that can be interleaved; return the others."""
        comparisons: list[ensemble.ComparedTrials] = []
        rest: list[Trial] = []
        for group in ensemble.group_trials(trials, self.forms):
            runnable = [t for t in group if not isinstance(self.files.get(t, round_index), Record)]
            boundary_names = set().union(*(self.boundaries[t.id] for t in group))
            boundaries = tuple(name for name in group[0].plan.boundaries if name in boundary_names)
            if len(runnable) > 1 and group[0].plan.blocks:
                comparisons.append(
                    ensemble.ComparedTrials(
                        runnable, ensemble.choose_reference(runnable, self.fits, self.forms), boundaries
                    )
                )
                rest += [t for t in group if t not in runnable]
            else:
                rest += group
        return rest + ensemble.measure(self.run, comparisons, round_index, self.files.get, self.progress, options, kind)

    def _confirm_alone(self, trial: Trial, round_index: int) -> None:
        artifact = self.files.get(trial, round_index)
        if isinstance(artifact, Record):
            self.run.store(trial, round_index, artifact, CONFIRMATION)
            return
        folder = self.run.create_round(trial, round_index, CONFIRMATION)
        self.progress.start(trial, round_index, "confirmation")
        options = {PLAN_OPTION: {"boundaries": sorted(self.boundaries[trial.id])}}
        job = ensemble.make_job(trial, round_index, self.files.get, options, kind=CONFIRMATION)
        self.progress.done(trial, launch_in_turn(job, folder, trial.plan.timeout_s, self.progress))


def _store_refusals(run: Run, planned: list[PlannedTrial]) -> None:
    for entry in planned:
        if entry.refusal:
            record = run.record(entry.trial, 0)
            if record is None or (record.stage == "plan" and record.reason != entry.refusal):
                run.store(entry.trial, 0, Record(entry.status, "plan", entry.refusal))


def _copy_truth(run: Run, planned: list[PlannedTrial]) -> None:
    """Copy data sets' annotations into the run folder, to read the accuracy on any machine."""
    for data in {entry.trial.data for entry in planned if entry.trial.data.folder}:
        source, copy = Path(data.folder) / "truth.json", run.folder / "truth" / f"{data.sha256[:12]}.json"
        if source.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(copy, source.read_bytes())


def _order_jobs(trials: list[Trial]) -> list[tuple[Trial, int]]:
    """Return all jobs of these trials by round, each round shuffled with its number as seed (reproducible)."""
    order = []
    for round_index in range(max((trial.plan.rounds for trial in trials), default=0)):
        jobs = [(trial, round_index) for trial in trials if round_index < trial.plan.rounds]
        random.Random(round_index).shuffle(jobs)
        order += jobs
    return order


def _find_record(run: Run, trial: Trial, round_index: int) -> Record | None:
    """Return the record of the round, else of an earlier failed round, unless that was killed by another program."""
    records = [run.record(trial, k) for k in range(round_index + 1)]
    failures = (record for record in records if record is not None and record.status != "ok" and not record.was_killed)
    return records[-1] or next(failures, None)


def _compiles(trial: Trial) -> bool:
    return registry.find(trial.backend).compiles


def _builds_slowly(trial: Trial) -> bool:
    return registry.find(trial.backend).builds_slowly


def _is_incomplete(run: Run, trial: Trial, max_rounds: int) -> bool:
    return any(_find_record(run, trial, k) is None for k in range(min(trial.plan.rounds, max_rounds)))


# Further rounds for undecided pairs, until they are decided or time is up.

# Measures one round (by number) of trials at the given boundaries.
Measure = Callable[[list[Trial], int, tuple[str, ...]], None]


def go_on(study: Study, run: Run, trials: Sequence[Trial], forms: Forms, measure: Measure, progress: Progress) -> None:
    """Measure further rounds of undecided pairs, one model after the other, within `study.minutes` in all.

    Only the boundary of a pair's comparison is measured. A pair whose estimated rounds exceed the time left stays
    undecided. Earlier measurements count, so repeating the command changes nothing, and more minutes continue.
    """
    models = list(dict.fromkeys(model_key(trial, forms) for trial in trials))
    for index, name in enumerate(models):
        group = [trial for trial in trials if model_key(trial, forms) == name]
        limit_s = _sum_seconds(run, group) + (60 * study.minutes - _sum_seconds(run, trials)) / (len(models) - index)
        while pairs := _find_pending(run.folder, group):
            remaining_s = limit_s - _sum_seconds(run, group)
            feasible_pairs = [pair for pair in pairs if _fits(run, group, pair, remaining_s)]
            ids = frozenset().union(*(pair.trials for pair in feasible_pairs or pairs))
            todo = [trial for trial in group if trial.id in ids]
            if not feasible_pairs or sum(_last_seconds(run, trial) for trial in todo) > remaining_s:
                minutes = f"{study.minutes:g} minute{'s' * (study.minutes != 1)}"
                open_ids = frozenset().union(*(pair.trials for pair in pairs if not pair.decided))
                if count := len(open_ids):
                    note = f"{count} trials are left in pairs that {minutes} could not decide"
                    progress.note(f"{name or 'the comparison'}: {note}")
                break
            last_round = max(_find_last_round(run, trial) for trial in todo)
            is_complete = all(_find_last_round(run, trial) == last_round for trial in todo)
            boundaries = tuple(name for name in study.boundaries if any(pair.boundary == name for pair in pairs))
            measure(todo, last_round + 1 if is_complete else last_round, boundaries)  # complete a partial round


def _fits(run: Run, trials: Sequence[Trial], pair: UndecidedPair, remaining_s: float) -> bool:
    seconds = sum(_last_seconds(run, trial) for trial in trials if trial.id in pair.trials)
    return pair.more * seconds <= remaining_s


def list_finalists(folder: Path) -> dict[str, set[str]]:
    """Return the ids of winners, runners-up and references by the selecting rounds alone, with their boundaries.

    Confirmations never enter the selection, so a resumed study finds the same finalists.
    """
    from dyno.report.tables import trial_table
    from dyno.results import ranking

    return ranking.list_finalists(trial_table.read_trials(folder))


def _find_pending(folder: Path, trials: Sequence[Trial]) -> list[UndecidedPair]:
    """Return the pairs of these trials that need another round.

    They are read from the folder, so a killed study loses nothing.
    """
    from dyno.report.tables import trial_table
    from dyno.results.ranking import list_pending

    ids = {trial.id for trial in trials}
    return [pair for pair in list_pending(trial_table.read_trials(folder)) if pair.trials <= ids]


def _list_folders(run: Run, trial: Trial, kind: str) -> list[Path]:
    return list(run.round_folder(trial, 0).parent.glob(f"{kind}[0-9]*"))


def _find_last_round(run: Run, trial: Trial) -> int:
    """Return the index of the trial's last finished round."""
    folders = _list_folders(run, trial, ROUND)
    return max(int(folder.name.removeprefix(ROUND)) for folder in folders if read_record(folder))


def _sum_seconds(run: Run, trials: Sequence[Trial]) -> float:
    """Return the measuring seconds of the trials' processes, summed."""
    folders = [folder for trial in trials for kind in (ROUND, COMPANION) for folder in _list_folders(run, trial, kind)]
    return sum(record.seconds for folder in folders if (record := read_record(folder)))


def _last_seconds(run: Run, trial: Trial) -> float:
    record = run.record(trial, _find_last_round(run, trial))
    return record.seconds if record else 0.0


class Files:
    """Maker of the trials' files: each is made once, or taken from the cache."""

    def __init__(self, progress: Progress, timeout_s: float = Plan.build_timeout_s) -> None:
        self.progress = progress
        self.timeout_s = timeout_s  # limit per job
        self.cache = Cache()
        self.results: dict[str, Artifact | Record] = {}
        self.built = 0  # number of files made, not taken from the cache

    def make_files(self, trials: Iterable[Trial]) -> None:
        """Make the files of the trials, including all builds of an engine for its rounds."""
        for trial in trials:
            for round_index in range(max(1, trial.plan.builds)):
                self.get(trial, round_index)

    def has_file(self, trial: Trial) -> bool:
        """Return whether no file is left to make for the trial."""
        if trial.recipe is None or self._substitute_key(trial.recipe) in self.results:
            return True
        return self.cache.has(self.cache.make_key(trial.recipe))

    def get(self, trial: Trial, index: int) -> Artifact | Record | None:
        """Return the file for this round of the trial, else a record with the reason; None if it needs no file."""
        return self.make_file(_of_build(trial.recipe, trial.build(index), trial.backend)) if trial.recipe else None

    def make_file(self, recipe: Recipe) -> Artifact | Record:
        """Return the recipe's file, from the cache if all its inputs are unchanged."""
        key = self._substitute_key(recipe)
        if key not in self.results:
            self.results[key] = self._with_fallback(recipe, key)
        return self.results[key]

    def _substitute_key(self, recipe: Recipe) -> str:
        """Return the recipe's key, combined with the keys of its fallbacks.

        A file of a free batch may be replaced by one of batch 1 in one trial and by one of batch 8 in another.
        """
        key = self.cache.make_key(recipe)
        if recipe.fallback is None:
            return key
        return hashlib.sha256(f"{key} {self._substitute_key(recipe.fallback)}".encode()).hexdigest()[: len(key)]

    def _with_fallback(self, recipe: Recipe, substitute_key: str) -> Artifact | Record:
        key = self.cache.make_key(recipe)
        cached_file = self.cache.find(key)[0] or self.cache.find(substitute_key)[0]
        if cached_file is not None:
            return cached_file
        if key not in self.results:
            self.results[key] = self._build_file(recipe, key, self.cache.find(key)[1])
        artifact = self.results[key]
        if isinstance(artifact, Artifact) or recipe.fallback is None:
            return artifact
        if artifact.status not in RETRY_ROUTE_STATUSES or artifact.facts.no_route:
            return artifact
        result = self.make_file(recipe.fallback)
        # The last route's failure is reported: it has the fixed batch that earlier ones may have proposed.
        return result if isinstance(result, Record) else self._store_substitute(result, artifact, substitute_key)

    def _store_substitute(self, file: Artifact, failure: Record, key: str) -> Artifact:
        """Cache and return another route's file in place of the failed one, so that the failed route isn't retried."""
        warning = f"made by another route ({file.made_by.onnx_route or 'not folded'}), because the usual one "
        warning += f"ended as {failure.status} at {failure.stage}: {failure.reason}"
        substitute = replace(file, made_by=replace(file.made_by, warnings=(*file.made_by.warnings, warning)))
        with self.cache.making(key) as folder:
            write_record(folder, Record("ok", artifact=substitute))
        return substitute

    def _build_file(self, recipe: Recipe, key: str, damage: str) -> Artifact | Record:
        """Build the recipe's file, without its fallback."""
        parent = self.make_file(recipe.parent) if recipe.parent else None
        if isinstance(parent, Record):
            return parent
        self.progress.show_making(recipe, damage)
        with self.cache.making(key) as folder:
            # Nothing is timed meanwhile, so all cores may be used.
            runtime = replace(recipe.runtime, threads=max(recipe.runtime.threads, system.physical_cores()))
            job = Job("make", runtime, recipe=recipe, artifact=parent)
            timing = {TIMING_VARIABLE: str(self.cache.timing)}
            record = launch_in_turn(job, folder, self.timeout_s, self.progress, timing)
            _warn_of_shared_gpu(folder, record)
            output = read_end(folder / LOGS[1], MAX_LOG_BYTES)  # its folder is deleted next
            failure = Facts(no_route=record.facts.no_route, printed=output)
        if record.status != "ok":
            hint = "; --build-timeout SECONDS allows more" if record.status == "timeout" else ""
            return Record(record.status, record.stage, record.reason + hint, system=record.system, facts=failure)
        self.built += 1
        self.progress.report_duration()
        artifact, damage = self.cache.find(key)
        return artifact or Record("failed", record.stage, damage or "the file was made but is not in the cache")


def _of_build(recipe: Recipe, build: int, backend: str) -> Recipe:
    """Return the recipe of this build of the backend's engine; unchanged for build 0.

    It builds from scratch, because shared kernel timings would make builds alike.
    """
    if not build:
        return recipe
    overrides = {TIMING_CACHE: False} if TIMING_CACHE in registry.find(backend).options else {}
    fallback = _of_build(recipe.fallback, build, backend) if recipe.fallback else None
    return replace(recipe, options={**recipe.options, **overrides, BUILD_OPTIONS: build}, fallback=fallback)


def _warn_of_shared_gpu(folder: Path, record: Record) -> None:
    """Warn if other programs used the GPU while a builder timed its kernels, so that its choices may be wrong."""
    trace = timeline.read_timeline(folder)
    other_processes = timeline.most_others(trace) if trace else 0
    if record.artifact is None or not other_processes:
        return
    made_by = record.artifact.made_by
    warning = f"{remarks.describe_meanwhile(other_processes)}: kernels were timed meanwhile and may not be the fastest"
    made_by = replace(made_by, warnings=tuple(dict.fromkeys((*made_by.warnings, warning))))  # including a parent's
    write_record(folder, replace(record, artifact=replace(record.artifact, made_by=made_by)))
