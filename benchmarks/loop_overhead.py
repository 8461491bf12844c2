"""Dyno's latency/model against a bare loop over the same session: the ratio of medians is at most 1.02.

ResNet-18 at 224, batch 1, and the narrow digits network at 64 (the harder case: overhead weighs more in a short run).
Blocks of Dyno's loop and of the bare loop alternate in one process, so both see the same machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import measure, system
from dyno.worker.registry import find, get_maker
from dyno.worker.spec import Artifact, Dims, ModelSpec, Plan, Runtime, Trial

MODELS = (
    (ModelSpec("resnet18", "torchvision:resnet18"), 224),
    (ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1), 64),
)
BACKENDS = ("onnxruntime", "openvino")
BLOCKS, BLOCK = 12, Plan(seconds=0.5, min_samples=10**6)
WANTED = 1.02


def bare(name: str, session: Any, feed: dict[str, np.ndarray]) -> Callable[[], None]:
    """Return a bare inference call, as a user writes it by hand, on the session of Dyno's loop."""
    if name == "onnxruntime":
        inner = session._session
        return lambda: inner.run(None, feed)
    request = session._requests[0]
    return lambda: request.infer()


def by_hand(once: Callable[[], None]) -> list[float]:
    """Return the latencies of a plain loop that runs as long as Dyno's."""
    times, end = [], time.perf_counter() + BLOCK.seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return times


def compare(name: str, model: ModelSpec, size: int, onnx: Artifact) -> float:
    """Print both medians and return their ratio."""
    trial = Trial(model, name, "fp32", Dims(1, size, size), runtime=Runtime(threads=system.physical_cores()))
    session = find(name).load(trial, onnx)
    feed = {"input": np.random.default_rng(0).standard_normal((1, model.channels, size, size), dtype=np.float32)}
    step = measure.make_step(session, "model", [feed])
    plain = bare(name, session, feed)
    measure.warm_up(step, Plan(warmup_s=2))
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(BLOCKS):
        ours += measure.measure_latency(step, BLOCK).samples.tolist()
        theirs += by_hand(plain)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"{name:12} {model.name:9} dyno {a * 1e3:7.3f} ms   bare loop {b * 1e3:7.3f} ms   ratio {a / b:.3f}")
    return a / b


def main() -> int:
    """Print the ratios; return 1 if one is above the limit."""
    system.pin(system.physical_cores())
    ratios = []
    for model, size in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            from dyno.worker.makers.export import export_recipe

            recipe = export_recipe(model, Dims(0, size, size), Runtime())
            onnx = get_maker("onnx_export").make(recipe, None, Path(scratch))
            ratios += [compare(name, model, size, onnx) for name in BACKENDS]
    print(f"worst {max(ratios):.3f}, wanted at most {WANTED}")
    return int(max(ratios) > WANTED)


if __name__ == "__main__":
    sys.exit(main())
