"""Frontier of accuracy against latency and throughput as a table, with intervals on both axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dyno.formatting import format_limits, format_number
from dyno.report.tables import TableKind
from dyno.report.tables.trial_table import IDENTITY, REFERENCE, build_seconds, pick
from dyno.results import ranking, stats
from dyno.results import ranking as results_ranking
from dyno.results.blocks import quiet_medians
from dyno.results.correctness import INCOMPARABLE
from dyno.results.metrics.metric import Metric
from dyno.results.ranking import LATENCY, THROUGHPUT, Ranking, list_usable, rank_goals
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.table import PERCENT, POINTS, TEXT, Column, Table, is_missing, with_limits

if TYPE_CHECKING:
    import pandas as pd

SPEED_COLUMNS = (
    "latency_ms",
    "latency_ms_low",
    "latency_ms_high",
    "throughput_ips",
    "throughput_low",
    "throughput_high",
)
TABLE_NOTE = (
    "No trial is both faster and more accurate than one of these: by latency at the smallest batch, by throughput "
    "at all. Intervals of speed are between processes; neighbours whose intervals overlap may be in the other order."
)


def _make_frontier_table(run: RunData) -> Table:
    rows = [row for ranking in rank_goals(run) for row in _iter_rows(ranking)]
    return FRONTIER.build(COLUMNS, rows, notes=(TABLE_NOTE,), group=("model", "device"), printed=PRINTED)


def _iter_rows(ranking: Ranking) -> Iterator[dict[str, Any]]:
    metric = ranking.metric
    if metric.column not in ranking.group:
        return
    frontiers = {
        "latency": results_ranking.find_pareto(ranking.first, LATENCY, metric.column),
        "throughput": results_ranking.find_pareto(ranking.group, THROUGHPUT, metric.column),
    }
    ids_by_speed = {name: set(frontier["trial"]) for name, frontier in frontiers.items()}
    rows = ranking.group[ranking.group["trial"].isin(set().union(*ids_by_speed.values()))]
    for _, row in rows.sort_values(["batch", LATENCY], kind="stable").iterrows():
        speeds = [name for name, ids in ids_by_speed.items() if row["trial"] in ids]
        yield _make_row(row, metric, " and ".join(speeds))


def _make_row(row: pd.Series, metric: Metric, frontier: str) -> dict[str, Any]:
    low, high = metric.interval(row)
    change_low, change, change_high = metric.change_in(row)
    cells = {name: row[name] for name in (*IDENTITY, "trial", *SPEED_COLUMNS, "budget", "more_images")}
    return cells | {
        "throughput_ips_low": row["throughput_low"], "throughput_ips_high": row["throughput_high"],
        "frontier": frontier, "metric": metric.name, "accuracy": row[metric.column], "accuracy_low": low,
        "accuracy_high": high, "change": change, "change_low": change_low, "change_high": change_high,
    }  # fmt: skip


COLUMNS = (
    *pick(*IDENTITY, "trial"),
    Column("frontier", "the speed in which nothing beats it: latency, throughput or both", kind=TEXT),
    *(replace(column, interval=column.name in (LATENCY, THROUGHPUT), rank=0) for column in pick(*SPEED_COLUMNS)),
    Column("metric", "the metric of accuracy: the budget's first", kind=TEXT, rank=4),
    *with_limits(Column("accuracy", "by that metric", "%", PERCENT, "accuracy %")),
    *with_limits(Column("change", "against the reference on the same images", "points", POINTS, rank=2)),
    *pick("budget", "more_images"),
)
PRINTED = (*IDENTITY, LATENCY, THROUGHPUT, "accuracy", "change", "metric", "budget", "frontier")
FRONTIER = TableKind(
    "frontier", "Frontier", "The trials that no other beats in both accuracy and speed, fastest first.",
    _make_frontier_table,
    "no frontier: no trial has both an accuracy and a speed; give labelled images with --data", section="tables",
    position=3,
)  # fmt: skip


# Break-even: the number of images after which export, build, calibration and compilation pay off.

# Column of each maker's seconds; other makers build an engine.
STEP_COLUMNS = {"onnx_export": "export_s", "onnx_precision": "convert_s", "onnx_modelopt": "convert_s",
                "onnx_sensitivity": "ranking_s"}  # fmt: skip
PREPARATION_COLUMNS = ("export_s", "ranking_s", "convert_s", "engine_s", "compile_s")
NEVER_PAYS, GAIN_UNPROVEN, PAYS_AT_ONCE = "never", "no gain is shown", "at once"
BREAKEVEN_NOTE = (
    "Export, ranking of layers, conversion with its calibration, engine and compilation, less the reference's "
    "preparation, over the seconds gained per image. The interval is the speed-up's."
)


@dataclass(frozen=True)
class BreakEven:
    """Seconds of extra preparation over the reference, seconds gained per image, and the images that make up for them.

    `images` is None without a gain. `high` is infinite if the speed-up's interval contains 1; the limits are NaN
    without an interval.
    """

    extra: float
    gain: float
    images: float | None
    low: float
    high: float

    @property
    def text(self) -> str:
        """Break-even point as text."""
        if self.images is None:
            return NEVER_PAYS if not math.isinf(self.high) else GAIN_UNPROVEN
        if self.extra <= 0:
            return GAIN_UNPROVEN if math.isinf(self.high) else PAYS_AT_ONCE  # no break-even without a gain
        if math.isinf(self.high):
            return f"{_format_count(self.images)} images, or never"
        return f"{_format_count(self.images)} images{format_limits(self.low, self.high, _format_count)}"


def break_even(row: pd.Series, trial: TrialResult, reference: TrialResult) -> BreakEven | None:
    """Compare the trial of a table's row with a reference, per image at the row's boundary; None without latencies.

    The interval is that of the speed-up between processes, with the reference's time fixed, so that no limit implies a
    gain above 100 %. Preparation is measured once and taken as exact.
    """
    boundary, clock = str(row["boundary"]), str(row["clock"])
    costs, reference_costs = ([m / t.batch for m in quiet_medians(t, boundary, clock)] for t in (trial, reference))
    speedup = _find_speedup(row, trial, reference) or stats.decide_apart(costs, reference_costs)
    if math.isnan(speedup.value):
        return None
    seconds = stats.find_center(reference_costs).value
    extra = (build_seconds(trial) or 0.0) - (build_seconds(reference) or 0.0)
    low, high = _count_images(extra, seconds, speedup.low), _count_images(extra, seconds, speedup.high)
    gain = seconds * (1 - 1 / speedup.value)
    if speedup.value <= 1:
        return BreakEven(extra, gain, None, math.nan, math.inf if speedup.high > 1 else math.nan)
    return BreakEven(extra, gain, _count_images(extra, seconds, speedup.value), high, low)


def _find_speedup(row: pd.Series, trial: TrialResult, reference: TrialResult) -> stats.Interval | None:
    """Return the row's own speed-up if it is against that reference (so it agrees with the verdict), else compute it.

    None for different batches: the comparison is per image, not per batch.
    """
    if row["reference"] == reference.id and not is_missing(row["speedup"]):
        return stats.Interval(row["speedup"], row["speedup_low"], row["speedup_high"])
    if trial.batch != reference.batch:  # compared per image
        return None
    return ranking.estimate_speedup(trial, reference, str(row["boundary"]), str(row["clock"]))


def _count_images(extra: float, seconds: float, speedup: float) -> float:
    if math.isnan(speedup):
        return math.nan
    return max(0.0, extra) / (seconds * (1 - 1 / speedup)) if speedup > 1 else math.inf


def read_parts(trial: TrialResult) -> dict[str, float]:
    """Return the seconds of each part of a trial's preparation, by PREPARATION_COLUMNS, without absent parts.

    Calibration counts as conversion.
    """
    seconds: dict[str, float] = {}
    for step in trial.made_by.steps:
        name = STEP_COLUMNS.get(step.maker, "engine_s")
        seconds[name] = seconds.get(name, 0.0) + step.seconds
    compile_s = (build_seconds(trial) or 0.0) - sum(seconds.values())
    if compile_s > 0 and any(r.value("build") is not None for r in trial.good):
        seconds["compile_s"] = compile_s
    return seconds


def _break_even(run: RunData) -> Table:
    rows = []
    for _, row in list_usable(run.frame).iterrows():
        reference = run.trials.get(row["reference"])
        if reference is None or row["verdict"] == REFERENCE or str(row["verdict"]).startswith(INCOMPARABLE):
            continue
        if (payoff := break_even(row, run.trials[row["trial"]], reference)) is not None:
            rows.append(_make_breakeven_row(row, run.trials[row["trial"]], payoff))
    return BREAK_EVEN.build(
        BREAKEVEN_COLUMNS, rows, notes=(BREAKEVEN_NOTE,), group=("model", "size", "batch"), printed=BREAKEVEN_PRINTED
    )


def _make_breakeven_row(row: pd.Series, trial: TrialResult, payoff: BreakEven) -> dict[str, Any]:
    cells = {name: row[name] for name in (*IDENTITY, "trial", "reference", "speedup", "speedup_low", "speedup_high")}
    return cells | read_parts(trial) | {
        "prepare_s": build_seconds(trial) or 0.0, "extra_s": payoff.extra, "gain_us_per_image": 1e6 * payoff.gain,
        "images": math.nan if payoff.images is None else payoff.images, "images_low": payoff.low,
        "images_high": payoff.high, "pays_off": payoff.text,
    }  # fmt: skip


def _format_count(value: float) -> str:
    return format_number(value, 2)


COLUMN_MEANINGS = {
    "export_s": "exporting", "ranking_s": "ranking layers by their sensitivity",
    "convert_s": "converting to a precision, calibration included", "engine_s": "building the engine's file",
    "compile_s": "compiling in the process",
}  # fmt: skip
BREAKEVEN_COLUMNS = (
    *pick(*IDENTITY, "trial", "reference"),
    *(
        Column(name, f"time of {meaning}", "s", title=f"{name.removesuffix('_s')} s", rank=3)
        for name, meaning in COLUMN_MEANINGS.items()
    ),
    Column("prepare_s", "time of all of these", "s"),
    Column("extra_s", "time beyond the reference's", "s", title="more than reference, s", rank=1),
    Column("gain_us_per_image", "time gained per image", "µs", title="gain, µs/image", rank=2),
    *pick("speedup", "speedup_low", "speedup_high"),
    Column("images", "after which the time has paid for itself", "images"),
    Column("images_low", "lower limit by the speed-up's interval", "images"),
    Column("images_high", "upper limit, infinite where it may never", "images"),
    Column("pays_off", "the same in words", kind=TEXT, title="pays off after"),
)
BREAKEVEN_PRINTED = (*IDENTITY, *PREPARATION_COLUMNS, "extra_s", "gain_us_per_image", "pays_off")
BREAK_EVEN = TableKind(
    "break-even", "When the preparation pays off",
    "After how many images the time to export, build, calibrate and compile has paid for itself.", _break_even,
    "nothing to pay off: no trial has a reference to gain on", section="tables", position=4,
)  # fmt: skip
