"""ONNX models from text, `(float[n, 4] x) => (float[n, 4] y) { [name] y = MatMul(x, w) }`, or from nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def model(text: str, *, opset: int = 17, ir: int = 8, **weights: Any) -> Any:
    """Return the model of this text; `weights` become initializers."""
    from onnx import helper, numpy_helper, parser

    graph = parser.parse_graph(f"net {text}")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def write(path: Path | str, text: str, **more: Any) -> Path:
    """Write the model of this text to `path`."""
    import onnx

    onnx.save(model(text, **more), path)
    return Path(path)


def of_nodes(
    nodes: Sequence[Any], inputs: dict[str, Any], outputs: dict[str, Any], weights: dict[str, Any] | None = None, *,
    kind: int = 1, opset: int = 17, ir: int = 8, domains: Sequence[str] = (), functions: Any = (), **more: Any,
) -> Any:  # fmt: skip
    """Return the model of these nodes. `inputs` and `outputs` map names to shapes (None: unknown), all of type `kind`;
    a weight is an array or a tensor.
    """
    from onnx import helper, numpy_helper

    ends = [[helper.make_tensor_value_info(name, kind, shape) for name, shape in side.items()]
            for side in (inputs, outputs)]  # fmt: skip
    stored = [a if hasattr(a, "data_type") else numpy_helper.from_array(np.asarray(a), name)
              for name, a in (weights or {}).items()]  # fmt: skip
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    graph = helper.make_graph(nodes, "net", *ends, stored, **more)
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir, functions=functions)
