"""Every image is evaluated once, in order, at any batch; outputs have a row per input, on any axis."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.evaluation.evaluate import BATCHES_AHEAD, BatchSource, Pipeline, evaluate, find_rows
from dyno.worker.facts.job import PipelineFacts
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Plan, Preprocess, Runtime, Tensor, Trial, UserError

CLASSES = 12


class Linear(Session):
    """A classifier of 1x2x2 images, with a second output that has no batch dimension."""

    def __init__(self, batch: int, classes: int = CLASSES) -> None:
        self.inputs = (Tensor("input", "float32", (batch, 1, 2, 2)),)
        self.weights = np.random.default_rng(0).standard_normal((4, classes)).astype(np.float32)
        self.seen: list[np.ndarray] = []

    def bind(self, feeds, slot=0):
        self.bound = feeds["input"]

    def run(self, slot=0):
        self.seen.append(self.bound)
        self.result = self.bound.reshape(len(self.bound), -1) @ self.weights

    def fetch(self, slot=0):
        return {"output": self.result, "scale": np.float32(3)}


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    np.save(tmp_path / "images.npy", np.random.default_rng(1).integers(0, 256, (20, 1, 2, 2), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(20) % CLASSES)
    np.save(tmp_path / "test.npy", np.array([3, 1, 4, 15, 9, 2, 6]))
    return DataSpec("seven", str(tmp_path), count=7)


def trial(data: DataSpec, batch: int) -> Trial:
    model = ModelSpec("net", "fake:net", channels=1, preprocess=Preprocess((0.5,), (0.5,)))
    return Trial(model, "fake", "fp32", Dims(batch, 2, 2), data=data, plan=Plan(seconds=0.05))


@pytest.mark.parametrize("batch", [1, 3, 7, 10])
def test_images_are_evaluated_once_in_order_at_any_batch(data: DataSpec, batch: int) -> None:
    session = Linear(batch)
    arrays = evaluate(session, trial(data, batch), timed=False).arrays
    pixels = np.load(Path(data.folder) / "images.npy")[[3, 1, 4, 15, 9, 2, 6]].astype(np.float32)
    expected = ((pixels / 255 - 0.5) / 0.5).reshape(7, -1) @ session.weights
    np.testing.assert_allclose(arrays["output:output"], expected, rtol=1e-4, atol=1e-5)
    assert arrays["sample"].tolist() == [3, 1, 4, 15, 9, 2, 6]
    assert arrays["label"].tolist() == [3, 1, 4, 3, 9, 2, 6]
    assert all(len(bound) == batch for bound in session.seen), "every run is at the trial's own batch"


def test_the_top_ten_classes_are_ranked(data: DataSpec) -> None:
    arrays = evaluate(Linear(2), trial(data, 2), timed=False).arrays
    assert arrays["topk_index"].shape == arrays["topk_score"].shape == (7, 10)
    assert (arrays["topk_index"].dtype, arrays["topk_score"].dtype) == (np.int32, np.float32)
    assert (np.diff(arrays["topk_score"]) <= 0).all()
    np.testing.assert_array_equal(arrays["topk_index"][:, 0], arrays["output:output"].argmax(1))


def test_fewer_than_ten_classes_are_all_ranked(data: DataSpec) -> None:
    assert evaluate(Linear(2, classes=4), trial(data, 2), timed=False).arrays["topk_index"].shape == (7, 4)
    assert "topk_index" not in evaluate(Linear(2, classes=1), trial(data, 2), timed=False).arrays


def test_ties_are_ranked_by_class_index(data: DataSpec) -> None:
    session = Linear(1)
    session.weights[:] = 0
    assert (evaluate(session, trial(data, 1), timed=False).arrays["topk_index"] == np.arange(10)).all()


def test_random_inputs_have_no_labels_and_are_not_timed() -> None:
    evaluation = evaluate(Linear(2), trial(DataSpec(count=5), 2))
    assert (evaluation.list_measurements(), evaluation.facts()) == ([], None)
    arrays = evaluation.arrays
    assert set(arrays) == {"output:output", "output:scale", "rows:scale", "topk_index", "topk_score", "sample"}
    assert arrays["sample"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["output:output"].shape == (5, CLASSES)


def test_raw_outputs_are_capped_but_predictions_are_not(data: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.worker.evaluation.evaluate.RAW_BYTES", 2 * (2 * CLASSES + 1) * 4)
    arrays = evaluate(Linear(2), trial(data, 2), timed=False).arrays
    assert arrays["output:output"].shape == (4, CLASSES)
    assert len(arrays["topk_index"]) == len(arrays["label"]) == len(arrays["sample"]) == 7


def test_the_session_may_reuse_its_output_buffer(data: DataSpec) -> None:
    class Reusing(Linear):
        place = np.zeros((2, CLASSES), np.float32)

        def fetch(self, slot=0):
            self.place[:] = self.result
            return {"output": self.place}

    plain, reusing = (evaluate(kind(2), trial(data, 2), timed=False).arrays for kind in (Linear, Reusing))
    np.testing.assert_array_equal(plain["output:output"], reusing["output:output"])


def test_real_images_are_timed_after_a_tenth_of_warm_up(data: DataSpec) -> None:
    evaluation = evaluate(Linear(2), trial(data, 2))
    assert (evaluation.images, evaluation.warm_up) == (7, 2)
    assert evaluation.seconds > 0 and {m.tag: m.unit for m in evaluation.list_measurements()} == {
        "preprocess": "s", "inference": "s", "postprocess": "s", "pipeline": "1/s",
    }  # fmt: skip
    assert evaluation.facts() == PipelineFacts(7, evaluation.seconds, 2)
    assert all(len(samples) >= 3 and (samples > 0).all() for samples in evaluation.stages.values())
    for name, array in evaluate(Linear(2), trial(data, 2), timed=False).arrays.items():
        np.testing.assert_array_equal(array, evaluation.arrays[name])


def test_a_uint8_input_gets_raw_pixels(data: DataSpec) -> None:
    session = Linear(3)
    session.inputs = (Tensor("input", "uint8", (3, 1, 2, 2)),)
    evaluate(session, trial(data, 3), timed=False)
    assert {bound.dtype for bound in session.seen} == {np.dtype(np.uint8)}


def test_metadata_of_the_data_set_is_recorded(data: DataSpec) -> None:
    metadata = '{"decode_s": 0.002, "classes": ["a", "б"], "warnings": ["class \'б\' is in no image"]}'
    (Path(data.folder) / "meta.json").write_text(metadata, encoding="utf-8")
    evaluation = evaluate(Linear(2), trial(data, 2))
    assert evaluation.list_measurements()[0].tag == "decode" and evaluation.decode == 0.002
    assert evaluation.arrays["classes"].tolist() == ["a", "б"]
    assert evaluation.oddities == ("class 'б' is in no image",)


WEIGHTS = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)


class Net(Session):
    """A session that applies a function to its one input."""

    def __init__(self, function: Any, shape: tuple[int, ...], outputs: tuple[Tensor, ...] = ()) -> None:
        self.inputs, self.outputs, self.function = (Tensor("x", "float32", shape),), outputs, function

    def bind(self, feeds: Any, slot: int = 0) -> None:
        self.bound = feeds["x"]

    def run(self, slot: int = 0) -> None:
        self.answered = self.function(self.bound)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return self.answered


def shaped_trial(batch: int = 8, *declared: tuple[int | str, ...], **shapes: tuple[int | str, ...]) -> Trial:
    outputs = tuple(Tensor(f"y{k}" if k else "y", "float32", shape) for k, shape in enumerate(declared))
    return Trial(ModelSpec("net", "fake:net", outputs=outputs), "fake", "fp32", Dims(batch, 0, 0, shapes))


def scores(x: np.ndarray) -> np.ndarray:
    return x @ WEIGHTS


def detections(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = scores(x)[scores(x)[:, 0] > 0]
    return found


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: {"y": scores(x).mean(0, keepdims=True)}, "the file says batch x 5, but gave 1 x 5 for a batch of 8"),
        (lambda x: {"y": scores(x).reshape(1, -1)}, "the file says batch x 5, but gave 1 x 40 for a batch of 8"),
        (lambda x: {"y": scores(x) - scores(x).mean(0)}, r"change by \d+% of their size with the other inputs"),
    ],
)
def test_outputs_that_contradict_the_declared_batch_are_refused(function: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_rows(Net(function, (8, 4)), shaped_trial(8, ("batch", 5)), 8)
    assert find_rows(Net(function, (1, 4)), shaped_trial(1, ("batch", 5)), 1).axes == {"y": 0}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"y": scores(x), "loss": np.float32(np.square(x).mean())},
        lambda x: {"y": scores(x), "anchors": np.ones((1, 7, 4), np.float32)},
        lambda x: {"anchors": WEIGHTS},
        lambda x: {"y": scores(x), "square": np.eye(8, dtype=np.float32)},
        lambda x: {"loss": np.square(x).mean(keepdims=True)[:1]},
        lambda x: {"boxes": detections(x)},
        lambda x: {"tokens": np.repeat(scores(x), 3, axis=0)},
        lambda x: {"pairs": scores(x) @ scores(x).T},
        lambda x: {"labels": scores(x).argmax(1)},
        lambda x: {"usage": np.abs(scores(x)).mean(0), "y": scores(x)},
    ],
    ids="loss, anchors, table, square, loss alone, detections, flattened, pairs, labels, usage".split(", "),
)
def test_undeclared_outputs_may_lack_a_row_per_input(function: Any) -> None:
    assert find_rows(Net(function, (8, 4)), shaped_trial(), 8).warning == ""


def test_detection_counts_may_be_declared_as_a_batch() -> None:
    assert find_rows(Net(lambda x: {"y": detections(x)}, (8, 4)), shaped_trial(8, ("batch", 5)), 8).axes == {"y": None}


def test_a_free_engine_axis_may_have_any_number_of_rows() -> None:
    def most(x: np.ndarray) -> dict[str, np.ndarray]:
        return {"y": np.sort(scores(x), axis=0)[-3:]}

    free = (Tensor("y", "float32", ("found", 5)),)
    assert find_rows(Net(most, (8, 4), free), shaped_trial(), 8).axes == {"y": None}
    for compute, shape in ((most, "3 x 5"), (lambda x: {"y": scores(x).reshape(1, -1)}, "1 x 40")):
        with pytest.raises(UserError, match=f"the outputs are {shape} for a batch of 8, which has no row for each inp"):
            find_rows(Net(compute, (8, 4)), shaped_trial(), 8)


def test_rows_that_affect_each_other_on_an_assumed_axis_are_a_warning() -> None:
    rows = find_rows(Net(lambda x: {"y": np.cumsum(x, 0)}, (8, 4)), shaped_trial(), 8)
    assert "the model mixes them, or the batch is another axis" in rows.warning


@pytest.mark.parametrize("kept", [3, 5, 7])
@pytest.mark.parametrize("declared", [(), (("batch", 5),)], ids="assumed, declared".split(", "))
def test_models_that_ignore_inputs_beyond_a_fixed_batch_are_refused(kept: int, declared: Any) -> None:
    """Files exported by Ultralytics with NMS do this: beyond the exported batch they fill up with zeros."""
    net = Net(lambda x: {"y": scores(x) * (np.arange(len(x)) < kept)[:, None]}, (8, 4))
    with pytest.raises(UserError, match="in a batch of 8 some inputs are ignored"):
        find_rows(net, shaped_trial(8, *declared), 8)


def test_random_outputs_cause_no_warning() -> None:
    rng = np.random.default_rng(0)
    rows = find_rows(Net(lambda x: {"y": rng.standard_normal((8, 5))}, (8, 4)), shaped_trial(8, ("batch", 5)), 8)
    assert (rows.axes, rows.warning) == ({"y": 0}, "")


def test_rows_on_a_later_axis_are_stacked_in_input_order() -> None:
    """Seven inputs in batches of 3: the stored outputs equal those of each input alone."""

    def net(x: np.ndarray) -> dict[str, np.ndarray]:
        seen.append(np.array(x))
        return {"y": np.cumsum(x @ WEIGHTS, axis=0)}

    seen = list[np.ndarray]()
    one = shaped_trial(3, (6, "batch", 5), x=(6, "batch", 4))
    one = Trial(one.model, "fake", "fp32", one.dims, data=type(one.data)(count=7))
    stored = evaluate(Net(net, (6, 3, 4)), one).arrays["output:y"]
    inputs = np.concatenate(seen[-3:], axis=1)[:, :7]
    expected = np.cumsum(np.einsum("tbi,io->bto", inputs, WEIGHTS), axis=1)
    np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)


BATCH = 4


class Counting(BatchSource):
    """A source with n in every place of batch n."""

    def __init__(self, parts: int = 1, seconds: float = 0.0) -> None:
        self.parts, self.seconds = parts, seconds
        self.filled: list[int] = []

    def new_arrays(self):
        return {"input": np.full((BATCH, 2), -1.0, np.float32)}

    def fill(self, feed, number, part):
        time.sleep(self.seconds)
        feed["input"][part :: self.parts] = number
        self.filled.append(number)


class Late(Session):
    """A session that reads its input later in its own thread, like a GPU; outputs lie in its slot."""

    def __init__(self, slots: int, seconds: float = 0.002) -> None:
        self.slots, self.seconds = slots, seconds
        self.queue = ThreadPoolExecutor(1)
        self.bound: list[np.ndarray | None] = [None] * slots
        self.places = [np.zeros((BATCH, 2), np.float32) for _ in range(slots)]
        self.running: list[Future[None] | None] = [None] * slots
        self.staged = 0

    def stage(self, feeds):
        self.staged += 1
        return feeds

    def bind(self, feeds, slot=0):
        self.bound[slot] = feeds["input"]

    def run(self, slot=0):
        self.running[slot] = self.queue.submit(self._compute, slot)

    def _compute(self, slot):
        time.sleep(self.seconds)
        self.places[slot][:] = 10 * self.bound[slot]

    def wait(self, slot=0):
        self.running[slot].result()

    def fetch(self, slot=0):
        return {"output": self.places[slot]}


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Late]:
    late = Late(request.param)
    yield late
    late.queue.shutdown()


def first(number: int, fetched: dict[str, np.ndarray]) -> tuple[int, float]:
    time.sleep(0.001)
    assert (fetched["output"] == fetched["output"][0, 0]).all()
    return number, float(fetched["output"][0, 0])


def nothing(number: int, fetched: dict[str, np.ndarray]) -> None:
    pass


@pytest.mark.parametrize("session", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_batches_run_once_in_order(session: Late, small: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.worker.evaluation.evaluate.COPIED_OUTPUT_B", 1 << 20 if small else 0)
    kept: list[float] = []
    result = Pipeline(session, Counting(parts=2), helpers=3).run(
        count, lambda number, fetched: kept.append(float(fetched["output"][0, 0])), first
    )
    assert result.results == [(number, 10.0 * number) for number in range(count)]
    assert kept == [10.0 * number for number in range(count)]
    assert session.staged == session.slots + BATCHES_AHEAD, "buffers are made once, where the session wants them"


class Passing(Late):
    """A session that returns its input's own memory as output."""

    def fetch(self, slot=0):
        return {"output": self.bound[slot]}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("slots", [1, 3])
def test_an_output_may_be_the_input_itself(slots: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.worker.evaluation.evaluate.COPIED_OUTPUT_B", 1 << 20 if small else 0)
    session, kept = Passing(slots, seconds=0), list[float]()

    def keep(number: int, fetched: dict[str, np.ndarray]) -> None:
        time.sleep(0.002)  # time for a prematurely released buffer to be refilled
        kept.append(float(fetched["output"].mean()))

    result = Pipeline(session, Counting()).run(10, keep, first)
    session.queue.shutdown()
    assert kept == [*range(10)] and result.results == [(number, float(number)) for number in range(10)]


@pytest.mark.parametrize("session", [2], indirect=True)
def test_buffers_serve_a_second_run(session: Late) -> None:
    source = Counting()
    both = Pipeline(session, source)
    assert both.run(5, nothing, first).results == both.run(5, nothing, first).results
    assert session.staged == session.slots + BATCHES_AHEAD
    assert source.filled == [*range(5), *range(5)]


@pytest.mark.parametrize("session", [1, 3], indirect=True)
def test_warm_up_fills_the_pipeline_and_is_not_counted(session: Late) -> None:
    class SlowStart(Counting):
        def fill(self, feed, number, part):
            time.sleep(0.1 if len(self.filled) < 2 else 0)
            super().fill(feed, number, part)

    kept: list[int] = []
    source = SlowStart()
    begin = time.perf_counter()
    result = Pipeline(session, source).run(6, lambda number, fetched: kept.append(number), first, warm_up=4)
    took = time.perf_counter() - begin
    assert result.seconds > 0.01 and took - result.seconds > 0.19, "six batches of 2 ms, without the two slow ones"
    assert source.filled == [*range(4), *range(6)]
    assert kept == [*range(6)]
    assert result.results == [(number, 10.0 * number) for number in range(6)]


@pytest.mark.parametrize("session", [2], indirect=True)
def test_reading_running_and_ranking_overlap(session: Late) -> None:
    meeting = threading.Barrier(3)  # in sequence, the three would never meet

    class Reading(Counting):
        def fill(self, feed, number, part):
            if number == 9:
                meeting.wait(600)
            super().fill(feed, number, part)

    def compute(slot: int) -> None:
        if (session.bound[slot] == 8).all():
            meeting.wait(600)
        Late._compute(session, slot)

    def rank(number: int, fetched: dict[str, np.ndarray]) -> int:
        if number == 7:
            meeting.wait(600)
        return number

    session._compute = compute  # type: ignore[method-assign]
    assert Pipeline(session, Reading(), helpers=2).run(20, nothing, rank).results == [*range(20)]


@pytest.mark.parametrize("session", [1], indirect=True)
def test_stages_do_not_overlap(session: Late) -> None:
    stages = Pipeline(session, Counting(seconds=0.004)).stages(first, 0.05)
    assert list(stages) == ["preprocess", "inference", "postprocess"]
    assert len({len(samples) for samples in stages.values()}) == 1 and len(stages["inference"]) >= 3
    for name, least in (("preprocess", 0.004), ("inference", 0.002), ("postprocess", 0.001)):
        assert stages[name].min() >= least


@pytest.mark.parametrize("session", [3], indirect=True)
def test_an_error_in_any_thread_ends_the_run(session: Late) -> None:
    def broken(number: int, fetched: dict[str, np.ndarray]) -> None:
        raise ValueError("no ranks")

    with pytest.raises(ValueError, match="no ranks"):
        Pipeline(session, Counting()).run(30, nothing, broken)
    source = Counting()
    source.fill = lambda feed, number, part: 1 // (3 - number)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        Pipeline(session, source).run(30, nothing, first)
    assert threading.active_count() < 20


class Threaded(Linear):
    """Linear with threads; `can_limit` makes them limitable."""

    def __init__(self, can_limit: bool) -> None:
        super().__init__(2)
        self.can_limit, self.limits = can_limit, []

    def limit_threads(self, count: int) -> bool:
        self.limits.append(count)
        return self.can_limit


@pytest.mark.parametrize(
    ("busy", "can_limit", "limits"), [(0.1, True, []), (1.3, True, [2, 4]), (9.0, True, [1, 4]), (1.3, False, [2] * 4)]
)
def test_under_cpu_contention_threads_are_limited_and_no_rate_is_reported(
    data: DataSpec, monkeypatch: pytest.MonkeyPatch, busy: float, can_limit: bool, limits: list[int]
) -> None:
    monkeypatch.setattr("dyno.worker.evaluation.evaluate.CHECK_INTERVAL_S", 0.0)
    session = Threaded(can_limit)
    found = evaluate(session, replace(trial(data, 2), runtime=Runtime(threads=4)), count_busy=lambda: busy)
    assert session.limits == limits
    is_limited = can_limit and len(limits) > 0
    assert is_limited == ("pipeline" not in {each.tag for each in found.list_measurements()}) == (found.facts() is None)
    assert found.warnings == is_limited * [
        f"the pipeline's images/s were not measured: other programs kept {busy:.1f} processors busy, so the images "
        "were answered with fewer threads"
    ]
    assert len(found.arrays["sample"]) == 7
