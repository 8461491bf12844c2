"""How many times faster one trial is than another: paired where they measured in turns, else between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dyno.analysis import stats
from dyno.analysis.records.blocks import log_ratios
from dyno.analysis.records.results import TrialResult
from dyno.worker.spec import LOOKS, ROUNDS

LEAST_ROUNDS = 2  # that both took turns in; fewer have no spread


def rule(settings: Mapping[str, Any], equivalent: float | None = None) -> stats.Rule:
    """Return the rule that decides the pairs of a study, from its settings; `equivalent` (percent) overrides theirs."""
    percent = settings.get("equivalent") if equivalent is None else equivalent
    margin = stats.Rule.margin if percent is None else float(percent) / 100
    return stats.Rule(margin, int(settings.get("rounds", ROUNDS)) if settings.get("until") in LOOKS else 0)


def evidence(
    own: TrialResult, reference: TrialResult, boundary: str, clock: str = "", rule: stats.Rule | None = None
) -> stats.Evidence | None:
    """Collect the evidence from the rounds of both trials at the boundary, by that clock.

    Where both measured in turns in two rounds or more it is `stats.paired`, else `stats.unpaired`; where rounds go
    through builds of either engine, a build is one observation, the mean of its rounds. Where rounds went on until
    decided, only the rounds that both have count: further rounds of others must not change a decision.
    """
    paired = log_ratios(reference, own, boundary, clock)
    unfiltered = log_ratios(reference, own, boundary, clock, keep_disturbed=True)
    both = own.round_medians(boundary, clock).keys() & reference.round_medians(boundary, clock).keys()
    only = both if rule is not None and rule.first else None
    medians = [t.medians(boundary, clock, only) for t in (own, reference)]
    if len(paired) >= LEAST_ROUNDS or (paired and min(map(len, medians)) < LEAST_ROUNDS):
        found = stats.paired(paired, are_rounds=max(builds(own), builds(reference)) < 2)
        if found is not None:
            left_out = len(unfiltered) - len(paired)
            found = replace(found, disturbed=left_out, unfiltered=float(np.mean(unfiltered)))
    else:
        found = stats.unpaired(*medians)
    return found and of_rounds(found, own, reference, len(both))


def of_rounds(compared: stats.Evidence, own: TrialResult, reference: TrialResult, rounds: int) -> stats.Evidence:
    """Add the number of rounds, and of the builds behind them, to the evidence on two trials."""
    # It was looked at after every round: those, too, that gave it no ratio, or another of a build.
    over = max(builds(own), builds(reference))
    return replace(compared, seen=rounds, builds=over if over > 1 else 0)


def builds(t: TrialResult) -> int:
    """Return the number of builds of its engine that were measured, 0 where every build would be the same file."""
    return len({r.build for r in t.good} - {0}) or t.builds


def speedup(
    own: TrialResult, reference: TrialResult, boundary: str, clock: str = "", rule: stats.Rule | None = None
) -> stats.Speedup:
    """Compute reference latency over the own one at the boundary, by that clock, with its interval and verdict.

    For a pair that is compared by itself, not as one of a family.
    """
    return stats.decide(evidence(own, reference, boundary, clock, rule), rule)
