"""Metrics of a trial's answers: accuracy, mAP, agreement, precision, arithmetic.

A metric of accuracy is an object in a module, found by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from dyno.results.metrics.metric import Metric, MetricValue
from dyno.results.trial_result import TrialResult
from dyno.worker import plugins

if TYPE_CHECKING:
    import pandas as pd

ENTRY_POINT_GROUP = "dyno.metrics"


@cache
def list_metrics() -> dict[str, Metric]:
    """Return all metrics by name, Dyno's and those of installed plug-ins, in display order."""
    metrics = plugins.list_declared(sys.modules[__name__], Metric, ENTRY_POINT_GROUP)  # type: ignore[type-abstract]
    return dict(sorted(metrics.items(), key=lambda item: (item[1].position, item[0])))


def list_task_metrics(trial: TrialResult) -> list[Metric]:
    """Return the metrics named by the trial's task."""
    return [metric for name, metric in list_metrics().items() if name in trial.task.metrics]


def list_measured(trial: TrialResult) -> list[tuple[Metric, MetricValue]]:
    """Return each metric that has a value for the trial, with the value."""
    return [(metric, value) for metric in list_task_metrics(trial) if (value := metric.compute(trial)) is not None]


def choose_metric(frame: pd.DataFrame, budgets: Iterable[str] = ()) -> Metric:
    """Return the metric to show for these trials: the first budget's that they have, else the first they have."""
    metrics = list(list_metrics().values())
    order = [*(list_metrics()[name] for name in budgets), *metrics]
    return next((m for m in order if m.column in frame and frame[m.column].notna().any()), metrics[0])
