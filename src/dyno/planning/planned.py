"""A trial that was planned, and a part of a plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dyno.worker.spec import Trial


@dataclass(frozen=True)
class PlannedTrial:
    """A trial, and the reason for which it is refused ("" if it isn't)."""

    trial: Trial
    refusal: str = ""
    status: str = "skipped"  # of a trial that will not run
    model_facts: dict[str, Any] = field(default_factory=dict)  # what inspection counted: flops, parameters
    uninspected: bool = False  # of a model whose inspection failed
    source: str = ""  # its model, as the study has it


@dataclass(frozen=True)
class TrialSelection:
    """Those trials of a study that are asked for, by their ids; with `sources` all are of these models, as the study
    has them, and no other is planned."""

    trials: Collection[str]
    sources: Collection[str] = ()
