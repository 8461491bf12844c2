"""ONNX Runtime's optimised graph: the nodes that it really runs, with the shapes and types that a profile saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dyno.worker.facts.inside import LAYERS, Inside, Layer
from dyno.worker.layers import graph
from dyno.worker.onnx_graph.file import import_onnx
from dyno.worker.sessions.onnx_runtime_profile import COMPUTE, Kernel

TYPES = {"float": "float32", "double": "float64"}
COPIES = ("MemcpyFromHost", "MemcpyToHost")
MOVES = ("Cast", "ReorderInput", "ReorderOutput", *COPIES)
Kernels = Mapping[Kernel, Mapping[str, Any]]


def read(path: str, source: str, kernels: Kernels, library: str) -> Inside:
    """The optimised file's nodes as an engine's layers; a Transpose that its source doesn't have is a conversion.

    `kernels` has the arguments of each kernel's event in ONNX Runtime's profile, by the event's name and the node's
    index. A node of the file that no event tells of was not run. UserError for a file that can't be read.
    """
    written = graph.nodes(path, {})
    source_names = {node.name for node in import_onnx().load(source, load_external_data=False).graph.node}
    layers, blocked = [], set[str]()
    for layer, kernel in zip(written.layers, kernels_of(written.layers, kernels), strict=True):
        moves = _operator(layer) in MOVES or (_operator(layer) == "Transpose" and layer.name not in source_names)
        layer = _as_run(replace(layer, moves=moves), kernels[kernel] if kernel else None)
        # Only a reordering ends the layout; an elementwise operator doesn't care for it.
        enters = ".nchwc." in layer.type or any(port.name in blocked for port in layer.inputs)
        if enters and _operator(layer) != "ReorderOutput":
            blocked |= {port.name for port in layer.outputs}
            layer = replace(layer, outputs=tuple(replace(port, format="nchwc") for port in layer.outputs))
        layers.append(layer)
    return replace(written, form=LAYERS, library=library, layers=tuple(layers), notes=())


def kernels_of(layers: Sequence[Layer], kernels: Iterable[Kernel]) -> list[Kernel | None]:
    """The kernel of each layer, None for one that was not run; layers of one name have theirs in order."""
    pending: dict[str, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda each: int(each[1] or 0)):
        pending.setdefault(kernel[0].removesuffix("_kernel_time"), []).append(kernel)
    return [pending[layer.name].pop(0) if pending.get(layer.name) else None for layer in layers]


def _as_run(layer: Layer, event: Mapping[str, Any] | None) -> Layer:
    """The layer with what the profile says; a shape is the run's own, which the file need not have."""
    operator = _operator(layer)
    layer = replace(layer, flops=None, modules=(), skipped=event is None)
    if event is None:
        return layer
    read, written = _typed(event.get("input_type_shape")), _typed(event.get("output_type_shape"))
    outputs = [replace(p, shape=s, dtype=d) for p, (d, s) in zip(layer.outputs, written, strict=False)]
    computes = read[0][0] if read and COMPUTE.search(operator) else ""
    provider = str(event.get("provider", "")).removesuffix("ExecutionProvider")
    return replace(layer, outputs=tuple(outputs) or layer.outputs, computes_in=computes, tactic=provider)


def _operator(layer: Layer) -> str:
    """The operator without its domain."""
    return layer.type.rpartition(".")[2]


def _typed(described: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of an event."""
    return [(TYPES.get(k, k), tuple(shape)) for each in described or () for k, shape in each.items()]
