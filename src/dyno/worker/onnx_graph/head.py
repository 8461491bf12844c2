"""The part of a detector's graph that decodes its last layers' values into boxes, scores and keypoints.

It joins pixels, probabilities and coefficients in one tensor: one INT8 scale for all of them rounds the scores to zero,
and in half precision coordinates are only good to half a pixel or worse. So it stays in FP32.
"""

from __future__ import annotations

from typing import Any

from dyno.worker import tasks
from dyno.worker.onnx_graph.placement import LINEAR
from dyno.worker.spec import ModelSpec

SHAPING = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Identity", "Flatten")


def decoding(graph: Any, model: ModelSpec) -> set[str]:
    """Return the names of the nodes behind the last layers with weights, for `model.task`; none for a classifier.

    The convolution behind a softmax isn't such a layer: it is the mean of a distribution over distances (Li et al.,
    Generalized Focal Loss, 2020), with fixed weights. Nodes without a name are given one.
    """
    if tasks.find(model.task).labels == "classes":
        return set()
    named(graph)
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {out.name for out in graph.output}
    readers: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.name)
    names: set[str] = set()
    for node in reversed(graph.node):
        learned = node.op_type in LINEAR and bool(weights & {*node.input[1:]}) and not _is_mean(node, makers)
        used = any(name in outputs or name in readers for name in node.output)
        behind = all(reader in names for name in node.output for reader in readers.get(name, ()))
        if used and behind and not learned:
            names.add(node.name)
    return names


def named(graph: Any) -> None:
    """Give every node a name: its own, or its operator and place."""
    for number, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{number}"


def _is_mean(node: Any, makers: dict[str, Any]) -> bool:
    """Return whether the node's input is a softmax, possibly reshaped: then the node computes a mean."""
    maker = makers.get(node.input[0])
    while maker is not None and maker.op_type in SHAPING:
        maker = makers.get(maker.input[0])
    return maker is not None and maker.op_type == "Softmax"
