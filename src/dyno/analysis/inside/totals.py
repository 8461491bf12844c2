"""Totals of a form, and why two forms of one model have different numbers of parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dyno.analysis.formatting import counting, significant
from dyno.analysis.inside.align import Region
from dyno.worker.facts.job import MODULES, NODES, Layer, LayerGraph

BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2,
         "int16": 2, "uint16": 2, "complex64": 8, "complex128": 16}  # fmt: skip
BLOCKED = "nchwc"  # ONNX Runtime's name of the layout
NORMS = ("BatchNorm", "BatchNormalization")


def activation_bytes(layer: Layer) -> int | None:
    """Return the bytes of the layer's outputs; None where a shape or type is unknown, or known only at run time."""
    if not layer.outputs or any(not p.dtype or any(n < 0 for n in p.shape) for p in layer.outputs):
        return None
    return sum(math.prod(port.shape) * BYTES.get(port.dtype, 1) for port in layer.outputs)


def is_norm(layer: Layer) -> bool:
    """Return whether it is a batch normalisation, in inference a multiplication and an addition per channel."""
    return any(name in layer.type for name in NORMS)


def sentences(
    forms: Sequence[LayerGraph],
    shown: Sequence[int],
    regions: Sequence[Region],
    graph_of: Mapping[int, int] | None = None,
) -> list[str]:
    """Explain why the number of parameters of each form shown differs from that of the one before it.

    `graph_of` has the ONNX graph of each engine, in which batch norms are folded and weights are not padded.
    """
    counted = [k for k in shown if forms[k].parameters]
    lines = []
    for first, k in pairwise(counted):
        apart = forms[first].parameters - forms[k].parameters
        if apart:
            reasons = list(_find_reasons(forms, first, k, regions, (graph_of or {}).get(k, k)))
            lines.append(
                f"{forms[k].library} has {abs(apart):,} {'fewer' if apart > 0 else 'more'} parameters than "
                f"{forms[first].library}: {'; '.join(reasons)}."
            )
    return lines


def _find_reasons(
    forms: Sequence[LayerGraph], first: int, other: int, regions: Sequence[Region], graph: int
) -> Iterator[str]:
    """Yield the reasons: folded batch norms, padded weights, weights shared by layers, and where the rest is."""
    left = forms[first].parameters - forms[other].parameters
    differences = {id(r): _sum_parameters(forms, r, first) - _sum_parameters(forms, r, other) for r in regions}
    folded = [r for r in regions if r.members[graph] and _is_folded(forms, first, graph, r)]
    if folded:
        norms = [n for r in folded for n in _list_layers(forms, r, first) if is_norm(n)]
        before, change = sum(n.added for n in norms), 0
        for r in folded:
            apart = _sum_parameters(forms, r, first) - _sum_parameters(forms, r, graph)
            change, differences[id(r)] = change + apart, differences[id(r)] - apart
        where = "layer before it" if len(norms) == 1 else "layers before them"
        became = f"became {before - change:,} biases" if before != change else "need no further biases"
        yield f"{counting(len(norms), 'batch norm')} folded into the {where}, whose {before:,} parameters {became}"
        left -= change
    padded = [r for r in regions if differences[id(r)] and _is_blocked(forms, r, first, other)]
    if filled := sum(differences.pop(id(r)) for r in padded):
        yield f"{abs(filled):,} zeros fill up blocks of channels in its layout{'' if filled < 0 else ' no longer'}"
        left -= filled
    # By names: what a module does itself may be spread over several regions, and of its calls another may be the first.
    whole, sharing = Counter[str](), Counter[str]()
    for r in regions:
        name = _choose_name(forms, r, first, other)
        whole[name] += differences.get(id(r), 0)
        sharing[name] += _count_shared(forms, r, other) - _count_shared(forms, r, first)
    alike = [whole.pop(name) for name in [*whole] if whole[name] == sharing[name]]
    for shared, words in (
        (sum(n for n in alike if n > 0), "are stored once for several layers that have the same values"),
        (sum(n for n in alike if n < 0), "are stored anew for each layer that has these values"),
    ):
        if shared:
            yield f"{abs(shared):,} {words}"
            left -= shared
    where = _describe_place(whole)
    if left == forms[first].parameters - forms[other].parameters:
        yield where or "in which parts is not known"
    elif left:
        yield f"{abs(left):,} {'fewer' if left > 0 else 'more'} elsewhere{where and f', {where}'}"


def _describe_place(whole: Mapping[str, int]) -> str:
    """Describe where most of the difference is, as far as one part can be named for it."""
    apart = {name: abs(count) for name, count in whole.items() if count}
    if not apart:
        return ""
    if min(whole.values()) < 0 < max(whole.values()):
        return "more in some parts and fewer in others"
    name = max(apart, key=lambda each: apart[each])
    if len(apart) == 1:
        return f"all of them in {name}"
    return f"{'most' if 2 * apart[name] > sum(apart.values()) else f'{apart[name]:,}'} of them in {name}"


def _is_folded(forms: Sequence[LayerGraph], first: int, other: int, region: Region) -> bool:
    """Return whether the region has a batch norm in the first form and none in the other, which folded it."""
    return any(map(is_norm, _list_layers(forms, region, first))) and not any(
        map(is_norm, _list_layers(forms, region, other))
    )


def _is_blocked(forms: Sequence[LayerGraph], region: Region, first: int, other: int) -> bool:
    """Return whether one of the forms stores the region's tensors in blocks of channels, which pads the weights."""
    every = (*_list_layers(forms, region, first), *_list_layers(forms, region, other))
    return any(port.format == BLOCKED for layer in every for port in layer.outputs)


def _list_layers(forms: Sequence[LayerGraph], region: Region, form: int) -> list[Layer]:
    return [forms[form].layers[i] for i in region.members[form]]


def _sum_parameters(forms: Sequence[LayerGraph], region: Region, form: int) -> int:
    return sum(layer.added for layer in _list_layers(forms, region, form))


def _count_shared(forms: Sequence[LayerGraph], region: Region, form: int) -> int:
    """Return the number of the region's weights that the form's earlier layers have too."""
    return sum(layer.shared for layer in _list_layers(forms, region, form))


def _choose_name(forms: Sequence[LayerGraph], region: Region, *order: int) -> str:
    """Return the module around the region's parts, else its first layer: a module's name, else that of these forms."""
    order = (*(k for k, each in enumerate(forms) if each.form == MODULES), *order)
    around = [forms[form].layers[k] for form in order for k in (region.around[form] if region.around else ())]
    names = (layer.name for layer in (*around, *(each for form in order for each in _list_layers(forms, region, form))))
    return next(names, "") or "(model)"


def _format_operations(count: int) -> str:
    for name, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{significant(count / size)} {name}FLOPs"
    return f"{count:,} FLOPs"


def summary(form: LayerGraph) -> str:
    """Describe a form in one sentence."""
    ran = [layer for layer in form.layers if not layer.skipped]
    sentence = f"{form.library}: {counting(len(ran), form.form.removesuffix('s'))}"
    if form.form == MODULES:
        sentence = f"{form.library}: {counting(len(ran), 'call')} of modules"
    if form.parameters:
        sentence += f", {form.parameters:,} parameters"
    if operations := sum(layer.flops or 0 for layer in form.layers):
        some = "at least " if form.form == NODES and any(layer.flops is None for layer in form.layers) else ""
        sentence += f", {some}{_format_operations(operations)}"
    if idle := sum(layer.skipped and bool(layer.outputs) for layer in form.layers):
        sentence += f", {idle:,} more in which nothing runs"
    if moves := sum(layer.moves for layer in ran):
        sentence += f", {moves:,} of the layers only {'changes' if moves == 1 else 'change'} types or layouts"
    return f"{sentence}."
