"""Rules of the gate: changes that fail a comparison, and their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dyno.formatting import show
from dyno.results import stats
from dyno.results.metrics.precision import read_truth
from dyno.results.trial_result import TrialResult
from dyno.worker.numerics import closeness
from dyno.worker.option_values import settle
from dyno.worker.spec import UserError

SLOWER, LESS_ACCURATE, DISAGREE, STATUS, WRONG_OUTPUTS = CONDITIONS = (
    "slower", "less-accurate", "disagree", "status", "wrong-outputs",
)  # fmt: skip
DEFAULT_TOLERANCE = 0.02
FAIL_ON = (SLOWER, LESS_ACCURATE, STATUS, WRONG_OUTPUTS)
MAX_TOLERANCE = 10.0  # largest accepted limit: eleven times as long


@dataclass(frozen=True)
class GateRules:
    """Changes that fail a comparison, with their limits.

    `tolerance` is the accepted relative slow-down: "slower" needs the whole interval beyond it. "slower=2%" sets the
    tolerance and makes it a gate: a result neither clearly beyond nor clearly within the limit is undecided. `loss` is
    the accepted loss of accuracy as a share, written in points: "less-accurate=0.5" accepts half a point. `least` is
    the share of output values (0 to 1) that must be close to A's, |b - a| <= atol + rtol |a| (by default atol is 1e-8,
    or that share of A's largest value if it is below 1); it adds the condition "disagree". With `any_outputs` speed is
    judged even if B's outputs are wrong. Raises `UserError` for anything else.
    """

    fail_on: tuple[str, ...] = FAIL_ON
    tolerance: float = DEFAULT_TOLERANCE
    loss: float = 0.0
    least: float = 0.0
    rtol: float = closeness.RTOL
    atol: float | None = None
    any_outputs: bool = False
    gate: bool = False

    def __post_init__(self) -> None:
        settle(self)
        self._parse_conditions(self.fail_on)
        for name in ("tolerance", "loss", "rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
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
        for name, parse in ((SLOWER, parse_percent), (LESS_ACCURATE, parse_points)):
            entries = [c for c in conditions if c.startswith(f"{name}=")]
            if len({parse(c.partition("=")[2]) for c in entries}) > 1:
                raise UserError(f"{', '.join(entries)} contradict each other; give one of them")
        for text in conditions:
            name, equals, limit = text.partition("=")
            if name not in CONDITIONS:
                limits = "and limits, slower=2% and less-accurate=0.5"
                raise UserError(f"can't fail on {text!r}; known: {', '.join(CONDITIONS)}, {limits}")
            if equals and name == LESS_ACCURATE:
                object.__setattr__(self, "loss", parse_points(limit))
            elif equals and name != SLOWER:
                raise UserError(f"{name} takes no limit; write {name} instead of {text!r}")
            elif equals and self.tolerance not in (DEFAULT_TOLERANCE, parse_percent(limit)):
                raise UserError(f"{text} and a tolerance of {self.tolerance:g} contradict each other; give one of them")
            elif equals:
                object.__setattr__(self, "tolerance", parse_percent(limit))
                object.__setattr__(self, "gate", True)
            names.append(name)
        object.__setattr__(self, "fail_on", tuple(names))


def format_slowdown(share: float) -> str:
    """Format a relative slow-down; beyond the largest limit its digits are meaningless (two rounds may give 1e40)."""
    return f"{100 * share:.1f} %" if share <= MAX_TOLERANCE else f"more than {100 * MAX_TOLERANCE:,.0f} %"


def parse_percent(text: str) -> float:
    """Return the share for a text such as `2%`; raise `UserError` for anything but a percentage of 0 to 1000."""
    digits = text.strip().removesuffix("%")
    try:
        value = float(digits) / 100
    except ValueError:
        value = math.nan
    if not (text.strip().endswith("%") and 0 <= value <= MAX_TOLERANCE):
        raise UserError(f"slower={text} is not a percentage from 0 to {100 * MAX_TOLERANCE:g}; write slower=2%")
    return value


def parse_points(text: str) -> float:
    """Return the share for a loss in points such as `0.5`; raise `UserError` for anything but 0 to 100."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise UserError(f"less-accurate={text} is not a number of points from 0 to 100; write less-accurate=0.5")
    return value / 100


# Power of a comparison with these rounds and this spread.

TARGET_POWER = 0.8


def smallest_slowdown(error: float, freedom: float, level: float, tolerance: float) -> float:
    """Return the smallest relative slow-down that fails with a probability of 80 %; NaN if unknown.

    `error` is the standard error of the mean log ratio with `freedom` degrees of freedom. A comparison fails if the
    interval of 1 - `level` lies wholly above 1 + `tolerance`. At the smallest slow-down the t statistic, with its
    noncentral t distribution, exceeds the critical value with that probability.
    """
    from scipy.special import nctdtrinc

    if not freedom > 0:
        return math.nan
    critical = stats.t_quantile(freedom, level)
    return (1 + tolerance) * math.exp(error * float(nctdtrinc(freedom, 1 - TARGET_POWER, critical))) - 1


# Other differences between two compared trials: facts that may explain their speeds.

UNKNOWN = "unknown"  # value for layers that can't be profiled, such as TorchScript's


def list_changes(a: TrialResult, b: TrialResult) -> list[str]:
    """Return each fact of the engine that differs in B, as `layers 41 to 44`: versions, types, layers, file size."""
    if not (a.good and b.good):
        return []
    before, after = dict(_list_facts(a)), dict(_list_facts(b))
    return [
        f"{name} {before.get(name, 'none')} to {after.get(name, 'none')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def _list_facts(trial: TrialResult) -> Iterator[tuple[str, str]]:
    system: Mapping[str, Any] = trial.good[0].record.system
    if python := system.get("python"):
        yield "Python", str(python)
    for name, version in (system.get("versions") or {}).items():
        yield str(name), str(version)
    if types := read_truth(trial):
        yield "ran as", str(types) or UNKNOWN
    for name in ("layers", "parameters"):
        count = trial.count(name)
        yield name, UNKNOWN if count is None else f"{count:,}"
    size = trial.artifact.bytes if trial.artifact else trial.value("file_size")
    if size:
        yield "file size", show(float(size), "bytes")
    if trial.facts.threads is not None:
        yield "threads", str(trial.facts.threads)
