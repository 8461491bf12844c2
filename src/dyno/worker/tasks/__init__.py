"""What a network is for: which data it is measured on, how its outputs lie, and what is kept of them."""

from __future__ import annotations

import sys
from functools import cache

from dyno.worker import plugins
from dyno.worker.spec import check_known
from dyno.worker.tasks.task import Task

GROUP = "dyno.tasks"


def find(name: str) -> Task:
    """Return the task of that name; raise a `UserError` with the nearest for an unknown one."""
    check_known("task", name, names())
    return _load_tasks()[name]


def names() -> list[str]:
    """Return the names of the tasks."""
    return list(_load_tasks())


def metrics() -> list[str]:
    """Return the metrics for budgets: each task's, by the names of their objects in `results/metrics`."""
    return list(dict.fromkeys(metric for task in _load_tasks().values() for metric in task.metrics))


@cache
def _load_tasks() -> dict[str, Task]:
    return plugins.declared(sys.modules[__name__], Task, GROUP)  # type: ignore[type-abstract]
