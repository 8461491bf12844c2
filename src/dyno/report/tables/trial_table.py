"""The table of trials that everything else reads: a row per trial, plain numbers, empty if a column doesn't apply."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dyno.formatting import MAX_INTERVAL_RATIO, format_count, format_number, format_size, images_tested, is_bounded
from dyno.report.tables import TableKind
from dyno.results import correctness, limits, metrics, ranking, remarks, stats
from dyno.results.blocks import find_quiet_rounds, quiet_medians
from dyno.results.correctness import (
    INCOMPARABLE,
    OTHER_WEIGHTS,
    OUTPUTS_AGREE,
    OUTPUTS_WRONG,
    Correctness,
    accuracy_references,
    compared_with,
    find_mismatch,
    find_references,
)
from dyno.results.energy import Meter
from dyno.results.metrics import accuracy, list_metrics
from dyno.results.metrics import precision as metrics_precision
from dyno.results.metrics.metric import in_percent
from dyno.results.metrics.precision import name_precision, read_truth
from dyno.results.rounds import LATENCIES, Round
from dyno.results.run_data import RunData
from dyno.results.stats import EQUIVALENT, MAX_ROUNDS, ONE_ROUND, UNDECIDED, samples_for
from dyno.results.trial_result import UNFINISHED, Results, TrialResult, by_build, clock_of, load_run
from dyno.table import COUNT, FIRST_KEY, PERCENT, RANK_KEY, RATIO, TEXT, Column, Row, Table, is_missing
from dyno.worker.facts.engine import WEIGHT_PRECISIONS
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Columns of a trial: name, unit, kind and meaning, in the order of results.csv.

STATISTICS = {
    "mean": "mean", "median": "median", "p90": "90th percentile", "p95": "95th percentile", "p99": "99th percentile",
    "max": "largest", "std": "standard deviation", "trimmed": "mean without the fastest and slowest 10 %",
}  # fmt: skip
PERCENTILES = {"p90": 0.9, "p95": 0.95, "p99": 0.99}
FEW_SAMPLES_NOTE = "in parentheses: too few samples in a round, of which " + ", ".join(
    f"{name} needs {samples_for(q)}" for name, q in PERCENTILES.items()
)
UNDECIDED_NOTE = "? N: undecided; about N more would settle it"
MAX_COLUMNS = 8  # columns in a terminal
BOUNDARIES = {"all": "host memory to host memory", "model": "inputs and outputs on the device"}
EVALUATION_STAGES = ("decode", "preprocess", "inference", "postprocess")  # stages of an evaluation, per image
INTERVAL_ENDS = {"low": "lower", "high": "upper"}


def format_precision(row: Row) -> str:
    """Return a row's precision, with the actual types if they differ."""
    return name_precision(row) if row.get("precision_ok") else str(row["precision"])


def format_outcome(row: Row) -> str:
    """Return a row's outcome, abbreviated: status, budget, limits, or verdict on speed."""
    if row["status"] != "ok":
        return str(row["status"])
    verdict = str(row["verdict"]).partition(":")[0]
    if row.get("budget") == accuracy.OVER:
        return "over budget"
    limit = "" if verdict in (OUTPUTS_WRONG, INCOMPARABLE) else str(row.get("limit") or "")
    if limit.startswith((accuracy.OVER, limits.UNMEASURED)):
        return "reference, " * (verdict == REFERENCE) + limit.replace(limits.UNMEASURED, "no")
    if row.get("budget") == accuracy.UNDECIDED:
        return "? budget" if is_missing(row["more_images"]) else f"? {format_count(int(row['more_images']), 'image')}"
    if limit.startswith(UNDECIDED):
        return "reference, " * (verdict == REFERENCE) + limit.replace(UNDECIDED, "?")
    if verdict == EQUIVALENT:
        return f"equal ±{row['equivalent']:g} %"
    if verdict == ONE_ROUND:
        return "? one round"
    if verdict == UNDECIDED and not is_missing(row["more_rounds"]):
        count, unit = int(row["more_rounds"]), "build" if over_builds(row) else "round"
        return f"? {format_count(count, unit)}" if count <= MAX_ROUNDS else f"? >{MAX_ROUNDS} {unit}s"
    return verdict


def name_equivalence(percent: float) -> str:
    """Return the verdict on speeds within `percent` of each other."""
    return f"{EQUIVALENT} within ±{percent:g} %"


def over_builds(row: Row) -> bool:
    """Return whether a row's speed-up is over builds, so that more rounds add nothing."""
    return not is_missing(row.get("builds")) and row["builds"] > 1


def rounds_needed(count: int, is_over_builds: bool) -> str:
    """Describe how many more rounds, or builds, would settle an undecided pair."""
    unit = "build" if is_over_builds else "round"
    if count > MAX_ROUNDS:
        return f"more than {MAX_ROUNDS} more {unit}s"
    return f"about {count} more {unit}{'s' * (count != 1)}"


def _make_limit_columns(name: str, value: str, unit: str, kind: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{name}_{end}", f"{bound} limit of {value}", unit, kind) for end, bound in INTERVAL_ENDS.items()
    )


def _make_latency_columns(boundary: str, scope: str) -> tuple[Column, ...]:
    titles = {"latency_model_ms_p95": ("p95 ms", 2), "latency_all_ms_median": ("all ms", 4)}
    columns = []
    for name, meaning in STATISTICS.items():
        column = f"latency_{boundary}_ms_{name}"
        title, rank = titles.get(column, ("", 0))
        cell = _make_formatter(column, name, boundary) if name in PERCENTILES else None
        columns.append(Column(column, f"{meaning} of the latency, {scope}", "ms", title=title, rank=rank, cell=cell))
    return tuple(columns)


def has_few_samples(statistic: str, samples: Any) -> bool:
    """Return whether `statistic` is a percentile from too few samples."""
    return statistic in PERCENTILES and not is_missing(samples) and samples < samples_for(PERCENTILES[statistic])


def _make_formatter(column: str, statistic: str, boundary: str) -> Callable[[Row], str]:
    def format_cell(row: Row) -> str:
        if is_missing(row.get(column)):
            return ""
        return mark_doubtful(format_number(row[column]), has_few_samples(statistic, row.get(f"samples_{boundary}")))

    return format_cell


def mark_doubtful(text: str, is_doubtful: bool) -> str:
    """Put a number's text in parentheses if it is doubtful."""
    return f"({text})" if is_doubtful else text


COLUMNS = (
    Column("model", "as requested; of several files of one network, the network", kind=TEXT, identity=True),
    Column("backend", "as requested", kind=TEXT),
    Column("precision", "as requested", kind=TEXT, cell=format_precision),
    Column("batch", "images of a batch", "images", COUNT, "batch", identity=True),
    Column("size", "of an image: 224, or height x width", "pixels", TEXT, "size", identity=True,
           cell=lambda row: format_size(row["size"], "")),
    Column("device", "cpu or cuda:N", kind=TEXT, identity=True),
    Column("status", "of the worst round", kind=TEXT),
    Column("reason", "why the status isn't ok", kind=TEXT),
    *(column for boundary, where in BOUNDARIES.items() for column in _make_latency_columns(boundary, where)),
    Column("throughput_ips", "images per second with batches queued", "images/s", title="images/s", rank=1),
    *(column for metric in list_metrics().values() for column in metric.columns),
    Column("size_mb", "of the file that the engine reads", "MB", title="size MB", rank=5),
    Column("layers", "as the engine counts them", kind=COUNT),
    Column("parameters", "as the engine counts them", kind=COUNT),
    Column("gpu_memory_mb", "peak GPU memory above the level before the job", "MB", title="GPU MB", rank=6),
    Column("build_s", "time of the whole chain of files, and of compilation", "s", title="build s", rank=5),
    Column("first_call_ms", "the first inference", "ms"),
    Column("speedup", "the reference's latency over the trial's", "", RATIO, "speed-up", 0, True),
    *_make_limit_columns("speedup", "speedup's interval, of 95 % for all rows of the reference together", "", RATIO),
    Column("verdict", "against the reference: faster, slower, equivalent, undecided…", kind=TEXT, cell=format_outcome),
    Column("trial", "the id", kind=TEXT),
    Column("runtime", "main, or another interpreter's name", kind=TEXT, identity=True),
    Column("options", "of the backend", kind=TEXT, identity=True),
    Column("reference", "id of the trial that it is compared with", kind=TEXT),
    Column("boundary", "at which speeds are compared: model or all", kind=TEXT),
    Column("latency_ms", "geometric mean of the undisturbed rounds' medians", "ms", title="latency ms"),
    *_make_limit_columns("latency_ms", "the 95 % interval of latency_ms", "ms", "number"),
    Column("rounds", "that succeeded", kind=COUNT),
    Column("images", "that the accuracy is from", kind=COUNT),
    Column("budget", "within, over or undecided", kind=TEXT, rank=3),
    Column("more_images", "about how many more would decide it", kind=COUNT),
    Column("budget_p", "of a loss beyond the budget, one-sided, for this trial alone"),
    Column("ran_as", "compute layers by type, with its share of the arithmetic", kind=TEXT, title="ran as", rank=7),
    Column("asked_share", "of the arithmetic (if unknown, of compute layers) that ran as requested, 0 to 1"),
    Column("precision_ok", "whether it ran in the requested type: yes, no, or unconfirmed", kind=TEXT),
    *(Column(f"latency_{b}_ms_trimmed_std", f"standard deviation behind latency_{b}_ms_trimmed", "ms")
      for b in BOUNDARIES),
    Column("gflops", "operations of one image, in 1e9", "GFLOP"),
    Column("tflops", "operations per second at latency_model_ms_median, in 1e12", "TFLOPS"),
    Column("peak_tflops", "the measured peak in the type that most of the arithmetic ran in", "TFLOPS"),
    Column("peak_share", "tflops over peak_tflops, 0 to 1"),
    Column("load_s", "time to load", "s"),
    Column("memory_mb", "peak memory of the process", "MB"),
    Column("warnings", "how many", kind=COUNT),
    Column("clock", "by which latency_ms and speedup are: gpu or host", kind=TEXT),
    Column("queued_ms", "GPU time of a run queued behind another, without launching", "ms", title="queued, ms"),
    Column("outside_gpu_ms", "latency by the host's clock less that by the GPU's", "ms", title="outside GPU, ms"),
    Column("gpu_util", "mean utilisation while timing", "%", title="GPU %", rank=8),
    Column("gpu_clock_mhz", "median SM clock while timing", "MHz", title="SM clock, MHz"),
    Column("gpu_power_w", "mean power while timing", "W", title="GPU power, W"),
    Column("gpu_temperature_c", "highest of the job", "°C", title="hottest, °C"),
    Column("throttle", "what limited the clock, with its share", kind=TEXT, title="clock limited by", rank=9),
    Column("throttled_samples", "latencies taken while the GPU was throttled", kind=COUNT, title="throttled samples"),
    Column("gpu_others", "peak number of other processes on the GPU while timing", kind=COUNT, title="others"),
    Column("pipeline_ips", "of the whole evaluation, without decoding", "images/s", title="pipeline images/s", rank=4),
    *(Column(f"{stage}_ms", f"{stage} of an image", "ms") for stage in EVALUATION_STAGES),
    *_make_limit_columns("throughput", "the 95 % interval of throughput_ips", "images/s", "number"),
    Column("budget_reference", "id of the trial that the accuracy is compared with", kind=TEXT),
    Column("set_aside", "images set aside for calibration, not tested on", kind=COUNT),
    Column("outputs", "agree with the reference's, or wrong outputs", kind=TEXT),
    Column("output_error", "relative error of the outputs against the reference's"),
    Column("labels_changed", "share of the outputs' labels (whole numbers, booleans) that differ", "%", PERCENT),
    Column("answers_changed", "share of answers that are not the reference's", "%", PERCENT),
    Column("outputs_doubt", "why it isn't known whether too many answers changed", kind=TEXT),
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
    Column("builds", "of its engine or its reference's that the speed covers; empty where builds don't differ",
           kind=COUNT),
    Column("energy_j", "per image, without idle power; with --energy", "J", title="J/image", rank=6, interval=True),
    *_make_limit_columns("energy_j", "the 95 % interval of energy_j", "J", "number"),
    Column("energy_gross_j", "per image, with idle power", "J", title="with idle, J/image"),
    Column("idle_w", "power before the first job", "W", title="idle, W"),
    Column("energy_missing", "why there is no energy_j", kind=TEXT, title="missing"),
    Column("place", "the device of several that it was measured on", kind=TEXT),
    Column("card", "which that is: model, driver and UUID of a GPU, or processors", kind=TEXT),
)  # fmt: skip
IDENTITY = ("model", "size", "batch", "device", "backend", "precision", "runtime", "options")
_ACCURACY = [name for metric in list_metrics().values() for name in metric.printed_columns]
PRINTED = (
    *IDENTITY, "latency_ms", "latency_model_ms_p95", "latency_all_ms_median", "throughput_ips",
    "pipeline_ips", "speedup", "verdict", *(name for name in _ACCURACY if not name.endswith("_diff")),
    *(name for name in _ACCURACY if name.endswith("_diff")), "budget", "size_mb",
    "build_s", "energy_j", "gpu_memory_mb", "gpu_util", "throttle", "ran_as",
)  # fmt: skip
LIMIT_COLUMN = Column("limit", "within, or over, undecided or unmeasured and which limits", kind=TEXT)
_BY_NAME = {column.name: column for column in COLUMNS}


def pick(*names: str) -> tuple[Column, ...]:
    """Return the trial columns with these names, for use in another table."""
    return tuple(_BY_NAME[name] for name in names)


REFERENCE = "reference"
TEXT_COLUMNS = tuple(c.name for c in COLUMNS if c.kind == TEXT)


@dataclass(frozen=True)
class ComparisonBasis:
    """Basis of comparison of a row: the reference trial (None: no reference), accuracy budgets, and clocks.

    `clocks` has for each boundary the clock common to all competing trials (missing: the trial's own).
    `accuracy_reference` is the trial to compare accuracy with, if not the reference. `outputs` is the output check.
    """

    reference: TrialResult | None
    budgets: tuple[accuracy.Budget, ...] = ()
    clocks: Mapping[str, str] = field(default_factory=dict)
    accuracy_reference: TrialResult | None = None
    outputs: Correctness | None = None


def read_trials(
    results: Results | Path,
    reference: str | None = None,
    budget: Mapping[str, float] | None = None,
    equivalent: float | None = None,
    limit: Mapping[str, str] | None = None,
) -> RunData:
    """Read a run folder (or take one already read) with its table: one row per trial, with `COLUMNS`.

    Columns named so are in ms (a latency is per batch, over good rounds as in `stats.over_rounds`). Accuracies are in
    percent, their changes in percentage points, sizes in MB (1e6 bytes). `reference` is as in
    `correctness.find_references`, `budget` as in `accuracy.make_budgets`, `limit` as in `limits.make_limits`; speeds
    within `equivalent` percent count as equivalent. Defaults are the study's own. `latency_ms` with its limits is the
    latency over processes compared by `speedup`, at `boundary` and by `clock`. UserError for an invalid reference,
    budget or limit.
    """
    results = results if isinstance(results, Results) else load_run(results)
    budgets = accuracy.make_budgets(budget or results.settings.get("budget") or {})
    bounds = limits.make_limits(limit or results.settings.get("limit") or {})
    references = find_references(results, reference or results.settings.get("reference"))
    baselines = accuracy_references(results, references)
    groups: dict[Any, list[TrialResult]] = defaultdict(list)
    for t in results.trials:
        groups[t.group].append(t)
    clocks = {group: {b: clock_of(b, *trials) for b in LATENCIES} for group, trials in groups.items()}
    single_ids = {t.id for trials in groups.values() for t in trials if len(trials) == 1}  # nothing to compare with
    compared = compared_with(results, references)
    checks = {
        t.id: correctness.check_correctness(t, compared[t.id]) for t in results.trials if t.good and t.id in compared
    }
    rows = [
        make_trial_row(
            t,
            ComparisonBasis(references.get(t.id), budgets, clocks[t.group], baselines.get(t.id), checks.get(t.id)),
            compare=t.id not in single_ids,
        )
        for t in results.trials
    ]
    rule = ranking.make_rule(results.settings, equivalent)
    _judge_families(results.trials, rows, references, rule)
    _confirm_mixed(results.trials, rows)
    peaks = metrics_precision.find_peaks(results)
    meter = Meter(results.folder)
    rows = [
        r | metrics_precision.list_work(t, r, results, peaks) | _read_energy(t, meter)
        for t, r in zip(results.trials, rows, strict=True)
    ]
    for row in rows if bounds else ():
        row[LIMIT_COLUMN.name] = limits.name_outcome(limits.check_limits(row, bounds)) if row["status"] == "ok" else ""
    for row in rows:  # pandas 3 stores them as Arrow strings, which must be UTF-8
        non_ascii = {k: v for k, v in row.items() if isinstance(v, str) and not v.isascii()}
        row |= {k: v.encode("utf-8", "backslashreplace").decode() for k, v in non_ascii.items()}
    table = _make_frame(rows, has_limits=bool(bounds))
    if budget:
        _check_budget(budgets, table)
    if limit:
        limits.check_frame(table, bounds)
    return RunData(results, table, budgets, references, rule, compared, bounds)


def _make_frame(rows: Sequence[dict[str, Any]], *, has_limits: bool) -> pd.DataFrame:
    import pandas as pd

    columns = (*COLUMNS, LIMIT_COLUMN) if has_limits else COLUMNS
    table = pd.DataFrame.from_records(rows, columns=[c.name for c in columns])
    kinds = {TEXT: object, COUNT: "Int64"}
    types = {c.name: kinds.get(c.kind, float) for c in columns}
    return table.astype(types).copy()  # the copy defragments the frame and so avoids a pandas warning


def _confirm_mixed(trials: Sequence[TrialResult], rows: Sequence[dict[str, Any]]) -> None:
    """Judge the mixed precisions of one trial in the order tried; see `accuracy.confirm`."""
    families: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    start_times = {t.id: min((r.record.started for r in t.good), default="") for t in trials}
    for t, row in sorted(zip(trials, rows, strict=True), key=lambda pair: start_times[pair[0].id]):
        if accuracy.KEEP_OPTION in t.options and row.get("budget"):
            families[t.batch, accuracy.make_series_key(t)].append(row)
    for family in families.values():
        for row, is_proven in zip(family, accuracy.confirm([row.get("budget_p", 0.0) for row in family]), strict=True):
            if row["budget"] == accuracy.WITHIN and not is_proven:
                row["budget"] = accuracy.UNDECIDED


def _check_budget(budgets: Sequence[accuracy.Budget], table: pd.DataFrame) -> None:
    """Raise UserError for a budget on a metric that no trial has; a study's own was checked before it ran."""
    for budget in budgets:
        if table[metrics.list_metrics()[budget.metric].column].isna().all():
            raise UserError(f"no trial here was measured in {budget.metric}, which the budget {budget} is about")


def make_trial_row(t: TrialResult, basis: ComparisonBasis, compare: bool = True) -> dict[str, Any]:
    """Return one trial as a dict of COLUMNS; a column that doesn't apply is missing, None or NaN."""
    columns: dict[str, Any] = dict.fromkeys(TEXT_COLUMNS, "")
    columns |= {
        "model": t.model, "backend": t.backend, "precision": t.precision, "batch": t.batch, "size": t.size,
        "device": t.device, "status": t.status, "reason": t.reason, "trial": t.id, "runtime": t.runtime,
        "options": " ".join(f"{k}={v}" for k, v in t.options.items()), "rounds": len(t.good),
        "warnings": len(remarks.list_warnings(t)), "builds": ranking.list_builds(t) or None,
    }  # fmt: skip
    if t.placement:
        columns |= {"place": t.placement.place, "card": t.placement.card}
    if t.good:
        columns |= (
            _compute_latencies(t) | _read_values(t) | _compute_accuracy(t, basis) | _compute_speed(t, basis, compare)
        )
        columns |= _check_precision(t) | _read_gpu(t) | _read_evaluation(t)
        columns |= _judge_outputs(basis, columns)
    return columns


def _judge_outputs(basis: ComparisonBasis, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns on correctness of outputs; a row with wrong outputs gets no speed-up.

    An accuracy within its budget on labelled images outweighs changed classes.
    """
    outputs = basis.outputs
    if outputs is None:
        return {}
    is_accurate = (
        bool(basis.budgets) and row.get("budget") == accuracy.WITHIN and not outputs.error > outputs.tolerance.limit
    )
    columns: dict[str, Any] = {
        "output_error": outputs.error,
        "answers_changed": math.nan if outputs.changed is None else 100 * outputs.changed,
        "labels_changed": 100 * outputs.labels_changed,
        "outputs": OUTPUTS_AGREE if outputs.ok or is_accurate else OUTPUTS_WRONG,
        "outputs_doubt": "" if is_accurate else outputs.doubt,
    }
    if columns["outputs"] == OUTPUTS_WRONG and not str(row["verdict"]).startswith(INCOMPARABLE):
        columns["verdict"] = f"{OUTPUTS_WRONG}: {outputs.reason}"
    return columns


def _check_precision(t: TrialResult) -> dict[str, Any]:
    types = read_truth(t)
    if types is None:
        return {}
    share = types.share if types.reported and (t.precision not in WEIGHT_PRECISIONS or types.share) else None
    return {"ran_as": str(types), "asked_share": share, "precision_ok": types.answer}


def exit_code(table: pd.DataFrame, *, budget: bool = False, unasked: Collection[str] = ()) -> int:
    """Return the exit code of a study.

    0: good. 1: every trial with a budget is over it. 3: some trials did not finish (skipped ones were never started),
    gave wrong outputs, or lack an accuracy for the `budget`, or no trial ran. Trials with ids in `unasked` don't count.
    """
    table = table[~table["trial"].isin(list(unasked))]
    if not set(table["status"]) <= {"ok", "skipped"} or "ok" not in set(table["status"]):
        return 3
    if ((table["outputs"] == OUTPUTS_WRONG) & (table["budget"] != accuracy.OVER)).any():
        return 3
    if budget and not all(table["budget"][table["status"] == "ok"]):
        return 3
    decisions = [b for b, v in zip(table["budget"], table["verdict"], strict=True) if b and v != REFERENCE]
    return 1 if decisions and all(b == accuracy.OVER for b in decisions) else 0


def compared_boundary(t: TrialResult, reference: TrialResult | None = None) -> str:
    """Return the boundary at which a trial (and its reference) have latencies: model before all, "" for neither."""
    return next((b for b in LATENCIES if t.medians(b) and (reference is None or reference.medians(b))), "")


def _compute_latencies(trial: TrialResult) -> dict[str, float]:
    columns: dict[str, float] = {}
    main_boundary = compared_boundary(trial)
    for boundary in LATENCIES:
        quiet_rounds = find_quiet_rounds(trial, boundary)
        if round_samples := [each for each in trial.list_sampled("latency", boundary) if each[0] in quiet_rounds]:
            rounds = [samples for _, samples in round_samples]
            summary = stats.over_rounds(rounds)
            if boundary != main_boundary and _find_contradiction(trial, boundary, summary.median):
                continue
            columns |= {f"latency_{boundary}_ms_{name}": 1e3 * getattr(summary, name) for name in STATISTICS}
            columns[f"latency_{boundary}_ms_trimmed_std"] = 1e3 * summary.trimmed_std
            columns[f"samples_{boundary}"] = min(map(len, rounds))
            for name, interval in zip(PERCENTILES, _compute_percentiles(round_samples), strict=True):
                columns |= {
                    f"latency_{boundary}_ms_{name}_{end}": 1e3 * getattr(interval, end) for end in INTERVAL_ENDS
                }
    return columns


def _compute_percentiles(round_samples: Sequence[tuple[Round, np.ndarray]]) -> list[stats.Interval]:
    """Compute percentiles over several processes with undisturbed medians; for a single process, its own."""
    if len(round_samples) == 1:
        return stats.percentile_intervals(round_samples[0][1], PERCENTILES.values())
    shares = (0.5, *PERCENTILES.values())
    medians, *percentiles = (by_build((r, stats.percentile_of(x, share)) for r, x in round_samples) for share in shares)
    return [stats.find_center(values, medians) for values in percentiles]


def _measure_rate(t: TrialResult) -> stats.Interval:
    """Return inputs per second over the quiet rounds, NaN if other programs disturbed it."""
    rounds = find_quiet_rounds(t, "throughput")
    rate = stats.find_center(by_build((r, v) for r in rounds if (v := r.value("throughput", "throughput"))))
    return stats.Interval(*3 * (math.nan,)) if _find_contradiction(t, "throughput", t.batch / rate.value) else rate


def _find_contradiction(t: TrialResult, boundary: str, seconds: float) -> float | None:
    """Return the latency at another boundary if `seconds` is over twice as long; else None.

    Only if no round at this boundary is known to be quiet. None on a GPU, whose copies may take that long undisturbed.
    """
    if t.device.startswith("cuda") or any(r.facts.delays.get(boundary) for r in find_quiet_rounds(t, boundary, 0)):
        return None
    min_latency = min((median(medians) for b in LATENCIES if (medians := quiet_medians(t, b))), default=math.nan)
    return min_latency if seconds > MAX_INTERVAL_RATIO * min_latency else None


def _read_values(trial: TrialResult) -> dict[str, Any]:
    size, rate = trial.value("file_size"), _measure_rate(trial)
    return {
        "throughput_ips": rate.value,
        "throughput_low": rate.low,
        "throughput_high": rate.high,
        "size_mb": _scale_value(trial.artifact.bytes if size is None and trial.artifact else size, 1e-6),
        "layers": trial.count("layers"),
        "parameters": trial.count("parameters"),
        "gpu_memory_mb": _scale_value(trial.gpu.memory if trial.gpu else None, 1e-6),
        "memory_mb": _scale_value(trial.value("peak_memory"), 1e-6),
        "build_s": build_seconds(trial),
        "route": trial.made_by.onnx_route,
        "first_call_ms": _scale_value(trial.value("first_call"), 1e3),
        "load_s": trial.value("load"),
    }


def _read_gpu(trial: TrialResult) -> dict[str, Any]:
    launch = remarks.describe_launch(trial) if trial.device != "cpu" else None
    columns: dict[str, Any] = {"outside_gpu_ms": 1e3 * launch.outside} if launch else {}
    if launch and launch.queued is not None:
        columns["queued_ms"] = 1e3 * launch.queued
    if trial.gpu is None:
        return columns
    return columns | {
        "gpu_util": trial.gpu.utilisation, "gpu_clock_mhz": trial.gpu.clock, "gpu_power_w": trial.gpu.power,
        "gpu_temperature_c": trial.gpu.temperature, "throttle": trial.gpu.throttle,
        "gpu_others": trial.gpu.other_processes,
        "throttled_samples": sum(span.hit for span in remarks.describe_throttling(trial)),
    }  # fmt: skip


def _read_energy(trial: TrialResult, meter: Meter) -> dict[str, Any]:
    if not trial.good:
        return {}
    energy = meter.measure(trial)
    return {
        "energy_j": energy.net.value, "energy_j_low": energy.net.low, "energy_j_high": energy.net.high,
        "energy_gross_j": energy.gross, "idle_w": energy.idle, "energy_missing": energy.missing_reason,
    }  # fmt: skip


def _read_evaluation(trial: TrialResult) -> dict[str, Any]:
    """Return images per second of the whole evaluation, and the median time per image of each stage."""
    columns: dict[str, Any] = {"pipeline_ips": trial.value("pipeline")}
    for stage in EVALUATION_STAGES:
        samples = trial.samples(stage, "")
        columns[f"{stage}_ms"] = (
            1e3 * stats.summarise(samples).median if samples.size else _scale_value(trial.value(stage), 1e3)
        )
    return columns


def build_seconds(trial: TrialResult) -> float | None:
    """Return the seconds of a trial's preparation: the whole chain of files, and compilation inside the process.

    Later rounds may hit the compiler's cache, so rounds that really compiled are preferred.
    """
    steps = [step.seconds for step in trial.made_by.steps]
    chain_s = sum(steps) if steps else trial.artifact.seconds if trial.artifact else None
    compiled_rounds = [r for r in trial.good if r.value("build") is not None]
    fresh_rounds = [r for r in compiled_rounds if not r.facts.build_cached] or compiled_rounds
    compile_s = max((v for r in fresh_rounds if (v := r.value("build")) is not None), default=None)
    return None if chain_s is None and compile_s is None else float(chain_s or 0) + float(compile_s or 0)


def _compute_accuracy(trial: TrialResult, basis: ComparisonBasis) -> dict[str, Any]:
    """Return each metric of the trial's task, its change against the reference, and the decision on the budget."""
    scores = metrics.list_measured(trial)
    if not scores:
        return {}
    columns: dict[str, Any] = {"images": scores[0][1].images, "set_aside": accuracy.set_aside(trial)}
    for metric, value in scores:
        columns |= in_percent(metric.column, value.interval)
    reference = basis.accuracy_reference or basis.reference
    if reference is None or find_mismatch(trial, reference) == OTHER_WEIGHTS:
        return columns
    changes = {m.name: (m, change) for m, _ in scores if (change := m.change(trial, reference)) is not None}
    if not changes:
        return columns
    columns["budget_reference"] = reference.id
    if trial is reference:
        zero_changes = {metric.diff: 0.0 for metric, _ in changes.values()}
        return columns | zero_changes | {"budget": accuracy.WITHIN if basis.budgets else ""}
    for metric, change in changes.values():
        columns |= in_percent(metric.diff, change.difference)
    if decision := accuracy.decide_all({name: change for name, (_, change) in changes.items()}, basis.budgets):
        columns |= {"budget": decision.verdict, "more_images": decision.more, "budget_p": decision.chance}
    return columns


def _compute_speed(trial: TrialResult, basis: ComparisonBasis, compare: bool) -> dict[str, Any]:
    reference = basis.reference if compare else None
    boundary = compared_boundary(trial, reference) or compared_boundary(trial)
    clock = basis.clocks.get(boundary) or clock_of(boundary, trial)
    time = stats.find_center(quiet_medians(trial, boundary, clock)) if boundary else None
    columns: dict[str, Any] = {"boundary": boundary, "clock": clock if boundary else ""}
    if time is None:
        return columns
    columns |= {"latency_ms": 1e3 * time.value, "latency_ms_low": 1e3 * time.low, "latency_ms_high": 1e3 * time.high}
    if reference is None or not reference.medians(boundary, clock):
        return columns
    columns["reference"] = reference.id
    if trial is reference:
        return columns | {"speedup": 1.0, "verdict": REFERENCE}
    if mismatch := find_mismatch(trial, reference):
        return columns | {"verdict": f"{INCOMPARABLE}: {mismatch}"}
    return columns


def _judge_families(
    trials: Sequence[TrialResult], rows: Sequence[Row], references: Mapping[str, TrialResult], rule: stats.Rule
) -> None:
    """Add speed-up and verdict to each row comparable with its reference; all rows of a reference are one family."""
    families: dict[str, list[tuple[Row, stats.Evidence]]] = defaultdict(list)
    for t, row in zip(trials, rows, strict=True):
        if row.get("reference") and not row["verdict"]:
            evidence = ranking.gather_evidence(t, references[t.id], row["boundary"], row["clock"], rule)
            if evidence is not None:
                families[row["reference"]].append((row, evidence))
    latencies = {row["trial"]: row.get("latency_ms", math.nan) for row in rows}
    for t, row in zip(trials, rows, strict=True):
        other_latency = _find_contradiction(t, row["boundary"], latencies[t.id] / 1e3)
        latencies |= {t.id: 1e3 * other_latency} if other_latency else {}
    for family in families.values():
        for (row, _), s in zip(family, stats.decide_family([e for _, e in family], rule), strict=True):
            s = _fit_latencies(s, latencies[row["reference"]] / latencies[row["trial"]])
            row |= {"speedup": s.value, "speedup_low": s.low, "speedup_high": s.high, "verdict": s.verdict,
                    "measured": s.measured, "p_value": s.p, "equivalent": 100 * rule.margin,
                    "more_rounds": s.more, "builds": s.builds or row.get("builds"),
                    "rounds_left_out": s.rejected or None, "speedup_all_rounds": s.unfiltered}  # fmt: skip


def _fit_latencies(speedup: stats.Speedup, ratio: float) -> stats.Speedup:
    """Return a speed-up consistent with the two printed latencies, which have the given ratio.

    A speed-up more than a factor of two off comes from disturbed blocks. If the interval contains the latencies' ratio,
    that ratio becomes the estimate; else everything but the doubtful verdict is NaN.
    """
    if not math.isfinite(speedup.value * ratio) or abs(math.log(speedup.value / ratio)) <= math.log(MAX_INTERVAL_RATIO):
        return speedup
    if speedup.low <= ratio <= speedup.high:
        return replace(speedup, value=ratio)
    verdict = speedup.verdict if speedup.verdict == stats.ONE_ROUND else stats.UNDECIDED
    return stats.Speedup(math.nan, math.nan, math.nan, verdict, speedup.measured)


def _scale_value(value: Any, factor: float) -> float:
    return math.nan if value is None else float(value) * factor


def _make_trials_table(run: RunData) -> Table:
    device_key = ("device",) if run.frame["device"].nunique() > 1 else ()
    group = ("model", "size", "batch", *device_key)
    cells: list[Row] = run.frame.to_dict("records")
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in cells:
        groups[tuple(row[name] for name in group)].append(row)
    ranks = itertools.count()
    for rows in groups.values():
        is_comparison = any(run.trials[row["trial"]].side for row in rows)  # each pair is a separate question
        for position, row in enumerate(rows if is_comparison else ranking.order_group(rows, run.trials)):
            row |= {RANK_KEY: next(ranks), FIRST_KEY: position == 0 and len(rows) > 1 and not is_comparison}
    columns, printed = _choose_columns(run.limits)
    return TRIALS.build(
        columns,
        cells,
        notes=make_footnote(cells, [name for name in PERCENTILES if f"latency_model_ms_{name}" in printed]),
        group=group,
        printed=printed,
        below=lambda rows: [*_list_unranked(rows), *_list_disturbed(rows), *_list_unproven(rows, run.limits)],
        max_columns=MAX_COLUMNS,
    )


def _choose_columns(wanted_limits: Sequence[limits.Limit]) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """Return the columns and the names of printed ones; columns with a limit are always printed."""
    if not wanted_limits:
        return COLUMNS, PRINTED
    names = {limit.quantity.column: limit.name for limit in wanted_limits}
    columns = tuple(
        replace(c, rank=0, title=c.title or f"{names[c.name]} {c.unit}") if c.name in names else c for c in COLUMNS
    )
    end = PRINTED.index("latency_ms") + 1
    return (*columns, LIMIT_COLUMN), (*PRINTED[:end], *(name for name in names if name not in PRINTED), *PRINTED[end:])


def make_footnote(rows: list[Row], percentiles: Sequence[str] = ("p95",)) -> tuple[str, ...]:
    """Return one note on images without accuracy, doubtful percentiles and open rows; empty without any."""
    judged = [r for r in rows if not all(is_missing(r.get(m.column)) for m in metrics.list_metrics().values())]
    tested = [(r["images"], r["set_aside"]) for r in judged if not is_missing(r.get("set_aside")) and r["set_aside"]]
    notes = [f"accuracy is on {images_tested(*counts)}" for counts in dict.fromkeys(tested)]
    notes += (
        [FEW_SAMPLES_NOTE]
        if any(has_few_samples(name, r.get("samples_model")) for r in rows for name in percentiles)
        else []
    )
    notes += [UNDECIDED_NOTE] if any(re.match(r"\? >?\d", format_outcome(r)) for r in rows) else []
    return ("; ".join(notes),) if notes else ()


def list_reasons(rows: list[Row]) -> list[str]:
    """Return the reasons of failed rows."""
    failures = (r for r in rows if r["status"] not in ("ok", UNFINISHED))
    return [f"{r['backend']} {r['precision']} {r['status']}: {r['reason']}" for r in failures]


def _list_unranked(rows: list[Row]) -> list[str]:
    """Return the reasons of rows that failed, gave wrong outputs, or can't be compared."""
    excluded_rows = [r for r in rows if r["status"] == "ok" and ": " in str(r["verdict"])]
    return [*list_reasons(rows), *(f"{r['backend']} {r['precision']}: {r['verdict']}" for r in excluded_rows)]


def _list_disturbed(rows: list[Row]) -> Iterator[str]:
    """Yield lines on rows whose speed-up contradicts the latencies, or whose latency contradicts the other boundary."""
    if names := ", ".join(f"{r['backend']} {r['precision']}" for r in rows if ranking.is_speed_lost(r)):
        yield (
            f"{names}: no speed-up, as other programs disturbed the rounds so much that interleaved latencies differ "
            f"by more than {MAX_INTERVAL_RATIO:g}x; measure on a quieter machine"
        )
    by_id = {r["trial"]: r for r in rows}
    for r in rows:
        if r["boundary"] == "model" and r["latency_ms"] > MAX_INTERVAL_RATIO * r["latency_all_ms_median"]:
            yield (
                f"{r['backend']} {r['precision']}: {format_number(r['latency_ms'])} ms is too long, as host to host, "
                f"which includes it, took {format_number(r['latency_all_ms_median'])} ms; measure on a quieter machine"
            )
        if (reference := by_id.get(r.get("reference"))) and _has_opposite_signs(r, reference["latency_ms"]):
            yield (
                f"{r['backend']} {r['precision']}: {r['speedup']:.2f}x is of measurements in turns with "
                f"{reference['backend']} {reference['precision']}, whose latency differed at other times"
            )


def _has_opposite_signs(row: Row, reference_ms: float) -> bool:
    """Return whether speed-up and latencies, at least 5 % apart, name different rows as faster."""
    log_ratio = math.log(reference_ms / row["latency_ms"])
    low, high = row["speedup_low"], row["speedup_high"]
    return (
        (is_missing(low) or is_bounded(low, high))
        and abs(log_ratio) > math.log(1.05)
        and math.log(row["speedup"]) * log_ratio < 0
    )


def _list_unproven(rows: list[Row], wanted_limits: Sequence[limits.Limit]) -> Iterator[str]:
    """Yield why it is unknown whether rows keep their limits."""
    for row in rows:
        is_judged = row["status"] == "ok" and not str(row["verdict"]).startswith((OUTPUTS_WRONG, INCOMPARABLE))
        if is_judged and (text := limits.describe_misses(row, wanted_limits, (accuracy.UNDECIDED, limits.UNMEASURED))):
            yield f"{row['backend']} {row['precision']}: {text}"


TRIALS = TableKind(
    "trials", "Trials",
    "A row per trial: latency, throughput, speed-up over the reference, verdict, accuracy and its budget, file, build.",
    _make_trials_table, section="tables", position=1,
)  # fmt: skip
