"""A graph in another opset is valid there and does the same, or there is one line why it can't be written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from dyno.worker.onnx_graph.repair import convert_opset, read_opset
from dyno.worker.spec import UserError


def graph(kind: str, inputs: list[str], version: int, **attributes: Any) -> Any:
    """One node over `x`, 2 x 3, with `axes` = [1] at hand."""
    node = helper.make_node(kind, inputs, ["y"], **attributes)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    x.type.tensor_type.shape.CopyFrom(helper.make_tensor_value_info("x", 1, [2, 3]).type.tensor_type.shape)
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    made = helper.make_graph([node], "one", [x], [y], [axes] if "axes" in inputs else [])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


def test_a_mean_as_dynamo_writes_it_goes_back_to_opset_17() -> None:
    old = graph("ReduceMean", ["x", "axes"], 18, keepdims=1, noop_with_empty_axes=0)
    new = convert_opset(old, 17)
    assert (read_opset(new), list(new.graph.node[0].input)) == (17, ["x"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ReferenceEvaluator(new).run(None, {"x": x})[0], [[1], [4]])


def test_a_graph_in_the_wanted_opset_is_left_alone() -> None:
    model = graph("Relu", ["x"], 17)
    assert convert_opset(model, 17) is model


def test_an_operator_that_the_wanted_opset_lacks_is_one_line() -> None:
    with pytest.raises(UserError, match="can't be written in opset 17 instead of 20: ") as caught:
        convert_opset(graph("Gelu", ["x"], 20), 17)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [3, 4])
def test_a_split_that_only_names_the_number_of_its_parts_goes_back_to_opset_17(count: int) -> None:
    """11 columns in parts of 4, 4 and 3, or 3, 3, 3 and 2: below opset 18 the sizes have to stand there."""
    parts = [f"part{k}" for k in range(count)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 11])
    node = helper.make_node("Split", ["x"], parts, axis=-1, num_outputs=count)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, None]) for name in parts]
    old = helper.make_model(
        helper.make_graph([node], "one", [x], outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    feeds = {"x": np.arange(22, dtype=np.float32).reshape(2, 11)}
    expected = ReferenceEvaluator(old).run(None, feeds)
    new = convert_opset(old, 17)
    assert read_opset(new) == 17 and {entry.domain for entry in new.opset_import} == {""}
    for one, other in zip(ReferenceEvaluator(new).run(None, feeds), expected, strict=True):
        np.testing.assert_array_equal(one, other)
