"""An ONNX file with notes at its nodes, which viewers such as Netron show; what it computes stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dyno.worker.onnx_graph import weights
from dyno.worker.onnx_graph.file import import_onnx
from dyno.worker.spec import UserError

PREFIX = "dyno"  # of the names in a node's metadata
LEAST_IR = 10  # the first version of the format in which a node has metadata


def annotate(options: Mapping[str, Any]) -> None:
    """Write the file of the option `out` from the `source`, with the notes of the option `nodes`: for each node that is
    no constant, in the file's order, names and texts.

    They stand in the node's description and in its metadata. Weights beside the source are copied, under the new name.
    """
    onnx = import_onnx()
    source, out, notes = options["source"], Path(options["out"]), options["nodes"]
    weights.copy(Path(source), out)
    model = onnx.load(out, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    if len(nodes) != len(notes):
        raise UserError(f"{source} has {len(nodes)} nodes, not {len(notes)} as when its layers were read; try again")
    for node, entries in zip(nodes, notes, strict=True):
        _note(node, entries)
    model.ir_version = max(model.ir_version, LEAST_IR)
    out.write_bytes(model.SerializeToString())


def _note(node: Any, entries: Mapping[str, str]) -> None:
    lines: Sequence[str] = [f"{name}: {text}" for name, text in entries.items()]
    node.doc_string = "\n".join((*lines, *([node.doc_string] if node.doc_string else [])))
    for name, text in entries.items():
        entry = node.metadata_props.add()
        entry.key, entry.value = f"{PREFIX}: {name}", text
