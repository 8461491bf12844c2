"""ONNX graphs in another opset, for engines whose parser ends below it or types that begin above it.

And what no rewriting may lose: the metadata of the nodes, by which they are known to come from a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import UserError, shorten

DOMAINS = ("", "ai.onnx")
SPLIT_SIZES_OPSET = 13  # Split has its sizes as an input from here on; from 18 on it may have their number instead
HIDDEN = "dyno.hidden"  # a domain that ONNX's converter leaves alone


def opset(model: Any) -> int:
    """Return the graph's opset of ONNX's own operators; 0 if it uses none of these."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in DOMAINS), 0)


def in_opset(model: Any, wanted: int) -> Any:
    """Return the same graph in the wanted opset, checked; raise a `UserError` if an operator has no form there."""
    import onnx
    import onnx.version_converter

    if opset(model) == wanted:
        return model
    _drop_defaults(model.graph)
    try:
        with _splits_hidden(model) if opset(model) > wanted >= SPLIT_SIZES_OPSET else nullcontext():
            converted = _unhide_nodes(onnx.version_converter.convert_version(model, wanted))
        onnx.checker.check_model(converted, full_check=True)
    except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        reason = shorten(e, 200)
        raise UserError(f"the graph can't be written in opset {wanted} instead of {opset(model)}: {reason}") from e
    return with_metadata(converted, model)


def with_metadata(rewritten: Any, model: Any) -> Any:
    """Return the `rewritten` model with the metadata of the model's nodes of the same names.

    Libraries that rewrite graphs drop it.
    """
    known = {node.name: node.metadata_props for node in model.graph.node if node.name and node.metadata_props}
    for node in rewritten.graph.node:
        if node.name in known and not node.metadata_props:
            node.metadata_props.extend(known[node.name])
    return rewritten


def keep_metadata(path: Path, model: Any) -> None:
    """Apply `with_metadata` to a file that was made from the model."""
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


@contextmanager
def _splits_hidden(model: Any) -> Iterator[None]:
    """Have Split nodes stand in a domain that ONNX's converter leaves alone: it can't bring them below opset 18.

    Their sizes are written out, so that they mean the same in both opsets; a node whose sizes aren't known stays.
    """
    import onnx

    hidden = [node for node in model.graph.node if node.op_type == "Split" and node.domain in DOMAINS]
    if hidden:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*inferred.value_info, *inferred.input)
        }
        hidden = [node for node in hidden if _with_sizes(model.graph, node, shapes.get(node.input[0], []))]
        model.opset_import.add(domain=HIDDEN, version=1)
    for node in hidden:
        node.domain = HIDDEN
    yield
    for node in hidden:
        node.domain = ""


def _with_sizes(graph: Any, node: Any, shape: Sequence[int]) -> bool:
    """Give the Split node its sizes as an input in place of their number; whether they are known."""
    import onnx

    options = {attribute.name: attribute for attribute in node.attribute}
    if len(node.input) < 2:
        axis = options["axis"].i if "axis" in options else 0
        length = shape[axis] if -len(shape) <= axis < len(shape) else 0
        if not length:
            return False
        # All parts are as long but the last, which may be shorter.
        part = -(-length // len(node.output))
        sizes = [min(part, length - start) for start in range(0, part * len(node.output), part)]
        tensor = onnx.numpy_helper.from_array(np.asarray(sizes, np.int64), f"{node.output[0]}_sizes")
        graph.initializer.append(tensor)
        node.input.append(tensor.name)
    if "num_outputs" in options:
        node.attribute.remove(options["num_outputs"])
    return True


def _unhide_nodes(model: Any) -> Any:
    """Return the converted graph with its hidden nodes in ONNX's own domain again."""
    for node in model.graph.node:
        if node.domain == HIDDEN:
            node.domain = ""
    domains = [entry for entry in model.opset_import if entry.domain != HIDDEN]
    del model.opset_import[:]
    model.opset_import.extend(domains)
    return model
