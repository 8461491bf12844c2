"""TensorRT's own INT8 calibrators (up to version 10), fed with real images; the graph route needs none of this."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backends.tensor_rt import library
from dyno.worker.inputs.calibration import CalibrationImages
from dyno.worker.sessions.gpu import call
from dyno.worker.spec import Artifact, Recipe, UserError


def calibrator(trt: Any, device: Any, method: str, images: CalibrationImages, folder: Path) -> Any:
    """Return a calibrator (entropy: IInt8EntropyCalibrator2, minmax: IInt8MinMaxCalibrator) fed with the images.

    `failure` is the exception that stopped it: the library swallows exceptions of callbacks, and would go on with the
    ranges so far. It reads no cache: the recipe alone decides an engine's scales, so none can be stale. Its ranges are
    kept as FOLDER/calibration.cache.
    """
    kind: Any = library.calibrator_class(trt, method)
    feeds = images.feeds(0, len(images))
    address: list[int] = []

    class Calibrator(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            kind.__init__(self)
            self.failure: Exception | None = None

        def get_batch_size(self) -> int:
            return images.batch

        def get_batch(self, names: list[str]) -> list[int] | None:
            try:
                feed = next(feeds, None)
                return None if feed is None else self.placed(np.ascontiguousarray(feed[names[0]], np.float32))
            except Exception as e:  # raised again where the build ends
                self.failure = e
                return None

        def placed(self, array: np.ndarray) -> list[int]:
            if not address:
                address.append(device.allocate(array.nbytes))
            call(device.cuda.cuMemcpyHtoD, address[0], array.ctypes.data, array.nbytes)
            return address

        def read_calibration_cache(self) -> None:
            return None

        def write_calibration_cache(self, cache: Any) -> None:
            (folder / "calibration.cache").write_bytes(bytes(cache))

    return Calibrator()


def images_for(recipe: Recipe, parent: Artifact, shape: tuple[int, ...]) -> CalibrationImages:
    """Return the recipe's calibration images in batches of the shape that the network calibrates on.

    Raises a `UserError` for a model with several inputs.
    """
    if len(parent.inputs) != 1:
        raise UserError("a calibrator feeds one image input; give route=graph for a model with several")
    tensor = replace(parent.inputs[0], shape=shape)
    return CalibrationImages(recipe, replace(parent, inputs=(tensor,)))
