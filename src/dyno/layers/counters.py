"""Hardware counters of kernels, by the modules that launched them, as a table and in sentences."""

from __future__ import annotations

import csv
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dyno.formatting import format_count, format_number
from dyno.jobs.progress import Progress
from dyno.layers import times
from dyno.layers.align import FormSet
from dyno.layers.tables import MODULE_NAMES
from dyno.report.tables import TableKind
from dyno.runner.device_lock import launch_in_turn
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.worker.facts.engine import range_name, shorten_kernel
from dyno.worker.facts.job import MODULES, LayerGraph
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Trial, UserError

# Parser of the CSV of NVIDIA's ncu (Nsight Compute): `--csv --page raw --print-units base --nvtx`.
#
# Each kernel has a line with its metrics and the NVTX ranges of its launch; see the Nsight Compute
# CLI manual, https://docs.nvidia.com/nsight-compute/NsightComputeCli/. Read with ncu 2025.3.

UNIT_FACTORS = {"ns": 1e-9, "nsecond": 1e-9}  # seconds per base unit of ncu
RANGES_COLUMN, NAME_COLUMN = "Push/Pop_Range", "Kernel Name"
ERROR_MARK = "==ERROR=="
# Domain:Range:type and value of a payload:type and value of a colour:type and text of a message.
NVTX_RANGE = re.compile(r"[^:]*:(.*?):(?:none:none|\w+:.*):(?:none:none|\w+:0x[0-9a-f]+):(?:none:none|\w+:(.*))")


def _make_figure(metric: str, requested: bool = True) -> Any:
    """Declare a figure by ncu's name of its metric; `ncu --query-metrics` and the Profiling Guide describe it."""
    return field(default=math.nan, metadata={"metric": metric, "requested": requested})


@dataclass(frozen=True)
class Kernel:
    """A kernel and its figures; NaN is a figure that ncu didn't report.

    `ranges` are the names of the NVTX ranges around its launch, the innermost last. In percent of peak over the
    kernel's time: `sm` is the SMs' busiest unit, `memory` the busiest part of the memory (caches included), `dram` DRAM
    alone, `tensor` the active cycles of the tensor cores. `warps` is the achieved occupancy and `l2` the L2 hit rate,
    both in percent. `sms` is the GPU's number of SMs; `waves` is how many times the blocks fill them.
    """

    name: str
    ranges: tuple[str, ...] = ()
    seconds: float = _make_figure("gpu__time_duration.sum")
    sm: float = _make_figure("sm__throughput.avg.pct_of_peak_sustained_elapsed")
    memory: float = _make_figure("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed")
    dram: float = _make_figure("dram__throughput.avg.pct_of_peak_sustained_elapsed")
    dram_bytes: float = _make_figure("dram__bytes.sum")
    tensor: float = _make_figure("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
    warps: float = _make_figure("sm__warps_active.avg.pct_of_peak_sustained_active")
    l2: float = _make_figure("lts__t_sector_hit_rate.pct")
    waves: float = _make_figure("launch__waves_per_multiprocessor")
    blocks: float = _make_figure("launch__grid_size")
    threads: float = _make_figure("launch__block_size")
    registers: float = _make_figure("launch__registers_per_thread")
    sms: float = _make_figure("launch__sm_count", requested=False)  # reported by some versions, unrequested


METRICS = {each.name: each.metadata for each in fields(Kernel) if each.metadata}


@dataclass(frozen=True)
class NcuReport:
    """Kernels in launch order, ncu's errors, and the reason why kernels are missing ("": complete)."""

    kernels: tuple[Kernel, ...]
    errors: tuple[str, ...] = ()
    cut_short: str = ""


def read_ncu(text: str) -> NcuReport:
    """Parse the report in ncu's output, with or without the profiled program's output before it."""
    lines = text.split("\n")  # not `splitlines`: TensorRT's JSON holds other separators
    errors = tuple(line.removeprefix(ERROR_MARK).strip() for line in lines if line.startswith(ERROR_MARK))
    begin = next((k for k, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    rows = [line for line in lines[begin:] if line.startswith('"')]
    return NcuReport(tuple(_iter_kernels(rows)), errors)


def _iter_kernels(lines: Sequence[str]) -> Iterator[Kernel]:
    """Yield the kernels from the lines below the headings and the units."""
    if len(lines) < 2:
        return
    headings, *rest = (next(csv.reader([line])) for line in lines[:2])
    units = dict(zip(headings, rest[0], strict=True))
    range_column = next((k for k, heading in enumerate(headings) if RANGES_COLUMN in heading), None)
    for line in lines[2:]:
        cells = next(csv.reader([line]))
        if len(cells) != len(headings) and range_column is not None:
            cells = _split_line(line, range_column, len(headings))
        if len(cells) != len(headings):  # ncu ended within this line
            continue
        row = dict(zip(headings, cells, strict=True))
        figures = {name: _parse_figure(row, units, metadata["metric"]) for name, metadata in METRICS.items()}
        ranges = _parse_ranges(cells[range_column]) if range_column is not None else ()
        yield Kernel(shorten_kernel(row[NAME_COLUMN]), ranges, **figures)


def _split_line(line: str, range_column: int, count: int) -> list[str]:
    """Split a line into cells although ncu left quotes, such as those of JSON, unescaped in the ranges."""
    cells = line.removeprefix('"').removesuffix('"').split('","', range_column)
    return [*cells[:-1], *cells[-1].rsplit('","', count - range_column - 1)]


def _parse_ranges(cell: str) -> tuple[str, ...]:
    """Return the messages of a cell's ranges, the outermost first; a range without a message has its own name."""
    texts = re.findall(r'"(.+?)"(?="|  "|\s*$)', cell.replace('""', '"'))
    matches = (NVTX_RANGE.fullmatch(text) for text in texts)
    return tuple(match[2] or match[1] for match in matches if match)


def _parse_figure(row: Mapping[str, str], units: Mapping[str, str], metric: str) -> float:
    try:
        return float(row[metric].replace(",", "")) * UNIT_FACTORS.get(units[metric], 1.0)
    except (KeyError, ValueError):  # metric that this GPU lacks, or "n/a"
        return math.nan


# Percent of peak from which a part of the GPU bounds a kernel; below it, ncu's rule SOLBottleneck reports latency.
# A grid is small with fewer blocks than SMs (ncu's LaunchConfiguration) or with at most half a wave. SOLBottleneck's
# limit is a whole wave, although 0.99 waves fill the GPU.
BUSY_PERCENT, MAJORITY = 60.0, 0.5
# Largest percentage of idle tensor cores: ncu counted up to 1.01 % in FP32 kernels without tensor instructions.
IDLE_PERCENT = 2.0
BOUND_BY_DRAM, BOUND_BY_CACHES = "bound by DRAM", "bound by caches"
COMPUTE_BOUND, LATENCY_BOUND = "compute-bound", "latency-bound"
SMALL_GRIDS = "in grids too small for the GPU"
COUNTERS = TableKind("counters", "Hardware counters",
                     "GPU counters of each kernel of one inference under ncu.",
                     command="dyno profile --device cuda:0 --counters")  # fmt: skip
COLUMNS = (
    Column("form", "whose kernel it is", kind=TEXT, identity=True),
    Column("modules", "PyTorch modules of the layer that launched it, else nodes", kind=TEXT, cell=MODULE_NAMES),
    Column("layer", "the engine's own name of that layer", kind=TEXT, rank=12),
    Column("kernel", "its name", kind=TEXT, rank=3),
    Column("time_us", "its time under ncu, which is not a latency", "µs", title="time, µs"),
    Column("share", "share of the time of all kernels", "%", PERCENT, title="share, %"),
    Column("sm", "the SMs' busiest unit, of its peak", "%", title="SM, %", rank=1),
    Column("memory", "the busiest part of the memory, caches included, of its peak", "%", title="memory, %", rank=1),
    Column("dram", "DRAM's bandwidth, of its peak", "%", title="DRAM, %", rank=4),
    Column("dram_mb", "read from DRAM and written to it", "MB", title="DRAM, MB", rank=5),
    Column("tensor", "share of cycles in which the tensor cores worked", "%", title="tensor cores, %", rank=2),
    Column("warps", "achieved occupancy: warps on the active SMs, as a share of their maximum", "%",
           title="warps, %", rank=6),
    Column("l2", "hit rate of the L2 cache", "%", title="L2 hits, %", rank=7),
    Column("waves", "how often its blocks fill the SMs", "1", title="waves", rank=8),
    Column("blocks", "blocks of its grid", kind=COUNT, rank=9),
    Column("threads", "threads of a block", kind=COUNT, rank=11),
    Column("registers", "registers of a thread", kind=COUNT, rank=10),
    Column("finding", "what bounds it", kind=TEXT),
)  # fmt: skip
TABLE_NOTE = (
    "One inference under ncu, which runs each kernel alone, several times over and with cold caches: its times are not "
    f"a latency. A unit at {BUSY_PERCENT:.0f} % of its peak or more bounds a kernel, as in ncu's own rules."
)


def make_counters_table(form_set: FormSet, reports: Mapping[int, NcuReport], order: str, top: int) -> Table:
    """Build rows for each form's `top` slowest kernels (0: all), by time or as run (`graph`), and one for the rest.

    `reports` has the kernels by index of the form.
    """
    forms, rows, notes = form_set.forms, list[Row](), [TABLE_NOTE]
    for k, report in reports.items():
        owners = find_owners(forms[k], report.kernels)
        rows += _build_rows(forms[k], times.name_modules(form_set, k), report.kernels, owners, order, top)
        notes += (f"{forms[k].library}: {sentence}." for sentence in describe_counters(report, owners))
    return COUNTERS.build(COLUMNS, rows, notes=tuple(notes), group=("form",))


def find_owners(form: LayerGraph, kernels: Sequence[Kernel]) -> list[int | None]:
    """Return the layer index of each kernel, by the innermost range with a layer's name; None if unknown."""
    layer_of: dict[str, int] = {}
    for k, (name, call_index) in enumerate(form.count_calls()):
        layer_of.setdefault(range_name(name, call_index + 1) if form.form == MODULES else name, k)
    return [next((layer_of[name] for name in reversed(kernel.ranges) if name in layer_of), None) for kernel in kernels]


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
    top_kernels = slowest if not top or len(slowest) <= top + 1 else slowest[:top]
    rows = []
    for i in sorted(top_kernels) if order == "graph" else top_kernels:
        kernel, owner = kernels[i], owners[i]
        modules = names[owner] if owner is not None else []
        layer = form.layers[owner].name if owner is not None and form.form != MODULES else ""
        rows.append({
            "form": form.library, "modules": " ".join(modules), "modules_names": modules, "layer": layer,
            "kernel": kernel.name, **_sum_kernels([kernel], total),
            **{column.name: _read_figure(kernel, column) for column in COLUMNS if column.name in METRICS},
            "finding": describe_bound(kernel),
        })  # fmt: skip
    rest = [kernels[i] for i in sorted(set(slowest) - set(top_kernels))]
    if rest:
        label = format_count(len(rest), "more kernel")
        rows.append({"form": form.library, "modules": label, "modules_names": [label], **_sum_kernels(rest, total)})
    return rows


def _sum_kernels(kernels: Sequence[Kernel], total: float) -> Row:
    seconds, bytes_ = _sum_seconds(kernels), sum(kernel.dram_bytes for kernel in kernels)
    return {"time_us": 1e6 * seconds, "share": 100 * seconds / total, "dram_mb": bytes_ / 1e6}


def _read_figure(kernel: Kernel, column: Column) -> float | None:
    value: float = getattr(kernel, column.name)
    if column.kind != COUNT:
        return value
    return None if math.isnan(value) else int(value)


def _read_seconds(kernel: Kernel) -> float:
    return 0.0 if math.isnan(kernel.seconds) else kernel.seconds


def _sum_seconds(kernels: Sequence[Kernel]) -> float:
    return sum(map(_read_seconds, kernels))


def find_bound(kernel: Kernel) -> str:
    """Return the resource that bounds the kernel; "" if its counters don't tell."""
    if kernel.memory >= BUSY_PERCENT and not kernel.sm > kernel.memory:
        return BOUND_BY_DRAM if kernel.dram >= kernel.memory else BOUND_BY_CACHES
    if kernel.sm >= BUSY_PERCENT:
        return COMPUTE_BOUND
    if kernel.blocks < kernel.sms or kernel.waves <= MAJORITY:
        return SMALL_GRIDS
    return LATENCY_BOUND if max(kernel.sm, kernel.memory) < BUSY_PERCENT else ""


def describe_bound(kernel: Kernel) -> str:
    """Describe the resource that bounds the kernel, with the figures behind it."""
    bound, sm, memory = find_bound(kernel), f"{kernel.sm:.0f} %", f"{kernel.memory:.0f} %"
    if bound == BOUND_BY_DRAM:
        return f"memory-bound: {memory} of DRAM bandwidth"
    if bound == BOUND_BY_CACHES:
        return f"memory-bound: caches at {memory}, DRAM at {kernel.dram:.0f} %"
    if bound == COMPUTE_BOUND:
        unit = "tensor cores" if kernel.tensor >= kernel.sm else "SMs"
        return f"compute-bound: {unit} at {sm} of their peak"
    if bound == SMALL_GRIDS and kernel.blocks < kernel.sms:
        return f"too small a grid: {format_count(int(kernel.blocks), 'block')} for {kernel.sms:.0f} SMs"
    if bound == SMALL_GRIDS:
        return f"too small a grid: {format_number(kernel.waves, 2)} of a wave"
    return f"latency-bound: SMs at {sm}, memory at {memory}" if bound else ""


def describe_counters(report: NcuReport, owners: Sequence[int | None]) -> list[str]:
    """Summarise one form's kernels in sentences; a truncated report is mentioned first."""
    kernels = report.kernels
    sentences = [_describe_bounds(kernels), _describe_tensor_cores(kernels)]
    if report.cut_short:
        sentences.insert(0, f"only the first {len(kernels)} of its kernels were counted: {report.cut_short}")
    orphans = [kernel for kernel, owner in zip(kernels, owners, strict=True) if owner is None]
    if orphans:
        share = 100 * _sum_seconds(orphans) / (_sum_seconds(kernels) or 1.0)
        sentences.append(f"of no layer: {format_count(len(orphans), 'kernel')}, {share:.0f} % of the time")
    return [sentence for sentence in sentences if sentence]


def _describe_bounds(kernels: Sequence[Kernel]) -> str:
    """Describe the shares of the time by limiting resource, the largest first."""
    total = _sum_seconds(kernels) or 1.0
    shares: dict[str, float] = {}
    for kernel in kernels:
        if bound := find_bound(kernel):
            shares[bound] = shares.get(bound, 0.0) + 100 * _read_seconds(kernel) / total
    parts = [f"{share:.0f} % {bound}" for bound, share in sorted(shares.items(), key=lambda item: -item[1])]
    return f"the time of its {format_count(len(kernels), 'kernel')} is {', '.join(parts)}" if parts else ""


def _describe_tensor_cores(kernels: Sequence[Kernel]) -> str:
    """Describe how much the tensor cores worked, and in how many of the longest kernels they were idle."""
    subset = [kernel for kernel in kernels if not math.isnan(kernel.tensor)]
    if not subset:
        return ""
    if all(kernel.tensor <= IDLE_PERCENT for kernel in subset):
        return f"the tensor cores are idle (up to {IDLE_PERCENT:.0f} %) in all {len(subset)} kernels"
    slowest = sorted(subset, key=lambda kernel: -_read_seconds(kernel))
    idle_count = next(k for k, kernel in enumerate(slowest) if kernel.tensor > IDLE_PERCENT)
    mean = sum(kernel.tensor * _read_seconds(kernel) for kernel in subset) / (_sum_seconds(subset) or 1.0)
    text = f"the tensor cores work {mean:.0f} % of the kernels' time"
    longest = "the longest kernel" if idle_count == 1 else f"the {idle_count} longest kernels"
    return f"{text}, and are idle (up to {IDLE_PERCENT:.0f} %) in {longest}" if idle_count else text


# Hardware counters of an engine's kernels: one inference in a job under NVIDIA's ncu.

PROFILER = "ncu"
TIMEOUT_S = 900.0
# Parts of ncu's error messages, with cause and remedy
FAILURE_CAUSES = {
    "ERR_NVGPUCTRPERM": "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root, give a container "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    "driver resource was unavailable": "another program uses the GPU's counters, such as DCGM or another profiler; end "
    "it, or pause it with `dcgmi profile --pause`",
    "lock file": "the lock file of another user's ncu is in the way; set TMPDIR to a folder of your own",
    "InterprocessLockFailed": "the lock file of another user's ncu is in the way; set TMPDIR to a folder of your own",
    "not compatible with Nsight Compute": "the driver is too old for this ncu; install the ncu of the driver's CUDA",
}  # fmt: skip
FAILURE_MARK = "Failed to profile"


def find_tool() -> str:
    """Return the path of ncu; raise `UserError` if it is not installed."""
    if path := shutil.which(PROFILER):
        return path
    raise UserError(
        f"there is no {PROFILER} on the PATH, which reads hardware counters; install NVIDIA Nsight Compute, "
        "or add its folder, such as /usr/local/cuda/bin"
    )


def build_command(tool: str, log: Path) -> list[str]:
    """Return ncu's part of the command line; ncu counts between the start and the stop of CUDA's profiler.

    The GPU's clocks are left alone. Caches are emptied before each kernel, so that its repeats are alike.
    """
    metrics = [metadata["metric"] for metadata in METRICS.values() if metadata["requested"]]
    return [tool, "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off", "--nvtx",
            "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics),
            "--log-file", str(log)]  # fmt: skip


def count_kernels(
    tool: str, trial: Trial, artifact: Artifact | None, progress: Progress, timeout_s: float = TIMEOUT_S
) -> NcuReport:
    """Read the hardware counters of one inference of the trial's engine, with no other job on its GPU.

    If ncu fails or times out, the counters read until then are returned with the reason. Raises `UserError` with the
    reason if there are no counters.
    """
    progress.show_step(f"counters of {trial.label} under {PROFILER}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "job", Path(scratch) / "ncu.csv"
        job = Job("counters", trial.runtime, trial, artifact=artifact)
        record = launch_in_turn(job, folder, timeout_s, progress, tool=build_command(tool, log))
        report = read_ncu(_read_text(log))
        log_errors = [read_ncu(_read_text(folder / name)).errors for name in ("stdout.log", "stderr.log")]
    return judge_counts(record, replace(report, errors=(*report.errors, *log_errors[0], *log_errors[1])), timeout_s)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def judge_counts(record: Record, report: NcuReport, timeout_s: float) -> NcuReport:
    """Return the report, with the reason if it is incomplete; raise `UserError` if it is empty."""
    if report.kernels and record.status == "ok" and not any(FAILURE_MARK in error for error in report.errors):
        return report
    reason = _find_reason(record, report.errors, timeout_s)
    if report.kernels:
        return replace(report, cut_short=reason)
    raise UserError(f"no hardware counters: {reason}")


def _find_reason(record: Record, errors: Sequence[str], timeout_s: float) -> str:
    """Return why kernels are missing; ncu's reason comes before the job's, as ncu may have ended the job."""
    known_cause = next((cause for sign, cause in FAILURE_CAUSES.items() if any(sign in error for error in errors)), "")
    if known_cause:
        return known_cause
    if record.status == "timeout":
        return f"{PROFILER} wasn't done after {timeout_s:g} s"
    if record.status == "ok" and not errors:
        return f"{PROFILER} saw no kernel between the start and the stop of its profiling"
    if record.status in ("failed", "skipped", "oom"):
        return record.reason
    failure = next((error for error in errors if FAILURE_MARK in error), "")
    if failure:
        other = next((error for error in errors if error != failure), "")
        detail = f" ({other.rstrip(':.')})" if other else ""
        return f"{PROFILER} {failure[0].lower()}{failure[1:]}{detail}; other programs may be using the GPU"
    return f"{PROFILER} says: {errors[0]}" if errors else record.reason
