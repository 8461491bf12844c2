"""Requests to an engine that stops answering: what was measured before is kept."""

from __future__ import annotations

from typing import Any

import pytest

from dyno.worker.facts.serve import ServeFacts, ServeStep
from dyno.worker.jobs.serve import _Work
from dyno.worker.serve.arrivals import Arrivals
from dyno.worker.serve.options import ServeOptions
from dyno.worker.spec import Unanswered


class Silent(_Work):
    """Answers at the first `answered` rates, and then at none."""

    def __init__(self, answered: int) -> None:
        self._options, self._facts, self._seed = ServeOptions(rate=(10, 20, 30)), ServeFacts(), 0
        self._answered = answered
        self.warnings: list[str] = []
        self._journal: Any = self

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def _try(self, arrivals: Arrivals, asked: float = 0.0) -> ServeStep:
        if len(self._facts.steps) == self._answered:
            raise Unanswered("connection refused")
        self._facts = ServeFacts(steps=(*self._facts.steps, step := ServeStep(asked)))
        return step


def test_rates_before_a_server_s_end_are_kept() -> None:
    work = Silent(answered=1)
    work.rates("")
    assert [step.rate for step in work._facts.steps] == [10]
    assert work.warnings == ["no request got an answer at 20 requests/s, where it ended: connection refused"]


def test_a_server_that_answers_nothing_fails() -> None:
    with pytest.raises(Unanswered, match="connection refused"):
        Silent(answered=0).rates("")
