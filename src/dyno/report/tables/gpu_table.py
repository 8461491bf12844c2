"""Tables of GPU telemetry per trial, sampling per round, stress tests, energy and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dyno.formatting import is_bounded, show
from dyno.report.tables import TableKind
from dyno.report.tables.accuracy_tables import LABEL_COLUMN, copy_columns
from dyno.report.tables.trial_table import FEW_SAMPLES_NOTE, PERCENTILES, has_few_samples, mark_doubtful, pick
from dyno.results import stats, timeline
from dyno.results.energy import NOT_ASKED, Meter
from dyno.results.rounds import GPU as GPU_CLOCK
from dyno.results.rounds import HOST, LATENCIES, Round
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.table import COUNT, TEXT, Column, Row, Table, duration_column, is_missing, keep_printed
from dyno.worker.facts.job import StressPhase

INTERVAL_SUFFIXES = {"value": "", "low": "_low", "high": "_high"}  # column suffixes of an interval
STOP_REASONS = {"interval": "narrow enough", "seconds": "time was up", "samples": "enough samples"}


def _make_gpu_table(run: RunData) -> Table:
    note = "While timing; memory and temperature are of the whole job, memory the peak above the level before it."
    rows = [
        copy_columns(run, row, GPU_COPIED) | {"gpu_clock_min_mhz": t.gpu.clock_min}
        for _, row in run.frame.iterrows()
        if (t := run.trials[row["trial"]]).gpu is not None
    ]
    return GPU.build(GPU_COLUMNS, rows, notes=(note,))


def _make_rounds_table(run: RunData) -> Table:
    rows = [row for t in run.records for row in rounds_of(t)]
    return ROUNDS.build(ROUND_COLUMNS, rows, group=("label",), below=list_doubts)


def list_doubts(rows: list[Row]) -> list[str]:
    """Return a note if any percentile of a round is in parentheses."""
    return [FEW_SAMPLES_NOTE] if any(has_few_samples("p99", row.get("samples")) for row in rows) else []


def rounds_of(trial: TrialResult) -> list[Row]:
    """Return a row for each round, boundary and clock that was timed; round numbers start at 1."""
    return [
        {"label": trial.label, "trial": trial.id, "round": r.round_index + 1, "status": r.status, "boundary": boundary,
         "clock": clock, **_make_sampling_cells(r, boundary, clock)}
        for r in trial.rounds for boundary in LATENCIES for clock in (GPU_CLOCK, HOST)
        if r.find_measurement("latency", boundary, clock)
    ]  # fmt: skip


def _make_sampling_cells(r: Round, boundary: str, clock: str) -> Row:
    samples = r.samples("latency", boundary, clock)
    measurement = r.find_measurement("latency", boundary, clock)
    stopped = measurement.stopped if measurement else ""
    reason = {"ended": STOP_REASONS.get(stopped, stopped)}
    if not samples.size:
        return reason
    s, interval = stats.summarise(samples), stats.median_interval(samples)
    percentiles = zip(PERCENTILES, stats.percentile_intervals(samples, PERCENTILES.values()), strict=True)
    columns = {f"{name}_s{end}": getattr(p, key) for name, p in percentiles for key, end in INTERVAL_SUFFIXES.items()}
    return reason | columns | {"samples": s.count, "median_s": s.median, "median_s_low": interval.low, "median_s_high":
                               interval.high, "mean_s": s.mean, "max_s": s.max}  # fmt: skip


def _format_interval(row: Row) -> str:
    low, high = row.get("median_s_low"), row.get("median_s_high")
    if low is None or high is None or is_missing(low):
        return ""
    return (
        f"{show(low, 'duration')} to {show(high, 'duration')}"
        if is_bounded(low, high)
        else f"at least {show(low, 'duration')}"
    )


def _make_percentile_columns(name: str) -> tuple[Column, ...]:
    """Return columns of a percentile of a round's samples and its exact interval, printed together."""
    base_column = duration_column(f"{name}_s", "of the samples, with its exact interval")

    def format_cell(row: Row) -> str:
        is_doubtful = not is_missing(value := row.get(base_column.name)) and has_few_samples(name, row["samples"])
        return mark_doubtful(show(value, "duration"), True) if is_doubtful else base_column.text(row)

    column = replace(base_column, cell=format_cell)
    ends = (("_low", "lower"), ("_high", "upper"))
    return column, *(
        Column(f"{name}_s{end}", f"{bound} limit of its 95 % interval", "s", cell=lambda _: "") for end, bound in ends
    )


GPU_COPIED = (
    "gpu_memory_mb", "gpu_util", "gpu_clock_mhz", "gpu_power_w", "gpu_temperature_c", "throttle", "throttled_samples",
    "gpu_others", "queued_ms", "outside_gpu_ms",
)  # fmt: skip
GPU_COLUMNS = (
    LABEL_COLUMN,
    *pick(*GPU_COPIED[:3]),
    Column("gpu_clock_min_mhz", "lowest SM clock while timing", "MHz", COUNT, "lowest, MHz"),
    *pick(*GPU_COPIED[3:]),
)
GPU = TableKind(
    "gpu", "GPU",
    "A row per trial on a GPU: memory, utilisation, clocks, power, throttling, and time outside the GPU's work.",
    _make_gpu_table, "no trial ran on a GPU", "tables", 5,
)  # fmt: skip
ROUND_COLUMNS = (
    LABEL_COLUMN,
    Column("trial", "the id", kind=TEXT),
    Column("round", "number, from 1", kind=COUNT),
    Column("status", "of the round", kind=TEXT),
    Column("boundary", "model or all", kind=TEXT),
    Column("clock", "gpu or host", kind=TEXT),
    Column("samples", "after the warm-up", kind=COUNT),
    Column(
        "median_s", "of the samples", "s", title="median", cell=lambda row: show(row.get("median_s"), "duration", 4)
    ),
    Column(
        "median_s_low", "lower limit of the median's 95 % interval", "s", title="95 % interval", cell=_format_interval
    ),
    Column("median_s_high", "upper limit of it", "s", cell=lambda _: ""),
    duration_column("mean_s", "of the samples"),
    *_make_percentile_columns("p90"),
    *_make_percentile_columns("p95"),
    *_make_percentile_columns("p99"),
    duration_column("max_s", "of the samples"),
    Column("ended", "why sampling ended", kind=TEXT, title="ended because"),
)
ROUNDS = TableKind(
    "rounds", "Rounds",
    "A row per trial, round, boundary and clock: samples, median with its interval, and why sampling ended.",
    _make_rounds_table, "nothing was timed",
)  # fmt: skip


# Stress test of an engine with several batch sizes: a row per phase.


def make_stress_table(title: str, phases: Mapping[str, StressPhase], samples: Mapping[str, np.ndarray]) -> Table:
    """Build a row for each phase of a record; `samples` holds its latencies, `latency_KIND`, in seconds."""
    rows = [_make_stress_row(kind, phase, samples[f"latency_{kind}"]) for kind, phase in phases.items()]
    return STRESS.build(STRESS_COLUMNS, [{"title": title, **row} for row in rows], group=("title",))


def _make_stress_row(kind: str, phase: StressPhase, seconds: np.ndarray) -> Row:
    latency = stats.summarise(seconds)
    low, high = phase.batches
    return {
        "phase": kind, "batch": str(low) if low == high else f"{low}-{high}", "count": phase.iterations,
        "median_s": latency.median, "p99_s": latency.p99, "max_s": latency.max, "wrong": phase.wrong,
        "worst_error": phase.worst, "gpu_growth": float(phase.device_growth),
        "host_growth": float(phase.host_growth),
    }  # fmt: skip


STRESS_COLUMNS = (
    Column("title", "the trial", kind=TEXT),
    Column("phase", "min, opt, max, random or a number", kind=TEXT),
    Column("batch", "or from-to", kind=TEXT),
    Column("count", "of batches that ran", kind=COUNT),
    *(duration_column(name, "latency per batch") for name in ("median_s", "p99_s", "max_s")),
    Column("wrong", "batches whose outputs differ from the reference's", kind=COUNT),
    Column("worst_error", "largest difference, as a share of the reference's largest value", title="worst error"),
    *(
        Column(
            f"{key}_growth",
            f"memory of the {of} at the end less that at the beginning",
            "B",
            title=f"{key} growth",
            hint="bytes",
        )
        for key, of in (("gpu", "GPU"), ("host", "process"))
    ),
)
STRESS = TableKind(
    "stress", "Stress test", "A row per phase: latencies, wrong outputs, growth of memory.",
    command="dyno bench stress ENGINE",
)  # fmt: skip


# Tables of telemetry: joules per image, and GPU memory by NVML and by the framework.

TABLE_NOTE = (
    "While images go through as fast as they can, from host memory to host memory, after the timing. Of a GPU it is "
    "the whole card by NVML's counter, without its host; of a CPU its packages by RAPL's, without memory. Idle is "
    "before the first job; the interval is between rounds."
)
MEMORY_NOTES = (
    "Above idle: peak memory of the card by NVML (and nvidia-smi), above the level before the job; of the round with "
    "the highest peak.",
    "Counted: the peak that PyTorch's allocator held, of which it gave out a part; for TensorRT the scratch memory of "
    "one execution context.",
    "The rest isn't counted there: the CUDA context, the code of kernels, libraries' workspaces, Dyno's inputs and "
    "outputs, and for TensorRT the weights and further contexts.",
)
BYTES_TO_MB = 1e-6


def _make_energy_table(run: RunData) -> Table | None:
    meter = Meter(run.records.folder)
    rows = [
        copy_columns(run, row, ENERGY_COPIED)
        | {"power_w": energy.watts, "images_s": energy.rate, "rounds": energy.rounds}
        for _, row in run.frame.iterrows()
        if (t := run.trials[row["trial"]]).good and (energy := meter.measure(t))
    ]
    if all(row["energy_missing"] == NOT_ASKED for row in rows):
        return None
    return ENERGY.build(ENERGY_COLUMNS, rows, notes=(TABLE_NOTE,), printed=keep_printed(ENERGY_COLUMNS))


def _make_memory_table(run: RunData) -> Table | None:
    rows = [_memory_row(t) for t in run.records if t.gpu is not None]
    return MEMORY.build(MEMORY_COLUMNS, rows, notes=MEMORY_NOTES) if rows else None


def _memory_row(trial: TrialResult) -> Row:
    summaries = [timeline.summarise_timeline(r.trace, ()) for r in trial.good if r.trace is not None]
    peak = max(summaries, key=lambda summary: -1.0 if math.isnan(summary.memory) else summary.memory)
    net, before = BYTES_TO_MB * peak.memory, BYTES_TO_MB * peak.memory_before
    row: Row = {"label": trial.label, "trial": trial.id, "before_mb": before, "peak_mb": before + net, "net_mb": net}
    reserved, scratch = trial.facts.reserved, trial.facts.engine_memory
    counted = reserved if reserved is not None else scratch
    if counted is None:
        return row
    allocated = {} if trial.facts.allocated is None else {"given_mb": BYTES_TO_MB * trial.facts.allocated}
    return {**row, **allocated, "counter": "PyTorch's allocator" if counted is reserved else "scratch of a context",
            "counted_mb": BYTES_TO_MB * counted, "rest_mb": net - BYTES_TO_MB * counted}  # fmt: skip


MEMORY_COLUMNS = (
    Column("label", "of the trial", kind=TEXT, title="trial"),
    Column("trial", "the id", kind=TEXT, rank=3),
    Column("before_mb", "used on the card before the job began", "MB", COUNT, "before, MB", rank=1),
    Column("peak_mb", "peak memory used on the card, by nvidia-smi", "MB", COUNT, "nvidia-smi, MB"),
    Column("net_mb", "peak above the level before the job", "MB", COUNT, "above idle, MB"),
    Column("counter", "what counts in the process", kind=TEXT, title="counted by"),
    Column("given_mb", "peak memory that PyTorch's allocator gave out", "MB", COUNT, "given out, MB", rank=2),
    Column("counted_mb", "peak memory that it held", "MB", COUNT, "counted, MB"),
    Column("rest_mb", "above idle, and not counted", "MB", COUNT, "rest, MB"),
)
MEMORY = TableKind(
    "gpu-memory", "GPU memory",
    "A row per trial on a GPU: memory by nvidia-smi above the idle card's, and by the framework's own count.",
    _make_memory_table, "no trial ran on a GPU", "tables", 7,
)  # fmt: skip
ENERGY_COPIED = (
    "energy_j", "energy_j_low", "energy_j_high", "energy_gross_j", "idle_w", "trial", "energy_missing",
)  # fmt: skip
ENERGY_COLUMNS = (
    LABEL_COLUMN,
    *pick(*ENERGY_COPIED),
    Column("power_w", "mean meanwhile", "W"),
    Column("images_s", "meanwhile", "1/s", title="images/s", rank=1),
    Column("rounds", "that it is from", kind=COUNT, rank=2),
)
ENERGY = TableKind(
    "energy", "Energy",
    "A row per trial: joules per image with an interval, without idle power, or why there are none.",
    _make_energy_table, "no trial was measured with --energy", "tables", 6,
)  # fmt: skip
