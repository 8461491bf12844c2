"""How long each layer of an engine takes, by the library's own profiler: where the time goes, not how much there is.

A profiled run is launched without a graph and timed layer by layer, so its sum is more than the latency.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dyno.worker.backends.tensor_rt.layers import Layer
from dyno.worker.facts.engine import SlowLayer

RUNS = 6  # the first is left out
SLOWEST = 5


def profiled(trt: Any, context: Any, launch: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each layer by its name; {} where the library reports none.

    `launch` runs the context once and returns when it is done. The context keeps the profiler: time nothing with it
    afterwards.
    """
    times: dict[str, list[float]] = defaultdict(list)

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, name: str, milliseconds: float) -> None:
            times[name].append(milliseconds / 1e3)

    profiler = Profiler()
    context.profiler = profiler
    for _ in range(RUNS):
        launch()
    return {name: statistics.median(seconds[1:] or seconds) for name, seconds in times.items()}


def by_operator(listed: Sequence[Layer], seconds: Mapping[str, float]) -> dict[str, float]:
    """Share of the layers' time, by kind of layer, largest first."""
    types = {layer.name: layer.type for layer in listed}
    total = sum(seconds.values()) or 1.0
    shares: dict[str, float] = defaultdict(float)
    for name, duration in seconds.items():
        shares[types.get(name) or "unknown"] += duration / total
    return {type_: round(share, 4) for type_, share in sorted(shares.items(), key=lambda kv: -kv[1])}


def slowest(listed: Sequence[Layer], seconds: Mapping[str, float]) -> tuple[SlowLayer, ...]:
    """The layers that take longest: name, kind, the type they compute in, tactic, and share of the layers' time."""
    by_name = {layer.name: layer for layer in listed}
    total = sum(seconds.values()) or 1.0
    layers = []
    for name, duration in sorted(seconds.items(), key=lambda kv: -kv[1])[:SLOWEST]:
        layer = by_name.get(name) or Layer(name, "", (), (), "")
        layers.append(SlowLayer(name, layer.type, layer.computed_in, layer.tactic, round(duration / total, 4)))
    return tuple(layers)
