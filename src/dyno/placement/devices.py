"""What the anchor trial says of a study's devices: how they differ, and whether they disturb each other."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.analysis import stats
from dyno.analysis.records.notes.placements import DEVICES
from dyno.analysis.records.results import load
from dyno.jobs.progress import Progress
from dyno.placement import blocks, process
from dyno.placement.places import Place, left
from dyno.planning.plan import expand
from dyno.study import Study
from dyno.worker.record import read_json, write_json
from dyno.worker.spec import FIXED, ROUNDS, SCHEMA, UserError, digest

POLL_S = 0.1
ALONE, BESIDE = "alone", "beside"
ANCHORS = "anchors"


def measure(study: Study, folder: Path, places: Sequence[Place], progress: Progress) -> bool:
    """Measure the anchor trial at each place alone and beside the others, unless the folder has that; whether blocks
    may be measured side by side: where no place is slower beside the others than alone, beyond the rounds' noise."""
    own = replace(
        study, device=places[0].device, rounds=ROUNDS, until=FIXED, boundaries=("model",), budget={}, search=False,
        confirm=0, builds=1,
    )  # fmt: skip
    trial = blocks.anchor(expand(own))
    if trial is None or len(places) < 2:
        return True
    key = digest([trial.id, [[place.name, place.card] for place in places]])
    path = folder / DEVICES
    if path.is_file() and (stored := read_json(path)).get("key") == key:
        return bool(stored["side_by_side"])
    progress.other(f"{trial.label} on each device alone, then on all at once, for what they do to each other")
    own_folder = folder / ANCHORS / key[:12]  # of these devices, and of this company
    for together, how in [*(([place], ALONE) for place in places), (places, BESIDE)]:
        _together(own, trial.id, own_folder, [place for place in together if not place.gone], how, progress)
    rows = [_row(own_folder, place) for place in left(places)]
    slower = [row["place"] for row in rows if stats.speedup(row[BESIDE], row[ALONE]).verdict == stats.SLOWER]
    stored = {"schema": SCHEMA, "key": key, "anchor": trial.label, "side_by_side": not slower, "devices": rows}
    write_json(path, stored)
    if slower:
        progress.note(
            f"{', '.join(slower)}: slower beside the other devices than alone; blocks are measured one at a time"
        )
    return not slower


def _together(study: Study, trial: str, folder: Path, places: Sequence[Place], how: str, progress: Progress) -> None:
    """Measure the anchor at these places at once."""
    running = [
        process.start(_folder(folder, place, how), study, [trial], place, retry_failed=False) for place in places
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


def _folder(folder: Path, place: Place, how: str) -> Path:
    name = re.sub(r"[^\w.-]", "_", place.name.replace(":", ""))
    return folder / f"{name}-{how}"


def _row(folder: Path, place: Place) -> dict[str, Any]:
    """Medians in seconds of the anchor's rounds at the place."""
    medians = {
        how: [m for t in load(_folder(folder, place, how)) for m in t.medians("model")] for how in (ALONE, BESIDE)
    }
    return {"place": place.name, "card": place.card, **medians}
