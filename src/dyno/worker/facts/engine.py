"""Facts that an engine reports after timing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dyno.worker.facts.json_values import EARLIER_NAME, Sparse

# Precision truth: whether the engine computed in the requested type

PRECISION_TYPES = {
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
FLOAT_TYPES = {"float64", "float32", "float16", "bfloat16", "float8", "float4"}
ARITHMETIC_TYPES = FLOAT_TYPES | {
    "int8",
    "int4",
    "int2",
}  # types of a layer's arithmetic; others are indices, shapes and masks
QUANTISED_PRECISIONS = ("int8", "fp8", "int4", "int2", "fp4")
WEIGHT_PRECISIONS = ("int4", "int2", "fp4")  # weight-only types: layers compute in a wider type
# Compute operators of ONNX (products, convolutions…) and their fused forms: they decide a network's precision
COMPUTE_LAYER = re.compile("Conv(?!ert)|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN|MoE")
# A lower precision keeps sensitive layers higher on purpose; IEEE FP32 must not have exceptions
MIN_SHARES = {"fp32": 1.0, "tf32": 1.0}
MIN_LOWERED_SHARE = 0.5
MANTISSA_BITS = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}  # bits of precision in products
UNKNOWN_TYPE = "unknown"  # part of the graph without a description
# Minimum share of the layers, or of the time, for a sentence on a cause
MIN_MENTIONED_SHARE = 0.1
OUTSIDE_NOTE = "outside Dyno"  # start of a note on other processes


@dataclass(frozen=True)
class PrecisionTruth:
    """The types that an engine ran in, and one sentence.

    `share` (0 to 1) is of the operations by type, or of the compute layers if operations are unknown. `ok`: it ran in
    the requested type, as far as it reports; `refuted`: it ran in another type.
    """

    requested: str = field(default="", metadata={EARLIER_NAME: "asked"})
    share: dict[str, float] = field(default_factory=dict)
    ok: bool = True
    refuted: bool = False
    sentence: str = ""


def sum_operations(layers: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """Sum the operations of compute layers by type; {} if a layer's are unknown.

    Layers that the engine doesn't describe (`UNKNOWN_TYPE`) are left out.
    """
    totals: dict[str, int] = {}
    for kind, operations in layers:
        if kind == UNKNOWN_TYPE:
            continue
        if not operations:
            return {}
        totals[kind] = totals.get(kind, 0) + operations
    return totals


def precision_truth(
    requested: str,
    layers_by_type: Mapping[str, int],
    engine: str,
    operations_by_type: Mapping[str, int] | None = None,
    bits: int | None = None,
) -> PrecisionTruth:
    """Judge the types that an engine reports for its compute layers: the only judgement of precision.

    A layer's weight is its operations, or 1 if they are unknown. `ok` needs all layers for fp32 and at least half for a
    lowered precision; `refuted` means that they ran in another type. Parts that the engine doesn't describe
    (`UNKNOWN_TYPE`) count for neither. `ok` also needs reported types for more than half of the compute layers. Weights
    of four bits or fewer are the file's own and widened to the layers' type: if no layer is reported in the requested
    type, that type refutes nothing. Products that keep fewer measured `bits` than the requested type refute it.
    """
    counts = operations_by_type or layers_by_type
    total, dtype = sum(counts.values()), PRECISION_TYPES[requested]
    share = {kind: count / total for kind, count in sorted(counts.items())} if total else {}
    threshold = MIN_SHARES.get(requested, MIN_LOWERED_SHARE) * (total - counts.get(UNKNOWN_TYPE, 0))
    is_met = counts.get(dtype, 0) >= threshold or (requested in WEIGHT_PRECISIONS and dtype not in counts)
    is_rounded = bits is not None and bits < MANTISSA_BITS.get(requested, 0)
    ok = is_met and 2 * layers_by_type.get(UNKNOWN_TYPE, 0) < sum(layers_by_type.values())
    weight = format_share(share.get(dtype, 0.0)) if operations_by_type else ""
    sentence = _describe_precision(requested, dtype, layers_by_type, engine, weight)
    if is_met and not ok:
        sentence += f", so {requested} is not confirmed"
    if bits is not None:
        sentence += f"; measured: products keep {bits} bits" + (f" of {MANTISSA_BITS[requested]}" if is_rounded else "")
    return PrecisionTruth(requested, share, ok and not is_rounded, is_rounded or not is_met, sentence)


def format_share(share: float) -> str:
    """Format a share (0 to 1) in whole percent; 100 % and 0 % only if exact."""
    if share in (0, 1):
        return f"{share:.0%}"
    return "<1%" if share < 0.01 else ">99%" if share > 0.99 else f"{share:.0%}"


def _describe_precision(requested: str, dtype: str, layers: Mapping[str, int], engine: str, weight: str) -> str:
    unknown_count = layers.get(UNKNOWN_TYPE, 0)
    total = sum(layers.values()) - unknown_count
    if not total and unknown_count:
        return f"{engine} doesn't report the types that its layers ran in"
    if not total:
        return f"{engine} shows no layer that multiplies (convolution, matrix product, attention, recurrent layer)"
    kinds = [f"{n} in {kind}" for kind, n in sorted(layers.items()) if kind not in (dtype, UNKNOWN_TYPE)]
    if requested in WEIGHT_PRECISIONS and not layers.get(dtype):
        sentence = f"weights in {requested}: {engine} ran {total} compute layers, {', '.join(kinds)}"
    else:
        other_types = "".join(f", {kind}" for kind in kinds)
        counts = f"{layers.get(dtype, 0)} of {total} compute layers in {dtype}"
        sentence = f"asked for {requested}: {engine} ran {counts}{other_types}"
        if kinds and layers.get(dtype):
            sentence += f": {weight} of the arithmetic in {dtype}" if weight else " (each layer counted as one)"
    return f"{sentence}; parts of the graph that it doesn't open: {unknown_count}" if unknown_count else sentence


def why_not_faster(
    requested: str, compute: Iterable[tuple[str, str]], time_by_operator: Mapping[str, float], converters: Iterable[str]
) -> list[str]:
    """Return sentences on why a lowered precision isn't faster, from the compute layers' operators and types.

    `converters` are operators that only change types or layouts; shares of time are from 0 to 1.
    """
    if requested == "fp32" or requested in WEIGHT_PRECISIONS:
        return []
    reasons, layers = [], list(compute)
    float32_counts = Counter(operator for operator, kind in layers if kind == "float32")
    if PRECISION_TYPES[requested] != "float32" and float32_counts.total() > MIN_MENTIONED_SHARE * len(layers):
        operators = ", ".join(f"{count} {operator}" for operator, count in float32_counts.items())
        reasons.append(f"{float32_counts.total()} of {len(layers)} compute layers stayed in float32 ({operators})")
    overhead = {
        operator: time_by_operator[operator] for operator in converters if time_by_operator.get(operator, 0) > 0
    }
    if sum(overhead.values()) > MIN_MENTIONED_SHARE:
        reasons.append(
            f"{sum(overhead.values()):.0%} of the time goes into changing types and layouts ({', '.join(overhead)})"
        )
    return reasons


@dataclass(frozen=True)
class Calibration:
    """INT8's calibration: number of samples, method, and sha256 of the data.

    For described inputs, also the source of each input's values (`inputs`) and a sentence on them (`note`).
    """

    samples: int = 0
    method: str = ""
    data_sha256: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class SlowLayer:
    """One of the slowest layers: its operator, its type, and its share of the layers' time."""

    name: str
    operator: str = ""
    dtype: str = ""
    tactic: str = ""
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Origin(Sparse):
    """The model behind a file or an engine, and the route from it; inherited by every file made from a file.

    `weights_sha256` is of the state dict or a given file; trials with different hashes are not compared. `fixed_batch`
    and `folded` are None if nothing was exported or no shapes were fixed.
    """

    weights_sha256: str = ""
    parameters: int | None = None
    exporter: str = ""
    opset: int | None = None
    fixed_batch: bool | None = None
    folded: bool | None = None
    calibration: Calibration | None = None

    @property
    def onnx_route(self) -> str:
        """Exporter, opset, fixed batch and folding of the ONNX graph; "" without a graph."""
        exporter = f"{self.exporter} opset {self.opset}" if self.exporter else ""
        batch = "fixed batch" if self.fixed_batch else ""
        return ", ".join(filter(None, (exporter, batch, "folded" if self.folded else "")))


ORIGIN_FIELDS = tuple(f.name for f in fields(Origin) if f.name != "other")  # inherited from the source file


@dataclass(frozen=True, kw_only=True)
class Layers(Sparse):
    """The layers of an engine: their number, the number by type, and the number that only change types or layouts.

    `operations_by_type` counts one run's operations; empty if a layer's are unknown or all layers have one type.
    `product_bits` is the number of bits kept by products, measured by `worker.sessions.products` with the engine's
    settings. `operators` counts all layers by kind, `kept_float32` names layers that stayed in float32 in a lower
    precision, and `engine_parameters` is the number of weights in the engine itself.
    """

    layers: int | None = None
    layers_by_type: dict[str, int] = field(default_factory=dict)
    operations_by_type: dict[str, int] = field(default_factory=dict)
    reformats: int | None = None
    operators: dict[str, int] = field(default_factory=dict)
    precision_truth: PrecisionTruth | None = None
    product_bits: int | None = None
    kept_float32: tuple[str, ...] = ()
    engine_parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class Compilation(Sparse):
    """A compilation inside the process: its seconds, whether it only read a cache, and its result.

    `engines` is the number of engines built by Torch-TensorRT, `operators_in_pytorch` the operators left to PyTorch;
    `call_s`, `engine_s` and `call_overhead_s` are the seconds of a call, of the engine in it, and the difference.
    """

    build_s: float | None = None
    build_cached: bool | None = None
    graph_breaks: int | None = None
    graphs: int | None = None
    engines: int | None = None
    operators_in_pytorch: dict[str, int] = field(default_factory=dict)
    call_s: float | None = None
    engine_s: float | None = None
    call_overhead_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFacts(Layers, Origin, Compilation):
    """A session's facts (`Session.facts`), as far as its engine reports them.

    `options` and `threads` are the engine's; `fallback` is a sentence if most nodes left the requested provider;
    `time_by_operator` has shares (0 to 1) of a profile's time; `engine_memory` is in bytes; `allocated` and `reserved`
    are the peak bytes that PyTorch's GPU allocator gave out and held; `notes` are sentences on why the engine isn't
    faster.
    """

    threads: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    nodes_by_provider: dict[str, int] = field(default_factory=dict)
    fallback: str = ""
    kernels: dict[str, int] = field(default_factory=dict)
    time_by_operator: dict[str, float] = field(default_factory=dict)
    slowest_layers: tuple[SlowLayer, ...] = ()
    engine_memory: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probe(Sparse):
    """A backend's probe: the library's version, its working devices, and a line about them."""

    version: str = ""
    devices: tuple[str, ...] = ()
    detail: str = ""


# Names of kernels, and of NVTX ranges that link kernels to a module's calls

MAX_KERNEL_LENGTH = 90  # characters of a kernel's name
WHOLE_MODEL = "(model)"  # the unnamed top module
STRIPPED_PREFIXES = ("void ", "at::native::", "(anonymous namespace)::", "<unnamed>::")


def shorten_kernel(name: str) -> str:
    """Return a kernel's name without its arguments and uninformative parts."""
    for prefix in STRIPPED_PREFIXES:
        name = name.replace(prefix, "")
    depth = 0
    for k, letter in enumerate(name):  # arguments begin with the first bracket outside a template
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth:
            name = name[:k].rstrip()
            break
    return name if len(name) <= MAX_KERNEL_LENGTH else f"{name[:MAX_KERNEL_LENGTH]}…"


def range_name(module: str, call: int) -> str:
    """Return the name of the NVTX range of a module's call, counted from 1: `conv1`, then `conv1#2`."""
    return (module or WHOLE_MODEL) + (f"#{call}" if call > 1 else "")
