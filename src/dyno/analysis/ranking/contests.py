"""Who competes with whom for being the fastest, and who is ahead: what the verdict says and a study confirms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyno.analysis.formatting import NO_IMAGE
from dyno.analysis.metrics.measures import Metric, quality
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.ranking.references import INCOMPARABLE
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

PLACES = 2  # the winner and its runner-up


@dataclass(frozen=True)
class Contest:
    """Trials of one model on one device, at one size, or at every size where a budget says what a size may cost.

    `apart` holds those that must not be held against their reference: with other weights it is another model.
    `metric` is what their accuracy is shown by.
    """

    where: str
    group: pd.DataFrame
    apart: pd.DataFrame
    sizes: bool
    metric: Metric

    @property
    def first(self) -> pd.DataFrame:
        """Those at the smallest batch, among which the lowest latency wins."""
        return self.group[self.group["batch"] == self.group["batch"].min()]

    @property
    def fastest(self) -> pd.DataFrame:
        """Trials within the budget at the smallest batch, fastest first."""
        return frontier.ranked(frontier.within(self.first))

    @property
    def most_images(self) -> pd.DataFrame:
        """Trials within the budget by images per second, most first; empty with one batch, which `fastest` tells."""
        ranked = frontier.ranked(frontier.within(self.group), THROUGHPUT)
        return ranked if self.group["batch"].nunique() > 1 else ranked.iloc[:0]

    def ranked(self, speed: str) -> pd.DataFrame:
        """The ranking by LATENCY or THROUGHPUT."""
        return self.fastest if speed == LATENCY else self.most_images

    def reference(self, row: pd.Series, trials: Mapping[str, TrialResult]) -> TrialResult | None:
        """The reference of a row's speed-up: that of its size, or of the first size where all sizes compete."""
        return trials.get(row["budget_reference"] if self.sizes else row["reference"])

    def way(self, row: pd.Series) -> str:
        """A row's name among the contest's rows, with what it ran as where that isn't what was asked for."""
        return frontier.told(row) + (f" at size {row['size']}" if self.sizes else "")


def contests(run: RunData) -> list[Contest]:
    """Every contest of a run, in the table's order."""
    found = []
    for _, models in run.frame.groupby(["model", "device"], sort=False):
        name, sizes = models["model"].iloc[0], models["size"].unique()
        if run.budgets and len(sizes) > 1:
            found.append(_contest(str(name), models, run, True))
            continue
        for size in sizes:
            where = str(name) if size == NO_IMAGE else f"{name} at size {size}"
            found.append(_contest(where, models[models["size"] == size], run, False))
    return found


def _contest(where: str, rows: pd.DataFrame, run: RunData, sizes: bool) -> Contest:
    apart = rows["verdict"].str.startswith(INCOMPARABLE)
    return Contest(where, rows[~apart], rows[apart], sizes, quality(rows[~apart], run.budgets))


def contenders(run: RunData) -> list[str]:
    """Ids of what is worth measuring again: each winner, its runner-up, and the reference of its speed-up."""
    found: list[str] = []
    for contest in contests(run):
        for speed in (LATENCY, THROUGHPUT):
            ranked = contest.ranked(speed)
            chosen = [str(id) for id in ranked["trial"].iloc[:PLACES]]
            if len(ranked) and (reference := contest.reference(ranked.iloc[0], run.trials)) is not None:
                chosen.append(reference.id)
            if len(set(chosen)) > 1:  # alone there is nothing that luck could have decided
                found += chosen
    return list(dict.fromkeys(found))
