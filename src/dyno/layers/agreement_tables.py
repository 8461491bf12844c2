"""Layers of an engine against a reference's, and where the error comes from, as tables."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dyno.formatting import counting, significant
from dyno.layers import align
from dyno.layers.align import Region
from dyno.layers.tables import MODEL, QUANTISES, names_cell
from dyno.report.tables import TableKind
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.worker.facts.job import Difference, Layer, LayerError, LayerErrors, LayerGraph, Port

# What the layer errors of an engine say, in sentences.

FEW = 0.5  # of the reference's layers: where fewer are compared a sentence says so
HALF, MOSTLY = 0.5, 0.8  # of what it was: an error that falls below the first has fallen, below the second in part
NOTEWORTHY = 0.1  # of the error that is left: a layer that does less to the outputs isn't worth a sentence
NAMED = 4  # suspects that a sentence names
Labels = Mapping[str, str]  # the layer's name of each tensor


def first_divergence(layers: Sequence[LayerError], limit: float) -> LayerError | None:
    """Return the first layer, in the graph's order, whose output error exceeds the limit; None without one."""
    return next((layer for layer in layers if not layer.total.error <= limit), None)


def label_part(tensor: str, labels: Labels) -> str:
    """Return the layer that writes the tensor, else the tensor's own name."""
    return labels.get(tensor, tensor)


def layers_of(tensors: Iterable[str], labels: Labels) -> list[str]:
    """Return the layers that write the tensors, in order; one with several outputs is one layer."""
    return [*dict.fromkeys(label_part(tensor, labels) for tensor in tensors)]


def describe_agreement(result: LayerErrors, limit: float, precision: str, labels: Labels) -> list[str]:
    """Describe whether outputs agree, where they diverge first, which layers cause it, and whether a test confirms it.

    The test runs the engine without marked outputs.
    """
    return [
        _describe_outputs(result, limit, precision, labels),
        *_describe_few(result),
        *_describe_mismatched(result),
        *_not_finite(result.layers, labels),
        *_describe_first(result, limit, labels),
        *_describe_border(result, labels),
        *_describe_suspects(result, labels),
        *_describe_retest(result, limit, labels),
    ]


def _describe_outputs(result: LayerErrors, limit: float, precision: str, labels: Labels) -> str:
    compared = layers_of((layer.tensor for layer in result.layers), labels)
    runs, layers = counting(result.runs, "run"), counting(len(compared), "layer")
    parts = f", marked in {result.parts} parts" if result.parts > 1 else ""
    agrees = "agree" if result.unmodified is not None and result.unmodified.error <= limit else "disagree"
    size = _describe_difference(result.unmodified)
    return f"outputs {agrees}: {size} ({precision} agrees up to {limit:g}); {runs}, {layers} compared{parts}."


def _describe_few(result: LayerErrors) -> list[str]:
    found, theirs = len(result.layers), result.reference_layers
    if found >= FEW * theirs:
        return []
    have = "has" if found == 1 else "have"
    return [f"only {found:,} of the reference's {counting(theirs, 'tensor')} {have} a counterpart; what lies between "
            "two of them counts as the later one's own."]  # fmt: skip


def _describe_mismatched(result: LayerErrors) -> list[str]:
    if not result.mismatched:
        return []
    differ, them = ("it differs", "it") if result.mismatched == 1 else ("they differ", "them")
    return [f"{counting(result.mismatched, 'tensor')} left out: {differ} from the reference, but what reads {them} is "
            "right, so the reference has something else there."]  # fmt: skip


def _describe_difference(difference: Difference | None) -> str:
    if difference is None:
        return "of another shape"
    return (
        f"off by {_format_error(difference.error)} of their size" if math.isfinite(difference.error) else "not finite"
    )


def _format_error(error: float) -> str:
    return significant(error, 2) if math.isfinite(error) else "infinite"


def _not_finite(layers: Sequence[LayerError], labels: Labels) -> list[str]:
    lines = []
    theirs = next((layer for layer in layers if layer.total.reference_nonfinite), None)
    if theirs is not None:
        count = f"{theirs.total.reference_nonfinite:,} values"
        lines.append(f"the reference itself has NaN or infinity from {label_part(theirs.tensor, labels)} on: {count}.")
    own = next((layer for layer in layers if layer.total.nonfinite), None)
    if own is not None:
        made = "on the reference's values too" if own.own.nonfinite else "but not on the reference's values"
        lines.append(f"first layer with NaN or infinity: {label_part(own.tensor, labels)}, "
                     f"{own.total.nonfinite:,} values, {made}.")  # fmt: skip
    return lines


def _describe_first(result: LayerErrors, limit: float, labels: Labels) -> list[str]:
    first = first_divergence(result.layers, limit)
    agrees = result.unmodified is not None and result.unmodified.error <= limit
    if first is None:
        return [] if agrees else ["with the layers' outputs marked, every layer agrees."]
    before = max((layer.total.error for layer in result.layers if layer.tensor in first.reads), default=0.0)
    own = first.own.error
    made = not math.isfinite(own) or own > HALF * first.total.error
    whose = "made here" if made else "added up over the layers before"
    far = f"off by {_format_error(first.total.error)}" if math.isfinite(first.total.error) else "not finite"
    line = (f"first layer that disagrees: {label_part(first.tensor, labels)}, {far}; "
            f"its own error is {_format_error(own)}, that of its inputs {_format_error(before)}: {whose}.")  # fmt: skip
    return [line, *(["the outputs of the unmodified engine agree all the same."] if agrees else [])]


def _describe_border(result: LayerErrors, labels: Labels) -> list[str]:
    if not result.boundary:
        return []
    before, after = result.boundary
    good = f"the one that ends at {label_part(before, labels)} agrees" if before else "even the first layer's disagrees"
    bad = f"the one that ends at {label_part(after, labels)} doesn't" if after else "the whole network's doesn't"
    return ["the error vanishes when tensors are marked. Of graphs that end at a layer, with nothing else marked, "
            f"{good}, {bad}: look at what is fused there."]  # fmt: skip


def _describe_suspects(result: LayerErrors, labels: Labels) -> list[str]:
    if not result.suspects:
        return []
    effects = {layer.tensor: layer.effect or 0.0 for layer in result.layers}
    total = sum(effect**2 for effect in effects.values())
    suspects, every = layers_of(result.suspects, labels), layers_of(effects, labels)
    listed = ", ".join(suspects[:NAMED])
    more = f" and {len(suspects) - NAMED} more" if len(suspects) > NAMED else ""
    which = f"{counting(len(suspects), 'layer')} of {len(every):,}"
    if not total or not math.isfinite(total):
        return [f"suspected: {which}, {listed}{more}."]
    share = sum(effects[name] ** 2 for name in result.suspects) / total
    makes = "makes" if len(suspects) == 1 else "make"
    return [f"{which} {makes} {share:.0%} of the error that layers add by themselves: {listed}{more}."]


def _describe_retest(result: LayerErrors, limit: float, labels: Labels) -> list[str]:
    if not result.suspects:
        return []
    if result.substituted is None or result.cut is None:
        return ["not tested again: the reference has no graph with these layers, to be put in their place."]
    place = "its place" if len(layers_of(result.suspects, labels)) == 1 else "their place"
    line = (f"{judge_agreement(result, limit)}: with no tensor marked and the reference in {place}, the outputs are "
            f"{_describe_difference(result.substituted)}; with the graph only cut there, "
            f"{_describe_difference(result.cut)}.")  # fmt: skip
    return [line, *_describe_rest(result, limit, labels)]


def _describe_rest(result: LayerErrors, limit: float, labels: Labels) -> list[str]:
    """Name the other layer that makes most of the remaining error, where outputs disagree even without the suspects."""
    others = [layer for layer in result.layers if layer.tensor not in result.suspects and layer.effect is not None]
    most = max(others, key=lambda layer: layer.effect or 0.0, default=None)
    left = result.substituted.error if result.substituted else 0.0
    if most is None or not limit < left < math.inf or not (most.effect or 0.0) >= NOTEWORTHY * left:
        return []
    return [f"the outputs disagree even then: of the other layers, {label_part(most.tensor, labels)} "
            f"does most to them, {_format_error(most.effect or 0.0)} of their size."]  # fmt: skip


def judge_agreement(result: LayerErrors, limit: float) -> str:
    """Return whether the engine, cut around the suspects alone, confirms them as the cause; "" where there are none."""
    if result.unmodified is None or result.cut is None or result.substituted is None:
        return "not tested" if result.suspects else ""
    unmodified, cut, substituted = result.unmodified.error, result.cut.error, result.substituted.error
    if cut <= limit if math.isinf(unmodified) else _is_gone(unmodified, cut, limit):
        return "vanishes when the graph is cut there"
    if _is_gone(cut, substituted, limit):
        return "confirmed"
    return "confirmed in part" if substituted < MOSTLY * cut else "not confirmed"


def _is_gone(before: float, after: float, limit: float) -> bool:
    """Return whether an error is more than halved, or now within the limit by more than a hair's breadth."""
    return after < HALF * before or (after <= limit < before and after < MOSTLY * before)


# Which tensor of a graph each call of a module's part became.

ModuleCall = tuple[str, int, str]  # a part's name, which of its calls, and the tensor's name in the graph


def tensors_of(module: LayerGraph, graph: LayerGraph) -> list[ModuleCall]:
    """Return the calls whose result is one tensor of the graph: the last call and tensor of a region, if of one shape.

    A module around others counts where it computes its result itself, such as a sum: then no part of it reads it.
    """
    forms = (module, graph)
    link = align.link_layers(forms, 0, 1)
    numbers, readers = _number_calls(module.layers), _find_readers(graph.layers)
    found: dict[str, ModuleCall] = {}
    for region in align.find_regions(forms, [link]):
        last = _find_last_tensor(forms, region)
        call = _find_result_call(module, link, region, last, readers) if last is not None else None
        if call is not None and last is not None:
            found.setdefault(last.name, (module.layers[call].name, numbers[call], last.name))
    return [*found.values()]


def _find_readers(layers: Sequence[Layer]) -> dict[str, set[str]]:
    """Return the modules of the nodes that read each tensor, behind its quantisation where it is quantised."""
    readers: dict[str, set[str]] = defaultdict(set)
    for layer in reversed(layers):
        behind = [name for port in layer.outputs for name in readers[port.name]] if layer.type in QUANTISES else ()
        for port in layer.inputs:
            readers[port.name].update(layer.modules, behind)
    return readers


def _number_calls(layers: Sequence[Layer]) -> list[int]:
    seen: Counter[str] = Counter()
    numbers = []
    for layer in layers:
        numbers.append(seen[layer.name])
        seen[layer.name] += 1
    return numbers


def _find_last_tensor(forms: Sequence[LayerGraph], region: Region) -> Port | None:
    """Return the only tensor that the nodes write and none reads, quantisation apart; None unless there is just one."""
    nodes = [forms[1].layers[k] for k in region.members[1]]
    nodes = [node for node in nodes if node.type not in QUANTISES]
    read = {port.name for node in nodes for port in node.inputs}
    written = [port for node in nodes for port in node.outputs[:1] if port.name not in read]
    return written[0] if len(written) == 1 else None


def _find_result_call(
    module: LayerGraph, link: align.Link, region: Region, last: Port, readers: Mapping[str, set[str]]
) -> int | None:
    """Return the call whose result the tensor is: the last part's, else that of a module which computes it itself."""
    ran = [k for k in region.shown(0) if not module.layers[k].skipped and module.layers[k].outputs]
    if not ran or module.layers[ran[-1]].outputs[0].shape != last.shape:
        return None
    call, name = ran[-1], module.layers[ran[-1]].name
    around = call in link.outer  # its own operators may not be its last ones
    inside = any(reader == name or reader.startswith(f"{name}." if name else "") for reader in readers[last.name])
    return None if around and inside else call


def nodes_of(graph: LayerGraph) -> Iterator[tuple[str, Layer]]:
    """Return each tensor of the graph with the node that writes it."""
    return ((port.name, layer) for layer in graph.layers for port in layer.outputs)


ORDERS = ("graph", "error")
LAYER_ERRORS = TableKind("layer-errors", "Layers against the reference", "How far every layer's output is from the "
                         "reference's, and what of that the layer adds itself.",
                         command="dyno diff --layers")  # fmt: skip
FINDINGS = TableKind("layer-findings", "Where the error comes from", "The first layer that disagrees, those that "
                     "make most of the error, and whether the engine without marks confirms it.",
                     command="dyno diff --layers")  # fmt: skip


@dataclass(frozen=True)
class EngineComparison:
    """One engine against the reference: their names, the graph with the engine's layers, their errors, and the
    precision that decides, with the largest error at which it agrees."""

    name: str
    reference: str
    graph: LayerGraph
    errors: LayerErrors
    precision: str
    limit: float


def list_compared_layers(compared: Sequence[EngineComparison], order: str, top: int) -> Table:
    """Build a row for each compared tensor: in the graph's order, or by `error`, the largest own error first.

    Of more than `top` tensors (0: all), only those with the largest own errors, the first that disagrees and the
    suspects have rows.
    """
    rows = [row for each in compared for row in _build_rows(each, order, top)]
    return LAYER_ERRORS.of(COLUMNS, rows, group=("engine",), printed=PRINTED)


def _build_rows(each: EngineComparison, order: str, top: int) -> list[Row]:
    layers, nodes = each.errors.layers, dict(nodes_of(each.graph))
    first = first_divergence(layers, each.limit)
    always = {*each.errors.suspects, *([first.tensor] if first else [])}
    largest = sorted(layers, key=lambda layer: -layer.own.error)
    kept = always.union(layer.tensor for layer in largest[: top or None])
    chosen = [layer for layer in (layers if order == "graph" else largest) if layer.tensor in kept]
    errors = {layer.tensor: layer.total.error for layer in layers}
    total = sum((layer.effect or 0.0) ** 2 for layer in layers)
    return [
        _build_row(each, layer, nodes.get(layer.tensor, Layer()), errors, total, layer is first) for layer in chosen
    ]


def _build_row(
    each: EngineComparison, layer: LayerError, node: Layer, errors: Mapping[str, float], total: float, first: bool
) -> Row:
    before = max((errors.get(name, 0.0) for name in layer.reads), default=0.0)
    names = [name or MODEL for name in node.modules] or [node.name]
    share = 100 * layer.effect**2 / total if layer.effect is not None and total and math.isfinite(total) else None
    return {
        "engine": each.name, "reference": each.reference, "modules": " ".join(names), "modules_names": names,
        "layer": node.name, "type": node.type, "tensor": layer.tensor, "error": finite(layer.total.error),
        "own_error": finite(layer.own.error), "growth": finite(layer.total.error / before) if before else None,
        "effect": finite(layer.effect), "close": 100 * layer.total.close, "own_close": 100 * layer.own.close,
        "max_abs": layer.total.max_abs, "max_rel": layer.total.max_rel, "nonfinite": layer.total.nonfinite,
        "reference_nonfinite": layer.total.reference_nonfinite, "share": share,
        "suspect": "yes" if layer.tensor in each.errors.suspects else "no",
        "remark": ", ".join(_list_remarks(each.errors, layer, first)),
    }  # fmt: skip


def _list_remarks(result: LayerErrors, layer: LayerError, first: bool) -> list[str]:
    remarks = ["first that disagrees"] if first else []
    remarks += ["suspect"] if layer.tensor in result.suspects else []
    remarks += [f"{layer.total.nonfinite:,} values not finite"] if layer.total.nonfinite else []
    return remarks + (["the reference is not finite"] if layer.total.reference_nonfinite else [])


def finite(value: float | None) -> float | None:
    """Return the value where it is finite, else None; a separate column counts the values that aren't."""
    return value if value is not None and math.isfinite(value) else None


def list_findings(compared: Sequence[EngineComparison], rtol: float, atol: float) -> Table:
    """Build a row for each engine, with the finding in sentences below."""
    rows, notes = [], list[str]()
    for each in compared:
        labels = _label_tensors(each)
        lines = describe_agreement(each.errors, each.limit, each.precision, labels)
        notes += [f"{each.name}: {line}" if len(compared) > 1 else line for line in lines]
        rows.append(_build_finding(each, labels))
    notes.append(
        f"error: |a - b| / |b| in the 2-norm, of the input where it is largest; close: |a - b| <= {atol:g} + {rtol:g} "
        "|b|; own error: the layer alone reads the reference's values; on the outputs: what this alone does to the "
        "network's outputs."
    )
    return FINDINGS.of(FINDING_COLUMNS, rows, notes=tuple(notes), printed=FOUND)


def _build_finding(each: EngineComparison, labels: Mapping[str, str]) -> Row:
    result, limit = each.errors, each.limit
    suspects = layers_of(result.suspects, labels)
    compared = layers_of((layer.tensor for layer in result.layers), labels)
    first = first_divergence(result.layers, limit)
    tested = {
        f"{name}_error": finite(apart.error) if apart else None for name, apart in _list_differences(result).items()
    }
    return {
        "engine": each.name, "reference": each.reference, "precision": each.precision, "limit": limit,
        "layers": len(compared), "runs": result.runs, "parts": result.parts, "unmatched": result.unmatched,
        "mismatched": result.mismatched, "reference_layers": result.reference_layers,
        "close": 100 * result.unmodified.close if result.unmodified else None, **tested,
        "first": label_part(first.tensor, labels) if first else "",
        "suspect_count": len(suspects) if judge_agreement(result, limit) else None,
        "suspects": ", ".join(suspects),
        "boundary": " to ".join(label_part(name, labels) if name else "end" for name in result.boundary),
        "verdict": judge_agreement(result, limit),
    }  # fmt: skip


def _list_differences(result: LayerErrors) -> dict[str, Difference | None]:
    return {
        "unmodified": result.unmodified,
        "marked": result.marked,
        "cut": result.cut,
        "substituted": result.substituted,
    }


def _label_tensors(each: EngineComparison) -> dict[str, str]:
    """Return the name of each tensor's layer in sentences: its node, and the modules that it came from."""
    labels = {}
    for tensor, node in nodes_of(each.graph):
        names = [name or MODEL for name in node.modules]
        labels[tensor] = f"{node.name} ({', '.join(names)})" if names else node.name
    return labels


COLUMNS = (
    Column("engine", "the engine that is compared", kind=TEXT, identity=True),
    Column("reference", "what it is compared with", kind=TEXT),
    Column("modules", "PyTorch modules that the layer came from, else its node", kind=TEXT, cell=names_cell("modules")),
    Column("layer", "node of the graph", kind=TEXT, rank=6),
    Column("type", "operator", kind=TEXT, rank=3),
    Column("tensor", "the output that is compared", kind=TEXT),
    Column("error", "error of the layer's output in the engine"),
    Column("own_error", "error when the layer reads the reference's values", title="own error"),
    Column("growth", "error as a multiple of the largest error among its inputs", rank=5),
    Column("effect", "error of the network's outputs when only this layer's own error is there", title="on the outputs",
           rank=1),
    Column("share", "square of that as a share of the sum of all squares", "%", PERCENT, title="share, %", rank=2),
    Column("close", "share of values that are close", "%", PERCENT, title="close, %", rank=4),
    Column("own_close", "share of values that are close when the layer reads the reference's values", "%", PERCENT),
    Column("max_abs", "largest |a - b|"),
    Column("max_rel", "largest |a - b| / |b|"),
    Column("nonfinite", "values that are NaN or infinite where the reference's are not", kind=COUNT),
    Column("reference_nonfinite", "values of the reference that are NaN or infinite", kind=COUNT),
    Column("suspect", "yes for the few layers that make most of the error", kind=TEXT),
    Column("remark", "what else is to be said", kind=TEXT),
)  # fmt: skip
PRINTED = ("engine", "modules", "layer", "type", "error", "own_error", "growth", "effect", "share", "close", "remark")
FINDING_COLUMNS = (
    Column("engine", "the engine that is compared", kind=TEXT),
    Column("reference", "what it is compared with", kind=TEXT, title="against", rank=6),
    Column("precision", "whose tolerance decides", kind=TEXT, rank=5),
    Column("limit", "largest error at which outputs agree", rank=4),
    Column("layers", "compared layers", kind=COUNT, rank=7),
    Column("runs", "runs that were compared, of a batch each", kind=COUNT, rank=8),
    Column("parts", "pieces in which the marked graph was run", kind=COUNT, rank=9),
    Column("unmatched", "tensors of the engine's graph without a counterpart", kind=COUNT, rank=9),
    Column("reference_layers", "tensors of the reference", kind=COUNT),
    Column("mismatched", "tensors left out, which are something else in the reference", kind=COUNT),
    Column("close", "share of the outputs' values that are close", "%", PERCENT, title="close, %", rank=3),
    Column("unmodified_error", "error of the outputs of the unmodified engine", title="outputs"),
    Column("marked_error", "error of the outputs with tensors marked", title="marked", rank=2),
    Column("cut_error", "error of the outputs when the graph is cut around the suspects", title="cut", rank=1),
    Column(
        "substituted_error",
        "error of the outputs with the reference in the suspects' place",
        title="substituted",
        rank=1,
    ),
    Column("verdict", "whether the engine without marks confirms the suspects", kind=TEXT),
    Column("first", "first layer whose output is off by more than the limit", kind=TEXT, title="first that disagrees"),
    Column("suspect_count", "how many layers make most of the error", kind=COUNT, title="suspects"),
    Column("suspects", "these layers", kind=TEXT),
    Column("boundary", "layers between which the error begins where marking hides it", kind=TEXT),
)
FOUND = ("engine", "reference", "precision", "limit", "layers", "close", "unmodified_error", "marked_error",
         "cut_error", "substituted_error", "suspect_count", "verdict", "first")  # fmt: skip
