"""Overlapping stages: order, back-pressure, dropped frames of live sources, errors and interrupts."""

import _thread
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from dyno.worker.video.media import Frame, Rgb, now
from dyno.worker.video.stages import QUEUE_DEPTH, PipelineStage, VideoPipeline, run_pipelines

PICTURE = Rgb(np.zeros((2, 2, 3), np.uint8))


def frames(count: int, before: threading.Event | None = None) -> Iterator[Frame]:
    for k in range(count):
        if before is not None:
            before.wait(60)
        yield Frame(k, PICTURE, now())


class Collect(PipelineStage):
    """A stage that keeps its items' indices."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[int] = []

    def work(self, item: Any) -> Iterable[Any]:
        self.seen.append(item.index)
        return (item,)


class Pairs(Collect):
    """A stage that passes items on in pairs, the last one alone."""

    def __init__(self) -> None:
        super().__init__("pairs")
        self._held: list[Frame] = []

    def work(self, item: Any) -> Iterable[Any]:
        self._held.append(item)
        return self.flush() if len(self._held) == 2 else ()

    def flush(self) -> Iterable[Any]:
        held, self._held = self._held, []
        return held


class Broken(Collect):
    """A stage that fails at item `at`."""

    def __init__(self, at: int, lanes: int = 1) -> None:
        super().__init__("broken")
        self._at, self.lanes = at, lanes

    def work(self, item: Any) -> Iterable[Any]:
        if item.index == self._at:
            raise ValueError("broken")
        return super().work(item)


class Gate(Collect):
    """A stage that waits at each item until it is opened."""

    def __init__(self) -> None:
        super().__init__("gate")
        self.at, self.open = threading.Event(), threading.Event()

    def work(self, item: Any) -> Iterable[Any]:
        self.at.set()
        self.open.wait(60)
        return super().work(item)


def test_all_items_arrive_in_order() -> None:
    first, last = Collect("first"), Collect("last")
    stages = VideoPipeline("read", frames(101), [first, Pairs(), last])
    run_pipelines([stages], lambda: None)
    assert first.seen == last.seen == list(range(101))
    assert stages.dropped == 0
    for name, timed in stages.timed.items():
        times = timed.arrays(0)
        assert len(times["began"]) == (102 if name == "pairs" else 101)  # plus the item left at the end
        assert (times["ended"] >= times["began"]).all() and (times["handed"] >= times["ended"]).all()


def test_a_slow_stage_holds_up_the_reader() -> None:
    gate, read = Gate(), Collect("read")
    taken: list[int] = []

    def source() -> Iterator[Frame]:
        for frame in frames(50):
            taken.append(frame.index)
            yield frame

    stages = VideoPipeline("source", source(), [gate, read])
    seen: list[int] = []

    def tick() -> None:
        if len(taken) <= QUEUE_DEPTH:
            return
        seen.append(len(taken))
        if len(seen) > 1 and seen[-1] == seen[-2]:  # reading has stopped
            gate.open.set()

    run_pipelines([stages], tick)
    # at the gate and in its queue, which frees several places at a time
    assert seen[0] == seen[1] == QUEUE_DEPTH + 1
    assert read.seen == list(range(50))


def test_a_live_source_never_waits_and_drops_the_oldest_frames() -> None:
    gate = Gate()
    arrived = threading.Event()

    def camera() -> Iterator[Frame]:
        for frame in frames(20):
            if frame.index == 1:
                gate.at.wait(60)
            yield frame
        arrived.set()

    stages = VideoPipeline("camera", camera(), [gate], live=True)
    run_pipelines([stages], lambda: gate.open.set() if arrived.is_set() else None)
    assert gate.seen == [0, 19]
    assert stages.dropped == 18


def test_an_error_stops_the_pipeline_and_is_raised() -> None:
    last = Collect("last")
    with pytest.raises(ValueError, match="broken"):
        run_pipelines([VideoPipeline("read", frames(1000), [Broken(3), last])], lambda: None)
    assert last.seen == list(range(len(last.seen))) and len(last.seen) <= 3


def test_lanes_do_not_wait_for_each_other_but_keep_the_order() -> None:
    """A lane's first item waits until others have passed the other lane; they are handed on after it."""
    others = threading.Event()

    class Lanes(Collect):
        lanes = 2

        def work(self, item: Any) -> Iterable[Any]:
            if item.index == 0:
                assert others.wait(60), "no lane works while one waits"
            if item.index == 2:
                others.set()
            return super().work(item)

    lanes, last = Lanes("lanes"), Collect("last")
    stages = VideoPipeline("read", frames(50), [lanes, last])
    run_pipelines([stages], lambda: None)
    assert last.seen == sorted(lanes.seen) == list(range(50))
    assert lanes.seen[-1] != 0 and lanes.seen.index(0) >= 2
    times = stages.timed["lanes"].arrays(0)
    assert (times["began"][1:] >= times["handed"][:-1]).all(), "pieces follow each other"
    assert (times["ended"] >= times["began"]).all() and (times["handed"] >= times["ended"]).all()


def test_lanes_end_with_their_pipeline() -> None:
    gate = Gate()
    with pytest.raises(ValueError, match="broken"):  # while the others wait for room or for items
        run_pipelines([VideoPipeline("read", frames(1000), [Broken(5, lanes=3), gate])], lambda: gate.open.set())
    assert not [t for t in threading.enumerate() if t.name in ("broken", "gate")]


def test_several_pipelines_run_in_parallel_and_end_together() -> None:
    lasts = [Collect(f"last{k}") for k in range(3)]
    run_pipelines([VideoPipeline("read", frames(20 + k), [last]) for k, last in enumerate(lasts)], lambda: None)
    assert [last.seen for last in lasts] == [list(range(20 + k)) for k in range(3)]
    other = Collect("other")
    lines = [VideoPipeline("read", frames(10**9), [other]), VideoPipeline("read", frames(1), [Broken(0)])]
    with pytest.raises(ValueError, match="broken"):
        run_pipelines(lines, lambda: None)
    assert other.seen == list(range(len(other.seen)))


def test_an_interrupt_stops_after_the_item_in_hand() -> None:
    endless, last = threading.Event(), Collect("last")
    endless.set()
    ticks = iter(range(10**9))

    def tick() -> None:
        if next(ticks) == 2:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        run_pipelines([VideoPipeline("read", frames(10**9, endless), [Collect("first"), last])], tick)
    assert last.seen == list(range(len(last.seen)))
    assert not [t for t in threading.enumerate() if t.name in ("first", "last")]  # all threads have ended
