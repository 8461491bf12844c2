"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """y = x + x on 2 x 3 x 8 x 8 images, with nothing free."""
    onnx = pytest.importorskip("onnx")
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3, 8, 8]) for name in ("input", "output")
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["input", "input"], ["output"])], "g", ends[:1], ends[1:]
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "m.onnx",
    )
    return tmp_path / "m.onnx"


@pytest.fixture
def half_known(tmp_path: Path) -> Path:
    """Determinants of 2 x 3 x 3 numbers, which ONNX Runtime computes and OpenVINO has no operator for."""
    onnx = pytest.importorskip("onnx")
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [2, 3, 3]), ("y", [2]))
    ]
    nodes = [onnx.helper.make_node("Relu", ["x"], ["positive"]), onnx.helper.make_node("Det", ["positive"], ["y"])]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:])
    path = tmp_path / "half.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)
    return path
