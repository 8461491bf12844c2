"""Names in a file that PyTorch's older exporter wrote of a module behind Dyno's wrapper."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dyno.worker.onnx_graph.file import import_onnx
from dyno.worker.onnx_graph.graph_facts import graphs_in


def unwrap(path: Path) -> None:
    """Name nodes and weights as if the module had been exported itself: what it computes outside its parts would seem
    to belong to a part called `model`."""
    onnx = import_onnx()
    model = onnx.load(path, load_external_data=False)
    nodes = [node for graph in graphs_in(model.graph) for node in graph.node]
    paths = _drop_prefix("/model/", "/", {node.name for node in nodes})
    tensors = {name for node in nodes for name in (*node.input, *node.output)}
    weights = _drop_prefix("model.", "", tensors)
    kept = {value.name for value in model.graph.output}
    weights = {name: weights[name] for t in model.graph.initializer if (name := t.name) in weights and name not in kept}
    for node in nodes:
        node.name = paths.get(node.name, node.name)
        node.input[:] = [weights.get(name, name) for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = weights.get(tensor.name, tensor.name)
    onnx.save(model, path)


def _drop_prefix(prefix: str, instead: str, names: Collection[str]) -> dict[str, str]:
    """Return the new name of each name with the prefix, except those that would clash with a name that stays."""
    renamed = {name: instead + name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    while taken := [name for name, new in renamed.items() if new in names and new not in renamed]:
        for name in taken:
            del renamed[name]
    return renamed
