"""Interleaved rounds: which trials are measured together, and where their results are stored."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.jobs.progress import Progress
from dyno.results import correctness
from dyno.results.files import read_samples
from dyno.results.trial_result import Form, place_in_group
from dyno.runner.device_lock import hold_device
from dyno.runner.run_folder import archive_round
from dyno.runner.turns import InterleavedGroup, InterleavedJob, load_in_parallel
from dyno.store import COMPANION, ROUND, Run, find_versions, list_plugin_modules, worker_code_sha256
from dyno.worker import registry
from dyno.worker.backend import Backend, Maker
from dyno.worker.record import OUT_OF_MEMORY, DamagedRecord, Record, read_json, read_record, write_json
from dyno.worker.spec import BUILD_OPTIONS, PLAN_OPTION, Artifact, Job, Runtime, Trial, UserError

# Retries of failed rounds whose cause may be gone.

MADE_WITH = "made-with.json"
TIMEOUT_OPTION = "build_timeout_s"


def note_retry(folder: Path, trial: Trial, *, unmade: bool = False) -> None:
    """Store the circumstances of a failure with the failed round.

    They are the versions of Dyno's code and the trial's libraries, and for an `unmade` file its timeout in seconds.
    """
    write_json(folder / MADE_WITH, _made_with(trial) | ({TIMEOUT_OPTION: trial.plan.build_timeout_s} if unmade else {}))


def _made_with(trial: Trial) -> dict[str, Any]:
    tools: list[tuple[Backend | Maker, Runtime]] = [(registry.find(trial.backend), trial.runtime)]
    recipes = trial.recipe.chain if trial.recipe else []
    tools += [(registry.get_maker(recipe.maker), recipe.runtime) for recipe in recipes]
    versions: dict[str, Any] = {"code": worker_code_sha256(*list_plugin_modules(*(tool for tool, _ in tools)))}
    for tool, runtime in tools:
        versions.setdefault(tool.name, {}).update(find_versions(runtime, ("numpy", *tool.requires)))
    return versions


def clear_failed(run: Run, trials: list[Trial], should_clear_all: bool) -> list[str]:
    """Remove failed rounds whose cause may be gone, or with `should_clear_all` all of them, to measure them again.

    Returns sentences on what was done. Successful rounds and refused rows stay.
    """
    reasons: Counter[str] = Counter()
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob(f"{ROUND}[0-9]*")):
            try:
                record = read_record(folder)
            except UserError:  # damaged (see `clear_damaged`), or from another Dyno, reported elsewhere
                continue
            if record is None or record.status == "ok" or record.stage == "plan":
                continue
            if reason := "as requested" if should_clear_all else _reason_to_retry(folder, record, trial):
                shutil.rmtree(folder)
                reasons[reason] += 1
    return [f"{n} failed job{'s' * (n != 1)} tried again: {reason}" for reason, n in reasons.items()]


def clear_damaged(run: Run, trials: list[Trial]) -> list[str]:
    """Archive rounds with an unreadable record, samples or outputs, to measure them again.

    Returns a sentence for each.
    """
    notes = []
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob("[rcst][0-9]*")):
            if name := _find_damaged(folder):
                message = f"{trial.label}: {folder.name}/{name} is damaged, so that round is measured again"
                notes.append(f"{message}; the rest of it is in {archive_round(run, folder)}")
    return notes


def _find_damaged(folder: Path) -> str:
    """Return the name of the round's unreadable file, or ""."""
    try:
        record = read_record(folder)
    except DamagedRecord:
        return "record.json"
    except UserError:
        return ""
    return read_samples(folder)[1] if record is not None and record.status == "ok" else ""


def clear_stopped(run: Run, trials: list[Trial]) -> list[str]:
    """Remove rounds of a video that the user stopped before its end, to measure them again; return a sentence for each.

    The rate of the first frames is not that of the whole video. A live source has no end, so its rounds stay.
    """
    notes = []
    for trial in trials:
        for folder in sorted(run.round_folder(trial, 0).parent.glob(f"{ROUND}[0-9]*")):
            video = _load_json(folder / "record.json").get("facts", {}).get("video") or {}
            if video.get("stopped") and not video.get("live"):
                shutil.rmtree(folder)
                notes.append(f"{trial.label}: {folder.name} was stopped before the video's end and is measured again")
    return notes


def _reason_to_retry(folder: Path, record: Record, trial: Trial) -> str:
    """Return why the failure may not recur, else ""."""
    if record.was_killed or record.reason == OUT_OF_MEMORY:
        return record.reason
    old_versions, versions = _load_json(folder / MADE_WITH), _made_with(trial)
    old_limit, limit = old_versions.pop(TIMEOUT_OPTION, None), trial.plan.build_timeout_s
    if record.status == "timeout":
        if old_limit is None:  # its file was there
            plan = _load_json(folder / "job.json").get("trial", {}).get("plan", {})
            old_limit, limit = plan.get("timeout_s", 0.0), trial.plan.timeout_s
        if limit > old_limit:
            return f"{limit:g} s instead of {old_limit:g} s"
    if not old_versions or old_versions == versions:
        return ""
    changes = {
        name: version
        for key, libraries in versions.items()
        if isinstance(libraries, dict)
        for name, version in libraries.items()
        if old_versions.get(key, {}).get(name) != version
    }
    return ", ".join(f"{name} is {version} now" for name, version in changes.items()) or "Dyno's code has changed"


def _load_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


FileOf = Callable[[Trial, int], "Artifact | Record | None"]  # file of a trial's round


Forms = Mapping[str, Form]  # models that are files of one network, by name
NO_FORMS: Forms = {}


def model_key(trial: Trial, forms: Forms = NO_FORMS) -> str:
    """Return the key of trials that are measured before the next model begins.

    It is the model's name, the network's name for one of its files, or "" for both sides of a comparison.
    """
    name = trial.model.name
    return "" if trial.side else forms[name].network if name in forms else name


def group_trials(trials: Sequence[Trial], forms: Forms = NO_FORMS) -> list[list[Trial]]:
    """Group the trials that are compared with each other: same model or network, size, batch and device.

    In a comparison, a group is one configuration on both sides, under any model names.
    """
    groups: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        dims = trial.dims
        shapes = tuple(sorted(dims.shapes.items()))
        subject = (trial.variant, trial.precision) if trial.side else (model_key(trial, forms),)
        key = subject, dims.batch, dims.height, dims.width, shapes, trial.runtime.device
        groups.setdefault(key, []).append(trial)
    return list(groups.values())


def choose_reference(
    trials: Sequence[Trial], fits: Callable[[Trial], bool] | None, forms: Forms = NO_FORMS
) -> Trial | None:
    """Return the reference of the trials, chosen as in tables; it `fits` the request, if any."""

    def place(trial: Trial) -> tuple[Any, ...]:
        form = forms.get(trial.model.name)
        return trial.side, form.position if form else 0, *place_in_group(trial)

    return correctness.first_trial(sorted(trials, key=place), fits)


def make_job(
    trial: Trial, round_index: int, file_of: FileOf, options: Mapping[str, Any] | None = None, kind: str = ROUND
) -> Job:
    """Build the job of a trial's round with its engine's build; `options` are added to the job's.

    Confirmations and companions count from 1: round 0 answers all images, which only the trial's own round does.
    """
    artifact, build = file_of(trial, round_index), trial.build(round_index)
    return Job(
        "run",
        trial.runtime,
        trial,
        round_index + (kind != ROUND),
        artifact=artifact if isinstance(artifact, Artifact) else None,
        options={**(options or {}), **({BUILD_OPTIONS: build} if build else {})},
    )


@dataclass(frozen=True)
class ComparedTrials:
    """Trials to interleave in one round, with their `reference` and `rivals`.

    A reference with a stored round measures once more, as a companion, and so does each rival. They are timed at the
    `boundaries`, by default those of their plans.
    """

    trials: Sequence[Trial]
    reference: Trial | None
    boundaries: Sequence[str] = ()
    rivals: Sequence[Trial] = ()


def measure(
    run: Run,
    comparisons: Sequence[ComparedTrials],
    round_index: int,
    file_of: FileOf,
    progress: Progress,
    options: Mapping[str, Any] | None = None,
    kind: str = ROUND,
) -> list[Trial]:
    """Measure one round of each comparison, one after the other; return the trials that could not be interleaved.

    Reasons are a single trial, or memory for only one process. `options` are added to those of the jobs; `kind` is
    ROUND, CONFIRMATION or SUSTAINED.
    """
    rest: list[Trial] = []
    while comparisons:
        groups: dict[str, tuple[ComparedTrials, InterleavedGroup]] = {}
        ended_jobs: list[InterleavedJob] = []

        def end(member: InterleavedJob, ended_jobs: list[InterleavedJob] = ended_jobs) -> None:
            ended_jobs.append(member)
            assert member.record is not None
            if member.round_index >= 0:
                if member.record.status != "ok" and kind == ROUND:
                    note_retry(member.folder, member.trial)
                progress.done(member.trial, member.record, seconds=member.used_s, round_index=member.round_index)

        for comparison in comparisons:
            ids = {trial.id for trial in (*comparison.trials, comparison.reference, *comparison.rivals) if trial}
            if len(ids) < 2 or not comparison.trials:
                rest += comparison.trials
                continue
            members = _build_members(run, comparison, round_index, file_of, kind, options)
            group = InterleavedGroup(members, f"{round_index} {members[0].trial.id}", progress, end)
            groups[group.name] = comparison, group
        _run_groups([group for _, group in groups.values()], progress)

        comparisons = []
        for comparison, group in groups.values():
            group_jobs = [member for member in ended_jobs if member.group is group]
            measured_ids = {member.trial.id for member in group_jobs if member.round_index >= 0}
            if trials := [trial for trial in comparison.trials if trial.id not in measured_ids]:
                if len(group_jobs) > 1:
                    comparisons.append(replace(comparison, trials=trials))
                    continue
                progress.note(f"memory for only one process: {trials[0].model.name} is measured one after the other")
                rest += trials
    return rest


def _run_groups(groups: Sequence[InterleavedGroup], progress: Progress) -> None:
    try:
        load_in_parallel(groups)
        for group in groups:
            with hold_device(group.members[0].job.runtime, progress.show_waiting):
                group.run()
    finally:
        for group in groups:
            group.end()


def _build_members(
    run: Run,
    comparison: ComparedTrials,
    round_index: int,
    file_of: FileOf,
    kind: str,
    options: Mapping[str, Any] | None,
) -> list[InterleavedJob]:
    """Build a job for each trial, the reference first.

    A reference with a stored round takes part as a companion with round -1, as rivals do.
    """
    reference, ids = comparison.reference, {trial.id for trial in comparison.trials}
    if comparison.boundaries:
        plan = {**(options or {}).get(PLAN_OPTION, {}), "boundaries": list(comparison.boundaries)}
        options = {**(options or {}), PLAN_OPTION: plan}
    order = sorted(comparison.trials, key=lambda trial: reference is None or trial.id != reference.id)
    members = [
        InterleavedJob(
            make_job(trial, round_index, file_of, options, kind),
            run.create_round(trial, round_index, kind),
            round_index,
            _read_memory(run, trial),
        )
        for trial in order
    ]
    if reference is not None and reference.id not in ids:
        members.insert(0, _build_companion(run, reference, round_index, file_of, options))
    return [*members, *(_build_companion(run, rival, round_index, file_of, options) for rival in comparison.rivals)]


def _build_companion(
    run: Run, trial: Trial, round_index: int, file_of: FileOf, options: Mapping[str, Any] | None
) -> InterleavedJob:
    index = 0  # index of the next companion
    while run.record(trial, index, COMPANION) is not None:
        index += 1
    companion = make_job(trial, round_index, file_of, options, COMPANION)
    return InterleavedJob(companion, run.create_round(trial, index, COMPANION), -1, _read_memory(run, trial))


def _read_memory(run: Run, trial: Trial) -> int:
    """Return the peak bytes of the trial's process in round 0; 0 if unknown."""
    record = run.record(trial, 0)
    return int((record.value("peak_memory") if record else 0) or 0)
