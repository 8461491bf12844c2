"""Other routes to the ONNX file: one that is faster gets rows of its own, one that isn't is only told of."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dyno.results import trial_result
from dyno.results.notes import FAILED, KEPT, Attempt, attempts
from dyno.runner import search
from dyno.worker.spec import Dims, ModelSpec, Trial

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

Command = Callable[..., "subprocess.CompletedProcess[str]"]
QUICK = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --threads 1 --size 16 --boundaries model".split()
# What a tracer sees has an eighth of the work, and gives the same outputs; or, of `wrong`, others.
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor, self.first, self.last = factor, nn.Linear(768, 512), nn.Linear(512, 4)
        self.work = nn.ModuleList(nn.Linear(512, 512) for _ in range(24))
    def forward(self, x):
        x = torch.softmax(self.first(x.flatten(1)), 1).unsqueeze(1)
        y = x
        for layer in self.work[: 3 if torch.jit.is_tracing() else None]:
            y = torch.softmax(layer(y), 2)
        kept = x + 1e-9 * y
        return self.last(kept * (self.factor if torch.jit.is_tracing() else 1.0)).squeeze(1)

def light(): return Net()
def wrong(): return Net(3.0)
def plain(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("nets") / "nets.py"
    file.write_text(NETS)
    return file


def tried(run: Path) -> Attempt:
    (one,) = attempts(run)
    return one


@pytest.mark.slow
def test_a_faster_route_has_rows_of_its_own_and_is_not_tried_again(nets: Path, dyno: Command, tmp_path: Path) -> None:
    words = ("run", f"{nets}:light", "--backends", "onnxruntime", "--batch", "1,2", "--out", tmp_path, *QUICK)
    done = dyno(*words)
    assert done.returncode == 0, done.stderr
    one = tried(tmp_path)
    assert one.kept is not None and one.kept.route == "torchscript" and one.kept.ratio > 1.5, one
    rows = {(t.variant, t.batch) for t in trial_result.load_run(tmp_path) if t.good}
    usual = {("onnxruntime", 1), ("onnxruntime", 2)}
    assert rows == usual | {("onnxruntime@exporter=torchscript", 1), ("onnxruntime@exporter=torchscript", 2)}
    assert "by the route torchscript ran" in done.stdout
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}
    again = dyno(*words)
    assert again.returncode == 0 and "other routes" not in again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}


@pytest.mark.slow
def test_a_route_with_other_outputs_is_never_kept(nets: Path, dyno: Command, tmp_path: Path) -> None:
    done = dyno("run", f"{nets}:wrong", "--backends", "onnxruntime", "--out", tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr
    one = tried(tmp_path)
    assert one.kept is None
    assert {route.route: route.outcome for route in one.routes}["torchscript"] == FAILED
    assert [t.variant for t in trial_result.load_run(tmp_path)] == ["onnxruntime"]
    assert not any(route.outcome == KEPT for route in one.routes)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("plain",), ("light", "--routes", "usual")])
def test_nothing_is_tried_without_need(nets: Path, dyno: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    name, *options = words
    done = dyno("run", f"{nets}:{name}", *options, "--backends", "onnxruntime", "--out", tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "routes.json").exists() and not (tmp_path / "routes").exists()
    assert [t.variant for t in trial_result.load_run(tmp_path)] == ["onnxruntime"]


@pytest.mark.parametrize(
    ("precision", "beside", "decides"),
    [
        ("fp32", ("int8",), "fp32"),
        ("bf16", ("fp32",), "bf16"),
        ("int8", (), "fp32"),
        ("int8", ("fp32", "fp16"), "fp16"),
        ("fp8", ("tf32",), "tf32"),
    ],
)
def test_the_type_that_decides_a_trial_s_route(precision: str, beside: tuple[str, ...], decides: str) -> None:
    model, dims = ModelSpec("net", "net.py:net"), Dims(1, 8, 8)
    own, *others = (Trial(model, "tensorrt", one, dims) for one in (precision, *beside))
    elsewhere = Trial(model, "onnxruntime", "bf16", dims)
    assert search._choose_float(own, [own, *others, elsewhere]) == decides


def test_a_damaged_note_is_no_note(tmp_path: Path) -> None:
    (tmp_path / "routes.json").write_text(json.dumps({"schema": 2, "attempts": [{"key": 3}]}))
    assert attempts(tmp_path) == ()
