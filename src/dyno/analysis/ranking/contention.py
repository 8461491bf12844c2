"""CPU contention: other programs' load while a study was measured, and whether a ranking can still be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from dyno.analysis.records.results import Results

OLD_THRESHOLD = 0.2  # records without `others_bearable` had one threshold for all


@dataclass(frozen=True)
class Contention:
    """Timed jobs, how many of them other programs disturbed, and the most processors that those kept busy."""

    jobs: int
    disturbed: int
    processors: float

    @property
    def mostly(self) -> bool:
        """Whether most jobs were disturbed: the others are too few to rank engines by."""
        return self.disturbed > self.jobs / 2

    @property
    def sentence(self) -> str:
        """What it means for the numbers."""
        during = f"during {self.disturbed} of {self.jobs} jobs"
        busy = f"Other programs kept up to {self.processors:.1f} processors busy {during}"
        if self.mostly:
            return f"{busy}: those latencies are too long and no winner is named; measure again on a quiet machine."
        return f"{busy}: those latencies are too long and their order may be wrong; measure again on a quiet machine."


def cpu_contention(results: Results) -> Contention | None:
    """The contention that the records show; None where no job was disturbed."""
    timed = [r.facts for t in results for r in t.good]
    busy = [
        (max((facts.get("others_busy") or {"": 0.0}).values()), facts.get("others_bearable", OLD_THRESHOLD))
        for facts in timed
    ]
    over = [processors for processors, threshold in busy if processors > threshold]
    return Contention(len(timed), len(over), max(over)) if over else None
