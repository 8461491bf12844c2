"""Networks in the text that ONNX reads: `(float[n, 4] x) => (float[n, 4] y) { [name] y = MatMul(x, w) }`."""

from pathlib import Path
from typing import Any

import numpy as np


def model(text: str, *, opset: int = 17, ir: int = 8, **weights: Any) -> Any:
    """Return the model of this text with these arrays as initializers."""
    from onnx import helper, numpy_helper, parser

    graph = parser.parse_graph(f"net {text}")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def write(path: Path | str, text: str, **more: Any) -> Path:
    """Store the model of this text."""
    import onnx

    onnx.save(model(text, **more), path)
    return Path(path)
