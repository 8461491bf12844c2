"""A YOLO user's own checkpoint (best.pt), read without running its code: the architecture and the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dyno.worker.nets import torch_archive
from dyno.worker.spec import UserError

MAX_SIDE = 8192  # pixels of a side that a checkpoint may name as its training size
MAX_VALUES = 10_000  # values in an architecture


@dataclass(frozen=True)
class Checkpoint:
    """`config` is the architecture as the YAML has it, `module` the stub that holds the tensors, `size` the side of the
    images that it was trained on (0: unknown)."""

    config: dict[str, Any]
    module: torch_archive.Stub
    size: int


def read(path: str) -> Checkpoint:
    """The checkpoint, its averaged weights (EMA) where it has them; a `UserError` names the alternatives."""
    archive = torch_archive.Archive(path)
    if not archive.yolo:
        raise UserError(f"{path} is not a checkpoint of ultralytics; {torch_archive.advice(archive)}")
    loaded = archive.load()
    module = torch_archive.module_in(loaded)
    config = module.state.get("yaml") if module is not None else None
    if not isinstance(config, dict) or not {"backbone", "head"} <= set(config):
        raise UserError(f"{path} holds no module with its architecture; {advice(path)}")
    return Checkpoint(_plain(config, path), module, _side(module.state.get("args") or loaded.get("train_args")))


def _side(arguments: Any) -> int:
    """The longest side in the settings of its training, 0 where it isn't among them."""
    size = arguments.get("imgsz") if isinstance(arguments, dict) else None
    sides = size if isinstance(size, (list, tuple)) else [size]
    return max((side for side in sides if isinstance(side, int) and 0 < side <= MAX_SIDE), default=0)


def advice(path: str) -> str:
    """The two lines of Python that split a trusted checkpoint where this module can't."""
    return (
        f"if you trust it, run m = ultralytics.YOLO({path!r}).model.float(); "
        "safetensors.torch.save_file(m.state_dict(), 'net.safetensors') and yaml.safe_dump(m.yaml, open('net.yaml', "
        "'w')), then give ultralytics:net.yaml --weights net.safetensors"
    )


def _plain(config: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of the architecture, of text, numbers, lists and tables alone."""
    remaining = MAX_VALUES

    def copied(value: Any, depth: int) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0 or depth > 10:
            raise UserError(f"the architecture in {path} is too large to be a network's; {advice(path)}")
        if isinstance(value, dict):
            return {copied(key, depth + 1): copied(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [copied(item, depth + 1) for item in value]
        if value is None or isinstance(value, (str, int, float, bool)):
            return value
        raise UserError(f"{path} has something in its architecture that is neither text nor a number; {advice(path)}")

    copy: dict[str, Any] = copied(config, 0)
    return copy
