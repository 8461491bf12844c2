"""The images that an INT8 calibration sees: real ones, from the split of the data that no accuracy is measured on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs import Images, batches
from dyno.worker.layout import axes, channels_last
from dyno.worker.spec import Artifact, DataSpec, Recipe, Tensor, UserError

SAMPLES = 128
NO_DATA = "int8 needs real calibration images: give --data, or --calibration"


class CalibrationImages:
    """Batches of the recipe's data as the model reads them: normalised or uint8, at most option `samples` images.

    The batch is the file's own, 1 where it is free. Images are spread evenly over the split, so that a split sorted by
    class still shows every class. No data, or data of another shape than the model reads, is a `UserError`.
    """

    def __init__(self, recipe: Recipe, parent: Artifact) -> None:
        if recipe.data is None or not recipe.data.folder:
            raise UserError(NO_DATA)
        self.data, self.input = recipe.data, _image_input(parent)
        if not (Path(self.data.folder) / f"{self.data.split}.npy").is_file():
            raise UserError(f"the data set {self.data.name} has no {self.data.split} split, which int8 needs")
        self._images = Images(self.data, recipe.model.preprocess, channels_last(self.input.shape))
        _check_shape(self.input, self._images.shape, self.data.name)
        self._asked = _samples(recipe)
        self.found, self.count = len(self._images), min(len(self._images), self._asked)
        if not self.count:
            raise UserError(f"the {self.data.split} split of {self.data.name} is empty; {NO_DATA}")
        self._images.index = self._images.index[np.linspace(0, self.found - 1, self.count).astype(np.int64)]
        first = self.input.shape[0]
        self.batch = first if isinstance(first, int) else 1

    @property
    def warnings(self) -> list[str]:
        """What the reader of a record should know: fewer images than were asked for."""
        few = f"calibrated on {self.count} images, all that {self.data.name} has for it"
        return [few] if self.found < self._asked else []

    def __len__(self) -> int:
        """Number of batches; the last is filled up with images seen already, which leaves the ranges as they are."""
        return -(-self.count // self.batch)

    def feeds(self, start: int, end: int) -> Iterator[dict[str, np.ndarray]]:
        """Feeds of the batches from start up to end."""
        for k in range(start, end):
            images = self._images.batch(k * self.batch, self.batch, self.input.dtype)
            yield {self.input.name: images.astype(self.input.dtype, copy=False)}


def _samples(recipe: Recipe) -> int:
    samples = recipe.options.get("samples", SAMPLES)
    if not isinstance(samples, int) or samples < 1:
        raise UserError(f"int8 calibrates on a whole number of samples from 1 on, not {samples!r}")
    return samples


def _image_input(parent: Artifact) -> Tensor:
    if len(parent.inputs) != 1 or len(parent.inputs[0].shape) != 4:
        names = ", ".join(t.name for t in parent.inputs)
        raise UserError(f"int8 calibration feeds one image input (N x C x H x W); this model has {names or 'none'}")
    return parent.inputs[0]


def _check_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    wanted = [tensor.shape[axis] for axis in axes(tensor.shape)]
    if any(isinstance(want, int) and want != have for want, have in zip(wanted, shape, strict=True)):
        has, wants = ("x".join(map(str, sizes)) for sizes in (shape, wanted))
        raise UserError(
            f"the calibration images of {name} are {has}, but the model reads {wants}; give the --size it wants"
        )


def example(recipe: Recipe, parent: Artifact) -> dict[str, np.ndarray]:
    """One batch of the calibration data, or of seeded random numbers where the recipe has no data."""
    if recipe.data is not None:
        return next(CalibrationImages(recipe, parent).feeds(0, 1))
    first = next((tensor.shape[0] for tensor in parent.inputs if tensor.shape), 1)
    dims = replace(recipe.dims, batch=first if isinstance(first, int) else 1)
    model = recipe.model
    made = next(batches(DataSpec(), model.preprocess, parent.inputs, dims, 1, model.inputs))
    kinds = {tensor.name: tensor.dtype for tensor in parent.inputs}
    return {name: array.astype(kinds.get(name, array.dtype), copy=False) for name, array in made.items()}


def reader(feeds: Iterator[dict[str, np.ndarray]]) -> Any:
    """The feeds in the form that onnxruntime.quantization asks for them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(feeds, None)

    return Reader()
