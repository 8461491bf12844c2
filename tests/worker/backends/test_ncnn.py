"""ncnn: graphs with weights written here and results by NumPy, and modules that pnnx converts."""

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.report.tables import trial_table
from dyno.worker import registry
from dyno.worker.backend import answer_feeds
from dyno.worker.backends.ncnn import OpenGraph
from dyno.worker.spec import Dims, ModelSpec, Runtime, Tensor, Trial, Unavailable, UserError

NCNN = registry.find("ncnn")
WEIGHTS = np.array([[1, 2, -3, 4], [-5, 6, 7, 8]], np.float32)
BIAS = np.array([0.5, -1], np.float32)
X = np.array([[0.5, 1, -1, 2], [3, 0, 0.25, -0.5]], np.float32)
PARAM = "7767517\n2 2\nInput given 0 1 data 0=4\nInnerProduct layer 1 1 data scores 0=2 1=1 2=8{}\n"
FLOATS, INT8 = 0, 0x000D4B38  # storage of the weights, written before them in the file
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids, self.conv, self.last = nn.Embedding(9, 4), nn.Conv2d(3, 8, 3), nn.Linear(12, 5)
    def forward(self, image, ids):
        features = torch.cat([self.conv(image).mean((2, 3)), self.ids(ids).sum(1)], 1)
        return {"scores": self.last(features), "features": features}

class Kept(nn.Module):
    def forward(self, image):
        return image.mean() + image

class Sorted(nn.Module):
    def forward(self, image):
        return image.flatten(1).sort(-1)[0]

class Deciding(nn.Module):
    def forward(self, image):
        return image * 2 if image.mean() > 0 else image

def net(): return Net()
def net_inputs():
    return {"image": torch.rand(2, 3, 8, 8), "ids": torch.randint(0, 9, (2, 6))}

def small(): return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 5))
def lacking(): return Sorted()
def deciding(): return Deciding()
def mixing(): return Kept()
"""


@pytest.fixture(autouse=True)
def library() -> Any:
    return pytest.importorskip("ncnn", reason="ncnn is not installed")


@pytest.fixture
def batch(library: Any) -> int:
    """Two, or one if this version of ncnn runs one image at a time."""
    return 2 if hasattr(library.Mat, "batch") else 1


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("pnnx", reason="pnnx is not installed")
    (tmp_path / "nets.py").write_text(NET)
    return tmp_path / "nets.py"


def write_graph(folder: Path, kind: int = FLOATS) -> Path:
    """Write a fully connected layer; INT8 stores its weights times 10 and rounds its input to 1 / 32."""
    path = folder / "graph.param"
    path.write_text(PARAM.format(" 8=1" if kind == INT8 else ""))
    weights = WEIGHTS.tobytes() if kind == FLOATS else (WEIGHTS * 10).astype(np.int8).tobytes()
    scales = b"" if kind == FLOATS else np.array([10, 10, 32], np.float32).tobytes()
    path.with_suffix(".bin").write_bytes(np.uint32(kind).tobytes() + weights + BIAS.tobytes() + scales)
    return path


def trial_of(path: Path, precision: str = "fp32", own: str = "fp32", batch: int = 1) -> Trial:
    model = ModelSpec(path.stem, f"file:{path}", precision=own)
    return Trial(model, "ncnn", precision, Dims(batch, 0, 0), runtime=Runtime(threads=1))


def trial_of_module(nets: Path, name: str, batch: int) -> Trial:
    model = ModelSpec("net", f"{nets}:{name}")
    return Trial(model, "ncnn", "fp32", Dims(batch, 8, 8), runtime=Runtime(threads=1))


@pytest.mark.parametrize(("kind", "precision", "type_"), [(FLOATS, "fp32", "float32"), (INT8, "int8", "int8")])
def test_a_graph_matches_numpy_outputs(tmp_path: Path, batch: int, kind: int, precision: str, type_: str) -> None:
    trial = trial_of(write_graph(tmp_path, kind), precision, precision, batch)
    made = registry.get_maker("ncnn").make(NCNN.recipe(trial), None, tmp_path / "unused")
    assert (made.precision, made.inputs[0].shape, made.outputs[0].shape) == (precision, ("batch", 4), ("batch", 2))
    session = NCNN.load(trial, made)
    (found,) = answer_feeds(session, {"data": X[:batch]}).items()
    assert found[0] == "scores"
    np.testing.assert_allclose(
        found[1], X[:batch] @ WEIGHTS.T + BIAS, rtol=0.01 if kind else 1e-6, atol=0.05 if kind else 1e-6
    )
    facts = session.facts()
    assert (facts.layers_by_type, facts.threads, facts.precision_truth.ok) == ({type_: 1}, 1, True)
    with pytest.raises(UserError, match=r"'data' wants \dx4, but got 2x3"):
        session.bind({"data": X[:, :3]})


def test_refusals_depend_on_the_precision_of_the_file(tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    assert NCNN.refuse(trial_of(path, "bf16")) == ""
    assert "run it as int8" in NCNN.refuse(trial_of(path, "fp32", "int8"))
    assert NCNN.refuse(trial_of(path, "int8")).startswith("ncnn has no int8 here")
    assert "reads float32 weights" in NCNN.refuse(trial_of(tmp_path / "net.onnx", "fp16", "fp16"))


@pytest.mark.usefixtures("preloaded")
def test_damaged_graphs_are_refused_in_one_line(refused: Any, tmp_path: Path) -> None:
    path = write_graph(tmp_path)
    text, weights = path.read_text(), path.with_suffix(".bin")
    path.write_text(text.replace("0=4", ""))
    assert "doesn't say the shape of its input 'data'" in refused("run", path)
    path.write_text(text.replace("InnerProduct", "Unheard"))
    assert "ncnn has no layer for Unheard" in refused("run", path)
    path.write_text(text[: text.index("1 1 data")])
    assert "was cut short" in refused("run", path)
    path.write_text(text[: text.index(" scores")])
    assert "lacks names of its inputs or outputs" in refused("run", path)
    path.write_text(text.replace("0=4", "0=four"))
    assert "is a damaged graph of ncnn" in refused("run", path)
    path.write_text(text.replace("0=4", "").replace("InnerProduct", "Split").replace("scores", "data"))
    assert "doesn't say the shape of its input 'data'" in refused("run", path), "a graph that goes round"
    path.write_text(text)
    weights.write_bytes(weights.read_bytes()[:20])
    assert "can't be loaded by ncnn" in refused("run", path)
    weights.unlink()
    assert "needs its weights in" in refused("run", path)


def test_image_channels_are_read_from_the_first_convolution(nets: Path, tmp_path: Path, batch: int) -> None:
    trial = trial_of_module(nets, "small", batch)
    (tmp_path / "made").mkdir()
    made = Path(registry.get_maker("ncnn").make(NCNN.recipe(trial), None, tmp_path / "made").path)
    contents = registry.list_formats()["ncnn"].read(str(made), replace(trial_of(made), dims=Dims(1, 8, 8)))
    assert contents.inputs[0].shape == ("batch", 3, "height", "width")
    assert contents.outputs[0].shape == ("batch", 5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_converted_module_matches_pytorch_outputs(nets: Path, tmp_path: Path, batch: int, precision: str) -> None:
    import torch

    from dyno import Study
    from dyno.study.model_info import inspect_model, model_spec
    from dyno.worker.nets import models

    study = Study(models=(f"{nets}:net",))
    model, _ = inspect_model(model_spec(study, study.models[0]), study)
    trial = Trial(model, "ncnn", precision, Dims(batch, 8, 8), runtime=Runtime(threads=1))
    made = registry.get_maker("ncnn").make(NCNN.recipe(trial), None, tmp_path)
    session = NCNN.load(trial, made)
    image = np.random.default_rng(0).standard_normal((batch, 3, 8, 8), np.float32)
    ids = np.arange(6 * batch).reshape(batch, 6) % 9
    found = answer_feeds(session, {"image": image, "ids": ids})
    with torch.inference_mode():
        expected = models.load(model, trial.dims)(torch.from_numpy(image), torch.from_numpy(ids))
    off = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[precision]
    for name, value in zip(("output", "output_1"), expected.values(), strict=True):
        np.testing.assert_allclose(found[name], value.numpy(), rtol=off, atol=off)
    truth = session.facts().precision_truth
    is_x86 = platform.machine() in ("x86_64", "AMD64")  # no layer keeps its results in fp16 there
    ran = {"fp32": True, "bf16": batch == 2, "fp16": not is_x86}  # versions without batches have no bf16 there
    assert truth.ok == ran[precision], truth.sentence
    with pytest.raises(UserError, match="'ids' has numbers beyond it"):
        session.bind({"image": image, "ids": ids + 2**40})


def outputs_of(folder: str) -> dict[str, str]:
    """Return the table's judgement of each backend's outputs."""
    frame = trial_table.read_trials(Path(folder)).frame
    return dict(zip(frame["backend"], frame["outputs"], strict=True))


@pytest.mark.usefixtures("preloaded", "unreported")
def test_an_exported_script_runs(call: Any, nets: Path, tmp_path: Path, batch: int) -> None:
    words = ("--size", 8, "--batch", batch, "--quick", "--seconds", 0.02, "--warmup", 0.01, "--threads", 1)
    code, _, err = call("run", "nets.py:small", "--backend", "pytorch,ncnn", *words, "--out", "run")
    assert code == 0 and outputs_of("run")["ncnn"] == "agree", err
    assert call("export", "run", "ncnn", "-o", "best")[0] == 0
    done = subprocess.run([sys.executable, "best.py"], cwd=tmp_path, capture_output=True, text=True)
    assert f"output float32 {batch}x5" in done.stdout, done.stderr
    code, out, _ = call("inspect", "best.param")
    assert code == 0 and out.count("Convolution") == 2 and "InnerProduct" in out


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "mixing",
            r"pnnx can't convert net correctly: it wrote a graph whose output is off by",
        ),
        ("lacking", "ncnn has no layer for .*, which net needs"),
        ("deciding", "a graph would hold one branch only: .*nets.py, line"),
    ],
)
def test_modules_that_would_be_converted_wrongly_are_refused(
    nets: Path, tmp_path: Path, batch: int, source: str, reason: str
) -> None:
    if source == "mixing" and batch == 1:
        pytest.skip("this version of ncnn has no batches that could be mixed")
    trial = trial_of_module(nets, source, batch)
    with pytest.raises((UserError, Unavailable), match=reason):
        registry.get_maker("ncnn").make(NCNN.recipe(trial), None, tmp_path)


@pytest.mark.usefixtures("preloaded", "unreported")
def test_an_onnx_file_is_converted_without_touching_its_folder(
    call: Any, nets: Path, tmp_path: Path, batch: int
) -> None:
    pytest.importorskip("onnxruntime")
    assert call("export", "nets.py:small", "-o", "given/small.onnx", "--size", 8)[0] == 0
    words = ("--batch", batch, "--quick", "--seconds", 0.02, "--warmup", 0.01, "--backend", "ncnn,onnxruntime")
    code, _, err = call("run", "given/small.onnx", *words, "--out", "run")
    assert code == 0 and outputs_of("run") == {"onnxruntime": "", "ncnn": "agree"}, err
    assert [path.name for path in (tmp_path / "given").iterdir()] == ["small.onnx"]


def test_a_graph_with_a_missing_output_is_refused(tmp_path: Path) -> None:
    opened = OpenGraph(str(write_graph(tmp_path)), "fp32", 1)
    with pytest.raises(UserError, match="pnnx made 1 outputs of 2"):
        opened.answer([Tensor("data", "float32", (1, 4))], [X[:1]], 2)


def test_a_library_without_batch_support_runs_one_image(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mat:
        def __new__(cls, array: np.ndarray) -> Any:
            return library.ncnn.Mat(array)

    path = write_graph(tmp_path)
    trial = trial_of(path, batch=1)
    made = registry.get_maker("ncnn").make(NCNN.recipe(trial), None, tmp_path)
    monkeypatch.setattr(library, "Mat", Mat)
    (found,) = answer_feeds(NCNN.load(trial, made), {"data": X[:1]}).values()
    np.testing.assert_allclose(found, X[:1] @ WEIGHTS.T + BIAS, rtol=1e-6)
    with pytest.raises(Unavailable, match="runs one image at a time"):
        NCNN.load(trial_of(path, batch=2), made)
