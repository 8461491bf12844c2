"""A study's models inspected side by side: nothing is timed, and most of an inspection is spent importing libraries."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

from dyno.jobs.memory import ROOM, UNKNOWN_B, available
from dyno.planning.model_info import inspect_model
from dyno.study import Study
from dyno.worker import system
from dyno.worker.inspection import Inspection
from dyno.worker.spec import ModelSpec, UserError

InspectedModel = tuple[ModelSpec, Inspection]


def inspect_models(study: Study, models: Mapping[str, ModelSpec]) -> dict[str, InspectedModel | UserError]:
    """Inspect each model; return the results, or why a model can't be used, by its key.

    Models are inspected in parallel, as many as processors and memory allow, each on its share of the processors. One
    that fails beside others is inspected again alone, because it may have lacked memory or time.
    """
    most = min(len(models), len(os.sched_getaffinity(0)), int(available() / (ROOM * UNKNOWN_B)))
    found: dict[str, InspectedModel | UserError] = {**_side_by_side(study, models, most)} if most > 1 else {}
    for key in models.keys() - found.keys():
        try:
            found[key] = inspect_model(models[key], study)
        except UserError as e:
            found[key] = e
    return found


def _side_by_side(study: Study, models: Mapping[str, ModelSpec], most: int) -> dict[str, InspectedModel]:
    """Inspect up to `most` models in parallel; return the successful ones. An interrupt stops all."""
    stopped = Event()

    def check_stopped(stage: str, seconds: float) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt  # in the inspection's thread, which then kills its process

    shares = deque(_split_processors(most))

    def keep_to_share() -> None:
        """Confine this thread's processes to a share: with threads for all cores, they would wait for each other."""
        os.sched_setaffinity(0, shares.popleft())

    inspected = {}
    with ThreadPoolExecutor(most, initializer=keep_to_share) as pool:
        pending = {key: pool.submit(inspect_model, model, study, check_stopped) for key, model in models.items()}
        try:
            for key, future in pending.items():
                with suppress(UserError):
                    inspected[key] = future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return inspected


def _split_processors(count: int) -> list[list[int]]:
    """Split the processors that this process may use into `count` shares, keeping threads of a core adjacent."""
    order = [cpu for core in system.core_threads() for cpu in core]
    return [order[k * len(order) // count : (k + 1) * len(order) // count] for k in range(count)]
