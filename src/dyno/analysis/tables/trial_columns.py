"""The columns of a trial: name, unit, kind and meaning, in the order of results.csv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyno.analysis.formatting import significant, sized
from dyno.analysis.metrics import known
from dyno.analysis.metrics.precision import named
from dyno.analysis.presentation.table import COUNT, PERCENT, RATIO, TEXT, Column, Row, missing
from dyno.analysis.stats import EQUIVALENT, MOST_ROUNDS, UNDECIDED, samples_for

STATISTICS = {
    "mean": "mean", "median": "median", "p90": "90th percentile", "p95": "95th percentile", "p99": "99th percentile",
    "max": "largest", "std": "standard deviation", "trimmed": "mean without the fastest and slowest 10 %",
}  # fmt: skip
PERCENTILES = {"p90": 0.9, "p95": 0.95, "p99": 0.99}
FEW = (
    "in parentheses: too few samples in a round for that percentile, which needs "
    + ", ".join(f"{samples_for(q)} for {name}" for name, q in PERCENTILES.items())
    + " (MLPerf's floors)"
)
BOUNDARIES = {"all": "host memory to host memory", "model": "inputs and outputs on the device"}
STAGES = ("decode", "preprocess", "inference", "postprocess")  # of an evaluation, per image
LIMITS = {"low": "lower", "high": "upper"}


def precision(row: Row) -> str:
    """Return a row's precision, with the types that it ran in where those differ."""
    return named(row) if row.get("precision_ok") else str(row["precision"])


def outcome(row: Row) -> str:
    """Return a row's verdict, or its status where it failed."""
    return str(row["status"]) if row["status"] != "ok" else verdict(row)


def verdict(row: Row) -> str:
    """Return a row's verdict with its details: the margin of an equivalence, or the rounds that would settle it."""
    if row["verdict"] == EQUIVALENT:
        return within(row["equivalent"])
    if row["verdict"] == UNDECIDED and not missing(row["more_rounds"]):
        return f"{UNDECIDED}: {rounds_needed(row['more_rounds'], over_builds(row))}"
    return str(row["verdict"])


def within(percent: float) -> str:
    """Return the verdict on speeds that differ by less than `percent`."""
    return f"{EQUIVALENT} within ±{percent:g} %"


def over_builds(row: Row) -> bool:
    """Return whether a row's speed-up is over builds, to which a round adds nothing."""
    return not missing(row.get("builds")) and row["builds"] > 1


def rounds_needed(more: int, builds: bool) -> str:
    """Describe how many more rounds, or builds, would settle an undecided pair."""
    what = "build" if builds else "round"
    if more > MOST_ROUNDS:
        return f"more than {MOST_ROUNDS} more {what}s"
    return f"about {more} more {what}{'s' * (more != 1)}"


def _make_limit_columns(name: str, of: str, unit: str, kind: str) -> tuple[Column, ...]:
    return tuple(Column(f"{name}_{end}", f"{words} limit of {of}", unit, kind) for end, words in LIMITS.items())


def _make_latency_columns(boundary: str, where: str) -> tuple[Column, ...]:
    titles = {"latency_model_ms_median": ("median ms", 0), "latency_model_ms_p95": ("p95 ms", 4),
             "latency_all_ms_median": ("all ms", 3)}  # fmt: skip
    columns = []
    for name, words in STATISTICS.items():
        column = f"latency_{boundary}_ms_{name}"
        title, rank = titles.get(column, ("", 0))
        cell = _make_formatter(column, name, boundary) if name in PERCENTILES else None
        columns.append(Column(column, f"{words} of the latency, {where}", "ms", title=title, rank=rank, cell=cell))
    return tuple(columns)


def few(statistic: str, samples: Any) -> bool:
    """Return whether it is a percentile of too few samples."""
    return statistic in PERCENTILES and not missing(samples) and samples < samples_for(PERCENTILES[statistic])


def _make_formatter(column: str, statistic: str, boundary: str) -> Callable[[Row], str]:
    def format_cell(row: Row) -> str:
        if missing(row.get(column)):
            return ""
        return parenthesised(significant(row[column]), few(statistic, row.get(f"samples_{boundary}")))

    return format_cell


def parenthesised(text: str, doubtful: bool) -> str:
    """Return a number as text, in parentheses where it is doubtful."""
    return f"({text})" if doubtful else text


COLUMNS = (
    Column("model", "as requested; of several files of one network, the network", kind=TEXT, identity=True),
    Column("backend", "as requested", kind=TEXT),
    Column("precision", "as requested", kind=TEXT, cell=precision),
    Column("batch", "images of a batch", "images", COUNT, "batch", identity=True),
    Column("size", "of an image: 224, or height x width", "pixels", TEXT, "size", identity=True,
           cell=lambda row: sized(row["size"], "")),
    Column("device", "cpu or cuda:N", kind=TEXT, identity=True),
    Column("status", "of the worst round", kind=TEXT),
    Column("reason", "why the status isn't ok", kind=TEXT),
    *(column for boundary, where in BOUNDARIES.items() for column in _make_latency_columns(boundary, where)),
    Column("throughput_ips", "images per second with batches queued", "images/s", title="images/s", rank=1),
    *(column for metric in known().values() for column in metric.columns),
    Column("size_mb", "of the file that the engine reads", "MB", title="size MB", rank=5),
    Column("layers", "as the engine counts them", kind=COUNT),
    Column("parameters", "as the engine counts them", kind=COUNT),
    Column("gpu_memory_mb", "most that was used on the GPU, less what was before", "MB", title="GPU MB", rank=6),
    Column("build_s", "time of the whole chain of files, and of compilation", "s", title="build s", rank=5),
    Column("first_call_ms", "the first inference", "ms"),
    Column("speedup", "the reference's latency over the trial's", "", RATIO, "speed-up", 0, True),
    *_make_limit_columns("speedup", "speedup's interval, of 95 % for all rows of the reference together", "", RATIO),
    Column("verdict", "against the reference: faster, slower, equivalent, undecided…", kind=TEXT, cell=outcome),
    Column("trial", "the id", kind=TEXT),
    Column("runtime", "main, or another interpreter's name", kind=TEXT, identity=True),
    Column("options", "of the backend", kind=TEXT, identity=True),
    Column("reference", "id of the trial that it is compared with", kind=TEXT),
    Column("boundary", "at which speeds are compared: model or all", kind=TEXT),
    Column("latency_ms", "geometric mean of the rounds' medians", "ms", title="latency ms", interval=True),
    *_make_limit_columns("latency_ms", "the 95 % interval of latency_ms", "ms", "number"),
    Column("rounds", "that succeeded", kind=COUNT),
    Column("images", "that the accuracy is from", kind=COUNT),
    Column("budget", "within, over or undecided", kind=TEXT),
    Column("more_images", "about how many more would decide it", kind=COUNT),
    Column("ran_as", "compute layers by the type they ran in", kind=TEXT, title="ran as", rank=7),
    Column("asked_share", "of compute layers that ran as requested, 0 to 1"),
    Column("precision_ok", "whether it ran in the requested type: yes, no, or unconfirmed", kind=TEXT),
    *(Column(f"latency_{b}_ms_trimmed_std", f"standard deviation behind latency_{b}_ms_trimmed", "ms")
      for b in BOUNDARIES),
    Column("gflops", "operations of one image, in 1e9", "GFLOP"),
    Column("tflops", "operations per second at latency_model_ms_median, in 1e12", "TFLOPS"),
    Column("peak_tflops", "the measured peak in the type that most layers ran in", "TFLOPS"),
    Column("peak_share", "tflops over peak_tflops, 0 to 1"),
    Column("load_s", "time to load", "s"),
    Column("memory_mb", "peak memory of the process", "MB"),
    Column("warnings", "how many", kind=COUNT),
    Column("clock", "by which latency_ms and speedup are: gpu or host", kind=TEXT),
    Column("outside_gpu_ms", "latency by the host's clock less that by the GPU's", "ms"),
    Column("gpu_util", "mean utilisation while timing", "%", title="GPU %", rank=8),
    Column("gpu_clock_mhz", "median SM clock while timing", "MHz"),
    Column("gpu_power_w", "mean power while timing", "W"),
    Column("gpu_temperature_c", "highest of the job", "°C"),
    Column("throttle", "what limited the clock, with its share", kind=TEXT, title="clock limited by", rank=9),
    Column("throttled_samples", "latencies taken while the GPU was throttled", kind=COUNT),
    Column("gpu_others", "most processes of others on the GPU while timing", kind=COUNT),
    Column("pipeline_ips", "of the whole evaluation, decoding left out", "images/s", title="pipeline images/s", rank=3),
    *(Column(f"{stage}_ms", f"{stage} of an image", "ms") for stage in STAGES),
    *_make_limit_columns("throughput", "the 95 % interval of throughput_ips", "images/s", "number"),
    Column("budget_reference", "id of the trial that the accuracy is compared with", kind=TEXT),
    Column("set_aside", "images not tested on, as they are for calibration", kind=COUNT),
    Column("outputs", "agree with the reference's, or wrong outputs", kind=TEXT),
    Column("output_error", "relative error of the outputs against the reference's"),
    Column("labels_changed", "share of the outputs' labels (whole numbers, booleans) that differ", "%", PERCENT),
    Column("answers_changed", "share of answers that are not the reference's", "%", PERCENT),
    Column("measured", "beside its reference: in turns, or one after the other", kind=TEXT),
    Column("route", "by which the ONNX file was made", kind=TEXT),
    *(Column(f"samples_{b}", f"fewest of a round behind the statistics of latency_{b}", kind=COUNT)
      for b in BOUNDARIES),
    *(column for b in BOUNDARIES for name in PERCENTILES
      for column in _make_limit_columns(
          f"latency_{b}_ms_{name}", f"the 95 % interval of latency_{b}_ms_{name}", "ms", "number")),
    Column("p_value", "of no difference to the reference, adjusted for all its rows", ""),
    Column("equivalent", "the margin within which speeds count as equivalent", "%"),
    Column("rounds_left_out", "disturbed rounds that the speed-up leaves out", kind=COUNT),
    Column("speedup_all_rounds", "the speed-up with those rounds", kind=RATIO),
    Column("more_rounds", "about how many would decide the row; 101: more than 100; builds where it is over those",
           kind=COUNT),
    Column("builds", "of its engine or its reference's that the speed is over; empty where builds don't differ",
           kind=COUNT),
    Column("energy_j", "of an image, idle power taken off; with --energy", "J", title="J/image", rank=6, interval=True),
    *_make_limit_columns("energy_j", "the 95 % interval of energy_j", "J", "number"),
    Column("energy_gross_j", "of an image, idle power included", "J"),
    Column("idle_w", "power before the first job", "W"),
    Column("energy_missing", "why there is no energy_j", kind=TEXT),
    Column("place", "the device of several that it was measured on", kind=TEXT),
    Column("card", "which that is: model, driver and UUID of a GPU, or processors", kind=TEXT),
)  # fmt: skip
IDENTITY = ("model", "size", "batch", "device", "backend", "precision", "runtime", "options")
_ACCURACY = [name for metric in known().values() for name in metric.printed_columns]
PRINTED = (
    *IDENTITY, "latency_model_ms_median", "latency_model_ms_p95", "latency_all_ms_median", "throughput_ips",
    "pipeline_ips", "speedup", "verdict", *(name for name in _ACCURACY if not name.endswith("_diff")),
    *(name for name in _ACCURACY if name.endswith("_diff")), "budget", "size_mb",
    "build_s", "energy_j", "gpu_memory_mb", "gpu_util", "throttle", "ran_as",
)  # fmt: skip
_BY_NAME = {column.name: column for column in COLUMNS}


def pick(*names: str) -> tuple[Column, ...]:
    """Return the trial's columns of these names, for another table that has them."""
    return tuple(_BY_NAME[name] for name in names)
