"""A run, loaded once: the data for tables, verdict, charts and report of one command."""

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
    """Stored records and the table of their trials (a row each, from `tables.trial_table`).

    `references` maps a trial's id to its reference, `compared` to the trial that its outputs are compared with. `rule`
    decides speeds. The fastest must keep the accuracy `budgets` and the `limits`.
    """

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
        """Names of the budgets' metrics."""
        return [budget.metric for budget in self.budgets]

    @property
    def budget(self) -> str:
        """The budgets as text, `top1=0.5, top5=1`; "" without any."""
        return ", ".join(map(str, self.budgets))

    @property
    def conditions(self) -> str:
        """Budgets and limits for the fastest, as text: `the budget top1=0.5 and the limit p99=5ms`."""
        limits = ", ".join(map(str, self.limits))
        parts = [
            f"the budget {self.budget}" if self.budgets else "",
            f"the limit{'s' * (len(self.limits) > 1)} {limits}" if limits else "",
        ]
        return " and ".join(filter(None, parts))
