"""The anchor trial on devices of this host, in turns: each alone, and all of them at once, in the same processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from dyno.analysis.records.notes.devices import AnchorDevice, of_rounds
from dyno.analysis.records.rounds import Round
from dyno.engine.device_lock import held
from dyno.engine.execute import Files
from dyno.engine.turns import InterleavedGroup, InterleavedJob, each_and_all
from dyno.jobs import memory
from dyno.jobs.progress import Progress
from dyno.placement.places import Place, confined
from dyno.store import good_record
from dyno.worker.record import Record, read_json, write_json
from dyno.worker.spec import SCHEMA, Artifact, Job, Plan, Trial

ROUNDS = 3  # of fresh processes: with two, Student's t is 12.7 and not 4.3 times the error
BLOCKS = 5  # of a process alone, and as many beside the others
BLOCK_S, STEP_S = 0.1, 0.5  # of a block; all devices alone, one after the other, take no longer than a step
TRIES = 2  # of a round: a process may die for no fault of its device
SLACK = 4  # times the seconds that the blocks should take, after which a slow trial has three blocks of each kind
LossReasons = dict[str, str]  # place -> why the anchor could not be measured there


def planned(trial: Trial, count: int) -> Trial:
    """Return the anchor with the plan for `count` devices, however the study's own trials are timed."""
    block_s = min(BLOCK_S, STEP_S / count)
    own = Plan(
        ("model",), trial.plan.warmup_s, SLACK * 2 * BLOCKS * block_s, rounds=ROUNDS, timeout_s=trial.plan.timeout_s,
        build_timeout_s=trial.plan.build_timeout_s, blocks=BLOCKS, block_s=block_s,
    )  # fmt: skip
    return replace(trial, plan=own)


def measure(trial: Trial, folder: Path, places: Sequence[Place], rounds: int, progress: Progress) -> LossReasons:
    """Measure those of `rounds` rounds that the folder doesn't hold yet; return the failed places with the reason.

    After a failed round no other is begun. The processes of all rounds start at once if there is enough memory, because
    starting them takes most of the time; rounds that fail are retried by themselves.
    """
    lost: LossReasons = {}
    with progress.running([]):
        missing = [number for number in range(rounds) if not _is_complete(folder, places, number)]
        if len(missing) > 1 and memory.available() > memory.ROOM * memory.UNKNOWN_B * len(missing) * len(places):
            _measure_rounds(trial, folder, places, missing, progress)
        for number in missing:
            tries = 0 if _is_complete(folder, places, number) else TRIES
            for _ in range(tries):
                if not (lost := _measure_rounds(trial, folder, places, [number], progress)):
                    break
            if lost:
                break
    for place in places:
        shutil.rmtree(folder / file_name(place) / "compiler", ignore_errors=True)
    return lost


def read(folder: Path, places: Sequence[Place], rounds: int) -> list[AnchorDevice]:
    """Return each place's figures from `rounds` stored rounds."""
    company = [read_json(folder / _name_company(number))["company"] for number in range(rounds)]
    return [
        of_rounds(
            place.name,
            place.card,
            [
                (_read_round(folder, place, number).block_medians("latency", "model"), company[number][place.name])
                for number in range(rounds)
            ],
        )
        for place in places
    ]


def file_name(place: Place) -> str:
    """Return the place's name as a folder name."""
    return re.sub(r"[^\w.-]", "_", place.name.replace(":", ""))


def _measure_rounds(
    trial: Trial, folder: Path, places: Sequence[Place], numbers: Sequence[int], progress: Progress
) -> LossReasons:
    """Measure these rounds in fresh processes, in parallel; return the places that failed, with the reason.

    A round counts once the process of every device has ended well.
    """
    with ExitStack() as stack:
        files = {}
        for place in sorted(
            places, key=lambda place: place.card
        ):  # always in one order, so that no two processes wait for each other
            with confined(place):
                stack.enter_context(held(trial.runtime, progress.waiting))
        for place in places:
            with confined(place):
                files[place.name] = Files(progress, trial.plan.build_timeout_s).of(trial, 0)
        if lost := {name: file.reason for name, file in files.items() if isinstance(file, Record)}:
            return lost
        rounds = {
            number: [_build_player(trial, folder, place, number, files[place.name]) for place in places]
            for number in numbers
        }
        players = [player for own in rounds.values() for player in own]
        name = f"{numbers} {trial.id}"
        InterleavedGroup(players, name, progress, lambda _: None, turns=_each_round, apart=True).play()
    for number, own in rounds.items():
        failed = {place.name: why for place, player in zip(places, own, strict=True) if (why := _find_failure(player))}
        lost |= failed
        if not failed:
            company = {place.name: player.company for place, player in zip(places, own, strict=True)}
            write_json(folder / _name_company(number), {"schema": SCHEMA, "company": company})
    return lost


def _each_round(players: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return the turns of each round: each device alone, and all devices at once."""
    numbers = sorted({player.number for player in players})
    return [turn for number in numbers for turn in each_and_all([p for p in players if p.number == number])]


def _build_player(
    trial: Trial, folder: Path, place: Place, number: int, file: Artifact | Record | None
) -> InterleavedJob:
    # Rounds of a job count from 1 here: in round 0 it would answer all images.
    job = Job("run", trial.runtime, trial, number + 1, artifact=file if isinstance(file, Artifact) else None)
    return InterleavedJob(job, _name_folder(folder, place, number), number, where=partial(confined, place))


def _find_failure(player: InterleavedJob) -> str:
    """Return why the player's process has no result, or "" if it has one."""
    record = player.record
    if record is None:
        return "it was not started"
    return "" if record.status == "ok" else f"{record.status} at {record.stage}: {record.reason}"


def _name_company(number: int) -> str:
    return f"r{number}.json"


def _name_folder(folder: Path, place: Place, number: int) -> Path:
    return folder / file_name(place) / f"r{number}"


def _is_complete(folder: Path, places: Sequence[Place], number: int) -> bool:
    """Return whether the round is stored and readable."""
    if not (folder / _name_company(number)).is_file():
        return False
    return all(_read_round(folder, place, number).block_medians("latency", "model") for place in places)


def _read_round(folder: Path, place: Place, number: int) -> Round:
    own = _name_folder(folder, place, number)
    return Round(own, number, good_record(own) or Record("failed"), place.device)
