"""The only timing loop: three boundaries, warm-up until steady, sampling until the interval is narrow enough.

A session's `run` may return before the work is done, so every sample ends after `wait`: a launch that was not waited
for can't become a latency.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dyno.worker.backend import Arrays, Session
from dyno.worker.sessions.gpu import Stopwatch
from dyno.worker.spec import Plan

Feeds = Sequence[Arrays]
now = time.perf_counter_ns

LEAST_SAMPLES = 3  # even when one run outlasts the whole budget
STEADY = 0.02  # warm-up ends when the medians of two consecutive windows differ by less than this
RATE_WINDOW_S = 0.1
PARTS_SHARE = 0.1  # of the seconds per boundary: parts explain a number, they aren't one


@dataclass(frozen=True)
class Sampling:
    """Raw samples (seconds for latencies, images/s for throughput) and what ended them: interval, seconds, samples.

    `gpu` holds the same runs as the GPU's own clock saw them, where they were watched; `window` is when all this was,
    in seconds of the monotonic clock.
    """

    samples: np.ndarray
    stopped: str
    value: float | None = None
    gpu: np.ndarray | None = None
    window: tuple[float, float] = (0.0, 0.0)


def step(session: Session, boundary: str, feeds: Feeds, watch: Stopwatch | None = None) -> Callable[[], None]:
    """One inference as the boundary counts it: `model` (inputs bound before) or `all` (host memory to host memory).

    `watch` times the model's work on the GPU as well; it is read by `latency`.
    """
    run, wait = session.run, session.wait
    if boundary == "model":
        session.bind(feeds[0])

        def watched() -> None:
            assert watch is not None
            watch.start()
            run()
            watch.stop()
            wait()

        def on_device() -> None:
            run()
            wait()

        return watched if watch else on_device

    turn = 0

    def host_to_host() -> None:
        nonlocal turn
        session.bind(feeds[turn % len(feeds)])
        run()
        wait()
        session.fetch()
        turn += 1

    return host_to_host


def warm_up(once: Callable[[], None], plan: Plan) -> bool:
    """Repeat until two consecutive windows have the same median within 2 %, or `plan.warmup_s` ends; True if steady."""
    deadline = now() + int(plan.warmup_s * 1e9)
    window_ns = int(plan.warmup_s * 1e9 / 10)
    previous = math.inf
    while now() < deadline:
        median = float(np.median(_window(once, window_ns)))
        if abs(median - previous) <= STEADY * median:
            return True
        previous = median
    return False


def _window(once: Callable[[], None], length_ns: int) -> list[int]:
    times: list[int] = []
    end = now() + length_ns
    while len(times) < LEAST_SAMPLES or now() < end:
        start = now()
        once()
        times.append(now() - start)
    return times


def latency(once: Callable[[], None], plan: Plan, watch: Stopwatch | None = None) -> Sampling:
    """Seconds per inference, one sample each, by the host's clock and by the GPU's where `once` is watched.

    Sampling ends when the median's 95 % interval is within `plan.interval` of it on both sides (and a quarter of the
    time is used, so that a burst can't end it), when `plan.seconds` are over, or at `plan.max_samples`.
    """
    times: list[int] = []
    gpu: list[float] = []
    append, check = times.append, max(plan.min_samples, LEAST_SAMPLES)
    stopped = ""
    with _no_garbage_collection():
        begin = now()
        deadline, earliest = begin + int(plan.seconds * 1e9), begin + int(plan.seconds * 0.25e9)
        while not stopped:
            start = now()
            once()
            end = now()
            append(end - start)
            if watch:
                gpu.append(watch.seconds())
            count = len(times)
            if count >= plan.max_samples:
                stopped = "samples"
            elif end >= deadline and count >= LEAST_SAMPLES:
                stopped = "seconds"
            elif count >= check and end >= earliest:
                check = int(count * 1.5)
                stopped = "interval" if half_width(gpu or times) <= plan.interval else ""
    window = (begin / 1e9, end / 1e9)
    return Sampling(np.asarray(times, np.float64) / 1e9, stopped, gpu=np.asarray(gpu) if watch else None, window=window)


def parts(session: Session, feeds: Feeds, plan: Plan) -> dict[str, np.ndarray]:
    """Raw seconds of each part of one inference from host to host, as far as the session tells parts apart."""
    found: dict[str, list[float]] = {}
    deadline, turn = now() + int(plan.seconds * PARTS_SHARE * 1e9), 0
    while turn < LEAST_SAMPLES or (turn < plan.max_samples and now() < deadline):
        for name, seconds in session.parts(feeds[turn % len(feeds)]).items():
            found.setdefault(name, []).append(seconds)
        turn += 1
        if not found:
            break
    return {name: np.asarray(seconds, np.float64) for name, seconds in found.items()}


def half_width(times: Sequence[float]) -> float:
    """Relative half-width of the median's 95 % interval, from its order statistics (distribution-free; David and
    Nagaraja, Order Statistics, 2003, section 7.1, normal approximation to the binomial)."""
    ordered = np.sort(np.asarray(times, np.float64))
    reach = 0.98 * math.sqrt(len(ordered))
    low = ordered[max(0, math.floor(len(ordered) / 2 - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))]
    median = float(np.median(ordered))
    return float(max(high - median, median - low)) / median if median else math.inf


def throughput(session: Session, feeds: Feeds, batch: int, plan: Plan) -> Sampling:
    """Images per second from host memory to host memory with every slot of the session in flight.

    `value` is all images over all time, filling and draining included; the samples are rates over windows of 0.1 s or
    more, to show whether it held.
    """
    done: list[int] = []
    slots, turn = session.slots, 0
    with _no_garbage_collection():
        begin = now()
        deadline = begin + int(plan.seconds * 1e9)
        while turn < LEAST_SAMPLES or (turn < plan.max_samples and now() < deadline):
            slot = turn % slots
            if turn >= slots:
                _finish(session, slot, done)
            session.bind(feeds[turn % len(feeds)], slot)
            session.run(slot)
            turn += 1
        for late in range(max(0, turn - slots), turn):
            _finish(session, late % slots, done)
    rate = batch * len(done) / ((done[-1] - begin) / 1e9)
    stopped = "samples" if turn >= plan.max_samples else "seconds"
    return Sampling(_rates(done, begin, batch), stopped, rate, window=(begin / 1e9, done[-1] / 1e9))


def _finish(session: Session, slot: int, done: list[int]) -> None:
    session.wait(slot)
    session.fetch(slot)
    done.append(now())


def _rates(done: list[int], begin: int, batch: int) -> np.ndarray:
    rates, opened, images = [], begin, 0
    for at in done:
        images += batch
        if at - opened >= RATE_WINDOW_S * 1e9:
            rates.append(images / ((at - opened) / 1e9))
            opened, images = at, 0
    return np.asarray(rates or [images / max((done[-1] - opened) / 1e9, 1e-9)], np.float64)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A collection in the middle of a sample would be measured as the model's.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
