"""What NVIDIA's ncu (Nsight Compute) prints as CSV (`--csv --page raw --print-units base --nvtx`), read.

Of each kernel there is a line with its metrics and the NVTX ranges in which it was launched; see the Nsight Compute CLI
manual, https://docs.nvidia.com/nsight-compute/NsightComputeCli/. Read with ncu 2025.3.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dyno.worker.facts.engine import shorten_kernel

# Figures of a kernel by ncu's name of the metric; `ncu --query-metrics` and the Profiling Guide say what they are.
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l2": "lts__t_sector_hit_rate.pct",
    "waves": "launch__waves_per_multiprocessor",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
}
SMS = {"sms": "launch__sm_count"}  # which comes without being asked for, but not with every version
SCALE = {"ns": 1e-9, "nsecond": 1e-9}  # base units that aren't those of the figures
RANGES, NAME = "Push/Pop_Range", "Kernel Name"
ERROR = "==ERROR=="
# Domain:Range:type and value of a payload:type and value of a colour:type and text of a message.
RANGE = re.compile(r"[^:]*:(.*?):(?:none:none|\w+:.*):(?:none:none|\w+:0x[0-9a-f]+):(?:none:none|\w+:(.*))")


@dataclass(frozen=True)
class Kernel:
    """One kernel and its figures; NaN is one that ncu didn't tell.

    `ranges` are the names of the NVTX ranges around its launch, the innermost last. `sm`, `memory`, `dram` and `tensor`
    are percent of the peak over the kernel's time: of the SMs' busiest unit, of the busiest part of the memory
    (caches included), of DRAM alone, and of the cycles in which the tensor cores worked. `warps` are percent of those
    that the SMs could hold while they worked, `l2` percent of the L2 cache's accesses that hit; `sms` is how many SMs
    the GPU has, and `waves` how often its blocks fill them.
    """

    name: str
    ranges: tuple[str, ...] = ()
    seconds: float = math.nan
    sm: float = math.nan
    memory: float = math.nan
    dram: float = math.nan
    dram_bytes: float = math.nan
    tensor: float = math.nan
    warps: float = math.nan
    l2: float = math.nan
    waves: float = math.nan
    blocks: float = math.nan
    threads: float = math.nan
    registers: float = math.nan
    sms: float = math.nan


@dataclass(frozen=True)
class NcuReport:
    """The kernels in the order of their launches, what ncu called errors, and why there are no more kernels ("": all
    are there)."""

    kernels: tuple[Kernel, ...]
    errors: tuple[str, ...] = ()
    cut_short: str = ""


def read(text: str) -> NcuReport:
    """Parse the report in ncu's output, with or without the profiled program's output before it."""
    lines = text.split("\n")  # not `splitlines`: TensorRT's JSON holds other separators
    errors = tuple(line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR))
    begin = next((k for k, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    rows = [line for line in lines[begin:] if line.startswith('"')]
    return NcuReport(tuple(_iter_kernels(rows)), errors)


def _iter_kernels(lines: Sequence[str]) -> Iterator[Kernel]:
    """Yield the kernels below a line of headings and one of units."""
    if len(lines) < 2:
        return
    heads, *rest = (next(csv.reader([line])) for line in lines[:2])
    units = dict(zip(heads, rest[0], strict=True))
    ranges = next((k for k, head in enumerate(heads) if RANGES in head), None)
    for line in lines[2:]:
        cells = next(csv.reader([line]))
        if len(cells) != len(heads) and ranges is not None:
            cells = _split_line(line, ranges, len(heads))
        if len(cells) != len(heads):  # ncu was ended within it
            continue
        row = dict(zip(heads, cells, strict=True))
        figures = {name: _parse_figure(row, units, metric) for name, metric in (METRICS | SMS).items()}
        around = _parse_ranges(cells[ranges]) if ranges is not None else ()
        yield Kernel(shorten_kernel(row[NAME]), around, **figures)


def _split_line(line: str, ranges: int, count: int) -> list[str]:
    """Split a line into cells where ncu left quotes inside its ranges unescaped, as it does with those of JSON."""
    cells = line.removeprefix('"').removesuffix('"').split('","', ranges)
    return [*cells[:-1], *cells[-1].rsplit('","', count - ranges - 1)]


def _parse_ranges(cell: str) -> tuple[str, ...]:
    """Return the names in a cell, from outermost to innermost: the message where there is one, else the range."""
    texts = re.findall(r'"(.+?)"(?="|  "|\s*$)', cell.replace('""', '"'))
    found = (RANGE.fullmatch(text) for text in texts)
    return tuple(match[2] or match[1] for match in found if match)


def _parse_figure(row: Mapping[str, str], units: Mapping[str, str], metric: str) -> float:
    try:
        return float(row[metric].replace(",", "")) * SCALE.get(units[metric], 1.0)
    except (KeyError, ValueError):  # a metric that this GPU hasn't got, or "n/a"
        return math.nan
