"""Recording and replay of graphs, and the choice of the profiled context, without a GPU; tests/gpu has the rest."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.tensor_rt import layers, run
from dyno.worker.backends.tensor_rt.run import TensorRTSession
from dyno.worker.spec import Tensor, Unavailable


class Recorded:
    """A CUDA graph that records the calls to it."""

    def __init__(self, stream: Any, work: Callable[[], None], done: list[str]) -> None:
        done.append("record")
        work()
        self.done = done

    def launch(self) -> None:
        self.done.append("replay")

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Any, list[str]]]:
    def make(graphed: bool) -> tuple[Any, list[str]]:
        done: list[str] = []
        monkeypatch.setattr(run, "CudaGraph", lambda stream, work: Recorded(stream, work, done))
        made: Any = TensorRTSession.__new__(TensorRTSession)
        made._graphed, made._graphs, made._runs, made._results, made._compute = graphed, [None], [0], [{}], None
        made._launch_slot = lambda slot: done.append("launch")
        return made, done

    return make


def test_the_second_run_of_a_shape_is_captured_and_later_ones_replayed(session: Any) -> None:
    made, done = session(True)
    for _ in range(4):
        made.enqueue(0)
    assert done == ["launch", "record", "launch", "replay", "replay", "replay"]
    made._drop_graph(0)
    made.enqueue(0)
    assert done[6:] == ["close", "launch"], "another shape begins anew"


def test_without_graphs_every_run_is_launched(session: Any) -> None:
    made, done = session(False)
    for _ in range(3):
        made.enqueue(0)
    assert done == ["launch"] * 3


class Context:
    """An execution context that reports two layers per run."""

    def __init__(self, shared: bool = True) -> None:
        self.profiler: Any = None
        self.nvtx_verbosity = "detailed"
        self.shared, self.shapes, self.addresses = shared, dict[str, Any](), dict[str, int]()
        self.runs = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return self.shared

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.runs += 1
        if self.profiler:
            self.profiler.report_layer_time("/conv/Conv + /relu/Relu", 0.2)
            self.profiler.report_layer_time("Reformatting CopyNode for Output Tensor 0 to y", 0.1)
        return True


class Library:
    """The parts of TensorRT's module that a profile needs."""

    __name__, __version__ = "tensorrt", "8.6.1"
    LayerInformationFormat = SimpleNamespace(JSON="json")
    ProfilingVerbosity = SimpleNamespace(LAYER_NAMES_ONLY="names")

    class IProfiler:
        def __init__(self) -> None:
            pass


class Engine:
    """An engine of two layers that creates the given context next."""

    def __init__(self, context: Context | None) -> None:
        self.create_execution_context = lambda: context
        kinds = (("/conv/Conv + /relu/Relu", "CaskConvolution", "Int8"),
                 ("Reformatting CopyNode for Output Tensor 0 to y", "Reformat", "Int8"))  # fmt: skip
        told = [{"Name": name, "LayerType": kind, "Inputs": [{"Name": "a", "Dimensions": [1], "Format/Datatype": form}],
                 "TacticName": "sm80_xmma"} for name, kind, form in kinds]  # fmt: skip
        information = json.dumps({"Layers": told})
        self.create_engine_inspector = lambda: SimpleNamespace(get_engine_information=lambda _: information)


def profiled(context: Context | None, dims: tuple[Any, ...] = (1, 3)) -> tuple[Any, Context]:
    """Return a session of that engine, and its first slot's context."""
    made: Any = TensorRTSession.__new__(TensorRTSession)
    own = Context()
    made._trt, made._engine, made._contexts, made.stream, made._profile = Library(), Engine(context), [own], 0, 0
    made.inputs, made.outputs = (Tensor("x", "float32", dims),), (Tensor("y", "float32", (1, 2)),)
    made._shapes = {"x": (1, 3)}
    made._slots = [SimpleNamespace(addresses={"x": 16, "y": 32})]
    made.device = SimpleNamespace(synchronize=lambda: None)
    return made, own


def test_profiling_uses_its_own_context() -> None:
    made, own = profiled(context := Context())
    found = made.profile(5)
    assert own.runs == 0 and own.profiler is None, "the first slot's is as it was"
    assert context.runs == 5 + layers.DISCARDED_RUNS
    assert (context.shapes, context.addresses) == ({"x": (1, 3)}, {"x": 16, "y": 32})
    assert found.layers == pytest.approx(np.tile([0.2e-3, 0.1e-3], (5, 1))) and found.run_seconds.shape == (5,)
    conv, move = found.graph.layers
    assert (found.graph.library, conv.computes_in, conv.tactic) == ("TensorRT 8.6.1", "int8", "sm80_xmma")
    assert conv.nodes == ("/conv/Conv", "/relu/Relu") and move.moves and not move.nodes


@pytest.mark.parametrize("context", [None, Context(shared=False)], ids=["no room", "profile not shared"])
def test_profiling_without_a_spare_context_uses_the_first_slot(context: Context | None) -> None:
    made, own = profiled(context, ("batch", 3))
    made.profile(5)
    assert own.runs == 5 + layers.DISCARDED_RUNS


def test_missing_layer_times_are_reported_as_unavailable() -> None:
    context = Context()
    context.execute_async_v3 = lambda stream: True  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"TensorRT 8\.6\.1 reported no layer's time"):
        profiled(context)[0].profile(5)


def test_hardware_counters_cover_a_second_run_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = profiled(context := Context())
    runs: list[int] = []

    @contextmanager
    def noted() -> Iterator[None]:
        runs.append(context.runs)
        yield
        runs.append(context.runs)

    monkeypatch.setattr(run, "profiler_on", noted)
    made.run_for_counters()
    assert runs == [1, 2] and own.runs == 0
    assert context.nvtx_verbosity == "names", "ncu doesn't escape the quotes of JSON"


def test_tensors_follow_the_order_of_the_artifact_record(monkeypatch: pytest.MonkeyPatch) -> None:
    x, boxes, masks = (Tensor(name, "float32", (8, n)) for name, n in (("x", 3), ("output", 39), ("output_1", 32)))
    monkeypatch.setattr(run, "list_tensors", lambda trt, engine: ((x,), (masks, boxes)))
    made, _ = profiled(None)
    assert made._check_tensors(SimpleNamespace(inputs=(x,), outputs=(boxes, masks))) == (x,)
    assert made.outputs == (boxes, masks)
