"""ONNX Runtime's optimised graph: the nodes that it really runs, with the shapes and types that a profile saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dyno.worker.facts.inside import LAYERS, Layer, LayerGraph
from dyno.worker.layers import graph
from dyno.worker.onnx_graph.file import import_onnx
from dyno.worker.sessions.onnx_runtime_profile import Kernel, Profile

TYPES = {"float": "float32", "double": "float64"}
COPIES = ("MemcpyFromHost", "MemcpyToHost")
MOVES = ("Cast", "ReorderInput", "ReorderOutput", *COPIES)


def read(path: str, source: str, profile: Profile, library: str) -> LayerGraph:
    """Read the optimised file's nodes as an engine's layers; a Transpose that its source lacks is a conversion.

    A node without an event in the profile was not run. Raises UserError for a file that can't be read.
    """
    written = graph.nodes(path, {})
    source_names = {graph.name_of(node) for node in _read_nodes(source)}
    layers, blocked = [], set[str]()
    for layer, kernel in zip(written.layers, kernels_of(written.layers, profile.outer, source), strict=True):
        moves = _name_operator(layer) in MOVES or (
            _name_operator(layer) == "Transpose" and layer.name not in source_names
        )
        layer = replace(layer, moves=moves, computes_in=profile.computed_in.get(kernel, "") if kernel else "")
        layer = _as_run(layer, profile.outer[kernel] if kernel else None)
        # Only a reordering ends the layout; an elementwise operator doesn't care for it.
        enters = ".nchwc." in layer.type or any(port.name in blocked for port in layer.inputs)
        if enters and _name_operator(layer) != "ReorderOutput":
            blocked |= {port.name for port in layer.outputs}
            layer = replace(layer, outputs=tuple(replace(port, format="nchwc") for port in layer.outputs))
        layers.append(layer)
    return replace(written, form=LAYERS, library=library, layers=tuple(layers), notes=())


def kernels_of(layers: Sequence[Layer], kernels: Iterable[Kernel], source: str = "") -> list[Kernel | None]:
    """Return the kernel of each layer, None for one that was not run; layers of one name get theirs in order.

    ONNX Runtime names a nameless node by its operator and its number: its place in the source file, if it comes from
    there. Others of an operator, as from an inlined function, get theirs in order too.
    """
    pending: dict[str, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda each: int(each[1] or 0)):
        pending.setdefault(kernel[0].removesuffix("_kernel_time"), []).append(kernel)
    given = {n.output[0]: f"{n.op_type}_{k}" for k, n in enumerate(_read_nodes(source)) if n.output and not n.name}
    found: list[Kernel | None] = []
    for layer in layers:
        stems = (layer.name, given.get(layer.outputs[0].name, "") if layer.outputs else "")
        own = next((pending[stem] for stem in stems if pending.get(stem)), None)
        found.append(own.pop(0) if own else None)
    left = sorted((one for each in pending.values() for one in each), key=lambda each: int(each[1] or 0))
    for k, layer in enumerate(layers):
        if found[k] is None and layer.outputs and layer.name == f"{_name_operator(layer)} to {layer.outputs[0].name}":
            name = f"{_name_operator(layer)}_"
            found[k] = next((each for each in left if each[0] == f"{name}{each[1]}_kernel_time"), None)
            left = [each for each in left if each != found[k]]
    return found


def _read_nodes(source: str) -> Sequence[Any]:
    nodes: Sequence[Any] = import_onnx().load(source, load_external_data=False).graph.node if source else ()
    return nodes


def _as_run(layer: Layer, event: Mapping[str, Any] | None) -> Layer:
    """Return the layer with its entry in the profile; its shapes are the run's own, which the file need not have."""
    layer = replace(layer, flops=None, modules=(), skipped=event is None)
    if event is None:
        return layer
    written = _parse_tensors(event.get("output_type_shape"))
    outputs = [replace(p, shape=s, dtype=d) for p, (d, s) in zip(layer.outputs, written, strict=False)]
    provider = str(event.get("provider", "")).removesuffix("ExecutionProvider")
    return replace(layer, outputs=tuple(outputs) or layer.outputs, tactic=provider)


def _name_operator(layer: Layer) -> str:
    return layer.type.rpartition(".")[2]


def _parse_tensors(described: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor of an event."""
    return [(TYPES.get(k, k), tuple(shape)) for each in described or () for k, shape in each.items()]
