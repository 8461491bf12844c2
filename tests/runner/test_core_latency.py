"""The latency between processors: its size, and the case without an answer."""

import itertools
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from dyno.runner.core_latency import CoreLatency

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="only one processor")


@pytest.fixture
def latency() -> Iterator[CoreLatency]:
    latency = CoreLatency(sorted(os.sched_getaffinity(0)))
    yield latency
    latency.close()


def answering() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "core_latency" in " ".join(p.cmdline())]


def measure(latency: CoreLatency) -> int:
    """Return the first measurement not prevented by other programs, 0 after 200 attempts."""
    return next((found for _ in range(200) if (found := latency.measure() or time.sleep(0.05) or 0)), 0)


@needs_two
def test_core_latency_is_nanoseconds_and_keeps_the_affinity(latency: CoreLatency) -> None:
    """Cores are 20 ns to some hundred ns apart, and each of Python's two loops adds about 50 ns."""
    allowed = os.sched_getaffinity(0)
    assert 20 < measure(latency) < 20_000
    assert os.sched_getaffinity(0) == allowed
    latency.close()
    assert latency.measure() == 0


def test_core_latency_needs_two_processors() -> None:
    alone = CoreLatency([0])
    assert alone.measure() == 0
    alone.close()


@needs_two
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_dead_or_stopped_process_gives_no_latency(
    latency: CoreLatency, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(latency)
    (other,) = answering()
    other.send_signal(signal.SIGSTOP)
    looks = itertools.count(step=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter_ns", lambda: next(looks))
        assert latency.measure() == 0
    assert next(looks) < 6e6 * len(latency._neighbours), "it has 5 ms for each"
    if is_gone:
        other.kill()
        other.wait()
        assert latency.measure() == 0
    latency.close()
    assert not answering(), "one that is stopped ends, too"
