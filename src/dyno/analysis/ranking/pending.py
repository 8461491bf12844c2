"""Which trials further rounds are for: those of pairs that matter and that are undecided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno.analysis import stats
from dyno.analysis.metrics import speedups
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.ranking.rankings import PLACES, rankings
from dyno.analysis.records.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

Group = tuple[str, str, int, str, str]


def pending(run: RunData) -> dict[Group, list[str]]:
    """The ids of the trials that another round is for, by the group that is compared, its reference first.

    The pairs that matter are each trial with its reference, and each winner with its runner-up. A pair with a failed
    trial is left out.
    """
    rows = run.frame[run.frame["status"] == "ok"]
    good = set(rows["trial"])
    undecided = list(rows[rows["verdict"] == stats.UNDECIDED]["trial"])
    for ranking in rankings(run):
        undecided += _close(ranking.ranked(LATENCY), run)
    groups: dict[Group, list[str]] = {}
    for id in dict.fromkeys(undecided):
        reference = run.references[id].id
        if id in good and reference in good:
            ids = groups.setdefault(run.trials[id].group, [reference])
            ids += [id] if id not in ids else []
    return groups


def _close(ranked: pd.DataFrame, run: RunData) -> list[str]:
    """The winner and its runner-up, where it is undecided which of them is faster."""
    rows = ranked.iloc[:PLACES]
    first, *others = (run.trials[id] for id in rows["trial"]) if len(rows) else (None,)
    if first is None or not others or others[0].group != first.group:
        return []
    row = rows.iloc[0]
    speedup = speedups.speedup(first, others[0], str(row["boundary"]), str(row["clock"]), run.rule)
    return [first.id, others[0].id] if speedup.verdict == stats.UNDECIDED else []
