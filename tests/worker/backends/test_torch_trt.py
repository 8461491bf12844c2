"""Torch-TensorRT's refusals need no library; its results and the cost of a call need a GPU.

DYNO_TORCH_TENSORRT_PYTHON names an interpreter that has torch_tensorrt (default: this one), and
DYNO_TORCH_TENSORRT_LIBS its LD_LIBRARY_PATH.
"""

import functools
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # imported before a stand-in for tensorrt exists, as it would look that up

from dyno.worker import main
from dyno.worker.backends import torch_trt
from dyno.worker.backends.torch_trt import left_in_pytorch, list_attributes, list_engines
from dyno.worker.extras import load_library
from dyno.worker.inputs.input_data import read_batches
from dyno.worker.nets import models
from dyno.worker.record import Record, read_record, write_json
from dyno.worker.registry import find
from dyno.worker.spec import (
    DataSpec,
    Dims,
    Job,
    ModelSpec,
    Plan,
    Runtime,
    Tensor,
    Trial,
    Unavailable,
    UserError,
    to_json,
)
from refusals import refuses

PYTHON = os.environ.get("DYNO_TORCH_TENSORRT_PYTHON", sys.executable)
LIBS = {"LD_LIBRARY_PATH": libs} if (libs := os.environ.get("DYNO_TORCH_TENSORRT_LIBS")) else {}
DIGITS = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1)
GPU = Runtime(device="cuda:0", threads=2)
NETS = '''
import torch
from torch import nn

class Mixed(nn.Module):
    """An operator in the middle that TensorRT has no layer for."""
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
    def forward(self, x):
        y = torch.special.erfinv(self.one(x).tanh() * 0.9)
        return self.two(y).relu().mean((2, 3))

def mixed(): return Mixed()
'''


def trial(precision: str = "fp16", model: ModelSpec = DIGITS, batch: int = 2, size: int = 64, **options: Any) -> Trial:
    return Trial(model, "torch_tensorrt", precision, Dims(batch, size, size), options, runtime=GPU)


def test_unsupported_trials_are_refused_with_a_reason() -> None:
    refuse = find("torch_tensorrt").refuse
    assert refuse(trial()) == ""
    assert refuse(trial(ir="dynamo", optimization=5, profile="1:2:4", workspace_mb=512, min_block_size=1)) == ""
    assert "use tensorrt for int8" in refuse(trial("int8"))
    assert "has no bf16 here" in refuse(trial("bf16"))
    assert "can't run on cpu" in refuse(replace(trial(), runtime=Runtime()))
    assert "no PyTorch module in an ONNX file" in refuse(trial(model=replace(DIGITS, source="file:m.onnx")))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"optimization": 3}, "no optimization level; give ir=dynamo"), ({"profile": "4:8:16"}, "batch 2 is outside")],
)
def test_conflicting_options_are_refused_in_one_line(options: dict[str, Any], reason: str) -> None:
    asked = trial(**options)
    said = find("torch_tensorrt").refuse(asked)
    assert reason in said and "\n" not in said
    refuses(re.escape(said), find("torch_tensorrt").load, asked, None)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"ir": "fx"}, "ir=fx: torch_tensorrt's ir must be one of ts, dynamo"),
        ({"ir": "dynamo", "optimization": 6}, "optimization must be a whole number from 0 to 5"),
        ({"profile": "4:2:1"}, "batches MIN:OPT:MAX"),
        ({"profile": "x:1x3x8x8"}, "batches MIN:OPT:MAX"),
        ({"workspace_mb": -1}, "workspace_mb must be a whole number of at least 0"),
        ({"min_block_size": "many"}, "min_block_size must be a whole number of at least 1"),
    ],
)
def test_invalid_option_values_are_refused_before_any_run(options: dict[str, Any], line: str) -> None:
    for step in (find("torch_tensorrt").check_options, lambda given: find("torch_tensorrt").load(trial(**given), None)):
        refuses(re.escape(line), step, options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(UserError, match="unknown option 'channels_last' of torch_tensorrt"):
        find("torch_tensorrt").load(trial(channels_last=True), None)


def test_a_missing_library_or_gpu_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(Unavailable, match=r"is not installed .*; pip install torch-tensorrt.*LD_LIBRARY_PATH"):
        load_library("torch_tensorrt", cure=torch_trt.INSTALL_ADVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="sees no CUDA device"):
        find("torch_tensorrt").probe()


class Library:
    """The front ends of torch_tensorrt with the arguments of 2.2 or of 2.11."""

    __version__ = "0"
    Input: Any = dict

    def __init__(self, new: bool) -> None:
        def ts(module: Any, enabled_precisions: Any = None, truncate_long_and_double: bool = False) -> None: ...
        def dynamo22(module: Any, enabled_precisions: Any = None, truncate_long_and_double: bool = False) -> None: ...
        def dynamo211(
            module: Any, truncate_double: bool = False, use_explicit_typing: bool = True, timing_cache_path: str = ""
        ) -> None: ...

        self.ts = types.SimpleNamespace(compile=ts)
        self.dynamo = types.SimpleNamespace(compile=dynamo211 if new else dynamo22)
        self.asked: dict[str, Any] = {}

    def compile(self, module: Any, **asked: Any) -> Any:
        config = sys.modules["tensorrt"].IBuilderConfig()
        config.profiling_verbosity = "names"
        self.asked = {**asked, "module": module, "verbosity": config.profiling_verbosity}
        return module


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Config:
        def _get(self) -> Any:
            return self.__dict__["verbosity"]

        def _set(self, value: Any) -> None:
            self.__dict__["verbosity"] = value

        profiling_verbosity = property(_get, _set)

    library = types.SimpleNamespace(IBuilderConfig=Config, ProfilingVerbosity=types.SimpleNamespace(DETAILED="all"))
    monkeypatch.setitem(sys.modules, "tensorrt", library)
    return library


def test_each_version_gets_its_own_compile_arguments(
    tensorrt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYNO_TIMING", str(tmp_path))
    module, x = torch.nn.Conv2d(1, 2, 3).eval(), torch.randn(2, 1, 8, 8)
    dynamo = {"ir": "dynamo", "profile": "static", "workspace_mb": 64, "optimization": 2, "min_block_size": 1}

    old = Library(new=False)
    torch_trt.compile_module(old, module, x, "fp32", dynamo)
    assert old.asked["enabled_precisions"] == {torch.float32} and old.asked["disable_tf32"] is True
    assert (old.asked["workspace_size"], old.asked["optimization_level"], old.asked["min_block_size"]) == (
        1 << 26,
        2,
        1,
    )
    assert old.asked["inputs"] == [{"shape": (2, 1, 8, 8), "dtype": torch.float32}]
    assert old.asked["module"] is module and old.asked["verbosity"] == "all"
    config = tensorrt.IBuilderConfig()
    config.profiling_verbosity = "names"
    assert config.profiling_verbosity == "names"  # restored

    new = Library(new=True)
    torch_trt.compile_module(new, module, x, "tf32", {**dynamo, "profile": "1:2:4"})
    assert "enabled_precisions" not in new.asked and new.asked["use_explicit_typing"] is True
    assert new.asked["disable_tf32"] is False and new.asked["timing_cache_path"].startswith(str(tmp_path))
    shapes = {"min_shape": (1, 1, 8, 8), "opt_shape": (2, 1, 8, 8), "max_shape": (4, 1, 8, 8)}
    assert new.asked["inputs"] == [{**shapes, "dtype": torch.float32, "name": "input"}]

    torch_trt.compile_module(new, module, x, "fp32", {"ir": "ts", "profile": "static"})
    torch_trt.compile_module(new, module, x, "fp32", {"ir": "ts", "profile": "1:2:4"})
    (given,) = new.asked["inputs"]
    assert given["min_shape"][0] == 1 and given["name"] == "input", "read before the module is traced"
    assert isinstance(new.asked["module"], torch.jit.ScriptModule)
    assert new.asked["enabled_precisions"] == {torch.float32}
    del new.ts
    refuses(
        "built without its ts route",
        torch_trt.compile_module,
        new,
        module,
        x,
        "fp32",
        {"ir": "ts", "profile": "static"},
    )


@pytest.mark.slow
def test_value_dependent_branches_are_not_traced(tensorrt: Any) -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.mean() > 0.3 else x

    library, options = Library(new=False), {"ir": "ts", "profile": "static"}
    with pytest.raises(UserError, match=r"x\.mean\(\) > 0\.3.*depends on values"):
        torch_trt.compile_module(library, Branches(), torch.zeros(1, 3, 8, 8), "fp32", options)


def test_operators_left_in_pytorch_are_counted_in_every_program_format() -> None:
    module, x = models.load(DIGITS), torch.randn(1, 1, 64, 64)
    scripted = torch.jit.trace(module, x)
    exported = torch.export.export(module, (x,))
    for found in (left_in_pytorch(scripted), left_in_pytorch(exported), left_in_pytorch(exported.module())):
        assert next(n for name, n in found.items() if "conv" in name) == 20
        assert all(name.startswith("aten::") for name in found)
    assert list_engines(scripted) == list_engines(exported) == []
    assert list_attributes(torch.jit.trace(torch.nn.Linear(2, 3), torch.randn(1, 2)), "Tensor") == ["bias", "weight"]


def test_engines_are_found_in_attributes_and_in_the_graph() -> None:
    class Engine:
        def get_engine_layer_info(self) -> str:
            return "{}"

    inside, written = Engine(), Engine()
    part = torch.nn.Identity()
    part.engine = inside  # the attribute of TorchTensorRTModule
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("part", (x,)))
    program = torch.fx.GraphModule({"part": part}, graph)
    assert list_engines(program) == [inside]
    with program.graph.inserting_after(x):  # the form in which 2.2 writes it into an exported program
        program.graph.create_node("call_function", print, ((x,), written))
    exported = types.SimpleNamespace(graph_module=program)
    assert {id(found) for found in list_engines(exported)} == {id(inside), id(written)}
    assert left_in_pytorch(exported) == {}


@functools.lru_cache(maxsize=1)
def _why_not() -> str:
    """Return why the tests on the GPU can't run, or ""."""
    done = subprocess.run(
        [PYTHON, "-c", "import torch_tensorrt"], env={**os.environ, **LIBS}, capture_output=True, text=True
    )
    return (
        "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["torch_tensorrt can't be imported"])[-1]
    )


@pytest.fixture
def there() -> None:
    if why := _why_not():
        pytest.skip(why)


def run(folder: Path, asked: Trial | None, kind: str = "run") -> Record:
    """Run the job in the interpreter that has the library."""
    runtime = replace(GPU, python=PYTHON, env=LIBS)
    plan = Plan(boundaries=("model", "throughput"), warmup_s=0.2, seconds=0.3)
    if asked:
        asked = replace(asked, runtime=runtime, plan=plan, data=DataSpec(count=4))
    folder.mkdir(exist_ok=True)
    write_json(folder / "job.json", to_json(Job(kind, runtime, asked, backend="torch_tensorrt")))
    subprocess.run([PYTHON, main.__file__, str(folder)], env={**os.environ, **LIBS}, check=True, timeout=1200)
    record = read_record(folder)
    assert record is not None
    return record


def worst(folder: Path, asked: Trial) -> float:
    """Return the largest difference from float64, as a share of the largest value."""
    shape = (2, asked.model.channels, asked.dims.height, asked.dims.width)
    tensors = (Tensor("input", "float32", shape),)
    fed = list(read_batches(asked.data, asked.model.preprocess, tensors, asked.dims, 2))
    x = np.concatenate([feed["input"] for feed in fed])
    with torch.inference_mode():
        want = models.load(asked.model).double()(torch.from_numpy(x).double()).numpy()
    with np.load(folder / "outputs.npz") as got:
        return float(np.abs(got["output:output"] - want).max() / np.abs(want).max())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "error", "options"),
    [
        ("fp32", 1e-5, {}),
        ("tf32", 1e-2, {}),
        ("fp16", 2e-2, {"profile": "1:2:4"}),
        ("fp32", 1e-5, {"ir": "dynamo"}),
        ("fp16", 2e-2, {"ir": "dynamo", "optimization": 3}),
    ],
)
def test_both_routes_compute_in_the_requested_type(
    there: None, tmp_path: Path, precision: str, error: float, options: dict[str, Any]
) -> None:
    asked = trial(precision, **options)
    record = run(tmp_path, asked)
    assert (record.status, record.reason) == ("ok", "")
    assert worst(tmp_path, asked) < error
    facts = record.facts
    assert (facts.engines, facts.operators_in_pytorch) == (1, {})
    assert facts.weights_sha256 == models.weights_sha256(models.load(DIGITS))
    assert facts.precision_truth.ok, facts.precision_truth
    assert 0 < facts.engine_s <= facts.call_s < 0.1 and facts.layers > 0
    assert record.value("build") == facts.build_s > 0
    shown = ("engine_s", "call_s", "call_overhead_s", "layers_by_type")
    print(precision, options, {key: getattr(facts, key) for key in shown})


@pytest.mark.gpu
@pytest.mark.parametrize("ir", ["ts", "dynamo"])
def test_unsupported_operators_stay_in_pytorch_and_are_named(there: None, tmp_path: Path, ir: str) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    asked = trial("fp32", ModelSpec("mixed", f"{tmp_path / 'nets.py'}:mixed"), size=32, ir=ir, min_block_size=1)
    asked = replace(asked, model=replace(asked.model, channels=1))
    record = run(tmp_path / "job", asked)
    assert (record.status, record.reason) == ("ok", "")
    assert worst(tmp_path / "job", asked) < 1e-4
    assert any("erfinv" in name for name in record.facts.operators_in_pytorch)
    assert any("still run in PyTorch" in note for note in record.facts.notes)


@pytest.mark.gpu
def test_a_shape_error_quotes_the_model(there: None, tmp_path: Path) -> None:
    record = run(tmp_path, trial("fp32", ModelSpec("vit", "torchvision:vit_b_16"), size=8))
    assert record.status == "failed"
    assert "vit refuses 2x3x8x8 in fp32: Wrong image height" in record.reason


@pytest.mark.gpu
def test_probe_compiles_and_runs(there: None, tmp_path: Path) -> None:
    record = run(tmp_path, None, "probe")
    assert (record.status, record.reason) == ("ok", "")
    assert record.facts.probe.devices[0] == "cuda:0" and "TensorRT" in record.facts.probe.detail
