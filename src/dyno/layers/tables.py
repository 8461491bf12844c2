"""Tables of layers: of one form, of several forms side by side, and of conversions inserted by engines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from dyno.formatting import format_count, format_number
from dyno.layers import align
from dyno.layers.align import BY_CONSTANT, BY_FLOW, BY_NAME, FormSet, Region
from dyno.report.tables import TableKind
from dyno.table import COUNT, TEXT, Column, Row, Table
from dyno.worker.facts.job import LAYERS, MODULES, NODES, Layer, LayerGraph, Port

# Totals of a form, and reasons for different numbers of parameters.

TYPE_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2,
              "int16": 2, "uint16": 2, "complex64": 8, "complex128": 16}  # fmt: skip
BLOCKED_LAYOUT = "nchwc"  # ONNX Runtime's name of the layout
NORM_LAYERS = ("BatchNorm", "BatchNormalization")


def count_activation_bytes(layer: Layer) -> int | None:
    """Return the bytes of the layer's outputs; None if a shape or type is unknown before running."""
    if not layer.outputs or any(not p.dtype or any(n < 0 for n in p.shape) for p in layer.outputs):
        return None
    return sum(math.prod(port.shape) * TYPE_BYTES.get(port.dtype, 1) for port in layer.outputs)


def is_norm(layer: Layer) -> bool:
    """Return whether the layer is a batch normalisation: in inference, a multiply-add per channel."""
    return any(name in layer.type for name in NORM_LAYERS)


def describe_totals(form_set: FormSet, requested: Sequence[int], regions: Sequence[Region]) -> list[str]:
    """Explain why each form's number of parameters differs from that of the form shown before it."""
    forms = form_set.forms
    counted_forms = [k for k in requested if forms[k].parameters]
    lines = []
    for first, k in pairwise(counted_forms):
        difference = forms[first].parameters - forms[k].parameters
        if difference:
            # An engine's graph has folded batch norms, but no padded weights.
            reasons = list(_find_reasons(forms, first, k, regions, form_set.graph_of.get(k, k)))
            lines.append(
                f"{forms[k].library} has {abs(difference):,} {'fewer' if difference > 0 else 'more'} parameters than "
                f"{forms[first].library}: {'; '.join(reasons)}."
            )
    return lines


def _find_reasons(
    forms: Sequence[LayerGraph], first: int, other: int, regions: Sequence[Region], graph: int
) -> Iterator[str]:
    """Yield the reasons: folded batch norms, padded weights, shared weights, and the place of the rest."""
    remainder = forms[first].parameters - forms[other].parameters
    differences = {id(r): r.sum_added(forms, first) - r.sum_added(forms, other) for r in regions}
    folded_regions = [r for r in regions if r.members[graph] and _is_folded(forms, first, graph, r)]
    if folded_regions:
        norms = [n for r in folded_regions for n in r.list_layers(forms, first) if is_norm(n)]
        before, change = sum(n.added for n in norms), 0
        for r in folded_regions:
            difference = r.sum_added(forms, first) - r.sum_added(forms, graph)
            change, differences[id(r)] = change + difference, differences[id(r)] - difference
        where = "layer before it" if len(norms) == 1 else "layers before them"
        outcome = f"became {before - change:,} biases" if before != change else "need no further biases"
        yield f"{format_count(len(norms), 'batch norm')} folded into the {where}, whose {before:,} parameters {outcome}"
        remainder -= change
    padded_regions = [r for r in regions if differences[id(r)] and _is_blocked(forms, r, first, other)]
    if padding := sum(differences.pop(id(r)) for r in padded_regions):
        yield f"{abs(padding):,} zeros fill up blocks of channels in its layout{'' if padding < 0 else ' no longer'}"
        remainder -= padding
    # By name: a module's own code may be spread over regions, and its calls may come in another order.
    totals, shared_counts = Counter[str](), Counter[str]()
    for r in regions:
        name = _choose_name(forms, r, first, other)
        totals[name] += differences.get(id(r), 0)
        uses = [sum(layer.shared for layer in r.list_layers(forms, form)) for form in (first, other)]
        shared_counts[name] += uses[1] - uses[0]
    shared_totals = [totals.pop(name) for name in [*totals] if totals[name] == shared_counts[name]]
    once_text = "are stored once for several layers that have the same values"
    anew_text = "are stored anew for each layer that has these values"
    for sign, text in ((1, once_text), (-1, anew_text)):
        if count := sum(n for n in shared_totals if sign * n > 0):
            yield f"{abs(count):,} {text}"
            remainder -= count
    where = _describe_place(totals)
    if remainder == forms[first].parameters - forms[other].parameters:
        yield where or "in which parts is not known"
    elif remainder:
        yield f"{abs(remainder):,} {'fewer' if remainder > 0 else 'more'} elsewhere{where and f', {where}'}"


def _describe_place(totals: Mapping[str, int]) -> str:
    """Describe the place of most of the difference, if one part can be named for it."""
    sizes = {name: abs(count) for name, count in totals.items() if count}
    if not sizes:
        return ""
    if min(totals.values()) < 0 < max(totals.values()):
        return "more in some parts and fewer in others"
    name = max(sizes, key=lambda each: sizes[each])
    if len(sizes) == 1:
        return f"all of them in {name}"
    return f"{'most' if 2 * sizes[name] > sum(sizes.values()) else f'{sizes[name]:,}'} of them in {name}"


def _is_folded(forms: Sequence[LayerGraph], first: int, other: int, region: Region) -> bool:
    """Return whether the first form has a batch norm in the region that the other form has folded."""
    before, after = (any(map(is_norm, region.list_layers(forms, form))) for form in (first, other))
    return before and not after


def _is_blocked(forms: Sequence[LayerGraph], region: Region, first: int, other: int) -> bool:
    """Return whether a form stores the region's tensors in blocks of channels, which pads the weights."""
    layers = (*region.list_layers(forms, first), *region.list_layers(forms, other))
    return any(port.format == BLOCKED_LAYOUT for layer in layers for port in layer.outputs)


def _choose_name(forms: Sequence[LayerGraph], region: Region, *order: int) -> str:
    """Return the name of the region's enclosing module, else of its first layer, preferring modules' names."""
    order = (*(k for k, each in enumerate(forms) if each.form == MODULES), *order)
    outer = [forms[form].layers[k] for form in order for k in region.enclosing[form]]
    names = (layer.name for layer in (*outer, *(each for form in order for each in region.list_layers(forms, form))))
    return next(names, "") or "(model)"


def _format_operations(count: int) -> str:
    for name, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{format_number(count / size)} {name}FLOPs"
    return f"{count:,} FLOPs"


def summarise_layers(form: LayerGraph) -> str:
    """Describe a form in one sentence."""
    run_layers = [layer for layer in form.layers if not layer.skipped]
    sentence = f"{form.library}: {format_count(len(run_layers), form.form.removesuffix('s'))}"
    if form.form == MODULES:
        sentence = f"{form.library}: {format_count(len(run_layers), 'call')} of modules"
    if form.parameters:
        sentence += f", {form.parameters:,} parameters"
    if operations := sum(layer.flops or 0 for layer in form.layers):
        prefix = "at least " if form.form == NODES and any(layer.flops is None for layer in form.layers) else ""
        sentence += f", {prefix}{_format_operations(operations)}"
    if idle_count := sum(layer.skipped and bool(layer.outputs) for layer in form.layers):
        sentence += f", {idle_count:,} more that run nothing"
    if move_count := sum(layer.moves for layer in run_layers):
        sentence += f", {move_count:,} of the layers only {'changes' if move_count == 1 else 'change'} types or layouts"
    return f"{sentence}."


LAYER_TABLE = TableKind("layers", "Layers", "Every layer of one form of a model, in execution order.",
                        command="dyno inspect")  # fmt: skip
ALIGNED = TableKind("aligned", "Layers side by side", "What became of each layer from one form of a model to the next.",
                    command="dyno inspect")  # fmt: skip
CONVERSIONS = TableKind("conversions", "Conversions", "Layers that only change types or layouts, and for which edge.",
                        command="dyno inspect")  # fmt: skip
WHOLE_MODEL = "(model)"
QUANTISE_OPERATORS = ("QuantizeLinear", "DequantizeLinear")
MAX_PRINTED_NAMES = 3  # printed names per region; CSV and JSON have all

COUNT_COLUMNS = (
    Column("parameters", "weights of the layer itself", kind=COUNT, rank=2),
    Column("flops", "operations, a multiply-add counted as two", "1", COUNT, title="FLOPs", rank=3),
    Column("bytes", "bytes of the outputs", "B", COUNT, title="activations, B", rank=4),
)


def list_layers(form: LayerGraph) -> Table:
    """Build the layer table of a single form."""
    rows: list[Row] = []
    for layer in form.layers:
        output = layer.outputs[0] if layer.outputs else Port("")
        rows.append({
            "name": layer.name or WHOLE_MODEL, "type": layer.type, "output": format_shape(output),
            "dtype": output.dtype, "format": output.format, "parameters": layer.added or None,
            "flops": layer.flops or None, "bytes": count_activation_bytes(layer),
            "computes_in": layer.computes_in, "kernel": layer.tactic,
            "nodes": " ".join(layer.nodes) if form.form == LAYERS else "",
            "modules": " ".join(layer.modules) if form.form == NODES else "", "remark": _choose_remark(layer),
        })  # fmt: skip
    columns = (
        Column("name", "the layer's own name", kind=TEXT),
        Column("type", "module's class, operator or kind of layer", kind=TEXT),
        Column("output", "shape of the first output", kind=TEXT, rank=1),
        Column("dtype", "type of the first output", kind=TEXT, title="type of output", rank=5),
        Column("format", "memory layout of the first output", kind=TEXT, title="layout", rank=6),
        *COUNT_COLUMNS,
        Column("computes_in", "type that it multiplies in", kind=TEXT, title="computes in", rank=5),
        Column("kernel", "kernel or provider", kind=TEXT, rank=7),
        Column("modules", "PyTorch modules that the node came from", kind=TEXT, rank=6),
        Column("nodes", "ONNX nodes that the engine reports for it", kind=TEXT, rank=8),
        Column("remark", "whether it runs, and whether it only converts", kind=TEXT, rank=3),
    )
    return LAYER_TABLE.build(columns, rows, notes=(summarise_layers(form), *form.notes))


def _choose_remark(layer: Layer) -> str:
    if layer.moves:
        return "only changes type or layout"
    if layer.skipped:
        return "not run by itself" if layer.parameters or not layer.outputs else "not run"
    return ""


def format_shape(port: Port) -> str:
    """Format a shape as 1x64x56x56, with ? for an unknown dimension."""
    return "x".join(str(n) if n >= 0 else "?" for n in port.shape)


def align_forms(form_set: FormSet, requested: Sequence[int]) -> Table:
    """Build a table of the forms `requested` (indices), with a row per region; other forms only help to align them."""
    forms, links = form_set.forms, align.find_pivots(form_set)
    regions = [
        r for r in align.find_regions(forms, links)
        if any(not layer.skipped or layer.parameters for k in requested for layer in r.list_layers(forms, k))
    ]  # fmt: skip
    rows = [_make_row(forms, requested, region) for region in regions]
    names = [_choose_letter(k) for k in range(len(requested))]
    columns = [
        Column(name, f"layers of {forms[k].library}", kind=TEXT, title=forms[k].library, cell=make_names_cell(name))
        for name, k in zip(names, requested, strict=True)
    ]  # fmt: skip
    columns += [
        Column("output", "shape of the region's last output", kind=TEXT, rank=2),
        *(Column(f"parameters_{name}", f"weights in {forms[k].library}", kind=COUNT, title=f"parameters {name}", rank=4)
          for name, k in zip(names, requested, strict=True)),
        Column("flops", "operations, a multiply-add counted as two", "1", COUNT, title="FLOPs", rank=5),
        Column("bytes", "bytes of the last output", "B", COUNT, title="activations, B", rank=6),
        Column("remark", "what happened on the way", kind=TEXT, rank=1),
    ]  # fmt: skip
    notes = [summarise_layers(forms[k]) for k in requested]
    notes += describe_totals(form_set, requested, regions)
    notes += [line for link in links if (line := describe_coverage(forms, link))]
    notes += [note for k in requested for note in forms[k].notes]
    return ALIGNED.build(columns, rows, notes=tuple(dict.fromkeys(notes)))


def _choose_letter(position: int) -> str:
    return chr(ord("a") + position)


def format_names(names: Sequence[str]) -> str:
    """Format a region's first few names; later names drop the parent that they share with the first."""
    first, *rest = names or [""]
    parent = "" if "/" in first else first.rpartition(".")[0]
    short_names = [name.removeprefix(parent) if parent and name.startswith(f"{parent}.") else name
             for name in rest[: MAX_PRINTED_NAMES - 1]]  # fmt: skip
    suffix = f" … and {len(rest) + 1 - MAX_PRINTED_NAMES} more" if len(rest) >= MAX_PRINTED_NAMES else ""
    return ", ".join([first, *short_names]) + suffix


def make_names_cell(name: str) -> Callable[[Row], str]:
    """Return a function that formats a row's names in the column `name`."""
    return lambda row: format_names(row[f"{name}_names"])


MODULE_NAMES = make_names_cell("modules")


def _make_row(forms: Sequence[LayerGraph], requested: Sequence[int], region: Region) -> Row:
    row: Row = {}
    present_forms = []
    for position, k in enumerate(requested):
        name = _choose_letter(position)
        row[f"{name}_names"] = _list_names(forms, region, k)
        row[name] = " ".join(row[f"{name}_names"])
        row[f"parameters_{name}"] = region.sum_added(forms, k) or None
        present_forms += [k] if row[name] else []
    last_layer = next(
        (forms[k].layers[region.members[k][-1]] for k in reversed(requested) if region.members[k]), Layer()
    )
    # A graph has each operation in its place; a module with submodules has all its own ones in one place.
    order = sorted(range(len(forms)), key=lambda k: forms[k].form != NODES)
    form = next((k for k in order if region.members[k] and forms[k].form != LAYERS), None)
    flops = sum(layer.flops or 0 for layer in region.list_layers(forms, form)) if form is not None else 0
    row["output"] = format_shape(last_layer.outputs[0]) if last_layer.outputs else ""
    row["flops"] = flops or None
    row["bytes"] = count_activation_bytes(last_layer)
    row["remark"] = _describe_change(forms, present_forms, requested[-1], region)
    return row


def _list_names(forms: Sequence[LayerGraph], region: Region, form: int) -> list[str]:
    """Return the region's names in the form, quantisation last, or (model) for the model's own code alone."""
    layers = sorted(
        (forms[form].layers[i] for i in region.list_members(form)), key=lambda layer: layer.type in QUANTISE_OPERATORS
    )
    names = [layer.name or WHOLE_MODEL for layer in layers]
    if names or forms[form].form != MODULES:
        return names
    graphs = (k for k, each in enumerate(forms) if each.form == NODES)
    return [WHOLE_MODEL] if any(forms[k].layers[i].modules == ("",) for k in graphs for i in region.members[k]) else []


def _describe_change(forms: Sequence[LayerGraph], holders: Sequence[int], last: int, region: Region) -> str:
    """Describe fusions, folded batch norms and layers in one form only; `holders` are the forms with the region."""
    before, after = ([forms[k].layers[i] for i in region.list_members(k)] for k in (holders[0], holders[-1]))
    if len(holders) == 1:
        if all(layer.moves for layer in after):
            return "conversion"
        if all(layer.skipped for layer in after):
            return _choose_remark(after[0])
        is_known = forms[holders[0]].form != LAYERS or any(
            region.members[k] for k, f in enumerate(forms) if f.form == NODES
        )
        return "nothing runs for it" if is_known and holders[0] != last else "counterpart unknown"
    remarks = []
    norms = sum(map(is_norm, before))
    if norms and not any(map(is_norm, after)):
        remarks.append("batch norm folded")
    if len(after) == 1 and len(before) - norms > 1:
        remarks.append(f"{len(before) - norms} fused into one")
    if last not in holders:
        remarks.append("nothing runs for it")
    return ", ".join(remarks)


def describe_coverage(forms: Sequence[LayerGraph], link: align.Link) -> str:
    """Describe the evidence for the upper form's counterparts, and the number of unaligned layers."""
    upper, lower = forms[link.upper], forms[link.lower]
    total, counts = sum(not layer.skipped for layer in upper.layers), Counter(link.evidence.values())
    unaligned = total - counts.total()
    if not total:
        return ""
    phrases = {BY_NAME: "by name", BY_FLOW: "by what flows between those", BY_CONSTANT: "computed before the first run"}
    shares = [f"{counts[evidence]:,} {text}" for evidence, text in phrases.items() if counts[evidence]]
    shares += [f"{unaligned:,} unaligned ({unaligned / total:.1%})"] if unaligned else []
    return f"{upper.library} aligned with {lower.library}, {total:,} in all: {', '.join(shares)}."


def describe_conversions(forms: Sequence[LayerGraph], requested: Sequence[int]) -> Table:
    """Build a row per conversion layer of the engines: its neighbours, and both types and layouts."""
    rows: list[Row] = []
    for k in requested:
        form = forms[k]
        writers = {port.name: layer for layer in form.layers for port in layer.outputs}
        conversions = [layer for layer in form.layers if form.form == LAYERS and layer.moves and not layer.skipped]
        rows += [_make_conversion_row(form, layer, writers) for layer in conversions]
    columns = (
        Column("engine", "whose conversion it is", kind=TEXT, identity=True),
        Column("layer", "the conversion itself", kind=TEXT, rank=3),
        Column("writer", "who wrote the tensor", kind=TEXT, title="from"),
        Column("reader", "who reads it", kind=TEXT, title="to"),
        Column("before", "type and layout that it reads", kind=TEXT, rank=1),
        Column("after", "type and layout that it writes", kind=TEXT),
        Column("bytes", "bytes that it writes", "B", COUNT, rank=2),
    )
    return CONVERSIONS.build(columns, rows)


def _make_conversion_row(form: LayerGraph, layer: Layer, writers: dict[str, Layer]) -> Row:
    inputs, outputs = layer.inputs[:1], layer.outputs[:1]
    writer = writers.get(inputs[0].name) if inputs else None
    readers = [each.name for each in form.layers for port in each.inputs if outputs and port.name == outputs[0].name]
    before = writer.outputs[0] if writer and writer.outputs else inputs[0] if inputs else Port("")
    return {
        "engine": form.library, "layer": layer.name, "writer": writer.name if writer else before.name,
        "reader": ", ".join(readers) or "output", "before": _format_type(before),
        "after": _format_type(outputs[0]) if outputs else "", "bytes": count_activation_bytes(layer),
    }  # fmt: skip


def _format_type(port: Port) -> str:
    return " ".join(filter(None, (port.dtype, port.format)))
