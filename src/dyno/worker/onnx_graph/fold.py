"""ONNX graphs with all constants computed: weights as initialisers, batch norms inside convolutions, shapes inferred.

Exporters (PaddlePaddle's, TensorFlow's, PyTorch's without folding) leave weights in Constant nodes, behind Identity
nodes and in front of batch norms. A quantiser finds no weights there, and leaves such layers in float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.onnx_graph.check import session
from dyno.worker.onnx_graph.opset import DOMAINS
from dyno.worker.sessions.torch_support import first_line

TYPES = {"tensor(float)": "FLOAT", "tensor(float16)": "FLOAT16", "tensor(double)": "DOUBLE", "tensor(int64)": "INT64"}
APART = 1e-2  # of the largest output: the two graphs differ by rounding alone, which deep networks amplify

Folder = Callable[[Any, Path], Any]


def folded(model: Any, feeds: Mapping[str, np.ndarray], scratch: Path) -> tuple[Any, list[str]]:
    """The graph folded and its shapes inferred, and warnings; `scratch` is a folder for temporary files.

    By onnxslim, else by ONNX Runtime's basic optimisation: the first whose graph gives the same outputs for the feeds.
    Where neither does, the graph is only `lifted`, with a warning.
    """
    import onnx

    model, notes = lifted(model), []
    expected = _outputs(model, feeds)
    for fold in (_slimmed, _optimised):
        try:
            candidate = onnx.shape_inference.infer_shapes(fold(_copy(model), scratch), data_prop=True)
            onnx.checker.check_model(candidate)
            if _same(expected, _outputs(candidate, feeds)):
                return _typed(candidate), []
            notes.append(f"{fold.__name__.strip('_')}: other outputs")
        except MemoryError:
            raise
        except Exception as e:  # rewriters raise nearly everything on graphs that they don't expect
            notes.append(f"{fold.__name__.strip('_')}: {first_line(e)[:120]}")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return _typed(inferred), [f"constants and batch norms could not be folded ({'; '.join(notes)})"]


def lifted(model: Any) -> Any:
    """The graph with Constant nodes turned into initialisers, none of which is listed as an input too."""
    import onnx

    copy = _copy(model)
    graph, remaining = copy.graph, []
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        constant = node.op_type == "Constant" and node.domain in DOMAINS and node.output[0] not in outputs
        tensor = _constant(node) if constant else None
        if tensor is None:
            remaining.append(node)
        else:
            graph.initializer.add().CopyFrom(tensor)
    if len(remaining) < len(graph.node):
        remaining = [_copy(node) for node in remaining]
        del graph.node[:]
        graph.node.extend(remaining)
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [_copy(value) for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    # Before IR version 4 every initialiser had to be an input.
    copy.ir_version = max(copy.ir_version, onnx.IR_VERSION_2019_1_22 + 1)
    return copy


def _typed(model: Any) -> Any:
    """The graph with a type for every tensor; ONNX Runtime infers those behind operators that aren't ONNX's own."""
    import onnx

    typed = {value.name for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    untyped = [name for node in model.graph.node for name in node.output if name and name not in typed]
    if not untyped:
        return model
    probe = _copy(model)
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in untyped)
    for output in session(probe.SerializeToString(), optimised=False).get_outputs():
        if output.name in untyped and output.type in TYPES:
            kind = getattr(onnx.TensorProto, TYPES[output.type])
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(output.name, kind, output.shape))
    return model


def _constant(node: Any) -> Any:
    """The value of a Constant node as a tensor of its output's name; None for text and sparse values."""
    import onnx

    (value,) = node.attribute
    if value.name == "value":
        tensor = _copy(value.t)
        tensor.name = node.output[0]
        return tensor
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if value.name not in kinds:
        return None
    return onnx.numpy_helper.from_array(
        np.asarray(onnx.helper.get_attribute_value(value), kinds[value.name]), node.output[0]
    )


def _slimmed(model: Any, scratch: Path) -> Any:
    import onnxslim

    return onnxslim.slim(model)


def _optimised(model: Any, scratch: Path) -> Any:
    """By ONNX Runtime at the level that keeps to ONNX's own operators."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(scratch / "folded.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(options.optimized_model_filepath)
    used = {node.domain for node in optimised.graph.node}
    unused = [entry for entry in optimised.opset_import if entry.domain and entry.domain not in used]
    for entry in unused:
        optimised.opset_import.remove(entry)
    return optimised


def _outputs(model: Any, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    loaded = session(model.SerializeToString(), optimised=False)
    return [np.asarray(output) for output in loaded.run(None, dict(feeds))]


def _same(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
    return len(before) == len(after) and all(_close(b, a) for b, a in zip(before, after, strict=True))


def _close(before: np.ndarray, after: np.ndarray) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.dtype.kind != "f":
        return bool((before == after).all())
    finite = before[np.isfinite(before)]
    return np.allclose(after, before, 1e-3, APART * float(np.abs(finite).max(initial=0.0)), equal_nan=True)


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
