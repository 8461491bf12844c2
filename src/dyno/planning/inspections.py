"""A study's models inspected side by side: nothing is timed, and most of an inspection is spent importing libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

from dyno.jobs.memory import ROOM, UNKNOWN_B, available
from dyno.planning.model_info import inspect_model
from dyno.study import Study
from dyno.worker.inspection import Inspection
from dyno.worker.spec import ModelSpec, UserError

Inspected = tuple[ModelSpec, Inspection]


def inspect_models(study: Study, models: Mapping[str, ModelSpec]) -> dict[str, Inspected | UserError]:
    """What the inspection of each model says, by its key there, or why it can't be used.

    As many are inspected at once as there are processors, and memory for. One that fails beside others is inspected
    again alone: it may have lacked memory or time for no fault of its own.
    """
    most = min(len(models), len(os.sched_getaffinity(0)), int(available() / (ROOM * UNKNOWN_B)))
    found: dict[str, Inspected | UserError] = {**_side_by_side(study, models, most)} if most > 1 else {}
    for key in models.keys() - found.keys():
        try:
            found[key] = inspect_model(models[key], study)
        except UserError as e:
            found[key] = e
    return found


def _side_by_side(study: Study, models: Mapping[str, ModelSpec], most: int) -> dict[str, Inspected]:
    """What the inspections say that end well, with so many at once; an interrupt ends all."""
    stopped = Event()

    def tick(stage: str, seconds: float) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt  # in the inspection's thread, which then kills its process

    found = {}
    with ThreadPoolExecutor(most) as pool:
        pending = {key: pool.submit(inspect_model, model, study, tick) for key, model in models.items()}
        try:
            for key, future in pending.items():
                with suppress(UserError):
                    found[key] = future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found
