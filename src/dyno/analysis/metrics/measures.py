"""The measures of accuracy that a budget can be about, by the columns of the table that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from dyno.analysis.metrics.accuracy import Budget


@dataclass(frozen=True)
class Metric:
    """`key` as in a budget, `title` as in a sentence, `column` with its value in percent.

    The limits stand in `{stem}_low` and `{stem}_high`, the paired difference to the reference in `{stem}_diff…`.
    """

    key: str
    title: str
    column: str
    stem: str

    @property
    def diff(self) -> str:
        """The column of the paired difference to the reference, in points."""
        return f"{self.stem}_diff"

    def interval(self, row: pd.Series) -> tuple[float, float]:
        """Limits of the value in percent, NaN where they aren't known."""
        return float(row.get(f"{self.stem}_low", float("nan"))), float(row.get(f"{self.stem}_high", float("nan")))

    def change(self, row: pd.Series) -> tuple[float, float, float]:
        """The paired difference in points with its limits, NaN where there is none."""
        low, value, high = (float(row.get(f"{self.diff}{end}", float("nan"))) for end in ("_low", "", "_high"))
        return low, value, high


# The first one that a run has is what its accuracy is shown by.
METRICS = (
    Metric("top1", "top-1", "top1", "top1"),
    Metric("mAP", "mAP50-95", "map50_95", "map"),
    Metric("top5", "top-5", "top5", "top5"),
)


def quality(frame: pd.DataFrame, budgets: Sequence[Budget] = ()) -> Metric:
    """What the accuracy of these trials is shown by: the budget's first metric, else the first one they have."""
    known = {m.key: m for m in METRICS}
    order = [*(known[budget.metric] for budget in budgets), *METRICS]
    return next((m for m in order if m.column in frame and frame[m.column].notna().any()), METRICS[0])
