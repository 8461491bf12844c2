"""Comparison of a study's devices by the anchor trial, and test whether they disturb each other."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from dyno.devices import blocks
from dyno.devices.places import Place, confine_to, list_left
from dyno.jobs import nvml
from dyno.jobs.progress import Progress
from dyno.results.blocks import compare_blocks
from dyno.results.notes import AnchorDevice, AnchorDevices, percent_slower, read_devices, store_devices
from dyno.results.rounds import Round
from dyno.results.trial_result import load_run
from dyno.runner.device_lock import hold_device
from dyno.runner.execute import Files
from dyno.runner.turns import InterleavedGroup, InterleavedJob, list_single_and_joint_turns
from dyno.store import good_record
from dyno.study.plan import PlannedTrial, TrialSelection, expand
from dyno.study.study import Study
from dyno.worker.record import Record, read_json, write_json
from dyno.worker.spec import DEFAULT_ROUNDS, FIXED, SCHEMA, Job, Plan, Trial, UserError, digest

# The anchor trial interleaved on this host's devices, in the same processes: each alone, and all at once.

ANCHOR_ROUNDS = 3  # rounds in fresh processes: Student's t is 12.7 for two, 4.3 for three
BLOCKS_PER_KIND = 5  # blocks alone, and blocks with all devices at once
BLOCK_S, MAX_STEP_S = 0.1, 0.5  # length of a block; limit for one pass over all devices
MAX_ATTEMPTS = 2  # attempts per round: a process may die for other reasons than its device
SLOW_FACTOR = 4  # a trial slower than this multiple of the planned time has three blocks of each kind
LossReasons = dict[str, str]  # place -> reason why the anchor could not be measured there


def plan_anchor(trial: Trial, count: int) -> Trial:
    """Return the anchor with its own plan for `count` devices, in place of the study's rounds and duration."""
    block_s = min(BLOCK_S, MAX_STEP_S / count)
    own = Plan(
        ("model",), trial.plan.warmup_s, SLOW_FACTOR * 2 * BLOCKS_PER_KIND * block_s, rounds=ANCHOR_ROUNDS,
        timeout_s=trial.plan.timeout_s, build_timeout_s=trial.plan.build_timeout_s, blocks=BLOCKS_PER_KIND,
        block_s=block_s,
    )  # fmt: skip
    return replace(trial, plan=own)


def measure(trial: Trial, folder: Path, places: Sequence[Place], rounds: int, progress: Progress) -> LossReasons:
    """Measure those of `rounds` rounds that the folder lacks; return the failed places with reasons.

    A failed round ends the measurement. The processes of all rounds start at once if there is enough memory, because
    starting them takes most of the time; failed rounds are retried one by one.
    """
    lost: LossReasons = {}
    with progress.show_study([]):
        missing = [number for number in range(rounds) if not _is_complete(folder, places, number)]
        if len(missing) > 1 and nvml.read_available() > nvml.HEADROOM * nvml.DEFAULT_PROCESS_B * len(missing) * len(
            places
        ):
            _measure_rounds(trial, folder, places, missing, progress)
        for number in missing:
            tries = 0 if _is_complete(folder, places, number) else MAX_ATTEMPTS
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
    company = [read_json(folder / _name_counts_file(number))["company"] for number in range(rounds)]
    found = []
    for place in places:
        medians = (_read_round(folder, place, number).block_medians("latency", "model") for number in range(rounds))
        counts = (own[place.name] for own in company)
        found.append(summarise_rounds(place.name, place.card, list(zip(medians, counts, strict=True))))
    return found


def summarise_rounds(
    place: str, card: str, rounds: Sequence[tuple[Mapping[int, float], Sequence[int]]]
) -> AnchorDevice:
    """Build the device's figures from interleaved processes.

    Each process has the median seconds of its blocks by number, and the number of devices that measured in each block:
    one or all. Two consecutive blocks are one of each kind.
    """
    alone, beside, ratios = [], [], []
    for medians, company in rounds:
        own = {number // 2: seconds for number, seconds in medians.items() if company[number] == 1}
        all_at_once = {number // 2: seconds for number, seconds in medians.items() if company[number] > 1}
        logs = compare_blocks(all_at_once, own)
        if logs.size:  # otherwise throttling left no pair
            alone.append(float(np.median([*own.values()])))
            beside.append(float(np.median([*all_at_once.values()])))
            ratios.append(math.exp(float(np.median(logs))))
    return AnchorDevice(place, card, tuple(alone), tuple(beside), tuple(ratios))


def file_name(place: Place) -> str:
    """Return the place's name as a folder name."""
    return re.sub(r"[^\w.-]", "_", place.name.replace(":", ""))


def _measure_rounds(
    trial: Trial, folder: Path, places: Sequence[Place], numbers: Sequence[int], progress: Progress
) -> LossReasons:
    """Measure these rounds in fresh processes, in parallel; return the failed places with reasons.

    A round counts only if the processes of all devices succeed.
    """
    with ExitStack() as stack:
        files = {}
        # Locked in a fixed order, against deadlocks.
        for place in sorted(places, key=lambda place: place.card):
            with confine_to(place):
                stack.enter_context(hold_device(trial.runtime, progress.show_waiting))
        for place in places:
            with confine_to(place):
                files[place.name] = Files(progress, trial.plan.build_timeout_s).get(trial, 0)
        if lost := {name: file.reason for name, file in files.items() if isinstance(file, Record)}:
            return lost
        rounds: dict[int, list[InterleavedJob]] = {number: [] for number in numbers}
        for number, own in rounds.items():
            for place in places:
                file = files[place.name]
                # Rounds of a job count from 1 here, as round 0 would evaluate all images.
                job = Job("run", trial.runtime, trial, number + 1, artifact=None if isinstance(file, Record) else file)
                own_folder, where = _name_anchor_folder(folder, place, number), partial(confine_to, place)
                own.append(InterleavedJob(job, own_folder, number, start_context=where))
        members = [member for own in rounds.values() for member in own]
        name = f"{numbers} {trial.id}"
        InterleavedGroup(members, name, progress, lambda _: None, turns=_each_round, apart=True).run()
    for number, own in rounds.items():
        failed = {place.name: why for place, member in zip(places, own, strict=True) if (why := _find_failure(member))}
        lost |= failed
        if not failed:
            company = {place.name: member.active_counts for place, member in zip(places, own, strict=True)}
            write_json(folder / _name_counts_file(number), {"schema": SCHEMA, "company": company})
    return lost


def _each_round(members: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return the turns of each round: each device alone, and all devices at once."""
    numbers = sorted({member.round_index for member in members})
    rounds = [[member for member in members if member.round_index == number] for number in numbers]
    return [turn for own in rounds for turn in list_single_and_joint_turns(own)]


def _find_failure(member: InterleavedJob) -> str:
    """Return why the member's process has no result; "" if it has one."""
    record = member.record
    if record is None:
        return "it was not started"
    return "" if record.status == "ok" else f"{record.status} at {record.stage}: {record.reason}"


def _name_counts_file(number: int) -> str:
    return f"r{number}.json"


def _name_anchor_folder(folder: Path, place: Place, number: int) -> Path:
    return folder / file_name(place) / f"r{number}"


def _is_complete(folder: Path, places: Sequence[Place], number: int) -> bool:
    """Return whether the round is stored and readable."""
    if not (folder / _name_counts_file(number)).is_file():
        return False
    return all(_read_round(folder, place, number).block_medians("latency", "model") for place in places)


def _read_round(folder: Path, place: Place, number: int) -> Round:
    own = _name_anchor_folder(folder, place, number)
    return Round(own, number, good_record(own) or Record("failed"), place.device)


POLL_S = 0.1
ALONE, BESIDE = "alone", "beside"
ANCHORS = "anchors"


@dataclass(frozen=True)
class StudyPlaces:
    """Places that a study continues with, and the machines that measure one block at a time (`in_turn`)."""

    places: Sequence[Place]
    in_turn: Collection[str] = ()


def measure_devices(study: Study, folder: Path, places: Sequence[Place], progress: Progress) -> StudyPlaces:
    """Measure the anchor trial at each place alone and with the others, unless the folder has the result.

    Places of this host are interleaved in the same processes. A place where the anchor fails is left out, unless it
    fails at all places. Blocks run one at a time on a machine if a place is slower with the others than alone, beyond
    the spread between rounds and the margin of equivalence.
    """
    own = replace(
        study, device=places[0].device, rounds=DEFAULT_ROUNDS, until=FIXED, boundaries=("model",), budget={}, limit={},
        search=False, confirm=0, builds=1,
    )  # fmt: skip
    planned = blocks.find_anchor(expand(own))
    if planned is None or len(places) < 2:
        return StudyPlaces(places)
    in_turns = all(place.host is None for place in places)
    trial = plan_anchor(planned.trial, len(places)) if in_turns else planned.trial
    key = digest([trial.id, [[place.name, place.card] for place in places]])
    asked = f"{key} {study.equivalent:g}"
    if (stored := read_devices(folder)) and stored.key == asked:
        return StudyPlaces(places, _find_disturbed(stored, places))
    progress.show_step(f"{trial.label} on each device alone and on all at once, to measure interference")
    own_folder = folder / ANCHORS / key[:12]  # named by the set of devices
    if in_turns:
        rows = _in_turns(trial, own_folder, places, study.equivalent, progress)
        if isinstance(rows, dict):
            return _drop_places(rows, study, folder, places, progress)
    else:
        rows = _measure_apart(own, planned, own_folder, places, progress)
    found = AnchorDevices(trial.label, tuple(rows), study.equivalent, key=asked)
    if found.disturbed:
        margin = max(percent_slower(one.value) for one in found.disturbed.values())
        hosts = _find_disturbed(found, places)
        where = f" on {', '.join(sorted(hosts))}" if len({place.machine for place in places}) > 1 else ""
        progress.note(
            f"{found.slower}; blocks are measured one at a time{where}, and side by side with "
            f"--equivalent {int(margin) + 1}"
        )
    found = replace(found, side_by_side=not found.disturbed)
    store_devices(folder, found)
    return StudyPlaces(places, _find_disturbed(found, places))


def _find_disturbed(found: AnchorDevices, places: Sequence[Place]) -> set[str]:
    """Return the machines with devices that disturb each other."""
    return {place.machine for place in places if place.name in found.disturbed}


def _in_turns(
    trial: Trial, folder: Path, places: Sequence[Place], equivalent: float, progress: Progress
) -> list[AnchorDevice] | LossReasons:
    """Measure the anchor interleaved at places of this host; return the devices, or the failed places with reasons.

    A place slowed down by others makes a study take several times as long. Another program may have caused it, so the
    same number of rounds is measured again, and all rounds decide.
    """
    for rounds in (ANCHOR_ROUNDS, 2 * ANCHOR_ROUNDS):
        if lost := measure(trial, folder, places, rounds, progress):
            return lost
        found = AnchorDevices(trial.label, tuple(read(folder, places, rounds)), equivalent)
        if not found.disturbed:
            break
        if rounds == ANCHOR_ROUNDS:
            progress.show_step(f"{found.slower}; that is measured again, since it would slow down the study")
    return list(found.devices)


def _drop_places(
    lost: LossReasons, study: Study, folder: Path, places: Sequence[Place], progress: Progress
) -> StudyPlaces:
    """Continue without the places where the anchor failed; with all places if it failed everywhere."""
    rest = [place for place in places if place.name not in lost]
    for name, why in lost.items():
        progress.note(f"{name}: the trial that all devices repeat could not be measured ({why})")
    if not rest:
        progress.note("so interference between the devices is unknown; they are used side by side")
        return StudyPlaces(places)
    progress.note(f"the study continues without {', '.join(lost)}")
    return measure_devices(study, folder, rest, progress)


def _measure_apart(
    study: Study, anchor: PlannedTrial, folder: Path, places: Sequence[Place], progress: Progress
) -> list[AnchorDevice]:
    """Measure the anchor at places of a cluster.

    First each place runs alone on its host, in parallel with other hosts; then all places of a host run at once.
    """
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.machine, []).append(place)
    alone = [[own[k] for own in hosts.values() if k < len(own)] for k in range(max(map(len, hosts.values())))]
    beside = [place for own in hosts.values() if len(own) > 1 for place in own]
    part = TrialSelection([anchor.trial.id], [anchor.source])
    for together, how in [*((some, ALONE) for some in alone), (beside, BESIDE)]:
        _measure_together(study, part, folder, [place for place in together if not place.gone], how, progress)
    found = []
    for place in list_left(places):
        alone_s, beside_s = (_read_medians(_name_folder(folder, place, how)) if place in some else ()
                             for how, some in ((ALONE, places), (BESIDE, beside)))  # fmt: skip
        found.append(AnchorDevice(place.name, place.card, alone_s, beside_s))
    return found


def _measure_together(
    study: Study, part: TrialSelection, folder: Path, places: Sequence[Place], how: str, progress: Progress
) -> None:
    """Measure the anchor at these places at once."""
    running = [
        blocks.start_process(_name_folder(folder, place, how), study, part, place, retry_failed=False)
        for place in places
    ]
    try:
        while not all(one.has_ended for one in running):
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.end()
    for one in running:
        if lost := one.loss_reason:
            what = f"{one.place.name}: the trial that all devices repeat could not be measured ({lost})"
            if not one.place.gone:
                raise UserError(what)
            progress.note(f"{what}; the study continues without that device")


def _name_folder(folder: Path, place: Place, how: str) -> Path:
    return folder / f"{file_name(place)}-{how}"


def _read_medians(folder: Path) -> tuple[float, ...]:
    return tuple(median for t in load_run(folder) for median in t.medians("model"))
