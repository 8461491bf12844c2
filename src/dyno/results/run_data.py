"""A run, loaded once: what tables, verdict, charts and report of one command are all made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from dyno.results.stats import Rule
from dyno.results.trial_result import Results, TrialResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from dyno.results.limits import Limit
    from dyno.results.metrics.accuracy import Budget


@dataclass(frozen=True)
class RunData:
    """Stored records with the table of their trials (a row each, as `tables.trial_table` makes it), the accuracy
    budgets and the reference that the table is compared with, the reference trial of each trial by its id, the rule by
    which speeds are decided, the trial whose outputs each one's are `compared` with, by its id, and the limits that the
    fastest must keep."""

    records: Results
    frame: pd.DataFrame
    budgets: tuple[Budget, ...] = ()
    references: Mapping[str, TrialResult] = field(default_factory=dict)
    rule: Rule = field(default_factory=Rule)
    compared: Mapping[str, TrialResult] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()

    @cached_property
    def trials(self) -> dict[str, TrialResult]:
        """The trials by id."""
        return {t.id: t for t in self.records}

    @property
    def budget_metrics(self) -> list[str]:
        """Names of the metrics that the budgets are about."""
        return [each.metric for each in self.budgets]

    @property
    def budget(self) -> str:
        """The budgets as text, `top1=0.5, top5=1`; "" without one."""
        return ", ".join(map(str, self.budgets))

    @property
    def conditions(self) -> str:
        """The budgets and limits that the fastest must keep, as text: `the budget top1=0.5 and the limit p99=5ms`."""
        limits = ", ".join(map(str, self.limits))
        parts = [
            f"the budget {self.budget}" if self.budgets else "",
            f"the limit{'s' * (len(self.limits) > 1)} {limits}" if limits else "",
        ]
        return " and ".join(filter(None, parts))
