"""An engine that runs graphs made on the way, and tensors stored on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.spec import Artifact, Tensor, Trial, UserError

Feeds = Mapping[str, np.ndarray]
Load = Callable[[Trial, Artifact | None], Session]
INDEX = "values.json"


class GraphEngine:
    """One backend with a trial's settings, given one graph after the other."""

    def __init__(self, load: Load, trial: Trial, folder: Path) -> None:
        self._load, self._trial, self._path = load, trial, folder / "part.onnx"

    @property
    def threads(self) -> int:
        """With how many threads it computes."""
        return self._trial.runtime.threads

    def run(self, model: Any, feeds: Iterable[Feeds], kinds: Mapping[str, np.dtype[Any]]) -> list[list[np.ndarray]]:
        """Return the model's outputs, in order, for each of the feeds, which are cast to the types of its inputs.

        Raises a `UserError` for a model beyond protobuf's 2 GiB.
        """
        import onnx

        try:
            onnx.save(model, self._path)
        except ValueError as e:  # protobuf holds 2 GiB
            raise UserError(f"a part of {self._trial.model.name} is too large for one ONNX file ({e})") from e
        first, *others = ({name: cast(array, kinds[name]) for name, array in feed.items()} for feed in feeds)
        inputs = tuple(Tensor(value.name, str(first[value.name].dtype), first[value.name].shape)
                       for value in model.graph.input)  # fmt: skip
        artifact = Artifact("onnx", str(self._path), "", 0, self._trial.precision, inputs, (), 0.0)
        shapes = {tensor.name: tensor.shape for tensor in inputs}
        trial = replace(self._trial, dims=replace(self._trial.dims, shapes=shapes))
        session = self._load(trial, artifact)
        try:
            return [once(session, feed) for feed in (first, *others)]
        finally:
            session.close()


def once(session: Session, feed: Feeds) -> list[np.ndarray]:
    """Return the session's outputs for the feed, in order."""
    session.bind(feed)
    session.run()
    session.wait()
    return [np.array(array) for array in session.fetch().values()]


def cast(array: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Return a copy in that type, which an engine may read in place; overflow gives infinity, as in an engine."""
    with np.errstate(over="ignore"):
        return np.array(array, kind, order="C")


def counterparts(names: Sequence[str], inputs: Sequence[str]) -> dict[str, str]:
    """Return the reference's input for each name: the one of that name, else the one at its place.

    Raises a `UserError` for a name without one.
    """
    pairs = {name: name if name in inputs else own for name, own in zip_longest(names, inputs)}
    if lacking := [name for name in names if pairs[name] is None]:
        raise UserError(f"input {lacking[0]!r} has no counterpart; the reference has {', '.join(inputs)}")
    return {name: pairs[name] for name in names}


class StoredTensors:
    """Arrays by name in a folder, [runs, ...] each, and the feeds and outputs of those runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self._files: dict[str, int] = index["tensors"]
        self._feeds: list[str] = index["feeds"]
        self.runs: int = index["runs"]
        self.outputs: list[np.ndarray] = [self._load_array(f"output{k}") for k in range(index["outputs"])]
        self.shapes = {name: tuple(self[name].shape[1:]) for name in self._files}

    def _load_array(self, name: str) -> np.ndarray:
        array: np.ndarray = np.load(self._folder / f"{name}.npy", mmap_mode="r")
        return array

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> np.ndarray:
        return self._load_array(str(self._files[name]))

    def feeds(self, names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """Return the inputs of each run under these names; see `counterparts`."""
        pairs = counterparts(names, self._feeds)
        arrays = {name: self._load_array(f"feed{self._feeds.index(own)}") for name, own in pairs.items()}
        return [{name: array[run] for name, array in arrays.items()} for run in range(self.runs)]


class TensorWriter:
    """Writes what `StoredTensors` reads: `add` each tensor with the values of all runs, then `end`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._files = folder, dict[str, int]()

    def add(self, name: str, runs: Sequence[np.ndarray]) -> None:
        """Store a tensor, unless its shape changes from run to run."""
        if len({array.shape for array in runs}) == 1:
            number = self._files.setdefault(name, len(self._files))
            np.save(self._folder / f"{number}.npy", np.stack(runs))

    def end(self, feeds: Sequence[Feeds], outputs: Sequence[Sequence[np.ndarray]]) -> None:
        """Store the feeds and the outputs of the runs, [output][run]."""
        for k, name in enumerate(feeds[0]):
            np.save(self._folder / f"feed{k}.npy", np.stack([feed[name] for feed in feeds]))
        for k, runs in enumerate(outputs):
            if len({array.shape for array in runs}) > 1:
                raise UserError("the outputs have another shape for every input, so nothing can be compared")
            np.save(self._folder / f"output{k}.npy", np.stack(runs))
        index = {"tensors": self._files, "feeds": [*feeds[0]], "runs": len(feeds), "outputs": len(outputs)}
        (self._folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
