"""A file of a wrapped module has the module's own names, and computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from dyno.worker.makers.export import unwrap


def test_names_lose_the_wrapper_but_for_those_that_are_taken(tmp_path: Path) -> None:
    branches = [
        helper.make_graph(
            [helper.make_node(kind, ["h", "model.fc.weight"], [f"y{kind}"], f"/model/{kind}")],
            kind, [], [helper.make_tensor_value_info(f"y{kind}", TensorProto.FLOAT, None)],
        )
        for kind in ("Add", "Sub")
    ]  # fmt: skip
    nodes = [
        helper.make_node("Mul", ["x", "model.scale"], ["m"], "/model/Mul"),
        helper.make_node("Add", ["m", "scale"], ["h"], "/Mul"),  # the wrapper's own
        helper.make_node("Abs", ["h"], ["a"], "/model/model/Mul"),  # whose new name is that of one which stays
        helper.make_node("Abs", ["h"], ["b"], "/model/Abs"),
        helper.make_node("Abs", ["h"], ["c"], "/model/model/Abs"),
        helper.make_node("If", ["yes"], ["y"], "/model/fc/If", then_branch=branches[0], else_branch=branches[1]),
    ]
    stored = {"model.scale": np.float32([2]), "scale": np.float32([3]), "model.fc.weight": np.float32([5]),
              "yes": np.array(True)}  # fmt: skip
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph(nodes, "net", [x], [y], [numpy_helper.from_array(v, k) for k, v in stored.items()])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    unwrap(path)
    read = onnx.load(path).graph
    assert [node.name for node in read.node] == [
        "/model/Mul", "/Mul", "/model/model/Mul", "/Abs", "/model/Abs", "/fc/If"
    ]  # fmt: skip
    assert {tensor.name for tensor in read.initializer} == {"model.scale", "scale", "fc.weight", "yes"}
    assert onnxruntime.InferenceSession(path).run(None, {"x": np.float32([1])})[0] == 1 * 2 + 3 + 5
