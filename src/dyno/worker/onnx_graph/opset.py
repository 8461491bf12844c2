"""ONNX graphs in another opset, for engines whose parser ends below it or types that begin above it.

And what no rewriting may lose: the metadata of the nodes, by which they are known to come from a module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dyno.worker.spec import UserError

DOMAINS = ("", "ai.onnx")


def opset(model: Any) -> int:
    """The graph's opset of ONNX's own operators; 0 when it uses none."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in DOMAINS), 0)


def in_opset(model: Any, wanted: int) -> Any:
    """The same graph in the wanted opset, checked; a `UserError` where an operator has no form there."""
    import onnx
    import onnx.version_converter

    if opset(model) == wanted:
        return model
    _drop_defaults(model.graph)
    try:
        converted = onnx.version_converter.convert_version(model, wanted)
        onnx.checker.check_model(converted, full_check=True)
    except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        reason = " ".join(str(e).split())[:160]
        raise UserError(f"the graph can't be written in opset {wanted} instead of {opset(model)}: {reason}") from e
    return with_metadata(converted, model)


def with_metadata(made: Any, model: Any) -> Any:
    """The graph `made` of the model, its nodes with the metadata of the model's nodes of these names; libraries that
    rewrite graphs drop it."""
    known = {node.name: node.metadata_props for node in model.graph.node if node.name and node.metadata_props}
    for node in made.graph.node:
        if node.name in known and not node.metadata_props:
            node.metadata_props.extend(known[node.name])
    return made


def keep_metadata(path: Path, model: Any) -> None:
    """`with_metadata` for a file that was made of the model."""
    import onnx

    made = onnx.load(path, load_external_data=False)
    onnx.save(with_metadata(made, model), path)


def lower_file(path: Path, wanted: int) -> None:
    """Rewrite the file in the wanted opset where it is in a later one; a `UserError` where that isn't possible."""
    import onnx

    if opset(onnx.load(path, load_external_data=False)) <= wanted:
        return
    try:
        onnx.save(in_opset(onnx.load(path), wanted), path)
    except ValueError as e:  # protobuf's own limit, where weights lie beside the graph
        raise UserError(f"a graph over 2 GiB can't be brought down to opset {wanted}") from e


def _drop_defaults(graph: Any) -> None:
    """Remove `noop_with_empty_axes=0`: it is the default, and ONNX's converter keeps it in opsets that lack it."""
    for node in graph.node:
        for attribute in list(node.attribute):
            if attribute.name == "noop_with_empty_axes" and attribute.i == 0:
                node.attribute.remove(attribute)
