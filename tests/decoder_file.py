"""An ONNX decoder: tokens, a mask over past and present, a cache of keys and values."""

from pathlib import Path

import numpy as np

WORDS, HEADS, DEPTH = 20, 2, 4
PAST, NEW = "past_sequence_length", "sequence_length"


def write_decoder(path: Path) -> None:
    """Write a one-layer decoder with only a table of words as weights; each output depends on every input."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def value(name: str, kind: int, shape: list[str | int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    table = np.random.default_rng(0).standard_normal((WORDS, HEADS * DEPTH)).astype(np.float32)
    weights = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([0, 0, HEADS, DEPTH]), "heads"),
        numpy_helper.from_array(np.array([1, 2]), "axes"),
        numpy_helper.from_array(np.array([0, 0, HEADS * DEPTH]), "width"),
    ]
    cache = "past_key_values.0."
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Reshape", ["words", "heads"], ["split"]),
        helper.make_node("Transpose", ["split"], ["query"], perm=[0, 2, 1, 3]),
        helper.make_node("Concat", [cache + "key", "query"], ["present.0.key"], axis=2),
        helper.make_node("Concat", [cache + "value", "query"], ["present.0.value"], axis=2),
        helper.make_node("Transpose", ["present.0.key"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "turned"], ["scores"]),
        helper.make_node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["seen", "axes"], ["row"]),
        helper.make_node("Mul", ["scores", "row"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "present.0.value"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["joined"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["joined", "width"], ["logits"]),
    ]
    past: list[str | int] = ["batch", HEADS, PAST, DEPTH]
    both: list[str | int] = ["batch", HEADS, f"{PAST} + {NEW}", DEPTH]
    pair = ("key", "value")
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch", NEW]),
        value("attention_mask", TensorProto.INT64, ["batch", f"{PAST} + {NEW}"]),
        *(value(cache + name, TensorProto.FLOAT, past) for name in pair),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, ["batch", NEW, HEADS * DEPTH]),
        *(value(f"present.0.{name}", TensorProto.FLOAT, both) for name in pair),
    ]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
