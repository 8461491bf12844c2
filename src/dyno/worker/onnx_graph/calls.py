"""A file's own functions put in line: each node is named after the call that it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

Functions = Mapping[tuple[str, str, str], Any]


def in_line(model: Any) -> Any:
    """The model without its functions. A node of a call `a` is called `a/…`, or two calls of one function would differ
    by a number alone."""
    import onnx.inliner

    functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
    made = onnx.inliner.inline_local_functions(model)
    _rename(model.graph.node, made.graph.node, functions, "", {*_names(made.graph.node)})
    return made


def _rename(before: Sequence[Any], after: Sequence[Any], functions: Functions, within: str, taken: set[str]) -> None:
    """Name the nodes of a graph that was put in line; where they don't follow each other as before, they stay."""
    planned = [*_called(before, functions, within)]
    if [node.op_type for node, *_ in planned] != [node.op_type for node in after]:
        return
    for (node, call, name), made in zip(planned, after, strict=True):
        if call:
            made.name = next(each for k in count(1) if (each := f"{name}_{k}" if k > 1 else name) not in taken)
            taken.add(made.name)
        for graph, inner in zip(_inner(node), _inner(made), strict=False):
            _rename(graph.node, inner.node, functions, call, taken)


def _called(nodes: Sequence[Any], functions: Functions, call: str) -> Iterator[tuple[Any, str, str]]:
    """Each node that is left, the calls that it lies in ("" for none), and its name with theirs."""
    seen = {""}
    for k, node in enumerate(nodes):
        name = node.name if node.name not in seen else f"{node.name or node.op_type}_{k}"
        seen.add(name)
        name = call + name
        function = functions.get((node.domain, node.op_type, getattr(node, "overload", "")))
        if function is None:
            yield node, call, name
        else:
            yield from _called(function.node, functions, f"{name}/")


def _names(nodes: Sequence[Any]) -> Iterator[str]:
    for node in nodes:
        yield node.name
        for graph in _inner(node):
            yield from _names(graph.node)


def _inner(node: Any) -> list[Any]:
    """The graphs within a node, by the names of their attributes."""
    return [
        graph
        for a in sorted(node.attribute, key=lambda a: a.name)
        for graph in ([a.g] if a.HasField("g") else [*a.graphs])
    ]
