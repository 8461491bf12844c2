"""Tables of what changes with the size and the batch: a row per trial, or per configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dyno.formatting import NO_IMAGE, UNCLEAR, bounded, significant, sized
from dyno.report.table_kind import TableKind
from dyno.report.tables.trial_table import outcome, pick
from dyno.results.metrics import precision
from dyno.results.ranking import (
    SATURATED,
    SERIES,
    configuration_of,
    find_saturation,
    list_usable,
    read_fps,
    read_throughput,
)
from dyno.results.run_data import RunData
from dyno.table import COUNT, PERCENT, RATIO, TEXT, Column, Row, Table, missing

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("model", "size", "batch")
CONFIGURATION = Column("configuration", "backend with its options, and precision", kind=TEXT)
TRIAL = (*pick(*KEYS), CONFIGURATION)


def _copy_identity(row: pd.Series) -> Row:
    return {**{key: row[key] for key in KEYS}, "configuration": configuration_of(row)}


def _make_limit_column(name: str) -> Column:
    def format_cell(row: Row) -> str:
        if missing(row[name]):
            return ""
        return f"{row[name]:.2f}" if bounded(row["from"], row["to"]) else UNCLEAR

    return Column(name, "limit of the 95 % interval of the speed-up", kind=RATIO, cell=format_cell)


def _make_sizes_table(run: RunData) -> Table | None:
    """Build rows of trimmed mean and deviation, FPS, memory and speed-up of each trial (R33, R34)."""
    frame = run.frame.assign(fps=read_fps(run.frame))
    if frame["fps"].isna().all():
        return None
    rows = frame[frame["fps"].notna() | ~frame["status"].isin(["ok", "skipped"])]
    boundary = "model" if frame["latency_model_ms_trimmed"].notna().any() else "all"
    on_gpu = bool(rows["gpu_memory_mb"].notna().any())
    source = (
        "the GPU, above what was used before the job" if on_gpu else "the job's process, Python and library included"
    )
    note = (
        f"Mean and std are of latency/{boundary} without the fastest and the slowest 10 % of the samples. FPS is the "
        f"batch over the median latency. Memory is the peak of {source}."
    )
    cells = [
        {
            **_copy_identity(r), "mean": r[f"latency_{boundary}_ms_trimmed"],
            "std": r[f"latency_{boundary}_ms_trimmed_std"], "fps": r["fps"], "throughput": r["throughput_ips"],
            "memory": r["gpu_memory_mb" if on_gpu else "memory_mb"], "speedup": r["speedup"],
            "from": r["speedup_low"], "to": r["speedup_high"], "verdict": outcome(r.to_dict()),
        }
        for _, r in rows.iterrows()
    ]  # fmt: skip
    return SIZES.of(SIZE_COLUMNS, cells, notes=(note,))


def _make_flops_table(run: RunData) -> Table | None:
    """Build rows of the TFLOPS achieved and their share of the measured peak (R36)."""
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
        "Operations are those of convolutions and matrix products in the model as PyTorch or ONNX has it, a "
        "multiplication with its addition as two; TFLOPS are over the median of latency/model."
    ]
    notes += [_describe_peak(peak) for peak in peaks.values()] or [precision.explain_missing_work(results)]
    notes += [f"The peak may be too low: {warning}." for warning in peak_warnings]
    if any(share > 1 for share in rows["peak_share"].dropna()):
        notes.append(
            "More than 100 %: the device can do more than PyTorch's matrix product, or an engine did less than "
            "the model's operations (Winograd's convolutions)."
        )
    return FLOPS.of(FLOPS_COLUMNS, cells, notes=tuple(filter(None, notes)))


def _describe_peak(peak: precision.Peak) -> str:
    clock = f", SM clock {peak.clock:,.0f} MHz" if peak.clock == peak.clock else ""
    return (
        f"Peak in {peak.type}: {significant(peak.flops_per_s / 1e12)} TFLOPS, measured with PyTorch's product of two "
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
    return SATURATION.of(SATURATION_COLUMNS, rows)


def _make_best_table(run: RunData) -> Table | None:
    """Build rows of the best batch of each configuration and size, in images and in pixels per second (R37).

    Notes name the best of all; None with one size and one batch.
    """
    rows = list_usable(run.frame).assign(ips=read_throughput(list_usable(run.frame))).dropna(subset=["ips"])
    if rows["size"].nunique() < 2 and rows["batch"].nunique() < 2:
        return None
    best = [group.loc[group["ips"].idxmax()] for _, group in rows.groupby(list(SERIES), sort=False)]
    cells = [
        {"model": r["model"], "configuration": configuration_of(r), "size": r["size"], "batch": int(r["batch"]),
         "images_per_s": r["ips"], "megapixels_per_s": r["ips"] * _count_pixels(r["size"]) / 1e6}
        for r in best
    ]  # fmt: skip
    return BEST.of(BEST_COLUMNS, cells, notes=tuple(_find_winners(cells)))


def _find_winners(best: list[dict[str, Any]]) -> Iterator[str]:
    """Yield for each model the combination with the most images per second and, across sizes, with the most pixels."""
    for model in dict.fromkeys(row["model"] for row in best):
        rows = [row for row in best if row["model"] == model]
        for column, unit in (("images_per_s", "images/s"), ("megapixels_per_s", "megapixels/s")):
            if column == "megapixels_per_s" and len({row["size"] for row in rows}) == 1:
                continue
            r = max(rows, key=lambda row: row[column])
            best_at = f"{sized(r['size'], 'size ')}, batch {r['batch']}, with {r['configuration']}".lstrip(", ")
            yield f"{model}: most {unit}, {significant(r[column])}, at {best_at}."


def _count_pixels(size: str) -> float:
    height, _, width = size.partition("x")
    if size == NO_IMAGE:
        return math.nan
    return float(height) * float(width or height)


SIZE_COLUMNS = (
    *TRIAL,
    Column("mean", "trimmed mean of the latency", "ms"),
    Column("std", "standard deviation of the same samples", "ms"),
    Column("fps", "the batch over the median latency", title="FPS"),
    Column("throughput", "with batches queued", "images/s"),
    Column("memory", "most of the GPU or of the process", "MB"),
    Column("speedup", "over the reference", kind=RATIO, title="speed-up"),
    _make_limit_column("from"),
    _make_limit_column("to"),
    Column("verdict", "against the reference, or how the trial ended", kind=TEXT),
)
SIZES = TableKind(
    "sizes",
    "Sizes and batches",
    "A row per trial: trimmed mean and deviation, FPS, throughput, memory, speed-up with its interval, verdict.",
    _make_sizes_table,
    "no trial has a latency",
    "side",
    9,
)
FLOPS_COLUMNS = (
    *TRIAL,
    Column("gflop", "operations of one image", title="GFLOP per image"),
    Column("tflops", "operations per second at the median latency", title="TFLOPS"),
    Column("ran_in", "the type that most layers ran in", kind=TEXT, title="ran mostly in"),
    Column("peak", "the measured peak in that type", title="peak TFLOPS"),
    Column("share", "of that peak", "%", PERCENT, "of the peak, %"),
)
FLOPS = TableKind(
    "flops",
    "Arithmetic per second",
    "A row per trial: operations of an image, TFLOPS achieved, and their share of the measured peak.",
    _make_flops_table,
    "no operations were counted",
    "side",
    10,
)
SATURATION_COLUMNS = (
    *pick("model", "size"),
    CONFIGURATION,
    Column(
        "batch", "the smallest that reaches that share", kind=COUNT, title=f"{100 * SATURATED:.0f} % of best at batch"
    ),
    Column("images_per_s", "there", "images/s", title="images/s there"),
    Column("best_batch", "with the most images per second", kind=COUNT, title="best batch"),
    Column("best_images_per_s", "there", "images/s", title="best images/s"),
    Column("words", "the same in words", kind=TEXT, title="in words", rank=1),
)
SATURATION = TableKind(
    "saturation",
    "Where throughput saturates",
    "A row per configuration: the batch beyond which throughput grows by less than 5 %.",
    _make_saturation_table,
    "no configuration was tried at several batches",
    "tables",
    2,
)
BEST_COLUMNS = (
    *pick("model"),
    CONFIGURATION,
    *pick("size"),
    Column("batch", "with the most images per second", kind=COUNT, title="best batch"),
    Column("images_per_s", "there", "images/s", title="images/s"),
    Column("megapixels_per_s", "there", "megapixels/s", title="megapixels/s"),
)
BEST = TableKind(
    "best",
    "The best batch at each size",
    "The best batch of each configuration at each size, in images and in megapixels per second, and the best of all.",
    _make_best_table,
    "there is one size and one batch",
    "side",
    11,
)
