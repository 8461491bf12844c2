"""Q/DQ for TensorRT: at the inputs of INT8 layers, and nowhere between a convolution and the nodes fused into it."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx_text
from dyno.worker.onnx_graph.placement import place_pairs


def graph(*nodes: str, weights: dict[str, tuple[int, ...]], reads: tuple[int, ...] = (1, 4, 6, 6)) -> Any:
    """Build a graph with random weights from lines `Conv x w -> y`; a number after the output is ReduceMean's axis."""
    rng = np.random.default_rng(0)
    made = []
    for line in nodes:
        left, right = line.split(" -> ")
        kind, *inputs = left.split()
        output, *axes = right.split()
        more = {"axes": [int(axis) for axis in axes]} if axes else {}
        made.append(helper.make_node(kind, inputs, [output], name=output, **more))
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    return onnx_text.of_nodes(made, {"x": reads}, {made[-1].output[0]: None}, stored)


def placed(model: Any, transformer: bool = False, excluded: frozenset[str] = frozenset()) -> dict[str, list[bool]]:
    """Return by node which of its inputs come from a DequantizeLinear."""
    names = {name for node in model.graph.node for name in (*node.input, *node.output)}
    place_pairs(model, dict.fromkeys(names, (-2.0, 1.0)), set(excluded), transformer)
    (x,) = model.graph.input
    shape = [axis.dim_value for axis in x.type.tensor_type.shape.dim]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.isfinite(session.run(None, {"x": np.ones(shape, np.float32)})[0]).all()
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    real = [node for node in model.graph.node if "quantise" not in node.name]
    return {node.name: [makers.get(name) == "DequantizeLinear" for name in node.input] for node in real}


W = (4, 4, 1, 1)


def test_a_sum_keeps_its_fused_branch_in_float() -> None:
    pairs = placed(graph("Conv x w -> a", "Add x a -> b", "Relu b -> c", "Conv c v -> d", weights={"w": W, "v": W}))
    assert pairs == {"a": [True, True], "b": [True, False], "c": [False], "d": [True, True]}


def test_a_sum_is_fused_into_the_longer_of_two_branches() -> None:
    net = ("Conv x u -> short", "Conv x v -> one", "Relu one -> two", "Conv two w -> long")
    pairs = placed(graph(*net, "Add short long -> sum", weights={"u": W, "v": W, "w": W}))
    assert pairs["sum"] == [True, False]


def test_a_sum_that_no_convolution_can_absorb_stays_float() -> None:
    pairs = placed(graph("Conv x w -> a", "Relu a -> b", "Add x b -> c", weights={"w": W}))
    assert pairs["c"] == [False, False]
    shared = placed(graph("Conv x w -> a", "Add x a -> b", "Mul a b -> c", weights={"w": W}))
    assert shared["b"] == [False, False]


def test_sums_and_pools_of_a_transformer_stay_float() -> None:
    net = graph("Conv x w -> a", "Add x a -> b", "GlobalAveragePool b -> c", weights={"w": W})
    assert placed(net, transformer=True) == {"a": [True, True], "b": [False, False], "c": [False]}


def test_excluded_nodes_stay_float() -> None:
    pairs = placed(graph("MatMul x w -> a", "MatMul a x -> b", weights={"w": (6, 6)}), excluded=frozenset({"b"}))
    assert pairs == {"a": [True, True], "b": [False, False]}


@pytest.mark.parametrize("mean", ["GlobalAveragePool a -> m", "ReduceMean a -> m 2 3", "ReduceMean a -> m -1 -2"])
def test_only_a_final_mean_reads_int8(mean: str) -> None:
    assert placed(graph("Conv x w -> a", mean, weights={"w": W}))["m"] == [True]
    assert placed(graph("Conv x w -> a", mean, "Mul a m -> g", weights={"w": W}))["m"] == [False]
    assert placed(graph("Conv x w -> a", "ReduceMean a -> m 1", weights={"w": W}))["m"] == [False]


def test_scales_are_symmetric_per_channel_and_never_zero() -> None:
    model = graph("Conv x w -> a", weights={"w": W})
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[1] = 0
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    placed(model)
    pairs = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert all(not a.any() and a.dtype == np.int8 for name, a in pairs.items() if name.endswith("zero_point"))
    assert pairs["x_for_a_0_scale"] == pytest.approx(2 / 127)
    peaks = np.abs(weight).max(axis=(1, 2, 3))
    peaks[1] = 127
    np.testing.assert_allclose(pairs["w_for_a_1_scale"], peaks / 127, rtol=1e-6)


@pytest.mark.parametrize(
    ("line", "shape", "scales"),
    [
        ("MatMul x w -> y", (6, 3), (3,)),
        ("MatMul x w -> y", (4, 6, 3), ()),
        ("ConvTranspose x w -> y", (4, 2, 1, 1), (2,)),
    ],
)
def test_a_weight_has_a_scale_per_output_channel(line: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    model = graph(line, weights={"w": shape})
    assert placed(model)["y"] == [True, True]
    assert next(tuple(t.dims) for t in model.graph.initializer if t.name == "w_for_y_1_scale") == scales


READS = (1, 4, 6, 6)


def joint_graph(*nodes: Any, outputs: tuple[str, ...]) -> Any:
    rng = np.random.default_rng(0)
    weights = {"w": (4, 4, 1, 1), "half": (2, 2, 1, 1), "wide": (4, 6, 1, 1)}
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    return onnx_text.of_nodes(nodes, {"x": READS}, dict.fromkeys(outputs), stored, opset=13)


def node(kind: str, inputs: str, outputs: str, **more: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), name=outputs.split()[0], **more)


def scales(model: Any, ranges: dict[str, tuple[float, float]] | None = None) -> dict[str, list[float]]:
    """Return by node the scale of each input that comes from a pair, else 0; run the joint graph, too."""
    names = {name for each in model.graph.node for name in (*each.input, *each.output)}
    place_pairs(model, dict.fromkeys(names, (-1.0, 1.27)) | (ranges or {}), set(), transformer=False, joints=True)
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


def test_splits_sums_and_concats_stay_in_int8_with_one_scale() -> None:
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
    found = scales(joint_graph(*block, outputs=("d",)), {"sum": (0.0, 2.54)})
    shared = found["left"][0]
    assert round(shared, 4) == 0.02, "that of the sum, the largest of what is joined"
    assert found["c"] == [shared] * 3 and found["d"][0] == shared and found["b"][0] == shared
    assert found["sum"][0] == shared and round(found["sum"][1], 4) == 0.01, "the sum's other branch is joined with none"
    assert found["s"] == [0.0] and found["t"] == [0.0], "what computes in floats reads what its layer wrote"


def test_values_that_no_layer_reads_stay_float() -> None:
    head = (node("Conv", "x w", "a"), node("Sigmoid", "a", "s"), node("Concat", "a s", "c", axis=1))
    assert scales(joint_graph(*head, outputs=("c",)))["c"] == [0.0, 0.0]
    between = (*head, node("Relu", "c", "r"), node("Split", "r", "p q", axis=1), node("Conv", "q w", "d"))
    found = scales(joint_graph(*between, outputs=("d", "p")))
    assert found["c"] == [0.0, 0.0] and found["p"][0] > 0, "another operator stands between"


def test_only_a_nearest_resize_stays_in_int8() -> None:
    sizes = onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "factors")

    def enlarged(**how: Any) -> list[float]:
        nodes = (node("Conv", "x w", "a"), node("Resize", "a  factors", "r", **how), node("Conv", "r w", "d"))
        nodes[1].input[:] = ["a", "", "factors"]
        model = joint_graph(*nodes, outputs=("d",))
        model.graph.initializer.append(sizes)
        return scales(model)["r"]

    assert enlarged(mode="nearest")[0] > 0 and enlarged(mode="linear")[0] == 0
