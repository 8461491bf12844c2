"""The result of Torch-TensorRT's compilation: the engines inside, and the operators left to PyTorch.

A program is a `ScriptModule` (the TorchScript route), or an `ExportedProgram` or `GraphModule` (the Dynamo route, by
version).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

ENGINE = "torch.classes.tensorrt.Engine"


def engines(program: Any) -> list[Any]:
    """Return the `torch.classes.tensorrt.Engine` objects that the program runs."""
    if hasattr(program, "inlined_graph"):
        return [program._c.getattr(name) for name in attributes(program, ENGINE)]
    by_id = {id(value): value for value in _iter_values(program) if hasattr(value, "get_engine_layer_info")}
    return list(by_id.values())


def attributes(program: Any, kind: str) -> list[str]:
    """Return the names of the script module's attributes of that type that its graph reads."""
    nodes = program.graph.findAllNodes("prim::GetAttr")
    return sorted({node.s("name") for node in nodes if str(node.output().type()).endswith(kind)})


def _iter_values(program: Any) -> Iterator[Any]:
    """Yield all values that a graph module and its parts hold, as attributes or written into the graph itself."""
    for part in _iter_parts(program):
        yield from vars(part).values()
        for node in _list_nodes(part):
            yield from node.args


def left_in_pytorch(program: Any) -> dict[str, int]:
    """Return the number of calls of each operator left in PyTorch; empty if all of the module became engines."""
    if hasattr(program, "inlined_graph"):
        kinds = (node.kind() for node in _iter_scripted_nodes(program.inlined_graph))
        return dict(Counter(kind for kind in kinds if kind.startswith("aten::")))
    called = (node.target for part in _iter_parts(program) for node in _list_nodes(part) if node.op == "call_function")
    names = (target._schema.name for target in called if hasattr(target, "_schema"))
    return dict(Counter(name for name in names if not name.startswith("tensorrt::")))


def _iter_scripted_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _iter_scripted_nodes(inner)


def _iter_parts(program: Any) -> Iterator[Any]:
    yield from getattr(program, "graph_module", program).modules()


def _list_nodes(part: Any) -> Any:
    return part.graph.nodes if hasattr(part, "graph") else ()
