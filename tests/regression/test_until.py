"""Studies that go on until they are decided."""

from __future__ import annotations

import numpy as np
import pytest

from dyno.regression.until import StudyOutcome, studies
from dyno.results import stats


def test_each_round_is_in_one_study_and_looks_begin_with_the_first() -> None:
    sure = [-0.05, -0.051, -0.049] * 2
    assert studies(sure, 3, 10) == [StudyOutcome(stats.SLOWER, 3), StudyOutcome(stats.SLOWER, 3)]
    assert studies([*sure, -0.05], 3, 10) == [StudyOutcome(stats.SLOWER, 3)] * 2, "a round that is left is no study"
    assert studies([0.001, -0.001, 0.0], 3, 10) == [StudyOutcome(stats.EQUIVALENT, 3)]
    wild = [0.5, -0.5, 0.4, -0.4] * 3
    assert studies(wild, 3, 6) == [StudyOutcome(stats.UNDECIDED, 6)] * 2
    assert studies(wild, 3, 13) == []


@pytest.mark.slow
def test_looking_again_keeps_its_promise_in_simulation() -> None:
    draw = np.random.default_rng(0)
    equal = studies(draw.normal(0.0, 0.02, 20_000), 3, 60)
    wrong = [one for one in equal if one.verdict in (stats.FASTER, stats.SLOWER)]
    assert len(equal) > 300 and len(wrong) / len(equal) < 0.05
    slowed = studies(draw.normal(-np.log(1.02), 0.01, 20_000), 3, 60)
    assert np.mean([one.verdict == stats.SLOWER for one in slowed]) > 0.95
    assert np.median([one.rounds for one in slowed]) < 15
