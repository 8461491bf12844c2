"""Precision truth: did the engine compute in the requested type?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dyno.worker.facts.json_values import EARLIER

TYPES = {
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "float8",
    "int4": "int4",
    "int2": "int2",
    "fp4": "float4",
}
FLOATS = {"float64", "float32", "float16", "bfloat16", "float8", "float4"}
COMPUTED = FLOATS | {"int8", "int4", "int2"}  # types of a layer's arithmetic; others are of indices, shapes and masks
QUANTISED = ("int8", "fp8", "int4", "int2", "fp4")
STORED = ("int4", "int2", "fp4")  # types of weights alone: layers compute in a wider one
# Operators of ONNX that multiply, and their fused forms: a network's precision is that of these layers.
COMPUTE = re.compile("Conv(?!ert)|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN|MoE")
# A lower precision keeps sensitive layers higher on purpose; IEEE FP32 has no such excuse.
LEAST_SHARE = {"fp32": 1.0, "tf32": 1.0}
LEAST_SHARE_LOWERED = 0.5
UNKNOWN = "unknown"  # in place of a type: a part of the graph that the engine doesn't describe
# Below this share of the layers, or of the time, a cause is too small to be worth a sentence.
NOTEWORTHY = 0.1


@dataclass(frozen=True)
class PrecisionTruth:
    """What an engine ran as: `share` of its compute layers by type (0 to 1), and one sentence.

    `ok`: they ran in the requested type, as far as the engine reports it; `refuted`: they ran in another.
    """

    requested: str = field(default="", metadata={EARLIER: "asked"})
    share: dict[str, float] = field(default_factory=dict)
    ok: bool = True
    refuted: bool = False
    sentence: str = ""


def precision_truth(requested: str, layers_by_type: Mapping[str, int], engine: str) -> PrecisionTruth:
    """Judge the types that an engine reports for its compute layers: the only judge of precision.

    `ok` needs every compute layer for fp32 and at least half of them for a lowered precision; `refuted` means that they
    ran in another type. Parts that the engine doesn't describe (`UNKNOWN`) count for neither. `ok` also needs an engine
    that reports the types of more than half of its compute layers. Weights of four bits and fewer are the file's own,
    and widened to the type that a layer computes in: that type refutes nothing.
    """
    total, wanted = sum(layers_by_type.values()), TYPES[requested]
    share = {kind: count / total for kind, count in sorted(layers_by_type.items())} if total else {}
    reported = total - layers_by_type.get(UNKNOWN, 0)
    held = layers_by_type.get(wanted, 0) >= LEAST_SHARE.get(requested, LEAST_SHARE_LOWERED) * reported
    held = held or requested in STORED
    ok = held and 2 * reported > total
    sentence = _describe_precision(requested, wanted, layers_by_type, engine)
    if held and not ok:
        sentence += f", so {requested} is not confirmed"
    return PrecisionTruth(requested, share, ok, not held, sentence)


def _describe_precision(requested: str, wanted: str, layers: Mapping[str, int], engine: str) -> str:
    unknown = layers.get(UNKNOWN, 0)
    total = sum(layers.values()) - unknown
    if not total and unknown:
        return f"{engine} doesn't report the types that its layers ran in"
    if not total:
        return f"{engine} shows no layer that multiplies (convolution, matrix product, attention, recurrent layer)"
    kinds = [f"{n} in {kind}" for kind, n in sorted(layers.items()) if kind not in (wanted, UNKNOWN)]
    if requested in STORED and not layers.get(wanted):
        ran = f"weights in {requested}: {engine} ran {total} compute layers, {', '.join(kinds)}"
    else:
        others = "".join(f", {kind}" for kind in kinds)
        counts = f"{layers.get(wanted, 0)} of {total} compute layers in {wanted}"
        ran = f"asked for {requested}: {engine} ran {counts}{others}"
    return f"{ran}; parts of the graph that it doesn't open: {unknown}" if unknown else ran


def why_not_faster(
    requested: str, compute: Iterable[tuple[str, str]], time_by_operator: Mapping[str, float], converters: Iterable[str]
) -> list[str]:
    """Return sentences on why a lowered precision isn't faster, from operator and type of the compute layers.

    `converters` are the operators that only change types or layouts; shares of time are from 0 to 1.
    """
    if requested == "fp32" or requested in STORED:
        return []
    reasons, layers = [], list(compute)
    in_float32 = Counter(operator for operator, kind in layers if kind == "float32")
    if TYPES[requested] != "float32" and in_float32.total() > NOTEWORTHY * len(layers):
        operators = ", ".join(f"{count} {operator}" for operator, count in in_float32.items())
        reasons.append(f"{in_float32.total()} of {len(layers)} compute layers stayed in float32 ({operators})")
    overhead = {
        operator: time_by_operator[operator] for operator in converters if time_by_operator.get(operator, 0) > 0
    }
    if sum(overhead.values()) > NOTEWORTHY:
        reasons.append(
            f"{sum(overhead.values()):.0%} of the time goes into changing types and layouts ({', '.join(overhead)})"
        )
    return reasons
