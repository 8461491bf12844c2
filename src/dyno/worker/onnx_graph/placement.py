"""Q/DQ nodes where TensorRT fuses them: only at the inputs of INT8 operators.

The placement follows NVIDIA's advice for explicit quantisation (TensorRT developer guide, "Q/DQ placement"):
convolutions, matrix products and average pools read quantised inputs; nothing stands between a convolution and its
bias, activation or residual sum; in a residual sum the other branch is quantised, so that the sum is fused into the
convolution. onnxruntime's own tool puts a pair before all of a tensor's readers, which breaks those fusions.

With the option `joints`, pairs also stand between layers. Otherwise operators there run in floats, and TensorRT
converts types and layouts around each split and concatenation. NVIDIA's quantisation of YOLOv7 (yolo_deepstream,
yolov7_qat) has pairs there, with one scale for all parts of a concatenation: equal pairs cancel out. See `Joints`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker import tasks
from dyno.worker.onnx_graph.graph_facts import add_weight, set_nodes
from dyno.worker.spec import ModelSpec

LINEAR_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Operators with input ranges needed by `place_pairs`
OBSERVED_OPERATORS = (*LINEAR_OPERATORS, "AveragePool", "GlobalAveragePool", "ReduceMean", "Add")
MOVE_OPERATORS = ("Concat", "MaxPool", "Resize", "Slice", "Split")  # operators that compute no new values
SUM_OPERATOR = "Add"
INT8_MAX = 127.0
JOINTS_OPTION = "joints"  # recipe option

Site = tuple[Any, int]  # a node and an input number


def place_pairs(
    model: Any,
    ranges: Mapping[str, tuple[float, float]],
    excluded: set[str],
    transformer: bool,
    *,
    joints: bool = False,
) -> None:
    """Insert the pairs: symmetric, zero point 0, one scale per activation and per output channel of a weight.

    `ranges` maps tensors to their lowest and highest value in calibration; `excluded` and `transformer` are as in
    `list_sites`. With `joints`, pairs also stand between layers, except in transformers. Weights stay float32 before
    their pair: TensorRT 8 reads no INT8 initialisers.
    """
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    sites = list_sites(graph, excluded, transformer)
    products = [node for node, _ in sites if node.op_type in LINEAR_OPERATORS]
    joint_finder = Joints(graph, sites if joints and not transformer else (), excluded)
    peaks = {name: max(-low, high) for name, (low, high) in ranges.items()}
    site_peaks = [(node, k, joint_finder.find_peak(node.input[k], peaks)) for node, k in (*sites, *joint_finder.sites)]
    pairs_of: dict[str, list[Any]] = {}
    for node, k, peak in site_peaks:
        pairs_of.setdefault(node.name, []).extend(_make_pair(graph, node, k, np.float32(peak)))
    for node in products:
        axis = channel_axis(node, len(weights[node.input[1]].dims))
        pairs_of[node.name].extend(_make_pair(graph, node, 1, _channel_peaks(weights[node.input[1]], axis), axis))
    set_nodes(graph, [new_node for node in graph.node for new_node in (*pairs_of.get(node.name, ()), node)])


def list_sites(graph: Any, excluded: set[str], transformer: bool) -> list[tuple[Any, int]]:
    """Return the quantised activations as node and input number.

    Nodes in `excluded` stay in float, as do a transformer's sums and pools.
    """
    activations = [(node, 0) for node in graph.node if node.op_type in LINEAR_OPERATORS]
    activations += [] if transformer else [*_find_pools(graph), *_find_residuals(graph)]
    return [(node, k) for node, k in activations if node.name not in excluded]


def _find_pools(graph: Any) -> Iterator[tuple[Any, int]]:
    """Yield average pools, and the means over a whole image at the end of a network.

    A mean of a tensor with other readers gates channels (squeeze and excitation): that tensor stays float.
    """
    readers = Counter(name for node in graph.node for name in node.input)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        is_last = readers[node.input[0]] == 1 if node.input else False
        if node.op_type == "AveragePool" or (is_last and _means_image(node, constants)):
            yield node, 0


def _means_image(node: Any, constants: Mapping[str, Any]) -> bool:
    import onnx

    if node.op_type != "ReduceMean":
        return bool(node.op_type == "GlobalAveragePool")
    axes = next(([*a.ints] for a in node.attribute if a.name == "axes"), [])
    if len(node.input) > 1 and node.input[1] in constants:  # from opset 18 on
        axes = onnx.numpy_helper.to_array(constants[node.input[1]]).tolist()
    return sorted(axes) in ([2, 3], [-2, -1])


def _find_residuals(graph: Any) -> Iterator[tuple[Any, int]]:
    """Yield the sums that can be fused into a convolution, each with the input number of the other branch."""
    makers = {name: node for node in graph.node for name in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    depth = _compute_depths(graph)
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "Add" or constants & {*node.input} or node.input[0] == node.input[1]:
            continue
        fused_inputs = [
            k
            for k, name in enumerate(node.input)
            if name in makers and makers[name].op_type == "Conv" and readers[name] == 1
        ]
        if fused_inputs:
            # If both branches end in a convolution, the sum is fused into the longer branch, which runs last.
            yield node, 1 - max(fused_inputs, key=lambda k: depth[node.input[k]])


def _compute_depths(graph: Any) -> dict[str, int]:
    depth: dict[str, int] = {}
    for node in graph.node:
        node_depth = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update(dict.fromkeys(node.output, node_depth))
    return depth


def channel_axis(node: Any, dimensions: int) -> int | None:
    """Return the axis of a weight's output channels; None if the whole weight has one scale."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Gemm":
        return 0 if attributes.get("transB") else 1
    if node.op_type == "MatMul":
        return 1 if dimensions == 2 else None
    if node.op_type == "ConvTranspose":
        return 1 if attributes.get("group", 1) == 1 else None
    return 0


def _channel_peaks(weight: Any, axis: int | None) -> Any:
    import onnx

    values = np.abs(onnx.numpy_helper.to_array(weight))
    return values.max(axis=tuple(k for k in range(values.ndim) if k != axis) if axis is not None else None)


def _make_pair(graph: Any, node: Any, k: int, peak: Any, axis: int | None = None) -> list[Any]:
    """Return the two nodes between a tensor and its reader's input k; each reader has its own pair.

    A shared pair would force one decision on all readers; TensorRT merges equal pairs.
    """
    import onnx

    name, stem = node.input[k], f"{node.input[k]}_for_{node.name}_{k}"
    # A channel of zeros has no range, but scales must be positive.
    scales = np.where(peak > 0, peak, INT8_MAX).astype(np.float32) / np.float32(INT8_MAX)
    scale = add_weight(graph, f"{stem}_scale", scales)
    zero = add_weight(graph, f"{stem}_zero_point", np.zeros(np.shape(scales), np.int8))
    node.input[k] = f"{stem}_dequantised"
    axes = {} if axis is None else {"axis": axis}
    return [
        onnx.helper.make_node("QuantizeLinear", [name, scale, zero], [f"{stem}_quantised"], f"{stem}_quantise", **axes),
        onnx.helper.make_node(
            "DequantizeLinear", [f"{stem}_quantised", scale, zero], [node.input[k]], f"{stem}_dequantise", **axes
        ),
    ]


class Joints:
    """Further sites between layers, and tensors that share a scale, given the sites before `layers`.

    Nodes in `excluded` stay in float.
    """

    def __init__(self, graph: Any, layers: Sequence[Site], excluded: Collection[str]) -> None:
        self._constants = {tensor.name for tensor in graph.initializer}
        self._nodes = [node for node in graph.node if node.name not in excluded]
        tensors = {node.input[k] for node, k in layers}
        self._joined = {name: group for name, group in self._group_tensors().items() if group & tensors}
        moves = [(node, k) for node, data in self._find_moves() for k in data if node.input[k] in self._joined]
        tensors |= {node.input[k] for node, k in moves}
        self.sites = [*moves, *self._find_sums(tensors, {node.name for node, _ in layers})]

    def find_peak(self, name: str, peaks: Mapping[str, float]) -> float:
        """Return the largest magnitude of the tensor, or of all tensors joined with it."""
        return max(peaks[tensor] for tensor in self._joined.get(name, (name,)) if tensor in peaks)

    def _find_moves(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield the nodes that only move values, each with the numbers of its data inputs."""
        for node in self._nodes:
            if node.op_type in MOVE_OPERATORS and not (node.op_type == "Resize" and _is_interpolating(node)):
                data = range(len(node.input)) if node.op_type == "Concat" else (0,)
                yield node, [k for k in data if node.input[k] not in self._constants]

    def _group_tensors(self) -> dict[str, set[str]]:
        """Return, for each moved tensor, all tensors that its values are moved to or joined with."""
        groups: dict[str, set[str]] = {}
        for node, data in self._find_moves():
            names = {*(node.input[k] for k in data), *filter(None, node.output)}
            group: set[str] = set().union(*(groups.get(name, {name}) for name in names))
            groups.update(dict.fromkeys(group, group))
        return groups

    def _find_sums(self, tensors: Collection[str], layers: Collection[str]) -> list[Site]:
        """Return both inputs of sums with a quantised result that no layer fuses."""
        return [
            (node, k)
            for node in self._nodes
            if node.op_type == SUM_OPERATOR and node.name not in layers and node.output[0] in tensors
            if not self._constants & {*node.input} and node.input[0] != node.input[1]
            for k in (0, 1)
        ]


def _is_interpolating(node: Any) -> bool:
    return any(attribute.name == "mode" and attribute.s != b"nearest" for attribute in node.attribute)


# Decoding: the part of a detector's graph from the last layers' values to boxes, scores and keypoints
#
# It joins pixels, probabilities and coefficients in one tensor: a common INT8 scale rounds the scores to zero, and half
# precision limits coordinates to half a pixel or worse. So it stays in FP32.

SHAPING_OPERATORS = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Identity", "Flatten")


def list_decoding_nodes(graph: Any, model: ModelSpec) -> set[str]:
    """Return the names of the nodes after the last layers with weights, for `model.task`; none for a classifier.

    A convolution after a softmax doesn't count as a layer: it is the mean of a distribution over distances (Li et al.,
    Generalized Focal Loss, 2020), with fixed weights. Nameless nodes get a name.
    """
    if tasks.find_task(model.task).labels == "classes":
        return set()
    name_nodes(graph)
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {out.name for out in graph.output}
    readers: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.name)
    names: set[str] = set()
    for node in reversed(graph.node):
        is_layer = node.op_type in LINEAR_OPERATORS and bool(weights & {*node.input[1:]}) and not _is_mean(node, makers)
        is_used = any(name in outputs or name in readers for name in node.output)
        is_behind = all(reader in names for name in node.output for reader in readers.get(name, ()))
        if is_used and is_behind and not is_layer:
            names.add(node.name)
    return names


def name_nodes(graph: Any) -> None:
    """Name every nameless node by its operator and place."""
    for index, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{index}"


def _is_mean(node: Any, makers: dict[str, Any]) -> bool:
    """Return whether the node's input is a softmax, possibly reshaped: the node then computes a mean."""
    maker = makers.get(node.input[0])
    while maker is not None and maker.op_type in SHAPING_OPERATORS:
        maker = makers.get(maker.input[0])
    return maker is not None and maker.op_type == "Softmax"
