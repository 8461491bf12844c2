"""Steps with several threads: the batches of a single thread, in order, and reused memory."""

import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.jobs import video
from dyno.worker.jobs.video import MemorySource
from dyno.worker.spec import Dims, Preprocess, Tensor, Unavailable
from dyno.worker.tasks.postprocess import Detections
from dyno.worker.video import steps
from dyno.worker.video.drawing import NO_OBJECT, Tracker
from dyno.worker.video.media import Batch, Frame, Preparation, Rgb, Source, now
from dyno.worker.video.options import TRACKER_NAMES
from dyno.worker.video.stages import PipelineStage, VideoPipeline, run_pipelines


def frames(count: int) -> list[Frame]:
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(5, 40)), int(rng.integers(5, 40))) for _ in range(count)]
    return [Frame(k, Rgb(rng.integers(0, 256, (*size, 3), np.uint8)), now()) for k, size in enumerate(sizes)]


def preparation(batch: int) -> Preparation:
    tensor = Tensor("images", "float32", (batch, 3, 32, 32))
    return Preparation(Preprocess((0.1, 0.2, 0.3), (1.0, 0.5, 0.25), letterbox=True), [tensor], Dims(batch, 32, 32))


class Copies(PipelineStage):
    """A stage that copies each batch on arrival, as its array is reused."""

    name = "copies"

    def __init__(self, batch: int) -> None:
        self.room = steps.count_room(batch)
        self.seen: list[tuple[list[int], np.ndarray]] = []

    def work(self, item: Any) -> Iterable[Any]:
        time.sleep(random.random() * 1e-3)
        numbers = [frame.index for frame in item.frames]
        self.seen.append((numbers, item.feed["images"][: len(numbers)].copy()))
        return ()


@pytest.mark.parametrize(("batch", "threads"), [(1, 3), (4, 3), (3, 4)])
def test_several_threads_make_the_same_batches_as_one(batch: int, threads: int) -> None:
    made = []
    for count in (1, threads):
        preparations = [preparation(batch) for _ in range(count)]
        # Arrays that wait, are being filled, and are being read.
        total = steps.count_room(batch) + steps.count_filling(batch, count) + 2
        last = Copies(batch)
        prepare = steps.PreparationStage(preparations, [preparations[0].new_feed() for _ in range(total)])
        run_pipelines([VideoPipeline("read", iter(frames(31)), [prepare, last])], lambda: None)
        made.append(last.seen)
    assert [numbers for numbers, _ in made[1]] == [list(range(31))[k : k + batch] for k in range(0, 31, batch)]
    for (one, values), (several, others) in zip(*made, strict=True):
        assert one == several
        np.testing.assert_array_equal(values, others)


def test_an_error_in_a_thread_ends_the_pipeline() -> None:
    wrong = Frame(3, Rgb(np.zeros((0, 4, 3), np.uint8)), now())  # nothing to resize
    preparations = [preparation(2), preparation(2)]
    prepare = steps.PreparationStage(preparations, [preparations[0].new_feed() for _ in range(8)])
    pipeline = VideoPipeline("read", iter([*frames(3), wrong, *frames(20)]), [prepare, Copies(2)])
    with pytest.raises(Exception, match=r"(?i)size|empty|zero"):
        run_pipelines([pipeline], lambda: None)


class InLanes(PipelineStage):
    """A stage with several lanes of variable duration."""

    name, lanes = "lanes", 3

    def __init__(self) -> None:
        self.worked: list[int] = []
        self.ordered: list[int] = []

    def work(self, item: Any) -> Iterable[Any]:
        time.sleep(random.Random(item.index).random() * 5e-3)
        self.worked.append(item.index)
        return (item, item)

    def in_order(self, done: Sequence[Any]) -> None:
        self.ordered += [frame.index for frame in done]


def test_results_of_lanes_are_kept_in_frame_order() -> None:
    step = InLanes()
    run_pipelines([VideoPipeline("read", iter(frames(40)), [step])], lambda: None)
    assert sorted(step.worked) == list(range(40)) != step.worked
    assert step.ordered == [k for k in range(40) for _ in range(2)]


def test_memory_of_processed_outputs_is_reused() -> None:
    class Answering:
        def read_detections(self, outputs: Any, sizes: Any, size: Any, aspects: Any) -> list[Any]:
            return [float(row.sum()) for row in outputs["output"][: len(sizes)]]

    taken: list[list[np.ndarray]] = []
    step = steps.PostprocessingStage(Answering(), (32, 32), read=taken.append)  # type: ignore[arg-type]  # all that it needs
    outputs = [np.ones((4, 2), np.float32)]
    batch = Batch(frames(3), None, outputs, ("output",))
    assert [frame.detections for frame in step.work(batch)] == [2.0, 2.0, 2.0]
    assert taken[0] is outputs and batch.outputs == []


class OnGpu(Session):
    """A session with outputs in memory that its next run overwrites."""

    slots = 2

    def __init__(self) -> None:
        self._ends = [np.zeros((4, 3, 1 << 17), np.float32) for _ in range(self.slots)]

    def bind(self, feeds: Any, slot: int = 0) -> None:
        self._ends[slot][:] = feeds["x"]

    def run(self, slot: int = 0) -> None:
        pass

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return {"y": self._ends[slot]}


@pytest.mark.parametrize("copiers", [1, 3])
def test_outputs_are_preserved_when_their_slot_runs_again(copiers: int) -> None:
    engine = steps.SessionThread(OnGpu, on_cpu=False, copiers=copiers)
    infer, memory = steps.InferenceStage(engine), set[int]()
    for first in range(0, 9, 3):
        batches = [Batch([], {"x": np.float32(first + k)}) for k in range(3)]
        done = [done for batch in batches for done in infer.work(batch)]
        while infer.holds:
            done += infer.flush()
        assert [float(batch.outputs[0].mean()) for batch in done] == [first, first + 1, first + 2]
        memory |= {batch.outputs[0].ctypes.data for batch in done}
        for batch in done:
            engine.take_back(batch.outputs)
    assert len(memory) == 3


class Counted(Source):
    """Ten frames, with a count of decodings."""

    rate = 20.0
    decoded = 0

    def read(self, sound: bool = False) -> Iterator[Frame]:
        for frame in frames(10):
            self.decoded += 1
            yield frame


def test_preloaded_frames_are_decoded_once_and_repeated() -> None:
    source = Counted("counted")
    memory = MemorySource(source, 4, 11)
    whole = [(f.index, f.seconds, f.picture.rgb().sum()) for f in memory.read()]
    for layer in next(memory.read()).picture.layers():
        layer.array[:] = 0  # drawings stay with their frame
    assert source.decoded == 4 and memory.count == 11
    assert whole == [(f.index, f.seconds, f.picture.rgb().sum()) for f in memory.read()]
    assert [index for index, _, _ in whole] == list(range(11)) and whole[4][1] == 4 / 20
    assert [total for *_, total in whole[:4]] == [total for *_, total in whole[4:8]]
    assert MemorySource(source, 99, 0).count == 10


RATE = 25.0


def seen(
    k: int, places: list[float], kinds: list[int] | None = None, scores: list[float] | None = None, timed: bool = True
) -> Frame:
    """Return frame k with a box of 40 x 40 at each of those places, from the left."""
    boxes = np.array([[left, 10, left + 40, 50] for left in places], np.float32).reshape(-1, 4)
    count = len(places)
    found = Detections(boxes, np.array(scores or [0.9] * count), np.array(kinds or [0] * count, int), None, None)
    image = np.zeros((100, 900, 3), np.uint8)
    return Frame(k, Rgb(image), 0, seconds=k / RATE if timed else None, detections=found)


def followed(tracker: Tracker, frames: list[Frame]) -> list[list[int]]:
    for frame in frames:
        tracker.identify(frame)
    return [frame.identities.tolist() for frame in frames if frame.identities is not None]


@pytest.mark.parametrize("name", sorted(TRACKER_NAMES))
def test_tracking_does_not_depend_on_the_order_of_boxes(name: str) -> None:
    pytest.importorskip("trackers")
    tracker = Tracker(name, RATE, 0.25)
    frames = [seen(k, [5 * k, 800 - 5 * k][:: 1 if k % 2 else -1], [3, 7][:: 1 if k % 2 else -1]) for k in range(12)]
    last = followed(tracker, frames)[-4:]
    assert NO_OBJECT not in last[-1] and len(set(last[-1])) == 2
    assert last == [last[0], last[0][::-1]] * 2
    assert tracker.counts == {"3": 1, "7": 1}


@pytest.mark.parametrize("name", sorted(TRACKER_NAMES))
def test_tracking_accepts_frames_without_boxes_or_times(name: str) -> None:
    pytest.importorskip("trackers")
    tracker = Tracker(name, 0.0, 0.25)
    assert followed(tracker, [seen(k, []) for k in range(3)]) == [[], [], []]
    late = followed(tracker, [seen(k, [5 * k], timed=False) for k in range(3, 12)])
    again = followed(tracker, [seen(k, [5 * k + 45]) for k in range(3)])  # decreasing times
    assert late[-1] == again[-1] and late[-1] != [NO_OBJECT]


def test_a_long_gap_in_time_ends_a_track() -> None:
    pytest.importorskip("trackers")
    for pause, same in ((5, True), (100, False)):
        tracker = Tracker("bytetrack", RATE, 0.25)
        before = followed(tracker, [seen(k, [50]) for k in range(10)])[-1]
        after = followed(tracker, [seen(k, [50]) for k in range(10 + pause, 20 + pause)])[-1]
        assert (before == after) is same


def test_an_object_has_the_class_of_most_of_its_boxes() -> None:
    pytest.importorskip("trackers")
    tracker = Tracker("bytetrack", RATE, 0.25)
    followed(tracker, [seen(k, [5 * k], [1 if k == 5 else 2]) for k in range(12)])
    assert tracker.counts == {"2": 1}


def test_weak_boxes_continue_an_object_but_do_not_start_one() -> None:
    pytest.importorskip("trackers")
    tracker = Tracker("bytetrack", RATE, 0.5)
    scores = [0.9] * 5 + [0.3] * 5
    frames = [seen(k, [5 * k, 600], scores=[scores[k], 0.3]) for k in range(10)]
    assert followed(tracker, frames)[-1] == [0, NO_OBJECT]


def test_a_missing_tracking_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(Unavailable, match=r"inference-dyno\[track\]"):
        Tracker("sort", RATE, 0.5)


def test_contention_copies_are_limited_by_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "codec_threads", lambda: 2)
    monkeypatch.setattr(video.alone, "StageCopy", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(video.alone, "measure_contention", lambda copies, *_: len(copies))

    def count(processors: int) -> Any:
        facts = SimpleNamespace(processors=processors)
        answered: Any = [None]
        job: Any = SimpleNamespace(_facts=facts, _output=None, _source=None, _reader=None, _engine=None)
        job._new_preparation = job._new_tracker = lambda: None
        return video._VideoJob._measure_contention(job, answered)

    assert [count(processors) for processors in (1, 4, 7, 64)] == [None, 2, 3, len(steps.STAGES)]


def test_repeated_stages_join_the_first_and_leave_the_notes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second reading meets the same damaged packets, which count once."""
    monkeypatch.setattr(video.alone, "measure_hand_over", lambda count: float(count))
    source, stored, shown = SimpleNamespace(is_single_pass=False, damaged=2, left=3), list[Any](), list[str]()

    def measure() -> tuple[dict[str, int], Any, None]:
        source.damaged, source.left = 4, 6
        return dict.fromkeys("abc", 1), SimpleNamespace(answered=["batch"]), None

    def repeat(stopped: bool) -> None:
        job: Any = SimpleNamespace(_facts=SimpleNamespace(stopped=stopped), _source=source, _measurements=["first"])
        job._journal, job._engine = SimpleNamespace(stage=shown.append), SimpleNamespace(call=lambda work: work())
        job._measure_alone, job._measure_contention = measure, lambda batches: f"cost of {batches[0]}"
        job._store_found = lambda: stored.append(job._measurements)
        video._VideoJob.repeat_alone(job)

    repeat(stopped=True)
    assert stored == []
    repeat(stopped=False)
    second = video.alone.StageMeasurement(dict.fromkeys("abc", 1), "cost of batch", 2.0)  # type: ignore[arg-type]
    assert stored == [["first", second]] and shown == ["each stage alone"]
    assert (source.damaged, source.left) == (2, 3)
