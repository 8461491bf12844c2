"""The timing loop against sessions with known times."""

import gc
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dyno.worker import measure
from dyno.worker.backend import Session
from dyno.worker.spec import Plan

PLAN = Plan(warmup_s=0.05, seconds=0.2, min_samples=10, interval=1e-9)
FEEDS = [{"input": np.full((2, 1), i, np.float32)} for i in range(3)]


class Clock:
    """A clock moved only by the tests: no test waits or depends on the machine's load."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measure, "now", made)
    return made


class Scripted(Session):
    """A session that takes `seconds` per run and records its calls."""

    def __init__(self, seconds: float = 0.0, slots: int = 1, sleep=time.sleep) -> None:
        self.seconds, self.slots, self.sleep = seconds, slots, sleep
        self.calls: list[str] = []
        self.fed: list[float] = []

    def bind(self, feeds, slot=0):
        self.calls.append(f"bind{slot}")
        self.fed.append(float(feeds["input"][0, 0]))

    def run(self, slot=0):
        self.calls.append(f"run{slot}")
        self.sleep(self.seconds)

    def wait(self, slot=0):
        self.calls.append(f"wait{slot}")

    def fetch(self, slot=0):
        self.calls.append(f"fetch{slot}")
        return {}


class Asynchronous(Scripted):
    """A session with asynchronous runs: a slot's work ends `seconds` after `run`, and only `wait` notices."""

    def __init__(self, seconds: float, slots: int = 1) -> None:
        super().__init__(seconds, slots)
        self.ends: dict[int, threading.Timer] = {}
        self.in_flight: list[int] = []  # at the end of each wait, including the awaited slot

    def run(self, slot=0):
        assert slot not in self.ends, "the slot is still busy"
        self.ends[slot] = threading.Timer(self.seconds, lambda: None)
        self.ends[slot].start()

    def wait(self, slot=0):
        self.in_flight.append(len(self.ends))
        self.ends.pop(slot).join()


@pytest.mark.parametrize(
    ("seconds", "warning"),
    [
        ((0.01,), ""),
        ((0.01, 0.01, 0.014), ""),
        ((0.01, 0.03, 0.01), "slot 2 of 3 takes 3.0 times as long as the others and limits throughput"),
    ],
)
def test_a_slow_slot_is_named(clock: Clock, seconds: tuple[float, ...], warning: str) -> None:
    class Uneven(Scripted):
        def run(self, slot=0):
            clock.sleep(seconds[slot] + (1.0 if len(self.calls) < 3 else 0.0))  # the first run is disturbed

    assert measure.find_slow_slot(Uneven(slots=len(seconds)), FEEDS) == warning


def test_the_model_boundary_binds_once_and_all_copies_every_time() -> None:
    session = Scripted()
    once = measure.make_step(session, "model", FEEDS)
    once(), once()
    assert session.calls == ["bind0", "run0", "wait0", "run0", "wait0"]

    session = Scripted()
    once = measure.make_step(session, "all", FEEDS)
    for _ in range(4):
        once()
    assert session.calls == ["bind0", "run0", "wait0", "fetch0"] * 4
    assert session.fed == [0, 1, 2, 0]


@pytest.mark.parametrize("blocks", [None, [0, 1]])
def test_inputs_are_restored_before_every_run_outside_its_timing(clock: Clock, blocks: list[int] | None) -> None:
    session = Scripted(0.01, sleep=clock.sleep)

    def restore() -> None:
        clock.sleep(0.5)
        session.calls.append("restore")

    once = measure.make_step(session, "model", FEEDS)
    measure.warm_up(once, PLAN, restore)
    found = measure.measure_latency(once, replace(PLAN, max_samples=20, blocks=2), blocks=blocks, restore=restore)
    assert found.samples.tolist() == [0.01] * len(found.samples)
    assert session.calls[0] == "bind0" and {*session.calls[1::3]} == {"restore"} and {*session.calls[2::3]} == {"run0"}


@pytest.mark.parametrize("boundary", ["model", "all"])
def test_a_run_that_returns_early_is_waited_for(boundary: str) -> None:
    found = measure.measure_latency(measure.make_step(Asynchronous(0.01), boundary, FEEDS), PLAN)
    assert found.samples.min() >= 0.0099
    assert len(found.samples) <= 20


def test_samples_are_seconds_of_one_inference(clock: Clock) -> None:
    found = measure.measure_latency(measure.make_step(Scripted(0.01, sleep=clock.sleep), "model", FEEDS), PLAN)
    assert found.samples.dtype == np.float64
    assert found.samples.tolist() == [0.01] * PLAN.min_samples
    assert found.stopped == "interval"


def test_real_time_is_measured() -> None:
    begin = time.perf_counter()
    found = measure.measure_latency(measure.make_step(Scripted(0.005), "model", FEEDS), PLAN)
    assert found.samples.min() >= 0.005 and found.samples.sum() <= time.perf_counter() - begin


@pytest.mark.parametrize(("interval", "stopped"), [(0.05, "interval"), (0.0005, "seconds")])
def test_sampling_stops_when_the_interval_is_narrow(clock: Clock, interval: float, stopped: str) -> None:
    rng = np.random.default_rng(0)
    plan = replace(PLAN, seconds=4.0, interval=interval)
    found = measure.measure_latency(lambda: clock.sleep(rng.uniform(0.008, 0.012)), plan)
    assert found.stopped == stopped
    assert (measure.half_width(found.samples) <= interval) == (stopped == "interval")
    assert clock.ns >= 1e9, "not before a quarter of the time, so that a burst can't end it"
    assert (clock.ns < 2e9) == (stopped == "interval")


def test_sampling_stops_at_the_number_of_samples(clock: Clock) -> None:
    plan = replace(PLAN, seconds=1e6, min_samples=17, max_samples=17)
    found = measure.measure_latency(lambda: clock.sleep(0.001), plan)
    assert (len(found.samples), found.stopped) == (17, "samples")


def test_runs_longer_than_the_budget_still_give_samples(clock: Clock) -> None:
    found = measure.measure_latency(lambda: clock.sleep(0.02), replace(PLAN, seconds=0.01))
    assert (len(found.samples), found.stopped) == (measure.MIN_SAMPLES, "seconds")


def test_half_width_is_the_widest_side_of_the_order_statistics() -> None:
    times = np.concatenate([np.full(50, 1.0), np.linspace(1, 2, 50)])
    low, high = np.sort(times)[[50 - 10, 50 + 10]]  # 0.98 * sqrt(100) = 9.8
    median = np.median(times)
    assert measure.half_width(list(times)) == pytest.approx(max(high - median, median - low) / median, rel=1e-6)
    assert measure.half_width([5.0] * 40) == 0
    assert measure.half_width([0.0] * 40) == float("inf")


@pytest.mark.parametrize("count", [30, 101, 1000])
def test_half_width_covers_the_median_at_the_stated_confidence(count: int) -> None:
    """Compute the exact coverage of the chosen order statistics from the binomial distribution."""
    # Evenly spaced values reveal the order statistics that bound the interval.
    wide = measure.half_width(list(np.arange(count) + 1e6)) * (np.median(np.arange(count)) + 1e6)
    reach = round(float(wide))
    middle = (count - 1) / 2
    low, high = round(middle - reach), round(middle + reach)
    assert 0.94 <= stats.binom.cdf(high, count, 0.5) - stats.binom.cdf(low, count, 0.5) <= 0.99


def test_the_interval_covers_a_known_median() -> None:
    rng = np.random.default_rng(0)
    true = float(stats.lognorm.median(0.3))
    hits = 0
    for _ in range(400):
        times = stats.lognorm.rvs(0.3, size=200, random_state=rng)
        median = float(np.median(times))
        hits += abs(median - true) <= measure.half_width(list(times)) * median
    assert hits / 400 >= 0.93


def test_warm_up_ends_when_steady(clock: Clock) -> None:
    calls = iter(range(10**9))
    plan = replace(PLAN, warmup_s=2.0)
    assert measure.warm_up(lambda: clock.sleep(0.002 + 0.02 * 0.9 ** next(calls)), plan)
    assert next(calls) > 50, "it ended while the times still fell"
    assert clock.ns < 1.5e9, "it went on after it was steady"
    begun = clock.ns
    assert measure.warm_up(lambda: clock.sleep(0.001), plan)
    assert clock.ns - begun == pytest.approx(2 * 0.2e9, rel=0.01), "two windows of a tenth each"


def test_warm_up_reports_when_it_was_never_steady(clock: Clock) -> None:
    delays = iter(range(10**9))
    assert not measure.warm_up(lambda: clock.sleep(0.001 * 1.02 ** next(delays)), replace(PLAN, warmup_s=0.5))
    assert 0.5e9 <= clock.ns < 0.7e9


@pytest.mark.parametrize("slots", [1, 3])
def test_throughput_keeps_every_slot_in_flight(slots: int) -> None:
    session = Asynchronous(0.02, slots)
    found = measure.measure_throughput(session, FEEDS, 2, replace(PLAN, seconds=0.3))
    assert not session.ends, "a batch was left in flight"
    assert found.value is not None and 0 < found.value <= slots * 2 / 0.0199, "no slot can do more than that"
    # Speed depends on the machine's load; the absence of idle slots does not.
    filled, drained = session.in_flight[: 1 - slots or None], session.in_flight[1 - slots :] if slots > 1 else []
    assert set(filled) == {slots} and drained == list(range(slots - 1, 0, -1))
    assert {call for call in session.calls if call.startswith("bind")} == {f"bind{k}" for k in range(slots)}


def test_throughput_counts_the_answers_of_every_lane() -> None:
    both, lanes, answered = threading.Barrier(2), list[int](), list[int]()

    def answer(feed: dict[str, np.ndarray]) -> None:
        both.wait(60)  # neither lane continues without the other
        lanes.append(threading.get_ident())
        answered.append(int(feed["input"][0, 0]))

    began = time.perf_counter()
    found = measure.throughput_in_lanes(answer, 2, FEEDS, 4, replace(PLAN, seconds=1e6, max_samples=10))
    assert sorted(map(lanes.count, set(lanes))) == [5, 5] and sorted(set(answered)) == [0, 1, 2]
    assert found.stopped == "samples"
    assert found.value is not None and found.value >= 4 * 10 / (time.perf_counter() - began)


def test_throughput_samples_are_rates_of_windows(clock: Clock) -> None:
    found = measure.measure_throughput(Scripted(0.01, sleep=clock.sleep), FEEDS, 4, replace(PLAN, seconds=0.5))
    assert (found.stopped, found.value) == ("seconds", pytest.approx(400))
    assert found.samples == pytest.approx([400] * 5)


def test_throughput_of_a_fixed_number_of_samples_ends(clock: Clock) -> None:
    session = Scripted(0.001, sleep=clock.sleep)
    found = measure.measure_throughput(session, FEEDS, 2, replace(PLAN, seconds=1e6, max_samples=25))
    assert (session.calls.count("run0"), session.calls.count("fetch0"), found.stopped) == (25, 25, "samples")
    assert found.samples == pytest.approx([2 / 0.001]), "shorter than a window"


def test_throughput_is_measured_for_batches_longer_than_the_budget(clock: Clock) -> None:
    found = measure.measure_throughput(Scripted(0.05, sleep=clock.sleep), FEEDS, 8, replace(PLAN, seconds=0.01))
    assert found.value == pytest.approx(8 / 0.05)
    assert len(found.samples) >= 1


def test_garbage_collection_is_off_during_samples_only() -> None:
    seen = []

    def once() -> None:
        seen.append(gc.isenabled())

    measure.measure_latency(once, replace(PLAN, max_samples=5, min_samples=5))
    assert seen == [False] * 5
    assert gc.isenabled()


def test_a_failure_leaves_the_garbage_collector_on() -> None:
    def fails() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        measure.measure_latency(fails, PLAN)
    assert gc.isenabled()


def test_pausing_the_process_does_not_end_a_block(clock: Clock) -> None:
    """The process may be stopped at any moment, for longer than a block."""
    halted = iter([False, True] + [False] * 100)
    plan = replace(PLAN, block_s=0.05, blocks=3)
    found = measure.measure_latency(lambda: clock.sleep(9.0 if next(halted) else 0.01), plan, blocks=[0, 1])
    assert found.block is not None
    first, second = (found.samples[found.block == k] for k in (0, 1))
    assert first == pytest.approx([9.0, 0.01, 0.01]) and second == pytest.approx([0.01] * 5)
    assert np.diff(found.windows).ravel() == pytest.approx([first.sum(), second.sum()])
    assert found.window == (found.windows[0][0], found.windows[1][1]) and found.window[1] == clock.ns / 1e9
    long = measure.measure_latency(lambda: clock.sleep(0.02), plan, blocks=[0, 1])
    assert long.block is not None and [*np.bincount(long.block)] == [3, 3], "as many as there is room for"
    longer = measure.measure_latency(lambda: clock.sleep(0.2), plan, blocks=[0, 1])
    assert longer.block is not None and [*np.bincount(longer.block)] == [1, 1]


class Gpu(Scripted):
    """A GPU's stream and stopwatch on a test clock: a launch occupies the host, the work follows in order."""

    def __init__(self, clock: Clock, launch: float, work: float) -> None:
        super().__init__()
        self.clock, self.launch, self.work = clock, launch, work
        self.free = self.begin = self.end = 0.0

    def at(self) -> float:
        return max(self.free, self.clock.ns / 1e9)

    def run(self, slot: int = 0) -> None:
        self.clock.sleep(self.launch)
        self.free = self.at() + self.work

    def wait(self, slot: int = 0) -> None:
        self.clock.ns = max(self.clock.ns, round(self.free * 1e9))

    def start(self) -> None:
        self.begin = self.at()

    def stop(self) -> None:
        self.end = self.at()

    def elapsed(self) -> float:
        self.wait()
        return self.end - self.begin


@pytest.mark.parametrize(("launch", "work"), [(0.2e-3, 1e-3), (12e-6, 30e-6), (0.0, 1e-3)])
def test_queued_runs_exclude_launch_time(clock: Clock, launch: float, work: float) -> None:
    gpu = Gpu(clock, launch, work)
    watch: Any = SimpleNamespace(start=gpu.start, stop=gpu.stop, seconds=gpu.elapsed)
    alone = measure.measure_latency(measure.make_step(gpu, "model", FEEDS, watch), replace(PLAN, max_samples=20), watch)
    assert alone.gpu is not None and alone.gpu == pytest.approx(launch + work, rel=1e-3)
    assert measure.measure_queued(gpu, watch, PLAN) == pytest.approx(work, rel=1e-3)


@pytest.mark.parametrize(("seconds", "most", "whole"), [(1.0, 1000, 0.1), (1.0, 20, 0.0), (0.0, 1000, 0.0)])
def test_queued_runs_and_parts_take_a_tenth_of_the_time(clock: Clock, seconds: float, most: int, whole: float) -> None:
    gpu, plan = Gpu(clock, 0.0, 1e-3), replace(PLAN, seconds=seconds, max_samples=most)
    watch: Any = SimpleNamespace(start=gpu.start, stop=gpu.stop, seconds=gpu.elapsed)
    queued = measure.measure_queued(gpu, watch, plan)
    fewest = 20 if most == 20 else measure.MIN_SAMPLES
    assert queued is not None and len(queued) == (round(whole / 2e-3) or fewest), "each is behind another run"

    def time_parts(_: Any) -> dict[str, float]:
        clock.sleep(1e-3)
        return {"copy": 4e-4, "run": 6e-4}

    parts = measure.measure_parts(SimpleNamespace(parts=time_parts), FEEDS, plan)  # type: ignore[arg-type]
    assert {name: (len(each), each[0]) for name, each in parts.items()} == {
        name: (round(whole / 1e-3) or fewest, value) for name, value in time_parts(None).items()
    }


def test_no_queue_forms_when_launches_outlast_the_work(clock: Clock) -> None:
    gpu = Gpu(clock, 1e-3, 0.5e-3)
    watch: Any = SimpleNamespace(start=gpu.start, stop=gpu.stop, seconds=gpu.elapsed)
    assert measure.measure_queued(gpu, watch, PLAN) is None
