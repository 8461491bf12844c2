"""Memory, streams, events and graphs of a real GPU."""

import numpy as np
import pytest

from dyno.worker.sessions.gpu import CudaGraph, Device, DeviceSession, Stopwatch, call
from dyno.worker.spec import INFERENCE_PARTS, Tensor, Unavailable, UserError

pytestmark = pytest.mark.gpu
SHAPE = (4, 1024)


class Copier(DeviceSession):
    """Engine that copies its input to its output."""

    def __init__(self, slots: int) -> None:
        super().__init__(Device("cuda:0"), slots)
        self.inputs, self.outputs = (Tensor("x", "float32", SHAPE),), (Tensor("y", "float32", SHAPE),)
        size = 4 * int(np.prod(SHAPE))
        self.allocate({"x": SHAPE}, {"x": size, "y": size})

    def enqueue(self, slot: int) -> None:
        at, size = self._slots[slot].addresses, 4 * int(np.prod(SHAPE))
        call(self._cuda.cuMemcpyDtoDAsync, at["y"], at["x"], size, self._compute)


@pytest.mark.parametrize("slots", [1, 3])
def test_every_slot_keeps_its_own(slots: int) -> None:
    session = Copier(slots)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal(SHAPE, dtype=np.float32)} for _ in range(slots)]
    staged = [session.stage(feed) for feed in feeds]
    for turn in (feeds, staged):
        for slot in range(slots):
            session.bind(turn[slot], slot)
            session.run(slot)
        for slot in range(slots):
            session.wait(slot)
            assert np.array_equal(session.fetch(slot)["y"], feeds[slot]["x"])
    parts = session.parts(staged[0])
    assert set(parts) == set(INFERENCE_PARTS) and all(0 < seconds < 1 for seconds in parts.values())
    with pytest.raises(UserError, match="wants 4x1024"):
        session.bind({"x": np.zeros((2, 1024), np.float32)})
    session.close()


def test_the_stopwatch_times_graph_replays() -> None:
    device = Device("cuda:0")
    size = 1 << 28
    a, b, stream = device.allocate(size), device.allocate(size), device.stream()
    graph = CudaGraph(stream, lambda: call(device.cuda.cuMemcpyDtoDAsync, b, a, size, stream))
    watch = Stopwatch(int(stream))
    watch.start()
    for _ in range(10):
        graph.launch()
    watch.stop()
    assert 1e-4 < watch.seconds() < 1.0  # 5 GB at 0.5 to 50 TB/s
    graph.close()
    device.close()


def test_too_much_memory_and_missing_gpus_are_errors() -> None:
    device = Device("cuda:0")
    with pytest.raises(MemoryError, match="memory ran out"):
        device.allocate(1 << 50)
    device.close()
    with pytest.raises(Unavailable, match="there is no cuda:99"):
        Device("cuda:99")
