"""Blocks: what is compared with each other, and so measured on one device; and the trial that all devices repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyno.engine import ensemble
from dyno.planning.planned import Planned
from dyno.worker.spec import Trial, digest


@dataclass(frozen=True)
class Block:
    """All trials of one model, batch and size: what measures in turns together, and never on two devices."""

    trials: tuple[Trial, ...]

    @property
    def id(self) -> str:
        """The hash of what its trials have in common, the same when a study gets more backends or precisions."""
        first = self.trials[0]
        return digest([first.model.name, first.dims])[:12]

    @property
    def label(self) -> str:
        """The block in words, as in a progress line."""
        dims = self.trials[0].dims
        return f"{self.trials[0].model.name} b{dims.batch} {dims.shown}".rstrip()


def blocks(planned: Sequence[Planned]) -> list[Block]:
    """The blocks of the trials that can run, in their order; each trial is in exactly one."""
    return [Block(tuple(group)) for group in ensemble.groups([entry.trial for entry in planned if not entry.refusal])]


def anchor(planned: Sequence[Planned]) -> Trial | None:
    """The trial that is repeated on every device of a study: the reference of its first block; None without a block."""
    return next((ensemble.reference(block.trials, None) for block in blocks(planned)), None)
