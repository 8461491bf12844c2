"""`pytorch@graph=true`: refused on a CPU; a replay is checked on other inputs before timing."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker import measure
from dyno.worker.backends import pytorch
from dyno.worker.registry import find
from dyno.worker.sessions.gpu import Stopwatch
from dyno.worker.spec import Dims, ModelSpec, Plan, Runtime, Trial, UserError
from refusals import refuses

torch = pytest.importorskip("torch")
NETS = """
import torch
from torch import nn

class Writes(nn.Module):
    def forward(self, x): return x.add_(1).mean((2, 3))

class Looks(nn.Module):
    def forward(self, x): return x * 2 if x.sum().item() > 0 else x

def plain(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
def writes(): return Writes()
def looks(): return Looks()
"""
OPTIONS = {"channels_last": False, "cudnn_benchmark": False, "graph": True}


@pytest.fixture
def trial(tmp_path: Path) -> Any:
    (tmp_path / "nets.py").write_text(NETS)

    def asked(net: str = "plain", device: str = "cpu") -> Trial:
        model = ModelSpec(net, f"{tmp_path}/nets.py:{net}")
        runtime = Runtime(device=device, threads=1)
        return Trial(model, "pytorch", "fp32", Dims(2, 8, 8), {"graph": True}, runtime=runtime)

    return asked


class Recorded:
    """A stand-in for a CUDA graph: with `follows` a replay computes again into the recorded tensors."""

    def __init__(self, call: Any, follows: bool) -> None:
        self.call, self.follows = call, follows
        self.result = call()

    def replay(self) -> None:
        if self.follows:
            self.result.copy_(self.call())


def recorded(monkeypatch: pytest.MonkeyPatch, follows: bool) -> None:
    def record(session: Any, slot: int) -> tuple[Any, Any]:
        graph = Recorded(lambda: session._eager(*session._bound[slot].values()), follows)
        return graph, graph.result

    monkeypatch.setattr(pytorch.GraphSession, "_record", record)


def test_cuda_graphs_are_refused_on_a_cpu(trial: Any) -> None:
    assert find("pytorch").refuse(trial()) == "graph=true is for NVIDIA GPUs: a CPU has no CUDA graphs; omit it"
    assert find("pytorch").refuse(replace(trial(), options={"graph": False})) == ""
    assert find("pytorch").refuse(trial(device="cuda:0")) == ""
    refuses("a CPU has no CUDA graphs", find("pytorch").load, trial(), None)
    assert "graph" not in find("compile").options, "its modes are graphs already"


@pytest.mark.parametrize("net", ["plain", "writes"])
def test_a_graph_replay_uses_the_current_inputs(net: str, trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, follows=True)
    session = pytorch.GraphSession(trial(net), OPTIONS)
    eager: Any = find("pytorch").load(replace(trial(net), options={}), None)
    for seed in (5, 6):
        x = np.random.default_rng(seed).standard_normal((2, 3, 8, 8), np.float32)
        for each in (session, eager):
            each.bind({"input": x})
            each.run()
            each.wait()
        np.testing.assert_allclose(session.fetch()["output"], eager.fetch()["output"], rtol=1e-5, atol=1e-6)


def test_a_replay_that_ignores_its_inputs_is_refused(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, follows=False)
    with pytest.raises(UserError, match="plain as a CUDA graph gives other outputs for other inputs; omit graph=true"):
        pytorch.GraphSession(trial(), OPTIONS)


def test_moved_input_buffers_are_refused(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, follows=True)
    session = pytorch.GraphSession(trial(), OPTIONS)
    session._bound[0] = {name: tensor.clone() for name, tensor in session._bound[0].items()}
    refuses("the inputs of a CUDA graph moved", session.run)


@pytest.mark.gpu
@pytest.mark.parametrize("net", ["plain", "writes"])
def test_on_a_gpu_a_cuda_graph_matches_eager_outputs(net: str, trial: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")
    asked = trial(net, "cuda:0")
    session: Any = find("pytorch").load(asked, None)
    eager: Any = find("pytorch").load(replace(asked, options={}), None)
    for slot in range(session.slots):
        x = np.random.default_rng(slot).standard_normal((2, 3, 8, 8), np.float32)
        for each in (session, eager):
            each.bind({"input": x}, slot)
            each.run(slot)
            each.wait(slot)
        np.testing.assert_allclose(session.fetch(slot)["output"], eager.fetch(slot)["output"], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_queued_runs_exclude_launch_time(trial: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")
    session: Any = find("pytorch").load(replace(trial(device="cuda:0"), dims=Dims(16, 224, 224)), None)
    watch, plan = Stopwatch(session.stream), Plan(warmup_s=0.5, seconds=1.0, interval=1e-9)
    feeds = [{"input": np.random.default_rng(0).standard_normal((16, 3, 224, 224), np.float32)}]
    once = measure.make_step(session, "model", feeds, watch)
    measure.warm_up(once, plan)
    alone, queued = measure.measure_latency(once, plan, watch).gpu, measure.measure_queued(session, watch, plan)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.ExternalStream(session.stream)
    session.run()
    begin.record(stream)
    for _ in range(100):
        session.run()
    end.record(stream)
    session.wait()
    in_a_row = begin.elapsed_time(end) / 1e3 / 100
    assert alone is not None and queued is not None
    assert float(np.median(queued)) == pytest.approx(in_a_row, rel=0.05)
    assert np.median(queued) < np.median(alone)


LOAD = """
import sys
from dyno.worker.registry import find
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial, UserError

runtime = Runtime(device=sys.argv[2], threads=1)
try:
    find("pytorch").load(Trial(ModelSpec("looks", sys.argv[1]), "pytorch", "fp32", Dims(2, 8, 8), {"graph": True},
                               runtime=runtime), None)
except UserError as e:
    print(e)
"""


@pytest.mark.gpu
def test_on_a_gpu_value_dependent_modules_are_refused(trial: Any) -> None:
    """Run in a separate process, like every job: after an aborted recording PyTorch draws no more random numbers."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")
    command = [sys.executable, "-c", LOAD, trial("looks").model.source, "cuda:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"looks can't be recorded as a CUDA graph: .*; omit graph=true", done.stdout)
