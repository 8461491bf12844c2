"""What an ONNX file says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dyno.worker.onnx_graph.file import read_facts


@pytest.mark.parametrize(
    ("stored", "computed", "precision"),
    [(np.float16, TensorProto.FLOAT, "fp32"), (np.float32, TensorProto.FLOAT16, "fp16"), (np.float16, 0, "fp16")],
)
def test_a_file_is_of_the_precision_that_its_weights_are_computed_with(
    stored: type, computed: int, precision: str, tmp_path: Path
) -> None:
    """Weights may be kept in half precision, and be cast before a product."""
    turned = helper.make_node("Transpose", ["w"], ["t"])
    cast = helper.make_node("Cast", ["t"], ["c"], to=computed)
    product = helper.make_node("MatMul", ["x", "c" if computed else "t"], ["y"])
    kind = computed or TensorProto.FLOAT16
    x, y = (helper.make_tensor_value_info(name, kind, (1, 8)) for name in "xy")
    nodes = [turned, *([cast] if computed else []), product]
    graph = helper.make_graph(nodes, "net", [x], [y], [numpy_helper.from_array(np.ones((8, 8), stored), "w")])
    onnx.save(helper.make_model(graph), tmp_path / "net.onnx")
    assert read_facts(str(tmp_path / "net.onnx")).precision == precision
