"""Which changes fail a comparison, and how large they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dyno.worker.numerics import closeness
from dyno.worker.option_values import settle
from dyno.worker.spec import UserError

SLOWER, LESS_ACCURATE, DISAGREE, STATUS, WRONG_OUTPUTS = CONDITIONS = (
    "slower", "less-accurate", "disagree", "status", "wrong-outputs",
)  # fmt: skip
TOLERANCE = 0.02
FAIL_ON = (SLOWER, LESS_ACCURATE, STATUS, WRONG_OUTPUTS)
MOST = 10.0  # the largest limit: eleven times as long


@dataclass(frozen=True)
class GateRules:
    """Which changes fail the comparison, and how large they may be.

    `tolerance` is the relative slow-down that is still accepted: "slower" needs the whole interval beyond it. Written
    as "slower=2%", which sets the tolerance, it is a gate: what is neither clearly beyond nor clearly within the limit
    is undecided. `least` is the share of output values (0 to 1) that must be close to A's, |b - a| <= atol + rtol |a|;
    giving it asks for the condition "disagree". With `any_outputs` speed is judged even where B's outputs are wrong.
    UserError for anything else.
    """

    fail_on: tuple[str, ...] = FAIL_ON
    tolerance: float = TOLERANCE
    least: float = 0.0
    rtol: float = closeness.RTOL
    atol: float = closeness.ATOL
    any_outputs: bool = False
    gate: bool = False

    def __post_init__(self) -> None:
        settle(self)
        self._parse_conditions(self.fail_on)
        for name in ("tolerance", "rtol", "atol"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value:g}; it must be 0 or more")
        if not 0 <= self.least <= 1:
            raise UserError(f"least is {self.least:g}; it is a share of values from 0 to 1, such as 0.999")
        if DISAGREE in self.fail_on and not self.least:
            raise UserError("disagree needs least, the share of values that must agree, such as 0.999")
        if self.least and DISAGREE not in self.fail_on:
            object.__setattr__(self, "fail_on", (*self.fail_on, DISAGREE))
        if not self.fail_on:
            raise UserError(f"fail_on is empty, so nothing would fail; give one or several of {', '.join(CONDITIONS)}")

    def _parse_conditions(self, conditions: tuple[str, ...]) -> None:
        names = []
        if len({percent(c.partition("=")[2]) for c in conditions if c.startswith(f"{SLOWER}=")}) > 1:
            raise UserError(f"{', '.join(c for c in conditions if '=' in c)} contradict each other; give one of them")
        for text in conditions:
            name, equals, limit = text.partition("=")
            if name not in CONDITIONS:
                raise UserError(f"can't fail on {text!r}; known: {', '.join(CONDITIONS)}, and a limit, slower=2%")
            if equals and name != SLOWER:
                raise UserError(f"{name} takes no limit; write {name} instead of {text!r}")
            if equals and self.tolerance not in (TOLERANCE, percent(limit)):
                raise UserError(f"{text} and a tolerance of {self.tolerance:g} contradict each other; give one of them")
            if equals:
                object.__setattr__(self, "tolerance", percent(limit))
                object.__setattr__(self, "gate", True)
            names.append(name)
        object.__setattr__(self, "fail_on", tuple(names))


def slowdown(share: float) -> str:
    """Format a relative slow-down; beyond the largest limit its digits mean nothing (two rounds may give 1e40)."""
    return f"{100 * share:.1f} %" if share <= MOST else f"more than {100 * MOST:,.0f} %"


def percent(text: str) -> float:
    """Return the share for a text such as `2%`; UserError for anything but a percentage of 0 to 1000."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = math.nan
    if not (text.strip().endswith("%") and 0 <= value <= MOST):
        raise UserError(f"slower={text} is not a percentage of 0 or more; write slower=2%")
    return value
