"""Q/DQ between layers: where branches are divided and joined, with one scale, and nowhere that no layer reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from dyno.worker.onnx_graph.placement import place

READS = (1, 4, 6, 6)


def graph(*nodes: Any, outputs: tuple[str, ...]) -> Any:
    rng = np.random.default_rng(0)
    weights = {"w": (4, 4, 1, 1), "half": (2, 2, 1, 1), "wide": (4, 6, 1, 1)}
    constants = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in weights.items()
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, READS)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    body = helper.make_graph([*nodes], "net", [x], ends, constants)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def node(kind: str, inputs: str, outputs: str, **more: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), name=outputs.split()[0], **more)


def scales(model: Any, ranges: dict[str, tuple[float, float]] | None = None) -> dict[str, list[float]]:
    """By node, the scale of each of its inputs that comes out of a pair, else 0; the graph is run, too."""
    names = {name for each in model.graph.node for name in (*each.input, *each.output)}
    place(model, dict.fromkeys(names, (-1.0, 1.27)) | (ranges or {}), set(), transformer=False, joints=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert all(np.isfinite(out).all() for out in session.run(None, {"x": np.ones(READS, np.float32)}))
    makers = {name: each for each in model.graph.node for name in each.output}
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for each in (n for n in model.graph.node if "quantise" not in n.name):
        pairs = [makers.get(name) for name in each.input]
        found[each.name] = [
            float(values[pair.input[1]].max()) if pair is not None and pair.op_type == "DequantizeLinear" else 0.0
            for pair in pairs
        ]
    return found


def test_what_is_divided_summed_and_joined_stays_in_eight_bits_with_one_scale() -> None:
    block = (
        node("Conv", "x w", "a"),
        node("Sigmoid", "a", "s"),
        node("Split", "s", "left right", axis=1),
        node("Conv", "right half", "b"),
        node("Sigmoid", "b", "t"),
        node("Add", "right t", "sum"),
        node("Concat", "left right sum", "c", axis=1),
        node("Conv", "c wide", "d"),
    )
    found = scales(graph(*block, outputs=("d",)), {"sum": (0.0, 2.54)})
    shared = found["left"][0]
    assert round(shared, 4) == 0.02, "that of the sum, the largest of what is joined"
    assert found["c"] == [shared] * 3 and found["d"][0] == shared and found["b"][0] == shared
    assert found["sum"][0] == shared and round(found["sum"][1], 4) == 0.01, "the sum's other branch is joined with none"
    assert found["s"] == [0.0] and found["t"] == [0.0], "what computes in floats reads what its layer wrote"


def test_what_no_layer_reads_stays_float() -> None:
    head = (node("Conv", "x w", "a"), node("Sigmoid", "a", "s"), node("Concat", "a s", "c", axis=1))
    assert scales(graph(*head, outputs=("c",)))["c"] == [0.0, 0.0]
    between = (*head, node("Relu", "c", "r"), node("Split", "r", "p q", axis=1), node("Conv", "q w", "d"))
    found = scales(graph(*between, outputs=("d", "p")))
    assert found["c"] == [0.0, 0.0] and found["p"][0] > 0, "another operator stands between"


def test_enlarging_moves_values_unless_it_interpolates() -> None:
    sizes = onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "factors")

    def enlarged(**how: Any) -> list[float]:
        nodes = (node("Conv", "x w", "a"), node("Resize", "a  factors", "r", **how), node("Conv", "r w", "d"))
        nodes[1].input[:] = ["a", "", "factors"]
        model = graph(*nodes, outputs=("d",))
        model.graph.initializer.append(sizes)
        return scales(model)["r"]

    assert enlarged(mode="nearest")[0] > 0 and enlarged(mode="linear")[0] == 0
