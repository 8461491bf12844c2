"""The nodes of an ONNX graph: shapes by inference, weights, operations, and the modules that each node came from."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dyno.worker.facts.inside import NODES, Layer, LayerGraph, Port
from dyno.worker.nets import flops
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.onnx_graph.graph_facts import open_graph
from dyno.worker.onnx_graph.opset import opset
from dyno.worker.onnx_graph.weights import check_beside

SCOPES = "pkg.torch.onnx.name_scopes"  # what PyTorch's newer exporter writes at a node: its modules, outermost first
CLASSES = "pkg.torch.onnx.class_hierarchy"  # and the classes of these
# Around a module with described inputs is one of Dyno's own at its export, which calls it `model`.
WRAPPED, WRAPPER = "dyno.worker.sessions.torch_support.positional.", "model"
NOWHERE = "_empty_nn_module_stack_from_metadata_hook"  # the exporter's word for a node of which it lost the module
UNKNOWN = (-1,)  # the shape of a tensor of which not even the number of dimensions is known


def read(path: str, shapes: Mapping[str, tuple[int, ...]]) -> LayerGraph:
    """Read the nodes of the file for inputs of these shapes, in the file's order; constants aren't nodes.

    A node of the standard's domain has its operator as its type, one of another domain `domain.Operator`. Raises
    `UserError` for a file that is missing, damaged, or lacks weights that it keeps beside it.
    """
    read_io(path)
    check_beside(path)
    return nodes(path, shapes)


def nodes(path: str, shapes: Mapping[str, tuple[int, ...]]) -> LayerGraph:
    """Read the nodes as `read` does, of a complete file; its weights may be in files elsewhere."""
    onnx = import_onnx()
    model = onnx.load(path, load_external_data=False)
    inferred = flops.with_shapes(model, shapes)
    graph, inferred_shapes = inferred if inferred else (model.graph, {})
    reader = _GraphReader(onnx, graph, model, inferred_shapes)
    layers = tuple(reader.layer(node) for node in graph.node if node.op_type != "Constant")
    unknown = sum(any(-1 in port.shape or not port.dtype for port in layer.outputs) for layer in layers)
    notes: tuple[str, ...] = (f"the shapes of {unknown} of {len(layers)} nodes can't be inferred",) * bool(unknown)
    if uncounted := sum(layer.flops is None for layer in layers):
        why = "their shapes, or how often a branch or a loop runs, aren't known"
        notes += (f"the operations of {uncounted} of {len(layers)} nodes are not counted: {why}",)
    title = f"ONNX opset {opset(model)}"
    return LayerGraph(form=NODES, library=title, parameters=reader.stored, layers=layers, notes=notes)


class _GraphReader:
    """A graph's constants, types and shapes, and its nodes as layers."""

    def __init__(self, onnx: Any, graph: Any, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._scope = dict(shapes), open_graph(model)
        self._types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
        self._named = {kind: _type_name(onnx, kind) for kind in {*self._types.values()}}
        self._readers = Counter(name for node in graph.node for name in node.input)
        self._wrapped = any(WRAPPED in e.value for node in graph.node for e in node.metadata_props if e.key == CLASSES)
        self._counted: set[str] = set()
        self.stored = 0

    def layer(self, node: Any) -> Layer:
        """Return the node as a layer, and add the weights that no node before it had to `self.stored`."""
        own = self._scope.weights(node)
        pairs = (pair for scope in self._scope.inner(node) for pair in scope.walk())
        inside = (weight for scope, each in pairs for weight in scope.weights(each))
        sizes = {weight.key: weight.count for weight in (*own, *inside)}
        fresh = sizes.keys() - self._counted
        self._counted |= fresh
        self.stored += sum(sizes[key] for key in fresh)
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        name = name_of(node)
        operator = node.op_type.removeprefix("Fused")
        count = flops.of_node(node, self._shapes) if operator in flops.PRODUCTS else 0
        return Layer(
            name=name,
            type=kind,
            inputs=tuple(self._make_port(n) for n in node.input if n and n not in self._scope.constants),
            outputs=tuple(self._make_port(n) for n in node.output if n),
            parameters=sum(sizes.values()),
            shared=sum(sizes[key] for key in sizes.keys() - fresh),
            flops=None if flops.has_products_inside(node) else count,
            modules=self._find_modules(node, [weight.name for weight in own if self._readers[weight.name] == 1]),
            nodes=(name,),
        )

    def _find_modules(self, node: Any, weights: list[str]) -> tuple[str, ...]:
        """Return the modules that the node came from, by their own names."""
        owners = _find_owners(node, weights)
        if not self._wrapped:
            return owners
        named = [name for name in owners if name]  # the wrapper's own are those of a program, which has lost its names
        return tuple("" if name == WRAPPER else name.removeprefix(f"{WRAPPER}.") for name in named)

    def _make_port(self, name: str) -> Port:
        shape = tuple(length or -1 for length in self._shapes.get(name, UNKNOWN))
        return Port(name, shape, self._named.get(self._types.get(name, 0), ""))


def name_of(node: Any) -> str:
    """Return the node's name; a node without one is named after its operator and output."""
    return node.name or f"{node.op_type} to {next(iter(node.output), '')}"


def _type_name(onnx: Any, kind: int) -> str:
    return "" if not kind else str(onnx.helper.tensor_dtype_to_np_dtype(kind))


def _find_owners(node: Any, weights: list[str]) -> tuple[str, ...]:
    """Return the modules that a node came from, innermost names.

    They are from PyTorch's own metadata, else from the path in the node's name; and from the names of its weights if no
    other node has them, as for a convolution with a folded batch norm.
    """
    owners = [name.rpartition(".")[0] for name in weights if "." in name and "::" not in name]
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    if scopes and node.op_type not in flops.PRODUCTS:  # a weight that two modules share has one name
        owners = []
    if scopes:
        try:
            parts = ast.literal_eval(scopes)
        except (ValueError, SyntaxError):
            parts = []
        owners += [str(part) for part in parts[:-1][-1:] if part != NOWHERE]  # the last is the operator's own name
    elif node.name.startswith("/"):  # /layer1/layer1.0/conv1/Conv, by the older exporter
        owners.append(_join_scopes(node.name.split("/")[1:-1]))
    return tuple(dict.fromkeys(owners))


def _join_scopes(parts: list[str]) -> str:
    """Return a module's name from its scopes; a container's element repeats the container's name (layer1, layer1.0)."""
    path: list[str] = []
    for part in parts:
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    return ".".join(path)
