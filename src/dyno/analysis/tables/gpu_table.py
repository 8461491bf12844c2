"""The GPU's telemetry for each trial, and how each round was sampled."""

from __future__ import annotations

import math

from dyno.analysis import stats
from dyno.analysis.formatting import bounded, limits, show
from dyno.analysis.presentation.table import COUNT, TEXT, Column, Row, Table, missing
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records import gpu_remarks
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.rounds import GPU as GPU_CLOCK
from dyno.analysis.records.rounds import HOST, LATENCIES, Round
from dyno.analysis.records.run_data import RunData
from dyno.analysis.records.timeline import TelemetrySummary
from dyno.analysis.tables.accuracy_tables import LABEL
from dyno.analysis.tables.trial_columns import FEW, PERCENTILES, few, parenthesised

ENDS = {"value": "", "low": "_low", "high": "_high"}  # of an interval, behind a column's name
STOPPED = {"interval": "narrow enough", "seconds": "time was up", "samples": "enough samples"}


def _make_gpu_table(run: RunData) -> Table:
    note = "While timing; memory and temperature are of the whole job, memory the peak less what was used before."
    rows = [_gpu_row(t, t.gpu) for t in run.records if t.gpu is not None]
    return GPU.of(GPU_COLUMNS, rows, notes=(note,))


def _gpu_row(t: TrialResult, summary: TelemetrySummary) -> Row:
    launch = gpu_remarks.launch(t)
    return {
        "label": t.label, "memory": 1e-6 * summary.memory, "utilisation": summary.utilisation, "clock": summary.clock,
        "lowest_clock": summary.clock_min, "power": summary.power, "temperature": summary.temperature,
        "limited_by": summary.throttle, "throttled_samples": sum(span.hit for span in gpu_remarks.throttled(t)),
        "others": summary.others, "outside_gpu_ms": 1e3 * launch.outside if launch else None,
    }  # fmt: skip


def _make_rounds_table(run: RunData) -> Table:
    rows = [row for t in run.records for row in rounds_of(t)]
    return ROUNDS.of(ROUND_COLUMNS, rows, group=("label",), below=doubts)


def doubts(rows: list[Row]) -> list[str]:
    """Return a note where a percentile of a round is in parentheses."""
    return [FEW] if any(few("p99", row.get("samples")) for row in rows) else []


def rounds_of(t: TrialResult) -> list[Row]:
    """Return a row for each round, boundary and clock that was timed; rounds are numbered from 1."""
    return [
        {"label": t.label, "trial": t.id, "round": r.number + 1, "status": r.status, "boundary": boundary,
         "clock": clock, **_make_sampling_cells(r, boundary, clock)}
        for r in t.rounds for boundary in LATENCIES for clock in (GPU_CLOCK, HOST)
        if r.measurement("latency", boundary, clock)
    ]  # fmt: skip


def _make_sampling_cells(r: Round, boundary: str, clock: str) -> Row:
    samples = r.samples("latency", boundary, clock)
    measured = r.measurement("latency", boundary, clock)
    stopped = measured.stopped if measured else ""
    reason = {"ended": STOPPED.get(stopped, stopped)}
    if not samples.size:
        return reason
    s, interval = stats.summary(samples), stats.median_interval(samples)
    percentiles = {f"{name}_s": stats.percentile_interval(samples, q) for name, q in PERCENTILES.items()}
    columns = {f"{name}{end}": getattr(p, key) for name, p in percentiles.items() for key, end in ENDS.items()}
    return reason | columns | {"samples": s.count, "median_s": s.median, "median_s_low": interval.low, "median_s_high":
                           interval.high, "mean_s": s.mean, "max_s": s.max}  # fmt: skip


def _make_duration_column(name: str, digits: int = 3) -> Column:
    def format_cell(row: Row) -> str:
        return show(row.get(name), "duration", digits)

    return Column(name, "of the samples", "s", title=name.removesuffix("_s"), cell=format_cell)


def _format_interval(row: Row) -> str:
    low, high = row.get("median_s_low"), row.get("median_s_high")
    if low is None or high is None or missing(low):
        return ""
    return (
        f"{show(low, 'duration')} to {show(high, 'duration')}"
        if bounded(low, high)
        else f"at least {show(low, 'duration')}"
    )


def _make_percentile_columns(name: str) -> tuple[Column, ...]:
    """Return columns of a percentile of a round's samples, and of the limits of its exact interval, printed with it."""

    def format_cell(row: Row) -> str:
        value, low, high = (row.get(f"{name}_s{end}", math.nan) for end in ENDS.values())
        if missing(value):
            return ""
        if few(name, row["samples"]):
            return parenthesised(show(value, "duration"), True)
        return show(value, "duration") + limits(low, high, lambda v: show(v, "duration"))

    column = Column(f"{name}_s", "of the samples, with its exact interval", "s", title=name, cell=format_cell)
    ends = (("_low", "lower"), ("_high", "upper"))
    return column, *(
        Column(f"{name}_s{end}", f"{words} limit of its 95 % interval", "s", cell=lambda _: "") for end, words in ends
    )


GPU_COLUMNS = (
    LABEL,
    Column("memory", "the peak less what was used before", "MB", COUNT),
    Column("utilisation", "of the SMs, mean while timing", "%", COUNT, "SM utilisation, %"),
    Column("clock", "of the SMs, median while timing", "MHz", COUNT, "SM clock, MHz"),
    Column("lowest_clock", "lowest while timing", "MHz", COUNT, "lowest"),
    Column("power", "mean while timing", "W", COUNT),
    Column("temperature", "highest of the job", "°C", COUNT, "hottest, °C"),
    Column("limited_by", "what limited the clock, with its share of the time", kind=TEXT, title="clock limited by"),
    Column("throttled_samples", "latencies taken while the GPU was throttled", kind=COUNT, title="throttled samples"),
    Column("others", "most processes of others while timing", kind=COUNT),
    Column("outside_gpu_ms", "latency by the host's clock less that by the GPU's", "ms", title="outside GPU, ms"),
)
GPU = TableKind(
    "gpu",
    "GPU",
    "A row per trial on a GPU: memory, utilisation, clocks, power, throttling, and time outside the GPU's work.",
    _make_gpu_table,
    "no trial ran on a GPU",
    "tables",
    5,
)
ROUND_COLUMNS = (
    LABEL,
    Column("trial", "the id", kind=TEXT),
    Column("round", "number, from 1", kind=COUNT),
    Column("status", "of the round", kind=TEXT),
    Column("boundary", "model or all", kind=TEXT),
    Column("clock", "gpu or host", kind=TEXT),
    Column("samples", "after the warm-up", kind=COUNT),
    _make_duration_column("median_s", 4),
    Column(
        "median_s_low", "lower limit of the median's 95 % interval", "s", title="95 % interval", cell=_format_interval
    ),
    Column("median_s_high", "upper limit of it", "s", cell=lambda _: ""),
    _make_duration_column("mean_s"),
    *_make_percentile_columns("p90"),
    *_make_percentile_columns("p95"),
    *_make_percentile_columns("p99"),
    _make_duration_column("max_s"),
    Column("ended", "why sampling ended", kind=TEXT, title="ended because"),
)
ROUNDS = TableKind(
    "rounds",
    "Rounds",
    "A row per trial, round, boundary and clock: samples, median with its interval, and why sampling ended.",
    _make_rounds_table,
    "nothing was timed",
)
