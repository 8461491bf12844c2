"""The files beside an ONNX graph that hold its larger weights."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dyno.worker.onnx_graph.graph_facts import tensors_in
from dyno.worker.spec import UserError

KEY = "location"  # how a graph names such a file
EMPTY = SimpleNamespace(initializer=(), sparse_initializer=(), node=())  # a graph


def beside(path: Path) -> list[Path]:
    """Return the files with the graph's external weights, by name; [] if it has none, or can't be read."""
    with open(path, "rb") as f:
        if not f.seek(0, 2):
            return []
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(KEY.encode()) < 0:  # nearly every graph, which may be large to read
                return []
    return [path.parent / name for name in sorted({entry.value for entry in _find_entries(_load_graph(path))})]


def check_beside(path: str) -> None:
    """Raise a `UserError` if a file with the graph's external weights is missing, or ends before they do."""
    files = beside(Path(path))
    for file in files:
        if not file.is_file():
            raise UserError(f"{path} keeps weights in {file}, which doesn't exist; put it back beside it")
    for tensor in tensors_in(_load_graph(Path(path))) if files else ():
        known = {entry.key: entry.value for entry in tensor.external_data}
        if KEY in known:
            file, end = Path(path).parent / known[KEY], int(known.get("offset", 0)) + int(known.get("length", 0))
            if (size := file.stat().st_size) < end:
                raise UserError(
                    f"{path} keeps weights in {file}, which is cut short at {size:,} bytes: {tensor.name} ends at "
                    f"{end:,}; copy it again"
                )


def copy(path: Path, out: Path) -> None:
    """Copy the graph to `out`, its weights as OUT.data and so on: graphs in one folder must not share such a file."""
    files = beside(path)
    if not files:
        shutil.copyfile(path, out)
        return
    import onnx

    model = onnx.load(path, format="protobuf", load_external_data=False)
    names = {file: f"{out.name}.data{k or ''}" for k, file in enumerate(files)}
    for entry in _find_entries(model.graph):
        entry.value = names[path.parent / entry.value]
    for file, name in names.items():
        shutil.copyfile(file, out.with_name(name))
    out.write_bytes(model.SerializeToString())


def _load_graph(path: Path) -> Any:
    """Return the graph without external weights; an empty one if it can't be read."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError:
        return EMPTY
    try:
        return onnx.load(path, format="protobuf", load_external_data=False).graph
    except DecodeError:
        return EMPTY


def _find_entries(graph: Any) -> Iterator[Any]:
    return (entry for tensor in tensors_in(graph) for entry in tensor.external_data if entry.key == KEY)
