"""The requests of a run: the rates that were tried with each trial, and the highest that holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from dyno.analysis import stats
from dyno.analysis.records.arrays import read_npz
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.rounds import Round
from dyno.analysis.records.run_data import RunData
from dyno.analysis.serve import outputs
from dyno.analysis.serve.figures import QUANTILES, RateMeasurement
from dyno.analysis.serve.outputs import Outputs
from dyno.analysis.stats import Interval, Speedup
from dyno.worker.facts.job import ServeFacts
from dyno.worker.serve import rates

ARRAYS = "serve.npz"
REFERENCE = "pytorch"  # the others are compared with it where it is among them


@dataclass(frozen=True)
class ServingRun:
    """A trial with the rates that were tried in each round."""

    trial: TrialResult
    facts: tuple[ServeFacts, ...]
    tried: tuple[RateMeasurement, ...]
    outputs: Outputs = field(default_factory=Outputs)

    @property
    def bounded(self) -> str:
        """The percentile that has the bound."""
        return next(name for name, q in QUANTILES.items() if q == self.facts[0].percentile)

    @cached_property
    def by_round(self) -> list[float]:
        """The highest rate of each round that holds, 0 where none does."""
        return [max((t.step.rate for t in self._list_holding(k)), default=0.0) if f.highest is None else f.highest
                for k, f in enumerate(self.facts)]  # fmt: skip

    def _list_holding(self, number: int) -> list[RateMeasurement]:
        return [t for t in self.tried if t.round == number and t.step.verdict == rates.HOLDS]

    @cached_property
    def highest(self) -> Interval | None:
        """The highest rate that holds: the geometric mean of the rounds with its 95 % interval; None where there is no
        bound, or none in a round."""
        if not self.facts[0].bound_s or not all(self.by_round):
            return None
        return stats.center(self.by_round)

    @cached_property
    def there(self) -> RateMeasurement | None:
        """The rate in a round that is the highest, of the round in the middle; of several at one rate the last."""
        if self.highest is None:
            return None
        middle = sorted(self.by_round)[(len(self.by_round) - 1) // 2]
        holding = [t for k, rate in enumerate(self.by_round) if rate == middle for t in self._list_holding(k)]
        return next((t for t in reversed(holding) if t.step.rate == middle), None)

    @property
    def capacity(self) -> Interval:
        """Requests per second with full batches: the geometric mean of the rounds with its 95 % interval."""
        return stats.center([f.capacity for f in self.facts])

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the rounds warn of, each sentence once."""
        return tuple(dict.fromkeys(warning for r in self.trial.good for warning in r.warnings))


def of_run(run: RunData) -> list[ServingRun]:
    """Return each trial that answered requests, in the order of the trials."""
    found = []
    for trial in run.records:
        rounds = [(r, r.facts.serve) for r in trial.good if r.facts.serve and (r.folder / ARRAYS).is_file()]
        tried = tuple(t for k, (r, facts) in enumerate(rounds) for t in _list_tried(r, facts, k))
        if tried:
            found.append(ServingRun(trial, tuple(facts for _, facts in rounds), tried))
    compared = outputs.of_run(run) if found else {}
    return [replace(each, outputs=compared[each.trial.id]) for each in found]


def _list_tried(one: Round, facts: ServeFacts, number: int) -> list[RateMeasurement]:
    arrays = read_npz(one.folder / ARRAYS)
    names = ("arrival", "began", "ended", "size", "refused")
    return [
        RateMeasurement(step, facts, {name: arrays[f"{name}_{k}"] for name in names}, number)
        for k, step in enumerate(facts.steps)
    ]


def reference(served: list[ServingRun]) -> ServingRun:
    """Return the reference of the others: PyTorch, else the first; one with wrong outputs only where all have them."""
    right = [each for each in served if not each.outputs.wrong] or served
    return next((each for each in right if each.trial.backend == REFERENCE), right[0])


def speedups(served: list[ServingRun], run: RunData) -> list[Speedup | None]:
    """Return the ratio of each one's highest rate to the reference's, with a verdict.

    None where either has no such rate or wrong outputs, and for the reference itself.
    """
    first = reference(served)
    right = [each for each in served if not (each.outputs.wrong or first.outputs.wrong)]
    others = [each for each in right if each is not first and each.highest and first.highest]
    pairs = [stats.unpaired([1 / r for r in each.by_round], [1 / r for r in first.by_round]) for each in others]
    decided = dict(zip(map(id, others), stats.decide_family(pairs, run.rule), strict=True))
    return [decided.get(id(each)) for each in served]
