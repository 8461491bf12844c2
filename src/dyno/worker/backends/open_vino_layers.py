"""OpenVINO's execution graph: fused layers with the type, the layout and the kernel that each one runs in."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dyno.worker.facts.inside import LAYERS, Layer, LayerGraph, Port
from dyno.worker.facts.precision import COMPUTED, UNKNOWN, why_not_faster

TYPE_NAMES = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "i8": "int8", "u8": "int8", "i4": "int4",
    "u4": "int4", "nf4": "float4", "f4e2m1": "float4", "u2": "int2", "f8e4m3": "float8", "f8e5m2": "float8",
}  # fmt: skip
NARROW = {"float16", "float8", "float4", "int8", "int4", "int2"}  # types of weights that a kernel may widen
ENCLOSING = ("If", "Loop", "TensorIterator")  # layers with a graph of their own, which OpenVINO doesn't open
COMPUTE = re.compile("Convolution|Deconvolution|FullyConnected|MatMul|MHA|ScaledDotProduct|QKVProj|LLMMLP|LSTM|GRU|RNN")
NOT_LAYERS = {"Const", "Input", "Output"}
NO_KERNEL = ("unknown", "undef", "reorder")  # how the kernel is called of what only passes a tensor on
CONVERTERS = ("FakeQuantize", "Convert", "Reorder")


class ExecutionGraph:
    """What OpenVINO made of the model: fused layers with the type and kernel each one runs in."""

    def __init__(self, runtime_model: Any, requested: str) -> None:
        self._requested, self._ops = requested, runtime_model.get_ordered_ops()
        self._infos = [{key: str(plain(value)) for key, value in op.get_rt_info().items()} for op in self._ops]
        # What was folded into constants or into memory layout stays in the graph, marked as not executed.
        self.layers = [info for info in self._infos if _read_kind(info) not in NOT_LAYERS and not _is_skipped(info)]

    def compute(self) -> list[dict[str, str]]:
        """Return convolutions, matrix products and the like, and layers that may hide some.

        Products of indices and shapes are left out.
        """
        kinds = (*COMPUTED, UNKNOWN)
        return [layer for layer in self.layers if _is_compute_layer(layer) and _computed_in(layer) in kinds]

    def by_type(self) -> dict[str, int]:
        """Compute layers by the type they ran in, 8-bit ones signed or not as `int8`."""
        return dict(Counter(_computed_in(layer) for layer in self.compute()))

    def time_by_operator(self) -> dict[str, float]:
        """Return each kind's share of the time in layers, largest first."""
        spent: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            spent[layer["layerType"]] += _parse_number(layer.get("execTimeMcs", ""))
        total = sum(spent.values()) or 1.0
        return {kind: round(t / total, 4) for kind, t in sorted(spent.items(), key=lambda kv: -kv[1]) if t}

    def notes(self) -> list[str]:
        """Return sentences on the causes that keep a lowered precision from being faster."""
        compute = [(layer["layerType"], _computed_in(layer)) for layer in self.compute()]
        return why_not_faster(self._requested, compute, self.time_by_operator(), CONVERTERS)

    def inside(self, library: str) -> LayerGraph:
        """Return the graph's layers without constants; those that OpenVINO kept but doesn't run are `skipped`."""
        constant, layers, stored = set[str](), list[Layer](), dict[str, int]()
        for op, info in zip(self._ops, self._infos, strict=True):
            read = [port.get_source_output() for port in op.inputs()]
            computed = [port for port in read if _read_name(port) not in constant]
            weights = [port for port in read if _read_name(port) in constant]
            if _read_kind(info) == "Const" or (read and not computed):
                constant.add(op.get_friendly_name())
            elif _read_kind(info) not in NOT_LAYERS:
                layer = self._build_layer(op, info, computed, weights)
                before = sum(stored.values())
                stored |= {_read_name(port): _count_weights(port) for port in weights if layer.type not in CONVERTERS}
                layers.append(replace(layer, shared=layer.parameters + before - sum(stored.values())))
        return LayerGraph(form=LAYERS, library=library, parameters=sum(stored.values()), layers=tuple(layers))

    def _build_layer(self, op: Any, info: dict[str, str], computed: list[Any], weights: list[Any]) -> Layer:
        name, kind = op.get_friendly_name(), _read_kind(info)
        layouts, types = info.get("outputLayouts", "").split(","), info.get("outputPrecisions", "").split(",")
        return Layer(
            name=name,
            type=kind,
            inputs=tuple(_read_port(port) for port in computed),
            outputs=tuple(
                Port(_format_label(name, k), tuple(port.shape), TYPE_NAMES.get(kind, kind), layout)
                for k, (port, kind, layout) in enumerate(_iter_outputs(op.outputs(), types, layouts))
            ),
            parameters=0 if kind in CONVERTERS else sum(map(_count_weights, weights)),
            computes_in=_computed_in(info) if COMPUTE.search(kind) else "",
            tactic=info.get("primitiveType", ""),
            moves=kind in ("Reorder", "Convert"),
            skipped=_is_skipped(info),
            nodes=tuple(filter(None, info.get("originalLayersNames", "").split(","))),
        )


def _count_weights(port: Any) -> int:
    """Return the number of weights in a constant; 0 for indices or a single number."""
    count = math.prod(port.shape)
    return count if count > 1 and _read_port(port).dtype in COMPUTED else 0


def _read_kind(info: dict[str, str]) -> str:
    return info.get("layerType", "Const")


def _is_skipped(info: dict[str, str]) -> bool:
    """Return whether the layer runs nothing.

    OpenVINO also reports a layer of less than a microsecond as not executed, but that one has a kernel.
    """
    kernel = info.get("primitiveType", "")
    return info.get("execTimeMcs") == "not_executed" and (not kernel or kernel.startswith(NO_KERNEL))


def _iter_outputs(ports: list[Any], types: list[str], layouts: list[str]) -> Iterator[tuple[Any, str, str]]:
    """Yield each output with its type and layout; the library lists a single one for outputs that are alike."""
    for k, port in enumerate(ports):
        yield port, types[min(k, len(types) - 1)], layouts[min(k, len(layouts) - 1)]


def _read_name(port: Any) -> str:
    return str(port.get_node().get_friendly_name())


def _format_label(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name


def _read_port(source: Any) -> Port:
    info = {key: str(plain(value)) for key, value in source.get_node().get_rt_info().items()}
    kind = info.get("outputPrecisions", "").split(",")[0]
    label = _format_label(_read_name(source), source.get_index())
    return Port(label, tuple(source.shape), TYPE_NAMES.get(kind, kind), info.get("outputLayouts", "").split(",")[0])


def _computed_in(layer: dict[str, str]) -> str:
    """Return the type that a layer multiplies in.

    Where a kernel widens weights, the library reports the weights' type.
    """
    if layer["layerType"] in ENCLOSING:
        return UNKNOWN
    kind = TYPE_NAMES.get(layer["runtimePrecision"], layer["runtimePrecision"])
    kernel = TYPE_NAMES.get(layer.get("primitiveType", "").lower().rpartition("_")[2], kind)
    return kernel if kind in NARROW else kind


def _is_compute_layer(layer: dict[str, str]) -> bool:
    return layer["layerType"] in ENCLOSING or bool(COMPUTE.search(layer["layerType"]))


def _parse_number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def plain(value: Any) -> Any:
    """Return a property or rt_info value as a string, number or bool, for JSON."""
    value = getattr(value, "value", value)
    if isinstance(value, (bool, int, float, str)):
        return value
    return value.get_type_name() if hasattr(value, "get_type_name") else getattr(value, "name", str(value))
