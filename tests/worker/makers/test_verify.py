"""An exported graph is held against its module, and rounding is told apart from a wrong graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dyno.worker.makers.verify import Case, Source, Wrong, doubtful, verified
from dyno.worker.onnx_graph.file import read_io


class Rounding(nn.Module):
    """The identity by way of numbers so large that FP32 loses its last digits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1e5) - 1e5


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def graph(module: nn.Module, path: Path) -> Path:
    """The module's ONNX file for any batch."""
    names = {
        "input_names": ["input"],
        "output_names": ["output"],
        "dynamic_axes": {"input": {0: "n"}, "output": {0: "n"}},
    }
    torch.onnx.export(module, (torch.ones(2, 64),), str(path), dynamo=False, **names)
    return path


def source(module: nn.Module) -> Source:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    return Source(module, (x,), ("output",), (Case(3, {"input": x.numpy()}, {"output": module(x).numpy()}),), True)


def test_a_right_graph_raises_no_doubts(tmp_path):
    path = graph(Scaled(2.0), tmp_path / "twice.onnx")
    checked = verified(path, read_io(str(path))[1], source(Scaled(2.0)))
    assert checked["max_abs_error"] == 0 and "own_error" not in checked
    assert doubtful(checked) == []


def test_what_the_module_s_own_rounding_explains_is_accepted_and_said(tmp_path):
    path = graph(Scaled(1.0), tmp_path / "same.onnx")
    checked = verified(path, read_io(str(path))[1], source(Rounding()))
    assert checked["max_abs_error"] == pytest.approx(checked["own_error"]) and checked["own_error"] > checked["atol"]
    (said,) = doubtful(checked)
    assert "amplifies rounding" in said and "lower precisions will differ by far more" in said


def test_rounding_is_no_excuse_for_a_wrong_graph(tmp_path):
    path = graph(Scaled(1.05), tmp_path / "more.onnx")
    for module in (Scaled(1.0), Rounding()):
        with pytest.raises(Wrong, match="output is off by"):
            verified(path, read_io(str(path))[1], source(module))
