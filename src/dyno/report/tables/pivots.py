"""Side-by-side tables, as in published comparisons, and tables over sizes and batches (see docs/tables.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dyno.formatting import NO_IMAGE, UNCLEAR_WORD, format_number, format_size, is_bounded, name_items, short_bound
from dyno.report.tables import TableKind
from dyno.report.tables.accuracy_tables import MAX_PAIRS
from dyno.report.tables.trial_table import (
    FEW_SAMPLES_NOTE,
    STATISTICS,
    format_outcome,
    has_few_samples,
    mark_doubtful,
    pick,
)
from dyno.results import metrics
from dyno.results.metrics import agreement, precision
from dyno.results.ranking import (
    SATURATION_SHARE,
    SERIES,
    configuration_of,
    find_saturation,
    list_usable,
    read_fps,
    read_throughput,
)
from dyno.results.run_data import RunData
from dyno.table import COUNT, KIND_FORMATS, NUMBER, PERCENT, RATIO, TEXT, Column, Row, Table, is_missing
from dyno.worker.numerics.closeness import ATOL, RTOL

if TYPE_CHECKING:
    import pandas as pd

KEY_COLUMNS = ("model", "size", "batch")
STATISTIC_COLUMN = Column("statistic", "which statistic of the trials it is", kind=TEXT)
INTERVAL_COLUMNS = ("interval from", "interval to")  # interval of the speed-up
STATISTIC_COLUMNS = {**{name: name for name in STATISTICS if name != "std"}, "trimmed std": "trimmed_std"}


def make_pivot(
    kind: TableKind, run: RunData, columns: Mapping[str, str], value_kind: str = NUMBER, samples: str = "", **extra: Any
) -> Table | None:
    """Build one row per statistic, model, size and batch, with a column per configuration; None without numbers.

    `columns` maps a statistic's name to a column of the frame or of `extra`; `value_kind` is the kind of its numbers,
    `samples` the frame's column of sample counts. A trial without a number is printed as its status, which is empty in
    CSV and JSON.
    """
    frame = run.frame.assign(**extra)
    columns = {k: c for k, c in columns.items() if frame[c].notna().any()}
    if not columns:
        return None
    rows = frame.assign(
        configuration=[configuration_of(r) for _, r in frame.iterrows()], **frame[list(columns.values())].astype(float)
    )
    has_number = rows.groupby("configuration", sort=False)[list(columns.values())].count().sum(axis=1) > 0
    is_refused = rows.groupby("configuration", sort=False)["status"].agg(lambda s: set(s) <= {"ok", "skipped"})
    configurations = sorted(
        (name for name in has_number.index if has_number[name] or not is_refused[name]), key=_make_sort_key(rows)
    )
    pivoted: list[Row] = []
    for statistic, column in columns.items():
        for key, group in rows.groupby(list(KEY_COLUMNS), sort=False):
            values = dict(zip(group["configuration"], group[column], strict=True))
            names = list(group["configuration"])
            substitutes = {
                name: _choose_substitute(r, statistic) for name, (_, r) in zip(names, group.iterrows(), strict=True)
            }
            sample_counts = zip(names, group[samples], strict=True) if samples else ()
            doubtful_names = {name for name, count in sample_counts if has_few_samples(statistic, count)}
            row = {
                "statistic": statistic,
                **dict(zip(KEY_COLUMNS, key, strict=True)),
                "instead": substitutes,
                "few": doubtful_names,
            }
            pivoted.append(row | {name: values.get(name) for name in configurations})
    table_columns = (
        STATISTIC_COLUMN,
        *pick(*KEY_COLUMNS),
        *(
            # A column mixes statistics; only some are whole numbers.
            Column(
                name,
                "of this configuration",
                kind=NUMBER if value_kind == COUNT else value_kind,
                cell=_make_formatter(name, value_kind),
            )
            for name in configurations
        ),
    )
    return kind.build(table_columns, pivoted, group=("statistic",), notes=_left_out(rows, configurations),
                   below=lambda rows: [FEW_SAMPLES_NOTE] if any(row["few"] for row in rows) else [])  # fmt: skip


def _make_formatter(name: str, kind: str) -> Callable[[Row], str]:
    def format_cell(row: Row) -> str:
        substitute: str = row["instead"].get(name, "")
        number_text = "" if is_missing(row[name]) else mark_doubtful(KIND_FORMATS[kind](row[name]), name in row["few"])
        return substitute or number_text

    return format_cell


def _choose_substitute(row: pd.Series, statistic: str) -> str:
    """Return the text in place of a number: the trial's status, or the useful limit of a wide interval."""
    low, high = row["speedup_low"], row["speedup_high"]
    if statistic in INTERVAL_COLUMNS and not is_missing(low) and not is_bounded(low, high):
        return short_bound(low, high) if statistic == INTERVAL_COLUMNS[0] else UNCLEAR_WORD
    return str(row["status"]) if row["status"] != "ok" else ""


def _make_sort_key(rows: pd.DataFrame) -> Callable[[str], tuple[bool, int]]:
    """Return the sort key of columns: PyTorch first, then in the run's order."""
    names = list(dict.fromkeys(rows["configuration"]))
    return lambda name: (not name.startswith("pytorch"), names.index(name))


def _left_out(rows: pd.DataFrame, configurations: list[str]) -> tuple[str, ...]:
    """Return the configurations without a column, with the reason for their refusal."""
    refusals = rows[~rows["configuration"].isin(configurations) & (rows["status"] == "skipped")]
    refusals = refusals.drop_duplicates(["configuration", "reason"])
    return tuple(f"{r['configuration']} was skipped: {r['reason']}" for _, r in refusals.iterrows())


def _compute_equal(run: RunData) -> list[float | None]:
    """Return the percentage of output values close to the reference's, for each row of the frame."""
    shares: list[float | None] = []
    for index, name in enumerate(run.frame["trial"]):
        trial, reference = run.trials[name], run.references.get(name)
        is_comparable = index < MAX_PAIRS and reference is not None and reference is not trial and bool(trial.good)
        result = agreement.read_agreement(trial, reference) if is_comparable and reference is not None else None
        shares.append(100 * result.close if result else None)
    return shares


def _make_kind(
    name: str,
    title: str,
    description: str,
    place: int,
    columns: Mapping[str, str],
    value_kind: str = NUMBER,
    samples: str = "",
    **extra: Callable[[RunData], Any],
) -> TableKind:
    """Return the table kind of a `make_pivot`; `extra` compute further columns of the frame."""

    def make(run: RunData) -> Table | None:
        return make_pivot(
            kind, run, columns, value_kind, samples, **{key: compute(run) for key, compute in extra.items()}
        )

    kind = TableKind(name, title, description, make, f"no trial has a number for {name}", "side", place)
    return kind


LATENCY_MODEL = _make_kind(
    "latency-model", "Latency/model, ms per batch",
    "Milliseconds per batch with inputs and outputs on the device, side by side.", 1,
    {name: f"latency_model_ms_{column}" for name, column in STATISTIC_COLUMNS.items()}, samples="samples_model",
)  # fmt: skip
LATENCY_ALL = _make_kind(
    "latency-all", "Latency/all, ms per batch",
    "Milliseconds per batch from host memory to host memory, side by side.", 2,
    {name: f"latency_all_ms_{column}" for name, column in STATISTIC_COLUMNS.items()}, samples="samples_all",
)  # fmt: skip
THROUGHPUT = _make_kind(
    "throughput", "Throughput",
    "Throughput with batches queued, and of one batch after another, side by side.", 3,
    {"throughput, per second": "throughput_ips", "FPS, one batch after another": "fps"},
    fps=lambda run: read_fps(run.frame),
)  # fmt: skip
SPEEDUP = _make_kind(
    "speedup", "Speed-up over the reference",
    "Speed-up over the reference with its 95 % interval, side by side.", 4,
    {"times as fast": "speedup", INTERVAL_COLUMNS[0]: "speedup_low", INTERVAL_COLUMNS[1]: "speedup_high"}, PERCENT,
)  # fmt: skip
ACCURACY = _make_kind(
    "accuracy", "Accuracy", "The metrics of the task in percent, side by side.", 5,
    {f"{metric.label}, %": metric.column for metric in metrics.list_metrics().values()}, PERCENT,
)  # fmt: skip
EQUALITY = _make_kind(
    "equality", f"Outputs equal to the reference's (rtol {RTOL:g}, atol {ATOL:g})",
    "Share of output values close to the reference's, side by side; where all are below 1, atol is a share.", 6,
    {"values, %": "equal"}, PERCENT,
    equal=_compute_equal,
)  # fmt: skip
LAYERS = _make_kind(
    "layers", "What the engine is", "File size, layers and parameters, side by side.", 7,
    {"file, MB": "size_mb", "layers": "layers", "parameters": "parameters"}, COUNT,
)  # fmt: skip
MEMORY = _make_kind(
    "memory", "Peak memory", "Peak memory of the GPU and of the process, side by side.", 8,
    {"on the GPU, MB": "gpu_memory_mb", "of the process, MB": "memory_mb"},
)  # fmt: skip


CONFIGURATION_COLUMN = Column("configuration", "backend with its options, and precision", kind=TEXT)
TRIAL_COLUMNS = (*pick(*KEY_COLUMNS), CONFIGURATION_COLUMN)


def _copy_identity(row: pd.Series) -> Row:
    return {**{key: row[key] for key in KEY_COLUMNS}, "configuration": configuration_of(row)}


def _make_limit_column(name: str) -> Column:
    def format_cell(row: Row) -> str:
        if is_missing(row[name]):
            return ""
        return f"{row[name]:.2f}" if is_bounded(row["from"], row["to"]) else UNCLEAR_WORD

    return Column(name, "limit of the 95 % interval of the speed-up", kind=RATIO, cell=format_cell)


def _make_sizes_table(run: RunData) -> Table | None:
    """Build rows of trimmed mean and deviation, FPS, memory and speed-up of each trial (R33, R34)."""
    frame = run.frame.assign(fps=read_fps(run.frame))
    if frame["fps"].isna().all():
        return None
    rows = frame[frame["fps"].notna() | ~frame["status"].isin(["ok", "skipped"])]
    boundary = "model" if frame["latency_model_ms_trimmed"].notna().any() else "all"
    on_gpu = bool(rows["gpu_memory_mb"].notna().any())
    source = "the GPU, above the level before the job" if on_gpu else "the job's process, Python and library included"
    note = (
        f"Mean and std are of latency/{boundary} without the fastest and the slowest 10 % of the samples. FPS is the "
        f"batch over the median latency. Memory is the peak of {source}."
    )
    cells = [
        {
            **_copy_identity(r), "mean": r[f"latency_{boundary}_ms_trimmed"],
            "std": r[f"latency_{boundary}_ms_trimmed_std"], "fps": r["fps"], "throughput": r["throughput_ips"],
            "memory": r["gpu_memory_mb" if on_gpu else "memory_mb"], "speedup": r["speedup"],
            "from": r["speedup_low"], "to": r["speedup_high"], "verdict": format_outcome(r.to_dict()),
        }
        for _, r in rows.iterrows()
    ]  # fmt: skip
    return SIZES.build(SIZE_COLUMNS, cells, notes=(note,))


def _make_flops_table(run: RunData) -> Table | None:
    """Build rows of the achieved TFLOPS and their share of the measured peak (R36)."""
    rows = run.frame[run.frame["tflops"].notna()]
    if not len(rows):
        return None
    results, peaks = run.records, precision.find_peaks(run.records)
    peak_warnings = results.peak.warnings if results.peak else ()
    cells = [
        {
            **_copy_identity(r), "gflop": r["gflops"], "tflops": r["tflops"],
            "ran_in": precision.ran_in(run.trials[r["trial"]]) or "unknown", "peak": r["peak_tflops"],
            "share": 100 * r["peak_share"],
        }
        for _, r in rows.iterrows()
    ]  # fmt: skip
    notes = [
        "Operations are those of convolutions and matrix products in the PyTorch or ONNX model; a multiply-add counts "
        "as two. TFLOPS are over the median of latency/model."
    ]
    notes += [_describe_peak(peak) for peak in peaks.values()] or [precision.explain_missing_work(results)]
    notes += [f"The peak may be too low: {warning}." for warning in peak_warnings]
    if any(share > 1 for share in rows["peak_share"].dropna()):
        notes.append(
            "More than 100 %: the device can do more than PyTorch's matrix product, or an engine did less than "
            "the model's operations (Winograd's convolutions)."
        )
    return FLOPS.build(FLOPS_COLUMNS, cells, notes=tuple(filter(None, notes)))


def _describe_peak(peak: precision.Peak) -> str:
    clock = f", SM clock {peak.clock:,.0f} MHz" if peak.clock == peak.clock else ""
    return (
        f"Peak in {peak.type}: {format_number(peak.flops_per_s / 1e12)} TFLOPS, measured with PyTorch's product of two "
        f"{peak.side:,} × {peak.side:,} matrices{clock}."
    )


def _make_saturation_table(run: RunData) -> Table:
    """Build rows of the batch beyond which throughput hardly grows (R37)."""
    rows = [
        {
            "model": s.model, "size": s.size, "configuration": s.configuration, "batch": s.batch,
            "images_per_s": s.images_per_s,
            "best_batch": s.best_batch, "best_images_per_s": s.best_images_per_s, "words": s.description,
        }
        for s in find_saturation(run.frame)
    ]  # fmt: skip
    return SATURATION.build(SATURATION_COLUMNS, rows)


def _make_best_table(run: RunData) -> Table | None:
    """Build rows of the best batch per configuration and size, in images and in pixels per second (R37).

    Notes name the overall best; None with one size and one batch.
    """
    rows = list_usable(run.frame).assign(ips=read_throughput(list_usable(run.frame))).dropna(subset=["ips"])
    if rows["size"].nunique() < 2 and rows["batch"].nunique() < 2:
        return None
    best_rows = [group.loc[group["ips"].idxmax()] for _, group in rows.groupby(list(SERIES), sort=False)]
    cells = [
        {"model": r["model"], "configuration": configuration_of(r), "size": r["size"], "batch": int(r["batch"]),
         "images_per_s": r["ips"], "megapixels_per_s": r["ips"] * _count_pixels(r["size"]) / 1e6}
        for r in best_rows
    ]  # fmt: skip
    return BEST.build(BEST_COLUMNS, cells, notes=tuple(_find_winners(cells)))


def _find_winners(best_rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield for each model the combination with the highest throughput and, across sizes, with the most pixels."""
    for model in dict.fromkeys(row["model"] for row in best_rows):
        rows = [row for row in best_rows if row["model"] == model]
        for column, unit in (
            ("images_per_s", f"{name_items(*(row['size'] for row in rows))}/s"),
            ("megapixels_per_s", "megapixels/s"),
        ):
            if column == "megapixels_per_s" and len({row["size"] for row in rows}) == 1:
                continue
            r = max(rows, key=lambda row: row[column])
            setting = f"{format_size(r['size'], 'size ')}, batch {r['batch']}, with {r['configuration']}".lstrip(", ")
            yield f"{model}: most {unit}, {format_number(r[column])}, at {setting}."


def _count_pixels(size: str) -> float:
    height, _, width = size.partition("x")
    if size == NO_IMAGE:
        return math.nan
    return float(height) * float(width or height)


SIZE_COLUMNS = (
    *TRIAL_COLUMNS,
    Column("mean", "trimmed mean of the latency", "ms"),
    Column("std", "standard deviation of the same samples", "ms"),
    Column("fps", "the batch over the median latency", title="FPS"),
    Column("throughput", "with batches queued", "images/s"),
    Column("memory", "peak of the GPU or of the process", "MB"),
    Column("speedup", "over the reference", kind=RATIO, title="speed-up"),
    _make_limit_column("from"),
    _make_limit_column("to"),
    Column("verdict", "against the reference, or how the trial ended", kind=TEXT),
)
SIZES = TableKind(
    "sizes", "Sizes and batches",
    "A row per trial: trimmed mean and deviation, FPS, throughput, memory, speed-up with its interval, verdict.",
    _make_sizes_table, "no trial has a latency", "side", 9,
)  # fmt: skip
FLOPS_COLUMNS = (
    *TRIAL_COLUMNS,
    Column("gflop", "operations of one image", title="GFLOP per image"),
    Column("tflops", "operations per second at the median latency", title="TFLOPS"),
    Column("ran_in", "the type that most of the arithmetic ran in", kind=TEXT, title="ran mostly in"),
    Column("peak", "the measured peak in that type", title="peak TFLOPS"),
    Column("share", "of that peak", "%", PERCENT, "of the peak, %"),
)
FLOPS = TableKind(
    "flops", "Arithmetic per second",
    "A row per trial: operations of an image, TFLOPS achieved, and their share of the measured peak.",
    _make_flops_table, "no operations were counted", "side", 10,
)  # fmt: skip
SATURATION_COLUMNS = (
    *pick("model", "size"),
    CONFIGURATION_COLUMN,
    Column(
        "batch",
        "the smallest that reaches that share",
        kind=COUNT,
        title=f"{100 * SATURATION_SHARE:.0f} % of best at batch",
    ),
    Column("images_per_s", "there", "images/s", title="images/s there"),
    Column("best_batch", "with the most images per second", kind=COUNT, title="best batch"),
    Column("best_images_per_s", "there", "images/s", title="best images/s"),
    Column("words", "the same in words", kind=TEXT, title="in words", rank=1),
)
SATURATION = TableKind(
    "saturation", "Where throughput saturates",
    "A row per configuration: the batch beyond which throughput grows by less than 5 %.", _make_saturation_table,
    "no configuration was tried at several batches", "tables", 2,
)  # fmt: skip
BEST_COLUMNS = (
    *pick("model"),
    CONFIGURATION_COLUMN,
    *pick("size"),
    Column("batch", "with the most images per second", kind=COUNT, title="best batch"),
    Column("images_per_s", "there", "images/s", title="images/s"),
    Column("megapixels_per_s", "there", "megapixels/s", title="megapixels/s"),
)
BEST = TableKind(
    "best", "The best batch at each size",
    "The best batch of each configuration at each size, in images and in megapixels per second, and the best of all.",
    _make_best_table, "there is one size and one batch", "side", 11,
)  # fmt: skip
