"""CPU contention: other programs' load while a study was measured, and whether a ranking can still be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dyno.analysis.records.results import TrialResult


@dataclass(frozen=True)
class Contention:
    """The number of timed jobs, of disturbed ones, of those that did not measure in turns, the most processors that
    other programs kept busy, and whether any configurations are compared: a lone one has no rank to lose."""

    jobs: int
    disturbed: int
    alone: int
    processors: float
    compared: bool = True

    @property
    def mostly(self) -> bool:
        """Whether most jobs were disturbed one at a time: the others are too few to rank engines by.

        In turns what disturbs one job disturbs those that it is compared with, so their ratios stand.
        """
        return self.compared and self.alone > self.jobs / 2

    @property
    def sentence(self) -> str:
        """The effect on the measured times, as a sentence."""
        during = f"during {self.disturbed} of {self.jobs} jobs"
        busy = f"other programs kept up to {self.processors:.1f} processors busy {during}"
        if self.mostly:
            return f"No winner is named: {busy}, and on a quiet machine the order may be another."
        if not self.compared:
            doubt = "those latencies are inflated; measure again on a quiet machine"
        elif not self.alone:
            doubt = "absolute latencies are inflated; rankings were measured interleaved and hold under this load"
        else:
            doubt = "those latencies are inflated and their order may be wrong; measure again on a quiet machine"
        return f"{busy.capitalize()}: {doubt}."


def cpu_contention(results: Iterable[TrialResult], compared: bool = True) -> Contention | None:
    """Return the contention that the records show; None where no job was disturbed.

    The trials are `compared` with each other, or are of one configuration alone.
    """
    timed = [r for t in results for r in t.good]
    busy = [(max(r.facts.others_busy.values(), default=0.0), r.facts.contention_threshold, r.turns) for r in timed]
    over = [(processors, turns) for processors, most, turns in busy if most is not None and processors > most]
    if not over:
        return None
    return Contention(len(timed), len(over), sum(not turns for _, turns in over), max(over)[0], compared)
