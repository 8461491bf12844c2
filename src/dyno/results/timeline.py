"""GPU telemetry of a round: telemetry.npz restricted to the timed windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dyno.results.files import read_numbers

# NVML's reasons for a lower clock (nvmlClocksEventReasons) by their bit.
CLOCK_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit (driver)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake",
    0x100: "display clock",
}
# Throttling by heat or lack of power; a power cap is normal under load.
THROTTLING_BITS = 0x8 | 0x20 | 0x40 | 0x80
POWER_CAP = CLOCK_REASONS[0x4]
IDLE_BIT = 0x1  # GPU idle between two samples
TELEMETRY_ARRAYS = ("at", "epoch", "gpu_before_memory", "gpu_before_processes", "gpu_memory", "gpu_util",
                    "gpu_clock", "gpu_power", "gpu_temperature", "gpu_throttle", "gpu_processes",
                    "gpu_own")  # fmt: skip
MIN_SAMPLES = 3  # samples needed for a median
LEADING_SAMPLES = 3  # samples before the job allocates; NVML's utilisation averages over the past
MIN_GROWTH_B = 32e6  # memory growth that reveals the job's own allocation
BUSY_PERCENT = 5.0  # utilisation by others, %

Window = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """Columns of telemetry.npz, float64 [samples]; `times` in seconds of CLOCK_MONOTONIC, like a record's windows.

    The job began at `epoch`.
    """

    times: np.ndarray
    columns: Mapping[str, np.ndarray]
    epoch: float
    before_memory: float
    before_processes: float

    def read_column(self, name: str) -> np.ndarray:
        """Return one column; NaN for each sample if it was not stored."""
        values = self.columns.get(f"gpu_{name}")
        return np.full(len(self.times), math.nan) if values is None else values

    @cached_property
    def reasons(self) -> np.ndarray:
        """Bit mask of each sample, int64; 0 if NVML reported nothing."""
        return np.asarray(np.nan_to_num(self.read_column("throttle")), np.int64)

    @cached_property
    def throttled(self) -> list[Window]:
        """Intervals of throttling (THROTTLING_BITS), from the last sample before to the first after."""
        is_throttled = (self.reasons & THROTTLING_BITS) != 0
        if not is_throttled.any():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_throttled, [False]]).astype(np.int8)))
        ends = np.concatenate([[-math.inf], self.times, [math.inf]])
        return [(float(ends[first]), float(ends[last + 1])) for first, last in edges.reshape(-1, 2)]

    def mark_inside(self, windows: Iterable[Window]) -> np.ndarray:
        """Return which samples lie inside one of the windows, bool [samples]."""
        is_inside = np.zeros(len(self.times), bool)
        for begin, end in windows:
            is_inside |= (self.times >= begin) & (self.times <= end)
        return is_inside


@dataclass(frozen=True)
class TelemetrySummary:
    """Telemetry of one round, or of a trial's rounds together; NaN if unknown.

    `memory` (B) is the peak less the use before the job; `temperature` (degrees C) the highest. Over the timed windows
    are `utilisation` (%), `clock` and `clock_min` (median and lowest SM clock, MHz), `power` (W) and the share of time
    for each throttle reason. `other_processes` is the most processes of others seen there, `busy_before` the
    utilisation (%) by others before the job was on the GPU, `memory_before` (B) the use then.
    """

    memory: float = math.nan
    utilisation: float = math.nan
    clock: float = math.nan
    clock_min: float = math.nan
    power: float = math.nan
    temperature: float = math.nan
    reasons: dict[str, float] = field(default_factory=dict)
    other_processes: int = 0
    busy_before: float = math.nan
    memory_before: float = math.nan

    @property
    def throttle(self) -> str:
        """Throttle reasons as text, with their shares of time: `power cap 34 %`."""
        ordered = sorted(self.reasons.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in ordered)


def read_timeline(folder: Path) -> Trace | None:
    """Read the GPU columns of FOLDER/telemetry.npz; None without them."""
    try:
        arrays = read_numbers(folder / "telemetry.npz", TELEMETRY_ARRAYS)
    except (OSError, ValueError):  # absent, truncated, or not an npz
        return None
    if "gpu_memory" not in arrays or "epoch" not in arrays:
        return None
    columns = {name: a for name, a in arrays.items() if name.startswith("gpu_") and a.ndim}
    memory, processes = (float(arrays.get(f"gpu_before_{name}", math.nan)) for name in ("memory", "processes"))
    epoch = float(arrays["epoch"])
    return Trace(arrays["at"] + epoch, columns, epoch, memory, processes)


def summarise_timeline(trace: Trace, windows: Sequence[Window]) -> TelemetrySummary:
    """Summarise a round; without windows only memory and temperature are known."""
    is_inside = trace.mark_inside(windows)
    mask = trace.reasons[is_inside & ~np.isnan(trace.read_column("throttle"))]
    shares = {reason: float(((mask & bit) != 0).mean()) for bit, reason in CLOCK_REASONS.items() if len(mask)}
    return TelemetrySummary(
        memory=_reduce_finite(np.max, trace.read_column("memory") - trace.before_memory),
        utilisation=_reduce_finite(np.mean, trace.read_column("util")[is_inside]),
        clock=_reduce_finite(np.median, trace.read_column("clock")[is_inside]),
        clock_min=_reduce_finite(np.min, trace.read_column("clock")[is_inside]),
        power=_reduce_finite(np.mean, trace.read_column("power")[is_inside]),
        temperature=_reduce_finite(np.max, trace.read_column("temperature")),
        reasons={reason: share for reason, share in shares.items() if share and reason != CLOCK_REASONS[IDLE_BIT]},
        other_processes=most_others(trace, is_inside),
        busy_before=_busy_before(trace),
        memory_before=trace.before_memory,
    )


def join_timelines(rounds: Sequence[TelemetrySummary]) -> TelemetrySummary | None:
    """Merge summaries of a trial's rounds; None without any.

    Extremes stay extremes, the clock is the median, the rest are means.
    """
    if not rounds:
        return None

    def reduce_rounds(statistic: Any, name: str) -> float:
        return _reduce_finite(statistic, np.asarray([getattr(r, name) for r in rounds], np.float64))

    timed_rounds = [r for r in rounds if not math.isnan(r.utilisation)] or list(rounds)
    names = dict.fromkeys(name for r in timed_rounds for name in r.reasons)
    return TelemetrySummary(
        memory=reduce_rounds(np.max, "memory"),
        utilisation=reduce_rounds(np.mean, "utilisation"),
        clock=reduce_rounds(np.median, "clock"),
        clock_min=reduce_rounds(np.min, "clock_min"),
        power=reduce_rounds(np.mean, "power"),
        temperature=reduce_rounds(np.max, "temperature"),
        reasons={name: sum(r.reasons.get(name, 0.0) for r in timed_rounds) / len(timed_rounds) for name in names},
        other_processes=max(r.other_processes for r in rounds),
        busy_before=reduce_rounds(np.max, "busy_before"),
        memory_before=reduce_rounds(np.max, "memory_before"),
    )


def _reduce_finite(statistic: Any, values: np.ndarray) -> float:
    finite_values = values[~np.isnan(values)]
    return float(statistic(finite_values)) if len(finite_values) else math.nan


def most_others(trace: Trace, samples: np.ndarray | slice = slice(None)) -> int:
    """Return the largest number of other users' compute processes on the GPU in those samples."""
    return int(np.nan_to_num(_count_others(trace)[samples]).max(initial=0))


def _count_others(trace: Trace) -> np.ndarray:
    """Return the number of compute processes on the GPU other than the job's, at each sample.

    In a container, NVML's process ids may be of another namespace, so that the job can't be told from others. Then one
    process counts as the job as soon as there are more than before it began.
    """
    processes, own_processes = trace.read_column("processes"), trace.read_column("own")
    if np.nan_to_num(own_processes).max(initial=0) > 0:
        return np.asarray(processes - own_processes)
    processes_before = np.minimum(np.nan_to_num(trace.before_processes), processes)
    return np.asarray(np.maximum(processes_before, processes - 1))


def _busy_before(trace: Trace) -> float:
    """Return the utilisation (%) by others before the job took memory; NaN if it took memory at once."""
    has_grown = trace.read_column("memory") > trace.before_memory + MIN_GROWTH_B
    count = int(np.argmax(has_grown)) if has_grown.any() else 0
    return _reduce_finite(np.min, trace.read_column("util")[:count]) if count >= LEADING_SAMPLES else math.nan


def throttle_reasons(trace: Trace, window: Window) -> str:
    """Return the throttle reasons inside or next to the window, as text."""
    windows = [s for s in trace.throttled if s[0] < window[1] and s[1] > window[0]]
    bits = int(np.bitwise_or.reduce(trace.reasons[trace.mark_inside(windows)]))
    return ", ".join(reason for bit, reason in CLOCK_REASONS.items() if bit & THROTTLING_BITS & bits)


def clean_blocks(
    samples: np.ndarray, block_index: np.ndarray, blocks: Sequence[Sequence[float]], intervals: Sequence[Window]
) -> np.ndarray:
    """Apply `find_clean` to samples in blocks, given each sample's block index and each block's window."""
    is_clean = np.ones(len(samples), bool)
    for index, (begin, end) in enumerate(blocks):
        is_block = block_index == index
        is_clean[is_block] = find_clean(samples[is_block], (begin, end), intervals)
    return is_clean


def find_clean(samples: np.ndarray, window: Window, intervals: Sequence[Window]) -> np.ndarray:
    """Return which samples lie wholly outside the intervals, bool [n].

    Samples are consecutive durations in seconds. Loop overhead between them makes their sum a little shorter than the
    window, so their ends are spread over the window in proportion.
    """
    total = float(samples.sum())
    if not intervals or not total:
        return np.ones(len(samples), bool)
    begin, end = window
    ends = begin + np.cumsum(samples) * ((end - begin) / total)
    starts = np.concatenate([[begin], ends[:-1]])
    is_clean = np.ones(len(samples), bool)
    for first, last in intervals:
        is_clean &= (ends <= first) | (starts >= last)
    return is_clean
