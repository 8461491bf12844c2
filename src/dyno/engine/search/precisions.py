"""Where int8 or fp16 alone fails the budget: the fewest sensitive layers that must stay in a higher precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dyno.planning.interpreters import placed
from dyno.study import Study
from dyno.worker import registry
from dyno.worker.spec import Trial, UserError, digest

KEEP = "keep"
MOST = 10  # candidates for one configuration

Measure = Callable[[list[Trial], list[Trial]], None]  # all rounds of the first, compared with the second


def search(study: Study, folder: Path, trials: list[Trial], measure: Measure) -> list[Trial]:
    """Try mixed precisions for every trial that the budget rules out; returns the trials that were added.

    Each candidate is a trial of the same run with the option `keep`. The search depends on the stored answers alone, so
    an interrupted one takes the same steps when it is resumed.
    """
    from dyno.analysis.tables import trial_table
    from dyno.analysis.verdict.whole_run import mixed_precision

    if not (folder / "trials").is_dir():
        return []
    failing = mixed_precision.failing(trial_table.read(folder))
    added: list[Trial] = []
    for trial in trials:
        if trial.id in failing and with_kept_layers(study, trial, 1) is not None:
            batches = [other for other in trials if _hash_series(other) == _hash_series(trial)]
            added += _PrecisionSearch(study, folder, trial, batches, trials, measure).run()
    return added


def with_kept_layers(study: Study, trial: Trial, layers: int) -> Trial | None:
    """Return the trial with `layers` layers kept in higher precision; None if its backend or file has none."""
    engine = registry.find(trial.backend)
    if KEEP not in engine.options:
        return None
    candidate = replace(trial, options={**trial.options, KEEP: layers}, recipe=None)
    try:
        recipe = engine.recipe(candidate)
    except UserError:
        return None
    same = recipe == engine.recipe(replace(trial, recipe=None))
    return None if same else replace(candidate, recipe=placed(recipe, study))


def _hash_series(trial: Trial) -> str:
    return digest(replace(trial, dims=replace(trial.dims, batch=0), recipe=None))


@dataclass
class _PrecisionSearch:
    study: Study
    folder: Path
    plain: Trial
    batches: list[Trial]
    others: list[Trial]
    measure: Measure

    def run(self) -> list[Trial]:
        """Return the measured candidates: those within the budget in all rounds, the best one at all batches."""
        self.tried: dict[int, bool] = {}
        fewest = self._find_fewest()
        good = [self._make_candidate(self.plain, layers) for layers, holds in self.tried.items() if holds]
        if fewest is not None:
            good += [self._make_candidate(other, fewest) for other in self.batches if other.id != self.plain.id]
            self.measure(good, self.others)
        failed = [self._make_candidate(self.plain, layers) for layers, holds in self.tried.items() if not holds]
        return [*good, *(replace(t, plan=replace(t.plan, rounds=1)) for t in failed)]

    def _find_fewest(self) -> int | None:
        """Double the layers until the budget holds, then bisect; return None if half of the layers are not enough."""
        if self._is_within_budget(1):
            return 1
        most = self._count_layers() // 2
        low, high = 1, min(2, most)
        while high > low and not self._is_within_budget(high):
            low, high = high, min(2 * high, most)
            if len(self.tried) >= MOST:
                return None
        if high <= low:
            return None
        while high - low > 1 and len(self.tried) < MOST:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_within_budget(middle) else (middle, high)
        return high

    def _is_within_budget(self, layers: int) -> bool:
        """Return whether the candidate is within the budget with confidence; one round answers all images."""
        from dyno.analysis.metrics.accuracy import WITHIN
        from dyno.analysis.tables import trial_table

        candidate = self._make_candidate(self.plain, layers)
        self.measure([replace(candidate, plan=replace(candidate.plan, rounds=1))], [])
        frame = trial_table.read(self.folder).frame
        row = frame[frame["trial"] == candidate.id]
        self.tried[layers] = bool(((row["budget"] == WITHIN) & (row["status"] == "ok")).any())
        return self.tried[layers]

    def _count_layers(self) -> int:
        """Return how many layers can be kept in higher precision; 0 if the first candidate could not be made."""
        from dyno.analysis.records import results

        trial = next((t for t in results.load(self.folder) if t.id == self._make_candidate(self.plain, 1).id), None)
        return (trial.made_by.ranked or 0) if trial is not None else 0

    def _make_candidate(self, trial: Trial, layers: int) -> Trial:
        candidate = with_kept_layers(self.study, trial, layers)
        assert candidate is not None
        return candidate
