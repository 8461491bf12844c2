"""Sessions: copies, additions of a GPU's sessions, profiles of ONNX Runtime, and deliberate slow-downs."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dyno.worker.backend import Session
from dyno.worker.backends.fake import FakeSession
from dyno.worker.facts.engine import EngineFacts
from dyno.worker.facts.job import Layer
from dyno.worker.inputs.input_data import read_normalisation
from dyno.worker.jobs import run_trial
from dyno.worker.layers.graph import list_kernels
from dyno.worker.registry import find
from dyno.worker.sessions import gpu
from dyno.worker.sessions.gpu import DEFAULT_SLOTS, slots_of
from dyno.worker.sessions.onnx_runtime_session import CudaSession, Profile, by_run, events_in
from dyno.worker.sessions.torch_support import compiler_errors, is_quantised
from dyno.worker.spec import INFERENCE_PARTS, Dims, ModelSpec, Preprocess, Runtime, Trial, Unavailable


def trial(**options: Any) -> Trial:
    return Trial(ModelSpec("net", "fake:net"), "tensorrt", "fp16", Dims(1, 8, 8), options)


def test_slots_have_a_default_and_an_option() -> None:
    assert slots_of(trial()) == DEFAULT_SLOTS
    assert slots_of(trial(slots=1)) == 1


@pytest.mark.parametrize(("nodes", "note"), [(0, ()), (3, ("3 of 9 nodes ran on the CPU, with copies around them",))])
def test_nodes_on_the_cpu_are_a_note_of_onnx_runtime_on_a_gpu(nodes: int, note: tuple[str, ...]) -> None:
    known = EngineFacts(layers=9, notes=("a note",), nodes_by_provider={"CPUExecutionProvider": nodes})
    session = SimpleNamespace(_file=SimpleNamespace(facts=lambda *_: known), _providers=[("cuda", {"a": 1})], slots=2)
    facts = CudaSession.facts(cast("Any", session))
    assert facts.notes == ("a note", *note) and facts.options == {"slots": 2, "a": 1}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    gpu.load_driver.cache_clear()
    yield
    gpu.load_driver.cache_clear()


class Driver:
    """The driver API as needed to find a GPU."""

    def __init__(self, error: int = 0, count: int = 1) -> None:
        self.error, self.count = error, count

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802
        return (self.error,)

    def cuGetErrorName(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"CUDA_ERROR_NO_DEVICE"

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"no CUDA-capable device is detected"

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.count


def installed(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


def test_missing_cuda_bindings_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(Unavailable, match="pip install cuda-bindings"):
        gpu.load_driver()


def test_a_driver_without_a_gpu_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver(error=100))
    with pytest.raises(Unavailable, match="CUDA_ERROR_NO_DEVICE: no CUDA-capable device"):
        gpu.load_driver()


def test_a_gpu_index_beyond_the_machine_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver(count=1))
    with pytest.raises(Unavailable, match=r"there is no cuda:1: this machine has 1 GPU$"):
        gpu.Device("cuda:1")


def test_cuda_errors_name_the_call_and_out_of_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver())

    def cuMemAlloc(code: int) -> tuple[int]:  # noqa: N802
        return (code,)

    with pytest.raises(MemoryError, match=r"the GPU's memory ran out \(cuMemAlloc"):
        gpu.call(cuMemAlloc, gpu.OUT_OF_MEMORY)
    with pytest.raises(gpu.CudaError, match="cuMemAlloc: CUDA_ERROR_NO_DEVICE"):
        gpu.call(cuMemAlloc, 1)


def test_the_profiler_is_stopped_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    driver: Any = Driver()
    driver.cuProfilerStart = lambda: done.append("start") or (0,)  # type: ignore[func-returns-value]
    driver.cuProfilerStop = lambda: done.append("stop") or (0,)  # type: ignore[func-returns-value]
    installed(monkeypatch, driver)
    with suppress(ZeroDivisionError), gpu.profiler_on():
        done.append(f"run {1 // 0}")
    assert done == ["start", "stop"]


class Clock:
    """A clock in nanoseconds, advanced by 10 per reading and by each run."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        self.at += 10
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(run_trial, "now", made)
    return made


class Timed(FakeSession):
    """A session with runs of 10 µs, half of it in `wait` as for queued work."""

    clock: Clock

    def run(self, slot: int = 0) -> None:
        """See `Session.run`."""
        self.clock.at += 5000

    def wait(self, slot: int = 0) -> None:
        """See `Session.wait`."""
        self.clock.at += 5000


@pytest.mark.parametrize("stream", [None, "a stream"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_each_run_is_slowed_by_the_given_share(fake_trial: Any, clock: Clock, stream: Any, share: float) -> None:
    inner = Timed(fake_trial())
    inner.clock, inner.stream = clock, stream
    session = run_trial.SlowedSession(inner, share)
    for _ in range(2):  # on a stream the delay is the previous run's
        begin = clock.at
        session.run()
        session.wait()
    assert (clock.at - begin) / 10_000 == pytest.approx(1 + share, abs=0.01)


def test_a_slowed_session_otherwise_behaves_like_the_original(fake_trial: Any) -> None:
    trial: Trial = fake_trial()
    inner = FakeSession(trial)
    session = run_trial.SlowedSession(inner, 0.1)
    (tensor,) = session.inputs
    feeds = session.stage({tensor.name: np.ones((2, 1, 4, 4), np.float32)})
    session.bind(feeds)
    begin = time.perf_counter()
    session.run()
    session.wait()
    assert time.perf_counter() - begin >= 1.1 * inner.latency_s
    assert np.array_equal(session.fetch()["output"], inner.fetch()["output"])
    assert session.facts() == inner.facts()
    assert (session.outputs, session.slots, session.batches, session.parts(feeds)) == (inner.outputs, 1, None, {})
    assert session.device_memory() == 0
    session.close()


SHAPE = (4, 1, 64, 64)


def load(precision: str, **options: Any) -> Session:
    model = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1)
    runtime = Runtime(device="cuda:0", threads=2)
    trial = Trial(model, "pytorch", precision, Dims(4, 64, 64), options=options, runtime=runtime)
    return find("pytorch").load(trial, None)


def images(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def once(session: Session, feed: np.ndarray, slot: int = 0) -> np.ndarray:
    session.bind({"input": feed}, slot)
    session.run(slot)
    session.wait(slot)
    return session.fetch(slot)["output"].copy()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU")
@pytest.mark.parametrize(("precision", "channels_last"), [("fp32", False), ("fp16", False), ("fp16", True)])
def test_staged_and_plain_arrays_give_equal_outputs_in_every_slot(precision: str, channels_last: bool) -> None:
    session = load(precision, channels_last=channels_last)
    feeds = [images(i) for i in range(session.slots)]
    want = [once(session, feed) for feed in feeds]
    staged = [session.stage({"input": feed}) for feed in feeds]
    for slot, feed in enumerate(staged):
        session.bind(feed, slot)
        session.run(slot)
    for slot in range(session.slots):
        session.wait(slot)
        np.testing.assert_allclose(session.fetch(slot)["output"], want[slot], 1e-3, 1e-3 * np.abs(want[slot]).max())
    assert not np.allclose(want[0], want[1], 1e-2)
    backwards = staged[0]["input"][::-1]  # shares the staged memory in reverse order
    np.testing.assert_allclose(once(session, backwards)[::-1], want[0], 1e-2, 1e-2 * np.abs(want[0]).max())
    session.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU")
def test_pixels_are_transferred_as_uint8() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    session, usual = load("fp16", input="uint8"), load("fp16")
    staged = session.stage({"input": pixels})["input"]
    assert staged.dtype == np.uint8
    mean, std = read_normalisation(Preprocess(), SHAPE[1])
    want = once(usual, (pixels.astype(np.float32) / 255 - mean) / std)
    for feed in (staged, pixels):
        np.testing.assert_allclose(once(session, feed), want, 1e-2, 1e-2 * np.abs(want).max())
    for each in (session, usual):
        each.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU")
def test_the_last_bound_feed_is_run() -> None:
    session = load("fp32")
    want = once(session, images(1))
    for _ in range(50):
        session.bind({"input": images(0)})
        np.testing.assert_allclose(once(session, images(1)), want, 1e-4, 1e-4 * np.abs(want).max())
    session.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU")
def test_the_parts_of_an_inference_are_timed_separately() -> None:
    session = load("fp16")
    staged = session.stage({"input": images(0)})
    once(session, staged["input"])
    found = session.parts(staged)
    assert tuple(found) == INFERENCE_PARTS
    assert all(seconds > 0 for seconds in found.values())
    session.close()


def event(name: str, at: int, dur: int, index: str = "", cat: str = "Node") -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": at, "dur": dur, "args": {"node_index": index}}


def test_kernels_are_separated_by_run_and_node() -> None:
    # The file isn't sorted, two nodes share a name, and a kernel runs as the session begins, before the first run.
    events = [
        event("c_kernel_time", 5, 9, "0"),
        event("c_kernel_time", 31, 3, "0"), event("c_kernel_time", 35, 4, "1"),
        event("model_run", 30, 10, cat="Session"),
        event("c_kernel_time", 11, 1, "0"), event("c_fence_before", 12, 7, "0"), event("c_kernel_time", 15, 2, "1"),
        event("model_run", 10, 10, cat="Session"),
    ]  # fmt: skip
    first, second = by_run(events)
    zero, one = ("c_kernel_time", "0"), ("c_kernel_time", "1")
    assert first == pytest.approx({zero: 1e-6, one: 2e-6}) and second == pytest.approx({zero: 3e-6, one: 4e-6})
    layers = [Layer(name="c"), Layer(name="idle"), Layer(name="c")]
    assert list_kernels(layers, [one, zero]) == [zero, None, one]
    for each in events:
        each["args"]["op_name"] = {"0": "Relu", "1": "Add"}.get(each["args"]["node_index"], "")
    told = Profile(events, "fp32").seconds
    assert told == pytest.approx({"Relu": 3e-6, "Add": 4e-6}), "of all runs but the first"


def test_nodes_inside_a_loop_are_not_nodes_of_the_outer_graph() -> None:
    loop, inside = event("Loop_2_kernel_time", 20, 9, "2"), event("Add_1_kernel_time", 22, 3, "1")
    loop["args"]["op_name"] = "Loop"
    events = [event("model_run", 10, 30, cat="Session"), event("Add_1_kernel_time", 12, 8, "1"), inside, loop,
              event("Add_3_kernel_time", 29, 0, "3")]  # fmt: skip
    assert by_run(events) == [
        {("Add_1_kernel_time", "1"): 8e-6, ("Loop_2_kernel_time", "2"): 9e-6, ("Add_3_kernel_time", "3"): 0.0}
    ]


def test_unescaped_names_in_profiles_are_read() -> None:
    """It escapes nothing, so a quote in a node's name ends a JSON string."""
    text = '[{"cat" : "Node","dur" :1,"ts" :2,"name" :"a"b \\n c,\t{d}_kernel_time","args" : {"op_name" : "Relu"}}]'
    (found,) = events_in(text)
    assert found["name"] == 'a"b \\n c,\t{d}_kernel_time' and found["args"] == {"op_name": "Relu"}


def test_cpp_compiler_errors_are_quoted() -> None:
    class Failed(RuntimeError):
        inner_exception = RuntimeError("C++ compile error\n\nCommand:\ng++ x.cpp")

    with pytest.raises(RuntimeError, match=r"RuntimeError: C\+\+ compile error: 'a' is no class$"), compiler_errors():
        raise Failed("Command:\ng++ x.cpp\nOutput:\nx.cpp:7:1: error: 'a' is no class\nx.cpp:9:1: error: other\n")


def test_layers_quantised_by_pytorch_are_recognised() -> None:
    kinds = (torch.nn.Linear, torch.nn.LSTM, torch.nn.GRUCell)
    net = torch.nn.Sequential(*(kind(4, 4) for kind in kinds))
    packed = torch.ao.quantization.quantize_dynamic(net, {*kinds}, torch.qint8)
    assert [*map(is_quantised, packed)] == [True] * 3 and not any(map(is_quantised, net))
