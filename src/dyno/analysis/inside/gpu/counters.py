"""Hardware counters of kernels by the modules that launched them, as a table, and what they say in a sentence each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dyno.analysis.formatting import counting, significant
from dyno.analysis.inside import times
from dyno.analysis.inside.gpu.ncu import Kernel, NcuReport
from dyno.analysis.inside.tables import names_cell
from dyno.analysis.presentation.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.worker.facts.engine import range_name
from dyno.worker.facts.job import MODULES, LayerGraph

# From here on a part of the GPU, in percent of its peak, bounds a kernel: below it ncu's own rule SOLBottleneck speaks
# of latency. A grid with fewer blocks than SMs is small by ncu's LaunchConfiguration; so is half a wave here, while
# SOLBottleneck says it of any grid below a wave, although one of 0.99 fills the GPU.
BUSY, HALF = 60.0, 0.5
# Up to here the tensor cores did nothing: of FP32 kernels without an instruction for them ncu counted up to 1.01 %.
IDLE = 2.0
DRAM, CACHES, SMS, LATENCY = "bound by DRAM", "bound by caches", "compute-bound", "latency-bound"
SMALL = "in grids too small for the GPU"
COUNTERS = TableKind("counters", "Hardware counters",
                     "What the GPU's counters say of each kernel of one inference under ncu.",
                     command="dyno profile --device cuda:0 --counters")  # fmt: skip
COLUMNS = (
    Column("form", "whose kernel it is", kind=TEXT, identity=True),
    Column("modules", "PyTorch modules of the layer that launched it, else nodes", kind=TEXT,
           cell=names_cell("modules")),
    Column("layer", "the engine's own name of that layer", kind=TEXT, rank=12),
    Column("kernel", "its name", kind=TEXT, rank=3),
    Column("time_us", "its time under ncu, not to be read as a latency", "µs", title="time, µs"),
    Column("share", "share of the time of all kernels", "%", PERCENT, title="share, %"),
    Column("sm", "the SMs' busiest unit, of its peak", "%", title="SM, %", rank=1),
    Column("memory", "the busiest part of the memory, caches included, of its peak", "%", title="memory, %", rank=1),
    Column("dram", "DRAM's bandwidth, of its peak", "%", title="DRAM, %", rank=4),
    Column("dram_mb", "read from DRAM and written to it", "MB", title="DRAM, MB", rank=5),
    Column("tensor", "cycles in which the tensor cores worked, of all", "%", title="tensor cores, %", rank=2),
    Column("warps", "warps on the SMs while these worked, of the most that they hold (achieved occupancy)", "%",
           title="warps, %", rank=6),
    Column("l2", "accesses of the L2 cache that hit", "%", title="L2 hits, %", rank=7),
    Column("waves", "how often its blocks fill the SMs", "1", title="waves", rank=8),
    Column("blocks", "blocks of its grid", kind=COUNT, rank=9),
    Column("threads", "threads of a block", kind=COUNT, rank=11),
    Column("registers", "registers of a thread", kind=COUNT, rank=10),
    Column("finding", "what bounds it", kind=TEXT),
)  # fmt: skip
NOTE = (
    "One inference under ncu, which runs each kernel alone, several times over and with cold caches: its times are not "
    f"a latency. What is at {BUSY:.0f} % of its peak or more bounds a kernel, as in ncu's own rules."
)
FIGURES = ("sm", "memory", "dram", "tensor", "warps", "l2", "waves")
COUNTS = ("blocks", "threads", "registers")


def table(
    forms: Sequence[LayerGraph],
    graph_of: Mapping[int, int],
    module_of: Mapping[int, int],
    reports: Mapping[int, NcuReport],
    order: str,
    top: int,
) -> Table:
    """Build rows for the `top` kernels (0: all) of each form by time, or as they ran (`graph`), and one for the rest.

    `reports` has those of the form with that index; `graph_of` and `module_of` are as in `times.profile`.
    """
    rows: list[Row] = []
    notes = [NOTE]
    for k, report in reports.items():
        names = times.modules_of(forms, k, graph_of.get(k), module_of.get(k))
        owners = owners_of(forms[k], report.kernels)
        rows += _build_rows(forms[k], names, report.kernels, owners, order, top)
        notes += (f"{forms[k].library}: {one}." for one in sentences(report, owners))
    return COUNTERS.of(COLUMNS, rows, notes=tuple(notes), group=("form",))


def owners_of(form: LayerGraph, kernels: Sequence[Kernel]) -> list[int | None]:
    """Return the layer of each kernel: the innermost of its ranges that has a layer's name; None without one."""
    calls: dict[str, int] = {}
    rows: dict[str, int] = {}
    for k, layer in enumerate(form.layers):
        calls[layer.name] = calls.get(layer.name, 0) + 1
        name = range_name(layer.name, calls[layer.name]) if form.form == MODULES else layer.name
        rows.setdefault(name, k)
    return [next((rows[name] for name in reversed(kernel.ranges) if name in rows), None) for kernel in kernels]


def _build_rows(
    form: LayerGraph,
    names: Sequence[list[str]],
    kernels: Sequence[Kernel],
    owners: Sequence[int | None],
    order: str,
    top: int,
) -> list[Row]:
    total = _sum_seconds(kernels) or 1.0
    slowest = sorted(range(len(kernels)), key=lambda i: -_read_seconds(kernels[i]))
    chosen = slowest if not top or len(slowest) <= top + 1 else slowest[:top]
    rows = []
    for i in sorted(chosen) if order == "graph" else chosen:
        kernel, owner = kernels[i], owners[i]
        own = names[owner] if owner is not None else []
        layer = form.layers[owner].name if owner is not None and form.form != MODULES else ""
        rows.append({
            "form": form.library, "modules": " ".join(own), "modules_names": own, "layer": layer,
            "kernel": kernel.name, **_sum_kernels([kernel], total),
            **{name: getattr(kernel, name) for name in FIGURES}, **{name: _read_count(kernel, name) for name in COUNTS},
            "finding": finding(kernel),
        })  # fmt: skip
    rest = [kernels[i] for i in sorted(set(slowest) - set(chosen))]
    if rest:
        label = counting(len(rest), "more kernel")
        rows.append({"form": form.library, "modules": label, "modules_names": [label], **_sum_kernels(rest, total)})
    return rows


def _sum_kernels(kernels: Sequence[Kernel], total: float) -> Row:
    seconds, bytes_ = _sum_seconds(kernels), sum(kernel.dram_bytes for kernel in kernels)
    return {"time_us": 1e6 * seconds, "share": 100 * seconds / total, "dram_mb": bytes_ / 1e6}


def _read_count(kernel: Kernel, name: str) -> int | None:
    value = getattr(kernel, name)
    return None if math.isnan(value) else int(value)


def _read_seconds(kernel: Kernel) -> float:
    return 0.0 if math.isnan(kernel.seconds) else kernel.seconds


def _sum_seconds(kernels: Sequence[Kernel]) -> float:
    return sum(map(_read_seconds, kernels))


def bound(kernel: Kernel) -> str:
    """Return the resource that bounds the kernel, "" where its counters don't tell."""
    if kernel.memory >= BUSY and not kernel.sm > kernel.memory:
        return DRAM if kernel.dram >= kernel.memory else CACHES
    if kernel.sm >= BUSY:
        return SMS
    if kernel.blocks < kernel.sms or kernel.waves <= HALF:
        return SMALL
    return LATENCY if max(kernel.sm, kernel.memory) < BUSY else ""


def finding(kernel: Kernel) -> str:
    """Describe the resource that bounds the kernel, with the figures behind it."""
    kind, sm, memory = bound(kernel), f"{kernel.sm:.0f} %", f"{kernel.memory:.0f} %"
    if kind == DRAM:
        return f"memory-bound: {memory} of DRAM bandwidth"
    if kind == CACHES:
        return f"memory-bound: caches at {memory}, DRAM at {kernel.dram:.0f} %"
    if kind == SMS:
        unit = "tensor cores" if kernel.tensor >= kernel.sm else "SMs"
        return f"compute-bound: {unit} at {sm} of their peak"
    if kind == SMALL and kernel.blocks < kernel.sms:
        return f"too small a grid: {counting(int(kernel.blocks), 'block')} for {kernel.sms:.0f} SMs"
    if kind == SMALL:
        return f"too small a grid: {significant(kernel.waves, 2)} of a wave"
    return f"latency-bound: SMs at {sm}, memory at {memory}" if kind else ""


def sentences(report: NcuReport, owners: Sequence[int | None]) -> list[str]:
    """Summarise the kernels of one form in sentences, first of all where only a part of them was seen."""
    kernels = report.kernels
    said = [_describe_bounds(kernels), _tensor_cores(kernels)]
    if report.cut_short:
        said.insert(0, f"only the first {len(kernels)} of its kernels were counted: {report.cut_short}")
    lost = [kernel for kernel, owner in zip(kernels, owners, strict=True) if owner is None]
    if lost:
        share = 100 * _sum_seconds(lost) / (_sum_seconds(kernels) or 1.0)
        said.append(f"of no layer: {counting(len(lost), 'kernel')}, {share:.0f} % of the time")
    return [one for one in said if one]


def _describe_bounds(kernels: Sequence[Kernel]) -> str:
    """Return the shares of the time by the resource that bounds it, the largest first."""
    total = _sum_seconds(kernels) or 1.0
    shares: dict[str, float] = {}
    for kernel in kernels:
        if kind := bound(kernel):
            shares[kind] = shares.get(kind, 0.0) + 100 * _read_seconds(kernel) / total
    parts = [f"{share:.0f} % {kind}" for kind, share in sorted(shares.items(), key=lambda item: -item[1])]
    return f"the time of its {counting(len(kernels), 'kernel')} is {', '.join(parts)}" if parts else ""


def _tensor_cores(kernels: Sequence[Kernel]) -> str:
    """Describe how much the tensor cores worked, and in how many of the longest kernels they were idle."""
    known = [kernel for kernel in kernels if not math.isnan(kernel.tensor)]
    if not known:
        return ""
    if all(kernel.tensor <= IDLE for kernel in known):
        return f"the tensor cores are idle (up to {IDLE:.0f} %) in all {len(known)} kernels"
    slowest = sorted(known, key=lambda kernel: -_read_seconds(kernel))
    idle = next(k for k, kernel in enumerate(slowest) if kernel.tensor > IDLE)
    mean = sum(kernel.tensor * _read_seconds(kernel) for kernel in known) / (_sum_seconds(known) or 1.0)
    said = f"the tensor cores work {mean:.0f} % of the kernels' time"
    longest = "the longest kernel" if idle == 1 else f"the {idle} longest kernels"
    return f"{said}, and are idle (up to {IDLE:.0f} %) in {longest}" if idle else said
