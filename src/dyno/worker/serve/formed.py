"""Known inputs as requests: in batches of several sizes, some of them filled up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dyno.worker.backend import Arrays, Session
from dyno.worker.inputs.shapes import static_shapes
from dyno.worker.serve.instances import Rung
from dyno.worker.spec import Dims


class BatchFormingSession(Session):
    """The sessions of one instance as a single one, which takes the largest batch and answers it as several batches of
    requests: of each size once with one request too few and once full, as far as there are inputs.

    A batch is answered whole where its requests can't be told apart: the first axis of an input or output isn't theirs.
    """

    def __init__(self, ladder: Sequence[Rung], dims: Dims) -> None:
        self._ladder, self._most = ladder, ladder[-1].size
        whole = ladder[-1].session
        self.inputs, self.outputs, self.stream = whole.inputs, whole.outputs, whole.stream
        self._shapes = {r.size: static_shapes(r.session.inputs, replace(dims, batch=r.size)) for r in ladder}
        full = sorted(self._shapes, reverse=True)
        below = [*full[1:], 0]  # one request too few of 2 is a batch of 1, where there is one
        first = [size - 1 if size - 1 > less else size for size, less in zip(full, below, strict=True)]
        self._counts = list(dict.fromkeys([*first, *full]))

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        self._fed = feeds

    def run(self, slot: int = 0) -> None:
        parts = []
        for begin, count in self._iter_batches():
            part = self._answer_requests(begin, count)
            if part is None:
                parts = [_run_once(self._ladder[-1].session, self._fed)]
                break
            parts.append(part)
        self._answered = {name: np.concatenate([p[name] for p in parts]) if len(parts) > 1 else a
                          for name, a in parts[0].items()}  # fmt: skip

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return self._answered

    def _iter_batches(self) -> Iterator[tuple[int, int]]:
        """Yield each batch's first request and its size; sizes that occurred before only fill the rest."""
        begin = 0
        while left := self._most - begin:
            count = next((c for c in self._counts if c <= left), left)
            if count in self._counts:
                self._counts.remove(count)
            yield begin, count
            begin += count

    def _answer_requests(self, begin: int, count: int) -> dict[str, np.ndarray] | None:
        """Return the answers to `count` requests; None if they can't be told apart.

        They run as the smallest batch that holds them, filled with the requests that follow.
        """
        rung = next(rung for rung in self._ladder if rung.size >= count)
        rows, feeds = np.arange(begin, begin + rung.size) % self._most, {}
        for name, array in self._fed.items():
            wanted = self._shapes[rung.size].get(name, array.shape)
            if array.shape[:1] == (self._most,) and wanted == (rung.size, *array.shape[1:]):
                feeds[name] = array[rows]
            elif array.shape == wanted:
                feeds[name] = array
            else:
                return None
        answered = _run_once(rung.session, feeds)
        if any(a.shape[:1] != (rung.size,) for a in answered.values()):
            return None
        return {name: a[:count] for name, a in answered.items()}


def _run_once(session: Session, feeds: Arrays) -> dict[str, np.ndarray]:
    session.bind(feeds)
    session.run()
    session.wait()
    return {name: np.array(array) for name, array in session.fetch().items()}
