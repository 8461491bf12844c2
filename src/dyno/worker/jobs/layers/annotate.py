"""An ONNX file with notes at its nodes, which viewers such as Netron show; what it computes stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.worker.onnx_graph import weights
from dyno.worker.onnx_graph.file import import_onnx
from dyno.worker.spec import Job, UserError

if TYPE_CHECKING:
    from dyno.worker.journal import Journal

PREFIX = "dyno"  # of the names in a node's metadata


def annotate(job: Job, journal: Journal) -> None:
    """Write the file of the option `out` from the `source`, with a note of the option `nodes` for each node that is no
    constant, in the file's order.

    Its `lines` are put in front of the node's description, its `facts` into the node's metadata. Weights beside the
    source are copied, under the new name.
    """
    onnx = import_onnx()
    journal.stage("write")
    source, out, notes = job.options["source"], Path(job.options["out"]), job.options["nodes"]
    weights.copy(Path(source), out)
    model = onnx.load(out, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    if len(nodes) != len(notes):
        raise UserError(f"{source} has {len(nodes)} nodes, not {len(notes)} as when its layers were read; try again")
    for node, note in zip(nodes, notes, strict=True):
        _add_note(node, note)
    out.write_bytes(model.SerializeToString())


def _add_note(node: Any, note: Mapping[str, Any]) -> None:
    node.doc_string = "\n".join((*note["lines"], *([node.doc_string] if node.doc_string else [])))
    for name, text in note["facts"].items():
        entry = node.metadata_props.add()
        entry.key, entry.value = f"{PREFIX}: {name}", text
