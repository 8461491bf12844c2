"""Rankings: which trials are compared for speed, and their order; the verdict reports it and a study confirms it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, cmp_to_key
from typing import TYPE_CHECKING

import numpy as np

from dyno.analysis.formatting import sized
from dyno.analysis.metrics import quality
from dyno.analysis.metrics.metric import Metric
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.ranking.references import INCOMPARABLE
from dyno.analysis.records.blocks import log_ratios
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

PLACES = 2  # the winner and its runner-up


@dataclass(frozen=True)
class Ranking:
    """Trials of one model on one device, at one size, or at every size where an accuracy budget covers all sizes.

    `apart` holds those that can't be compared with their reference: with other weights it is another model.
    `metric` is the accuracy that is shown, and `trials` are the run's, by id.
    """

    where: str
    group: pd.DataFrame
    apart: pd.DataFrame
    sizes: bool
    metric: Metric
    trials: Mapping[str, TrialResult] = field(repr=False)

    @property
    def first(self) -> pd.DataFrame:
        """Trials at the smallest batch, where the lowest latency wins."""
        return self.group[self.group["batch"] == self.group["batch"].min()]

    @cached_property
    def fastest(self) -> pd.DataFrame:
        """Trials within the budget at the smallest batch, fastest first."""
        return self._sort_rows(frontier.within(self.first))

    @cached_property
    def ahead(self) -> pd.DataFrame:
        """Trials at the smallest batch that are faster than the fastest within the budget, fastest first."""
        rows, fastest = self._sort_rows(frontier.usable(self.first)), self.fastest
        if fastest.empty:
            return rows
        return rows.iloc[: [*rows["trial"]].index(fastest.iloc[0]["trial"])]

    @property
    def most_images(self) -> pd.DataFrame:
        """Trials within the budget by images per second, most first; empty with one batch, which `fastest` covers."""
        ranked = frontier.ranked(frontier.within(self.group), THROUGHPUT)
        return ranked if self.group["batch"].nunique() > 1 else ranked.iloc[:0]

    def _sort_rows(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the rows, fastest first.

        Of two that measured in turns, the ratio of one to the other decides: by their ratios to a reference whose
        latency jumps, either may seem ahead.
        """
        ordered = frontier.ranked(rows)
        if not frontier.in_turns(ordered):
            return ordered
        by_id = {str(row["trial"]): row for _, row in ordered.iterrows()}

        def compare_trials(a: str, b: str) -> int:
            ratios = log_ratios(self.trials[a], self.trials[b], str(by_id[a]["boundary"]), str(by_id[a]["clock"]))
            return int(np.sign(np.mean(ratios))) if ratios else 0

        places = {id: k for k, id in enumerate(sorted(by_id, key=cmp_to_key(compare_trials)))}
        return ordered.sort_values("trial", key=lambda ids: ids.map(places))

    def ranked(self, speed: str) -> pd.DataFrame:
        """Return the ranking by LATENCY or THROUGHPUT."""
        return self.fastest if speed == LATENCY else self.most_images

    def reference(self, row: pd.Series) -> TrialResult | None:
        """Return the reference of a row's speed-up: that of its size, or of the first size where all sizes compete."""
        return self.trials.get(row["budget_reference"] if self.sizes else row["reference"])

    def configuration(self, row: pd.Series) -> str:
        """Return a row's name in the ranking, with the precision it ran in where that isn't the requested one."""
        return frontier.describe(row) + (f" at size {row['size']}" if self.sizes else "")


def rankings(run: RunData) -> list[Ranking]:
    """Return every ranking of a run, in the table's order."""
    all_rankings = []
    for _, models in run.frame.groupby(["model", "device"], sort=False):
        name, sizes = models["model"].iloc[0], models["size"].unique()
        if run.budgets and len(sizes) > 1:
            all_rankings.append(_make_ranking(str(name), models, run, True))
            continue
        for size in sizes:
            where = f"{name}{sized(size, ' at size ')}"
            all_rankings.append(_make_ranking(where, models[models["size"] == size], run, False))
    return all_rankings


def _make_ranking(where: str, rows: pd.DataFrame, run: RunData, sizes: bool) -> Ranking:
    apart = rows["verdict"].str.startswith(INCOMPARABLE)
    return Ranking(where, rows[~apart], rows[apart], sizes, quality(rows[~apart], run.budget_metrics), run.trials)


def winners(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the model and size of each ranking that has a winner, and the winner's id."""
    for ranking in rankings(run):
        ordered = ranking.fastest
        if len(ordered):
            yield ranking.where, str(ordered.iloc[0]["trial"])


def finalists(run: RunData) -> list[str]:
    """Return the ids of the trials to confirm: each winner, its runner-up, and the reference of its speed-up."""
    ids: list[str] = []
    for ranking in rankings(run):
        for speed in (LATENCY, THROUGHPUT):
            ordered = ranking.ranked(speed)
            chosen = [str(id) for id in ordered["trial"].iloc[:PLACES]]
            if len(ordered) and (reference := ranking.reference(ordered.iloc[0])) is not None:
                chosen.append(reference.id)
            if len(set(chosen)) > 1:  # a single trial was not selected by chance
                ids += chosen
    return list(dict.fromkeys(ids))
