"""PyTorch's sessions compute the module's results in the requested type, and fail in one line."""

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dyno.worker import system
from dyno.worker.backend import Session, answer_feeds
from dyno.worker.nets import models
from dyno.worker.registry import find
from dyno.worker.sessions import torch_support
from dyno.worker.spec import Dims, ModelSpec, Preprocess, Runtime, Trial, Unavailable, UserError
from refusals import refuses

DIGITS = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1)
NETS = '''
import torch
from torch import nn

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.unused = nn.Linear(2, 2)
    def forward(self, x):
        y = self.conv(x)
        return {"map": y, "parts": [y.mean((2, 3)), (y.amax((2, 3)), 7)]}

class Mixed(nn.Module):
    """Leaves its convolution in float32 whatever it is asked for."""
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
    def forward(self, x): return self.fc(self.conv.float()(x.float()).mean((2, 3)).to(x.dtype))

class Pixels(nn.Module):
    """Makes numbers in float32 whatever it is asked for."""
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x): return self.conv(x.float())

class Huge(nn.Module):
    def forward(self, x): return x.new_empty(1 << 46)

class Broken(nn.Module):
    """Breaks the graph in the middle."""
    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

class Turned(nn.Module):
    """Has complex weights, as a layer in the frequency domain."""
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1j, 2j, 3j]))
    def forward(self, x): return torch.fft.ifft(torch.fft.fft(x.mean((2, 3))) * self.turn).real

class Spectrum(nn.Module):
    def forward(self, x): return torch.fft.fft(x.mean((2, 3))).conj()

class Partly(nn.Module):
    """Has a part that was scripted, which takes no hooks."""
    def __init__(self):
        super().__init__()
        self.conv, self.fc = torch.jit.script(nn.Conv2d(3, 4, 3)), nn.Linear(4, 2)
    def forward(self, x): return self.fc(self.conv(x).mean((2, 3)))

class Labels(nn.Module):
    def forward(self, x):
        means = x.mean((2, 3))
        return means.argmax(1) + 2**53 + 1, means > 0, means.double()

def labels(): return Labels()
def partly(): return Partly()
def turned(): return Turned()
def few(): return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
def several(): return Several()
def spectrum(): return Spectrum()
def mixed(): return Mixed()
def huge(): return Huge()
def pixels(): return Pixels()
def broken(): return Broken()
def nothing(): return nn.ModuleList()
'''


@pytest.fixture(scope="module")
def nets(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("nets") / "nets.py"
    file.write_text(NETS)
    return file


def trial(model: ModelSpec = DIGITS, precision: str = "fp32", batch: int = 2, size: int = 64, **rest: Any) -> Trial:
    options = {key: rest.pop(key) for key in list(rest) if key not in ("backend", "runtime")}
    backend = rest.pop("backend", "pytorch")
    runtime = rest.pop("runtime", Runtime(threads=2))
    return Trial(model, backend, precision, Dims(batch, size, size), options=options, runtime=runtime)


def feeds(session: Session) -> dict[str, np.ndarray]:
    shape = [int(n) for n in session.inputs[0].shape]
    return {"input": np.random.default_rng(1).standard_normal(shape, dtype=np.float32)}


def outputs(session: Session, feed: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    return answer_feeds(session, feed or feeds(session))


def reference(asked: Trial, x: np.ndarray) -> np.ndarray:
    """Return the module's output computed in float64."""
    with torch.inference_mode():
        result: np.ndarray = models.load(asked.model, asked.dims).double()(torch.from_numpy(x).double()).numpy()
    return result


def test_complex_outputs_keep_their_imaginary_part(nets):
    session = find("pytorch").load(trial(ModelSpec("spectrum", f"{nets}:spectrum"), size=8), None)
    feed = feeds(session)
    parts = outputs(session, feed)["output"]
    wanted = np.fft.fft(feed["input"].mean((2, 3)), axis=1).conj()
    np.testing.assert_allclose(parts, np.stack([wanted.real, wanted.imag], axis=-1), atol=1e-5)


@pytest.mark.parametrize("backend", ["pytorch", "compile"])
def test_integer_and_boolean_outputs_keep_their_types(nets, backend):
    session = find(backend).load(trial(ModelSpec("labels", f"{nets}:labels"), size=8, backend=backend), None)
    got = outputs(session)
    assert [a.dtype for a in got.values()] == [np.int64, np.bool_, np.float32]
    assert [t.dtype for t in session.outputs] == ["int64", "bool", "float32"]
    assert (got["output"] == 2**53 + 1 + got["output_2"].argmax(1)).all()
    session.close()


@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("bf16", 0.05), ("fp16", 0.01)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_eager_computes_in_the_requested_type(precision, error, channels_last):
    asked = trial(precision=precision, channels_last=channels_last)
    session = find("pytorch").load(asked, None)
    got = outputs(session)
    want = reference(asked, feeds(session)["input"])
    worst = np.abs(got["output"] - want).max() / np.abs(want).max()
    assert list(got) == ["output"]
    assert got["output"].dtype == np.float32
    assert worst < error
    assert precision == "fp32" or worst > 1e-5  # not float32 in disguise
    facts = session.facts()
    kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    assert facts.layers_by_type == {kind: 21}
    assert facts.precision_truth.ok
    assert facts.parameters == 701_818
    assert facts.weights_sha256 == models.weights_sha256(models.load(DIGITS))
    assert facts.options["channels_last"] is channels_last
    session.close()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_are_normalised_before_the_module(precision, channels_last):
    model = replace(DIGITS, preprocess=Preprocess(mean=(0.3,), std=(0.2,)))
    raw = find("pytorch").load(trial(model, precision, input="uint8", channels_last=channels_last), None)
    assert raw.inputs[0].dtype == "uint8"
    pixels = np.random.default_rng(1).integers(0, 256, raw.inputs[0].shape, np.uint8)
    got = outputs(raw, {"input": pixels})["output"].copy()
    usual = find("pytorch").load(trial(model, precision, channels_last=channels_last), None)
    normalised = ((pixels.astype(np.float32) / 255 - 0.3) / 0.2).astype(np.float32)
    want = outputs(usual, {"input": normalised})["output"]
    np.testing.assert_allclose(got, want, 1e-2, (1e-5 if precision == "fp32" else 5e-3) * np.abs(want).max())
    assert raw.facts().layers_by_type == usual.facts().layers_by_type
    assert raw.facts().weights_sha256 == usual.facts().weights_sha256


def test_pixel_inputs_need_an_image_model(nets):
    asked = trial(ModelSpec("several", f"{nets}:several"), input="uint8")
    with pytest.raises(UserError, match="input=uint8 needs a model with one image input"):
        find("pytorch").load(replace(asked, dims=replace(asked.dims, shapes={"input": (2, 5)})), None)


@pytest.mark.parametrize(
    ("backend", "options", "line"),
    [
        ("pytorch", {"input": "int8"}, "input=int8: pytorch's input must be one of float32, uint8"),
        ("compile", {"mode": "fast"}, "mode=fast: compile's mode must be one of default, reduce-overhead, max-auto"),
    ],
)
def test_invalid_option_values_are_refused_before_any_run(backend, options, line):
    for step in (find(backend).check_options, lambda given: find(backend).checked(trial(backend=backend, **given))):
        refuses(re.escape(line), step, options)


def test_bind_copies_the_array_of_the_caller():
    session = find("pytorch").load(trial(), None)
    feed = feeds(session)
    want = outputs(session, feed)["output"].copy()
    session.bind(feed)
    feed["input"][:] = 0
    session.run()
    assert np.array_equal(session.fetch()["output"], want)
    refuses("wants", session.bind, {"input": feed["input"][:1]})


def test_threads_and_tf32_follow_the_trial():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("medium")  # would mean bfloat16 on a CPU
    session = find("pytorch").load(trial(runtime=Runtime(threads=1)), None)
    assert torch.get_num_threads() == session.facts().threads == 1
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_outputs_in_dicts_and_lists_get_names(nets):
    session = find("pytorch").load(trial(ModelSpec("several", f"{nets}:several"), size=8), None)
    got = outputs(session)
    assert {name: a.shape for name, a in got.items()} == {
        "output": (2, 4, 6, 6),
        "output_1": (2, 4),
        "output_2": (2, 4),
    }
    assert [t.name for t in session.outputs] == list(got)
    assert session.facts().layers == 1  # the unused layer doesn't count


def test_layers_left_in_float32_are_detected(nets):
    session = find("pytorch").load(trial(ModelSpec("mixed", f"{nets}:mixed"), "bf16", size=8), None)
    outputs(session)
    assert session.facts().layers_by_type == {"float32": 1, "bfloat16": 1}


def test_facts_of_a_partly_scripted_module_are_correct(nets):
    session = find("pytorch").load(trial(ModelSpec("partly", f"{nets}:partly"), size=8), None)
    outputs(session)
    facts = session.facts()
    assert facts.layers_by_type == {"float32": 1} and facts.parameters == 3 * 4 * 9 + 4 + 4 * 2 + 2


def test_the_error_of_the_model_is_quoted_in_one_line():
    session = find("pytorch").load(trial(ModelSpec("vit", "torchvision:vit_b_16"), size=8), None)
    refuses("vit refuses 2x3x8x8 in fp32: Wrong image height! Expected 224 but got 8!", outputs, session)


def test_a_module_that_creates_float32_gets_advice(nets):
    session = find("pytorch").load(trial(ModelSpec("pixels", f"{nets}:pixels"), "bf16", size=8), None)
    refuses(r"pixels refuses 2x3x8x8 in bf16: .*; let forward make numbers in the type of", outputs, session)


def test_running_out_of_memory_is_a_memory_error(nets):
    session = find("pytorch").load(trial(ModelSpec("huge", f"{nets}:huge"), size=8), None)
    with pytest.raises(MemoryError, match="allocate memory"):
        outputs(session)
    with pytest.raises(MemoryError, match="allocate memory"):
        find("pytorch").load(trial(batch=1 << 20, size=1 << 13), None)


@pytest.mark.parametrize("backend", ["pytorch", "compile"])
def test_refusals_need_no_library(backend):
    asked = trial(backend=backend)
    refuse = find(backend).refuse
    assert refuse(asked) == ""
    assert "tf32 is a mode of NVIDIA GPUs" in refuse(trial(precision="tf32"))
    assert "has no int8" in refuse(trial(precision="int8"))
    onnx = replace(DIGITS, source="file:m.onnx")
    assert refuse(trial(onnx)) == "there is no PyTorch module in an ONNX file"
    assert "can't run on xpu" in refuse(trial(runtime=Runtime(device="xpu")))
    with pytest.raises(UserError, match=f"'chanels_last' of {backend}; did you mean 'channels_last'"):
        find(backend).load(trial(backend=backend, chanels_last=True), None)


def test_a_missing_device_is_unavailable():
    with pytest.raises(Unavailable, match="cuda:99"):
        find("pytorch").load(trial(runtime=Runtime(device="cuda:99", threads=2)), None)


def test_a_missing_library_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unavailable, match=r"pip install .*\[torch\]"):
        find("pytorch").load(trial(), None)


def test_a_missing_compiler_is_unavailable(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match=r"found no no-such-compiler.*apt-get install g\+\+"):
        find("compile").load(trial(backend="compile"), None)
    refuses("compile's mode must be one of", find("compile").load, trial(backend="compile", mode="fast"), None)


def test_types_without_cpu_arithmetic_are_noted(monkeypatch):
    monkeypatch.setattr(torch_support.system, "cpu_flags", lambda: {"avx2", "avx512_bf16"})
    assert torch_support.list_notes(trial(precision="bf16")) == []
    assert "no fp16 arithmetic" in torch_support.list_notes(trial(precision="fp16"))[0]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of compiled code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


@needs_compiler
def test_compiled_code_agrees_with_eager_and_reports_build_time(cache, nets):
    asked = trial(ModelSpec("few", f"{nets}:few"), backend="compile", size=16)
    first = find("compile").load(asked, None)
    want = reference(asked, feeds(first)["input"])
    np.testing.assert_allclose(outputs(first)["output"], want, 1e-3, 1e-4 * np.abs(want).max())
    facts = first.facts()
    assert facts.build_s > 0
    assert (facts.build_cached, facts.graph_breaks, facts.graphs) == (False, 0, 1)
    assert facts.options["freeze"]
    assert facts.layers_by_type == {"float32": 2}
    again = find("compile").load(asked, None).facts()
    assert again.build_cached
    assert again.build_s < facts.build_s


@needs_compiler
def test_graph_breaks_are_counted(cache, nets):
    asked = trial(ModelSpec("broken", f"{nets}:broken"), backend="compile", size=8, freeze=False)
    assert find("compile").load(asked, None).facts().graph_breaks == 1


@needs_compiler
def test_compile_quotes_the_error_of_the_model(cache):
    with pytest.raises(UserError, match="vit refuses 2x3x8x8 in fp32: Wrong image height"):
        find("compile").load(trial(ModelSpec("vit", "torchvision:vit_b_16"), size=8, backend="compile"), None)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pytorch", "compile"])
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("tf32", 1e-2), ("fp16", 0.02), ("bf16", 0.1)])
def test_gpu_computes_in_the_requested_type(backend, precision, error):
    asked = trial(precision=precision, backend=backend, runtime=Runtime(device="cuda:0", threads=2))
    session = find(backend).load(asked, None)
    want = reference(asked, feeds(session)["input"])
    for slot in range(session.slots):
        session.bind(feeds(session), slot)
        session.run(slot)
    for slot in range(session.slots):
        session.wait(slot)
        worst = np.abs(session.fetch(slot)["output"] - want).max() / np.abs(want).max()
        assert worst < error
        assert precision == "fp32" or worst > 1e-5
    assert session.stream
    assert session.facts().precision_truth.ok
    session.close()


def test_complex_weights_keep_their_imaginary_part(nets):
    session = find("pytorch").load(trial(ModelSpec("turned", f"{nets}:turned")), None)
    feed = feeds(session)
    want = np.fft.ifft(np.fft.fft(feed["input"].mean((2, 3))) * np.array([1j, 2j, 3j])).real
    np.testing.assert_allclose(outputs(session, feed)["output"], want, 1e-4, 1e-5)


def test_compiler_capabilities_are_probed_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles a probe and starts a Python per instruction set in every process: half of a cold compile."""
    cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")
    pytest.importorskip("torch._inductor.codecache")  # keeps the function found at its import
    asked, can_build = [], {"avx": True, "amx": False}

    def check_build(isa: Any, code: str) -> bool:
        asked.append(code)
        return can_build[code]

    known = cpu_vec_isa.VecAVX512()
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    answers: list[bool] = []
    monkeypatch.setattr(
        cpu_vec_isa, "pick_vec_isa", lambda: answers.extend(known.check_build(code) for code in can_build)
    )
    torch_support.probe_processor()
    torch_support.probe_processor()
    assert asked == ["avx", "amx"] * 2, "a process that shares nothing asks each time"
    monkeypatch.setenv(system.PROBES_VARIABLE, str(tmp_path / "probes"))
    first = torch_support.probe_processor()
    del asked[:]
    again = torch_support.probe_processor()
    assert asked == ["amx"], "what couldn't be built may be for want of memory, and is asked again"
    assert answers == [True, False] * 4 and first > 0 and again > 0
    assert cpu_vec_isa.VecISA.check_build is check_build
    (path,) = (tmp_path / "probes").iterdir()
    path.write_text("{")
    torch_support.probe_processor()
    assert asked == ["amx", "avx", "amx"], "a damaged answer is none"


def test_a_long_compiler_probe_is_noted() -> None:
    assert torch_support.describe_probe(0.2) == []
    assert "27 s" in torch_support.describe_probe(26.7)[0]
