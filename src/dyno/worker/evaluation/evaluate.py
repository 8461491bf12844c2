"""Every image of the data once through the session: the outputs that accuracy and agreement are computed from, and how
many images a second the whole way takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyno.worker import tasks
from dyno.worker.backend import Session
from dyno.worker.evaluation.pipeline import Outputs, Pipeline
from dyno.worker.evaluation.sources import Numbers, Photos
from dyno.worker.inputs import input_data
from dyno.worker.inputs.layout import channels_first
from dyno.worker.inputs.shapes import static_shapes
from dyno.worker.record import Measurement
from dyno.worker.spec import Trial
from dyno.worker.tasks.task import Collector, Evaluated

RAW_BYTES = 64 * 2**20  # raw outputs kept per trial; classes and scores are kept for every image
WARM_UP = 0.1  # share of the data that goes through once before anything counts
MOST_WARM_UP = 400  # images
STAGES_S = 0.5


@dataclass(frozen=True)
class Evaluation:
    """Arrays for outputs.npz; images and seconds of the loop over them, 0 for random inputs; seconds per image of each
    stage, one sample per batch; what was odd about the data when it was decoded."""

    arrays: dict[str, np.ndarray]
    images: int = 0
    warm_up: int = 0
    seconds: float = 0.0
    decode: float = 0.0
    stages: dict[str, np.ndarray] = field(default_factory=dict)
    oddities: tuple[str, ...] = ()

    def measurements(self) -> list[Measurement]:
        """The rate of the pipeline and the stages' times, which are raw samples of their own names."""
        found = [Measurement(name, "s", "duration", None, name, clock="host") for name in self.stages]
        if self.decode:
            found.insert(0, Measurement("decode", "s", "duration", self.decode, clock="host"))
        if self.seconds:
            found.append(Measurement("pipeline", "1/s", "rate", self.images / self.seconds, clock="host"))
        return found

    def facts(self) -> dict[str, Any]:
        """How many images the rate is of, in how many seconds, and how many warmed it up."""
        return {"images": self.images, "seconds": self.seconds, "warm_up": self.warm_up} if self.seconds else {}


def outputs(session: Session, trial: Trial) -> dict[str, np.ndarray]:
    """See `evaluate`: its arrays alone, without warm-up."""
    return evaluate(session, trial, timed=False).arrays


def evaluate(session: Session, trial: Trial, timed: bool = True) -> Evaluation:
    """Every image of the data through the session, at the trial's own batch, in a pipeline.

    Arrays are `output:NAME` raw, `sample`, `label`, and `topk_index` and `topk_score` of a classifier or the detections
    of a detector. The last batch is filled by wrapping around and cut again. Real images are timed: a tenth
    of them warms the pipeline up (R4), and a few batches tell the stages apart afterwards; neither counts.
    """
    batch, threads = _batch(session, trial), max(1, trial.runtime.threads)
    # A CPU's processors are busy with the engine; beside a GPU they have nothing else to do.
    helpers = threads if session.stream is not None else max(1, threads // 4)
    real = Photos(session, trial, helpers) if trial.data.folder else None
    count = min(trial.data.count, len(real.images)) if real else trial.data.count
    turns = math.ceil(count / batch)
    pipeline = Pipeline(session, real or Numbers(session, trial, turns), helpers if real else 1)
    answers = tasks.find(trial.model.task).collector(_fed(trial, real, batch, count))
    warm = min(turns, math.ceil(min(MOST_WARM_UP, WARM_UP * count) / batch)) if real and timed else 0
    kept = _Kept(answers)
    flowed = pipeline.run(turns, kept.add, answers.of, warm)
    seconds, stages = 0.0, {}
    if real and timed:
        seconds = flowed.seconds
        stages = {name: s / batch for name, s in pipeline.stages(answers.of, STAGES_S).items()}
    about = input_data.metadata(trial.data)
    arrays = {**kept.arrays(), **answers.arrays(flowed.made), **_identity(real, count, about)}
    decode = float(about.get("decode_s") or 0)
    oddities = (*about.get("warnings", ()), *_left_out(about.get("unreadable", ())))
    return Evaluation(arrays, count, min(warm * batch, count), seconds, decode, stages, oddities)


def _identity(real: Photos | None, count: int, about: dict[str, Any]) -> dict[str, np.ndarray]:
    """Which image each answer is of, its label, and what the classes are called."""
    if real is None:
        return {"sample": np.arange(count, dtype=np.int64)}
    sample = real.images.index[:count]
    names = {"classes": np.array(about["classes"], np.str_)} if about.get("classes") else {}
    return {"sample": sample, "label": real.images.labels[sample], **names}


def _left_out(unreadable: Sequence[str]) -> list[str]:
    shown = ", ".join(unreadable[:3]) + (", …" if len(unreadable) > 3 else "")
    return [f"{len(unreadable)} images can't be read and were left out: {shown}"] if unreadable else []


def _batch(session: Session, trial: Trial) -> int:
    first = next((shape for shape in static_shapes(session.inputs, trial.dims).values() if shape), (1,))
    return trial.dims.batch if trial.model.inputs and trial.dims.batch else first[0]


def _fed(trial: Trial, real: Photos | None, batch: int, count: int) -> Evaluated:
    if real is None:
        return Evaluated(trial, batch, count)
    height, width = channels_first(real.shape)[2:]
    return Evaluated(trial, batch, count, real.images.index[:count], (height, width))


class _Kept:
    """Raw outputs in order, as many as there is room for."""

    def __init__(self, answers: Collector) -> None:
        self._answers = answers
        self._raw: dict[str, list[np.ndarray]] = {}
        self._bytes = 0

    def add(self, turn: int, fetched: Outputs) -> None:
        if self._bytes >= RAW_BYTES:
            return
        cut = self._answers.cut(turn, fetched)
        size = sum(a.nbytes for a in cut.values())
        if self._bytes + size > RAW_BYTES:
            self._bytes = RAW_BYTES  # a later, smaller batch must not leave a hole
            return
        self._bytes += size
        for name, a in cut.items():
            self._raw.setdefault(name, []).append(np.atleast_1d(np.array(a)))

    def arrays(self) -> dict[str, np.ndarray]:
        return {f"output:{name}": np.concatenate(parts) for name, parts in self._raw.items()}
