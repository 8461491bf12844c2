"""Precision truth: the types that layers actually ran in, compared with the requested precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.results import timeline
from dyno.results.rounds import Round
from dyno.results.trial_result import Results, TrialResult
from dyno.table import Row, is_missing
from dyno.worker.facts.engine import PRECISION_TYPES, WEIGHT_PRECISIONS, format_share, precision_truth

if TYPE_CHECKING:
    import pandas as pd

# Engines' names of types, by precision.
ALIASES = {
    "fp32": ("float32", "fp32", "f32", "float", "torch.float32"),
    "tf32": ("tf32", "tensorfloat32"),
    "fp16": ("float16", "fp16", "f16", "half", "torch.float16"),
    "bf16": ("bfloat16", "bf16", "torch.bfloat16"),
    "int8": ("int8", "uint8", "i8", "u8", "qint8", "quint8", "torch.int8", "torch.uint8"),
    "fp8": ("fp8", "f8", "float8", "float8e4m3fn", "float8_e4m3fn", "f8e4m3", "f8e5m2"),
    "int4": ("int4", "uint4", "i4", "u4"),
    "fp4": ("fp4", "float4", "nf4"),
    "int2": ("int2", "uint2", "u2"),
}
YES, NO, UNCONFIRMED = "yes", "no", "unconfirmed"  # whether an engine ran in the requested type
PRECISION_OF_ALIAS = {alias: precision for precision, aliases in ALIASES.items() for alias in aliases}


@dataclass(frozen=True)
class Truth:
    """Compute layers by the precision they ran in, most arithmetic first, and the share that ran as requested.

    `work` has each precision's share of the arithmetic, empty if unknown; `share` then counts layers. `ok`, `refuted`
    and `sentence` are the judgement of `engine.precision_truth`.
    """

    share: float
    types: dict[str, int]
    work: dict[str, float]
    ok: bool
    refuted: bool
    sentence: str

    @property
    def reported(self) -> bool:
        """Whether the engine reported its layers' types."""
        return bool(self.types)

    @property
    def answer(self) -> str:
        """Whether it ran in the requested type: YES, NO or UNCONFIRMED."""
        return YES if self.ok else NO if self.refuted else UNCONFIRMED

    @property
    def text(self) -> str:
        """Clause on whether it ran in the requested type, with the share of a mixed engine."""
        if self.answer == UNCONFIRMED:
            return "whether it ran in the requested type is not confirmed"
        is_mixed = 0 < self.share < 1
        text = f" ({format_share(self.share)} of its {'arithmetic' if self.work else 'layers'})" if is_mixed else ""
        clause = "did not run" if self.answer == NO else "ran mostly" if is_mixed else "ran"
        return f"{clause} in the requested type{text}"

    def __str__(self) -> str:
        shares = {name: f" ({format_share(share)})" for name, share in self.work.items()}
        return ", ".join(f"{n} {name}{shares.get(name, '')}" for name, n in self.types.items())


def read_truth(trial: TrialResult) -> Truth | None:
    """Return the stored types of compute layers, with their judgement; None without any."""
    counts, operations = (
        _by_precision(trial, by_type) for by_type in (trial.facts.layers_by_type, trial.facts.operations_by_type)
    )
    if not counts and trial.facts.precision_truth is None:
        return None
    weights = operations or counts
    total = sum(weights.values())
    types = dict(sorted(counts.items(), key=lambda item: -weights.get(item[0], 0)))
    work = {name: count / total for name, count in operations.items()}
    judgement = trial.facts.precision_truth
    if judgement is None:  # a plug-in's engine that only counted its layers
        layers, work_done = ({PRECISION_TYPES.get(k, k): n for k, n in each.items()} for each in (counts, operations))
        judgement = precision_truth(trial.precision, layers, trial.backend, work_done)
    share = weights.get(trial.precision, 0) / total if total else 0.0
    return Truth(share, types, work, judgement.ok, judgement.refuted, judgement.sentence)


def _by_precision(trial: TrialResult, by_type: Mapping[str, int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, count in by_type.items():
        precision = PRECISION_OF_ALIAS.get(str(name).lower(), str(name))
        # TF32 multiplies FP32 data, so an engine that lists data types reports float32 for both.
        precision = "tf32" if precision == "fp32" and trial.precision == "tf32" else precision
        counts[precision] = counts.get(precision, 0) + int(count)
    return counts


def name_precision(row: Row | pd.Series) -> str:
    """Return a row's precision, with the actual types if the engine deviated or reported nothing."""
    precision, types = str(row["precision"]), str(row["ran_as"])
    share = 0.0 if is_missing(row["asked_share"]) else row["asked_share"]
    if row["precision_ok"] == YES:
        is_widened = precision in WEIGHT_PRECISIONS and not share
        return f"{precision} (computed in {types.split()[1].strip(',')})" if is_widened else precision
    if row["precision_ok"] == UNCONFIRMED or not types:
        return f"{precision} ({UNCONFIRMED})"
    clause = f"{format_share(share)} {precision}" if share else f"ran {types.split()[1].strip(',')}"
    return f"{precision} ({clause})"


# Arithmetic: operations per image, achieved TFLOPS, and the share of the device's measured peak (R36). The peak is that
# of the type most of the trial's arithmetic actually ran in, not of the requested type.


@dataclass(frozen=True)
class Peak:
    """The best matrix product in one type: operations/s, the side of its square matrices, and the SM clock.

    `clock` in MHz, measured meanwhile on a GPU, else NaN.
    """

    type: str
    flops_per_s: float
    side: int
    clock: float


def find_peaks(results: Results) -> dict[str, Peak]:
    """Return the run's measured peaks by type; empty if not requested or not measurable."""
    if results.peak is None:
        return {}
    device = next((t.device for t in results.trials), "cpu")
    peak_round = Round(results.folder / "peak", 0, results.peak, device)
    by_type = {}
    for name, peak in peak_round.facts.peak.items():
        if peak.flops_per_s is not None:
            clock = math.nan
            if peak_round.trace is not None:
                clock = timeline.summarise_timeline(peak_round.trace, [peak.window]).clock
            by_type[name] = Peak(name, peak.flops_per_s, peak.side, clock)
    return by_type


def explain_missing_work(results: Results) -> str:
    """Return the reason why the peak is unknown, in one sentence; "" if it is known."""
    if results.peak is None:
        return "No peak was measured; the same command with --peak measures it."
    if results.peak.status != "ok":
        return f"No peak was measured: {results.peak.reason or 'no reason recorded'}."
    return ""


def ran_in(trial: TrialResult) -> str:
    """Return the type of most of the arithmetic, "" if the engine doesn't report it."""
    precision_truth = read_truth(trial)
    return next(iter(precision_truth.types), "") if precision_truth else ""


def list_work(trial: TrialResult, row: dict[str, Any], results: Results, peaks: dict[str, Peak]) -> dict[str, float]:
    """Return `gflops` per image, `tflops` at the median of latency/model, `peak_tflops` and `peak_share` (0 to 1)."""
    flops = results.model_facts(trial).flops
    if not flops:
        return {}
    values = {"gflops": flops / 1e9}
    latency = row.get("latency_model_ms_median")
    if latency:
        values["tflops"] = flops * trial.batch / (1e-3 * latency) / 1e12
        if peak := peaks.get(ran_in(trial)):
            values |= {"peak_tflops": peak.flops_per_s / 1e12, "peak_share": 1e12 * values["tflops"] / peak.flops_per_s}
    return values
