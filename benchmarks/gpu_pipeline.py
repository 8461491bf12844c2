"""Dyno's throughput from host memory, overlapped, against what the GPU and PCIe allow: at least 95 % of the lower one.

    python benchmarks/gpu_pipeline.py ENGINE... [--batch 32,256] [--product tensorrt_rtx] [--device cuda:0]

The compute bound is batch / latency/model (GPU clock). The PCIe bounds are page-locked copies of the same bytes, back
to back, one bound per direction, since the directions overlap. Bounds and throughput are measured in turns in one
process. Requirements are those of gpu_loop.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
from benchmarks.gpu_loop import Bare, each, random, session

from dyno.worker import measure
from dyno.worker.backend import Arrays
from dyno.worker.backends.tensor_rt.run import TensorRTSession
from dyno.worker.sessions.gpu import Device, Stopwatch, call
from dyno.worker.spec import Plan

TURNS, COPIES, FEEDS = 5, 32, 4
WARM = Plan(warmup_s=1.0)
LATENCY = Plan(seconds=0.3, min_samples=10**9, max_samples=10**9)
THROUGHPUT = Plan(seconds=1.0, max_samples=10**9)
WANTED = 0.95


def share(engine: Path, batch: int, product: str, device: str) -> float:
    """Print the rates and return the throughput as a share of the lowest bound."""
    bare = Bare(engine, batch, product, int(device.partition(":")[2] or 0))
    shapes = bare.shapes
    bare.close()
    with session(engine, shapes, product, device) as made:
        feeds = [made.stage({t.name: random(shapes[t.name], t.dtype) for t in made.inputs}) for _ in range(FEEDS)]
        size = next(iter(shapes.values()))[0]
        rates = measured(made, feeds, size)
    bound = min(rates["compute"], rates["h2d"], rates["d2h"])
    limit = next(name for name, rate in rates.items() if rate == bound and name != "throughput")
    listed = "  ".join(f"{name} {rate:11,.0f}/s" for name, rate in rates.items())
    print(f"{engine.stem:30} b{size:<4} {listed}   bound by {limit}, reached {rates['throughput'] / bound:.3f}")
    return rates["throughput"] / bound


def measured(made: TensorRTSession, feeds: Sequence[Arrays], batch: int) -> dict[str, float]:
    """Return the median rates over the turns, in images/s by name."""
    watch = Stopwatch(made.stream)
    measure.warm_up(measure.make_step(made, "model", feeds, watch), WARM)
    measure.warm_up(measure.make_step(made, "all", feeds), WARM)
    inward = Copies(made.device, [list(feed.values()) for feed in feeds], to_device=True)
    outward = Copies(made.device, [list(made.fetch().values())], to_device=False)
    found: dict[str, list[float]] = {"throughput": [], "compute": [], "h2d": [], "d2h": []}
    for _ in range(TURNS):
        rate = measure.measure_throughput(made, feeds, batch, THROUGHPUT).value
        # A new step each turn: the throughput before has left another batch bound.
        gpu = measure.measure_latency(measure.make_step(made, "model", feeds, watch), LATENCY, watch).gpu
        assert rate is not None and gpu is not None
        found["throughput"].append(rate)
        found["compute"].append(batch / float(np.median(gpu)))
        found["h2d"].append(batch / inward.seconds())
        found["d2h"].append(batch / outward.seconds())
    return {name: statistics.median(rates) for name, rates in found.items()}


class Copies:
    """Copies of whole batches between page-locked memory and the GPU, queued back to back on a separate stream."""

    def __init__(self, device: Device, batches: list[list[np.ndarray]], to_device: bool) -> None:
        self._cuda, self._stream, self._batches = device.cuda, device.stream(), batches
        self._places = [device.allocate(array.nbytes) for array in batches[0]]
        self._to_device, self._watch = to_device, Stopwatch(int(self._stream))

    def seconds(self) -> float:
        """Return the seconds per batch, averaged over COPIES copies."""
        self._watch.start()
        for turn in range(COPIES):
            for place, array in zip(self._places, self._batches[turn % len(self._batches)], strict=True):
                host = array.ctypes.data
                if self._to_device:
                    call(self._cuda.cuMemcpyHtoDAsync, place, host, array.nbytes, self._stream)
                else:
                    call(self._cuda.cuMemcpyDtoHAsync, host, place, array.nbytes, self._stream)
        self._watch.stop()
        return self._watch.seconds() / COPIES


if __name__ == "__main__":
    sys.exit(each(str(__doc__), share, lambda r: (f"worst {min(r):.3f}, wanted at least {WANTED}", min(r) >= WANTED)))
