"""Files of torch.save that are given as a model: which can be run as they are, and what the others are."""

from __future__ import annotations

from pathlib import Path

from dyno.worker.nets.torch_archive import PROGRAM, Archive, advice
from dyno.worker.spec import UserError

SUFFIXES = (".pt", ".pth")


def stored_source(source: str) -> str:
    """The source that a YOLO's checkpoint (best.pt) or a TorchScript program is, which are told by what they hold.

    A `UserError` says what another file of torch.save is; any other source stays as it is.
    """
    if Path(source).suffix not in SUFFIXES or not Path(source).is_file():
        return source
    archive = Archive(source)
    if archive.kind == PROGRAM:
        return f"saved:{source}"
    if not archive.yolo:
        raise UserError(f"{source} is not a model on its own: {advice(archive)}")
    return f"ultralytics:{source}"
