"""Q/DQ between layers too: where a network is divided and joined, so that values stay in eight bits there.

With pairs at convolutions alone, whatever lies between them is in floats, and TensorRT converts types and layouts on
both sides of each split and concatenation. NVIDIA's quantisation of YOLOv7 (yolo_deepstream, yolov7_qat) has pairs
there as well, with one scale for what a concatenation joins: equal pairs cancel out, and nothing is converted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

MOVES = ("Concat", "MaxPool", "Resize", "Slice", "Split")  # operators that compute no new values
SUM = "Add"
JOINTS = "joints"  # the option of a recipe

Site = tuple[Any, int]  # a node and the number of its input


class Joints:
    """The joints of a graph whose pairs before layers are at `layers`: further sites, and tensors of one scale.

    Nodes named in `excluded` stay in float.
    """

    def __init__(self, graph: Any, layers: Sequence[Site], excluded: Collection[str]) -> None:
        self._constants = {tensor.name for tensor in graph.initializer}
        self._nodes = [node for node in graph.node if node.name not in excluded]
        read = {node.input[k] for node, k in layers}
        self._joined = {name: group for name, group in self._groups().items() if group & read}
        moved = [(node, k) for node, data in self._moves() for k in data if node.input[k] in self._joined]
        read |= {node.input[k] for node, k in moved}
        self.sites = [*moved, *self._sums(read, {node.name for node, _ in layers})]

    def peak(self, name: str, peaks: Mapping[str, float]) -> float:
        """The largest magnitude of the tensor, or of all that are joined with it."""
        return max(peaks[one] for one in self._joined.get(name, (name,)) if one in peaks)

    def _moves(self) -> Iterator[tuple[Any, list[int]]]:
        """Nodes that only move values, each with the numbers of the inputs whose values those are."""
        for node in self._nodes:
            if node.op_type in MOVES and not (node.op_type == "Resize" and _interpolates(node)):
                data = range(len(node.input)) if node.op_type == "Concat" else (0,)
                yield node, [k for k in data if node.input[k] not in self._constants]

    def _groups(self) -> dict[str, set[str]]:
        """For each tensor that is moved, all that its values are moved to, and stand beside there."""
        groups: dict[str, set[str]] = {}
        for node, data in self._moves():
            names = {*(node.input[k] for k in data), *filter(None, node.output)}
            group: set[str] = set().union(*(groups.get(name, {name}) for name in names))
            groups.update(dict.fromkeys(group, group))
        return groups

    def _sums(self, read: Collection[str], layers: Collection[str]) -> list[Site]:
        """Both inputs of sums that no layer takes in, and whose result is quantised."""
        return [
            (node, k)
            for node in self._nodes
            if node.op_type == SUM and node.name not in layers and node.output[0] in read
            if not self._constants & {*node.input} and node.input[0] != node.input[1]
            for k in (0, 1)
        ]


def _interpolates(node: Any) -> bool:
    """Whether a Resize makes new values between those that it reads."""
    return any(attribute.name == "mode" and attribute.s != b"nearest" for attribute in node.attribute)
