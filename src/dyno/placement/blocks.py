"""Blocks: what is compared with each other, and so measured on one device; and the trial that all devices repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyno.engine import ensemble
from dyno.planning.planned import PlannedTrial, TrialSelection
from dyno.worker.spec import Trial, digest


@dataclass(frozen=True)
class Block:
    """All trials of one model, batch and size: what measures in turns together, and never on two devices."""

    trials: tuple[Trial, ...]
    source: str  # their model, as the study has it

    @property
    def id(self) -> str:
        """The hash of what its trials have in common, the same when a study gets more backends or precisions."""
        first = self.trials[0]
        return digest([first.model.name, first.dims])[:12]

    @property
    def part(self) -> TrialSelection:
        """What of the study's plan it is."""
        return TrialSelection([trial.id for trial in self.trials], [self.source])

    @property
    def label(self) -> str:
        """The block in words, as in a progress line."""
        dims = self.trials[0].dims
        return f"{self.trials[0].model.name} b{dims.batch} {dims.shown}".rstrip()


def blocks(planned: Sequence[PlannedTrial]) -> list[Block]:
    """Return the blocks of the trials that can run, in their order; each trial is in exactly one."""
    sources = {entry.trial.id: entry.source for entry in planned}
    groups = ensemble.groups([entry.trial for entry in planned if not entry.refusal])
    return [Block(tuple(group), sources[group[0].id]) for group in groups]


def anchor(planned: Sequence[PlannedTrial]) -> PlannedTrial | None:
    """Return the trial repeated on every device of a study: the reference of its first block; None without a block."""
    trial = next((ensemble.reference(block.trials, None) for block in blocks(planned)), None)
    return next((entry for entry in planned if entry.trial == trial), None)
