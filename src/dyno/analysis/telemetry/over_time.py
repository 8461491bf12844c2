"""What a round's job did to the machine over time: telemetry.npz as series of quantities on one time axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dyno.analysis.records.arrays import read_numbers
from dyno.analysis.records.rounds import Round
from dyno.analysis.records.timeline import Window

STEPS = 2.0  # times the usual time between two looks: a longer one is a pause, in which others were measured


@dataclass(frozen=True)
class Quantity:
    """What is drawn and written of one column: its name, its unit, and the column's values in that unit."""

    name: str
    unit: str
    column: str
    scale: float = 1.0

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}"


MEMORY_OF_GPU = Quantity("GPU memory", "GB", "gpu_memory", 1e-9)
ON_GPU = (MEMORY_OF_GPU, Quantity("SM utilisation", "%", "gpu_util"), Quantity("GPU power", "W", "gpu_power"),
          Quantity("SM clock", "MHz", "gpu_clock"))  # fmt: skip
ON_CPU = (Quantity("memory", "GB", "rss", 1e-9), Quantity("busy processors", "", "cpu"),
          Quantity("CPU power", "W", "cpu_power"), Quantity("CPU clock", "MHz", "frequency"))  # fmt: skip


@dataclass(frozen=True)
class Series:
    """A job over time: `seconds` since it began, without the pauses in which others were measured, float64 [looks];
    `values` by quantity, of the same shape, NaN where nothing is known; `timed` windows by boundary on that axis."""

    seconds: np.ndarray
    values: Mapping[Quantity, np.ndarray]
    timed: Mapping[str, Window]
    paused: bool


def read(r: Round) -> Series | None:
    """Read the round's series, of the device that it ran on; None where nothing was stored.

    The GPU's memory is that above the amount used before the job began.
    """
    try:
        stored = read_numbers(r.folder / "telemetry.npz")
    except (OSError, ValueError):  # absent, truncated, or not an npz
        return None
    at = stored.get("at", np.empty(0))
    if len(at) < 2 or "epoch" not in stored:
        return None
    columns = {name: values for name, values in stored.items() if values.shape == at.shape}
    if "gpu_memory" in columns:
        columns["gpu_memory"] = columns["gpu_memory"] - stored.get("gpu_before_memory", 0.0)
    if "cpu_energy" in columns:
        columns["cpu_power"] = _compute_rate(at, columns["cpu_energy"])
    steps = np.diff(at, prepend=0.0)
    longest = STEPS * float(np.median(steps))
    seconds = np.cumsum(np.minimum(steps, longest))
    wanted = ON_GPU if r.device.startswith("cuda") else ON_CPU
    values = {each: each.scale * columns[each.column] for each in wanted if each.column in columns}
    known = {each: found for each, found in values.items() if not np.isnan(found).all()}
    ends = [(boundary, np.subtract(window, float(stored["epoch"]))) for boundary, window in r.facts.timed.items()]
    timed = {boundary: tuple(np.interp(window, at, seconds).tolist()) for boundary, window in ends}
    return Series(seconds, known, timed, bool((steps[1:] > longest).any())) if known else None


def _compute_rate(at: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.concatenate([[np.nan], np.diff(total) / np.diff(at)])


def quantities(series: Iterable[Series]) -> list[Quantity]:
    """Return the quantities that at least one of the series has, in order."""
    had = {each for one in series for each in one.values}
    return [each for each in (*ON_GPU, *ON_CPU) if each in had]
