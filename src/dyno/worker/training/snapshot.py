"""Snapshots of a training after each epoch: its state for resuming, the weights, the curves.

state.pt is written first and atomically; the other files follow from it, so that the next start repairs a kill between
two writes. It holds tensors, numbers and text only, and is read without running code.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dyno.worker.record import replacing
from dyno.worker.spec import UserError

STATE, BEST, LAST, HISTORY = "state.pt", "best.safetensors", "last.safetensors", "history.csv"
COLUMNS = ("epoch", "lr", "train_loss", "test_loss", "top1", "seconds", "images_per_s")
AGAIN = "give another --out, or remove that folder to start anew"


@dataclass
class State:
    """Where a training stands: its settings, the epochs that are done, and the best of them (0: none)."""

    settings: dict[str, Any]
    history: list[dict[str, float]] = field(default_factory=list)
    best: int = 0

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return len(self.history)

    def add(self, row: dict[str, float]) -> None:
        """Add one more epoch; the best has the highest top-1, of equals the lowest loss."""
        self.history.append(row)
        if not self.best or _rank_epoch(row) > _rank_epoch(self.history[self.best - 1]):
            self.best = self.epoch


def _rank_epoch(row: Mapping[str, float]) -> tuple[float, float]:
    return row["top1"], -row["test_loss"]


def store(folder: Path, state: State, parts: Mapping[str, Any]) -> None:
    """Write the state with the state dicts of `parts` (`module` among them), then the files that follow from it."""
    import torch

    content = io.BytesIO()
    about = {"settings": state.settings, "history": state.history, "best": state.best}
    torch.save({"about": json.dumps(about), **{name: part.state_dict() for name, part in parts.items()}}, content)
    _write_file(folder / STATE, content.getbuffer())
    publish(folder, state, parts["module"])


def publish(folder: Path, state: State, module: Any) -> None:
    """Write the curves, the last weights, and the best ones if the last epoch is the best."""
    weights = _serialise_weights(module)
    if state.best == state.epoch:
        _write_file(folder / BEST, weights)
    _write_file(folder / LAST, weights)
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(state.history)
    _write_file(folder / HISTORY, table.getvalue().encode())


def restore(folder: Path, settings: dict[str, Any], parts: Mapping[str, Any]) -> State:
    """Load the state of the training in the folder into its `parts`; return it, or a new state if there is none.

    Raises `UserError` if the file is damaged, or for different settings or data, which it names.
    """
    path = folder / STATE
    if not path.is_file():
        return State(settings)
    stored = _read_state(path)
    about = json.loads(stored["about"])
    _check_settings(path, about["settings"], settings)
    for name, part in parts.items():
        part.load_state_dict(stored[name])
    state = State(settings, about["history"], about["best"])
    publish(folder, state, parts["module"])
    return state


def _read_state(path: Path) -> dict[str, Any]:
    import torch

    try:
        stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        json.loads(stored["about"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged or not the state of a training; {AGAIN}") from e
    return stored


def _check_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume with settings that change the result, and name them."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = ", ".join(
            f"{name} {_format_value(before.get(name))} (now {_format_value(now.get(name))})" for name in names
        )
        raise UserError(f"the training in {path.parent} began with {changes}; {AGAIN}")


def _format_value(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _serialise_weights(module: Any) -> bytes:
    from safetensors.torch import save

    # safetensors refuses tensors that share memory, so each gets its own
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in module.state_dict().items()}
    content: bytes = save(tensors)
    return content


def sha256(path: Path) -> str:
    """Return the sha256 of the file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_file(path: Path, content: bytes | memoryview) -> None:
    with replacing(path) as f:
        f.write(content)
