"""Modules whose path depends on values are refused with the line; decisions on shapes are allowed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dyno import load
from dyno.worker.makers.control_flow import check_control_flow
from dyno.worker.spec import NoRoute

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.way = nn.Conv2d(3, 10, 3), nn.Conv2d(3, 10, 3), way
    def forward(self, x): return getattr(self, self.way)(x).mean((2, 3))
    def branch(self, x):
        if x.mean() > 0.3:
            return self.a(x)
        return self.b(x)
    def loop(self, x):
        for _ in range(int(x.abs().mean() * 3)):
            x = x + 1
        return self.a(x)
    def numpy(self, x): return self.a(x) * float(x.detach().numpy().max())
    def shape(self, x):
        if x.shape[2] % 2:
            x = x[:, :, 1:]
        return self.a(x)
    def chosen(self, x): return torch.where(x.mean() > 0.3, self.a(x), self.b(x))

def branch(): return Net("branch")
def loop(): return Net("loop")
def numpy(): return Net("numpy")
def shape(): return Net("shape")
def chosen(): return Net("chosen")
def scripted(): return torch.jit.script(Scripted())

class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 10, 3), nn.Conv2d(3, 10, 3)
    def forward(self, x):
        if bool(x.mean() > 0.3):
            y = self.a(x)
        else:
            y = self.b(x)
        return y.mean((2, 3))
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("branch", "`if x.mean() > 0.3:` (nets.py, line 11)"),
        pytest.param("loop", "`for _ in range(int(x.abs().mean() * 3)):` (nets.py, line 15)", marks=pytest.mark.slow),
        pytest.param("numpy", "nets.py, line 18", marks=pytest.mark.slow),
    ],
)
def test_value_dependent_control_flow_is_not_exported(dyno: Any, nets: Path, function: str, line: str) -> None:
    out = nets.with_name("m.onnx")
    done = dyno("export", f"{nets}:{function}", "-o", out, "--size", 32)
    assert done.returncode == 2 and line in done.stderr, done.stderr
    assert not out.exists() and len(done.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize("function", ["shape", "chosen"])
def test_branches_on_shapes_and_where_are_exported(dyno: Any, nets: Path, function: str) -> None:
    dyno("export", f"{nets}:{function}", "-o", nets.with_name("m.onnx"), "--size", 33, code=0)


def test_value_dependent_branches_run_only_in_pytorch(dyno: Any, nets: Path) -> None:
    photos = nets.with_name("photos")
    photos.mkdir()
    rng = np.random.default_rng(0)
    for k in range(6):  # dark and bright images take different branches
        pixels = rng.integers(0, 60, (32, 32, 3)) + (190 if k % 2 else 0)
        Image.fromarray(pixels.astype(np.uint8)).save(photos / f"{k}.png")
    words = ("--data", photos, "--size", 32, "--rounds", 1, "--seconds", 0.05, "--block", 0.01, "--warmup", 0.02,
             "--boundaries", "model")  # fmt: skip
    done = dyno(
        "run", f"{nets}:branch", "--backend", "pytorch,onnxruntime,openvino", *words, "--out", nets.parent / "r", code=3
    )
    rows = load(nets.parent / "r").to_pandas().set_index("backend")
    assert dict(rows["status"]) == {"pytorch": "ok", "onnxruntime": "failed", "openvino": "failed"}
    assert done.stdout.count("a graph would hold one branch only") >= 2


@pytest.mark.parametrize("asks", [True, False])
def test_a_shortcut_skipped_during_export_may_read_values(asks: bool) -> None:
    """transformers' attention masks do so: left out if they hide nothing, but not in an export."""
    import torch

    class Masked(torch.nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            if not (asks and torch.compiler.is_exporting()) and mask.all():
                return x.mean(1)
            return (x * mask).sum(1) / mask.sum(1)

    example = (torch.randn(2, 4), torch.ones(2, 4))
    if asks:
        assert check_control_flow(torch, Masked(), example) is False  # unknown, so the graph is compared
        assert not torch.compiler.is_exporting()
    else:
        with pytest.raises(NoRoute, match=r"mask\.all\(\)"):
            check_control_flow(torch, Masked(), example)


def test_packed_sequences_of_any_lengths_are_exported(dyno: Any, tmp_path: Path) -> None:
    import onnxruntime

    (tmp_path / "tagger.py").write_text("""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.r = nn.LSTM(4, 3, batch_first=True)
    def forward(self, x, lengths):
        y, _ = self.r(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]

def tagger(): return Tagger()
def tagger_inputs(): return torch.randn(2, 6, 4), torch.tensor([6, 2])
""")
    out = tmp_path / "m.onnx"
    dyno("export", f"{tmp_path}/tagger.py:tagger", "-o", out, code=0)
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
    (found,) = session.run(None, {"x": x, "lengths": np.array([3, 5])})
    assert np.all(found[0, 3:] == 0) and np.all(found[0, :3] != 0)
    assert np.all(found[1, 5:] == 0) and np.all(found[1, :5] != 0)
