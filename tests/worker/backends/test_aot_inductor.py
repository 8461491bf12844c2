"""AOTInductor: packages of modules and other programs, told apart from exported programs, and facts in their code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker import registry
from dyno.worker.backends import aot_inductor, aot_package
from dyno.worker.sessions import torch_support
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial, Unavailable, UserError
from refusals import refuses

torch = pytest.importorskip("torch")
AOTI = registry.find("aoti")
MODEL = ModelSpec("net", "nowhere.py:net")
OTHER = """
import sys, torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 10)
    def forward(self, x):
        y = self.conv(x).relu().mean((2, 3))
        return {"logits": self.fc(y), "pooled": (y * 2,)}

torch.manual_seed(0)
torch.set_num_threads(1)
net, x = Two().eval(), torch.randn(2, 3, 16, 16)
with torch.no_grad():
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, sys.argv[1] + "/program.pt2")
    if len(sys.argv) > 2:
        torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1] + "/other.pt2")
    results = net(x)
    torch.save([x, results["logits"], results["pooled"][0]], sys.argv[1] + "/expected.pt")
"""
# The compiler's check of an input with the code around it, shortened.
CHECK = """
AOTI_NOINLINE static void check_input_0(
    AtenTensorHandle* input_handles
) {{
    int32_t arg0_1_expected_dtype = aoti_torch_dtype_{dtype}();
    if (arg0_1_size[0] < 2) {{
    if (arg0_1_size[0] > {largest}) {{
    if (3 != arg0_1_size[1]) {{
    if (8 != arg0_1_size[2]) {{
    if (9 != arg0_1_size[3]) {{
    if ({stride} != arg0_1_stride[1]) {{
    arg0_1_stride[3]
}}
"""
RUN = """
    constants_info_[0].name = "weight";
    constants_info_[0].dtype = cached_torch_dtype_{dtype};
    constants_info_[0].shape = {{4, 3}};
void AOTInductorModel::run_impl(
    // Topologically Sorted Source Nodes: [conv], Original ATen: [aten.convolution]
    static constexpr int64_t int_array_0[] = {{2L, 4L}};
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, int_array_0, int_array_1, cached_torch_dtype_{dtype}, cached_torch_device_type_cpu, this->device_idx_, &buf0_handle));
    cpp_fused_convolution_0((const float*)(arg0_1.data_ptr()), (float*)(buf0.data_ptr()));
    // Topologically Sorted Source Nodes: [conv], Original ATen: [aten.convolution]
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mkldnn__convolution_pointwise(buf0, weight, nullptr, &buf1_handle));
    auto buf2 = std::move(buf1);  // reuse
    // Topologically Sorted Source Nodes: [fc], Original ATen: [aten.addmm]
    cpp_fused_addmm_1((const {cpp}*)(buf2.data_ptr()), (float*)(buf3.data_ptr()));
}} // AOTInductorModel::run_impl
"""  # noqa: E501
KERNELS = """
extern "C" void cpp_fused_convolution_0(const float* in) { #pragma omp parallel num_threads(3)
extern "C" void cpp_fused_addmm_1(const float* in) { micro_gemm(in);
"""


def written(path: Path, dtype: str = "float32", largest: int = 15, stride: int = 72, **metadata: str) -> Path:
    """Write a package with only the code that Dyno reads."""
    facts = {"AOTI_DEVICE_KEY": "cpu", **metadata}
    cpp = {"float32": "float"}.get(dtype, dtype)
    source = CHECK.format(dtype=dtype, largest=largest, stride=stride) + RUN.format(dtype=dtype, cpp=cpp)
    with zipfile.ZipFile(path, "w") as archive:
        place = "m/data/aotinductor/model"
        archive.writestr(f"{place}/a.wrapper.cpp", source)
        archive.writestr(f"{place}/b.kernel.cpp", KERNELS)
        archive.writestr(f"{place}/a.wrapper_metadata.json", str(facts).replace("'", '"'))
    return path


def made(folder: Path, *words: str) -> Path:
    done = subprocess.run([sys.executable, "-c", OTHER, str(folder), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program and its package, made without Dyno; libstdc++ is in the package if g++ can do so."""
    if not (compiler := shutil.which("g++")):
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("other")
    linker = folder / "g++"
    shared = 'case " $* " in *" -shared "*) set -- "$@" -static-libstdc++ ;; esac'
    linker.write_text(f'#!/bin/sh\n{shared}\nexec {compiler} "$@"\n')
    linker.chmod(0o755)
    archive = subprocess.run([compiler, "-print-file-name=libstdc++.a"], capture_output=True, text=True).stdout.strip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(linker if Path(archive).is_file() else compiler))
        return made(folder, "package")


def test_inputs_and_kernels_are_read_from_package_code(tmp_path: Path) -> None:
    package = aot_package.read_package(str(written(tmp_path / "n.pt2", "bfloat16")))
    assert package.inputs == (aot_package.PackageInput("bfloat16", ("batch", 3, 8, 9), 2, 15),)
    assert (package.read_batches(), package.threads, package.device) == ((2, 2, 15), 3, "cpu")
    assert package.count_types() == {"bfloat16": 2}, "a kernel that only arranges a library's input multiplies nothing"
    kinds = [(layer.type, layer.computes_in, layer.nodes) for layer in package.layers]
    assert kinds == [
        ("aten.convolution", "", ("conv",)),
        ("mkldnn__convolution_pointwise", "bfloat16", ("conv",)),
        ("aten.addmm", "bfloat16", ("fc",)),
    ]
    assert package.layers[0].outputs[0].shape == (2, 4)
    contents = aot_package.describe("n.pt2", package)
    assert (contents.precision, contents.batches) == ("bf16", (2, 2, 15))
    assert contents.inputs[0].dtype == "float32", "feeds are float32, and cast as a module's"
    assert aot_package.read_package(str(written(tmp_path / "last.pt2", stride=1))).inputs[0].channels_last


def test_packages_and_programs_are_distinguished_by_content(tmp_path: Path) -> None:
    made(tmp_path)
    written(tmp_path / "n.pt2")
    (tmp_path / "text.pt2").write_text("no archive")
    assert registry.format_of(tmp_path / "n.pt2") is aot_inductor.AOTI_FORMAT
    assert registry.format_of(tmp_path / "program.pt2") is None
    assert registry.format_of(tmp_path / "text.pt2") is None
    assert registry.format_of(f"saved:{tmp_path}/n.pt2") is None
    assert registry.format_of(tmp_path / "new.pt2") is aot_inductor.AOTI_FORMAT, "which `dyno export` writes"
    refuses("not a package that can be read", aot_package.read_package, str(tmp_path / "text.pt2"))
    refuses(r"program.pt2 has no compiled code of AOTInductor", aot_package.read_package, str(tmp_path / "program.pt2"))


def test_a_given_package_fixes_precision_device_and_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_inductor, "probe_processor", lambda: 0.0)  # avoids seconds of compilation
    path = written(tmp_path / "n.pt2")
    trial = Trial(replace(MODEL, source=f"file:{path}", precision="fp32"), "aoti", "fp32", Dims(2, 8, 9))
    assert AOTI.refuse(trial) == ""
    assert AOTI.refuse(replace(trial, precision="bf16")) == "the package was compiled in fp32; bf16 needs the model"
    assert AOTI.refuse(replace(trial, options={"freeze": True})).startswith("freeze is fixed in a compiled package")
    for name in ("pytorch", "compile", "onnxruntime", "openvino"):
        reason = registry.find(name).refuse(replace(trial, backend=name))
        assert reason and "\n" not in reason
    artifact = registry.get_maker("aoti").make(AOTI.recipe(trial), None, tmp_path)
    assert (Path(artifact.path), artifact.seconds) == (path, 0.0)
    with pytest.raises(UserError, match="compiled for batches 2 to 15, not 16; give static=true"):
        AOTI.load(replace(trial, dims=Dims(16, 8, 9)), artifact)
    refuses(
        r"n.pt2 can't be loaded by this PyTorch \(.*: .*; if another version compiled it, compile it again",
        AOTI.load,
        trial,
        artifact,
    )
    for metadata, error in (
        ({"AOTI_DEVICE_KEY": "cuda"}, "the package was compiled for cuda, not cpu; choose another --device"),
        ({"AOTI_CPU_ISA": "AMX"}, "the package was compiled for processors with AMX, which this one lacks"),
    ):
        if error.endswith("lacks") and aot_inductor._has_isa("AMX"):
            continue
        foreign = replace(artifact, path=str(written(tmp_path / "foreign.pt2", **metadata)))
        with pytest.raises((UserError, Unavailable), match=error):
            AOTI.load(trial, foreign)


def test_the_recipe_records_what_determines_the_package() -> None:
    trial = Trial(MODEL, "aoti", "fp32", Dims(4, 8, 8), runtime=Runtime(threads=3))
    fixed, free = AOTI.recipe(trial), AOTI.recipe(replace(trial, options={"static": False}))
    assert fixed is not None and free is not None
    assert (fixed.dims.batch, free.dims.batch) == (4, 0)
    assert fixed.options == {"mode": "default", "freeze": True, "threads": 3}, "the code has the number of threads"
    gpu = AOTI.recipe(replace(trial, runtime=Runtime(device="cuda:0", threads=3)))
    assert gpu is not None and gpu.options == {"mode": "default", "freeze": False} and gpu.runtime.device == "cuda:0"
    onnx = replace(trial, dims=Dims(0, 8, 8), options={"target": "onnxruntime"})
    assert aot_inductor.AOTI_FORMAT.recipe(onnx).dims.batch == 0
    with pytest.raises(UserError, match="--target and --opset are for ONNX files"):
        aot_inductor.AOTI_FORMAT.recipe(replace(onnx, options={"opset": 17}))
    refuses("aoti has no int8 here", aot_inductor.AOTI_FORMAT.recipe, replace(onnx, precision="int8"))


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_support.shutil, "which", lambda name: None)
    recipe = AOTI.recipe(Trial(MODEL, "aoti", "fp32", Dims(1, 8, 8)))
    assert recipe is not None
    for step in (AOTI.probe, lambda: registry.get_maker("aoti").make(recipe, None, tmp_path)):
        with pytest.raises(Unavailable, match=r"^AOTInductor needs a C\+\+ compiler .*apt-get install g\+\+"):
            step()


@pytest.mark.parametrize(("difference", "right"), [(0.0, True), (1e-3, True), (0.1, False)])
def test_a_package_with_other_outputs_is_refused(difference: float, right: bool) -> None:
    recipe = AOTI.recipe(Trial(MODEL, "aoti", "fp32", Dims(0, 8, 8)))
    assert recipe is not None
    expected = [torch.ones(2, 3)]
    check: Callable[[], None] = lambda: aot_inductor._check_outputs([expected[0] + difference], expected, recipe)  # noqa: E731
    if right:
        check()
        return
    refuses("any batch gives other outputs than net for 2x3; give static=true", check)


def test_a_package_made_by_another_program_runs(other: Path) -> None:
    path = str(other / "other.pt2")
    contents = aot_inductor.AOTI_FORMAT.read(path, Trial(MODEL, "aoti", "fp32", Dims(2, 16, 16)))
    assert contents.inputs[0].shape == ("batch", 3, 16, 16) and contents.precision == "fp32"
    model = replace(MODEL, source=f"file:{path}", precision="fp32")
    x, *expected = torch.load(other / "expected.pt")
    for batch in (2, 3):
        trial = Trial(model, "aoti", "fp32", Dims(batch, 16, 16))
        artifact = registry.get_maker("aoti").make(AOTI.recipe(trial), None, other)
        session: Any = AOTI.load(trial, artifact)
        session.bind({"input": np.resize(x.numpy(), (batch, 3, 16, 16))})
        session.run()
        found = session.fetch()
        assert [*found] == ["output", "output_1"]
        for got, right in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(got[:2], right.numpy(), rtol=1e-4, atol=1e-5)
        facts = session.facts()
        assert facts.precision_truth.ok and set(facts.layers_by_type) == {"float32"}
    with pytest.raises(Unavailable, match="don't name their modules"):
        AOTI.layer_graph(replace(trial, model=MODEL), artifact)
    layers = AOTI.layer_graph(trial, artifact)
    assert any(layer.type.endswith("convolution") for layer in layers.layers) and layers.parameters == 306, (
        "a bias of 8 numbers is a part of the code"
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_package_matches_eager_outputs(precision: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU here")
    model = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1)
    trial = Trial(model, "aoti", precision, Dims(2, 32, 32), runtime=Runtime(device="cuda:0"))
    artifact = registry.get_maker("aoti").make(AOTI.recipe(trial), None, tmp_path)
    session: Any = AOTI.load(trial, artifact)
    eager: Any = registry.find("pytorch").load(replace(trial, backend="pytorch"), None)
    for slot in range(session.slots):  # all in flight at once, each with its own runner
        x = np.random.default_rng(slot).standard_normal((2, 1, 32, 32), np.float32)
        for each in (session, eager):
            each.bind({"input": x}, slot)
            each.run(slot)
    for slot in range(session.slots):
        session.wait(slot)
        eager.wait(slot)
        np.testing.assert_allclose(session.fetch(slot)["output"], eager.fetch(slot)["output"], rtol=2e-2, atol=2e-2)
    assert session.facts().precision_truth.ok
    with pytest.raises(UserError, match="the package was compiled for cuda, not cpu"):
        AOTI.load(replace(trial, precision="fp32", runtime=Runtime()), artifact)
