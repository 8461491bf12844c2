"""What the anchor trial says of a study's devices: how they differ, and whether they disturb each other."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dyno.analysis.records.notes.devices import DEVICES, AnchorDevice, AnchorDevices, devices, percent_slower
from dyno.analysis.records.results import load
from dyno.jobs.progress import Progress
from dyno.placement import anchors, blocks, process
from dyno.placement.places import Place, left
from dyno.planning.plan import expand
from dyno.planning.planned import PlannedTrial, TrialSelection
from dyno.study import Study
from dyno.worker.record import read_json, write_json
from dyno.worker.spec import FIXED, ROUNDS, SCHEMA, Trial, UserError, digest

POLL_S = 0.1
ALONE, BESIDE = "alone", "beside"
ANCHORS = "anchors"


@dataclass(frozen=True)
class StudyPlaces:
    """The places that a study goes on with, and the machines on which blocks are measured one at a time."""

    places: Sequence[Place]
    in_turn: Collection[str] = ()


def measure(study: Study, folder: Path, places: Sequence[Place], progress: Progress) -> StudyPlaces:
    """Measure the anchor trial at each place alone and beside the others, unless the folder has that.

    Places of this host do that in turns, in the same processes; a place where it can't be measured is left out, unless
    that is so at all. Blocks may be measured side by side on a machine where no place is slower beside its others than
    alone, beyond the spread between rounds and by what doesn't count as equal.
    """
    own = replace(
        study, device=places[0].device, rounds=ROUNDS, until=FIXED, boundaries=("model",), budget={}, search=False,
        confirm=0, builds=1,
    )  # fmt: skip
    planned = blocks.anchor(expand(own))
    if planned is None or len(places) < 2:
        return StudyPlaces(places)
    in_turns = all(place.host is None for place in places)
    trial = anchors.planned(planned.trial, len(places)) if in_turns else planned.trial
    key = digest([trial.id, [[place.name, place.card] for place in places]])
    asked = f"{key} {study.equivalent:g}"
    path = folder / DEVICES
    if path.is_file() and read_json(path).get("key") == asked and (stored := devices(folder)):
        return StudyPlaces(places, _find_disturbed(stored, places))
    progress.other(f"{trial.label} on each device alone and on all at once, for what they do to each other")
    own_folder = folder / ANCHORS / key[:12]  # of these devices, and of this company
    if in_turns:
        rows = _in_turns(trial, own_folder, places, study.equivalent, progress)
        if isinstance(rows, dict):
            return _drop_places(rows, study, folder, places, progress)
    else:
        rows = _measure_apart(own, planned, own_folder, places, progress)
    found = AnchorDevices(trial.label, tuple(rows), study.equivalent)
    if found.disturbed:
        margin = max(percent_slower(one.value) for one in found.disturbed.values())
        hosts = _find_disturbed(found, places)
        where = f" on {', '.join(sorted(hosts))}" if len({place.machine for place in places}) > 1 else ""
        progress.note(
            f"{found.slower}; blocks are measured one at a time{where}, and side by side with "
            f"--equivalent {int(margin) + 1}"
        )
    found = replace(found, side_by_side=not found.disturbed)
    write_json(path, {"schema": SCHEMA, "key": asked, **asdict(found)})
    return StudyPlaces(places, _find_disturbed(found, places))


def _find_disturbed(found: AnchorDevices, places: Sequence[Place]) -> set[str]:
    """Return the machines whose devices disturb each other."""
    return {place.machine for place in places if place.name in found.disturbed}


def _in_turns(
    trial: Trial, folder: Path, places: Sequence[Place], equivalent: float, progress: Progress
) -> list[AnchorDevice] | anchors.LossReasons:
    """Measure the anchor interleaved at places of this host; return the devices, or the places where that failed.

    If a place is slower beside the others, a study takes several times as long; because another program may have caused
    it, as many processes are measured again, and all of them decide.
    """
    for rounds in (anchors.ROUNDS, 2 * anchors.ROUNDS):
        if lost := anchors.measure(trial, folder, places, rounds, progress):
            return lost
        found = AnchorDevices(trial.label, tuple(anchors.read(folder, places, rounds)), equivalent)
        if not found.disturbed:
            break
        if rounds == anchors.ROUNDS:
            progress.other(f"{found.slower}; that is measured again, since it would slow down the study")
    return list(found.devices)


def _drop_places(
    lost: anchors.LossReasons, study: Study, folder: Path, places: Sequence[Place], progress: Progress
) -> StudyPlaces:
    """Go on without the places where the anchor could not be measured; with all if the trial itself is at fault."""
    rest = [place for place in places if place.name not in lost]
    for name, why in lost.items():
        progress.note(f"{name}: the trial that all devices repeat could not be measured ({why})")
    if not rest:
        progress.note("so nothing is known of what the devices do to each other; they are used side by side")
        return StudyPlaces(places)
    progress.note(f"the study goes on without {', '.join(lost)}")
    return measure(study, folder, rest, progress)


def _measure_apart(
    study: Study, anchor: PlannedTrial, folder: Path, places: Sequence[Place], progress: Progress
) -> list[AnchorDevice]:
    """Measure the anchor at places of a cluster.

    Each place first runs alone on its host, in parallel on all hosts; then all places that share a host run at once.
    """
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.machine, []).append(place)
    alone = [[own[k] for own in hosts.values() if k < len(own)] for k in range(max(map(len, hosts.values())))]
    beside = [place for own in hosts.values() if len(own) > 1 for place in own]
    part = TrialSelection([anchor.trial.id], [anchor.source])
    for together, how in [*((some, ALONE) for some in alone), (beside, BESIDE)]:
        _measure_together(study, part, folder, [place for place in together if not place.gone], how, progress)
    measured = {ALONE: places, BESIDE: beside}
    return [
        AnchorDevice(
            place.name,
            place.card,
            *(
                _read_medians(_name_folder(folder, place, how)) if place in some else ()
                for how, some in measured.items()
            ),
        )
        for place in left(places)
    ]


def _measure_together(
    study: Study, part: TrialSelection, folder: Path, places: Sequence[Place], how: str, progress: Progress
) -> None:
    """Measure the anchor at these places at once."""
    running = [
        process.start(_name_folder(folder, place, how), study, part, place, retry_failed=False) for place in places
    ]
    try:
        while not all(one.ended for one in running):
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.end()
    for one in running:
        if lost := one.lost:
            what = f"{one.place.name}: the trial that all devices repeat could not be measured ({lost})"
            if not one.place.gone:
                raise UserError(what)
            progress.note(f"{what}; the study goes on without that device")


def _name_folder(folder: Path, place: Place, how: str) -> Path:
    return folder / f"{anchors.file_name(place)}-{how}"


def _read_medians(folder: Path) -> tuple[float, ...]:
    """Return the medians of the rounds, in seconds."""
    return tuple(median for t in load(folder) for median in t.medians("model"))
