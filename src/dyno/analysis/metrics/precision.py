"""Precision truth: the types that layers really ran in, beside the requested precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dyno.analysis.records.results import TrialResult
from dyno.worker.facts.engine import STORED, TYPES, precision_truth

# Engines' names of types, under the precision that they stand for.
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
YES, NO, UNCONFIRMED = "yes", "no", "unconfirmed"  # of whether an engine ran in the requested type
NAMES = {alias: precision for precision, aliases in ALIASES.items() for alias in aliases}


@dataclass(frozen=True)
class Truth:
    """Compute layers by the precision they ran in, most first, and the share that ran as requested.

    `ok`, `refuted` and `sentence` are the judgement of `worker.facts.precision`.
    """

    share: float
    types: dict[str, int]
    ok: bool
    refuted: bool
    sentence: str

    @property
    def reported(self) -> bool:
        """Whether the engine reported its layers' types."""
        return bool(self.types)

    @property
    def answer(self) -> str:
        """Whether it ran in the requested type, in a word."""
        return YES if self.ok else NO if self.refuted else UNCONFIRMED

    def __str__(self) -> str:
        return ", ".join(f"{n} {name}" for name, n in self.types.items())


def truth(t: TrialResult) -> Truth | None:
    """Return the stored facts about the types that compute layers ran in, None when there are none."""
    counts: dict[str, int] = {}
    for name, number in t.facts.layers_by_type.items():
        precision = NAMES.get(str(name).lower(), str(name))
        # TF32 is how FP32 data is multiplied, so an engine that lists data types has float32 for both.
        precision = "tf32" if precision == "fp32" and t.precision == "tf32" else precision
        counts[precision] = counts.get(precision, 0) + int(number)
    total = sum(counts.values())
    if not total and t.facts.precision_truth is None:
        return None
    share = counts.get(t.precision, 0) / total if total else 0.0
    types = dict(sorted(counts.items(), key=lambda item: -item[1]))
    judged = t.facts.precision_truth
    if judged is None:  # a plug-in's engine, which only counted its layers
        by_type = {TYPES.get(name, name): number for name, number in counts.items()}
        judged = precision_truth(t.precision, by_type, t.backend)
    return Truth(share, types, judged.ok, judged.refuted, judged.sentence)


def named(row: Mapping[str, Any]) -> str:
    """Return a row's precision, with the truth beside it where the engine did something else or reported nothing."""
    precision, types, share = str(row["precision"]), str(row["ran_as"]), row["asked_share"]
    if row["precision_ok"] == YES:
        return f"{precision} (computed in {types.split()[1].strip(',')})" if precision in STORED else precision
    if row["precision_ok"] == UNCONFIRMED or not types:
        return f"{precision} ({UNCONFIRMED})"
    return f"{precision} ({share:.0%} {precision})" if share else f"{precision} (ran {types.split()[1].strip(',')})"
