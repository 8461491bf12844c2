"""Sources of a pipeline's batches: images of a decoded data set, read in several threads, or random numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.inputs import input_data
from dyno.worker.spec import Trial

Feed = Mapping[str, np.ndarray]


class BatchSource:
    """Batches by number; a batch is filled in `parts`, each by another thread if there are several."""

    parts = 1

    def new_arrays(self) -> dict[str, np.ndarray]:
        """Return new arrays for one batch, in the engine's form."""
        raise NotImplementedError

    def fill(self, feed: Feed, number: int, part: int) -> None:
        """Write one part of the batch into arrays as from `new_arrays`."""
        raise NotImplementedError


class DecodedImages(BatchSource):
    """Images of a decoded data set; after the last one the first follows, so that every batch is full."""

    def __init__(self, session: Session, trial: Trial, threads: int) -> None:
        self.name, self.shape, self.images = input_data.open_images(
            trial.data, trial.model.preprocess, session.inputs, trial.dims
        )
        self._dtype = "uint8" if session.inputs[0].dtype == "uint8" else "float32"
        self.parts = min(threads, self.shape[0])

    def new_arrays(self) -> dict[str, np.ndarray]:
        return {self.name: np.zeros(self.shape, self._dtype)}

    def fill(self, feed: Feed, number: int, part: int) -> None:
        batch = self.shape[0]
        begin, end = (batch * i // self.parts for i in (part, part + 1))
        self.images.read_into(feed[self.name][begin:end], number * batch + begin)


class RandomInputs(BatchSource):
    """Random inputs, the same for every run: they are drawn one after the other from the data's seed."""

    def __init__(self, session: Session, trial: Trial, count: int) -> None:
        model, tensors = trial.model, session.inputs
        self._batches = list(input_data.batches(trial.data, model.preprocess, tensors, trial.dims, count, model.inputs))

    def new_arrays(self) -> dict[str, np.ndarray]:
        return {name: np.zeros_like(array) for name, array in self._batches[0].items()}

    def fill(self, feed: Feed, number: int, part: int) -> None:
        for name, array in self._batches[number % len(self._batches)].items():
            np.copyto(feed[name], array)
