"""Energy per image: an energy counter's rate under load, less its idle rate, over images/s.

NVML's counter covers the whole card, RAPL's the processors' packages; the rest of the machine is not covered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dyno.results import stats, timeline
from dyno.results.files import read_numbers
from dyno.results.rounds import Round
from dyno.results.timeline import Window
from dyno.results.trial_result import TrialResult, by_build

IDLE_DIR = "idle"  # subfolder of a run: telemetry before the first job
ENERGY_COLUMNS = {"cuda": "gpu_energy", "cpu": "cpu_energy"}  # by kind of device
MIN_READINGS, MIN_SPAN_S = 5, 1.0  # fewest counter readings for a rate, and their shortest span
MAX_OTHER_CORES = 0.2  # processors that other programs may use on an idle machine
NOT_ASKED = "not measured: --energy measures it"
NO_COUNTER = {
    "cuda": "NVML reports no energy for this GPU",
    "cpu": "the processors' counter (RAPL) can't be read; often only root may, and most virtual machines have none",
}
NO_IDLE = "the machine's power while idle is not known"
NOT_IDLE = "the machine was not idle before the first job"
OTHERS_BUSY = "other programs were busy meanwhile"
NO_MORE = "no more power than while idle"


@dataclass(frozen=True)
class Idle:
    """Power of the device before the first job: `watts` (NaN: unknown), and whether it was `disturbed`."""

    watts: float = math.nan
    disturbed: bool = False


@dataclass(frozen=True)
class Energy:
    """Energy of a trial: joules per image, `net` and `gross` (without and with idle power), mean W, idle W, images/s.

    `missing_reason` is the reason if there is no figure.
    """

    net: stats.Interval
    gross: float = math.nan
    watts: float = math.nan
    idle: float = math.nan
    rate: float = math.nan
    rounds: int = 0
    missing_reason: str = ""


@dataclass(frozen=True)
class RoundPower:
    """Mean power (W) and images/s of one round."""

    watts: float
    rate: float


@dataclass(frozen=True)
class Meter:
    """Energy meter of a run's trials; `folder` is the run's."""

    folder: Path

    @cached_property
    def _idle(self) -> dict[str, Idle]:
        counters = _read_counters(self.folder / IDLE_DIR)
        trace = timeline.read_timeline(self.folder / IDLE_DIR)
        other_cores = float(np.nanmean(counters["others"])) if len(counters.get("others", ())) else 0.0
        is_used = trace is not None and float(np.nan_to_num(trace.read_column("util")).mean()) > timeline.BUSY_PERCENT
        is_shared = trace is not None and (is_used or timeline.most_others(trace) > 0)
        disturbed = {"cuda": is_shared, "cpu": other_cores > MAX_OTHER_CORES}
        return {
            kind: Idle(estimate_power(counters, counter), disturbed[kind]) for kind, counter in ENERGY_COLUMNS.items()
        }

    def measure(self, trial: TrialResult) -> Energy:
        """Compute the trial's energy over its good rounds."""
        no_interval = stats.find_center([])
        kind = trial.device.split(":")[0]
        rounds = [r for r in trial.good if r.facts.sustained is not None]
        if kind not in ENERGY_COLUMNS or not rounds:
            return Energy(no_interval, missing_reason=NOT_ASKED)
        idle = self._idle[kind]
        powers = [
            (r, power) for r in rounds if not _is_shared(r, kind) and (power := _of_round(r, ENERGY_COLUMNS[kind]))
        ]
        reasons = {
            NO_COUNTER[kind]: not any(_of_round(r, ENERGY_COLUMNS[kind]) for r in rounds),
            OTHERS_BUSY: not powers, NO_IDLE: math.isnan(idle.watts), NOT_IDLE: idle.disturbed,
            NO_MORE: any(power.watts <= idle.watts for _, power in powers),
        }  # fmt: skip
        missing = next((reason for reason, applies in reasons.items() if applies), "")
        if not powers:
            return Energy(no_interval, missing_reason=missing)
        net = [(r, (power.watts - idle.watts) / power.rate) for r, power in powers]
        return Energy(
            no_interval if missing else stats.find_center(by_build(net)),
            stats.find_center(by_build([(r, power.watts / power.rate) for r, power in powers])).value,
            float(np.mean([power.watts for _, power in powers])),
            idle.watts,
            float(np.mean([power.rate for _, power in powers])),
            len(powers),
            missing,
        )


def _of_round(r: Round, counter: str) -> RoundPower | None:
    assert r.facts.sustained is not None
    watts = estimate_power(_read_counters(r.folder), counter, r.facts.sustained.window)
    return None if math.isnan(watts) else RoundPower(watts, r.facts.sustained.images_per_s)


def _is_shared(r: Round, kind: str) -> bool:
    """Return whether the counter includes other programs' work."""
    sustained, threshold = r.facts.sustained, r.facts.contention_threshold
    assert sustained is not None
    if kind == "cpu":
        return threshold is not None and sustained.others_busy > threshold
    return r.trace is not None and timeline.most_others(r.trace, r.trace.mark_inside([sustained.window])) > 0


def estimate_power(counters: dict[str, np.ndarray], counter: str, window: Window = (-math.inf, math.inf)) -> float:
    """Estimate the mean W in the window (seconds of CLOCK_MONOTONIC): the least-squares slope of the counter over time.

    Counters updated at most ten times a second have an error in each reading, which a difference of two readings would
    have in full. NaN with too few readings.
    """
    times, joules = counters.get("at", np.empty(0)) + counters.get("epoch", 0.0), counters.get(counter)
    if joules is None:
        return math.nan
    is_inside = (times >= window[0]) & (times <= window[1]) & ~np.isnan(joules)
    times, joules = times[is_inside], joules[is_inside]
    if len(times) < MIN_READINGS or times[-1] - times[0] < MIN_SPAN_S:
        return math.nan
    offsets = times - times.mean()
    return float((offsets * (joules - joules.mean())).sum() / (offsets**2).sum())


def _read_counters(folder: Path) -> dict[str, np.ndarray]:
    try:
        return read_numbers(folder / "telemetry.npz", ("at", "epoch", "others", *ENERGY_COLUMNS.values()))
    except (OSError, ValueError):  # absent, truncated, or not an npz
        return {}
