"""The most arithmetic that this device was seen to do: large matrix products in each type, through PyTorch; and copies.

Nothing here is a data sheet's number. A peak is what the vendor's own matrix library reached on this machine, at these
clocks, with these threads; an engine with better kernels may go beyond it. Of repetitions the fastest counts, as in
McCalpin's STREAM: a ceiling is what nothing disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from dyno.worker import system
from dyno.worker.extras import install
from dyno.worker.facts.job import CopyRate, PeakOfType
from dyno.worker.sessions.torch_support import first_line
from dyno.worker.spec import Runtime, Unavailable

TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
SIDES = {"cpu": (512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192, 16384)}
SECONDS = 2.0  # per type, over all sides
LEAST = 3  # timings of a side
COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes, at least
CACHES = 8  # so many times the last cache, at least: what a cache holds of a copy must not count

Timer = Callable[[Callable[[], Any]], float]


def measure(
    runtime: Runtime, seconds: float = SECONDS, types: Collection[str] = tuple(TYPES)
) -> Iterator[tuple[str, PeakOfType]]:
    """Yield each of the types with its peak; raise `Unavailable` without PyTorch or the device."""
    torch, device = _prepare_torch(runtime)
    for name in TYPES:
        if name in types and not (name == "tf32" and device.type == "cpu"):
            yield name, _measure_type(torch, device, name, seconds)


def copy(runtime: Runtime, seconds: float = SECONDS) -> CopyRate:
    """Measure the rate of a large copy within the device's memory; see `measure` for its errors."""
    torch, device = _prepare_torch(runtime)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # Older PyTorch does not tell a GPU's cache; the least size is beyond it then too.
    cache = getattr(properties, "L2_cache_size", 0) if properties else system.last_cache()
    size = max(COPIED[device.type], CACHES * cache)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    since = time.monotonic()
    fastest = min(_time_repetitions(torch, device, lambda: target.copy_(source), seconds))
    return CopyRate(2 * size / fastest, size, cache, (since, time.monotonic()))


def _prepare_torch(runtime: Runtime) -> tuple[Any, Any]:
    """Return PyTorch and the device, with the runtime's threads; raise `Unavailable` without them."""
    try:
        import torch
    except ImportError as e:
        raise Unavailable(f"the peak is measured with PyTorch: {e}; {install('torch')}") from e
    device = torch.device(runtime.device)
    if device.type not in SIDES:
        raise Unavailable(f"the peak of a {device.type} can't be measured; cpu and cuda can")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise Unavailable("this PyTorch finds no NVIDIA GPU; measuring the peak needs a build with CUDA")
        torch.cuda.set_device(device)
    torch.set_num_threads(runtime.threads)
    return torch, device


def _measure_type(torch: Any, device: Any, name: str, seconds: float) -> PeakOfType:
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    sides: dict[str, float] = {}
    since, missing = time.monotonic(), ""
    allowed = seconds / len(SIDES[device.type])
    for side in SIDES[device.type]:
        if sides and 2 * LEAST * side**3 / max(sides.values()) > 2 * seconds:
            break  # so slow in this type that a larger product would take all day
        try:
            sides[str(side)] = _measure_side(torch, device, name, side, allowed)
        except (RuntimeError, MemoryError) as e:  # no kernel for this type here, or no room for this side
            missing = first_line(e)
            break
    if not sides:
        return PeakOfType(missing=missing)
    best = max(sides, key=lambda side: sides[side])
    return PeakOfType(sides[best], int(best), sides, (since, time.monotonic()))


def _measure_side(torch: Any, device: Any, name: str, side: int, seconds: float) -> float:
    """Return the operations per second of a product of two square matrices: the fastest, after two for warm-up."""
    with torch.inference_mode():
        left, right = (_make_matrix(torch, device, TYPES[name], side, seed) for seed in (0, 1))
        multiply = torch._int_mm if name == "int8" else torch.matmul
        result = multiply(left, right)  # a product may be written where the one before it was

        def multiply_matrices() -> None:
            multiply(left, right, out=result)

        return 2 * side**3 / min(_time_repetitions(torch, device, multiply_matrices, seconds))


def _time_repetitions(torch: Any, device: Any, action: Callable[[], Any], seconds: float) -> list[float]:
    """Return the seconds of each repetition, for about `seconds` seconds, after one for warm-up."""
    timer = _make_gpu_timer(torch) if device.type == "cuda" else _time_on_host
    timer(action)
    times: list[float] = []
    since = time.monotonic()
    while len(times) < LEAST or time.monotonic() - since < seconds:
        times.append(timer(action))
    return times


def _make_matrix(torch: Any, device: Any, dtype: str, side: int, seed: int) -> Any:
    """Return a matrix of random numbers: with zeros a GPU needs less power and clocks higher than in real work."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == "int8":
        matrix = torch.randint(-128, 128, (side, side), generator=generator, device=device, dtype=torch.int8)
    else:
        matrix = torch.randn(side, side, generator=generator, device=device).to(getattr(torch, dtype))
    return matrix.t() if seed else matrix  # the second as columns, which is how the int8 kernels of a GPU want it


def _time_on_host(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _make_gpu_timer(torch: Any) -> Timer:
    """Return a timer by the GPU's own clock, in seconds."""

    def time_on_gpu(action: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return time_on_gpu
