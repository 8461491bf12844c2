"""What detectors answer: boxes, masks and keypoints in pixels of the original image, as arrays for outputs.npz."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.evaluation.pipeline import Outputs
from dyno.worker.tasks.postprocess import detections
from dyno.worker.tasks.classify import Ranks
from dyno.worker.evaluation.sources import Photos
from dyno.worker.inputs.layout import channels_first
from dyno.worker.spec import Trial, UserError


class Found(Ranks):
    """Detections of each image by the one post-processing that all backends share."""

    def __init__(self, trial: Trial, real: Photos, batch: int, count: int) -> None:
        super().__init__(batch, count)
        self._task, self._model = trial.model.task, trial.model
        self._samples = real.images.index[:count]
        self._input_size = channels_first(real.shape)[2:]
        try:
            self._sizes = np.load(Path(trial.data.folder) / "sizes.npy")
        except (OSError, ValueError) as e:
            raise UserError(
                f"the data set {trial.data.name} was decoded without the images' sizes, which a {self._task} model "
                f"needs; give a data set with boxes ({e})"
            ) from e

    def of(self, turn: int, fetched: Outputs) -> Any:
        cut = list(self.cut(turn, fetched).values())
        samples = self._samples[turn * self._batch : turn * self._batch + len(cut[0])]
        found = detections(
            self._task,
            cut,
            self._sizes[samples],
            self._input_size,
            classes=self._model.classes or 0,
            keypoints=self._model.keypoints,
        )
        return list(zip(samples.tolist(), found, strict=True))

    def arrays(self, made: Sequence[Any]) -> dict[str, np.ndarray]:
        each = [pair for batch in made for pair in batch]
        found = {
            "detection_image": np.repeat([sample for sample, _ in each], [len(d.scores) for _, d in each]),
            "detection_box": _joined([d.boxes for _, d in each], np.float32, 4),
            "detection_score": _joined([d.scores for _, d in each], np.float32),
            "detection_class": _joined([d.classes for _, d in each], np.int32),
        }
        found["detection_image"] = found["detection_image"].astype(np.int64)
        if self._task == "segment":
            masks = [mask for _, d in each for mask in d.masks or ()]
            found["mask_counts"] = _joined(masks, np.uint32)
            found["mask_lengths"] = np.array([len(mask) for mask in masks], np.int64)
        if self._task == "pose":
            found["detection_keypoints"] = _joined([d.keypoints for _, d in each], np.float32, *self._model.keypoints)
        return found


def _joined(parts: list[np.ndarray], dtype: Any, *shape: int) -> np.ndarray:
    """The parts one after the other, none of which may be there."""
    return np.concatenate([np.empty((0, *shape), dtype), *(part.reshape(-1, *shape) for part in parts)]).astype(dtype)
