"""torchao's INT8, FP8 and INT4: refusals, calibration, and the operators that really ran."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.study.interpreters import find_missing
from dyno.worker import extras, registry
from dyno.worker.backends import torch_ao
from dyno.worker.nets import models
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Option, Runtime, Trial, Unavailable, UserError

torch = pytest.importorskip("torch")
TORCHAO = registry.find("torchao")
FEW_ROWS = "PyTorch's INT8 product takes 17 rows or more: give a larger batch"
NETS = """
from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

def mixed():
    return nn.Sequential(
        nn.Conv2d(3, 64, 8, 8), nn.ReLU(), nn.Flatten(2), nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 64),
        nn.Flatten(), nn.Linear(4096, 10),
    )

def convolutions(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())

@dataclass
class Pair:
    first: object
    second: object

class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Conv2d(3, 8, 3), make
    def forward(self, x):
        y = self.layer(x)
        return self.make(y, y + 1)

def ordered(): return Returns(lambda a, b: OrderedDict(out=a, aux=b))
def fields(): return Returns(Pair)
def scalars(): return Returns(lambda a, b: {"out": a, "aux": (None, 1.0, b)})

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    def forward(self, x):
        return self.b(nn.functional.relu6(self.a(x) + 3)) + 2

def sums(): return Sums()

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 10)
    def forward(self, x):
        x = x.mean(1)
        return self.head(self.attention(x, x, x)[0].mean(1))

def attends(): return Attends()
"""


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    (tmp_path / "nets.py").write_text(NETS)
    folder, rng = tmp_path / "data", np.random.default_rng(0)
    folder.mkdir()
    np.save(folder / "images.npy", rng.integers(0, 256, (8, 3, 32, 32), np.uint8))
    np.save(folder / "labels.npy", np.zeros(8, np.int64))
    for split in ("calibration", "test"):
        np.save(folder / f"{split}.npy", np.arange(8))

    def trial(net: str = "mixed", **options: Option) -> Trial:
        model = ModelSpec(net, f"{tmp_path}/nets.py:{net}")
        data = DataSpec("noise", str(folder), "1")
        return Trial(model, "torchao", "int8", Dims(2, 32, 32), options, data=data, runtime=Runtime(threads=1))

    return trial


def test_unsupported_trials_are_refused_in_one_line(asked: Any) -> None:
    trial = asked()
    assert TORCHAO.refuse(trial) == ""
    assert "needs real calibration images" in TORCHAO.refuse(replace(trial, data=DataSpec()))
    assert TORCHAO.refuse(replace(trial, data=DataSpec(), options={"scheme": "dynamic"})) == ""
    assert TORCHAO.refuse(asked(scheme="weights", samples=4)).startswith("samples is for scheme=static")
    assert "torchao has no fp32 here" in TORCHAO.refuse(replace(trial, precision="fp32"))
    on_gpu = replace(trial, runtime=Runtime(device="cuda:0"))
    assert torch_ao.scheme_of(on_gpu) == "dynamic"
    assert "is for CPUs" in TORCHAO.refuse(replace(on_gpu, options={"scheme": "static"}))
    assert TORCHAO.refuse(asked(scheme="static", search=False)) == "search is for scheme=dynamic and scheme=weights"


@pytest.mark.parametrize(
    ("precision", "scheme", "other"), [("fp8", "dynamic", "weights"), ("int4", "weights", "dynamic")]
)
def test_fp8_and_int4_are_for_gpus(precision: str, scheme: str, other: str, asked: Any) -> None:
    on_cpu = replace(asked(), precision=precision)
    assert TORCHAO.refuse(on_cpu) == f"torchao's {precision} is for NVIDIA GPUs; on a CPU give int8"
    on_gpu = replace(on_cpu, runtime=Runtime(device="cuda:0"), data=DataSpec())
    assert TORCHAO.refuse(on_gpu) == ""
    assert TORCHAO.recipe(on_gpu) is None
    assert TORCHAO.checked(on_gpu)["scheme"] == scheme  # type: ignore[attr-defined]
    refused = TORCHAO.refuse(replace(on_gpu, options={"scheme": other}))
    assert refused == f"torchao's {precision} has scheme={scheme} alone; omit scheme"
    expected = "" if precision == "int4" else "group is for int4, whose weights share scales in groups"
    assert TORCHAO.refuse(replace(on_gpu, options={"group": 32})) == expected


def test_an_unsupported_group_size_is_refused(asked: Any) -> None:
    trial = replace(asked(group=48), precision="int4", runtime=Runtime(device="cuda:0"))
    with pytest.raises(UserError, match=r"^group=48: torchao's group must be one of 32, 64, 128, 256$"):
        TORCHAO.checked(trial)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("int8", {"search": False}, ("Int8DynamicActivationInt8WeightConfig", {"set_inductor_config": False})),
        ("int8", {"scheme": "weights"}, ("Int8WeightOnlyConfig", {"set_inductor_config": True})),
        ("fp8", {}, ("Float8DynamicActivationFloat8WeightConfig", {"set_inductor_config": True})),
        ("int4", {"group": 32}, ("Int4WeightOnlyConfig", {"group_size": 32, "set_inductor_config": True,
                                                          "int4_packing_format": "tile_packed_to_4d"})),
    ],
)  # fmt: skip
def test_options_become_the_torchao_configuration(
    precision: str, options: dict[str, Option], expected: tuple[str, dict[str, Any]], asked: Any
) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")
    trial = replace(asked(**options), precision=precision, runtime=Runtime(device="cuda:0"))
    assert torch_ao.config_of(trial, TORCHAO.checked(trial)) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(("flags", "fused"), [({"avx2"}, False), ({"avx2", "avx_vnni"}, True), (set[str](), True)])
def test_layers_are_fused_unless_int8_sums_can_overflow(
    flags: set[str], fused: bool, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ao.system, "cpu_flags", lambda: flags)
    assert TORCHAO.checked(asked(scheme="dynamic"))["freeze"] is fused  # type: ignore[attr-defined]
    assert TORCHAO.checked(asked())["freeze"] is True, "its activations have seven bits"  # type: ignore[attr-defined]


def test_only_the_static_scheme_needs_a_file(asked: Any) -> None:
    recipe = TORCHAO.recipe(asked(samples=4))
    assert recipe is not None and recipe.data is not None
    assert (recipe.maker, recipe.options, recipe.data.split) == ("torchao", {"samples": 4}, "calibration")
    assert TORCHAO.recipe(asked(scheme="dynamic")) is None


@pytest.mark.parametrize(
    ("torch_version", "wanted"),
    [("2.7.1", "torchao==0.12.0"), ("2.8.0+cpu", "torchao==0.13.0"), ("2.9.0", "torchao==0.14.1"),
     ("2.9.1", "torchao==0.15.0"), ("2.10.0", "torchao==0.16.0"), ("2.11.0+cu130", "'torchao>=0.17'"),
     ("2.15.1", "'torchao>=0.17'")],
)  # fmt: skip
def test_the_matching_torchao_version_is_named(
    torch_version: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_versions", lambda names: {"torch": torch_version})
    assert extras.install("torchao") == f"pip install {wanted}"


def test_a_missing_torchao_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(Unavailable, match=r"^torchao is not installed .*; for torch 2\..*: pip install .?torchao"):
        torch_ao.import_torchao()


@dataclass
class Call:
    """An event of PyTorch's profiler."""

    name: str
    cpu_parent: Any = None


def test_each_operator_call_is_counted_once_by_type() -> None:
    outer = Call("aten::conv2d")
    inner = Call("aten::convolution", outer)
    calls = [outer, inner, Call("aten::mkldnn_convolution", inner), Call("onednn::qlinear_pointwise"),
             Call("aten::_int_mm"), Call("aten::mm"), Call("aten::_weight_int8pack_mm"), Call("aten::add"),
             Call("onednn::qconv_prepack"), Call("cpp_fused_mm_0")]  # fmt: skip
    assert torch_ao.count_types(calls) == {"float32": 3, "int8": 2}


def test_gpu_kernels_are_counted_by_name() -> None:
    names = ("aten::_int_mm", "triton_tem_fused__int_mm_mul_7", "aten::_scaled_mm", "aten::_weight_int4pack_mm",
             "triton_tem_fused_addmm_3", "aten::addmm", "triton_poi_fused__to_copy_1")  # fmt: skip
    counted = torch_ao.count_types([Call(name) for name in names], "bfloat16")
    assert counted == {"int8": 2, "float8": 1, "int4": 1, "bfloat16": 2}


@pytest.mark.parametrize(("scheme", "kinds"), [("static", {"int8"}), ("weights", {"float32"})])
def test_layers_that_ran_in_int8_are_detected(scheme: str, kinds: set[str], asked: Any, tmp_path: Path) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")
    trial = asked(scheme=scheme)
    recipe = TORCHAO.recipe(trial)
    artifact = registry.get_maker("torchao").make(recipe, None, tmp_path) if recipe else None
    session: Any = TORCHAO.load(trial, artifact)
    eager: Any = registry.find("pytorch").load(replace(trial, backend="pytorch", precision="fp32", options={}), None)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32)
    for each in (session, eager):
        each.bind({"input": x})
        each.run()
    (got,), (right,) = session.fetch().values(), eager.fetch().values()
    off = np.abs(got - right).max() / np.abs(right).max()
    assert 0 < off < 0.2, "quantised, and still the same network"
    if artifact:  # also on processors with narrow accumulators
        quantised = torch.export.load(artifact.path).module()(torch.from_numpy(x))[0].detach().numpy()
        assert np.abs(got - quantised).max() < 0.02 * np.abs(quantised).max()
    facts = session.facts()
    assert set(facts.layers_by_type) == kinds
    assert facts.precision_truth.refuted is (scheme == "weights"), facts.precision_truth.sentence
    if artifact:
        assert artifact.made_by.calibration and artifact.made_by.calibration.samples == 8


@pytest.mark.parametrize("net", ["ordered", "fields", "scalars"])
def test_networks_are_quantised_for_any_output_structure(net: str, asked: Any, tmp_path: Path) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")
    trial, x = asked(net, samples=4), np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 32)).astype(np.float32)
    made = registry.get_maker("torchao").make(TORCHAO.recipe(trial), None, tmp_path)  # type: ignore[arg-type]
    program = torch.export.load(made.path)
    with torch.no_grad():
        first, second = program.module()(torch.from_numpy(x))
        right = models.load(trial.model, trial.dims).layer(torch.from_numpy(x))
    assert "quantize_per_tensor" in str(program.graph) and len(made.outputs) == 2
    for found, true in ((first, right), (second, right + 1)):
        assert (found - true).abs().max() < 0.05 * right.abs().max()


def test_additions_of_constants_are_left_unquantised(asked: Any, tmp_path: Path) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")
    trial, x = asked("sums", samples=4), torch.rand(2, 3, 32, 32) * 2 - 1
    made = registry.get_maker("torchao").make(TORCHAO.recipe(trial), None, tmp_path)  # type: ignore[arg-type]
    program = torch.export.load(made.path)
    with torch.no_grad():
        (found,), right = program.module()(x), models.load(trial.model, trial.dims)(x)
    assert str(program.graph).count("dequantize_per_channel.default](") == 2, "both convolutions"
    assert (found - right).abs().max() < 0.05 * right.abs().max()


def test_quantiser_errors_are_reported_in_one_line(asked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")

    def refuse(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch_ao.import_torchao(".pt2e.quantize_pt2e"), "prepare_pt2e", refuse)
    with pytest.raises(UserError, match=r"^torchao can't quantise convolutions: AssertionError; give scheme=dynamic$"):
        registry.get_maker("torchao").make(TORCHAO.recipe(asked("convolutions")), None, tmp_path)  # type: ignore[arg-type]


def test_unquantised_layers_are_named(asked: Any) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")
    facts = TORCHAO.load(asked("attends", scheme="weights"), None).facts()
    assert facts.notes[0] == "torchao left 1 of 2 linear layers unquantised: 1 of 32 x 32"
    assert facts.options["unquantised"] == ["attention.out_proj"]


@pytest.mark.slow
def test_a_network_without_linear_layers_is_refused(asked: Any) -> None:
    if lacks := find_missing("torchao"):
        pytest.skip(f"{lacks} is not installed")
    with pytest.raises(UserError, match="convolutions has no linear layer, which scheme=dynamic quantises"):
        TORCHAO.load(asked("convolutions", scheme="dynamic"), None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "options", "kind", "left"),
    [("int8", {}, "int8", f"10 x 4096 ({FEW_ROWS})"), ("int8", {"search": False}, "int8", f"10 x 4096 ({FEW_ROWS})"),
     ("fp8", {"search": False}, "float8", "10 x 4096"), ("int4", {"search": False, "group": 32}, "int4", "128 x 16")],
)  # fmt: skip
def test_quantised_layers_on_a_gpu_are_detected(
    precision: str, options: dict[str, Option], kind: str, left: str, asked: Any
) -> None:
    if not torch.cuda.is_available() or find_missing("torchao"):
        pytest.skip("PyTorch sees no GPU here, or torchao is not installed")
    trial = replace(asked(**options), precision=precision, runtime=Runtime(device="cuda:0"), data=DataSpec())
    session: Any = TORCHAO.load(trial, None)
    eager: Any = registry.find("pytorch").load(replace(trial, backend="pytorch", precision="fp32", options={}), None)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32)
    for each in (session, eager):
        each.bind({"input": x})
        each.run()
        each.wait()
    (got,), (right,) = session.fetch().values(), eager.fetch().values()
    off = np.abs(got - right).max() / np.abs(right).max()
    assert 0 < off < 0.2, "quantised, and still the same network"
    facts = session.facts()
    assert facts.layers_by_type == {kind: 2, "bfloat16": 2}, "besides the convolution, what the kernels don't take"
    assert facts.notes == (f"torchao left 1 of 3 linear layers unquantised: 1 of {left}",)
    assert facts.options["unquantised"] == ["3" if precision == "int4" else "7"]
    assert facts.options["allow_tf32"] is False
