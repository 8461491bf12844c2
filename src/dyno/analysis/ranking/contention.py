"""What other programs did while a study was measured, and when that was so much that no order can be believed."""

from __future__ import annotations

from dataclasses import dataclass

from dyno.analysis.records.results import Results

OLD_BEARABLE = 0.2  # records older than `others_bearable` had one limit for all


@dataclass(frozen=True)
class Crowding:
    """How many timed jobs there were, how many of them others disturbed, and by how many processors at the most."""

    jobs: int
    disturbed: int
    processors: float

    @property
    def mostly(self) -> bool:
        """Whether most jobs were disturbed: those that were not are no sample to rank engines by."""
        return self.disturbed > self.jobs / 2

    @property
    def sentence(self) -> str:
        """What that does to the numbers."""
        during = f"during {self.disturbed} of {self.jobs} jobs"
        seen = f"Other programs kept up to {self.processors:.1f} processors busy {during}"
        if self.mostly:
            return f"{seen}: those latencies are too long and no winner is named; measure again on a quiet machine."
        return f"{seen}: those latencies are too long and their order may be wrong; measure again on a quiet machine."


def crowding(results: Results) -> Crowding | None:
    """What the records say of other programs; None where no job was disturbed."""
    timed = [r.facts for t in results for r in t.good]
    busy = [
        (max((facts.get("others_busy") or {"": 0.0}).values()), facts.get("others_bearable", OLD_BEARABLE))
        for facts in timed
    ]
    over = [processors for processors, bearable in busy if processors > bearable]
    return Crowding(len(timed), len(over), max(over)) if over else None
