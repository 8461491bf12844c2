"""Which changes fail a comparison, and how large they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dyno.analysis.metrics import agreement
from dyno.worker.spec import UserError

SLOWER, LESS_ACCURATE, DISAGREE, STATUS, WRONG_OUTPUTS = CONDITIONS = (
    "slower", "less-accurate", "disagree", "status", "wrong-outputs",
)  # fmt: skip
TOLERANCE = 0.02
FAIL_ON = (SLOWER, LESS_ACCURATE, STATUS, WRONG_OUTPUTS)
MOST = 10.0  # a slow-down that no gate waits for: eleven times as long


@dataclass(frozen=True)
class Rules:
    """Which changes fail the comparison, and how large they may be.

    `tolerance` is the relative slow-down that is still fine: "slower" needs the whole interval beyond it. Written as
    "slower=2%", which sets the tolerance, it is a gate: what is neither beyond nor within the limit for certain is
    undecided. `least` is the share of output values (0 to 1) that must be close to A's, |b - a| <= atol + rtol |a|;
    giving it asks for the condition "disagree". With `any_outputs` speed is judged whatever B computes. UserError for
    anything else.
    """

    fail_on: tuple[str, ...] = FAIL_ON
    tolerance: float = TOLERANCE
    least: float = 0.0
    rtol: float = agreement.RTOL
    atol: float = agreement.ATOL
    any_outputs: bool = False
    gate: bool = False

    def __post_init__(self) -> None:
        self._read(self.fail_on)
        for name in ("tolerance", "rtol", "atol"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value:g}; it must be 0 or more")
        if not 0 <= self.least <= 1:
            raise UserError(f"least is {self.least:g}; it is a share of values from 0 to 1, such as 0.999")
        if DISAGREE in self.fail_on and not self.least:
            raise UserError("to fail on disagree, say with least which share of the values must agree, such as 0.999")
        if self.least and DISAGREE not in self.fail_on:
            object.__setattr__(self, "fail_on", (*self.fail_on, DISAGREE))

    def _read(self, conditions: tuple[str, ...]) -> None:
        names = []
        for text in conditions:
            name, equals, limit = text.partition("=")
            if name not in CONDITIONS:
                raise UserError(f"can't fail on {text!r}; known: {', '.join(CONDITIONS)}, and slower=2% or the like")
            if equals and name != SLOWER:
                raise UserError(f"{name} has no limit of its own, so {text!r} says nothing; write {name}")
            if equals and self.tolerance not in (TOLERANCE, percent(limit)):
                raise UserError(f"{text} and a tolerance of {self.tolerance:g} are two limits; give one of them")
            if equals:
                object.__setattr__(self, "tolerance", percent(limit))
                object.__setattr__(self, "gate", True)
            names.append(name)
        object.__setattr__(self, "fail_on", tuple(names))


def percent(text: str) -> float:
    """The share that `2%` is; a `UserError` for what is no percentage from 0 on."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = math.nan
    if not (text.strip().endswith("%") and 0 <= value <= MOST):
        raise UserError(f"slower={text} is no slow-down; write a percentage of 0 or more, such as slower=2%")
    return value
