"""Which trials measure in turns together, and where what they measured lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dyno.analysis.ranking import references
from dyno.analysis.records.results import place_in_group
from dyno.engine import retry
from dyno.engine.gpu_lock import held
from dyno.engine.turns import Group, Player
from dyno.jobs.progress import Progress
from dyno.store import COMPANION, ROUND, Run
from dyno.worker.record import Record
from dyno.worker.spec import BUILD, Artifact, Job, Trial

Made = Callable[[Trial, int], "Artifact | Record | None"]  # the file of a trial's round


def company(trial: Trial) -> str:
    """What is measured together, one after the other of these: a model, or the two sides of a comparison."""
    return "" if trial.side else trial.model.name


def groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials that are compared with each other: at one size and batch, on one device, of one model.

    In a comparison it is one configuration on both sides, whatever the models are called.
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
    """The trial that the others are compared with, as tables choose it: of those that `fits` the request, if any."""
    return references.first(sorted(trials, key=lambda t: (t.side, *place_in_group(t))), fits)


def job(trial: Trial, number: int, made: Made, options: Mapping[str, Any] | None = None, kind: str = ROUND) -> Job:
    """The job of that round of the trial, which says which build of its engine it runs; `options` are others of it.

    Confirmations and companions count from 1: round 0 answers all images, which the trial's own round does.
    """
    artifact, build = made(trial, number), trial.build(number)
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
    first: Trial | None,
    number: int,
    made: Made,
    progress: Progress,
    options: Mapping[str, Any] | None = None,
    kind: str = ROUND,
) -> list[Trial]:
    """One round of trials that are compared, in turns with `first`, which they are compared with; `options` are those
    of their jobs, and `kind` is ROUND or CONFIRMATION.

    Where that one has its round stored, it measures once more as their companion. Gives back the trials that nobody
    could take turns with: they are alone, or there was memory for one process only.
    """
    left = list(trials)
    while len({*(t.id for t in left), *([first.id] if first else [])}) > 1 and left:
        players = _players(run, left, first, number, made, kind, options)
        ended: list[Player] = []

        def end(player: Player, ended: list[Player] = ended) -> None:
            ended.append(player)
            assert player.record is not None
            if player.number >= 0:
                if player.record.status != "ok" and kind == ROUND:
                    retry.note(player.folder, player.trial)
                progress.done(player.trial, player.record, seconds=player.used_s)

        with held(players[0].job.runtime, progress.waiting):
            Group(players, f"{number} {players[0].trial.id}", progress, end).play()
        got = {player.trial.id for player in ended if player.number >= 0}
        left = [trial for trial in left if trial.id not in got]
        if left and len(ended) < 2:
            progress.note(f"there is memory for one process only: {left[0].model.name} is measured one after the other")
            break
    return left


def _players(
    run: Run,
    trials: Sequence[Trial],
    first: Trial | None,
    number: int,
    made: Made,
    kind: str,
    options: Mapping[str, Any] | None,
) -> list[Player]:
    """A player for each trial, `first` at the front; as a companion, with round -1, where it has its round already."""
    ids = {trial.id for trial in trials}
    order = sorted(trials, key=lambda trial: first is None or trial.id != first.id)
    players = [
        Player(
            job(trial, number, made, options, kind),
            run.fresh(trial, number, kind),
            number,
            _memory(run, trial),
        )
        for trial in order
    ]
    if first is not None and first.id not in ids:
        place = 0
        while run.record(first, place, COMPANION) is not None:
            place += 1
        companion = job(first, number, made, options, COMPANION)
        players.insert(0, Player(companion, run.fresh(first, place, COMPANION), -1, _memory(run, first)))
    return players


def _memory(run: Run, trial: Trial) -> int:
    """Bytes that the trial's process took in round 0; 0 where that isn't known."""
    record = run.record(trial, 0)
    return int((record.value("peak_memory") if record else 0) or 0)
