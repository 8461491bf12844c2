"""The data of an INT8 calibration: real images from a split without accuracy measurements, or described values.

A model without image inputs is calibrated on values within the ranges given for its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.facts.engine import Calibration
from dyno.worker.inputs.input_data import Images, read_batches
from dyno.worker.inputs.specs import channels_last, count_rows, find_axes
from dyno.worker.spec import Artifact, DataSpec, InputSpec, ModelSpec, Recipe, Tensor, Trial, UserError

DEFAULT_SAMPLES = 128
NO_DATA = "int8 needs real calibration images: give --data, or --calibration"
NO_VALUES = f"{NO_DATA}; for inputs that are not images, give their values with --input NAME=LOW..HIGH or FILE.npz"


def missing_data(trial: Trial) -> str:
    """Return the message that int8 lacks calibration data; "" if it has data or nothing is to be quantised."""
    is_quantised = trial.precision == "int8" != trial.model.precision
    return NO_VALUES if is_quantised and not trial.data.folder and not inputs_suffice(trial.model) else ""


def inputs_suffice(model: ModelSpec) -> bool:
    """Return whether random values of the described inputs suffice for calibration.

    They don't for a single image without a value range.
    """
    tensors = [spec for spec in model.inputs if spec.dtype]
    unranged = [spec for spec in tensors if spec.low is None and not spec.feeds]
    return bool(tensors) and not (len(tensors) == 1 and unranged and len(tensors[0].shape) == 4)


def calibration_data(trial: Trial) -> DataSpec:
    """Return the trial's calibration data: the images set aside for it, else values of the described inputs.

    Random values have another seed than those for timing and comparison. Raise a `UserError` without any data.
    """
    if trial.data.folder:
        return DataSpec(trial.data.name, trial.data.folder, trial.data.sha256, split="calibration")
    if not inputs_suffice(trial.model):
        raise UserError(NO_VALUES.replace("int8", trial.precision))
    return DataSpec("inputs", split="calibration", seed=trial.data.seed + 1)


def calibration_of(recipe: Recipe, parent: Artifact) -> CalibrationImages | CalibrationInputs:
    """Return the recipe's calibration data for the parent's file; raise a `UserError` if none fits."""
    if recipe.data is not None and not recipe.data.folder and inputs_suffice(recipe.model):
        return CalibrationInputs(recipe, parent)
    return CalibrationImages(recipe, parent)


class CalibrationImages:
    """Batches of the recipe's data in the model's form: normalised or uint8, at most option `samples` images.

    The batch is the file's own, 1 if it is free. Images are spread evenly over the split, so that one sorted by class
    still covers every class. Raise a `UserError` for missing data or data of another shape.
    """

    def __init__(self, recipe: Recipe, parent: Artifact) -> None:
        if recipe.data is None or not recipe.data.folder:
            raise UserError(NO_DATA)
        self.data, self.input = recipe.data, _image_input(parent)
        if not (Path(self.data.folder) / f"{self.data.split}.npy").is_file():
            raise UserError(f"{self.data.name} has no images except test images; int8 needs others: give --calibration")
        self._images = Images(self.data, recipe.model.preprocess, channels_last(self.input.shape))
        _check_shape(self.input, self._images.shape, self.data.name)
        self._requested = int(recipe.options.get("samples", DEFAULT_SAMPLES))
        self.available, self.count = len(self._images), min(len(self._images), self._requested)
        if not self.count:
            raise UserError(f"the {self.data.split} split of {self.data.name} is empty; {NO_DATA}")
        self._images.index = self._images.index[np.linspace(0, self.available - 1, self.count).astype(np.int64)]
        length = self.input.shape[0]
        self.batch = length if isinstance(length, int) else 1

    @property
    def facts(self) -> Calibration:
        """The recorded facts on the data, without the method."""
        return Calibration(self.count, "", self.data.sha256)

    @property
    def warnings(self) -> list[str]:
        """A warning if there are fewer images than requested."""
        warning = f"calibrated on {self.count} image{'s' * (self.count != 1)}, all that {self.data.name} has for it"
        return [warning] if self.available < self._requested else []

    def __len__(self) -> int:
        """Return the number of batches; the last is padded with earlier images, which leaves the ranges unchanged."""
        return -(-self.count // self.batch)

    def feeds(self, start: int, end: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the feeds of the batches from `start` up to `end`."""
        for k in range(start, end):
            images = self._images.read_batch(k * self.batch, self.batch, self.input.dtype)
            yield {self.input.name: images.astype(self.input.dtype, copy=False)}


class CalibrationInputs:
    """Batches of a model's described inputs: rows of the user's arrays in turn, and random values in their ranges.

    The batch is the file's own, 1 if it is free. There are option `samples` samples, but at most the arrays' number of
    rows unless other inputs are random. Raise a `UserError` for arrays that are unreadable or don't fit.
    """

    def __init__(self, recipe: Recipe, parent: Artifact) -> None:
        self._recipe, self._parent = recipe, parent
        self._specs = [spec for spec in recipe.model.inputs if spec.dtype]
        self._requested = int(recipe.options.get("samples", DEFAULT_SAMPLES))
        # With random inputs, rows are repeated, each time with other random values.
        has_random = len(self._from_files) < len(self._specs)
        axes = {spec.name: recipe.dims.batch_axis(spec.name, spec.shape) for spec in self._from_files}
        batch_specs = [s for s in self._from_files if (k := axes[s.name]) is not None and isinstance(s.shape[k], str)]
        counts = (count_rows(spec, axes[spec.name] or 0) for spec in batch_specs or self._from_files)
        self.available = self._requested if has_random else max(counts)
        self.count = min(self.available, self._requested)
        self.batch = _find_batch(recipe, parent)

    @property
    def _from_files(self) -> list[InputSpec]:
        return [spec for spec in self._specs if spec.feeds]

    @property
    def facts(self) -> Calibration:
        """The recorded facts on the data: the source of each input's values, and a note that names them."""
        files = list(dict.fromkeys(Path(spec.feeds).name for spec in self._from_files))
        names = ", ".join(spec.name for spec in self._from_files)
        random_names = ", ".join(spec.name for spec in self._specs if not spec.feeds)
        sources = [f"the rows of {', '.join(files)} ({names}), on which outputs are also compared"] if files else []
        sources += [f"random values, not real ones, of {random_names}"] if random_names else []
        return Calibration(
            samples=self.count,
            data_sha256=next((spec.feeds_sha256 for spec in self._from_files), ""),
            inputs={spec.name: _describe_source(spec) for spec in self._specs},
            note=f"INT8 was calibrated on {' and on '.join(sources)}",
        )

    @property
    def warnings(self) -> list[str]:
        """A warning if the files have fewer rows than requested."""
        if self.available >= self._requested:
            return []
        feeds = Path(self._from_files[0].feeds).name
        return [f"calibrated on {self.count} row{'s' * (self.count != 1)}, all that {feeds} has"]

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self.count // self.batch)

    def feeds(self, start: int, end: int) -> Iterator[dict[str, np.ndarray]]:
        """Return the feeds of the batches from `start` up to `end`."""
        return islice(_iter_batches(self._recipe, self._parent, end), start, end)


def _describe_source(spec: InputSpec) -> str:
    """Return the source of an input's calibration values: a file, or a range."""
    if spec.feeds:
        return Path(spec.feeds).name
    return "random" if spec.low is None else f"random, {spec.low:g} to {spec.high:g}"


def _image_input(parent: Artifact) -> Tensor:
    if len(parent.inputs) != 1 or len(parent.inputs[0].shape) != 4:
        names = ", ".join(t.name for t in parent.inputs)
        raise UserError(f"int8 calibration feeds one image input (N x C x H x W); this model has {names or 'none'}")
    return parent.inputs[0]


def _check_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    expected = [tensor.shape[axis] for axis in find_axes(tensor.shape)]
    if any(isinstance(wanted, int) and wanted != actual for wanted, actual in zip(expected, shape, strict=True)):
        image_size, input_size = ("x".join(map(str, sizes)) for sizes in (shape, expected))
        raise UserError(
            f"the calibration images of {name} are {image_size}, but the model reads {input_size}; set --size to match"
        )


def make_example(recipe: Recipe, parent: Artifact) -> dict[str, np.ndarray]:
    """Return one batch of the calibration data, or of seeded random numbers if the recipe has no data."""
    if recipe.data is not None:
        return next(calibration_of(recipe, parent).feeds(0, 1))
    return next(_iter_batches(recipe, parent, 1))


def _iter_batches(recipe: Recipe, parent: Artifact, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of the described inputs, else of random numbers, in the types of the parent's file."""
    kinds = {tensor.name: tensor.dtype for tensor in parent.inputs}
    dims, model = replace(recipe.dims, batch=_find_batch(recipe, parent)), recipe.model
    data = DataSpec(seed=recipe.data.seed if recipe.data else 0)
    for batch in read_batches(data, model.preprocess, parent.inputs, dims, count, model.inputs):
        yield {name: batch[name].astype(kind, copy=False) for name, kind in kinds.items()}


def _find_batch(recipe: Recipe, parent: Artifact) -> int:
    """Return the batch of the requested shapes, else the file's own, else 1."""
    dims, lengths = recipe.dims, list[object]()
    for tensor in parent.inputs:
        if (axis := dims.batch_axis(tensor.name, tensor.shape)) is not None:
            lengths.append(tensor.shape[axis])
        elif tensor.shape and tensor.name not in dims.shapes:
            lengths.append(tensor.shape[0])
    length = next(iter(lengths), 1)
    return length if isinstance(length, int) else 1


def make_reader(feeds: Iterator[dict[str, np.ndarray]]) -> Any:
    """Return the feeds as onnxruntime.quantization's data reader."""
    from onnxruntime.quantization import CalibrationDataReader

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(feeds, None)

    return CalibrationReader()
