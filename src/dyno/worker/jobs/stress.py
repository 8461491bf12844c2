"""The stress test of a dynamic engine: thousands of batches at changing sizes, every output checked, memory watched."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dyno.worker import system
from dyno.worker.backend import Arrays, Session
from dyno.worker.facts.job import StressPhase
from dyno.worker.facts.numerics import MANY, is_labels
from dyno.worker.facts.precision import STORED
from dyno.worker.inputs import input_data
from dyno.worker.spec import Trial, UserError

WARM_UP = 50  # runs after which a session has allocated its memory
# What a batch's outputs may differ by from the same images at another batch, relative to the largest output:
# another batch may take another kernel, which sums in another order.
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 5e-2, "fp8": 1e-1,
             **dict.fromkeys(STORED, 5e-2)}  # fmt: skip
GROWTH = 8 * 2**20  # bytes; less comes and goes with the allocators


@dataclass(frozen=True)
class Phase:
    """The result of a phase: seconds per batch from host to host, wrong batches, growth of memory."""

    name: str
    batches: tuple[int, int]
    seconds: np.ndarray
    wrong: int
    worst: float
    device_growth: int
    host_growth: int

    def to_record(self, tolerance: float) -> StressPhase:
        """Return the phase as stored in a record; its seconds are stored as samples."""
        return StressPhase(
            iterations=len(self.seconds),
            batches=self.batches,
            wrong=self.wrong,
            worst=self.worst,
            tolerance=tolerance,
            device_growth=self.device_growth,
            host_growth=self.host_growth,
            ok=not self.wrong and max(self.device_growth, self.host_growth) <= GROWTH,
        )


def stress(session: Session, trial: Trial, phases: list[str], iterations: int) -> Iterator[Phase]:
    """Run `iterations` batches in every phase: the engine's own min, opt or max, random ones between, or a number.

    The reference is this engine at the smallest batch, image by image, so that no batch may change an image's outputs;
    whether the engine itself is right is for `dyno agree`. A batch outside its profile is a `UserError`.
    """
    if type(session).reshape is Session.reshape:
        raise UserError(f"{trial.backend} takes only one shape; this test is for TensorRT and ONNX Runtime")
    sizes = _find_batch_ranges(session, phases)
    most = max(high for _, high in sizes.values())
    pool = _stage_images(session, trial, most)
    reference = _run_reference(session, pool, min(low for low, _ in sizes.values()))
    rng = np.random.default_rng(trial.data.seed)
    for name, (low, high) in sizes.items():
        _warm_up(session, pool, low, high)
        before = _measure_memory(session)
        seconds, wrong, worst = np.empty(iterations), 0, 0.0
        for k in range(iterations):
            batch = int(rng.integers(low, high, endpoint=True))
            start = int(rng.integers(0, most, endpoint=True))
            seconds[k], outputs = _time_batch(session, pool, start, batch)
            error = _compute_error(outputs, reference, start, batch)
            worst = max(worst, error)
            wrong += not error <= TOLERANCE[trial.precision]  # a NaN is wrong too
        after = _measure_memory(session)
        yield Phase(name, (low, high), seconds, wrong, worst, after[0] - before[0], after[1] - before[1])


def _find_batch_ranges(session: Session, phases: list[str]) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest batch of each phase.

    Raises a `UserError` for an engine without a profile or a batch outside it.
    """
    numbers = [int(name) for name in phases if name.isdecimal()]
    limits = session.batches
    if limits is None and not numbers:
        raise UserError(
            "this engine has no profile that says min, opt and max; give numbers such as --batches 1,8,random"
        )
    low, opt, high = limits or (min(numbers), min(numbers), max(numbers))
    sizes = {"min": (low, low), "opt": (opt, opt), "max": (high, high), "random": (low, high)}
    for number in numbers:
        if not low <= number <= high:
            raise UserError(f"batch {number} is outside the engine's profile, {low} to {high}")
    return {name: sizes[name] if name in sizes else (int(name), int(name)) for name in phases}


def _stage_images(session: Session, trial: Trial, most: int) -> Arrays:
    """Return twice as many images as the largest batch, staged once; batches are slices of them."""
    dims = replace(trial.dims, batch=2 * most)
    model = trial.model
    (feeds,) = input_data.batches(trial.data, model.preprocess, session.inputs, dims, 1, model.inputs)
    return session.stage(feeds)


def _run_reference(session: Session, pool: Arrays, batch: int) -> dict[str, np.ndarray]:
    """Return every image's outputs at the smallest batch."""
    count = len(next(iter(pool.values())))
    parts = []
    for start in range(0, count, batch):
        start = min(start, count - batch)
        parts.append((start, {name: np.array(a) for name, a in _time_batch(session, pool, start, batch)[1].items()}))
    whole = {name: np.empty((count, *a.shape[1:]), a.dtype) for name, a in parts[0][1].items()}
    for start, outputs in parts:
        for name, a in outputs.items():
            whole[name][start : start + batch] = a
    return whole


def _time_batch(session: Session, pool: Arrays, start: int, batch: int) -> tuple[float, dict[str, np.ndarray]]:
    """Return the seconds from host to host of one batch, a change of shape included, and its outputs."""
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

    It is NaN if any difference is. For labels it is the share that differs, except one of many, which rounding may
    decide.
    """
    errors = []
    for name, a in outputs.items():
        expected = reference[name][start : start + batch]
        if is_labels(expected):
            changed = int((a != expected).sum())
            errors.append((changed - (a.size >= MANY) if changed else 0) / max(a.size, 1))
            continue
        a, expected = a.astype(np.float64), expected.astype(np.float64)
        errors.append(float(np.abs(a - expected).max(initial=0) / max(float(np.abs(expected).max(initial=0)), 1e-30)))
    return float("nan") if any(e != e for e in errors) else max(errors)


def _warm_up(session: Session, pool: Arrays, low: int, high: int) -> None:
    for k in range(WARM_UP):
        _time_batch(session, pool, 0, high if k % 2 else low)


def _measure_memory(session: Session) -> tuple[int, int]:
    """Return the bytes in use on the device (by all processes) and by this process on the host."""
    return session.device_memory(), system.memory()
