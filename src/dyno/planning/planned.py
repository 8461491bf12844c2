"""A trial that was planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dyno.worker.spec import Trial


@dataclass(frozen=True)
class Planned:
    """A trial, and the reason for which it is refused ("" if it isn't)."""

    trial: Trial
    refusal: str = ""
    status: str = "skipped"  # of a trial that will not run
    model_facts: dict[str, Any] = field(default_factory=dict)  # what inspection counted: flops, parameters
    uninspected: bool = False  # of a model whose inspection failed
