"""Limits on a trial's resources, `p99=5ms`: parsing, and checks of a trial's row.

A row is within a limit if the whole 95 % interval of its value is, over it if the whole interval is beyond it, else
undecided. Values without an interval decide alone. A percentile of too few samples proves nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.formatting import format_number, show
from dyno.results.metrics.accuracy import OVER, UNDECIDED, WITHIN
from dyno.results.stats import samples_for
from dyno.table import is_missing
from dyno.worker.spec import UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

UNMEASURED = "unmeasured"
WORST_FIRST = (OVER, UNMEASURED, UNDECIDED)
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}  # both Unicode letters µ
BYTE_UNITS = {
    "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3,
}  # fmt: skip
ENERGY_UNITS = {"J": 1.0, "mJ": 1e-3, "uJ": 1e-6, "µJ": 1e-6, "μJ": 1e-6}
QUANTITY = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-zµμ]+)")


@dataclass(frozen=True)
class LimitedQuantity:
    """A quantity that can be limited: its column in the trial table, and that column's unit in SI units (`scale`).

    `units` are the units of a limit; `percentile` is the share of samples below it, 0 for other quantities.
    """

    column: str
    scale: float
    units: Mapping[str, float]
    example: str
    percentile: float = 0.0

    def format_value(self, value: float) -> str:
        """Format a value in SI units."""
        if self.units is ENERGY_UNITS:
            return f"{format_number(value)} J" if value >= 0.1 else f"{format_number(1e3 * value)} mJ"
        return show(value, "duration" if self.units is TIME_UNITS else "bytes")


QUANTITIES = {
    "p50": LimitedQuantity("latency_ms", 1e-3, TIME_UNITS, "5ms"),
    **{f"p{n}": LimitedQuantity(f"latency_model_ms_p{n}", 1e-3, TIME_UNITS, "5ms", n / 100) for n in (90, 95, 99)},
    "size": LimitedQuantity("size_mb", 1e6, BYTE_UNITS, "20MB"),
    "memory": LimitedQuantity("memory_mb", 1e6, BYTE_UNITS, "500MB"),
    "gpu_memory": LimitedQuantity("gpu_memory_mb", 1e6, BYTE_UNITS, "2GB"),
    "energy": LimitedQuantity("energy_j", 1.0, ENERGY_UNITS, "50mJ"),
    "load": LimitedQuantity("load_s", 1.0, TIME_UNITS, "2s"),
}
LATENCIES = tuple(name for name in QUANTITIES if name.startswith("p"))  # percentiles of the boundary `model`


@dataclass(frozen=True)
class Limit:
    """Maximum of a quantity, in SI units and as written by the user."""

    name: str
    maximum: float
    text: str

    @property
    def quantity(self) -> LimitedQuantity:
        """The limited quantity."""
        return QUANTITIES[self.name]

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


def make_limits(texts: Mapping[str, str]) -> tuple[Limit, ...]:
    """Build limits from a study's table: `{"p99": "5ms"}`; `UserError` for an unknown name, number or unit."""
    return tuple(_make_limit(name, str(text).strip()) for name, text in texts.items())


def _make_limit(name: str, text: str) -> Limit:
    check_known("limit", name, QUANTITIES)
    quantity = QUANTITIES[name]
    match = QUANTITY.fullmatch(text)
    units = ", ".join(unit for unit in quantity.units if unit.isascii())
    if match is None or match[2] not in quantity.units:
        raise UserError(
            f"limit {name}={text} is not a number with a unit ({units}); write e.g. {name}={quantity.example}"
        )
    maximum = float(match[1]) * quantity.units[match[2]]
    if not 0 < maximum < math.inf:
        raise UserError(f"limit {name}={text} must be more than 0, e.g. {name}={quantity.example}")
    return Limit(name, maximum, match[1] + match[2])


def check_settings(texts: Mapping[str, str], boundaries: Sequence[str], has_energy: bool) -> None:
    """Raise `UserError` for an invalid limit of a study, and for a limit on an unmeasured quantity."""
    for limit in make_limits(texts):
        if limit.name == "energy" and not has_energy:
            raise UserError(f"the limit {limit} needs the energy measured; add --energy")
        if limit.name in LATENCIES and "model" not in boundaries:
            raise UserError(f"the limit {limit} is on latency/model; add model to --boundaries")


@dataclass(frozen=True)
class LimitCheck:
    """State of a row against a limit: WITHIN, OVER, UNDECIDED or UNMEASURED, and the value with its interval, SI units.

    `samples`, if too few for the percentile, is the fewest of a round. `reason` says why there is no value.
    """

    limit: Limit
    state: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    samples: int = 0
    reason: str = ""

    @property
    def share(self) -> float:
        """Value divided by the limit."""
        return self.value / self.limit.maximum

    @property
    def text(self) -> str:
        """Comparison of value and limit: `p99 5.6 ms [5.4, 5.8], 12 % over`."""
        name, quantity = self.limit.name, self.limit.quantity
        if self.state == UNMEASURED:
            return f"{name} was not measured" + (f" ({self.reason})" if self.reason else "")
        value = f"{name} {quantity.format_value(self.value)}"
        if self.samples:
            return f"{value} from {self.samples} samples a round, of {samples_for(quantity.percentile)} needed"
        if not math.isnan(self.high - self.low):  # the upper end matters, however wide it is
            value += f" [{quantity.format_value(self.low)}, {quantity.format_value(self.high)}]"
        if self.state == UNDECIDED:
            return f"{value}, not decided against {self.limit.text}"
        if self.share >= 2:
            return f"{value}, {format_number(self.share)} times the limit"
        excess = abs(100 * (self.share - 1))
        excess_text = f"{excess:.0f} %" if excess >= 1 else "less than 1 %"
        return f"{value}, {excess_text} {'over' if self.state == OVER else 'below'}"


def check_limits(row: Mapping[str, Any], limits: Sequence[Limit]) -> list[LimitCheck]:
    """Check a row of the trial table against each limit."""
    return [_check_limit(row, limit) for limit in limits]


def _check_limit(row: Mapping[str, Any], limit: Limit) -> LimitCheck:
    quantity = limit.quantity
    value, low, high = (_read_number(row, quantity.column + end) * quantity.scale for end in ("", "_low", "_high"))
    if limit.name in LATENCIES and row.get("boundary") != "model":
        value = math.nan
    if math.isnan(value):
        reasons = {"energy": str(row.get("energy_missing") or ""), "size": "the engine reads no file"}
        return LimitCheck(limit, UNMEASURED, reason=reasons.get(limit.name, "").removeprefix("not measured: "))
    samples = _read_number(row, "samples_model") if quantity.percentile else math.inf
    if quantity.percentile and samples < samples_for(quantity.percentile) and not low > limit.maximum:
        return LimitCheck(limit, UNDECIDED, value, low, high, int(samples))
    lower, upper = (value if math.isnan(end) else end for end in (low, high))
    state = WITHIN if max(value, upper) <= limit.maximum else OVER if min(value, lower) > limit.maximum else UNDECIDED
    return LimitCheck(limit, state, value, low, high)


def _read_number(row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    return math.nan if is_missing(value) else float(value)  # type: ignore[arg-type]


def check_frame(frame: pd.DataFrame, limits: Sequence[Limit]) -> None:
    """Raise `UserError` for a limit on a quantity that no trial of a stored run has."""
    good_rows = [row for row in frame.to_dict("records") if row["status"] == "ok"]
    for limit in limits:
        checks = [_check_limit(row, limit) for row in good_rows]
        if checks and all(check.state == UNMEASURED for check in checks):
            raise UserError(f"no trial can be judged by the limit {limit}: {checks[0].text}")


def name_outcome(checks: Sequence[LimitCheck]) -> str:
    """Return a row's outcome: `within`, else the worst state with its limits' names; "" without limits."""
    for state in WORST_FIRST:
        if names := [check.limit.name for check in checks if check.state == state]:
            return f"{state} {', '.join(names)}"
    return WITHIN if checks else ""


def describe_misses(row: Mapping[str, Any], limits: Sequence[Limit], states: Sequence[str] = WORST_FIRST) -> str:
    """Describe the limits that a row isn't proven to keep, restricted to `states`; "" without any."""
    return "; ".join(check.text for check in check_limits(row, limits) if check.state in states)


def find_closest(rows: pd.DataFrame, limits: Sequence[Limit]) -> pd.Series | None:
    """Return the row closest to keeping all limits: the smallest worst excess; None without rows.

    Rows with unmeasured limited quantities come last.
    """
    if rows.empty:
        return None

    def rate_row(position: int) -> tuple[int, float, float]:
        row = rows.iloc[position].to_dict()
        checks = check_limits(row, limits)
        shares = [check.share for check in checks if check.state in (OVER, UNDECIDED)]
        return sum(check.state == UNMEASURED for check in checks), max(shares, default=0.0), row["latency_ms"]

    return rows.iloc[min(range(len(rows)), key=rate_row)]
