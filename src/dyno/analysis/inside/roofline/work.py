"""What a layer does: its operations, its bytes, and the type of its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dyno.analysis.inside import align
from dyno.analysis.inside.roofline.ceilings import MEMORY, Rates
from dyno.analysis.inside.totals import BYTES
from dyno.worker.facts.job import MODULES, Layer, LayerGraph, Port

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8", "uint8": "int8"}  # of the ceilings
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class LayerWork:
    """Operations and bytes of one layer, and the type of its arithmetic ("": unknown); None for what isn't known."""

    flops: int | None
    bytes: int | None
    kind: str = ""

    def least(self, rates: Rates) -> tuple[float, str] | None:
        """Return the least seconds that the rates allow, and the ceiling that decides; None where that isn't known."""
        if self.flops is None or rates.memory is None or (self.bytes is None and not self.flops):
            return None
        moving = (self.bytes or 0) / rates.memory
        if not self.flops:
            return moving, MEMORY
        peak = rates.products.get(self.kind)
        if peak is None:
            return None
        computing = self.flops / peak
        return max(moving, computing), ARITHMETIC if computing >= moving else MEMORY


def counted(forms: Sequence[LayerGraph], k: int, graph: int | None, precision: str) -> list[LayerWork]:
    """Count the work of each layer of form `k`; an engine's operations are those of the nodes of its graph."""
    form = forms[k]
    if form.form == MODULES or graph is None:
        counts = [layer.flops for layer in form.layers]
    else:
        counts = _from_nodes(forms, k, graph)
    written = {port.name: port for layer in form.layers for port in layer.outputs}
    return [
        LayerWork(count, moved_bytes(layer, written), _find_type(layer, form.form == MODULES, precision))
        for layer, count in zip(form.layers, counts, strict=True)
    ]


def types_of(form: LayerGraph, precision: str) -> set[str]:
    """Return the ceilings' types in which layers of the form compute."""
    return {_find_type(layer, form.form == MODULES, precision) for layer in form.layers} - {""}


def _from_nodes(forms: Sequence[LayerGraph], k: int, graph: int) -> list[int | None]:
    """Count the operations of each layer: a node's count once, at the first of its layers with a known computing type.

    Where no layer of a node has one, the operations of those layers aren't known, nor those of the computing layers
    without a node.
    """
    layers = forms[k].layers
    computing = [i for i, layer in enumerate(layers) if layer.computes_in and not layer.moves]
    counts: list[int | None] = [0] * len(layers)
    pairs, doubtful = align.link(forms, graph, k).pairs, set[int]()
    for node, each in enumerate(forms[graph].layers):
        own = pairs.get(node, set())
        at = next((i for i in computing if i in own), None)
        if at is not None and (before := counts[at]) is not None:
            counts[at] = None if each.flops is None else before + each.flops
        elif at is None and each.flops != 0:
            doubtful |= {*own, *computing}
    return [count or None if i in doubtful else count for i, count in enumerate(counts)]


def moved_bytes(layer: Layer, written: Mapping[str, Port]) -> int | None:
    """Return the bytes of the layer's inputs, weights and outputs, each once; None where a shape is unknown.

    `written` are the outputs of all layers by name, which may know more of an input than its reader does.
    """
    ports = {(port.name or str(k)): written.get(port.name, port) for k, port in enumerate(layer.inputs)}
    tensors = [*ports.values(), *layer.outputs]
    if not layer.outputs or any(not p.dtype or any(n < 0 for n in p.shape) for p in tensors):
        return None
    computing = layer.computes_in or layer.outputs[0].dtype
    return sum(map(_count_bytes, tensors)) + layer.parameters * BYTES.get(computing, 1)


def _count_bytes(port: Port) -> int:
    return math.prod(port.shape) * BYTES.get(port.dtype, 1)


def _find_type(layer: Layer, is_module: bool, precision: str) -> str:
    """Return the ceiling's type: an engine's declared computing type, or the output type of a module."""
    named = layer.computes_in or (layer.outputs[0].dtype if is_module and layer.outputs else "")
    kind = TYPES.get(named, "")
    return "tf32" if kind == "fp32" and precision == "tf32" else kind
