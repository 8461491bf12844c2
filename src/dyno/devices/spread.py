"""Studies spread over devices: each block is measured on one device, in a separate process."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from dyno.devices import blocks, one_host, places
from dyno.devices.blocks import Block
from dyno.devices.clusters import ray_cluster, slurm_cluster
from dyno.devices.places import Place, RunningBlock
from dyno.formatting import format_count
from dyno.jobs.progress import Progress
from dyno.results.notes import Placement, list_placements, read_placement, store_placement
from dyno.runner.execute import execute, prepare
from dyno.runner.run_folder import move_folder, refuse_other
from dyno.store import Run, check_own
from dyno.study.plan import expand
from dyno.study.study import Study
from dyno.worker.spec import UserError, check_known, digest

MAX_LOSSES = 3  # deaths of its process after which a block stays unmeasured
OTHER_DEVICES_DIR = "archive/elsewhere"  # rows of devices that a later command lacks
OF_ONE_DEVICE = ("peak", "energy", "baseline")  # settings for a single device


def run(study: Study, folder: Path, progress: Progress, *, retry_failed: bool = False) -> None:
    """Measure the missing part of the study like `execute`, on one device or spread over several."""
    if not places.is_several(study):
        execute(study, folder, progress, retry_failed=retry_failed, other_routes=not study.baseline)
        return
    for name in OF_ONE_DEVICE:
        if getattr(study, name):
            target = study.on or study.device
            raise UserError(f"{name} is for a study on one device, and there are several ({target}); give one")
    check_own(folder)
    refuse_other(study, folder)
    if folder.is_dir():
        with Run(folder).hold_lock():  # refuse a folder that is in use before waiting for a cluster
            pass
    with _found_places(study, folder, progress) as place_list:
        _run_blocks(study, folder, place_list, progress, retry_failed)


def _parse_cluster(study: Study) -> tuple[str, str]:
    """Return the kind of cluster ("" for this host) and its specification."""
    kind, _, spec = study.on.partition("=")
    if kind:
        check_known("cluster", kind, ("ray", "slurm"))
    if "=" in study.on and not spec:  # an address from an empty variable must not mean another cluster
        advice = "write ray=HOST:PORT or slurm=4, or ray for this host's cluster"
        raise UserError(f"--cluster {study.on} names nothing; {advice}")
    return kind, spec


def _found_places(study: Study, folder: Path, progress: Progress) -> AbstractContextManager[list[Place]]:
    kind, spec = _parse_cluster(study)
    if kind == "slurm":
        return slurm_cluster.slurm_places(spec, study.device, folder, progress)
    return expected_places(study)


def expected_places(study: Study) -> AbstractContextManager[list[Place]]:
    """Return a context manager for the places that a plan needs: those of a study, but no job is started."""
    kind, spec = _parse_cluster(study)
    if kind == "ray":
        return ray_cluster.hold_places(spec, study.device)
    if kind:
        return nullcontext(slurm_cluster.count_expected(spec, study.device))
    return nullcontext(places.parse_places(study.device, study.threads))


def _run_blocks(study: Study, folder: Path, place_list: list[Place], progress: Progress, retry_failed: bool) -> None:
    block_study = places.at_one(study, place_list)
    planned, store = expand(block_study), Run(folder)
    with store.hold_lock():
        planned = prepare(study, store, planned, progress)
        all_blocks = blocks.split_blocks(planned)
        open_blocks = [block for block in all_blocks if retry_failed or not _is_done(store, block, study)]
        if not open_blocks:
            return
        setup = one_host.StudyPlaces(place_list)
        if len(open_blocks) > 1:
            setup = one_host.measure_devices(block_study, folder, place_list, progress)
        BlockScheduler(store, block_study, study, setup.places, progress, retry_failed, setup.in_turn).measure(
            open_blocks
        )


@dataclass
class BlockScheduler:
    """Scheduler of blocks on places; `losses` has the lost places of each block, with reasons."""

    run: Run
    block_study: Study  # the study as each process measures it
    study: Study  # the study as given
    places: Sequence[Place]
    progress: Progress
    retry_failed: bool
    in_turn: Collection[str]  # machines on which one block is measured at a time
    running: dict[str, tuple[Block, RunningBlock]] = field(default_factory=dict)
    losses: dict[str, list[str]] = field(default_factory=dict)

    def measure(self, queue: list[Block]) -> None:
        """Measure the blocks, each at the place where it was begun, else at the free place with the fewest blocks."""
        queue = list(queue)
        try:
            while queue or self.running:
                self._start_blocks(queue)
                time.sleep(one_host.POLL_S)
                queue += self._take_ended()
        finally:
            for _, process in self.running.values():
                process.end()

    def _start_blocks(self, queue: list[Block]) -> None:
        if not self.running:  # otherwise a running block reports why its place is lost
            places.list_left(self.places)
        # Blocks per place so far, so that no place stays idle if blocks run one at a time.
        block_counts = Counter(placement.place for placement in list_placements(self.run.folder))
        for place in sorted(self.places, key=lambda place: block_counts[place.name]):
            busy_machines = {process.place.machine for _, process in self.running.values()}
            if place.gone or place.name in self.running or place.machine in busy_machines.intersection(self.in_turn):
                continue
            block = next((b for b in queue if self._begun_at(b) in ("", place.name)), None)
            if block is not None:
                queue.remove(block)
                self._begin_block(block, place)

    def _begun_at(self, block: Block) -> str:
        """Return the place that the block belongs to; "" if it can go anywhere."""
        placement = read_placement(self.run.folder, block.id)
        return next((place.name for place in self.places if not place.gone and _is_same_place(place, placement)), "")

    def _begin_block(self, block: Block, place: Place) -> None:
        """Start the block's process, with the block's rows that the run folder already has."""
        folder = _name_folder(self.run, block)
        placement = read_placement(self.run.folder, block.id)
        if placement and not _is_same_place(place, placement):
            self._set_aside(block, placement.place)
        for trial in block.trials:
            source, target = self.run.folder / "trials" / trial.id, folder / "trials" / trial.id
            if source.is_dir() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.rename(target)
        self._note_place(block, place, done="")
        self.progress.relay(place.name, f"{block.label}: {format_count(len(block.trials), 'trial')}")
        process = blocks.start_process(folder, self.block_study, block.selection, place, retry_failed=self.retry_failed)
        self.running[place.name] = block, process

    def _set_aside(self, block: Block, place: str) -> None:
        """Archive the block's rows of a device that this command lacks: all rounds of a block are of one device."""
        rows = [self.run.folder / "trials" / trial.id for trial in block.trials]
        rows += (_name_folder(self.run, block) / "trials").glob("*")
        if rows := [row for row in rows if row.is_dir()]:
            for row in rows:
                move_folder(row, self.run.folder / OTHER_DEVICES_DIR)
            self.losses.setdefault(block.id, []).append(f"{place}: the device is no longer one of the study's")
            reason = f"{place} is no longer there; its measurements are in {OTHER_DEVICES_DIR}"
            self.progress.note(f"{block.label}: restarted, as {reason}")
        shutil.rmtree(_name_folder(self.run, block), ignore_errors=True)

    def _take_ended(self) -> list[Block]:
        """Take the results of the ended processes; return the blocks to start anew."""
        lost_blocks = []
        for name, (block, process) in list(self.running.items()):
            process.pass_on(self.progress)
            if not process.has_ended:
                continue
            process.pass_on(self.progress)
            del self.running[name]
            if reason := process.loss_reason:
                lost_blocks += self._record_loss(block, process.place, reason)
            else:
                self._take_results(block)
                self._note_place(block, process.place, done=_hash_request(block, self.study))
        return lost_blocks

    def _record_loss(self, block: Block, place: Place, reason: str) -> list[Block]:
        """Record the loss; return the block, to start anew on one device, or nothing after MAX_LOSSES losses."""
        losses = self.losses.setdefault(block.id, [])
        losses.append(f"{place.name}: {reason}")
        if len(losses) >= MAX_LOSSES:
            self._take_results(block)
            self.progress.note(f"{block.label} is left unmeasured: its process was lost {len(losses)} times ({reason})")
            return []
        if all(candidate.gone for candidate in self.places):
            self.progress.note(f"{block.label}: its process on {place.name} was {reason}")
        live_places = places.list_left(self.places)
        candidates = [candidate for candidate in live_places if candidate.name != place.name] or live_places
        target = next((candidate for candidate in candidates if candidate.name not in self.running), candidates[0])
        self.progress.note(f"{block.label}: its process on {place.name} was {reason}; it goes to {target.name}")
        shutil.rmtree(_name_folder(self.run, block), ignore_errors=True)
        self._note_place(block, target, done="")
        return [block]

    def _take_results(self, block: Block) -> None:
        """Move the contents of the block's folder into the run folder, and remove it."""
        folder = _name_folder(self.run, block)
        for name in ("trials", "truth"):
            for path in sorted((folder / name).glob("*")):
                target = self.run.folder / name / path.name
                if not target.exists():
                    target.parent.mkdir(exist_ok=True)
                    path.rename(target)
        shutil.rmtree(folder)

    def _note_place(self, block: Block, place: Place, *, done: str) -> None:
        last_placement = read_placement(self.run.folder, block.id) or Placement()
        lost = tuple(dict.fromkeys([*last_placement.lost, *self.losses.get(block.id, [])]))
        trials = tuple(trial.id for trial in block.trials)
        placement = Placement(block.label, place.name, place.card, place.machine, trials, lost, done)
        store_placement(self.run.folder, block.id, placement)


def _is_same_place(place: Place, placement: Placement | None) -> bool:
    return placement is not None and (place.name, place.card) == (placement.place, placement.card)


def _name_folder(run: Run, block: Block) -> Path:
    return run.folder / "blocks" / block.id


def _hash_request(block: Block, study: Study) -> str:
    return digest([sorted(trial.id for trial in block.trials), study.to_toml()])


def _is_done(run: Run, block: Block, study: Study) -> bool:
    """Return whether the run folder has the whole block, measured for this request."""
    is_present = all((run.folder / "trials" / trial.id).is_dir() for trial in block.trials)
    placement = read_placement(run.folder, block.id)
    return is_present and placement is not None and placement.done == _hash_request(block, study)
