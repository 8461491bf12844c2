"""Tables of an engine's layer errors against a reference, and of the causes of its output error."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dyno.formatting import format_count, format_number
from dyno.layers import align
from dyno.layers.align import Region
from dyno.layers.tables import MODULE_NAMES, QUANTISE_OPERATORS, WHOLE_MODEL
from dyno.report.tables import TableKind
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.worker.facts.job import Difference, Layer, LayerError, LayerErrors, LayerGraph, Port

# Matching of a module's calls with a graph's tensors.

ModuleCall = tuple[str, int, str]  # name of a submodule, index of its call, name of the graph's tensor


def list_tensors(module: LayerGraph, graph: LayerGraph) -> list[ModuleCall]:
    """Return the last call of each region with the region's last tensor, if their shapes match.

    A module with submodules counts only if its own code computes the tensor (such as a sum): no submodule reads it.
    """
    forms = (module, graph)
    link = align.link_layers(forms, 0, 1)
    calls, readers = module.count_calls(), _find_readers(graph.layers)
    by_tensor: dict[str, ModuleCall] = {}
    for region in align.find_regions(forms, [link]):
        tensor = _find_last_tensor(forms, region)
        call = _find_result_call(module, link, region, tensor, readers) if tensor is not None else None
        if call is not None and tensor is not None:
            by_tensor.setdefault(tensor.name, (*calls[call], tensor.name))
    return [*by_tensor.values()]


def _find_readers(layers: Sequence[Layer]) -> dict[str, set[str]]:
    """Return the modules of each tensor's readers, looking through quantisation nodes."""
    readers: dict[str, set[str]] = defaultdict(set)
    for layer in reversed(layers):
        later_modules = (
            [name for port in layer.outputs for name in readers[port.name]] if layer.type in QUANTISE_OPERATORS else ()
        )
        for port in layer.inputs:
            readers[port.name].update(layer.modules, later_modules)
    return readers


def _find_last_tensor(forms: Sequence[LayerGraph], region: Region) -> Port | None:
    """Return the region's only unread tensor, ignoring quantisation nodes; None unless there is exactly one."""
    nodes = [forms[1].layers[k] for k in region.members[1]]
    nodes = [node for node in nodes if node.type not in QUANTISE_OPERATORS]
    read_names = {port.name for node in nodes for port in node.inputs}
    outputs = [port for node in nodes for port in node.outputs[:1] if port.name not in read_names]
    return outputs[0] if len(outputs) == 1 else None


def _find_result_call(
    module: LayerGraph, link: align.Link, region: Region, tensor: Port, readers: Mapping[str, set[str]]
) -> int | None:
    """Return the index of the region's last call if it computes the tensor `tensor` itself, else None."""
    calls = [k for k in region.list_members(0) if not module.layers[k].skipped and module.layers[k].outputs]
    if not calls or module.layers[calls[-1]].outputs[0].shape != tensor.shape:
        return None
    call, name = calls[-1], module.layers[calls[-1]].name
    is_outer = call in link.outer  # its own operators may not come last
    is_read = any(reader == name or reader.startswith(f"{name}." if name else "") for reader in readers[tensor.name])
    return None if is_outer and is_read else call


# Findings from an engine's layer errors, as sentences.

MIN_COMPARED_SHARE = 0.5  # a smaller compared share of the reference's layers is reported
# remaining shares below which an error counts as fallen, or as fallen in part
FALLEN_SHARE, PARTLY_FALLEN_SHARE = 0.5, 0.8
MIN_MENTIONED_SHARE = 0.1  # smaller shares of the remaining error aren't mentioned
MAX_SUSPECTS_NAMED = 4  # suspects named in a sentence


@dataclass(frozen=True)
class EngineComparison:
    """Comparison of an engine with the reference. `graph` holds the engine's layers, `errors` their errors. Outputs
    agree up to an error of `limit`, the tolerance of `precision`."""

    name: str
    reference: str
    graph: LayerGraph
    errors: LayerErrors
    precision: str
    limit: float

    @cached_property
    def nodes(self) -> dict[str, Layer]:
        """Node of the graph by output tensor."""
        return {port.name: layer for layer in self.graph.layers for port in layer.outputs}

    @cached_property
    def first(self) -> LayerError | None:
        """First layer, in the graph's order, with an output error above the limit; None if all agree."""
        return next((layer for layer in self.errors.layers if not layer.total.error <= self.limit), None)

    @property
    def agrees(self) -> bool:
        """Whether the outputs of the unmodified engine are within the limit."""
        return self.errors.unmodified is not None and self.errors.unmodified.error <= self.limit

    @cached_property
    def compared(self) -> list[str]:
        """Names of the compared layers."""
        return self.name_layers(layer.tensor for layer in self.errors.layers)

    @cached_property
    def suspects(self) -> list[str]:
        """Names of the few layers that make most of the error."""
        return self.name_layers(self.errors.suspects)

    def name_layer(self, tensor: str) -> str:
        """Return the name of the tensor's layer: its node and modules, or the tensor's name without a node."""
        node = self.nodes.get(tensor)
        if not tensor or node is None:
            return tensor
        names = [name or WHOLE_MODEL for name in node.modules]
        return f"{node.name} ({', '.join(names)})" if names else node.name

    def name_layers(self, tensors: Iterable[str]) -> list[str]:
        """Return the names of the tensors' layers in order, each layer once."""
        return [*dict.fromkeys(map(self.name_layer, tensors))]

    @property
    def verdict(self) -> str:
        """Result of the test with the graph cut around the suspects alone; "" without suspects."""
        errors = self.errors
        if errors.unmodified is None or errors.cut is None or errors.substituted is None:
            return "not tested" if errors.suspects else ""
        unmodified, cut, substituted = errors.unmodified.error, errors.cut.error, errors.substituted.error
        if cut <= self.limit if math.isinf(unmodified) else _is_gone(unmodified, cut, self.limit):
            return "vanishes when the graph is cut there"
        if _is_gone(cut, substituted, self.limit):
            return "confirmed"
        return "confirmed in part" if substituted < PARTLY_FALLEN_SHARE * cut else "not confirmed"

    def sentences(self) -> Iterator[str]:
        """Yield sentences: agreement of outputs, first divergence, suspects, and their test without marked tensors."""
        runs, layers = format_count(self.errors.runs, "run"), format_count(len(self.compared), "layer")
        parts = f", marked in {self.errors.parts} parts" if self.errors.parts > 1 else ""
        size = _describe_difference(self.errors.unmodified)
        yield (
            f"outputs {'agree' if self.agrees else 'disagree'}: {size} ({self.precision} agrees up to {self.limit:g}); "
            f"{runs}, {layers} compared{parts}."
        )
        yield from self._describe_left_out()
        yield from self._describe_nonfinite()
        yield from self._describe_first()
        yield from self._describe_border()
        if self.suspects:
            yield self._describe_suspects()
            yield from self._describe_retest()

    def _describe_left_out(self) -> Iterator[str]:
        count, total, mismatched = len(self.errors.layers), self.errors.reference_layers, self.errors.mismatched
        if count < MIN_COMPARED_SHARE * total:
            verb = "has" if count == 1 else "have"
            yield (
                f"only {count:,} of the reference's {format_count(total, 'tensor')} {verb} a counterpart; what lies "
                "between two of them counts as the later one's own."
            )
        if mismatched:
            differ, them = ("it differs", "it") if mismatched == 1 else ("they differ", "them")
            yield (
                f"{format_count(mismatched, 'tensor')} left out: {differ} from the reference, but what reads {them} "
                f"is right, so the reference has another quantity there."
            )

    def _describe_nonfinite(self) -> Iterator[str]:
        reference = next((layer for layer in self.errors.layers if layer.total.reference_nonfinite), None)
        if reference is not None:
            count = f"{reference.total.reference_nonfinite:,} values"
            yield f"the reference itself has NaN or infinity from {self.name_layer(reference.tensor)} on: {count}."
        engine = next((layer for layer in self.errors.layers if layer.total.nonfinite), None)
        if engine is not None:
            origin = "on the reference's values too" if engine.own.nonfinite else "but not on the reference's values"
            count = f"{engine.total.nonfinite:,} values"
            yield f"first layer with NaN or infinity: {self.name_layer(engine.tensor)}, {count}, {origin}."

    def _describe_first(self) -> Iterator[str]:
        first = self.first
        if first is None:
            if not self.agrees:
                yield "with the layers' outputs marked, every layer agrees."
            return
        before = max((layer.total.error for layer in self.errors.layers if layer.tensor in first.reads), default=0.0)
        own_error, total = first.own.error, first.total.error
        origin = (
            "made here"
            if not math.isfinite(own_error) or own_error > FALLEN_SHARE * total
            else "added up over the layers before"
        )
        deviation = f"off by {_format_error(total)}" if math.isfinite(total) else "not finite"
        yield (
            f"first layer that disagrees: {self.name_layer(first.tensor)}, {deviation}; its own error is "
            f"{_format_error(own_error)}, that of its inputs {_format_error(before)}: {origin}."
        )
        if self.agrees:
            yield "the outputs of the unmodified engine agree all the same."

    def _describe_border(self) -> Iterator[str]:
        if not self.errors.boundary:
            return
        before, after = map(self.name_layer, self.errors.boundary)
        before_text = f"the one ending at {before} agrees" if before else "even the first layer's disagrees"
        after_text = f"the one ending at {after} doesn't" if after else "the whole network's doesn't"
        yield (
            "the error vanishes when tensors are marked. Of graphs cut off after one layer, without other marks, "
            f"{before_text}, {after_text}: look at what is fused there."
        )

    def _describe_suspects(self) -> str:
        effects = {layer.tensor: layer.effect or 0.0 for layer in self.errors.layers}
        total = sum(effect**2 for effect in effects.values())
        names = ", ".join(self.suspects[:MAX_SUSPECTS_NAMED])
        rest = f" and {len(self.suspects) - MAX_SUSPECTS_NAMED} more" if len(self.suspects) > MAX_SUSPECTS_NAMED else ""
        subject = f"{format_count(len(self.suspects), 'layer')} of {len(self.compared):,}"
        if not total or not math.isfinite(total):
            return f"suspected: {subject}, {names}{rest}."
        share = sum(effects[name] ** 2 for name in self.errors.suspects) / total
        verb = "makes" if len(self.suspects) == 1 else "make"
        return f"{subject} {verb} {share:.0%} of the error that layers add by themselves: {names}{rest}."

    def _describe_retest(self) -> Iterator[str]:
        cut, substituted = self.errors.cut, self.errors.substituted
        if substituted is None or cut is None:
            yield "not tested again: the reference has no graph of these layers to replace them."
            return
        phrase = "its place" if len(self.suspects) == 1 else "their place"
        yield (
            f"{self.verdict}: with no tensor marked and the reference in {phrase}, the outputs are "
            f"{_describe_difference(substituted)}; with the graph only cut there, {_describe_difference(cut)}."
        )
        other_layers = [e for e in self.errors.layers if e.tensor not in self.errors.suspects and e.effect is not None]
        peak = max(other_layers, key=lambda layer: layer.effect or 0.0, default=None)
        rest = substituted.error  # outputs disagree even without the suspects
        if peak is not None and self.limit < rest < math.inf and (peak.effect or 0.0) >= MIN_MENTIONED_SHARE * rest:
            yield (
                f"the outputs still disagree: of the other layers, {self.name_layer(peak.tensor)} contributes most, "
                f"{_format_error(peak.effect or 0.0)} of their size."
            )


def _describe_difference(difference: Difference | None) -> str:
    if difference is None:
        return "of another shape"
    finite = math.isfinite(difference.error)
    return f"off by {_format_error(difference.error)} of their size" if finite else "not finite"


def _format_error(error: float) -> str:
    return format_number(error, 2) if math.isfinite(error) else "infinite"


def _is_gone(before: float, after: float, limit: float) -> bool:
    """Return whether an error has more than halved, or fallen by over 20 % to within the limit."""
    return after < FALLEN_SHARE * before or (after <= limit < before and after < PARTLY_FALLEN_SHARE * before)


# The comparison of each engine's layers as tables.

ORDERS = ("graph", "error")
LAYER_ERRORS = TableKind("layer-errors", "Layers against the reference", "Error of each layer's output against the "
    "reference's, and the part that the layer adds itself.",
                         command="dyno diff --layers")  # fmt: skip
FINDINGS = TableKind("layer-findings", "Where the error comes from", "The first layer that disagrees, the layers that "
    "add most of the error, and whether the engine without marks confirms it.",
                     command="dyno diff --layers")  # fmt: skip


def list_compared_layers(compared: Sequence[EngineComparison], order: str, top: int) -> Table:
    """Build a row per compared tensor, in graph order, or by `error` with the largest own error first.

    Rows are the `top` largest own errors (0: all), the first tensor that disagrees, and the suspects.
    """
    rows = [row for each in compared for row in _build_rows(each, order, top)]
    return LAYER_ERRORS.build(COLUMNS, rows, group=("engine",), printed=PRINTED_COLUMNS)


def _build_rows(engine: EngineComparison, order: str, top: int) -> list[Row]:
    layers = engine.errors.layers
    largest = sorted(layers, key=lambda layer: -layer.own.error)
    names = {*engine.errors.suspects, *(layer.tensor for layer in largest[: top or None])}
    series = layers if order == "graph" else largest
    errors = {layer.tensor: layer.total.error for layer in layers}
    total = sum((layer.effect or 0.0) ** 2 for layer in layers)
    return [
        _build_row(engine, layer, errors, total) for layer in series if layer.tensor in names or layer is engine.first
    ]


def _build_row(engine: EngineComparison, layer: LayerError, errors: Mapping[str, float], total: float) -> Row:
    node, is_suspect = engine.nodes.get(layer.tensor, Layer()), layer.tensor in engine.errors.suspects
    input_error = max((errors.get(name, 0.0) for name in layer.reads), default=0.0)
    names = [name or WHOLE_MODEL for name in node.modules] or [node.name]
    share = 100 * layer.effect**2 / total if layer.effect is not None and total and math.isfinite(total) else None
    remarks = {
        "first that disagrees": layer is engine.first,
        "suspect": is_suspect,
        f"{layer.total.nonfinite:,} values not finite": layer.total.nonfinite,
        "the reference is not finite": layer.total.reference_nonfinite,
    }
    return {
        "engine": engine.name, "reference": engine.reference, "modules": " ".join(names), "modules_names": names,
        "layer": node.name, "type": node.type, "tensor": layer.tensor, "error": keep_finite(layer.total.error),
        "own_error": keep_finite(layer.own.error),
        "growth": keep_finite(layer.total.error / input_error) if input_error else None,
        "effect": keep_finite(layer.effect), "close": 100 * layer.total.close, "own_close": 100 * layer.own.close,
        "max_abs": layer.total.max_abs, "max_rel": layer.total.max_rel, "nonfinite": layer.total.nonfinite,
        "reference_nonfinite": layer.total.reference_nonfinite, "share": share,
        "suspect": "yes" if is_suspect else "no", "remark": ", ".join(text for text, holds in remarks.items() if holds),
    }  # fmt: skip


def keep_finite(value: float | None) -> float | None:
    """Return a finite value, else None; a separate column counts the non-finite values."""
    return value if value is not None and math.isfinite(value) else None


def list_findings(compared: Sequence[EngineComparison], rtol: float, atol: float) -> Table:
    """Build a row per engine, with its findings as notes below the table."""
    notes = [f"{each.name}: {line}" if len(compared) > 1 else line for each in compared for line in each.sentences()]
    notes.append(
        f"error: |a - b| / |b| in the 2-norm, of the input where it is largest; close: |a - b| <= {atol:g} + {rtol:g} "
        "|b|; own error: the layer alone reads the reference's values; on the outputs: what this alone does to the "
        "network's outputs."
    )
    return FINDINGS.build(FINDING_COLUMNS, [*map(_build_finding, compared)], notes=tuple(notes), printed=SEARCH_COLUMNS)


def _build_finding(engine: EngineComparison) -> Row:
    errors = engine.errors
    cases = {"unmodified": errors.unmodified, "marked": errors.marked, "cut": errors.cut,
              "substituted": errors.substituted}  # fmt: skip
    return {
        "engine": engine.name, "reference": engine.reference, "precision": engine.precision, "limit": engine.limit,
        "layers": len(engine.compared), "runs": errors.runs, "parts": errors.parts, "unmatched": errors.unmatched,
        "mismatched": errors.mismatched, "reference_layers": errors.reference_layers,
        "close": 100 * errors.unmodified.close if errors.unmodified else None,
        **{f"{key}_error": keep_finite(case.error) if case else None for key, case in cases.items()},
        "first": engine.name_layer(engine.first.tensor) if engine.first else "",
        "suspect_count": len(engine.suspects) if engine.verdict else None, "suspects": ", ".join(engine.suspects),
        "boundary": " to ".join(engine.name_layer(key) or "end" for key in errors.boundary), "verdict": engine.verdict,
    }  # fmt: skip


COLUMNS = (
    Column("engine", "the engine that is compared", kind=TEXT, identity=True),
    Column("reference", "what it is compared with", kind=TEXT),
    Column("modules", "PyTorch modules that the layer came from, else its node", kind=TEXT, cell=MODULE_NAMES),
    Column("layer", "node of the graph", kind=TEXT, rank=6),
    Column("type", "operator", kind=TEXT, rank=3),
    Column("tensor", "the output that is compared", kind=TEXT),
    Column("error", "error of the layer's output in the engine"),
    Column("own_error", "error when the layer reads the reference's values", title="own error"),
    Column("growth", "error as a multiple of the largest error among its inputs", rank=5),
    Column("effect", "error of the network's outputs caused by this layer's own error alone", title="on the outputs",
           rank=1),
    Column("share", "its square as a share of the sum over all layers", "%", PERCENT, title="share, %", rank=2),
    Column("close", "share of values that are close", "%", PERCENT, title="close, %", rank=4),
    Column("own_close", "share of values that are close when the layer reads the reference's values", "%", PERCENT),
    Column("max_abs", "largest |a - b|"),
    Column("max_rel", "largest |a - b| / |b|"),
    Column("nonfinite", "values that are NaN or infinite where the reference's are not", kind=COUNT),
    Column("reference_nonfinite", "values of the reference that are NaN or infinite", kind=COUNT),
    Column("suspect", "yes for the few layers that make most of the error", kind=TEXT),
    Column("remark", "further remarks", kind=TEXT),
)  # fmt: skip
PRINTED_COLUMNS = ("engine", "modules", "layer", "type", "error", "own_error", "growth", "effect", "share", "close",
                   "remark")  # fmt: skip
FINDING_COLUMNS = (
    Column("engine", "the engine that is compared", kind=TEXT),
    Column("reference", "what it is compared with", kind=TEXT, title="against", rank=6),
    Column("precision", "whose tolerance decides", kind=TEXT, rank=5),
    Column("limit", "largest error at which outputs agree", rank=4),
    Column("layers", "compared layers", kind=COUNT, rank=7),
    Column("runs", "compared runs, of one batch each", kind=COUNT, rank=8),
    Column("parts", "pieces in which the marked graph was run", kind=COUNT, rank=9),
    Column("unmatched", "tensors of the engine's graph without a counterpart", kind=COUNT, rank=9),
    Column("reference_layers", "tensors of the reference", kind=COUNT),
    Column("mismatched", "tensors left out: another quantity in the reference", kind=COUNT),
    Column("close", "share of the outputs' values that are close", "%", PERCENT, title="close, %", rank=3),
    Column("unmodified_error", "error of the outputs of the unmodified engine", title="outputs"),
    Column("marked_error", "error of the outputs with tensors marked", title="marked", rank=2),
    Column("cut_error", "error of the outputs when the graph is cut around the suspects", title="cut", rank=1),
    Column("substituted_error", "error of the outputs with the reference in the suspects' place", title="substituted",
           rank=1),
    Column("verdict", "whether the engine without marks confirms the suspects", kind=TEXT),
    Column("first", "first layer whose output is off by more than the limit", kind=TEXT, title="first that disagrees"),
    Column("suspect_count", "how many layers make most of the error", kind=COUNT, title="suspects"),
    Column("suspects", "these layers", kind=TEXT),
    Column("boundary", "layers between which the error begins where marking hides it", kind=TEXT),
)  # fmt: skip
SEARCH_COLUMNS = ("engine", "reference", "precision", "limit", "layers", "close", "unmodified_error", "marked_error",
                  "cut_error", "substituted_error", "suspect_count", "verdict", "first")  # fmt: skip
