"""How near layers come to what the device can do: arithmetic and bytes against measured ceilings.

The roofline model (Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009): a layer takes at least the
time of its operations at the highest rate of arithmetic, and at least the time of its bytes at the highest rate of
memory. Both rates are measured on the device itself: a matrix product in the layer's type, and a large copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dyno.analysis.inside import align
from dyno.analysis.inside.totals import BYTES
from dyno.analysis.presentation.table import PERCENT, TEXT, Column, Row, Table, TableKind
from dyno.worker.facts.inside import MODULES, Inside, Layer, Port
from dyno.worker.facts.job import CopyRate, PeakOfType

CEILINGS = TableKind("ceilings", "Ceilings", "The highest rates that were measured on this device.",
                     command="dyno profile")  # fmt: skip
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8", "uint8": "int8"}  # of the ceilings
ARITHMETIC, MEMORY = "arithmetic", "memory"
RATES = (
    Column("tflops", "operations in that time, 10¹² a second", "10¹² 1/s", title="TFLOPS", rank=2),
    Column("gb_s", "bytes of weights and tensors in that time, each counted once", "GB/s", title="GB/s", rank=2),
)
COLUMNS = (
    *RATES,
    Column("intensity", "operations for each byte", title="FLOP/B", rank=3),
    Column("reached", "the least time that the ceilings allow, over the time it took", "%", PERCENT,
           title="of the roof, %", rank=1),
    Column("bound", "which ceiling is the nearer one", kind=TEXT, title="bound by", rank=2),
)  # fmt: skip
OF_LATENCY = (
    RATES[0],
    Column("roof_ms", "sum of the least times that the ceilings allow the layers", "ms", title="roof, ms", rank=1),
    Column("reached", "that over the unprofiled latency", "%", PERCENT, title="of the roof, %", rank=1),
)


@dataclass(frozen=True)
class Ceilings:
    """What was measured: matrix products by type, and a copy; `warnings` say what disturbed it."""

    products: Mapping[str, PeakOfType]
    copy: CopyRate
    warnings: tuple[str, ...] = ()

    def table(self) -> Table:
        """A row for each ceiling; a type that the device or PyTorch lacks says why."""
        rows: list[Row] = [
            {"ceiling": f"matrix product, {name}", "tflops": (one.flops_per_s or math.nan) / 1e12,
             "of": f"{one.side} x {one.side}" if one.side else "", "remark": one.missing}
            for name, one in self.products.items()
        ]  # fmt: skip
        size = f"{self.copy.bytes / 1e6:,.0f} MB"
        rows.append({"ceiling": "copy, read and written", "gb_s": self.copy.bytes_per_s / 1e9, "of": size})
        columns = (
            Column("ceiling", "what was measured", kind=TEXT),
            *RATES,
            Column("of", "size of the matrices, or of what was copied", kind=TEXT),
            Column("remark", "why there is none", kind=TEXT),
        )
        note = (
            "Measured by PyTorch on the same device with the same threads, right after the layers. More than 100 % of "
            "the roof is possible: what a cache still holds comes faster than from memory."
        )
        return CEILINGS.of(columns, rows, notes=(note, *self.warnings))


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one layer, and the type of its arithmetic ("": unknown); None for what isn't known."""

    flops: int | None
    bytes: int | None
    kind: str = ""

    def least(self, ceilings: Ceilings) -> tuple[float, str] | None:
        """The least seconds that the ceilings allow, and which one decides; None where that isn't known."""
        if self.flops is None or (self.bytes is None and not self.flops):
            return None
        moving = (self.bytes or 0) / ceilings.copy.bytes_per_s
        if not self.flops:
            return moving, MEMORY
        peak = ceilings.products.get(self.kind)
        if peak is None or not peak.flops_per_s:
            return None
        computing = self.flops / peak.flops_per_s
        return max(moving, computing), ARITHMETIC if computing >= moving else MEMORY


NOTHING_KNOWN = Work(0, None)  # no products, and bytes that nobody knows


@dataclass(frozen=True)
class Rated:
    """The work of each layer of one form, under the ceilings; `flops` are all operations, of whichever layer."""

    work: Sequence[Work]
    ceilings: Ceilings
    flops: int | None = None

    def cells(self, chosen: Collection[int], seconds: float) -> Row:
        """The cells of COLUMNS for these layers together, which took so many seconds.

        Of several, one whose bytes nobody knows counts as none: the roof is the least that is known.
        """
        known_work = [self.work[i] for i in chosen if len(chosen) == 1 or self.work[i] != NOTHING_KNOWN]
        flops, moved = _total(each.flops for each in known_work), _total(each.bytes for each in known_work)
        least = [each.least(self.ceilings) for each in known_work]
        cells: Row = {}
        if not seconds:
            return cells
        if flops:
            cells["tflops"] = flops / seconds / 1e12
        if moved:
            cells |= {"gb_s": moved / seconds / 1e9, "intensity": (flops or 0) / moved if flops is not None else None}
        known = [each for each in least if each is not None]
        if known and len(known) == len(least):
            cells["reached"] = 100 * sum(time for time, _ in known) / seconds
            cells["bound"] = max((ARITHMETIC, MEMORY), key=lambda name: sum(t for t, bound in known if bound == name))
        return cells

    def of_latency(self, chosen: Collection[int], latency: float) -> Row:
        """The cells of OF_LATENCY, for the layers that ran."""
        cells: Row = {"tflops": self.flops / latency / 1e12} if self.flops else {}
        if (reached := self.cells(chosen, latency).get("reached")) is not None:
            cells |= {"roof_ms": 1e3 * latency * reached / 100, "reached": reached}
        return cells


def _total(values: Iterable[int | None]) -> int | None:
    each = [*values]
    return None if None in each else sum(value for value in each if value is not None)


def rated(forms: Sequence[Inside], k: int, graph: int | None, precision: str, ceilings: Ceilings) -> Rated:
    """The work of each layer of form `k`; an engine's operations are those of the nodes of its graph."""
    form = forms[k]
    if form.form == MODULES or graph is None:
        counts = [layer.flops for layer in form.layers]
    else:
        counts = _from_nodes(forms, k, graph)
    written = {port.name: port for layer in form.layers for port in layer.outputs}
    work = [
        Work(count, moved_bytes(layer, written), _kind(layer, form.form == MODULES, precision))
        for layer, count in zip(form.layers, counts, strict=True)
    ]
    return Rated(work, ceilings, _total(layer.flops for layer in forms[k if graph is None else graph].layers))


def types_of(form: Inside, precision: str) -> set[str]:
    """The ceilings' types in which layers of the form compute."""
    return {_kind(layer, form.form == MODULES, precision) for layer in form.layers} - {""}


def _from_nodes(forms: Sequence[Inside], k: int, graph: int) -> list[int | None]:
    """Operations of each layer: each node's count once, at the first of its layers that says in which type it computes.

    Where none does, what those layers do isn't known, nor what the computing layers without a node do.
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
    """Bytes of what the layer reads, its weights and what it writes, each once; None where a shape is unknown.

    `written` are the outputs of all layers by name, which may know more of an input than who reads it.
    """
    ports = {(port.name or str(k)): written.get(port.name, port) for k, port in enumerate(layer.inputs)}
    tensors = [*ports.values(), *layer.outputs]
    if not layer.outputs or any(not p.dtype or any(n < 0 for n in p.shape) for p in tensors):
        return None
    computing = layer.computes_in or layer.outputs[0].dtype
    return sum(map(_size, tensors)) + layer.parameters * BYTES.get(computing, 1)


def _size(port: Port) -> int:
    return math.prod(port.shape) * BYTES.get(port.dtype, 1)


def _kind(layer: Layer, is_module: bool, precision: str) -> str:
    """The ceiling's type: what an engine says it computes in, of a module what it wrote."""
    named = layer.computes_in or (layer.outputs[0].dtype if is_module and layer.outputs else "")
    kind = TYPES.get(named, "")
    return "tf32" if kind == "fp32" and precision == "tf32" else kind
