"""How long each call of a PyTorch module's parts takes on the CPU, by a clock at its begin and its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dyno.worker.backend import LayerTimes
from dyno.worker.facts.inside import Layer, LayerGraph
from dyno.worker.layers import module as calls
from dyno.worker.sessions.torch_support import import_torch

DISCARDED = 3  # runs that don't count
NOTE = "PyTorch's rows have what a module does itself, and what calling its parts costs; hooks read the clock."
Mark = tuple[str | None, int]  # the name of the part whose call ends, None where one begins, and the clock in ns


def measure(
    module: Any,
    once: Callable[[], None],
    plainly: Callable[[], Any],
    runs: int,
    restore: Callable[[], None] = lambda: None,
) -> LayerTimes:
    """Measure the seconds of each call of a part, without its own parts', in `runs` runs of `once`.

    `plainly` calls the module for `layers.module.watched`, outside inference mode, in which operations aren't counted.
    `restore` is called before each run, untimed. Hooks cost less than the profiler of PyTorch, which watches every
    operator. Raises `UserError` as `watched` does.
    """
    inside = watched_whole(module, plainly, restore)
    marks: list[Mark] = []
    clock = time.perf_counter_ns

    def make_enter_hook(_: str) -> Callable[..., None]:
        return lambda *_: marks.append((None, clock()))

    def make_leave_hook(name: str) -> Callable[..., None]:
        return lambda *_: marks.append((name, clock()))

    rows = rows_of(inside)
    layers, whole = [], []
    with calls.hooked(import_torch(), module, make_enter_hook, make_leave_hook):
        for _ in range(DISCARDED + runs):
            restore()
            marks.clear()
            start = clock()
            once()
            whole.append((clock() - start) / 1e9)
            layers.append(own_seconds(marks, rows, len(inside.layers)))
    return LayerTimes(inside, np.array(layers[DISCARDED:]), np.array(whole[DISCARDED:]), NOTE)


def watched_whole(module: Any, plainly: Callable[[], Any], restore: Callable[[], None]) -> LayerGraph:
    """Return the calls of the module's parts by `layers.module.watched`, and the module itself."""
    restore()
    with import_torch().no_grad():
        return with_whole(calls.watched(module, plainly), module)


def with_whole(inside: LayerGraph, module: Any) -> LayerGraph:
    """Add a row for the module itself: the work of its own code belongs to none of its parts."""
    if any(not layer.name for layer in inside.layers):
        return inside
    return replace(inside, layers=(*inside.layers, Layer(type=type(module).__name__, flops=0, modules=("",))))


def rows_of(inside: LayerGraph) -> dict[tuple[str, int], int]:
    """Return the row of each call, by the part's name and the number of the part's call, counted from 0."""
    seen: Counter[str] = Counter()
    rows = {}
    for row, layer in enumerate(inside.layers):
        rows[layer.name, seen[layer.name]] = row
        seen[layer.name] += 1
    return rows


def own_seconds(marks: Sequence[Mark], rows: Mapping[tuple[str, int], int], count: int) -> list[float]:
    """Return the seconds of each row in one run, from the marks in their order.

    The own time of a call without a row counts for the call around it.
    """
    seconds, seen = [0.0] * count, Counter[str]()
    calling: list[tuple[int, list[int]]] = []  # begin of each open call, and nanoseconds of the calls inside it
    for name, at in marks:
        if name is None:
            calling.append((at, []))
            continue
        begin, inner = calling.pop()
        row = rows.get((name, seen[name]))
        seen[name] += 1
        counted = at - begin if row is not None else sum(inner)
        if row is not None:
            seconds[row] += (counted - sum(inner)) / 1e9
        if calling:
            calling[-1][1].append(counted)
    return seconds
