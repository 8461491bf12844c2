"""`dyno export`: the exported script runs without Dyno and gives the trial's outputs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import onnx_text
import preloaded as forked
from dyno import Study
from dyno.api import Result
from dyno.formatting import show
from dyno.study.interpreters import find_missing
from dyno.worker.inputs import input_data, specs
from dyno.worker.spec import Tensor, Trial
from refusals import refuses

pytestmark = pytest.mark.usefixtures("preloaded")

NET = """
from torch import nn

def net(num_classes=2):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, num_classes),
    )
"""
# Token ids, a keyword-only mask, a number, and a dataclass as the result.
WORDS = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Answer:
    scores: torch.Tensor
    hidden: tuple
    large: torch.Tensor

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)
    def forward(self, ids, *, mask, rate):
        rows = self.embed(ids) * mask[..., None]
        return Answer(self.head(rows.mean(1)) * rate, (rows,), ids + 2**53 + 1)

def words(): return Words()
def words_inputs():
    return {"ids": torch.zeros(2, 6, dtype=torch.int64), "mask": torch.ones(2, 6, dtype=torch.bool), "rate": 3}
"""
# A process that can't import Dyno: reads feeds, writes outputs and prepared photographs.
ALONE = """
import importlib.util, sys
import numpy as np
sys.modules["dyno"] = None
spec = importlib.util.spec_from_file_location("taken", sys.argv[1])
taken = importlib.util.module_from_spec(spec)
spec.loader.exec_module(taken)
fed = np.load(sys.argv[2])
model = taken.load()
batches = [{name: fed[f"{name}/{k}"] for name in taken.INPUTS} for k in range(len(fed) // len(taken.INPUTS))]
found = [taken.run(model, feeds) for feeds in batches]
made = {f"output:{name}": np.concatenate([each[name] for each in found]) for name in found[0]}
prepared = [taken.prepare(path) for path in sys.argv[4:]]
np.savez(sys.argv[3], prepared=np.stack(prepared or [0]), **made)
"""


def ran(study: Study, folder: Path) -> Result:
    rounds: dict[str, Any] = {"rounds": 1, "until": "rounds", "routes": "usual"}
    short: dict[str, Any] = {**rounds, "seconds": 0.04, "block": 0.01, "warmup": 0.02, "threads": 2}
    return Study(**{**{name: getattr(study, name) for name in study.to_table()}, **short}).run(folder, quiet=True)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten photographs of two classes, all oblong, some grey, one of 16 bits."""
    pytest.importorskip("PIL")
    from PIL import Image

    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for k in range(20):
        place = folder / ("tested" if k < 10 else "others") / "ab"[k % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (40 + 3 * k, 61 - k, 3), np.uint8)
        grey = pixels[..., 0].astype(np.uint16) << 8 if k == 4 else pixels[..., 0]
        Image.fromarray(grey if k in (3, 4) else pixels).save(place / f"{k}.png")
    return folder / "tested"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Result:
    """Run of a small network on photographs in three libraries, FP32 and INT8, at batch 2."""
    for name in ("torch", "onnx", "onnxruntime", "openvino"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("take")
    (folder / "net.py").write_text(NET)
    study = Study(
        models=(f"{folder}/net.py:net",),
        backends=("pytorch", "onnxruntime@precision=fp32+int8@optimization=basic", "openvino", "pytorch@input=uint8"),
        batches=(2,),
        sizes=("24x32",),
        data=str(photos),
        calibration=str(photos.with_name("others")),
    )
    return ran(study, folder / "run")


def feeds(trial: Trial, batches: int) -> dict[str, np.ndarray]:
    """Return the trial's evaluation inputs by `name/batch`."""
    kind = "uint8" if trial.options.get("input") == "uint8" else "float32"
    shape = (trial.dims.batch, trial.model.channels, trial.dims.height, trial.dims.width)
    given = trial.model.inputs
    tensors = specs.list_tensors(given, trial.dims) or [Tensor("input", kind, shape)]
    made = input_data.read_batches(trial.data, trial.model.preprocess, tensors, trial.dims, batches, given)
    return {f"{name}/{k}": feed[name] for k, feed in enumerate(made) for name in feed}


def run_alone(script: Path, fed: dict[str, np.ndarray], pictures: list[Path], scratch: Path) -> dict[str, np.ndarray]:
    np.savez(scratch / "fed.npz", **fed)
    words = [str(word) for word in (script, scratch / "fed.npz", scratch / "made.npz", *pictures)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = forked.command(os.environ[forked.FORKS], words, scratch, clean, 1200, ("-c", ALONE))
    assert done.returncode == 0, done.stderr
    return dict(np.load(scratch / "made.npz"))


@pytest.mark.parametrize(
    "which", ["pytorch", "pytorch@input=uint8", "onnxruntime/int8", "onnxruntime/fp32", "openvino"]
)
def test_exported_scripts_answer_like_their_trial(run: Result, photos: Path, which: str, tmp_path: Path) -> None:
    taken = run.export(which, tmp_path / "best")
    found = run.records.trial(taken.trial)
    trial, stored = found.spec, found.outputs()
    pictures = sorted(photos.rglob("*.png"))
    made = run_alone(taken.script, feeds(trial, 5), pictures, tmp_path)
    assert stored and len(stored["output"]) == 10
    np.testing.assert_allclose(made["output:output"], stored["output"], rtol=1e-5, atol=1e-6)
    decoded = feeds(trial, 5)
    images = {each.tobytes() for batch in decoded.values() for each in batch}
    assert {each.tobytes() for each in made["prepared"]} == images
    assert "dyno" not in {line.split()[1].split(".")[0] for line in taken.script.read_text().splitlines()
                          if line.startswith(("import ", "from "))}  # fmt: skip


@pytest.mark.parametrize("which", ["aoti/bf16", "torchao@scheme=static", "torchao@scheme=dynamic"])
def test_compiled_trials_are_exported(which: str, photos: Path, tmp_path: Path) -> None:
    if lacks := find_missing(re.split("[@/]", which)[0]):
        pytest.skip(f"{lacks} is not installed")
    (tmp_path / "net.py").write_text(NET)
    backend, _, precision = which.partition("/")
    study = Study(
        models=(f"{tmp_path}/net.py:net",), backends=(backend,), precisions=(precision or "int8",), sizes=("24x32",),
        data=str(photos), calibration=str(photos.with_name("others")),
    )  # fmt: skip
    result = ran(study, tmp_path / "run")
    taken = result.export(which, tmp_path / "best")
    found = result.records.trial(taken.trial)
    made = run_alone(taken.script, feeds(found.spec, 10), [], tmp_path)
    np.testing.assert_allclose(made["output:output"], found.outputs()["output"], rtol=1e-4, atol=1e-5)


def test_the_winner_is_exported_and_a_lost_file_is_rebuilt(run: Result, call: Any, tmp_path: Path) -> None:
    code, out, err = call("export", run.folder, "openvino", "-o", "best")
    assert (code, err) == (0, "") and "best.xml" in out and out.endswith("run it: python best.py\n")
    size = sum((tmp_path / f"best.{suffix}").stat().st_size for suffix in ("xml", "bin"))
    assert f"best.xml ({show(size, 'bytes')})" in out and "(0.00 MB)" not in out
    done = subprocess.run([sys.executable, "best.py"], capture_output=True, text=True, cwd=tmp_path, timeout=1200)
    assert done.returncode == 0 and "output float32 2x2" in done.stdout, done.stderr
    made = Path(run.records.trial(run.export("openvino", tmp_path / "again").trial).artifact.path)
    shutil.rmtree(made.parent)
    code, out, err = call("export", run.folder, "openvino", "-o", "best")
    assert code == 0 and made.is_file(), err
    assert run.export().file.name.startswith("net-")


def test_unexportable_trials_are_refused_in_one_line(run: Result, refused: Any, tmp_path: Path) -> None:
    assert "no trial of" in (line := refused("export", run.folder, "tensorrt")) and "openvino/fp32" in line
    assert "file is .onnx; give -o best.onnx" in refused("export", run.folder, "onnxruntime/fp32", "-o", "best.xml")
    assert "fits several trials" in refused("export", run.folder, "onnxruntime")
    (tmp_path / "net.py").write_text(NET)
    assert "net.py exists already and was not written by" in refused("export", run.folder, "openvino", "-o", "net.xml")
    assert (tmp_path / "net.py").read_text() == NET
    assert refused("export", run.folder, "--precision", "fp16").endswith(
        "exported as it was measured; omit every option but -o"
    )
    assert refused("export", "nowhere").startswith("nowhere does not exist")


@pytest.mark.usefixtures("unreported")
@pytest.mark.parametrize(
    ("inputs", "node", "words", "code"),
    [
        ("uint8[N, 8, 8, 3] x", "f = Cast<to = 1>(x) y = ReduceMean<axes = [1, 2], keepdims = 0>(f)", [], 0),
        ("float[N, 3, 8, 8] x, float[N, 2] size", "m = ReduceMean<axes = [2, 3], keepdims = 0>(x)"
         "s = ReduceMean<axes = [1], keepdims = 1>(size) y = Mul(m, s)", ["--input", "size=8"], 0),
        ("float[N, 3] x", "y = Identity(x)", [], 1),
    ],
    ids=["bytes, channels last", "a size beside it", "no image"],
)  # fmt: skip
def test_scripts_answer_or_refuse_photographs(
    inputs: str, node: str, words: list[str], code: int, call: Any, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    onnx_text.write(tmp_path / "net.onnx", f"({inputs}) => (float[N, 3] y) {{ {node} }}")
    call("time", "net.onnx", *words, "--batch", "2", "--seconds", "0.02", "--out", "r", code=0)
    call("export", "r", "-o", "best", code=0)
    photos = ["red.png", "lime.png", "blue.png"]
    for photo in photos:
        Image.new("RGB", (20, 10), photo.removesuffix(".png")).save(tmp_path / photo)
    for several in (photos, photos[1:2]):
        script = [sys.executable, "best.py", *several]
        done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, timeout=600)
        assert done.returncode == code and (not code or "takes no photographs" in done.stderr), done.stderr
        classes = " ".join(re.findall("class with the highest score: (.*)", done.stdout)).split()
        assert classes == [str(photos.index(photo)) for photo in several if not code]


@pytest.mark.usefixtures("unreported")
def test_a_run_prints_how_to_export_its_winner(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "net.py").write_text(NET)
    short = "--rounds 1 --seconds 0.04 --block 0.01 --warmup 0.02".split()
    code, out, err = call("run", "net.py:net", "--size", "16", "--backend", "onnxruntime", *short, "--out", "r")
    assert code == 0 and ("take it: dyno export r\n" in out or "choose: dyno export r BACKEND/PRECISION\n" in out), err
    assert call("export", "r")[0] == 0 and (tmp_path / "net-onnxruntime-fp32.onnx").is_file()
    (tmp_path / "latest").symlink_to("r")
    assert "run it: python 'my best.py'\n" in call("export", "latest", "-o", "my best", code=0)[1]
    assert "    python 'my best.py' PHOTO.jpg" in (tmp_path / "my best.py").read_text()


@pytest.mark.parametrize(
    ("model", "size"),
    [("torchvision:squeezenet1_1", "64"), ("timm:test_vit", "160"), ("ultralytics:yolov8n.yaml", "64")],
)
def test_scripts_rebuild_library_modules(model: str, size: str, tmp_path: Path) -> None:
    pytest.importorskip(model.partition(":")[0])
    result = ran(Study(models=(model,), backends=("pytorch",), sizes=(size,), compared=2), tmp_path / "run")
    taken = result.export(out=tmp_path / "best")
    found = result.records.trial(taken.trial)
    made = run_alone(taken.script, feeds(found.spec, 2), [], tmp_path)
    for name, values in found.outputs().items():
        np.testing.assert_allclose(made[f"output:{name}"], values, rtol=1e-4, atol=1e-5)


def test_scripts_rebuild_wrapped_modules(tmp_path: Path) -> None:
    """torch.compile and DataParallel are removed before measuring, so weights have the inner network's names."""
    pytest.importorskip("torch")
    (tmp_path / "nets.py").write_text(
        "import torch\n\n"
        "def net(): return torch.nn.Sequential(torch.compile(torch.nn.Conv2d(3, 4, 3)), torch.nn.Flatten())\n"
        "def wrapped(): return torch.nn.DataParallel(torch.compile(net()))\n"
        "def program(): return torch.export.export(net()[1:], (torch.zeros(1, 3, 8, 8),))\n"
        "def running(): return program().module()\n"
    )
    for name in ("wrapped", "program", "running"):
        study = Study(models=(f"{tmp_path}/nets.py:{name}",), backends=("pytorch",), sizes=("8",), compared=2)
        taken = (result := ran(study, tmp_path / name)).export(out=tmp_path / f"best-{name}")
        found = result.records.trial(taken.trial)
        made = run_alone(taken.script, feeds(found.spec, 2), [], tmp_path)
        for output, values in found.outputs().items():
            np.testing.assert_allclose(made[f"output:{output}"], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["file", "memory"])
def test_modules_with_described_inputs_are_called_the_same_way(where: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "words.py").write_text(WORDS)
    model: Any = f"{tmp_path}/words.py:words"
    if where == "memory":
        model = torch.nn.LSTM(6, 5, batch_first=True), torch.randn(3, 7, 6)
    result = ran(Study(models=(model,), backends=("pytorch",), compared=4), tmp_path / "run")
    taken = result.export(out=tmp_path / "best")
    found = result.records.trial(taken.trial)
    trial, stored = found.spec, found.outputs()
    batches = -(-4 // trial.dims.batch)
    made = run_alone(taken.script, feeds(trial, batches), [], tmp_path)
    for output, values in stored.items():
        again = made[f"output:{output}"].reshape(-1, *values.shape[1:])[: len(values)]
        assert again.dtype == values.dtype
        if values.dtype == np.int64:
            assert (again == values).all() and values.min() > 2**53 and (values % 2).any()
        else:
            np.testing.assert_allclose(again, values, rtol=1e-4, atol=1e-5)
    done = subprocess.run([sys.executable, taken.script], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "output float32" in done.stdout, done.stderr


def test_backends_without_a_script_report_it(fake_study: Any, tmp_path: Path) -> None:
    result = fake_study().run(tmp_path / "run", quiet=True)
    refuses("there is no script for fake; one can be written for onnxruntime", result.export, "fake", tmp_path / "best")
