"""A built engine's layers with their types and formats, in one form for every version.

The source is the engine inspector's JSON if the engine can be deserialised, else (TensorRT-RTX, which builds without a
GPU) the listing at the end of a verbose build.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from dyno.worker import spec
from dyno.worker.facts import job as facts
from dyno.worker.facts.engine import (
    ARITHMETIC_TYPES,
    MIN_MENTIONED_SHARE,
    UNKNOWN_TYPE,
    Layers,
    SlowLayer,
    precision_truth,
    sum_operations,
    why_not_faster,
)
from dyno.worker.facts.job import LayerGraph, Port
from dyno.worker.nets import flops
from dyno.worker.spec import UserError

ENGINE_NAME = "TensorRT"
# Words for each type, as in "Thirty-two wide channel vectorized row major Int8 format", "Half", "FP16"…
TYPE_NAMES = {
    "bfloat16": "BF16|BFloat16",
    "float16": "FP16|Half|Float16",
    "float8": "FP8|Float8|E4M3",
    "float4": "FP4|E2M1",
    "uint8": "UInt8",
    "int8": "Int8",
    "int4": "Int4",
    "int64": "Int64",
    "int32": "Int32",
    "bool": "Bool",
    "float32": "FP32|Float32|Float|TF32",
}
TYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4, "float4": 4}
COMPUTE_LAYERS = re.compile(
    r"conv|correlation|gemm|matmul|matrix_?multiply|fullyconnected|mha|attention|lstm|gru|rnn|einsum|moe", re.I
)
ATTENTION_LAYER = re.compile("mha|attention", re.I)
# The compiler's names of fused kernels: __myl_FcAdd_myl0_25, __myl_CastMulConv…
MYELIN_KERNEL = re.compile(r"^__my[el]l?\w*?_([A-Z][A-Za-z0-9]*)_my")
COMPUTE_PARTS = {"Fc", "Mm", "Bmm", "Gemm", "Conv", "Corr", "Mha", "Attn", "Dot", "Einsum"}
MOVING_PARTS = {"Move", "Mov", "Tran", "Cast", "Resh", "Copy"}
OPAQUE_LAYER = re.compile("myelin|foreign", re.I)  # a whole subgraph as one layer, in some versions

FOREIGN_NODE = re.compile(r"^\{ForeignNode\[(.*)\]\}$")
POINTWISE_PREFIX = "PWN("  # prefix of fused elementwise operators


@dataclass(frozen=True)
class Weights:
    """Type and number of a layer's weights."""

    dtype: str
    count: int


@dataclass(frozen=True)
class EngineLayer:
    """One layer of the engine; `nodes` are its ONNX nodes, if the library reports them.

    `parameters` counts weights and bias if the library does: constants in a listing are padded for the kernel.
    """

    name: str
    type: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tactic: str
    weights: Weights | None = None
    bias: Weights | None = None
    nodes: tuple[str, ...] = ()
    parameters: int = 0

    @property
    def computes(self) -> bool:
        """Whether it is a compute layer: convolution, matrix product, attention and the like."""
        if COMPUTE_LAYERS.search(self.type):
            return True
        return bool(COMPUTE_PARTS & set(self._parts))

    @property
    def operations(self) -> int | None:
        """The operations of a convolution or a matrix product; None without listed shapes and weights."""
        if not (self.inputs and self.outputs):
            return None
        first, result = self.inputs[0].shape, self.outputs[0].shape
        if self.weights and result:
            values = first if "deconv" in self.type.lower() else result
            return flops.of_convolution(self.weights.count, values[1 if len(values) > 3 else -1], values)
        is_product = len(self.inputs) == 2 and not ATTENTION_LAYER.search(self.type)
        return flops.of_product(first, self.inputs[1].shape, result) if is_product else None

    @property
    def moves(self) -> bool:
        """Whether it only changes types or layouts."""
        parts = self._parts
        return "reformat" in self.type.lower() or (bool(parts) and set(parts) <= MOVING_PARTS)

    @property
    def _parts(self) -> list[str]:
        match = MYELIN_KERNEL.match(self.name)
        return re.findall("[A-Z][a-z0-9]*", match[1]) if match else []

    @property
    def computed_in(self) -> str:
        """The type of its products: the wider one of input and weights, since kernels convert the narrower one.

        `UNKNOWN_TYPE` for a subgraph that the library doesn't describe.
        """
        if OPAQUE_LAYER.search(self.type):
            return UNKNOWN_TYPE
        types = [port.dtype for port in self.inputs[:1]] + ([self.weights.dtype] if self.weights else [])
        product_types = [kind for kind in types if kind in TYPE_BITS]
        return (
            max(product_types, key=lambda kind: TYPE_BITS[kind])
            if product_types
            else (types[0] if types and types[0] else UNKNOWN_TYPE)
        )


def inspect(trt: Any, engine: Any) -> list[EngineLayer]:
    """Return a deserialised engine's layers; complete if built with detailed profiling verbosity, as by Dyno."""
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    del inspector  # else TensorRT complains when the engine is freed
    return from_json(text)


def from_json(text: str) -> list[EngineLayer]:
    """Parse the engine inspector's JSON; a layer reported only by name has the type "".

    Raise a `UserError` if the text is not JSON.
    """
    try:
        entries = json.loads(text, strict=False).get("Layers", [])
    except ValueError as e:
        raise UserError(f"the engine's layer information is not JSON ({e})") from e
    return [
        _parse_layer(entry) if isinstance(entry, dict) else EngineLayer(str(entry), "", (), (), "") for entry in entries
    ]


def _parse_layer(entry: dict[str, Any]) -> EngineLayer:
    weights, bias = _parse_weights(entry.get("Weights")), _parse_weights(entry.get("Bias"))
    return EngineLayer(
        name=str(entry.get("Name", "")),
        type=str(entry.get("LayerType", "")),
        inputs=tuple(map(_parse_port, entry.get("Inputs") or ())),
        outputs=tuple(map(_parse_port, entry.get("Outputs") or ())),
        tactic=str(entry.get("TacticName") or entry.get("TacticValue") or ""),
        weights=weights or _find_largest_constant(map(_parse_port, entry.get("Constants") or ())),
        bias=bias,
        nodes=_find_nodes(str(entry.get("Metadata", ""))),
        parameters=sum(w.count for w in (weights, bias) if w),
    )


def _parse_port(entry: dict[str, Any]) -> Port:
    description = str(entry.get("Format/Datatype", entry.get("Format", "")))
    dtype = str(entry.get("Datatype", "")) or description
    return Port(str(entry.get("Name", "")), tuple(entry.get("Dimensions", ())), dtype_of(dtype), description)


def _parse_weights(entry: Any) -> Weights | None:
    if not isinstance(entry, dict) or not entry.get("Count"):
        return None
    return Weights(dtype_of(str(entry.get("Type", ""))), int(entry["Count"]))


def dtype_of(text: str) -> str:
    """Return the NumPy name of the type in a format's description; "" if it names none."""
    return next((name for name, regex in TYPE_NAMES.items() if re.search(rf"(?<![a-zA-Z])({regex})\b", text, re.I)), "")


def _find_nodes(metadata: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\[ONNX Layer: (.*?)\](?=\[|$|\x1e|\s)", metadata))


def named_nodes(name: str) -> tuple[str, ...]:
    """Return the nodes in a layer's name, for layers without other information.

    The name of a fused layer has all nodes, that of a subgraph (`{ForeignNode[a...b]}`) the first and the last.
    """
    text = FOREIGN_NODE.sub(r"\1", name)
    parts = re.split(r" \+ | \|\| |, |\.\.\.(?=[/\w(])", text.replace(POINTWISE_PREFIX, ""))
    names = [part.rstrip(")") for part in parts] if POINTWISE_PREFIX in text else parts
    return tuple(dict.fromkeys(part for part in names if part and not part.startswith("(Unnamed Layer")))


def from_log(text: str) -> list[EngineLayer]:
    """Parse the listing in a build's verbose log: `Name: …, LayerType: …, Inputs: [ … ]` per line."""
    return [
        _parse_log_line(line) for line in text.splitlines() if line.startswith("Name: ") and ", LayerType: " in line
    ]


LAYER_LINE = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[(?P<constants>.*?)\], )?"
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), StreamId: .*?(?:Metadata: (?P<metadata>.*))?$"
)
PORT_FORMAT = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<shape>[^\]]*)\],.*?"
    r"Datatype: (?P<dtype>\w+), Format: (?P<format>[^}]*)\}"
)


def _parse_log_line(line: str) -> EngineLayer:
    match = LAYER_LINE.match(line)
    if match is None:
        return EngineLayer(line.removeprefix("Name: ").partition(", LayerType: ")[0], "", (), (), "")
    return EngineLayer(
        name=match["name"],
        type=match["type"],
        inputs=_parse_log_ports(match["inputs"]),
        outputs=_parse_log_ports(match["outputs"]),
        tactic=match["tactic"],
        weights=_find_largest_constant(_parse_log_ports(match["constants"] or "")),
        nodes=_find_nodes(match["metadata"] or ""),
    )


def _parse_log_ports(text: str) -> tuple[Port, ...]:
    return tuple(
        Port(
            match["name"],
            tuple(int(n) for n in match["shape"].split(",") if n.strip().lstrip("-").isdigit()),
            dtype_of(match["dtype"]),
            match["format"].strip(),
        )
        for match in PORT_FORMAT.finditer(text)
    )


def _find_largest_constant(constants: Iterable[Port]) -> Weights | None:
    """Return the largest constant with more than one axis above length 1: others are scales, biases or scalars."""
    candidates = [port for port in constants if sum(size > 1 for size in port.shape) > 1]
    best = max(candidates, key=lambda port: math.prod(port.shape), default=None)
    return Weights(best.dtype, math.prod(best.shape)) if best else None


def compute(engine_layers: Sequence[EngineLayer]) -> list[EngineLayer]:
    """Return compute layers (convolution, matrix product…), including opaque subgraphs.

    Products of indices and shapes are left out.
    """
    layers = [layer for layer in engine_layers if layer.computes or OPAQUE_LAYER.search(layer.type)]
    return [layer for layer in layers if layer.computed_in in (*ARITHMETIC_TYPES, UNKNOWN_TYPE)]


def by_type(engine_layers: Sequence[EngineLayer]) -> dict[str, int]:
    """Return the number of compute layers by their type."""
    return dict(Counter(layer.computed_in for layer in compute(engine_layers)))


def summarise_layers(engine_layers: Sequence[EngineLayer], requested: str) -> Layers:
    """Return the layer facts of a record.

    They include the float32 layers of a lower precision and, if the library counts them, the number of weights and
    biases.
    """
    types = by_type(engine_layers)
    wide_names = (layer.name for layer in compute(engine_layers) if layer.computed_in == "float32")
    operations = sum_operations((x.computed_in, x.operations) for x in compute(engine_layers)) if len(types) > 1 else {}
    return Layers(
        layers=len(engine_layers),
        layers_by_type=types,
        operations_by_type=operations,
        reformats=sum(layer.moves for layer in engine_layers),
        operators=dict(Counter(layer.type for layer in engine_layers if layer.type).most_common()),
        precision_truth=precision_truth(requested, types, ENGINE_NAME, operations),
        kept_float32=() if requested in ("fp32", "tf32") else tuple(wide_names),
        engine_parameters=sum(layer.parameters for layer in engine_layers) or None,
    )


def list_notes(
    engine_layers: Sequence[EngineLayer], requested: str, time_by_operator: Mapping[str, float] | None = None
) -> list[str]:
    """Return sentences on why the engine isn't faster.

    Shares of time come from a profile, if given.
    """
    moving_layers = [layer for layer in engine_layers if layer.moves]
    converters = {layer.type for layer in moving_layers} - {layer.type for layer in engine_layers if not layer.moves}
    kinds = [(layer.type, layer.computed_in) for layer in compute(engine_layers)]
    sentences = why_not_faster(requested, kinds, time_by_operator or {}, sorted(converters))
    if len(moving_layers) > MIN_MENTIONED_SHARE * len(engine_layers):
        sentences.append(f"{len(moving_layers)} of {len(engine_layers)} layers only change types or layouts")
    return sentences


def as_json(engine_layers: Sequence[EngineLayer]) -> list[dict[str, Any]]:
    """Return the layers for layers.json."""
    return [asdict(layer) for layer in engine_layers]


def from_listing(entries: Iterable[Any]) -> list[EngineLayer]:
    """Return the layers of a layers.json."""
    return [spec.from_json(EngineLayer, entry) for entry in entries]


def list_layers(engine_layers: Sequence[EngineLayer], library: str) -> LayerGraph:
    """Return the layers as facts; parameters are 0 unless the library counts them."""
    layers = [
        facts.Layer(
            name=layer.name,
            type=layer.type,
            inputs=layer.inputs,
            outputs=layer.outputs,
            parameters=layer.parameters,
            computes_in=layer.computed_in if layer.computes or OPAQUE_LAYER.search(layer.type) else "",
            tactic=layer.tactic,
            moves=layer.moves,
            nodes=layer.nodes or (() if layer.moves else named_nodes(layer.name)),
        )
        for layer in engine_layers
    ]
    return LayerGraph(
        form=facts.LAYERS, library=library, parameters=sum(x.parameters for x in layers), layers=tuple(layers)
    )


# Layer times by the library's profiler: shares of the time, not the latency
#
# A profiled run is launched without a graph and timed layer by layer, so its sum exceeds the latency.

PROFILED_CALLS = 6  # the first is left out
DISCARDED_RUNS = 3  # of a profile
TIMES_NOTE = (
    "TensorRT's profiler runs the layers one after the other without a CUDA graph and times each by events: their "
    "times include the gaps between them, so they may add up to more than the latency."
)
SLOWEST_SHOWN = 5


def watch_layers(trt: Any, context: Any, launch: Callable[[], None], runs: int) -> list[dict[str, float]]:
    """Return the seconds of each layer by name in each of `runs` runs; empty if the library reports none.

    `launch` runs the context once and waits. The context keeps the profiler, so it must not be timed afterwards.
    """
    seconds: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, name: str, milliseconds: float) -> None:
            seconds[name] += milliseconds / 1e3

    profiler = Profiler()
    context.profiler = profiler
    repeats = []
    for _ in range(runs):
        seconds.clear()
        launch()
        repeats.append(dict(seconds))
    return repeats


def profile_layers(trt: Any, context: Any, launch: Callable[[], None]) -> dict[str, float]:
    """Return the median seconds of each layer by name; see `watch_layers`."""
    runs = watch_layers(trt, context, launch, PROFILED_CALLS)[1:]
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in dict.fromkeys(chain(*runs))}


def read_layer_times(graph: LayerGraph, runs: Sequence[Mapping[str, float]]) -> tuple[LayerGraph, np.ndarray]:
    """Return the engine's layers, and their seconds [runs, layers].

    A layer reported by no run is `skipped`. A reported layer missing from the list is appended, with only its name.
    """
    names = dict.fromkeys(chain(*runs))
    rows = {layer.name: k for k, layer in reversed([*enumerate(graph.layers)])}  # the first of equal names
    layers = [replace(layer, skipped=rows[layer.name] != k or layer.name not in names)
              for k, layer in enumerate(graph.layers)]  # fmt: skip
    for name in names:
        if rows.setdefault(name, len(layers)) == len(layers):
            layers.append(facts.Layer(name=name))
    seconds = np.zeros((len(runs), len(layers)))
    for run, times in zip(seconds, runs, strict=True):
        for name, duration in times.items():
            run[rows[name]] = duration
    return replace(graph, layers=tuple(layers)), seconds


def share_by_operator(engine_layers: Sequence[EngineLayer], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each layer kind's share of the layers' time, largest first."""
    types = {layer.name: layer.type for layer in engine_layers}
    total = sum(seconds.values()) or 1.0
    shares: dict[str, float] = defaultdict(float)
    for name, duration in seconds.items():
        shares[types.get(name) or "unknown"] += duration / total
    return {type_: round(share, 4) for type_, share in sorted(shares.items(), key=lambda kv: -kv[1])}


def list_slowest(engine_layers: Sequence[EngineLayer], seconds: Mapping[str, float]) -> tuple[SlowLayer, ...]:
    """Return the slowest layers: name, kind, type of products, tactic, and share of the layers' time."""
    by_name = {layer.name: layer for layer in engine_layers}
    total = sum(seconds.values()) or 1.0
    layers = []
    for name, duration in sorted(seconds.items(), key=lambda kv: -kv[1])[:SLOWEST_SHOWN]:
        layer = by_name.get(name) or EngineLayer(name, "", (), (), "")
        layers.append(SlowLayer(name, layer.type, layer.computed_in, layer.tactic, round(duration / total, 4)))
    return tuple(layers)
