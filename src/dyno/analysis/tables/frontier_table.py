"""The frontier of accuracy against latency and against throughput as a table, with intervals on both axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dyno.analysis.formatting import limits, significant
from dyno.analysis.metrics.measures import Metric, quality
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.contests import Contest, contests
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.tables.render import Column, missing

if TYPE_CHECKING:
    import pandas as pd

IDENTITY = ("model", "size", "batch", "device", "backend", "precision", "runtime", "options")
SPEEDS = ("latency_ms", "latency_ms_low", "latency_ms_high", "throughput_ips", "throughput_low", "throughput_high")
COLUMNS = (*IDENTITY, "trial", "frontier", *SPEEDS, "metric", "accuracy", "accuracy_low", "accuracy_high", "change",
           "change_low", "change_high", "budget", "more_images")  # fmt: skip


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The trials that no other beats in both accuracy and speed, fastest first; columns COLUMNS.

    `frontier` says in which speed: latency (among the smallest batch's trials), throughput (among all), or both.
    Accuracy is the budget's metric in percent, its change in points against the reference.
    """
    import pandas as pd

    rows = [row for contest in contests(frame) for row in _rows(contest)]
    return pd.DataFrame.from_records(rows, columns=list(COLUMNS))


def _rows(contest: Contest) -> Iterator[dict[str, Any]]:
    metric = quality(contest.group)
    if metric.column not in contest.group:
        return
    edges = {
        "latency": frontier.pareto(contest.first, LATENCY, metric.column),
        "throughput": frontier.pareto(contest.group, THROUGHPUT, metric.column),
    }
    on = {name: set(edge["trial"]) for name, edge in edges.items()}
    chosen = contest.group[contest.group["trial"].isin(set().union(*on.values()))]
    for _, row in chosen.sort_values(["batch", LATENCY], kind="stable").iterrows():
        where = [name for name, ids in on.items() if row["trial"] in ids]
        yield _row(row, metric, " and ".join(where))


def _row(row: pd.Series, metric: Metric, where: str) -> dict[str, Any]:
    low, high = metric.interval(row)
    change_low, change, change_high = metric.change(row)
    own = {name: row[name] for name in (*IDENTITY, "trial", *SPEEDS, "budget", "more_images")}
    return own | {
        "frontier": where, "metric": metric.key, "accuracy": row[metric.column], "accuracy_low": low,
        "accuracy_high": high, "change": change, "change_low": change_low, "change_high": change_high,
    }  # fmt: skip


def _speed(row: dict[str, Any], value: str, low: str, high: str) -> str:
    if missing(row[value]):
        return ""
    return significant(row[value]) + ("" if missing(row[low]) else limits(row[low], row[high], significant))


def _percent(row: dict[str, Any], value: str) -> str:
    """A share, or a difference of shares, with its interval, which may be as wide as it is."""
    if missing(row[value]):
        return ""
    low, high = row[f"{value}_low"], row[f"{value}_high"]
    return f"{row[value]:.2f}" + ("" if missing(low) or missing(high) else f" [{low:.2f}, {high:.2f}]")


PRINTED = (
    Column("latency ms", lambda r: _speed(r, *SPEEDS[:3]), 0, sort="latency_ms"),
    Column("images/s", lambda r: _speed(r, *SPEEDS[3:]), 0, sort="throughput_ips"),
    Column("accuracy %", lambda r: _percent(r, "accuracy"), 0, sort="accuracy"),
    Column("change, points", lambda r: _percent(r, "change"), 2, sort="change"),
    Column("metric", lambda r: str(r["metric"]), 4, right=False, sort="metric"),
    Column("budget", lambda r: str(r["budget"]), 1, right=False, sort="budget"),
    Column("frontier", lambda r: str(r["frontier"]), 0, right=False, sort="frontier"),
)
