"""The confirmation of winners by rounds after the selection, which are never mixed with the rounds that selected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dyno.analysis import stats
from dyno.analysis.formatting import UNCLEAR, ratio
from dyno.analysis.metrics import speedups
from dyno.analysis.metrics.speedups import LEAST_ROUNDS
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.ranking.rankings import Ranking
from dyno.analysis.records.blocks import log_ratios
from dyno.analysis.records.results import TrialResult, by_build
from dyno.analysis.records.rounds import Round
from dyno.analysis.records.run_data import RunData
from dyno.analysis.verdict.findings import NOTE, WARNING, Finding, spread

if TYPE_CHECKING:
    import pandas as pd

NO_GAIN = stats.SLOWER, stats.EQUIVALENT, stats.UNDECIDED


def findings(ranking: Ranking, speed: str, run: RunData) -> Iterator[Finding]:
    """Yield the confirmation of the winner by LATENCY or THROUGHPUT, and whether it agrees with the selection."""
    ranked, trials = ranking.ranked(speed), run.trials
    if ranked.empty:
        return
    row = ranked.iloc[0]
    winner, reference = trials[row["trial"]], ranking.reference(row)
    if not winner.confirmations:
        return
    if failed := next((r for r in winner.confirmations if not r.ok), None):
        why = failed.record.reason or failed.status
        yield Finding(WARNING, f"{ranking.configuration(row)} failed when it was measured again: {why}.")
    own = _list_costs(winner.confirmations, row, speed)
    if not own:
        return
    processes = _format_processes(sum(r.ok for r in winner.confirmations))
    text = f"Measured again after the selection, in {processes}: {_format_spread(own, row, speed)}"
    gain = _compute_gain(winner, reference, row, speed) if reference is not None and reference is not winner else None
    if gain is not None and reference is not None:
        shown, name = ratio(gain.value, gain.low, gain.high), _reference_name(ranking, reference)
        text += f"; the ratio to {name} is {UNCLEAR}" if shown == UNCLEAR else f", {shown} {_choose_unit(speed)} {name}"
    yield Finding(NOTE, text + ".")
    yield from _find_disagreements(ranking, speed, trials, own, gain)


def ahead(ranking: Ranking, speed: str, run: RunData) -> stats.Speedup | None:
    """Return the winner's speed over the runner-up's in the rounds that selected it; None where either has none."""
    first, second = (row for _, row in ranking.ranked(speed).iloc[:2].iterrows())
    own, other = (run.trials[row["trial"]] for row in (first, second))
    faster = _compare_speed(own, other, first, second, speed, run.rule)
    return None if math.isnan(faster.value) else faster


def _find_disagreements(
    ranking: Ranking, speed: str, trials: Mapping[str, TrialResult], own: list[float], gain: stats.Speedup | None
) -> Iterator[Finding]:
    ranked = ranking.ranked(speed)
    row = ranked.iloc[0]
    now = stats.speedup(own, _list_costs(trials[row["trial"]].good, row, speed))
    name = ranking.configuration(row)  # a warning stands alone where notes are folded away
    if now.verdict == stats.SLOWER:
        text = f"Measured again, {name} is slower than in the rounds that selected it"
        by = ratio(now.value, now.low, now.high)
        yield Finding(WARNING, f"{text} ({by}): chance favoured them, or the machine has changed since.")
    if gain is not None and gain.verdict in NO_GAIN and _was_faster(row, speed, ranking):
        yield Finding(WARNING, f"Measured again, {name} is not shown to be faster than the reference.")
    if len(ranked) < 2:
        return
    first, second = (_keep_confirmations(trials[ranked.iloc[k]["trial"]]) for k in (0, 1))
    ahead = _compare_speed(first, second, row, ranked.iloc[1], speed)
    if ahead.value < 1:
        sure = "and the difference is real" if ahead.verdict == stats.SLOWER else "if not beyond noise"
        other = ranking.configuration(ranked.iloc[1])
        text = f"Measured again, the runner-up {other} is ahead, {sure}"
        yield Finding(WARNING, f"{text}: {ratio(ahead.value, ahead.low, ahead.high)}.")


def _was_faster(row: pd.Series, speed: str, ranking: Ranking) -> bool:
    return speed == LATENCY and not ranking.sizes and row["verdict"] == stats.FASTER


def _list_costs(rounds: Sequence[Round], row: pd.Series, speed: str) -> list[float]:
    """Return the seconds of each successful round (or build): per batch, or per image where images/s are compared."""
    good = [r for r in rounds if r.ok]
    if speed == LATENCY:
        return by_build((r, m) for r in good if (m := r.median(row["boundary"], row["clock"])) is not None)
    rates = [(r, v) for r in good if (v := r.value("throughput", "throughput"))]
    if rates:
        return by_build((r, 1 / rate) for r, rate in rates)
    seconds = [(r, m) for r in good if (m := r.median(row["boundary"], row["clock"])) is not None]
    return by_build((r, m / float(row["batch"])) for r, m in seconds)


def _keep_confirmations(trial: TrialResult) -> TrialResult:
    return replace(trial, rounds=trial.confirmations, companions=[])


def _compare_speed(
    own: TrialResult,
    other: TrialResult,
    row: pd.Series,
    of_other: pd.Series,
    speed: str,
    rule: stats.Rule | None = None,
) -> stats.Speedup:
    """Return how many times faster the trial of `row` is than the other, paired where both took turns twice or more."""
    boundary, clock = str(row["boundary"]), str(row["clock"])
    if speed == LATENCY:
        logs = log_ratios(other, own, boundary, clock)
    else:
        logs = log_ratios(own, other, "throughput")
    if len(logs) >= LEAST_ROUNDS:
        found = stats.paired(logs, are_rounds=max(speedups.builds(own), speedups.builds(other)) < 2)
    else:
        found = stats.unpaired(
            _list_costs(own.rounds, row, speed), _list_costs(other.rounds, _replace_batch(row, of_other), speed)
        )
    rounds = min(len(own.good), len(other.good))
    return stats.decide(found and speedups.of_rounds(found, own, other, rounds), rule)


def _replace_batch(row: pd.Series, other: pd.Series) -> pd.Series:
    """Return the winner's boundary and clock with the other's batch."""
    return row.copy() if row["batch"] == other["batch"] else row.where(row.index != "batch", other["batch"])


def _compute_gain(winner: TrialResult, reference: TrialResult, row: pd.Series, speed: str) -> stats.Speedup | None:
    of_reference = row.where(row.index != "batch", reference.batch)
    gain = _compare_speed(_keep_confirmations(winner), _keep_confirmations(reference), row, of_reference, speed)
    return None if math.isnan(gain.value) else gain


def _format_spread(own: list[float], row: pd.Series, speed: str) -> str:
    latency = speed == LATENCY
    interval = stats.center(own if latency else [1 / cost for cost in own])
    return spread(interval, latency) + (f" at batch {row['batch']}" if latency else "")


def _format_processes(count: int) -> str:
    return "one fresh process" if count == 1 else f"{count} fresh processes"


def _choose_unit(speed: str) -> str:
    return "as fast as" if speed == LATENCY else "the images per second of"


def _reference_name(ranking: Ranking, reference: TrialResult) -> str:
    return reference.configuration + (f" at size {reference.size}" if ranking.sizes else "")
