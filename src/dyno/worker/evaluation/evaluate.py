"""Every image of the data once through the session: the outputs for accuracy and agreement, and the throughput of the
whole pipeline behind the decoder in images per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyno.worker import tasks
from dyno.worker.backend import Session
from dyno.worker.evaluation.pipeline import Outputs, Pipeline
from dyno.worker.evaluation.rows import find_rows
from dyno.worker.evaluation.sources import DecodedImages, RandomInputs
from dyno.worker.facts import job as facts
from dyno.worker.inputs import input_data
from dyno.worker.inputs.layout import channels_first
from dyno.worker.inputs.shapes import static_shapes
from dyno.worker.record import Measurement
from dyno.worker.spec import Trial
from dyno.worker.tasks.classify import UNSCORED, TopKCollector
from dyno.worker.tasks.task import Collector, EvaluationInputs

RAW_BYTES = 64 * 2**20  # raw outputs kept per trial; classes and scores are kept for every image
WARM_UP = 0.1  # share of the data that goes through once before anything counts
MOST_WARM_UP = 400  # images
STAGES_S = 0.5  # at most, and never longer than the measurement itself


@dataclass(frozen=True)
class Evaluation:
    """Arrays for outputs.npz; images and seconds of the loop over them, 0 for random inputs; seconds per image of each
    stage, one sample per batch; warnings from decoding the data."""

    arrays: dict[str, np.ndarray]
    images: int = 0
    warm_up: int = 0
    seconds: float = 0.0
    decode: float = 0.0
    stages: dict[str, np.ndarray] = field(default_factory=dict)
    oddities: tuple[str, ...] = ()

    def measurements(self) -> list[Measurement]:
        """Return the pipeline's throughput and the stages' times, whose samples are stored under the stages' names."""
        measurements = [Measurement(name, "s", "duration", None, name, clock="host") for name in self.stages]
        if self.decode:
            measurements.insert(0, Measurement("decode", "s", "duration", self.decode, clock="host"))
        if self.seconds:
            measurements.append(Measurement("pipeline", "1/s", "rate", self.images / self.seconds, clock="host"))
        return measurements

    def facts(self) -> facts.PipelineFacts | None:
        """Return the images and seconds of the throughput, and the images of warm-up."""
        return facts.PipelineFacts(self.images, self.seconds, self.warm_up) if self.seconds else None


def evaluate(session: Session, trial: Trial, timed: bool = True) -> Evaluation:
    """Run every image of the data through the session, at the trial's own batch, in a pipeline.

    Arrays are `output:NAME` raw (with `rows:NAME` where each input has its own number of rows), `sample`, `label`, and
    `topk_index` and `topk_score` of a classifier or the detections of a detector. The last batch is filled by wrapping
    around and cut again. Real images are timed: a tenth of them warms the pipeline up (R4), and a few batches
    afterwards time the stages separately; neither counts.
    """
    batch, threads = _find_batch(session, trial), max(1, trial.runtime.threads)
    # On a CPU the processors are busy with the engine; with a GPU they are idle.
    helpers = threads if session.stream is not None else max(1, threads // 4)
    decoded = DecodedImages(session, trial, helpers) if trial.data.folder else None
    count = min(trial.data.count, len(decoded.images)) if decoded else trial.data.count
    batches = math.ceil(count / batch)
    pipeline = Pipeline(session, decoded or RandomInputs(session, trial, batches), helpers if decoded else 1)
    collector = tasks.find(trial.model.task).collector(_describe_evaluation(trial, decoded, batch, count))
    warm_up = min(batches, math.ceil(min(MOST_WARM_UP, WARM_UP * count) / batch)) if decoded and timed else 0
    raw_outputs, rows = _RawOutputs(collector), find_rows(session, trial, batch)

    def keep_outputs(number: int, fetched: Outputs) -> None:
        raw_outputs.add(number, rows.arranged(fetched))

    def evaluate_batch(number: int, fetched: Outputs) -> Any:
        return collector.of(number, rows.arranged(fetched))

    result = pipeline.run(batches, keep_outputs, evaluate_batch, warm_up)
    seconds, stages = 0.0, {}
    if decoded and timed:
        seconds = result.seconds
        stages = {
            name: s / batch for name, s in pipeline.stages(evaluate_batch, min(STAGES_S, trial.plan.seconds)).items()
        }
    metadata = input_data.metadata(trial.data)
    arrays = {**raw_outputs.arrays(), **collector.arrays(result.results), **_identify_rows(decoded, count, metadata)}
    decode = float(metadata.get("decode_s") or 0)
    oddities = (*metadata.get("warnings", ()), *_left_out(metadata.get("unreadable", ())))
    oddities += (rows.warning,) if rows.warning else ()
    oddities += (*collector.oddities(result.results),)
    if isinstance(collector, TopKCollector) and metadata.get("classes") and "topk_index" not in arrays:
        oddities += (UNSCORED,)
    return Evaluation(arrays, count, min(warm_up * batch, count), seconds, decode, stages, oddities)


def _identify_rows(decoded: DecodedImages | None, count: int, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the image index of each row of the outputs, its label, and the names of the classes."""
    if decoded is None:
        return {"sample": np.arange(count, dtype=np.int64)}
    sample = decoded.images.index[:count]
    names = {"classes": np.array(metadata["classes"], np.str_)} if metadata.get("classes") else {}
    return {"sample": sample, "label": decoded.images.labels[sample], **names}


def _left_out(unreadable: Sequence[str]) -> list[str]:
    shown = ", ".join(unreadable[:3]) + (", …" if len(unreadable) > 3 else "")
    images = "1 image" if len(unreadable) == 1 else f"{len(unreadable)} images"
    return [f"{images} can't be read, left out: {shown}"] if unreadable else []


def _find_batch(session: Session, trial: Trial) -> int:
    first = next((shape for shape in static_shapes(session.inputs, trial.dims).values() if shape), (1,))
    return trial.dims.batch or first[0]


def _describe_evaluation(trial: Trial, decoded: DecodedImages | None, batch: int, count: int) -> EvaluationInputs:
    if decoded is None:
        return EvaluationInputs(trial, batch, count, input_size=(trial.dims.height, trial.dims.width))
    height, width = channels_first(decoded.shape)[2:]
    return EvaluationInputs(trial, batch, count, decoded.images.index[:count], (height, width))


class _RawOutputs:
    """Raw outputs in order, up to RAW_BYTES."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._raw: dict[str, list[np.ndarray]] = {}
        self._images: list[int] = []
        self._bytes = 0

    def add(self, number: int, fetched: Outputs) -> None:
        if self._bytes >= RAW_BYTES:
            return
        cut = self._collector.cut(number, fetched)
        size = sum(a.nbytes for a in cut.values())
        if self._bytes + size > RAW_BYTES:
            self._bytes = RAW_BYTES  # a later, smaller batch must not leave a hole
            return
        self._bytes += size
        self._images.append(self._collector.images(number))
        for name, a in cut.items():
            self._raw.setdefault(name, []).append(np.atleast_1d(np.array(a)))

    def arrays(self) -> dict[str, np.ndarray]:
        stored: dict[str, np.ndarray] = {}
        for name, parts in self._raw.items():
            stored[f"output:{name}"], rows = _join_outputs(parts, self._images)
            if rows is not None:
                stored[f"rows:{name}"] = rows
        return stored


def _join_outputs(parts: Sequence[np.ndarray], images: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
    """Join an output of all batches; return it with the rows of each, or None where its first axis counts the inputs.

    Non-maximum suppression inside a network leaves boxes of any number: n x 4 of each batch, or batch x n x 6.
    """
    batched = all(len(part) == count for part, count in zip(parts, images, strict=True))
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts), None if batched else np.array([len(part) for part in parts], np.int64)
    if batched and len({part.shape[2:] for part in parts}) == 1:
        rows = np.repeat([part.shape[1] for part in parts], images).astype(np.int64)
        return np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts]), rows
    return np.concatenate([part.ravel() for part in parts]), np.array([part.size for part in parts], np.int64)
