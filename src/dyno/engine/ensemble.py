"""Which trials measure in turns together, and where what they measured lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dyno.analysis.ranking import references
from dyno.analysis.records.results import place_in_group
from dyno.engine import retry
from dyno.engine.device_lock import held
from dyno.engine.turns import InterleavedGroup, InterleavedJob
from dyno.jobs.progress import Progress
from dyno.store import COMPANION, ROUND, Run
from dyno.worker.record import Record
from dyno.worker.spec import BUILD, Artifact, Job, Trial

FileOf = Callable[[Trial, int], "Artifact | Record | None"]  # the file of a trial's round


def model_key(trial: Trial) -> str:
    """Return the key shared by trials that are measured before the next model begins.

    It is the model's name, or "" for both sides of a comparison.
    """
    return "" if trial.side else trial.model.name


def groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Group the trials that are compared with each other: same model, size, batch and device.

    In a comparison a group is one configuration on both sides, whatever the models are called.
    """
    by_key: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        dims = trial.dims
        shapes = tuple(sorted(dims.shapes.items()))
        compared = (trial.variant, trial.precision) if trial.side else (trial.model.name,)
        key = compared, dims.batch, dims.height, dims.width, shapes, trial.runtime.device
        by_key.setdefault(key, []).append(trial)
    return list(by_key.values())


def reference(trials: Sequence[Trial], fits: Callable[[Trial], bool] | None) -> Trial | None:
    """Return the trial that the others are compared with, chosen as in tables: one that `fits` the request, if any."""
    return references.first(sorted(trials, key=lambda t: (t.side, *place_in_group(t))), fits)


def job(trial: Trial, number: int, file_of: FileOf, options: Mapping[str, Any] | None = None, kind: str = ROUND) -> Job:
    """Build the job of a round of the trial, with the build of its engine to run; `options` are added to the job's.

    Confirmations and companions count from 1: round 0 answers all images, which the trial's own round does.
    """
    artifact, build = file_of(trial, number), trial.build(number)
    return Job(
        "run",
        trial.runtime,
        trial,
        number + (kind != ROUND),
        artifact=artifact if isinstance(artifact, Artifact) else None,
        options={**(options or {}), **({BUILD: build} if build else {})},
    )


def measure(
    run: Run,
    trials: Sequence[Trial],
    reference: Trial | None,
    number: int,
    file_of: FileOf,
    progress: Progress,
    options: Mapping[str, Any] | None = None,
    kind: str = ROUND,
) -> list[Trial]:
    """Measure one round of trials interleaved with each other and with their `reference`.

    `options` are added to those of their jobs, and `kind` is ROUND or CONFIRMATION. A reference whose round is stored
    already measures once more, as a companion. Returns the trials that could not be interleaved: there is only one, or
    memory for only one process.
    """
    unmeasured = list(trials)
    while len({*(t.id for t in unmeasured), *([reference.id] if reference else [])}) > 1 and unmeasured:
        players = _build_players(run, unmeasured, reference, number, file_of, kind, options)
        ended: list[InterleavedJob] = []

        def end(player: InterleavedJob, ended: list[InterleavedJob] = ended) -> None:
            ended.append(player)
            assert player.record is not None
            if player.number >= 0:
                if player.record.status != "ok" and kind == ROUND:
                    retry.note(player.folder, player.trial)
                progress.done(player.trial, player.record, seconds=player.used_s)

        with held(players[0].job.runtime, progress.waiting):
            InterleavedGroup(players, f"{number} {players[0].trial.id}", progress, end).play()
        measured = {player.trial.id for player in ended if player.number >= 0}
        unmeasured = [trial for trial in unmeasured if trial.id not in measured]
        if unmeasured and len(ended) < 2:
            progress.note(f"memory for only one process: {unmeasured[0].model.name} is measured one after the other")
            break
    return unmeasured


def _build_players(
    run: Run,
    trials: Sequence[Trial],
    reference: Trial | None,
    number: int,
    file_of: FileOf,
    kind: str,
    options: Mapping[str, Any] | None,
) -> list[InterleavedJob]:
    """Build a job for each trial, the reference first.

    If the reference's round is stored already, it takes part as a companion with round -1.
    """
    ids = {trial.id for trial in trials}
    order = sorted(trials, key=lambda trial: reference is None or trial.id != reference.id)
    players = [
        InterleavedJob(
            job(trial, number, file_of, options, kind),
            run.fresh(trial, number, kind),
            number,
            _read_memory(run, trial),
        )
        for trial in order
    ]
    if reference is not None and reference.id not in ids:
        free = 0  # number of the next companion
        while run.record(reference, free, COMPANION) is not None:
            free += 1
        companion = job(reference, number, file_of, options, COMPANION)
        players.insert(
            0, InterleavedJob(companion, run.fresh(reference, free, COMPANION), -1, _read_memory(run, reference))
        )
    return players


def _read_memory(run: Run, trial: Trial) -> int:
    """Return the bytes that the trial's process took in round 0; 0 if unknown."""
    record = run.record(trial, 0)
    return int((record.value("peak_memory") if record else 0) or 0)
