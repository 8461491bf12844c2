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
    plan = Plan(
        ("model",), trial.plan.warmup_s, SLOW_FACTOR * 2 * BLOCKS_PER_KIND * block_s, rounds=ANCHOR_ROUNDS,
        timeout_s=trial.plan.timeout_s, build_timeout_s=trial.plan.build_timeout_s, blocks=BLOCKS_PER_KIND,
        block_s=block_s,
    )  # fmt: skip
    return replace(trial, plan=plan)


def measure(trial: Trial, folder: Path, places: Sequence[Place], rounds: int, progress: Progress) -> LossReasons:
    """Measure those of `rounds` rounds that the folder lacks; return the failed places with reasons.

    A failed round ends the measurement. The processes of all rounds start at once if there is enough memory, because
    starting them takes most of the time; failed rounds are retried one by one.
    """
    losses: LossReasons = {}
    with progress.show_study([]):
        indices = [index for index in range(rounds) if not _is_complete(folder, places, index)]
        if len(indices) > 1 and nvml.read_available() > nvml.HEADROOM * nvml.DEFAULT_PROCESS_B * len(indices) * len(
            places
        ):
            _measure_rounds(trial, folder, places, indices, progress)
        for index in indices:
            tries = 0 if _is_complete(folder, places, index) else MAX_ATTEMPTS
            for _ in range(tries):
                if not (losses := _measure_rounds(trial, folder, places, [index], progress)):
                    break
            if losses:
                break
    for place in places:
        shutil.rmtree(folder / file_name(place) / "compiler", ignore_errors=True)
    return losses


def read(folder: Path, places: Sequence[Place], rounds: int) -> list[AnchorDevice]:
    """Return each place's figures from `rounds` stored rounds."""
    active_counts = [read_json(folder / _name_counts_file(index))["company"] for index in range(rounds)]
    devices = []
    for place in places:
        medians = (_read_round(folder, place, index).block_medians("latency", "model") for index in range(rounds))
        counts = (round_counts[place.name] for round_counts in active_counts)
        devices.append(summarise_rounds(place.name, place.card, list(zip(medians, counts, strict=True))))
    return devices


def summarise_rounds(
    place: str, card: str, rounds: Sequence[tuple[Mapping[int, float], Sequence[int]]]
) -> AnchorDevice:
    """Build the device's figures from interleaved processes.

    Each process has the median seconds of its blocks by number, and the number of devices that measured in each block:
    one or all. Two consecutive blocks are one of each kind.
    """
    alone, beside, ratios = [], [], []
    for medians, active_counts in rounds:
        alone_medians = {index // 2: seconds for index, seconds in medians.items() if active_counts[index] == 1}
        joint_medians = {index // 2: seconds for index, seconds in medians.items() if active_counts[index] > 1}
        logs = compare_blocks(joint_medians, alone_medians)
        if logs.size:  # otherwise throttling left no pair
            alone.append(float(np.median([*alone_medians.values()])))
            beside.append(float(np.median([*joint_medians.values()])))
            ratios.append(math.exp(float(np.median(logs))))
    return AnchorDevice(place, card, tuple(alone), tuple(beside), tuple(ratios))


def file_name(place: Place) -> str:
    """Return the place's name as a folder name."""
    return re.sub(r"[^\w.-]", "_", place.name.replace(":", ""))


def _measure_rounds(
    trial: Trial, folder: Path, places: Sequence[Place], indices: Sequence[int], progress: Progress
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
        if losses := {name: file.reason for name, file in files.items() if isinstance(file, Record)}:
            return losses
        rounds: dict[int, list[InterleavedJob]] = {index: [] for index in indices}
        for index, jobs in rounds.items():
            for place in places:
                file = files[place.name]
                # Rounds of a job count from 1 here, as round 0 would evaluate all images.
                job = Job("run", trial.runtime, trial, index + 1, artifact=None if isinstance(file, Record) else file)
                job_folder, confine = _name_anchor_folder(folder, place, index), partial(confine_to, place)
                jobs.append(InterleavedJob(job, job_folder, index, start_context=confine))
        members = [member for jobs in rounds.values() for member in jobs]
        name = f"{indices} {trial.id}"
        InterleavedGroup(members, name, progress, lambda _: None, turns=_each_round, apart=True).run()
    for index, jobs in rounds.items():
        failures = {
            place.name: reason for place, member in zip(places, jobs, strict=True) if (reason := _find_failure(member))
        }
        losses |= failures
        if not failures:
            active_counts = {place.name: member.active_counts for place, member in zip(places, jobs, strict=True)}
            write_json(folder / _name_counts_file(index), {"schema": SCHEMA, "company": active_counts})
    return losses


def _each_round(members: Sequence[InterleavedJob]) -> list[list[InterleavedJob]]:
    """Return the turns of each round: each device alone, and all devices at once."""
    round_indices = sorted({member.round_index for member in members})
    rounds = [[member for member in members if member.round_index == round_index] for round_index in round_indices]
    return [turn for round_members in rounds for turn in list_single_and_joint_turns(round_members)]


def _find_failure(member: InterleavedJob) -> str:
    """Return why the member's process has no result; "" if it has one."""
    record = member.record
    if record is None:
        return "it was not started"
    return "" if record.status == "ok" else f"{record.status} at {record.stage}: {record.reason}"


def _name_counts_file(round_index: int) -> str:
    return f"r{round_index}.json"


def _name_anchor_folder(folder: Path, place: Place, round_index: int) -> Path:
    return folder / file_name(place) / f"r{round_index}"


def _is_complete(folder: Path, places: Sequence[Place], round_index: int) -> bool:
    """Return whether the round is stored and readable."""
    if not (folder / _name_counts_file(round_index)).is_file():
        return False
    return all(_read_round(folder, place, round_index).block_medians("latency", "model") for place in places)


def _read_round(folder: Path, place: Place, round_index: int) -> Round:
    round_folder = _name_anchor_folder(folder, place, round_index)
    return Round(round_folder, round_index, good_record(round_folder) or Record("failed"), place.device)


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
    anchor_study = replace(
        study, device=places[0].device, rounds=DEFAULT_ROUNDS, until=FIXED, boundaries=("model",), budget={}, limit={},
        search=False, confirm=0, builds=1,
    )  # fmt: skip
    anchor = blocks.find_anchor(expand(anchor_study))
    if anchor is None or len(places) < 2:
        return StudyPlaces(places)
    is_interleaved = all(place.host is None for place in places)
    trial = plan_anchor(anchor.trial, len(places)) if is_interleaved else anchor.trial
    key = digest([trial.id, [[place.name, place.card] for place in places]])
    request = f"{key} {study.equivalent:g}"
    if (stored := read_devices(folder)) and stored.key == request:
        return StudyPlaces(places, _find_disturbed(stored, places))
    progress.show_step(f"{trial.label} on each device alone and on all at once, to measure interference")
    anchor_folder = folder / ANCHORS / key[:12]  # named by the set of devices
    if is_interleaved:
        devices = _in_turns(trial, anchor_folder, places, study.equivalent, progress)
        if isinstance(devices, dict):
            return _drop_places(devices, study, folder, places, progress)
    else:
        devices = _measure_apart(anchor_study, anchor, anchor_folder, places, progress)
    anchor_devices = AnchorDevices(trial.label, tuple(devices), study.equivalent, key=request)
    if anchor_devices.disturbed:
        margin = max(percent_slower(speedup.value) for speedup in anchor_devices.disturbed.values())
        hosts = _find_disturbed(anchor_devices, places)
        host_text = f" on {', '.join(sorted(hosts))}" if len({place.machine for place in places}) > 1 else ""
        progress.note(
            f"{anchor_devices.slower}; blocks are measured one at a time{host_text}, and side by side with "
            f"--equivalent {int(margin) + 1}"
        )
    anchor_devices = replace(anchor_devices, side_by_side=not anchor_devices.disturbed)
    store_devices(folder, anchor_devices)
    return StudyPlaces(places, _find_disturbed(anchor_devices, places))


def _find_disturbed(anchor_devices: AnchorDevices, places: Sequence[Place]) -> set[str]:
    """Return the machines with devices that disturb each other."""
    return {place.machine for place in places if place.name in anchor_devices.disturbed}


def _in_turns(
    trial: Trial, folder: Path, places: Sequence[Place], equivalent: float, progress: Progress
) -> list[AnchorDevice] | LossReasons:
    """Measure the anchor interleaved at places of this host; return the devices, or the failed places with reasons.

    A place slowed down by others makes a study take several times as long. Another program may have caused it, so the
    same number of rounds is measured again, and all rounds decide.
    """
    for rounds in (ANCHOR_ROUNDS, 2 * ANCHOR_ROUNDS):
        if losses := measure(trial, folder, places, rounds, progress):
            return losses
        anchor_devices = AnchorDevices(trial.label, tuple(read(folder, places, rounds)), equivalent)
        if not anchor_devices.disturbed:
            break
        if rounds == ANCHOR_ROUNDS:
            progress.show_step(f"{anchor_devices.slower}; that is measured again, since it would slow down the study")
    return list(anchor_devices.devices)


def _drop_places(
    losses: LossReasons, study: Study, folder: Path, places: Sequence[Place], progress: Progress
) -> StudyPlaces:
    """Continue without the places where the anchor failed; with all places if it failed everywhere."""
    live_places = [place for place in places if place.name not in losses]
    for name, reason in losses.items():
        progress.note(f"{name}: the trial that all devices repeat could not be measured ({reason})")
    if not live_places:
        progress.note("so interference between the devices is unknown; they are used side by side")
        return StudyPlaces(places)
    progress.note(f"the study continues without {', '.join(losses)}")
    return measure_devices(study, folder, live_places, progress)


def _measure_apart(
    study: Study, anchor: PlannedTrial, folder: Path, places: Sequence[Place], progress: Progress
) -> list[AnchorDevice]:
    """Measure the anchor at places of a cluster.

    First each place runs alone on its host, in parallel with other hosts; then all places of a host run at once.
    """
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.machine, []).append(place)
    waves = [[peers[k] for peers in hosts.values() if k < len(peers)] for k in range(max(map(len, hosts.values())))]
    joint_places = [place for peers in hosts.values() if len(peers) > 1 for place in peers]
    selection = TrialSelection([anchor.trial.id], [anchor.source])
    for batch, kind in [*((group, ALONE) for group in waves), (joint_places, BESIDE)]:
        _measure_together(study, selection, folder, [place for place in batch if not place.gone], kind, progress)
    devices = []
    for place in list_left(places):
        alone_s, beside_s = (_read_medians(_name_folder(folder, place, kind)) if place in group else ()
                             for kind, group in ((ALONE, places), (BESIDE, joint_places)))  # fmt: skip
        devices.append(AnchorDevice(place.name, place.card, alone_s, beside_s))
    return devices


def _measure_together(
    study: Study, selection: TrialSelection, folder: Path, places: Sequence[Place], kind: str, progress: Progress
) -> None:
    processes = [
        blocks.start_process(_name_folder(folder, place, kind), study, selection, place, retry_failed=False)
        for place in places
    ]
    try:
        while not all(process.has_ended for process in processes):
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.end()
    for process in processes:
        if reason := process.loss_reason:
            text = f"{process.place.name}: the trial that all devices repeat could not be measured ({reason})"
            if not process.place.gone:
                raise UserError(text)
            progress.note(f"{text}; the study continues without that device")


def _name_folder(folder: Path, place: Place, kind: str) -> Path:
    return folder / f"{file_name(place)}-{kind}"


def _read_medians(folder: Path) -> tuple[float, ...]:
    return tuple(median for t in load_run(folder) for median in t.medians("model"))
