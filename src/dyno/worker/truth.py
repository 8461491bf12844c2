"""Precision truth: did the engine compute in the type it was asked for?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

TYPES = {
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "float8",
}
FLOATS = {*TYPES.values(), "float64"} - {"int8"}
# A lower precision keeps sensitive layers higher on purpose; IEEE FP32 has no such excuse.
LEAST_SHARE = {"fp32": 1.0, "tf32": 1.0}
LEAST_SHARE_LOWERED = 0.5
UNTOLD = "unknown"  # in place of a type: a part that the engine doesn't open
# Below this share of the layers, or of the time, a cause is too small to be worth a sentence.
NOTEWORTHY = 0.1


def precision_truth(asked: str, layers_by_type: Mapping[str, int], engine: str) -> dict[str, Any]:
    """What `facts["precision_truth"]` holds: asked, share of compute layers by type, ok, refuted, and one sentence.

    `ok` needs every compute layer for fp32 and at least half of them for a lowered precision; `refuted` says that they
    ran in something else. Parts that the engine does not open (`UNTOLD`) count for neither; an engine that tells the
    types of half its compute layers or fewer is not ok either: what isn't known isn't true.
    """
    total, wanted = sum(layers_by_type.values()), TYPES[asked]
    share = {kind: count / total for kind, count in sorted(layers_by_type.items())} if total else {}
    told = total - layers_by_type.get(UNTOLD, 0)
    held = layers_by_type.get(wanted, 0) >= LEAST_SHARE.get(asked, LEAST_SHARE_LOWERED) * told
    ok = held and 2 * told > total
    sentence = _sentence(asked, wanted, layers_by_type, engine)
    if held and not ok:
        sentence += f", so {asked} is not confirmed"
    return {"asked": asked, "share": share, "ok": ok, "refuted": not held, "sentence": sentence}


def has_precision(kind: str, asked: str) -> bool:
    """Whether a layer of this type says something of a graph's precision when nothing in it multiplies matrices.

    Indices, shapes, sequences and truth values (bytes to an engine) are what they are in every precision.
    """
    return kind in FLOATS or kind == TYPES[asked]


def _sentence(asked: str, wanted: str, layers: Mapping[str, int], engine: str) -> str:
    untold = layers.get(UNTOLD, 0)
    total = sum(layers.values()) - untold
    if not total:
        return f"{engine} says nothing of the types its layers ran in"
    others = "".join(f", {n} in {kind}" for kind, n in sorted(layers.items()) if kind not in (wanted, UNTOLD))
    ran = f"asked for {asked}: {engine} ran {layers.get(wanted, 0)} of {total} compute layers in {wanted}{others}"
    return f"{ran}; parts of the graph that it doesn't open: {untold}" if untold else ran


def why_not_faster(
    asked: str, compute: Iterable[tuple[str, str]], time_by_operator: Mapping[str, float], converters: Iterable[str]
) -> list[str]:
    """Sentences about what keeps a lowered precision from being faster, from operator and type of the compute layers.

    `converters` are the operators that only change types or layouts; shares of time are from 0 to 1.
    """
    if asked == "fp32":
        return []
    found, layers = [], list(compute)
    wide = Counter(operator for operator, kind in layers if kind == "float32")
    if TYPES[asked] != "float32" and wide.total() > NOTEWORTHY * len(layers):
        which = ", ".join(f"{count} {operator}" for operator, count in wide.items())
        found.append(f"{wide.total()} of {len(layers)} compute layers stayed in float32 ({which})")
    spent = {operator: time_by_operator[operator] for operator in converters if time_by_operator.get(operator, 0) > 0}
    if sum(spent.values()) > NOTEWORTHY:
        found.append(f"{sum(spent.values()):.0%} of the time goes into changing types and layouts ({', '.join(spent)})")
    return found
