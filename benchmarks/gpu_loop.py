"""Dyno's latency/model against a bare CUDA-graph loop over the same engine: ratio of the GPU medians at most 1.01.

    python benchmarks/gpu_loop.py ENGINE... [--batch 1,256] [--product tensorrt_rtx] [--device cuda:0]

The bare loop is handwritten TensorRT and cuda-bindings code with a separate context and memory. Its blocks alternate
with those of Dyno's loop in one process, so that both see the same clocks. Needs Python 3.10, numpy, cuda-bindings and
TensorRT, and the GPU that the engines were built for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from dyno.worker import measure
from dyno.worker.backends.tensor_rt.run import TensorRTSession
from dyno.worker.sessions.gpu import Stopwatch
from dyno.worker.spec import Dims, ModelSpec, Plan, Runtime, Trial, Unavailable, UserError

BLOCKS, BLOCK_S, WARMUP_S = 8, 0.3, 1.0
RUNS = 50  # consecutive launches
WANTED = 1.01

Shapes = dict[str, tuple[int, ...]]


def checked(result: Any) -> Any:
    """Return a driver call's results; raise RuntimeError for a CUDA error."""
    error, *found = result
    if int(error):
        raise RuntimeError(f"CUDA error {int(error)}")
    return found[0] if len(found) == 1 else found


class Bare:
    """An engine with its context, memory and one recorded graph, without any part of Dyno."""

    def __init__(self, engine: Path, batch: int, product: str, device: int) -> None:
        from cuda.bindings import driver

        trt, self.cuda = __import__(product), driver
        checked(driver.cuInit(0))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))))
        self.runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self.engine = self.runtime.deserialize_cuda_engine(engine.read_bytes())
        if self.engine is None:
            raise UserError(f"{engine} is no engine that {product} {trt.__version__} takes on this GPU")
        self.context = self.engine.create_execution_context()
        self.stream = checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self.shapes: Shapes = {}
        self._memory: list[Any] = []
        self._place(trt, batch)
        self.begin, self.end = (checked(driver.cuEventCreate(0)) for _ in range(2))
        self.graph = self._recorded()

    def _place(self, trt: Any, batch: int) -> None:
        """Set shapes (`batch` for a free dimension, 0: the profile's), allocate memory, and fill random inputs."""
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        fed = [name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        for name in fed:
            shape = tuple(self.engine.get_tensor_shape(name))
            if min(shape) < 0:
                usual = tuple(self.engine.get_tensor_profile_shape(name, 0)[1])
                shape = (batch or usual[0], *usual[1:])
                if not self.context.set_input_shape(name, shape):
                    raise UserError(f"the engine's profile has no {name} of {shape}")
            self.shapes[name] = shape
        for name in names:
            shape = tuple(self.context.get_tensor_shape(name))
            values = random(shape, trt.nptype(self.engine.get_tensor_dtype(name)))
            address = checked(self.cuda.cuMemAlloc(values.nbytes))
            self._memory.append(address)
            if name in fed:
                checked(self.cuda.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))
            self.context.set_tensor_address(name, int(address))

    def _recorded(self) -> Any:
        for _ in range(2):  # The first run of a shape does TensorRT's set-up, which a graph can't hold.
            self.context.execute_async_v3(int(self.stream))
        checked(self.cuda.cuStreamSynchronize(self.stream))
        mode = self.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(self.cuda.cuStreamBeginCapture(self.stream, mode))
        self.context.execute_async_v3(int(self.stream))
        return checked(self.cuda.cuGraphInstantiate(checked(self.cuda.cuStreamEndCapture(self.stream)), 0))

    def loop(self, seconds: float) -> tuple[list[float], list[float]]:
        """Return the seconds of each inference, by the GPU's clock and by the host's."""
        record, launch, synchronize = self.cuda.cuEventRecord, self.cuda.cuGraphLaunch, self.cuda.cuStreamSynchronize
        gpu: list[float] = []
        host: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            start = time.perf_counter_ns()
            record(self.begin, self.stream)
            launch(self.graph, self.stream)
            record(self.end, self.stream)
            synchronize(self.stream)
            host.append((time.perf_counter_ns() - start) / 1e9)
            gpu.append(checked(self.cuda.cuEventElapsedTime(self.begin, self.end)) / 1e3)
        return gpu, host

    def loop_busy(self, seconds: float) -> list[float]:
        """Return the GPU seconds of an inference on a busy stream: means over RUNS consecutive launches."""
        found: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for number in range(RUNS + 2):
                if number == 2:
                    self.cuda.cuEventRecord(self.begin, self.stream)
                self.cuda.cuGraphLaunch(self.graph, self.stream)
            self.cuda.cuEventRecord(self.end, self.stream)
            self.cuda.cuStreamSynchronize(self.stream)
            found.append(checked(self.cuda.cuEventElapsedTime(self.begin, self.end)) / 1e3 / RUNS)
        return found

    def close(self) -> None:
        """Free the graph and the memory; the last references free the context and the engine."""
        self.cuda.cuGraphExecDestroy(self.graph)
        del self.context, self.engine
        for address in self._memory:
            self.cuda.cuMemFree(address)


def random(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return seeded values of the type: integers below 128, booleans, or standard normal floats."""
    generator = np.random.default_rng(0)
    if np.dtype(dtype).kind in "iub":
        return generator.integers(0, 2 if np.dtype(dtype).kind == "b" else 128, shape).astype(dtype)
    return generator.standard_normal(shape, np.float32).astype(dtype)


@contextmanager
def session(engine: Path, shapes: Shapes, product: str, device: str) -> Iterator[TensorRTSession]:
    """Yield Dyno's session over the engine, with these input shapes."""
    batch = next(iter(shapes.values()))[0]
    model, dims = ModelSpec(engine.stem, f"file:{engine}"), Dims(batch, 0, 0, shapes={**shapes})
    made = TensorRTSession(Trial(model, product, "fp32", dims, runtime=Runtime(device=device)), None, product)
    try:
        yield made
    finally:
        made.close()


def compare(engine: Path, batch: int, product: str, device: str) -> float:
    """Print both loops' medians; return the ratio of the GPU medians."""
    bare = Bare(engine, batch, product, int(device.partition(":")[2] or 0))
    plan = Plan(warmup_s=WARMUP_S, seconds=BLOCK_S, min_samples=10**9, max_samples=10**9)
    ours: list[list[float]] = [[], []]
    theirs: list[list[float]] = [[], []]
    busy: list[list[float]] = [[], []]
    with session(engine, bare.shapes, product, device) as made:
        feeds = made.stage({t.name: random(bare.shapes[t.name], t.dtype) for t in made.inputs})
        watch = Stopwatch(made.stream)
        once = measure.make_step(made, "model", [feeds], watch)
        measure.warm_up(once, plan)
        bare.loop(WARMUP_S)

        def dyno_block() -> None:
            found = measure.measure_latency(once, plan, watch)
            assert found.gpu is not None
            ours[0] += found.gpu.tolist()
            ours[1] += found.samples.tolist()
            behind = measure.measure_queued(made, watch, plan)
            busy[0] += behind.tolist() if behind is not None else []

        def bare_block() -> None:
            for kept, found in zip(theirs, bare.loop(BLOCK_S), strict=True):
                kept += found
            busy[1] += bare.loop_busy(BLOCK_S)

        alternate(dyno_block, bare_block)
    bare.close()
    gpu, host = (statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True))
    show = [f"{1e3 * statistics.median(times):8.4f}" for times in (ours[0], theirs[0], ours[1], theirs[1])]
    size = next(iter(bare.shapes.values()))[0]
    print(
        f"{engine.stem:30} b{size:<4} GPU: dyno {show[0]} ms  bare {show[1]} ms  ratio {gpu:.4f}   "
        f"host: dyno {show[2]} ms  bare {show[3]} ms  ratio {host:.4f}"
    )
    if busy[0]:
        queued, in_a_row = (statistics.median(times) for times in busy)
        print(
            f"{'':30} {'':5} without launches: dyno {1e3 * queued:8.4f} ms  bare {1e3 * in_a_row:8.4f} ms  "
            f"ratio {queued / in_a_row:.4f}"
        )
    return gpu


def alternate(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both in turns; each comes first equally often."""
    for turn in range(BLOCKS):
        for block in (first, second) if turn % 2 else (second, first):
            block()


def arguments(text: str) -> argparse.Namespace:
    """Parse the command line shared by the GPU benchmarks."""
    parser = argparse.ArgumentParser(description=text.partition("\n")[0])
    parser.add_argument("engines", nargs="*", type=Path, help="engine files")
    parser.add_argument("--batch", default="0", help="batches of dynamic engines, e.g. 1,256 (default: the profile's)")
    parser.add_argument("--product", default="tensorrt", choices=("tensorrt", "tensorrt_rtx"))
    parser.add_argument("--device", default="cuda:0")
    return parser.parse_args()


def each(
    text: str, measured: Callable[[Path, int, str, str], float], judged: Callable[[list[float]], tuple[str, bool]]
) -> int:
    """Measure every engine at every batch and print the verdict; return 0 good, 1 limit missed, 2 not measurable."""
    given = arguments(text)
    if not given.engines:
        print("no engine files were given, so nothing was measured; see --help")
        return 0
    batches = [int(batch) for batch in given.batch.split(",")]
    try:
        found = [measured(path, batch, given.product, given.device) for path in given.engines for batch in batches]
    except (Unavailable, UserError, ImportError, OSError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 2
    verdict, good = judged(found)
    print(verdict)
    return int(not good)


if __name__ == "__main__":
    sys.exit(each(str(__doc__), compare, lambda r: (f"worst {max(r):.4f}, wanted at most {WANTED}", max(r) <= WANTED)))
