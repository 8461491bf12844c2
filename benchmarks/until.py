"""Studies that go on until they are decided, drawn from the rounds of a self-test in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyno.results import stats


@dataclass(frozen=True)
class StudyOutcome:
    """The outcome of a study, and its number of rounds."""

    verdict: str
    rounds: int


def studies(logs: Sequence[float], first: int, most: int, rule: stats.Rule | None = None) -> list[StudyOutcome]:
    """Run one study after the other, without shared rounds, as `dyno run --until decided` judges a single pair.

    `logs` holds log(first / second seconds) of each round; a study looks after `first` rounds and after every further
    one, and ends undecided after `most`. Rounds left over at the end, of a study still undecided, are not a study.
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
