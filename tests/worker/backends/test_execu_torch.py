"""ExecuTorch: refusals here, and programs that are made and run in a Python that has it."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.jobs.launcher import launch
from dyno.worker import registry
from dyno.worker.backends import execu_torch
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Option, Runtime, Trial, Unavailable, UserError

EXECUTORCH = registry.find("executorch")
PYTHON = os.environ.get("DYNO_TEST_EXECUTORCH", "")
needs_it = pytest.mark.skipif(not PYTHON, reason="DYNO_TEST_EXECUTORCH names no Python with executorch")

NET = """
from collections import OrderedDict

import torch
from torch import nn

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(OrderedDict({"conv-0": nn.Conv2d(3, 8, 3), "norm-0": nn.BatchNorm2d(8)}))
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.token = nn.Parameter(torch.full((2, 1, 8), 3.0))
        self.head = nn.Linear(80, 10, bias=False)
        self.bias = nn.ParameterList([torch.ones(4), torch.arange(6.0)])
    def forward(self, x):
        tokens = self.pool(self.stem(x)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token, tokens], 1).flatten(1)
        return nn.functional.linear(tokens, self.head.weight, torch.cat([*self.bias])).cumsum(1)

class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        y = self.first(x[:, 0])
        return nn.functional.linear(nn.functional.linear(y, y[0]), self.last.weight, y[0, 0])

def net(): return Sums()
def computed(): return Computed()
"""


def trial_of(source: str, precision: str = "fp32", own: str = "", **options: Option) -> Trial:
    return Trial(ModelSpec("net", source, precision=own), "executorch", precision, Dims(2, 8, 8), options)


def test_unsupported_trials_are_refused_in_one_line() -> None:
    assert EXECUTORCH.refuse(trial_of("m:net")) == ""
    assert "needs real calibration images" in EXECUTORCH.refuse(trial_of("m:net", "int8"))
    assert EXECUTORCH.refuse(trial_of("m:net", samples=4)).startswith("samples is for a model that Dyno quantises")
    assert EXECUTORCH.refuse(trial_of("file:net.pte", "int8", "fp32")).endswith("in fp32; int8 needs the model")
    assert EXECUTORCH.refuse(trial_of("file:net.pte", "int8", "int8")) == ""


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(Unavailable, match=r"executorch can't be imported .*--python executorch=PATH"):
        execu_torch._import_library()


def test_operators_without_a_kernel_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        raise RuntimeError("Failed to load method forward, error: 0x:14")

    operators = [SimpleNamespace(name=f"aten::{name}", overload="out") for name in ("relu", "_adaptive_avg_pool2d")]
    plan = SimpleNamespace(name="forward", operators=operators)
    library = SimpleNamespace(
        Runtime=SimpleNamespace(get=lambda: SimpleNamespace(load_program=refuse)),
        _get_operator_names=lambda: ["aten::relu.out"],
        deserialize_pte_binary=lambda data: SimpleNamespace(execution_plan=[plan]),
    )
    monkeypatch.setattr(execu_torch, "_import_library", lambda module="": library)
    (tmp_path / "net.pte").write_bytes(b"")
    with pytest.raises(UserError, match=r"has no kernel for aten::_adaptive_avg_pool2d\.out, which is in .*net\.pte"):
        execu_torch.open_program(str(tmp_path / "net.pte"))


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    (tmp_path / "nets.py").write_text(NET)
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (8, 3, 8, 8), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(8, np.int64))
    for split in ("calibration", "test"):
        np.save(tmp_path / f"{split}.npy", np.arange(8))
    return DataSpec("noise", str(tmp_path), "1")


@needs_it
@pytest.mark.slow
def test_modules_and_programs_run_as_requested(call: Any, data: DataSpec, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from dyno.worker.nets import models

    pixels, runtime = np.load(tmp_path / "images.npy"), Runtime("main", PYTHON, threads=1)
    for precision, kind, off in (("fp32", "float32", 1e-5), ("int8", "int8", 0.1)):
        trial = replace(trial_of(f"{tmp_path}/nets.py:net", precision), data=data, runtime=runtime)
        made = launch(Job("make", runtime, recipe=EXECUTORCH.recipe(trial)), tmp_path / f"make-{precision}", 600)
        assert made.artifact is not None, made.reason
        assert made.artifact.made_by.warnings[-1].endswith("portable kernels, not on XNNPACK: 1 aten::cumsum")
        folder = tmp_path / f"run-{precision}"
        ran = launch(Job("run", runtime, trial, artifact=made.artifact), folder, 600)
        assert ran.status == "ok", ran.reason
        assert (ran.facts.layers_by_type, ran.facts.threads) == ({kind: 2}, 1) and ran.facts.precision_truth.ok
        x = (pixels / 255 - [[[0.485]], [[0.456]], [[0.406]]]) / [[[0.229]], [[0.224]], [[0.225]]]
        with torch.inference_mode():
            module, pairs = models.load(trial.model, trial.dims), torch.from_numpy(x.astype(np.float32)).split(2)
            expected = np.concatenate([module(pair).numpy() for pair in pairs])
        found = np.load(folder / "outputs.npz")["output:output"]
        assert np.abs(found - expected[: len(found)]).max() < off * np.abs(expected).max()
        (tmp_path / f"{precision}.pte").write_bytes(Path(made.artifact.path).read_bytes())
        words = ("--python", f"executorch={PYTHON}", "--seconds", 0.05, "--warmup", 0.02, "--quick")
        code, out, err = call("run", f"{precision}.pte", *words)
        assert code == 0 and "ran in the requested type" in out, err
    (tmp_path / "bad.pte").write_bytes(b"no program")
    code, _, err = call("run", "bad.pte", "--python", f"executorch={PYTHON}")
    assert code == 2 and "bad.pte can't be read by ExecuTorch" in err and err.count("\n") == 1


@needs_it
@pytest.mark.slow
def test_layers_with_computed_weights_or_biases_stay_in_float(data: DataSpec, tmp_path: Path) -> None:
    runtime, found = Runtime("main", PYTHON, threads=1), {}
    for precision in ("fp32", "int8"):
        trial = trial_of(f"{tmp_path}/nets.py:computed", precision)
        trial = replace(trial, dims=Dims(1, 8, 8), data=data, runtime=runtime)
        made = launch(Job("make", runtime, recipe=EXECUTORCH.recipe(trial)), tmp_path / f"make-{precision}", 600)
        assert made.artifact is not None, made.reason
        ran = launch(Job("run", runtime, trial, artifact=made.artifact), tmp_path / f"run-{precision}", 600)
        assert ran.status == "ok", ran.reason
        found[precision] = np.load(tmp_path / f"run-{precision}" / "outputs.npz")["output:output"]
    assert ran.facts.layers_by_type == {"int8": 1, "float32": 2}
    assert 0 < np.abs(found["int8"] - found["fp32"]).max() < 0.1 * np.abs(found["fp32"]).max()
