"""Every image of the data once through the session: the outputs that accuracy and agreement are computed from."""

from __future__ import annotations

import math

import numpy as np

from dyno.worker import inputs
from dyno.worker.backend import Session
from dyno.worker.shapes import static_shapes
from dyno.worker.spec import Trial

RAW_BYTES = 64 * 2**20  # raw outputs kept per trial; classes and scores are kept for every image
TOP = 10


def outputs(session: Session, trial: Trial) -> dict[str, np.ndarray]:
    """Arrays for outputs.npz: `output:NAME` raw, `topk_index`, `topk_score`, `label`, `sample`.

    Works batch by batch at the trial's own batch; the last one is filled by wrapping around and cut again.
    """
    real = inputs.Images(trial.data, trial.model.preprocess) if trial.data.folder else None
    count = min(trial.data.count, len(real)) if real is not None else trial.data.count
    batch = _batch(session, trial)
    kept = _Kept()
    feeds = inputs.batches(trial.data, trial.model.preprocess, session.inputs, trial.dims, math.ceil(count / batch))
    for i, feed in enumerate(feeds):
        session.bind(feed)
        session.run()
        session.wait()
        kept.add(session.fetch(), batch, min(batch, count - i * batch))
    arrays = kept.arrays()
    arrays["sample"] = real.index[:count] if real is not None else np.arange(count, dtype=np.int64)
    if real is not None:
        arrays["label"] = real.labels[arrays["sample"]]
    return arrays


def _batch(session: Session, trial: Trial) -> int:
    first = next(iter(static_shapes(session.inputs, trial.dims).values()))
    return first[0] if first else 1


class _Kept:
    def __init__(self) -> None:
        self.raw: dict[str, list[np.ndarray]] = {}
        self.index: list[np.ndarray] = []
        self.score: list[np.ndarray] = []
        self.bytes = 0

    def add(self, fetched: dict[str, np.ndarray], batch: int, valid: int) -> None:
        cut = {name: a[:valid] if a.ndim and a.shape[0] == batch else a for name, a in fetched.items()}
        first = next(iter(cut.values()))
        if first.ndim == 2 and first.shape[1] > 1:
            self._rank(first.astype(np.float32))
        size = sum(a.nbytes for a in cut.values())
        if self.bytes + size <= RAW_BYTES:
            self.bytes += size
            for name, a in cut.items():
                self.raw.setdefault(name, []).append(np.atleast_1d(np.array(a)))
        else:
            self.bytes = RAW_BYTES  # a later, smaller batch must not leave a hole

    def _rank(self, scores: np.ndarray) -> None:
        k = min(TOP, scores.shape[1])
        # A stable order, so that tied scores rank the same in every backend.
        index = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        self.index.append(index.astype(np.int32))
        self.score.append(np.take_along_axis(scores, index, axis=1))

    def arrays(self) -> dict[str, np.ndarray]:
        found = {f"output:{name}": np.concatenate(parts) for name, parts in self.raw.items()}
        if self.index:
            found["topk_index"] = np.concatenate(self.index)
            found["topk_score"] = np.concatenate(self.score)
        return found
