"""How long each layer of an engine takes, by the library's own profiler: where the time goes, not how much there is.

A profiled run is launched without a graph and timed layer by layer, so its sum is more than the latency.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from dyno.worker.backends.tensor_rt.layers import EngineLayer
from dyno.worker.facts import inside as facts
from dyno.worker.facts.engine import SlowLayer
from dyno.worker.facts.inside import LayerGraph

RUNS = 6  # the first is left out
DISCARDED = 3  # runs of a profile that don't count
NOTE = (
    "TensorRT's profiler runs the layers one after the other without a CUDA graph and times each by events: what lies "
    "between two is in their times, so that they may add up to more than the latency."
)
SLOWEST = 5


def watched(trt: Any, context: Any, launch: Callable[[], None], runs: int) -> list[dict[str, float]]:
    """Return the seconds of each layer by name in each of `runs` runs; empty if the library reports none.

    `launch` runs the context once and returns when it is done. The context keeps the profiler: time nothing with it
    afterwards.
    """
    seconds: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, name: str, milliseconds: float) -> None:
            seconds[name] += milliseconds / 1e3

    profiler = Profiler()
    context.profiler = profiler
    repeats = []
    for _ in range(runs):
        seconds.clear()
        launch()
        repeats.append(dict(seconds))
    return repeats


def profiled(trt: Any, context: Any, launch: Callable[[], None]) -> dict[str, float]:
    """Return the median seconds of each layer by name; see `watched`."""
    runs = watched(trt, context, launch, RUNS)[1:]
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in dict.fromkeys(chain(*runs))}


def of_layers(listed: LayerGraph, runs: Sequence[Mapping[str, float]]) -> tuple[LayerGraph, np.ndarray]:
    """Return the engine's layers, and their seconds [runs, layers].

    A layer that no run reports is `skipped`. A reported layer that the list lacks stands at the end, with a name alone.
    """
    reported = dict.fromkeys(chain(*runs))
    rows = {layer.name: k for k, layer in reversed([*enumerate(listed.layers)])}  # of equal names the first
    layers = [replace(layer, skipped=rows[layer.name] != k or layer.name not in reported)
              for k, layer in enumerate(listed.layers)]  # fmt: skip
    for name in reported:
        if rows.setdefault(name, len(layers)) == len(layers):
            layers.append(facts.Layer(name=name))
    seconds = np.zeros((len(runs), len(layers)))
    for run, times in zip(seconds, runs, strict=True):
        for name, duration in times.items():
            run[rows[name]] = duration
    return replace(listed, layers=tuple(layers)), seconds


def by_operator(listed: Sequence[EngineLayer], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each kind of layer's share of the layers' time, largest first."""
    types = {layer.name: layer.type for layer in listed}
    total = sum(seconds.values()) or 1.0
    shares: dict[str, float] = defaultdict(float)
    for name, duration in seconds.items():
        shares[types.get(name) or "unknown"] += duration / total
    return {type_: round(share, 4) for type_, share in sorted(shares.items(), key=lambda kv: -kv[1])}


def slowest(listed: Sequence[EngineLayer], seconds: Mapping[str, float]) -> tuple[SlowLayer, ...]:
    """Return the slowest layers: name, kind, the type they compute in, tactic, and share of the layers' time."""
    by_name = {layer.name: layer for layer in listed}
    total = sum(seconds.values()) or 1.0
    layers = []
    for name, duration in sorted(seconds.items(), key=lambda kv: -kv[1])[:SLOWEST]:
        layer = by_name.get(name) or EngineLayer(name, "", (), (), "")
        layers.append(SlowLayer(name, layer.type, layer.computed_in, layer.tactic, round(duration / total, 4)))
    return tuple(layers)
