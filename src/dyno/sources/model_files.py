"""Files of torch.save that are given as a model: which can be run as they are, and what to do with the others."""

from __future__ import annotations

from pathlib import Path

from dyno.sources import commits
from dyno.worker import registry
from dyno.worker.nets.checkpoint import PROGRAM, Archive, advise_on_module
from dyno.worker.spec import SAVED, UserError

SUFFIXES = (".pt", ".pth")
DARKNET = ".cfg"


def stored_source(source: str) -> str:
    """Return the source with the prefix for its content: a YOLO checkpoint (best.pt) or a TorchScript program.

    A .cfg is Darknet's. Raises `UserError` for any other file of torch.save; any other source stays as it is.
    """
    if Path(source).suffix == DARKNET and ":" not in source:
        return f"darknet:{source}"
    if Path(source).suffix not in SUFFIXES or not Path(source).is_file():
        return source
    archive = Archive(source)
    if archive.kind == PROGRAM:
        return f"saved:{source}"
    if not archive.yolo:
        raise UserError(f"{source} is not a model on its own: {advise_on_module(archive)}")
    return f"ultralytics:{source}"


def keeps_weights(source: str) -> bool:
    """Return whether the source is a file with its own weights, which no checkpoint and no library's weights replace.

    Such a file's outputs are often compared with the network under a checkpoint, which must not enter the file.
    """
    file = commits.split(source)[0]
    return bool(registry.format_of(file)) or file.startswith("saved:") or file.endswith((*SAVED, *SUFFIXES))
