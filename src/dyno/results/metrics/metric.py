"""Definition of an accuracy metric: one object holds all that Dyno knows of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dyno.results.stats import CONFIDENCE, Interval
from dyno.results.trial_result import TrialResult
from dyno.table import PERCENT, POINTS, Column

if TYPE_CHECKING:
    import pandas as pd

INTERVAL_SUFFIXES = {"_low": "lower", "_high": "upper"}


@dataclass(frozen=True)
class MetricValue:
    """A trial's value: a share from 0 to 1 with its 95 % interval (NaN: unknown), and the number of `images`.

    `subject` names what is scored if the label leaves it open: masks, keypoints.
    """

    interval: Interval
    images: int
    subject: str = ""


@dataclass(frozen=True)
class Change:
    """A trial's value minus its reference's, as a share with its 95 % interval, over common images.

    With fewer images than `least_images` the interval is too narrow to prove that a loss is within a budget.
    """

    least_images: ClassVar[int] = 0

    images: int
    difference: Interval

    @property
    def cautious(self) -> Interval:
        """Interval for proving a loss: twice as wide with fewer images than `least_images`."""
        value, low, high = self.difference.value, self.difference.low, self.difference.high
        return (
            Interval(value, 2 * low - value, 2 * high - value) if self.images < self.least_images else self.difference
        )

    def chance(self, limit: float) -> float:
        """Return the probability of this result or a better one if the true change were `limit`, from the interval."""
        from scipy.special import ndtr, ndtri

        value, reach = self.difference.value, self.difference.value - self.difference.low
        if not reach > 0:
            return float(not value > limit) if reach == 0 else 1.0
        return float(ndtr(ndtri((1 - CONFIDENCE) / 2) * (value - limit) / reach))

    def enough(self, limit: float) -> int | None:
        """Estimate the number of images that puts the whole interval on one side of `limit`, None if no number does.

        Assumes that the width falls with the square root of the number of images.
        """
        gap = abs(self.difference.value - limit)
        if not gap or math.isnan(self.difference.low):
            return None
        return math.ceil(self.images * ((self.difference.value - self.difference.low) / gap) ** 2)


class Metric(ABC):
    """A measure of accuracy; a larger value is better.

    Declared at the top of a module of `results/metrics` or by an entry point of the group `dyno.metrics`; a trial has
    the metrics named by its task. `name` is as in a budget and in the task's `metrics`, `label` as in a sentence and a
    heading. `column` is its column in the table of trials, explained by `meaning`; `interval_text` names its interval,
    `change_interval_text` that of the change against the reference. `printed` are suffixes of the columns printed in
    that table: "" for the value, `_diff` for the change. On a narrow terminal, columns with a high `rank` are dropped
    first. A run's accuracy is shown by its metric with the lowest `position`.
    """

    name: str = ""
    label: str = ""
    column: str = ""
    meaning: str = ""
    interval_text: str = "the 95 % interval"
    change_interval_text: str = "the 95 % interval"
    printed: tuple[str, ...] = ("", "_diff")
    rank: int = 0
    position: int = 100

    @abstractmethod
    def compute(self, trial: TrialResult) -> MetricValue | None:
        """Return the trial's value; None if it has none, e.g. without labels."""

    @abstractmethod
    def change(self, trial: TrialResult, reference: TrialResult) -> Change | None:
        """Compare the trial with the reference on common images, None without any."""

    def unchanged(self, images: int) -> Interval:
        """Return the interval of the change if all `images` are answered as by the reference."""
        return Interval(0.0, 0.0, 0.0)

    @property
    def diff(self) -> str:
        """Column name of the change against the reference, in points."""
        return f"{self.column}_diff"

    @property
    def value_column(self) -> Column:
        """Printed column of the value with its interval."""
        return Column(self.column, f"with {self.interval_text}", "%", PERCENT, f"{self.label} %", interval=True)

    @property
    def change_columns(self) -> tuple[Column, ...]:
        """Columns of the change and its limits."""
        meaning = f"{self.column} against the reference's, paired"
        head = Column(self.diff, meaning, "points", POINTS, "change, points", 6, True)
        docs = (f"{end} limit of {self.change_interval_text} of {self.diff}" for end in INTERVAL_SUFFIXES.values())
        return (
            head,
            *(Column(self.diff + end, doc, "points", POINTS) for end, doc in zip(INTERVAL_SUFFIXES, docs, strict=True)),
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of a trial: value, change, and the limits of both."""
        head = Column(self.column, self.meaning, "%", PERCENT, f"{self.label} %", self.rank)
        limits = (Column(self.column + end, f"{bound} limit of {self.interval_text} of {self.column}", "%", PERCENT)
                  for end, bound in INTERVAL_SUFFIXES.items())  # fmt: skip
        return (head, *limits, *self.change_columns)

    @property
    def printed_columns(self) -> tuple[str, ...]:
        """Columns printed in the table of trials."""
        return tuple(self.column + suffix for suffix in self.printed)

    def interval(self, row: pd.Series) -> tuple[float, float]:
        """Return the limits of the value in percent, from a row of the table of trials; NaN if unknown."""
        return float(row.get(f"{self.column}_low", math.nan)), float(row.get(f"{self.column}_high", math.nan))

    def change_in(self, row: pd.Series) -> tuple[float, float, float]:
        """Return lower limit, change and upper limit in points, from a row of the table of trials; NaN if missing."""
        low, value, high = (float(row.get(f"{self.diff}{suffix}", math.nan)) for suffix in ("_low", "", "_high"))
        return low, value, high


def in_percent(name: str, interval: Interval) -> dict[str, float]:
    """Return a share and its limits as cells of the columns NAME, NAME_low and NAME_high, in percent."""
    return {name: 100 * interval.value, f"{name}_low": 100 * interval.low, f"{name}_high": 100 * interval.high}
