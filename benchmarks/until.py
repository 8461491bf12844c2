"""Studies that continue until they are decided, drawn from a self-test's rounds in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyno.results import stats


@dataclass(frozen=True)
class StudyOutcome:
    """A study's verdict and its number of rounds."""

    verdict: str
    rounds: int


def studies(logs: Sequence[float], first: int, most: int, rule: stats.Rule | None = None) -> list[StudyOutcome]:
    """Run consecutive studies without shared rounds, judged as `dyno run --until decided` judges a single pair.

    `logs` holds log(first / second seconds) of each round. A study looks after `first` rounds and after every further
    one, and ends undecided after `most`. An undecided study cut short by the last round is not counted.
    """
    margin = (rule or stats.Rule()).margin
    ended, began = [], 0
    for now in range(1, len(logs) + 1):
        rounds = now - began
        if rounds < first:
            continue
        verdict = stats.paired_speedup(logs[began:now], stats.Rule(margin, first))
        if verdict.decided or rounds == most:
            ended.append(StudyOutcome(verdict.verdict, rounds))
            began = now
    return ended
