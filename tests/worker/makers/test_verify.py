"""An exported graph is compared with its module, and rounding is told apart from a wrong graph."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from dyno.worker.makers.verify import Case, ExportSource, UndecidedGraph, WrongGraph, list_doubts, verify_graph
from dyno.worker.onnx_graph.file import read_io


class Rounding(nn.Module):
    """The identity through numbers so large that FP32 loses its last digits."""

    def __init__(self, by: float = 1e5) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.by) - self.by


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def graph(module: nn.Module, path: Path) -> Path:
    """Export the module to ONNX with a free batch."""
    names = {
        "input_names": ["input"],
        "output_names": ["output"],
        "dynamic_axes": {"input": {0: "n"}, "output": {0: "n"}},
    }
    torch.onnx.export(module, (torch.ones(2, 64),), str(path), dynamo=False, **names)
    return path


def source(module: nn.Module) -> ExportSource:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    return ExportSource(
        module, (x,), ("output",), (Case(3, {"input": x.numpy()}, {"output": module(x).numpy()}),), True
    )


def test_a_right_graph_raises_no_doubts(tmp_path):
    path = graph(Scaled(2.0), tmp_path / "twice.onnx")
    checked = verify_graph(path, read_io(str(path))[1], source(Scaled(2.0)))
    assert checked.max_abs_error == 0 and checked.own_error is None
    assert list_doubts(checked) == []


def test_differences_explained_by_rounding_are_accepted_and_reported(tmp_path):
    path = graph(Scaled(1.0), tmp_path / "same.onnx")
    checked = verify_graph(path, read_io(str(path))[1], source(Rounding()))
    assert checked.max_abs_error == pytest.approx(checked.own_error) and checked.own_error > checked.atol
    (said,) = list_doubts(checked)
    assert "amplifies rounding" in said and "lower precisions will differ by far more" in said


def test_rounding_does_not_excuse_a_wrong_graph(tmp_path):
    path = graph(Scaled(1.05), tmp_path / "more.onnx")
    for module in (Scaled(1.0), Rounding()):
        with pytest.raises(WrongGraph, match="output is off by"):
            verify_graph(path, read_io(str(path))[1], source(module))


def test_outputs_dominated_by_rounding_are_undecided(tmp_path):
    """A graph with another number of values is wrong regardless of rounding."""
    path = graph(Scaled(1.05), tmp_path / "more.onnx")
    with pytest.raises(
        UndecidedGraph, match=r"^the module's own output in FP32 is off by .* from FP64, where the largest"
    ):
        verify_graph(path, read_io(str(path))[1], source(Rounding(1e7)))
    path = graph(nn.Linear(64, 8), tmp_path / "fewer.onnx")
    with pytest.raises(WrongGraph, match=r"output is \[3, 8\] where the module's is \[3, 64\]"):
        verify_graph(path, read_io(str(path))[1], source(Rounding(1e7)))


def suppressing(order: np.ndarray, shift: float, path: Path) -> Path:
    """Write a graph that reorders its input's rows into boxes, labels and scores, with boxes moved by `shift`."""
    graph = parser.parse_graph("""rows (float[n, 6] input) => (float[m, 4] boxes, int64[m] labels, float[m] scores) {
        ordered = Gather<axis = 0>(input, order)
        corners, label, score = Split<axis = 1>(ordered, widths)
        boxes = Add(corners, shift)
        named = Squeeze(label, last)
        labels = Cast<to = 7>(named)
        scores = Squeeze(score, last)
    }""")
    stored = {"order": order, "shift": np.float32(shift), "widths": np.int64([4, 1, 1]), "last": np.int64([1])}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items())
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def test_boxes_are_compared_as_a_set(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.uniform(0, 100, (200, 6)).astype(np.float32)
    rows[:, 4], rows[:, 5] = rng.integers(0, 9, 200), 0.5  # equal scores, so any order is right
    outputs = {"boxes": rows[:, :4], "labels": rows[:, 4].astype(np.int64), "scores": rows[:, 5]}
    boxes = ExportSource(None, (), tuple(outputs), (Case(1, {"input": rows}, outputs),), False, rows=True)
    everything = rng.permutation(200)
    path = suppressing(everything, 0, tmp_path / "mixed.onnx")
    assert verify_graph(path, read_io(str(path))[1], boxes).boxes_apart == 0
    path = suppressing(everything[:199], 0, tmp_path / "one.onnx")  # rounding at a threshold may lose one box
    assert verify_graph(path, read_io(str(path))[1], boxes).boxes_apart == 1
    path = suppressing(np.arange(200), 0, tmp_path / "same.onnx")
    assert verify_graph(path, read_io(str(path))[1], replace(boxes, rows=False)).max_abs_error == 0
    for order, shift, said in [(everything, 2, "400 of 400 boxes"), (everything[:190], 0, "10 of 390 boxes")]:
        path = suppressing(order, shift, tmp_path / "wrong.onnx")
        with pytest.raises(WrongGraph, match=said):
            verify_graph(path, read_io(str(path))[1], boxes)
    empty = {name: array[:0] for name, array in outputs.items()}
    path = suppressing(everything[:0], 0, tmp_path / "empty.onnx")
    nothing = ExportSource(None, (), tuple(outputs), (Case(1, {"input": rows}, empty),), False, rows=True)
    with pytest.raises(WrongGraph, match="no image has boxes; give trained weights"):
        verify_graph(path, read_io(str(path))[1], nothing)
