"""Arithmetic: operations per image, TFLOPS achieved, and their share of the peak that was measured on the device (R36).

A share is of the peak in the type that most of the trial's layers really ran in, not in the requested one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dyno.analysis.metrics.precision import truth
from dyno.analysis.records import timeline
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.records.rounds import Round


@dataclass(frozen=True)
class Peak:
    """The best matrix product seen in one type: operations/s, the side of its square matrices, and on a GPU the SM
    clock meanwhile in MHz (NaN elsewhere)."""

    type: str
    flops_per_s: float
    side: int
    clock: float


def peaks(results: Results) -> dict[str, Peak]:
    """Return the run's measured peaks by type; empty where none were requested or could be measured."""
    if results.peak is None:
        return {}
    stored = Round(results.folder / "peak", 0, results.peak, _find_device(results))
    by_type = {}
    for name, one in stored.facts.peak.items():
        if one.flops_per_s is not None:
            clock = math.nan
            if stored.trace is not None:
                clock = timeline.summary(stored.trace, [one.window]).clock
            by_type[name] = Peak(name, one.flops_per_s, one.side, clock)
    return by_type


def missing(results: Results) -> str:
    """Return the reason why the peak is unknown, in one sentence; "" where it is known."""
    if results.peak is None:
        return "No peak was measured; the same command with --peak measures it."
    if results.peak.status != "ok":
        return f"No peak was measured: {results.peak.reason or 'no reason recorded'}."
    return ""


def ran_in(t: TrialResult) -> str:
    """Return the type that most layers ran in, "" where the engine doesn't report it."""
    precision_truth = truth(t)
    return next(iter(precision_truth.types), "") if precision_truth else ""


def columns(t: TrialResult, row: dict[str, Any], results: Results, measured: dict[str, Peak]) -> dict[str, float]:
    """Return `gflops` per image, `tflops` at the median of latency/model, `peak_tflops` and `peak_share` (0 to 1)."""
    flops = results.models.get((t.given, t.size), {}).get("flops")
    if not flops:
        return {}
    values = {"gflops": flops / 1e9}
    latency = row.get("latency_model_ms_median")
    if latency:
        values["tflops"] = flops * t.batch / (1e-3 * latency) / 1e12
        if peak := measured.get(ran_in(t)):
            values |= {"peak_tflops": peak.flops_per_s / 1e12, "peak_share": 1e12 * values["tflops"] / peak.flops_per_s}
    return values


def _find_device(results: Results) -> str:
    return next((t.device for t in results.trials), "cpu")
