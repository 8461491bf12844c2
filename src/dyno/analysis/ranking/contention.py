"""CPU contention: other programs' load while a study was measured, and whether a ranking can still be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dyno.analysis.records.results import TrialResult


@dataclass(frozen=True)
class Contention:
    """The number of timed jobs, of disturbed ones, and the most processors that other programs kept busy."""

    jobs: int
    disturbed: int
    processors: float

    @property
    def mostly(self) -> bool:
        """Whether most jobs were disturbed: the others are too few to rank engines by."""
        return self.disturbed > self.jobs / 2

    @property
    def sentence(self) -> str:
        """The effect on the measured times, as a sentence."""
        during = f"during {self.disturbed} of {self.jobs} jobs"
        busy = f"other programs kept up to {self.processors:.1f} processors busy {during}"
        if self.mostly:
            return f"No winner is named: {busy}, and on a quiet machine the order may be another."
        doubt = "those latencies are too long and their order may be wrong; measure again on a quiet machine"
        return f"{busy.capitalize()}: {doubt}."


def cpu_contention(results: Iterable[TrialResult]) -> Contention | None:
    """The contention that the records show; None where no job was disturbed."""
    timed = [r.facts for t in results for r in t.good]
    busy = [(max(facts.others_busy.values(), default=0.0), facts.others_bearable) for facts in timed]
    over = [processors for processors, threshold in busy if threshold is not None and processors > threshold]
    return Contention(len(timed), len(over), max(over)) if over else None
