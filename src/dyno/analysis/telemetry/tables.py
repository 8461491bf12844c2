"""Tables of telemetry: joules of an image, and the memory of a GPU as NVML and as the framework count it."""

from __future__ import annotations

import math

from dyno.analysis.presentation.limits import limited
from dyno.analysis.presentation.table import COUNT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records import timeline
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.telemetry.energy import NOT_ASKED, Meter

NOTE = (
    "While images go through as fast as they can, from host memory to host memory, after the timing. Of a GPU it is "
    "the whole card by NVML's counter, without its host; of a CPU its packages by RAPL's, without memory. Idle is "
    "before the first job; the interval is between rounds."
)
MEMORY_NOTES = (
    "Above idle: the most that NVML (and nvidia-smi) saw on the card, less what was used before the job began; of the "
    "round with the most.",
    "Counted: the most that PyTorch's allocator held, of which it gave out a part; of TensorRT the scratch memory of "
    "one execution context.",
    "The rest isn't counted there: the CUDA context, the code of kernels, libraries' workspaces, Dyno's inputs and "
    "outputs, and of TensorRT the weights and further contexts.",
)
MB = 1e-6


def _make_energy_table(run: RunData) -> Table | None:
    meter = Meter(run.records.folder)
    rows = [_make_row(t, meter) for t in run.records if t.good]
    if all(row["missing"] == NOT_ASKED for row in rows):
        return None
    return ENERGY.of(COLUMNS, rows, notes=(NOTE,))


def _make_row(t: TrialResult, meter: Meter) -> Row:
    found = meter.of(t)
    return {
        "label": t.label, "trial": t.id, **limited("energy_j", found.net), "gross_j": found.gross,
        "power_w": found.watts, "idle_w": found.idle, "images_s": found.rate, "rounds": found.rounds,
        "missing": found.missing,
    }  # fmt: skip


def _make_memory_table(run: RunData) -> Table | None:
    rows = [_memory_row(t) for t in run.records if t.gpu is not None]
    return MEMORY.of(MEMORY_COLUMNS, rows, notes=MEMORY_NOTES) if rows else None


def _memory_row(t: TrialResult) -> Row:
    rounds = [timeline.summary(r.trace, ()) for r in t.good if r.trace is not None]
    most = max(rounds, key=lambda one: -1.0 if math.isnan(one.memory) else one.memory)
    net, before = MB * most.memory, MB * most.memory_before
    row: Row = {"label": t.label, "trial": t.id, "before_mb": before, "peak_mb": before + net, "net_mb": net}
    reserved, scratch = t.facts.reserved, t.facts.engine_memory
    counted = reserved if reserved is not None else scratch
    if counted is None:
        return row
    given = {} if t.facts.allocated is None else {"given_mb": MB * t.facts.allocated}
    return {**row, **given, "counter": "PyTorch's allocator" if counted is reserved else "scratch of a context",
            "counted_mb": MB * counted, "rest_mb": net - MB * counted}  # fmt: skip


MEMORY_COLUMNS = (
    Column("label", "of the trial", kind=TEXT, title="trial"),
    Column("trial", "the id", kind=TEXT, rank=3),
    Column("before_mb", "used on the card before the job began", "MB", COUNT, "before, MB", rank=1),
    Column("peak_mb", "the most used on the card, as nvidia-smi has it", "MB", COUNT, "nvidia-smi, MB"),
    Column("net_mb", "that less what was used before", "MB", COUNT, "above idle, MB"),
    Column("counter", "what counts in the process", kind=TEXT, title="counted by"),
    Column("given_mb", "the most that PyTorch's allocator gave out", "MB", COUNT, "given out, MB", rank=2),
    Column("counted_mb", "the most that it held", "MB", COUNT, "counted, MB"),
    Column("rest_mb", "above idle, and not counted", "MB", COUNT, "rest, MB"),
)
MEMORY = TableKind(
    "gpu-memory",
    "GPU memory",
    "A row per trial on a GPU: memory as nvidia-smi has it, less the idle card's, and as the framework counts it.",
    _make_memory_table,
    "no trial ran on a GPU",
    "tables",
    7,
)
COLUMNS = (
    Column("label", "of the trial", kind=TEXT, title="trial"),
    Column("trial", "the id", kind=TEXT, rank=3),
    Column("energy_j", "of an image, idle power taken off", "J", title="J/image", interval=True),
    Column("energy_j_low", "lower limit of its 95 % interval", "J", rank=9, cell=lambda _: ""),
    Column("energy_j_high", "upper limit of it", "J", rank=9, cell=lambda _: ""),
    Column("gross_j", "of an image, idle power included", "J", title="with idle, J/image", rank=1),
    Column("power_w", "mean meanwhile", "W"),
    Column("idle_w", "mean before the first job", "W"),
    Column("images_s", "meanwhile", "1/s", title="images/s", rank=1),
    Column("rounds", "that it is from", kind=COUNT, rank=2),
    Column("missing", "why there is none", kind=TEXT),
)
ENERGY = TableKind(
    "energy",
    "Energy",
    "A row per trial: joules of an image with an interval, idle power taken off, or why there are none.",
    _make_energy_table,
    "no trial was measured with --energy",
    "tables",
    6,
)
