"""Layers of an engine against a reference's, and where the error comes from, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dyno.analysis.inside.tables import MODEL, names_cell
from dyno.analysis.numerics import sentences
from dyno.analysis.numerics.module_outputs import nodes_of
from dyno.analysis.presentation.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.worker.facts.job import Difference, Layer, LayerError, LayerErrors, LayerGraph

ORDERS = ("graph", "error")
LAYER_ERRORS = TableKind("layer-errors", "Layers against the reference", "How far every layer's output is from the "
                         "reference's, and what of that the layer adds itself.",
                         command="dyno agree --layers")  # fmt: skip
FINDINGS = TableKind("layer-findings", "Where the error comes from", "The first layer that disagrees, those that "
                     "make most of the error, and whether the engine without marks confirms it.",
                     command="dyno agree --layers")  # fmt: skip


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


def layers(compared: Sequence[EngineComparison], order: str, top: int) -> Table:
    """Build a row for each compared tensor: in the graph's order, or by `error`, the largest own error first.

    Of more than `top` tensors (0: all), only those with the largest own errors, the first that disagrees and the
    suspects have rows.
    """
    rows = [row for each in compared for row in _build_rows(each, order, top)]
    return LAYER_ERRORS.of(COLUMNS, rows, group=("engine",), printed=PRINTED)


def _build_rows(each: EngineComparison, order: str, top: int) -> list[Row]:
    layers, nodes = each.errors.layers, dict(nodes_of(each.graph))
    first = sentences.first_divergence(layers, each.limit)
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


def findings(compared: Sequence[EngineComparison], rtol: float, atol: float) -> Table:
    """Build a row for each engine, with the finding in sentences below."""
    rows, notes = [], list[str]()
    for each in compared:
        labels = _label_tensors(each)
        lines = sentences.of(each.errors, each.limit, each.precision, labels)
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
    suspects = sentences.layers_of(result.suspects, labels)
    compared = sentences.layers_of((layer.tensor for layer in result.layers), labels)
    first = sentences.first_divergence(result.layers, limit)
    tested = {
        f"{name}_error": finite(apart.error) if apart else None for name, apart in _list_differences(result).items()
    }
    return {
        "engine": each.name, "reference": each.reference, "precision": each.precision, "limit": limit,
        "layers": len(compared), "runs": result.runs, "parts": result.parts, "unmatched": result.unmatched,
        "mismatched": result.mismatched, "reference_layers": result.reference_layers,
        "close": 100 * result.unmodified.close if result.unmodified else None, **tested,
        "first": sentences.label(first.tensor, labels) if first else "",
        "suspect_count": len(suspects) if sentences.verdict(result, limit) else None,
        "suspects": ", ".join(suspects),
        "boundary": " to ".join(sentences.label(name, labels) if name else "end" for name in result.boundary),
        "verdict": sentences.verdict(result, limit),
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
