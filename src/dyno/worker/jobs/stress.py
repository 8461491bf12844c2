"""The stress test of a dynamic engine: thousands of batches at changing sizes, all outputs checked, memory watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from dyno.worker import measure, system
from dyno.worker.backend import Arrays, Session
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import WEIGHT_PRECISIONS
from dyno.worker.facts.job import MIN_LABELS, CopyRate, PeakOfType, StressPhase, is_labels
from dyno.worker.inputs import input_data
from dyno.worker.sessions.torch_support import first_line
from dyno.worker.spec import Runtime, Trial, Unavailable, UserError

UNBOUNDED_PHASES = (1, 4, 8)  # min, opt and max of a file with a free batch
WARM_UP = 50  # runs after which a session has allocated its memory
# Allowed difference between two batch sizes for the same images, relative to the largest output: another batch may use
# another kernel with another order of summation.
TOLERANCES = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 5e-2, "fp8": 1e-1,
              **dict.fromkeys(WEIGHT_PRECISIONS, 5e-2)}  # fmt: skip
MAX_GROWTH_B = 8 * 2**20  # smaller growth is the allocators'


def stress(
    session: Session, trial: Trial, phases: list[str], iterations: int
) -> Iterator[tuple[str, np.ndarray, StressPhase]]:
    """Run `iterations` batches in every phase: the engine's min, opt or max, random batches between, or a number.

    Yield each phase's name, seconds per batch from host to host, and figures.
    The reference is this engine at the smallest batch, image by image: no batch may change an image's outputs. (`dyno
    diff` checks the engine itself.) Raise a `UserError` for a batch outside its profile.
    """
    if type(session).reshape is Session.reshape:
        raise UserError(f"{trial.backend} takes only one shape; this test is for TensorRT and ONNX Runtime")
    ranges = _find_batch_ranges(session, phases)
    max_batch = max(high for _, high in ranges.values())
    pool = _stage_images(session, trial, max_batch)
    reference = _run_reference(session, pool, min(low for low, _ in ranges.values()))
    rng, tolerance = np.random.default_rng(trial.data.seed), TOLERANCES[trial.precision]
    for name, (low, high) in ranges.items():
        _warm_up(session, pool, low, high)
        before = _measure_memory(session)
        seconds, wrong_count, worst_error = np.empty(iterations), 0, 0.0
        for k in range(iterations):
            batch = int(rng.integers(low, high, endpoint=True))
            start = int(rng.integers(0, max_batch, endpoint=True))
            seconds[k], outputs = _time_batch(session, pool, start, batch)
            error = _compute_error(outputs, reference, start, batch)
            worst_error = max(worst_error, error)
            wrong_count += not error <= tolerance  # a NaN is wrong too
        device_growth, host_growth = (b - a for a, b in zip(before, _measure_memory(session), strict=True))
        is_ok = not wrong_count and max(device_growth, host_growth) <= MAX_GROWTH_B
        yield (
            name,
            seconds,
            StressPhase(
                iterations, (low, high), wrong_count, worst_error, tolerance, device_growth, host_growth, is_ok
            ),
        )


def _find_batch_ranges(session: Session, phases: list[str]) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest batch of each phase; raise a `UserError` outside the engine's profile.

    Without a profile they follow from the numbers in `phases`, else from UNBOUNDED_PHASES.
    """
    batches = [int(name) for name in phases if name.isdecimal()]
    bounds = (min(batches), min(batches), max(batches)) if batches else UNBOUNDED_PHASES
    low, opt, high = session.batches or bounds
    ranges = {"min": (low, low), "opt": (opt, opt), "max": (high, high), "random": (low, high)}
    for batch in batches:
        if not low <= batch <= high:
            raise UserError(f"batch {batch} is outside the engine's profile, {low} to {high}")
    return {name: ranges[name] if name in ranges else (int(name), int(name)) for name in phases}


def _stage_images(session: Session, trial: Trial, max_batch: int) -> Arrays:
    """Return staged images, twice the largest batch; batches are slices of them."""
    (feeds,) = input_data.read_trial_batches(trial, session.inputs, 1, batch=2 * max_batch)
    return session.stage(feeds)


def _run_reference(session: Session, pool: Arrays, batch: int) -> dict[str, np.ndarray]:
    count = len(next(iter(pool.values())))
    results = []
    for start in range(0, count, batch):
        start = min(start, count - batch)
        results.append((start, {name: np.array(a) for name, a in _time_batch(session, pool, start, batch)[1].items()}))
    reference = {name: np.empty((count, *a.shape[1:]), a.dtype) for name, a in results[0][1].items()}
    for start, outputs in results:
        for name, a in outputs.items():
            reference[name][start : start + batch] = a
    return reference


def _time_batch(session: Session, pool: Arrays, start: int, batch: int) -> tuple[float, dict[str, np.ndarray]]:
    """Return one batch's seconds from host to host, including a change of shape, and its outputs."""
    feeds = {name: a[start : start + batch] for name, a in pool.items()}
    begin = time.perf_counter()
    session.reshape({name: a.shape for name, a in feeds.items()})
    session.bind(feeds)
    session.run()
    session.wait()
    outputs = session.fetch()
    return time.perf_counter() - begin, outputs


def _compute_error(
    outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], start: int, batch: int
) -> float:
    """Return the largest difference from the reference, relative to the reference's largest value.

    It is NaN if any difference is NaN. For labels it is the share that differs; one label of many is ignored, since
    rounding may decide it.
    """
    errors = []
    for name, a in outputs.items():
        expected = reference[name][start : start + batch]
        if is_labels(expected):
            changed_count = int((a != expected).sum())
            errors.append((changed_count - (a.size >= MIN_LABELS) if changed_count else 0) / max(a.size, 1))
            continue
        a, expected = a.astype(np.float64), expected.astype(np.float64)
        errors.append(float(np.abs(a - expected).max(initial=0) / max(float(np.abs(expected).max(initial=0)), 1e-30)))
    return float("nan") if any(e != e for e in errors) else max(errors)


def _warm_up(session: Session, pool: Arrays, low: int, high: int) -> None:
    for k in range(WARM_UP):
        _time_batch(session, pool, 0, high if k % 2 else low)


def _measure_memory(session: Session) -> tuple[int, int]:
    """Return the bytes in use on the device (by all processes) and by this process on the host."""
    return session.device_memory(), system.read_memory()


# Peak rates of this device, measured by PyTorch: large matrix products in each type, and copies
#
# A peak is no data sheet's number: the vendor's matrix library reached it on this machine, at these clocks, with these
# threads. An engine with better kernels may exceed it. The fastest repetition counts, as in McCalpin's STREAM: a
# ceiling is undisturbed.

PRODUCT_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
PRODUCT_SIDES = {"cpu": (512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192, 16384)}
SECONDS_PER_TYPE = 2.0  # per type, over all sizes
MIN_TIMINGS = 3  # timings per size
MIN_COPIED_B = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes, at least
MIN_CACHE_MULTIPLE = 8  # multiple of the last-level cache, so that copies reach the memory

Timer = Callable[[Callable[[], Any]], float]


def measure_peak(
    runtime: Runtime, seconds: float = SECONDS_PER_TYPE, types: Collection[str] = tuple(PRODUCT_TYPES)
) -> Iterator[tuple[str, PeakOfType]]:
    """Yield each of the types with its peak; raise `Unavailable` without PyTorch or the device."""
    torch, device = _prepare_torch(runtime)
    for name in PRODUCT_TYPES:
        if name in types and not (name == "tf32" and device.type == "cpu"):
            yield name, _measure_type(torch, device, name, seconds)


def copy(runtime: Runtime, seconds: float = SECONDS_PER_TYPE) -> CopyRate:
    """Measure the rate of a large copy within the device's memory; raise `Unavailable` as `measure_peak` does."""
    torch, device = _prepare_torch(runtime)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # Older PyTorch doesn't report a GPU's cache; MIN_COPIED_B exceeds it too.
    cache = getattr(properties, "L2_cache_size", 0) if properties else system.last_cache()
    size = max(MIN_COPIED_B[device.type], MIN_CACHE_MULTIPLE * cache)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    start = time.monotonic()
    min_seconds = min(_time_repetitions(torch, device, lambda: target.copy_(source), seconds))
    return CopyRate(2 * size / min_seconds, size, cache, (start, time.monotonic()))


def _prepare_torch(runtime: Runtime) -> tuple[Any, Any]:
    """Return PyTorch and the device, with the runtime's threads; raise `Unavailable` without them."""
    torch = load_library("torch", "measuring the peak")
    device = torch.device(runtime.device)
    if device.type not in PRODUCT_SIDES:
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
    rates: dict[str, float] = {}
    start, reason = time.monotonic(), ""
    side_seconds = seconds / len(PRODUCT_SIDES[device.type])
    for side in PRODUCT_SIDES[device.type]:
        if rates and 2 * MIN_TIMINGS * side**3 / max(rates.values()) > 2 * seconds:
            break  # larger products would take hours
        try:
            rates[str(side)] = _measure_side(torch, device, name, side, side_seconds)
        except (RuntimeError, MemoryError) as e:  # no kernel for this type, or no memory for this side
            reason = first_line(e)
            break
    if not rates:
        return PeakOfType(missing=reason)
    best_side = max(rates, key=lambda side: rates[side])
    return PeakOfType(rates[best_side], int(best_side), rates, (start, time.monotonic()))


def _measure_side(torch: Any, device: Any, name: str, side: int, seconds: float) -> float:
    """Return the operations per second of a product of two square matrices: the fastest run after two warm-up runs."""
    with torch.inference_mode():
        left, right = (_make_matrix(torch, device, PRODUCT_TYPES[name], side, seed) for seed in (0, 1))
        multiply = torch._int_mm if name == "int8" else torch.matmul
        result = multiply(left, right)  # target of all later products

        def multiply_matrices() -> None:
            multiply(left, right, out=result)

        return 2 * side**3 / min(_time_repetitions(torch, device, multiply_matrices, seconds))


def _time_repetitions(torch: Any, device: Any, action: Callable[[], Any], seconds: float) -> list[float]:
    """Return the seconds of each repetition during about `seconds`, after one warm-up run."""
    time_action = _make_gpu_timer(torch) if device.type == "cuda" else measure.time_action
    time_action(action)
    times: list[float] = []
    start = time.monotonic()
    while len(times) < MIN_TIMINGS or time.monotonic() - start < seconds:
        times.append(time_action(action))
    return times


def _make_matrix(torch: Any, device: Any, dtype: str, side: int, seed: int) -> Any:
    """Return a random matrix: with zeros, a GPU needs less power and clocks higher than in real work."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == "int8":
        matrix = torch.randint(-128, 128, (side, side), generator=generator, device=device, dtype=torch.int8)
    else:
        matrix = torch.randn(side, side, generator=generator, device=device).to(getattr(torch, dtype))
    return matrix.t() if seed else matrix  # column-major second operand, needed by a GPU's int8 kernels


def _make_gpu_timer(torch: Any) -> Timer:

    def time_on_gpu(action: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return time_on_gpu
