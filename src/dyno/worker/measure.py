"""The only timing loop: three boundaries, warm-up until steady, sampling until the interval is narrow enough.

A session's `run` may return before the work is done. Every sample therefore ends after `wait`: asynchronous work is
synchronised before the clock stops.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, Session
from dyno.worker.sessions.gpu import Stopwatch
from dyno.worker.spec import Plan, Unavailable

Feeds = Sequence[Arrays]
Restore = Callable[[], None] | None
now = time.perf_counter_ns

MIN_SAMPLES = 3  # even if one run exceeds the time
STEADY_CHANGE = 0.02  # relative change between two warm-up windows that ends the warm-up
RATE_WINDOW_S = 0.1
LAUNCH_TEST_RUNS = 8  # their mean gives the times of launch and work
MAX_LAUNCH_SHARE = 0.8  # share of the work's time at which launches still keep a stream busy
PARTS_TIME_SHARE = 0.1  # share of the seconds per boundary: parts serve explanation only
# Untimed runs at the start of a block, while they take less than this share of it: caches and clocks are as the
# previous process left them.
DISCARDED, DISCARDED_SHARE = 3, 0.1


@dataclass(frozen=True)
class Sampling:
    """Raw samples and the reason that sampling stopped.

    Latencies are in seconds, throughput in images/s. `stopped` is interval, seconds, samples or blocks. `gpu` has the
    same runs by the GPU's clock, if a stopwatch was given. `window` is the time span of the samples, in seconds of the
    monotonic clock. In blocks, `block` has each sample's block number (int32) and `windows` each block's time span.
    """

    samples: np.ndarray
    stopped: str
    value: float | None = None
    gpu: np.ndarray | None = None
    window: tuple[float, float] = (0.0, 0.0)
    block: np.ndarray | None = None
    windows: tuple[tuple[float, float], ...] = ()


def make_step(session: Session, boundary: str, feeds: Feeds, timer: Stopwatch | None = None) -> Callable[[], None]:
    """Return a function that runs one inference within the boundary.

    The boundary is `model` (inputs bound before) or `all` (host memory to host memory). `timer` also times the model's
    work on the GPU; `measure_latency` reads it.
    """
    run, wait = session.run, session.wait
    if boundary == "model":
        session.bind(feeds[0])

        def run_watched() -> None:
            assert timer is not None
            timer.start()
            run()
            timer.stop()
            wait()

        def on_device() -> None:
            run()
            wait()

        return run_watched if timer else on_device

    turn = 0

    def host_to_host() -> None:
        nonlocal turn
        session.bind(feeds[turn % len(feeds)])
        run()
        wait()
        session.fetch()
        turn += 1

    return host_to_host


def time_action(action: Callable[[], Any]) -> float:
    """Return the seconds of a call by the host's clock."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def watch(session: Session, boundary: str, warn: Callable[[str], None]) -> Stopwatch | None:
    """Return a GPU clock for the session's stream, or None to time by the host's clock alone.

    An unavailable GPU clock gives a warning.
    """
    if session.stream is None or boundary != "model":
        return None
    try:
        return Stopwatch(session.stream)
    except Unavailable as e:
        warn(f"{boundary}: timed by the host's clock alone, because {e}")
        return None


def find_restore(session: Session, feeds: Feeds, warn: Callable[[str], None]) -> Restore:
    """Return a function that restores the inputs of the `model` boundary before each run, and warn.

    Return None if the first run of `make_step`'s function left them unchanged.
    """
    restore = session.restoring(feeds[0])
    if restore:
        warn("the model writes into its own inputs: at latency/model they are put back before each run, untimed")
    return restore


def warm_up(run_step: Callable[[], None], plan: Plan, restore: Restore = None) -> bool:
    """Repeat until two consecutive windows have the same median within 2 %, or `plan.warmup_s` ends; True if steady."""
    deadline = now() + int(plan.warmup_s * 1e9)
    window_ns = int(plan.warmup_s * 1e9 / 10)
    previous = math.inf
    while now() < deadline:
        median = float(np.median(_time_window(run_step, window_ns, restore)))
        if abs(median - previous) <= STEADY_CHANGE * median:
            return True
        previous = median
    return False


def _time_window(run_step: Callable[[], None], length_ns: int, restore: Restore) -> list[int]:
    times: list[int] = []
    end = now() + length_ns
    while len(times) < MIN_SAMPLES or now() < end:
        if restore:
            restore()
        start = now()
        run_step()
        times.append(now() - start)
    return times


def measure_latency(
    run_step: Callable[[], None],
    plan: Plan,
    timer: Stopwatch | None = None,
    blocks: Iterable[int] | None = None,
    restore: Restore = None,
) -> Sampling:
    """Measure the seconds per inference by the host's clock, and by the GPU's if `timer` is given.

    Sampling ends when the median's 95 % interval is within `plan.interval` on both sides (not before a quarter of the
    time, so that a burst can't end it), after `plan.seconds`, or at `plan.max_samples`. With `blocks`, each number it
    yields is measured as one block of `plan.block_s` seconds: at least one run, and MIN_SAMPLES if they fit. `restore`
    is called before each run, untimed.
    """
    if blocks is not None:
        return _latency_in_blocks(run_step, plan, blocks, timer, restore)
    times: list[int] = []
    gpu: list[float] = []
    check = max(plan.min_samples, MIN_SAMPLES)
    deadline = earliest_end = 0

    def find_end_reason(end: int) -> str:
        nonlocal check
        count = len(times)
        if count >= plan.max_samples:
            return "samples"
        if end >= deadline and count >= MIN_SAMPLES:
            return "seconds"
        if count >= check and end >= earliest_end:
            check = int(count * 1.5)
            return "interval" if half_width(gpu or times) <= plan.interval else ""
        return ""

    with _no_garbage_collection():
        deadline, earliest_end = (now() + int(plan.seconds * share * 1e9) for share in (1, 0.25))
        stopped, window = _add_samples(run_step, timer, times, gpu, find_end_reason, restore)
    return Sampling(np.asarray(times) / 1e9, stopped, gpu=np.asarray(gpu) if timer else None, window=window)


def _latency_in_blocks(
    run_step: Callable[[], None], plan: Plan, blocks: Iterable[int], timer: Stopwatch | None, restore: Restore
) -> Sampling:
    times: list[int] = []
    gpu: list[float] = []
    block_numbers: list[int] = []
    windows: list[tuple[float, float]] = []
    limit = max(1, plan.max_samples // plan.blocks)
    first_sample = deadline = 0
    min_ns = math.inf  # ns, untimed runs

    def find_end_reason(end: int) -> str:
        count = len(times) - first_sample
        return "blocks" if count >= limit or (end >= deadline and (count >= MIN_SAMPLES or not is_stalled())) else ""

    def is_stalled() -> bool:
        """Return whether the block has fewer runs than fit into it: its median would include a pause."""
        return MIN_SAMPLES * min(min_ns, *times) < plan.block_s * 1e9

    with _no_garbage_collection():
        for block_number in blocks:
            first_sample, block_start = len(times), now()
            for _ in range(DISCARDED):
                if restore:
                    restore()
                start = now()
                run_step()
                min_ns = min(min_ns, now() - start)
                if now() - block_start > DISCARDED_SHARE * plan.block_s * 1e9:
                    break
            deadline = now() + int(plan.block_s * 1e9)
            windows.append(_add_samples(run_step, timer, times, gpu, find_end_reason, restore)[1])
            block_numbers += [block_number] * (len(times) - first_sample)
    sampling = Sampling(np.asarray(times) / 1e9, "blocks", gpu=np.asarray(gpu) if timer else None)
    return replace(sampling, **_block_fields(block_numbers, windows))


def _add_samples(
    run_step: Callable[[], None],
    timer: Stopwatch | None,
    times: list[int],
    gpu: list[float],
    find_end: Callable[[int], str],
    restore: Restore,
) -> tuple[str, tuple[float, float]]:
    """Add samples until `find_end`, called with the clock after each, gives a reason; return it and the time window."""
    append = times.append
    begin = now()
    while True:
        if restore:
            restore()
        start = now()
        run_step()
        end = now()
        append(end - start)
        if timer:
            gpu.append(timer.seconds())
        if reason := find_end(end):
            return reason, (begin / 1e9, end / 1e9)


def _block_fields(block_numbers: list[int], windows: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the fields of `Sampling` for blocks: `block`, `windows` and `window`."""
    window = (windows[0][0], windows[-1][1]) if windows else (0.0, 0.0)
    return {"block": np.asarray(block_numbers, np.int32), "windows": tuple(windows), "window": window}


def measure_queued(session: Session, timer: Stopwatch, plan: Plan) -> np.ndarray | None:
    """Return the GPU's seconds of runs queued behind another run, so that they include no launch.

    On an idle stream, the first event passes before the host has launched the work, so the launch counts as GPU time.
    trtexec and nvbench keep the stream busy as well. Return None if launching takes nearly as long as the work, or
    `run` waits for it: the stream would be idle all the same.
    """

    def queue(runs: int, runs_ahead: int = 0) -> tuple[float, float]:
        for _ in range(runs_ahead):
            session.run()
        timer.start()
        start = now()
        for _ in range(runs):
            session.run()
        launch_ns = now() - start
        timer.stop()
        session.wait()
        return launch_ns / 1e9 / runs, timer.seconds() / runs

    launch_seconds, work_seconds = np.median([queue(LAUNCH_TEST_RUNS) for _ in range(MIN_SAMPLES)], axis=0)
    if launch_seconds > MAX_LAUNCH_SHARE * work_seconds:
        return None
    runs_ahead = 1 + math.ceil(launch_seconds / work_seconds)
    samples: list[float] = []
    deadline = now() + int(plan.seconds * PARTS_TIME_SHARE * 1e9)
    while len(samples) < MIN_SAMPLES or (len(samples) < plan.max_samples and now() < deadline):
        samples.append(queue(1, runs_ahead)[1])
    return np.asarray(samples)


def measure_parts(session: Session, feeds: Feeds, plan: Plan) -> dict[str, np.ndarray]:
    """Return the raw seconds of each part of one inference from host to host, if the session measures parts."""
    samples: dict[str, list[float]] = {}
    deadline, turn = now() + int(plan.seconds * PARTS_TIME_SHARE * 1e9), 0
    while turn < MIN_SAMPLES or (turn < plan.max_samples and now() < deadline):
        for name, seconds in session.parts(feeds[turn % len(feeds)]).items():
            samples.setdefault(name, []).append(seconds)
        turn += 1
        if not samples:
            break
    return {name: np.asarray(seconds, np.float64) for name, seconds in samples.items()}


def half_width(times: Sequence[float]) -> float:
    """Return the relative half-width of the median's 95 % interval, from its order statistics.

    It is distribution-free (David and Nagaraja, Order Statistics, 2003, section 7.1, normal approximation to the
    binomial).
    """
    sorted_times = np.sort(np.asarray(times, np.float64))
    reach = 0.98 * math.sqrt(len(sorted_times))
    low = sorted_times[max(0, math.floor(len(sorted_times) / 2 - reach))]
    high = sorted_times[min(len(sorted_times) - 1, math.ceil(len(sorted_times) / 2 + reach))]
    median = float(np.median(sorted_times))
    return float(max(high - median, median - low)) / median if median else math.inf


def measure_throughput(
    session: Session, feeds: Feeds, batch: int, plan: Plan, blocks: Iterable[int] | None = None
) -> Sampling:
    """Measure images per second, host memory to host memory, with every slot of the session in flight.

    `value` is all images over all time, filling and draining included. The samples are rates over windows of 0.1 s or
    more; they show whether the rate held. With `blocks`, each sample is one block's rate while every slot was full.
    """
    if blocks is not None:
        return _throughput_in_blocks(session, feeds, batch, plan, blocks)
    with _no_garbage_collection():
        begin, ends = _run_pipeline(session, feeds, plan.seconds, MIN_SAMPLES, plan.max_samples)
    return _over_all(begin, ends, batch, plan.max_samples)


SLOT_RUNS = 5  # minimum per slot counts: other programs disturb some runs
SLOW_SLOT = 1.5  # ratio to the median of the other slots


def find_slow_slot(session: Session, feeds: Feeds) -> str:
    """Return a sentence on a slot that is much slower than the others when run alone; "" without one.

    Batches end in order, so one slow slot delays all of them, and no other measurement shows it.
    """
    best_ns = [math.inf] * session.slots
    for _ in range(SLOT_RUNS if session.slots > 1 else 0):
        for slot in range(session.slots):
            begin = now()
            session.bind(feeds[0], slot)
            session.run(slot)
            session.wait(slot)
            session.fetch(slot)
            best_ns[slot] = min(best_ns[slot], now() - begin)
    slowest = int(np.argmax(best_ns))
    other_ns = [seconds for slot, seconds in enumerate(best_ns) if slot != slowest]
    if not other_ns or best_ns[slowest] <= SLOW_SLOT * statistics.median(other_ns):
        return ""
    ratio = best_ns[slowest] / statistics.median(other_ns)
    return f"slot {slowest + 1} of {session.slots} takes {ratio:.1f} times as long as the others and limits throughput"


def throughput_in_lanes(
    answer: Callable[[Arrays], object], lanes: int, feeds: Feeds, batch: int, plan: Plan
) -> Sampling:
    """Measure throughput with `lanes` worker threads, each answering one batch after another.

    `answer` returns when its batch is done. Value and samples are those of `measure_throughput`.
    """
    max_batches, feed_cycle = -(-plan.max_samples // lanes), itertools.cycle(feeds)

    def run_lane() -> list[int]:
        ends: list[int] = []
        while len(ends) < MIN_SAMPLES or (len(ends) < max_batches and now() < deadline):
            answer(next(feed_cycle))
            ends.append(now())
        return ends

    with _no_garbage_collection(), ThreadPoolExecutor(lanes) as pool:
        begin = now()
        deadline = begin + int(plan.seconds * 1e9)
        futures = [pool.submit(run_lane) for _ in range(lanes)]
        ends = sorted(itertools.chain.from_iterable(future.result() for future in futures))
    return _over_all(begin, ends, batch, plan.max_samples)


def _over_all(begin: int, ends: Sequence[int], batch: int, max_batches: int) -> Sampling:
    """Return the throughput of batches that ended at the times `ends`, in ns."""
    rate = batch * len(ends) / ((ends[-1] - begin) / 1e9)
    stopped = "samples" if len(ends) >= max_batches else "seconds"
    return Sampling(_compute_rates(ends, begin, batch), stopped, rate, window=(begin / 1e9, ends[-1] / 1e9))


def _throughput_in_blocks(session: Session, feeds: Feeds, batch: int, plan: Plan, blocks: Iterable[int]) -> Sampling:
    rates, block_numbers, images, seconds = [], [], 0, 0.0
    windows: list[tuple[float, float]] = []
    limit = max(1, plan.max_samples // plan.blocks)
    with _no_garbage_collection():
        for block_number in blocks:
            begin, ends = _run_pipeline(session, feeds, plan.block_s, MIN_SAMPLES + session.slots, limit)
            full_count = len(ends) - session.slots  # batches ended after the first, all slots full
            span = max(ends[full_count] - ends[0], 1) / 1e9
            rates.append(batch * full_count / span)
            block_numbers.append(block_number)
            windows.append((begin / 1e9, ends[-1] / 1e9))
            images, seconds = images + batch * full_count, seconds + span
    sampling = Sampling(np.asarray(rates, np.float64), "blocks", images / seconds)
    return replace(sampling, **_block_fields(block_numbers, windows))


def _run_pipeline(
    session: Session, feeds: Feeds, seconds: float, min_batches: int, max_batches: int
) -> tuple[int, list[int]]:
    """Run batches through all slots; return the start of the first batch and the end of each, in ns."""
    ends: list[int] = []
    slots, turn = session.slots, 0
    begin = now()
    deadline = begin + int(seconds * 1e9)
    while turn < min_batches or (turn < max_batches and now() < deadline):
        slot = turn % slots
        if turn >= slots:
            _finish_slot(session, slot, ends)
        session.bind(feeds[turn % len(feeds)], slot)
        session.run(slot)
        turn += 1
    for pending in range(max(0, turn - slots), turn):
        _finish_slot(session, pending % slots, ends)
    return begin, ends


def _finish_slot(session: Session, slot: int, ends: list[int]) -> None:
    session.wait(slot)
    session.fetch(slot)
    ends.append(now())


def _compute_rates(ends: Sequence[int], begin: int, batch: int) -> np.ndarray:
    rates, window_start, images = [], begin, 0
    for end in ends:
        images += batch
        if end - window_start >= RATE_WINDOW_S * 1e9:
            rates.append(images / ((end - window_start) / 1e9))
            window_start, images = end, 0
    return np.asarray(rates or [images / max((ends[-1] - window_start) / 1e9, 1e-9)], np.float64)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A collection during a sample would count as the model's time.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
