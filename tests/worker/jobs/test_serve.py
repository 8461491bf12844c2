"""Requests to an engine that stops answering: what was measured before is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dyno.worker.facts.job import ServeFacts, ServeStep
from dyno.worker.jobs.serve import _ServeJob
from dyno.worker.serve.options import ServeOptions
from dyno.worker.serve.rates import Arrivals
from dyno.worker.spec import Unanswered


class Silent(_ServeJob):
    """Answers at the first `answered` rates, and then at none."""

    def __init__(self, answered: int, options: ServeOptions) -> None:
        self._options, self._facts, self._seed = options, ServeFacts(least=10, capacity=100), 0
        self._answered = answered
        self.warnings: list[str] = []
        self._journal: Any = self

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def _try_arrivals(self, arrivals: Arrivals, asked: float = 0.0) -> ServeStep:
        if len(self._facts.steps) == self._answered:
            raise Unanswered(f"no request got an answer at {asked:g} requests/s")
        self._facts = replace(self._facts, steps=(*self._facts.steps, step := ServeStep(asked, "yes")))
        return step


GIVEN, SEARCH = ServeOptions(rate=(10, 20, 30)), ServeOptions(p99="1s")


@pytest.mark.parametrize(("options", "tried", "end"), [(GIVEN, [10], 20), (SEARCH, [50, 100], 200)])
def test_rates_before_a_server_s_end_are_kept(options: ServeOptions, tried: list[float], end: float) -> None:
    work = Silent(len(tried), options)
    work.rates("")
    assert [step.rate for step in work._facts.steps] == tried and work._facts.highest is None
    (warning,) = work.warnings
    assert (
        warning == f"no request got an answer at {end} requests/s; the test ended there, and the rates before are kept"
    )


@pytest.mark.parametrize("options", [GIVEN, SEARCH])
def test_a_server_that_answers_nothing_fails(options: ServeOptions) -> None:
    with pytest.raises(Unanswered, match="no request got an answer"):
        Silent(0, options).rates("")
