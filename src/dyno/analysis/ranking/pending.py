"""Which pairs further rounds are for: those that matter and that are undecided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyno.analysis import stats
from dyno.analysis.metrics import speedups
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.ranking.rankings import PLACES, rankings
from dyno.analysis.records.run_data import RunData
from dyno.worker.spec import EVERY_ROW

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class UndecidedPair:
    """Two trials, by their ids, and the boundary at which it is undecided which of them is faster."""

    trials: frozenset[str]
    boundary: str


def pending(run: RunData) -> list[UndecidedPair]:
    """Return the pairs that another round is for: each winner with its reference and with its runner-up.

    Until every row is decided, and in a comparison, where each row is a question, it is each trial with its reference.
    A pair with a failed trial is left out.
    """
    rows = run.frame[run.frame["status"] == "ok"]
    good, ranked = set(rows["trial"]), [ranking.ranked(LATENCY) for ranking in rankings(run)]
    asked = {str(winners["trial"].iloc[0]) for winners in ranked if len(winners)}
    if run.records.settings.get("until") == EVERY_ROW or any(run.trials[id].side for id in good):
        asked = good
    pairs = [
        UndecidedPair(frozenset((row["trial"], row["reference"])), str(row["boundary"]))
        for row in rows[rows["verdict"] == stats.UNDECIDED].to_dict("records")
        if row["trial"] in asked
    ]
    for winners in ranked:
        pairs += _find_close_pair(winners, run)
    return [pair for pair in dict.fromkeys(pairs) if pair.trials <= good]


def _find_close_pair(ranked: pd.DataFrame, run: RunData) -> Iterator[UndecidedPair]:
    """Yield the winner and its runner-up, if they are in one group and it is undecided which of them is faster."""
    rows = ranked.iloc[:PLACES]
    first, *others = (run.trials[id] for id in rows["trial"]) if len(rows) else (None,)
    if first is None or not others or others[0].group != first.group:
        return
    row = rows.iloc[0]
    speedup = speedups.speedup(first, others[0], str(row["boundary"]), str(row["clock"]), run.rule)
    if speedup.verdict == stats.UNDECIDED:
        yield UndecidedPair(frozenset((first.id, others[0].id)), str(row["boundary"]))
