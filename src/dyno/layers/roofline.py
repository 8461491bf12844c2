"""The roofline model: a layer's work, the ceilings of the device, and each layer's distance from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dyno.layers import align
from dyno.layers.align import FormSet
from dyno.layers.tables import TYPE_BYTES
from dyno.report.tables import TableKind
from dyno.table import PERCENT, TEXT, Column, Row, Table
from dyno.worker.facts.job import MODULES, CopyRate, Layer, LayerGraph, PeakOfType, Port
from dyno.worker.spec import UserError

# Ceilings of a device: peak rates of arithmetic by type and of memory, measured and from a data sheet.

CEILINGS = TableKind("ceilings", "Ceilings", "The highest rates measured on this device.",
                     command="dyno profile")  # fmt: skip
CEILING_TYPES = ("fp32", "tf32", "fp16", "bf16", "int8")
MEMORY_CEILING = "memory"
RATE_COLUMNS = (
    Column("tflops", "10¹² operations per second in that time", "10¹² 1/s", title="TFLOPS", rank=2),
    Column("gb_s", "bytes of weights and tensors in that time, each counted once", "GB/s", title="GB/s", rank=2),
)
COLUMNS = (
    Column("ceiling", "what was measured", kind=TEXT),
    *RATE_COLUMNS,
    Column("sheet", "the data sheet's, in the same unit", title="data sheet"),
    Column("of_sheet", "measured rate over the data sheet's", "%", PERCENT, title="of it, %"),
    Column("of", "size of the matrices, or of the copied data", kind=TEXT),
    Column("clock", "median SM clock meanwhile", "MHz", title="clock, MHz"),
    Column("remark", "why there is none", kind=TEXT),
)
TABLE_NOTE = (
    "Measured by PyTorch on the same device with the same threads, right after the layers: the fastest of the "
    "repetitions."
)


@dataclass(frozen=True)
class Rates:
    """Operations/s by type and bytes/s of memory; None: unknown."""

    products: Mapping[str, float]
    memory: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates: matrix products by type, and a copy; `warnings` name disturbances.

    `sheet` has the rates given from a data sheet, and `clocks` the SM clock in MHz by type and of the copy.
    """

    products: Mapping[str, PeakOfType]
    copy: CopyRate
    warnings: tuple[str, ...] = ()
    sheet: Rates = field(default_factory=lambda: Rates({}))
    clocks: Mapping[str, float] = field(default_factory=dict)

    @property
    def rates(self) -> Rates:
        """Measured rates."""
        products = {name: peak.flops_per_s for name, peak in self.products.items() if peak.flops_per_s}
        return Rates(products, self.copy.bytes_per_s)

    def table(self) -> Table:
        """Build a row per ceiling; a type unsupported by the device or PyTorch has the reason as its remark."""
        rows: list[Row] = [
            {"ceiling": f"matrix product, {name}", "tflops": (peak.flops_per_s or math.nan) / 1e12,
             "of": f"{peak.side} x {peak.side}" if peak.side else "", "remark": peak.missing,
             **self._compare_with_sheet(name, peak.flops_per_s, self.sheet.products.get(name), 1e12)}
            for name, peak in self.products.items()
        ]  # fmt: skip
        rows.append({"ceiling": "copy, read and written", "gb_s": self.copy.bytes_per_s / 1e9,
                     "of": f"{self.copy.bytes / 1e6:,.0f} MB",
                     **self._compare_with_sheet(MEMORY_CEILING, self.copy.bytes_per_s, self.sheet.memory,
                                                1e9)})  # fmt: skip
        cache = f" The device's last cache has {self.copy.cache / 1e6:.3g} MB." if self.copy.cache else ""
        return CEILINGS.build(COLUMNS, rows, notes=(TABLE_NOTE + cache, *self.warnings))

    def _compare_with_sheet(self, name: str, measured: float | None, sheet: float | None, unit: float) -> Row:
        cells: Row = {"clock": self.clocks[name]} if name in self.clocks else {}
        if sheet:
            cells |= {"sheet": sheet / unit, "of_sheet": 100 * (measured or math.nan) / sheet}
        return cells


def parse_data_sheet(texts: Sequence[str]) -> Rates:
    """Parse texts such as `fp16=989` (TFLOPS) and `memory=4800` (GB/s) into rates; raise `UserError` for others."""
    rates: dict[str, float] = {}
    for text in texts:
        name, _, value_text = text.partition("=")
        if name not in (names := (*CEILING_TYPES, MEMORY_CEILING)):
            raise UserError(f"--data-sheet {text}: unknown ceiling {name!r}; give one of {', '.join(names)}")
        if name in rates:
            raise UserError(f"--data-sheet has {name} twice; give it once")
        try:
            value = float(value_text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            unit = "GB/s" if name == MEMORY_CEILING else "TFLOPS"
            raise UserError(f"--data-sheet {text}: give {name} as a number of {unit}, such as {name}=100")
        rates[name] = value * (1e9 if name == MEMORY_CEILING else 1e12)
    memory = rates.pop(MEMORY_CEILING, None)
    return Rates(rates, memory)


# Work of a layer: operations, bytes, and type of arithmetic.

# precision of each ceiling
CEILING_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8", "uint8": "int8"}
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class LayerWork:
    """Operations and bytes of one layer (None: unknown), and the type of its arithmetic ("": unknown)."""

    flops: int | None
    bytes: int | None
    kind: str = ""

    def find_least(self, rates: Rates) -> tuple[float, str] | None:
        """Return the least seconds that the rates allow, and the limiting ceiling; None if unknown."""
        if self.flops is None or rates.memory is None or (self.bytes is None and not self.flops):
            return None
        move_seconds = (self.bytes or 0) / rates.memory
        if not self.flops:
            return move_seconds, MEMORY_CEILING
        peak = rates.products.get(self.kind)
        if peak is None:
            return None
        compute_seconds = self.flops / peak
        return max(move_seconds, compute_seconds), ARITHMETIC if compute_seconds >= move_seconds else MEMORY_CEILING


def count_work(form_set: FormSet, k: int, precision: str) -> list[LayerWork]:
    """Count the work of each layer of form `k`; an engine's operations come from the nodes of its graph."""
    form, graph = form_set.forms[k], form_set.graph_of.get(k)
    if form.form == MODULES or graph is None:
        counts = [layer.flops for layer in form.layers]
    else:
        counts = _count_node_flops(form_set.forms, k, graph)
    outputs = {port.name: port for layer in form.layers for port in layer.outputs}
    return [
        LayerWork(count, count_moved_bytes(layer, outputs), _find_type(layer, form.form == MODULES, precision))
        for layer, count in zip(form.layers, counts, strict=True)
    ]


def list_types(form: LayerGraph, precision: str) -> set[str]:
    """Return the types of ceilings that layers of the form compute in."""
    return {_find_type(layer, form.form == MODULES, precision) for layer in form.layers} - {""}


def _count_node_flops(forms: Sequence[LayerGraph], k: int, graph: int) -> list[int | None]:
    """Count the operations of each layer: a node's count goes to its first layer with a known compute type.

    If a node has no such layer, the operations of its layers, and of all computing layers without a node, are unknown.
    """
    layers = forms[k].layers
    computing = [i for i, layer in enumerate(layers) if layer.computes_in and not layer.moves]
    counts: list[int | None] = [0] * len(layers)
    pairs, doubtful_layers = align.link_layers(forms, graph, k).pairs, set[int]()
    for node, node_layer in enumerate(forms[graph].layers):
        counterparts = pairs.get(node, set())
        index = next((i for i in computing if i in counterparts), None)
        if index is not None and (before := counts[index]) is not None:
            counts[index] = None if node_layer.flops is None else before + node_layer.flops
        elif index is None and node_layer.flops != 0:
            doubtful_layers |= {*counterparts, *computing}
    return [count or None if i in doubtful_layers else count for i, count in enumerate(counts)]


def count_moved_bytes(layer: Layer, outputs: Mapping[str, Port]) -> int | None:
    """Return the bytes of the layer's inputs, weights and outputs, each once; None if a shape is unknown.

    `outputs` has all layers' outputs by name: a writer may know more of a tensor than its reader.
    """
    ports = {(port.name or str(k)): outputs.get(port.name, port) for k, port in enumerate(layer.inputs)}
    tensors = [*ports.values(), *layer.outputs]
    if not layer.outputs or any(not p.dtype or any(n < 0 for n in p.shape) for p in tensors):
        return None
    dtype = layer.computes_in or layer.outputs[0].dtype
    total = sum(math.prod(port.shape) * TYPE_BYTES.get(port.dtype, 1) for port in tensors)
    return total + layer.parameters * TYPE_BYTES.get(dtype, 1)


def _find_type(layer: Layer, is_module: bool, precision: str) -> str:
    """Return the ceiling's type: an engine's declared compute type, or a module's output type."""
    dtype = layer.computes_in or (layer.outputs[0].dtype if is_module and layer.outputs else "")
    kind = CEILING_PRECISIONS.get(dtype, "")
    return "tf32" if kind == "fp32" and precision == "tf32" else kind


# Layers under the ceilings: share of the roof reached, limiting ceiling, and explanations.

NEAR_ROOF_PERCENT = 50.0  # percent of the roof from which the nearer ceiling explains most of the time
NEITHER = "neither"
CEILINGS_DISTURBED = "ceilings disturbed"
MAYBE_CACHED = "may be in the cache"
BEYOND_COPY = "faster than the copy"
BEYOND_PRODUCT = "fewer operations, or a better kernel"
RATED_COLUMNS = (
    *RATE_COLUMNS,
    Column("intensity", "operations for each byte", title="FLOP/B", rank=3),
    Column("reached", "the least time that the ceilings allow, over the measured time", "%", PERCENT,
           title="of the roof, %", rank=1),
    Column("bound", "which ceiling bounds it: the nearer one, if it explains at least half of the time", kind=TEXT,
           title="bound by", rank=1),
    Column("above", "why it can be above its ceiling", kind=TEXT, title="above the roof", rank=1),
    Column("of_sheet", "the same with the data sheet's ceilings", "%", PERCENT, title="of the data sheet, %", rank=2),
)  # fmt: skip
OF_LATENCY = (
    RATE_COLUMNS[0],
    Column("roof_ms", "sum of the least times that the ceilings allow the layers", "ms", title="roof, ms", rank=1),
    Column("reached", "that over the unprofiled latency", "%", PERCENT, title="of the roof, %", rank=1),
    Column("of_sheet", "the same with the data sheet's ceilings", "%", PERCENT, title="of the data sheet, %", rank=2),
)
RATED_NOTE = (
    "Bound by: the nearer ceiling, where it explains at least half of a layer's time. Neither: the layer takes more "
    "than twice what both ceilings allow; the rest is overhead, or a kernel that uses the device badly."
)
ABOVE_ROOF_REASONS = {
    CEILINGS_DISTURBED: "other programs were busy while the ceilings were measured, so these are too low: measure "
    "again",
    MAYBE_CACHED: "all its bytes fit in the device's cache, which may have held them and is faster than the copy",
    BEYOND_COPY: "its memory rate exceeds the copy's, which reads and writes equally: a pure read may be faster, and "
    "part may have been in a cache",
    BEYOND_PRODUCT: "a kernel may need fewer operations than are counted (Winograd's convolution, zeros left out), or "
    "beat PyTorch's matrix product",
}


@dataclass(frozen=True)
class RooflineRating:
    """The work of one form's layers, under the ceilings; `flops` are the form's operations, also unattributed ones."""

    work: Sequence[LayerWork]
    ceilings: Ceilings
    flops: int | None = None

    def make_cells(self, indices: Collection[int], seconds: float) -> Row:
        """Return the cells of RATED_COLUMNS for these layers together, which took `seconds`.

        The roof of several layers is the sum of the known roofs, so it is never too high.
        """
        if not seconds:
            return {}
        known_work = [self.work[i] for i in indices if len(indices) == 1 or self.work[i] != NOTHING_KNOWN]
        flops, size = _sum_known(work.flops for work in known_work), _sum_known(work.bytes for work in known_work)
        cells: Row = {"tflops": flops / seconds / 1e12} if flops else {}
        if size:
            cells |= {"gb_s": size / seconds / 1e9, "intensity": flops / size if flops is not None else None}
        if (reached := self._compute_reached(indices, seconds, self.ceilings.rates)) is not None:
            cells |= {"reached": reached, "bound": self._find_bound(indices, reached)}
            cells["above"] = self._explain_excess(indices, cells["bound"]) if reached > 100 else ""
        if (of_sheet := self._compute_reached(indices, seconds, self.ceilings.sheet)) is not None:
            cells["of_sheet"] = of_sheet
        return cells

    def of_latency(self, indices: Collection[int], latency: float) -> Row:
        """Return the cells of OF_LATENCY, for the layers that ran."""
        cells: Row = {"tflops": self.flops / latency / 1e12} if self.flops else {}
        if (reached := self._compute_reached(indices, latency, self.ceilings.rates)) is not None:
            cells |= {"roof_ms": 1e3 * latency * reached / 100, "reached": reached}
        if (of_sheet := self._compute_reached(indices, latency, self.ceilings.sheet)) is not None:
            cells["of_sheet"] = of_sheet
        return cells

    def sentence(self, seconds: Sequence[float]) -> str:
        """Describe each ceiling's share of the layers' time; "" if no layer has a time. `seconds` are per layer."""
        shares = dict.fromkeys((ARITHMETIC, MEMORY_CEILING, NEITHER, ""), 0.0)
        for i, time in enumerate(seconds):
            shares[self.make_cells([i], time).get("bound", "")] += time / (sum(seconds) or 1.0)
        if not sum(shares.values()):
            return ""
        phrases = {ARITHMETIC: "bound by arithmetic", MEMORY_CEILING: "bound by memory", NEITHER: "bound by neither"}
        parts = [f"{100 * shares[name]:.0f} % of the time in layers {phrase}" for name, phrase in phrases.items()]
        unknown_text = f", {100 * shares['']:.0f} % in layers whose bound isn't known" if shares[""] >= 0.005 else ""
        return ", ".join([parts[0], *(part.replace("of the time in layers ", "") for part in parts[1:])]) + unknown_text

    def _compute_reached(self, indices: Collection[int], seconds: float, rates: Rates) -> float | None:
        """Return the sum of the known least times, in percent of the seconds; None if all are unknown."""
        times = self._list_least(indices, rates)
        return 100 * sum(time for time, _ in times) / seconds if times else None

    def _list_least(self, indices: Collection[int], rates: Rates) -> list[tuple[float, str]]:
        return [each for i in indices if (each := self.work[i].find_least(rates)) is not None]

    def _find_bound(self, indices: Collection[int], reached: float) -> str:
        """Return the ceiling that accounts for most of the least times, or NEITHER if these are too short."""
        if reached < NEAR_ROOF_PERCENT:
            return NEITHER
        times = self._list_least(indices, self.ceilings.rates)
        return max((ARITHMETIC, MEMORY_CEILING), key=lambda name: sum(time for time, bound in times if bound == name))

    def _explain_excess(self, indices: Collection[int], bound: str) -> str:
        if self.ceilings.warnings:
            return CEILINGS_DISTURBED
        if bound == ARITHMETIC:
            return BEYOND_PRODUCT
        largest = max(self.work[i].bytes or 0 for i in indices)
        return MAYBE_CACHED if largest <= self.ceilings.copy.cache else BEYOND_COPY


NOTHING_KNOWN = LayerWork(0, None)  # no products, and an unknown number of bytes


def _sum_known(values: Iterable[int | None]) -> int | None:
    counts = [*values]
    return None if None in counts else sum(value for value in counts if value is not None)


def rate_layers(form_set: FormSet, k: int, precision: str, ceilings: Ceilings) -> RooflineRating:
    """Rate form `k` under the ceilings."""
    flops = _sum_known(layer.flops for layer in form_set.forms[form_set.graph_of.get(k, k)].layers)
    return RooflineRating(count_work(form_set, k, precision), ceilings, flops)


def list_roofline_notes(rows: Iterable[Row]) -> list[str]:
    """Explain the words in these rows of RATED_COLUMNS."""
    reasons = dict.fromkeys(row["above"] for row in rows if row.get("above"))
    return [RATED_NOTE, *(f"Above the roof, {name}: {ABOVE_ROOF_REASONS[name]}." for name in reasons)]
