"""Weights that an ONNX graph keeps in files beside it belong to it wherever it goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from dyno.store import copy, sha256_of
from dyno.worker.layers.graph import read_graph as read_layers
from dyno.worker.onnx_graph import graph_facts as onnx_weights
from dyno.worker.spec import UserError


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """y = x + w, with w in weights.bin."""
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (h.make_tensor_value_info(name, kind, [256]) for name in "xy")
    w = onnx.numpy_helper.from_array(np.arange(256, dtype=np.float32), "w")
    model = h.make_model(
        h.make_graph([h.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [w]),
        opset_imports=[h.make_opsetid("", 18)], ir_version=9,
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def ran(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"x": np.zeros(256, np.float32)})
    return np.asarray(out)


def test_a_change_of_the_weights_is_another_file(graph: Path) -> None:
    (weights,) = onnx_weights.list_files_beside(graph)
    assert weights == graph.parent / "weights.bin"
    before = sha256_of(graph)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert sha256_of(graph) != before
    weights.unlink()
    assert sha256_of(graph) != before


def test_a_copy_takes_them_along_under_its_own_name(graph: Path, tmp_path: Path) -> None:
    for name in ("one.onnx", "two.onnx"):
        copy(graph, tmp_path / "out" / name)
    (tmp_path / "weights.bin").unlink()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "one.onnx", "one.onnx.data", "two.onnx", "two.onnx.data",
    ]  # fmt: skip
    np.testing.assert_array_equal(ran(tmp_path / "out" / "two.onnx"), np.arange(256))


def test_what_is_no_graph_has_nothing_beside_it(tmp_path: Path) -> None:
    for content in (b"", b"location", b"no graph at a location of its own"):
        (tmp_path / "a.onnx").write_bytes(content)
        assert onnx_weights.list_files_beside(tmp_path / "a.onnx") == []


def test_a_file_of_weights_that_is_cut_short_is_one_line(graph: Path) -> None:
    onnx_weights.check_files_beside(str(graph))
    with open(graph.parent / "weights.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"weights.bin, which is cut short at 1,000 bytes: w ends at 1,024; copy it"):
        onnx_weights.check_files_beside(str(graph))
    with pytest.raises(UserError, match="cut short"):
        read_layers(str(graph), {"x": (256,)})
