"""The frontier of accuracy against latency and against throughput as a table, with intervals on both axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dyno.analysis.metrics.metric import Metric
from dyno.analysis.presentation.table import PERCENT, POINTS, TEXT, Column, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.ranking.rankings import Ranking, rankings
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables.trial_columns import IDENTITY, pick

if TYPE_CHECKING:
    import pandas as pd

LIMITS = ("low", "high")
SPEEDS = ("latency_ms", "latency_ms_low", "latency_ms_high", "throughput_ips", "throughput_low", "throughput_high")
NOTE = (
    "No trial is both faster and more accurate than one of these: by latency at the smallest batch, by images/s at "
    "all. Intervals "
    "of speed are between processes; neighbours whose intervals overlap may be in the other order."
)


def _make_frontier_table(run: RunData) -> Table:
    rows = [row for ranking in rankings(run) for row in _iter_rows(ranking)]
    return FRONTIER.of(COLUMNS, rows, notes=(NOTE,), group=("model", "device"), printed=PRINTED)


def _iter_rows(ranking: Ranking) -> Iterator[dict[str, Any]]:
    metric = ranking.metric
    if metric.column not in ranking.group:
        return
    edges = {
        "latency": frontier.pareto(ranking.first, LATENCY, metric.column),
        "throughput": frontier.pareto(ranking.group, THROUGHPUT, metric.column),
    }
    ids_on = {name: set(edge["trial"]) for name, edge in edges.items()}
    chosen = ranking.group[ranking.group["trial"].isin(set().union(*ids_on.values()))]
    for _, row in chosen.sort_values(["batch", LATENCY], kind="stable").iterrows():
        where = [name for name, ids in ids_on.items() if row["trial"] in ids]
        yield _make_row(row, metric, " and ".join(where))


def _make_row(row: pd.Series, metric: Metric, where: str) -> dict[str, Any]:
    low, high = metric.interval(row)
    change_low, change, change_high = metric.change_in(row)
    copied = {name: row[name] for name in (*IDENTITY, "trial", *SPEEDS, "budget", "more_images")}
    return copied | {
        "throughput_ips_low": row["throughput_low"], "throughput_ips_high": row["throughput_high"],
        "frontier": where, "metric": metric.name, "accuracy": row[metric.column], "accuracy_low": low,
        "accuracy_high": high, "change": change, "change_low": change_low, "change_high": change_high,
    }  # fmt: skip


COLUMNS = (
    *pick(*IDENTITY, "trial"),
    Column("frontier", "the speed in which nothing beats it: latency, throughput or both", kind=TEXT),
    *(replace(column, interval=column.name in (LATENCY, THROUGHPUT), rank=0) for column in pick(*SPEEDS)),
    Column("metric", "the metric of accuracy: the budget's first", kind=TEXT, rank=4),
    Column("accuracy", "by that metric", "%", PERCENT, "accuracy %", interval=True),
    *(Column(f"accuracy_{end}", f"{end} limit of its 95 % interval", "%", PERCENT) for end in LIMITS),
    Column("change", "against the reference on the same images", "points", POINTS, rank=2, interval=True),
    *(Column(f"change_{end}", f"{end} limit of its 95 % interval", "points", POINTS) for end in LIMITS),
    *pick("budget", "more_images"),
)
PRINTED = (*IDENTITY, LATENCY, THROUGHPUT, "accuracy", "change", "metric", "budget", "frontier")
FRONTIER = TableKind(
    "frontier",
    "Frontier",
    "The trials that no other beats in both accuracy and speed, fastest first.",
    _make_frontier_table,
    "no frontier: no trial has both an accuracy and a speed; give labelled images with --data",
    section="tables",
    place=3,
)
