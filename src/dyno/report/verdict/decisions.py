"""What each ranking decides: a sentence on what wins and by how much, short answers, and the rest to fold out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isinf, isnan
from typing import TYPE_CHECKING

from dyno.formatting import UNCLEAR, bounded, in_brackets, join_names, limits, points, ratio, show, significant
from dyno.report.tables import frontier_table
from dyno.report.verdict import answers
from dyno.report.verdict.findings import BEST, FAILURE, NOTE, WARNING, Decision, Finding, equivalent, ms, spread
from dyno.results import ranking as results_ranking
from dyno.results import stats
from dyno.results.blocks import log_ratios
from dyno.results.metrics.accuracy import OVER, UNDECIDED
from dyno.results.ranking import LATENCY, LEAST_ROUNDS, THROUGHPUT, Ranking
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.stats import Speedup
from dyno.results.trial_result import UNFINISHED, TrialResult, by_build
from dyno.table import missing

if TYPE_CHECKING:
    import pandas as pd

# The confirmation of winners by rounds after the selection, which are never mixed with the rounds that selected.

NO_GAIN = stats.SLOWER, stats.EQUIVALENT, stats.UNDECIDED


def list_confirmations(ranking: Ranking, speed: str, run: RunData) -> Iterator[Finding]:
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
    count = sum(r.ok for r in winner.confirmations)
    processes = "one fresh process" if count == 1 else f"{count} fresh processes"
    text = f"Measured again after the selection, in {processes}: {_format_spread(own, row, speed)}"
    gain = _compute_gain(winner, reference, row, speed) if reference is not None and reference is not winner else None
    if gain is not None and reference is not None:
        shown, name = ratio(gain.value, gain.low, gain.high), answers.reference_name(ranking, reference)
        unit = "as fast as" if speed == LATENCY else "the images per second of"
        text += f"; the ratio to {name} is {UNCLEAR}" if shown == UNCLEAR else f", {shown} {unit} {name}"
    yield Finding(NOTE, text + ".")
    yield from _find_disagreements(ranking, speed, trials, own, gain)


def find_confirmed_lead(ranking: Ranking, speed: str, run: RunData) -> stats.Speedup | None:
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
    was_faster = speed == LATENCY and not ranking.sizes and row["verdict"] == stats.FASTER
    if gain is not None and gain.verdict in NO_GAIN and was_faster:
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
        found = stats.paired(
            logs, are_rounds=max(results_ranking.list_builds(own), results_ranking.list_builds(other)) < 2
        )
    else:
        found = stats.unpaired(
            _list_costs(own.rounds, row, speed), _list_costs(other.rounds, _replace_batch(row, of_other), speed)
        )
    rounds = min(len(own.good), len(other.good))
    return stats.decide(found and results_ranking.of_rounds(found, own, other, rounds), rule)


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


OPEN = stats.UNDECIDED, stats.ONE_ROUND, stats.SLOWER  # verdicts on a winner that leave it unproven


def decide_run(ranking: Ranking, run: RunData) -> Iterator[Decision]:
    """Yield the fastest at the smallest batch, and with several batches the most images per second."""
    yield _decide_fastest(ranking, run)
    if len(ranking.most_images):
        yield _most_images(ranking, run)


def is_apart(ranking: Ranking) -> Iterator[Finding]:
    """Yield trials that could not be compared with their reference, so that they could not be the fastest."""
    reasons: dict[str, list[str]] = {}
    for _, row in ranking.apart.iterrows():
        names = reasons.setdefault(str(row["verdict"]), [])
        if (name := ranking.configuration(row)) not in names:
            names.append(name)
    for verdict, names in reasons.items():
        yield Finding(WARNING, f"{ranking.where}: {', '.join(names)} not ranked, {verdict}.")


def list_failed(ranking: Ranking) -> Decision | None:
    """Return a decision where no trial of the ranking succeeded; None where one did."""
    if not results_ranking.list_usable(ranking.group).empty:
        return None
    waiting = int((ranking.group["status"] == UNFINISHED).sum())
    if waiting:
        text = f"no trial has succeeded yet; {waiting} of {len(ranking.group)} were not measured so far."
        return Decision(WARNING, ranking.where, text, (("next", answers.UNFINISHED),))
    return Decision(FAILURE, ranking.where, "no trial succeeded.", (("next", answers.REASONS),))


def _decide_fastest(ranking: Ranking, run: RunData) -> Decision:
    ranked = ranking.fastest
    others = (*_left_out(ranking, run), *is_apart(ranking))
    if (nothing := list_failed(ranking)) is not None:
        return Decision(nothing.kind, nothing.where, nothing.text, nothing.answers, others)
    if ranked.empty and run.budget and results_ranking.list_usable(ranking.first)[LATENCY].notna().any():
        text = f"no trial is within {run.budget} with confidence."
        return Decision(FAILURE, ranking.where, text, (("next", answers.wider_budget(ranking, run)),), others)
    if ranked.empty:
        return Decision(NOTE, ranking.where, "no latency was measured.", findings=others)
    winner = ranked.iloc[0]
    gain, ahead = answers.find_gain(ranking, run), answers.find_lead(ranking, run)
    confirmed = tuple(list_confirmations(ranking, LATENCY, run))
    doubted = any(each.kind == WARNING for each in confirmed)
    open_still = any(each is not None and each.verdict in OPEN for each in (gain, ahead)) or doubted
    rivals = [ranking.configuration(row) for _, row in results_ranking.find_rivals(ranked, run).iterrows()]
    open_still = open_still or bool(rivals) or answers.awaiting_images(ranking)
    alone = gain is None and ahead is None and not run.budget
    return Decision(
        WARNING if open_still else NOTE if alone else BEST,
        ranking.where,
        _write_headline(ranking, winner, gain, run, rivals, alone),
        (
            ("real", answers.describe_reality(ranking, gain, ahead, run, doubted, rivals)),
            ("right", answers.describe_correctness(ranking, winner, run)),
            ("next", answers.next_step(ranking, gain, ahead, run)),
        ),
        (
            *confirmed,
            *_describe_latency(ranking, winner),
            *_describe_accuracy(ranking, winner),
            *_describe_preparation(ranking, winner),
            *others,
        ),
        answers.card_figures(ranking, gain, "open" if open_still else "not compared" if alone else "decided", run),
    )


def _write_headline(
    ranking: Ranking, winner: pd.Series, gain: Speedup | None, run: RunData, rivals: Sequence[str], alone: bool
) -> str:
    if alone:
        return f"{ranking.configuration(winner)} takes {ms(winner[LATENCY])} at batch {winner['batch']}."
    limit = f" within the budget {run.budget}" if run.budget and winner["budget"] else ""
    text = f"fastest{limit} is {ranking.configuration(winner)}, {ms(winner[LATENCY])} at batch {winner['batch']}"
    others = f"; {join_names(rivals)} may be as fast" if rivals else ""
    reference = ranking.reference(winner)
    if gain is None or reference is None:
        return f"{text}{', the reference' * (reference is not None)}{others}."
    name, shown = answers.reference_name(ranking, reference), ratio(gain.value, gain.low, gain.high)
    if gain.verdict == stats.EQUIVALENT:
        return f"{text}; it is {equivalent(name, run.rule)} ({shown})."
    if gain.verdict == stats.UNDECIDED:
        return f"{text}; whether it is faster than {name} is undecided{in_brackets(shown)}."
    if gain.verdict == stats.ONE_ROUND:
        return f"{text}; one round can't prove that it is faster than {name}."
    if gain.verdict == stats.SLOWER:
        return f"{text}; but {name} is faster where both measured in turns ({shown})."
    best = "" if bounded(gain.low, gain.high) else f" (best estimate {significant(gain.value)}x)"
    return f"{text}: {shown} as fast as {name}{best}{others}."


def _describe_latency(ranking: Ranking, winner: pd.Series) -> Iterator[Finding]:
    if interval := limits(winner["latency_ms_low"], winner["latency_ms_high"], ms):
        yield Finding(NOTE, f"Its latency is {ms(winner[LATENCY])}{interval}.")


def _describe_accuracy(ranking: Ranking, winner: pd.Series) -> Iterator[Finding]:
    metric = ranking.metric
    if metric.column not in winner or isnan(winner[metric.column]):
        return
    low, high = metric.interval(winner)
    text = f"Its {metric.label} is {winner[metric.column]:.2f} %"
    text += "" if isnan(low) else f" [{low:.2f}, {high:.2f}]"
    if not missing(winner["images"]):
        text += f" on {winner['images']:,} images"
        if not missing(winner["set_aside"]) and winner["set_aside"]:
            text += f" ({winner['set_aside']:,} more were set aside for calibration)"
    low, value, high = metric.change_in(winner)
    if not isnan(low):
        change, lowest, highest = (points(each / 100) for each in (value, low, high))
        reference = ranking.reference(winner)
        where = f" at size {reference.size}" if ranking.sizes and reference is not None else ""
        text += f", {change} points [{lowest}, {highest}] against the reference{where} on the same images"
    yield Finding(NOTE, text + ".")


def _describe_preparation(ranking: Ranking, winner: pd.Series) -> Iterator[Finding]:
    """Yield after how many images the time to build pays off against the reference."""
    reference = ranking.reference(winner)
    if reference is None or reference.id == winner["trial"]:
        return
    payoff = frontier_table.break_even(winner, ranking.trials[winner["trial"]], reference)
    if payoff is not None and payoff.extra > 0 and payoff.images is not None:
        when = f"which pays off after about {significant(payoff.images, 2)} images"
        when += ", or never, as the gain is not proven" if isinf(payoff.high) else ""
        yield Finding(NOTE, f"Making it takes {show(payoff.extra, 'duration')}, {when}.")


def _left_out(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    """Yield faster trials that the budget kept from being the fastest."""
    budget, metric = run.budget, ranking.metric
    if not budget:
        return
    for _, row in ranking.ahead.iterrows():
        latency, name = ms(row[LATENCY]), ranking.configuration(row)
        faster = answers.is_faster(ranking, row, run)
        subject = f"{name} {faster} ({latency})" if faster else f"{name} takes {latency}"
        change = metric.change_in(row)[1]
        loss = "" if isnan(change) else f" ({points(change / 100)} points)"
        if row["budget"] == OVER:
            yield Finding(NOTE, f"{subject} but loses more than {budget} allows{loss}.")
        elif row["budget"] == UNDECIDED:
            settle = answers.more_images(row) or "more images would not settle"
            yield Finding(WARNING, f"{subject} but whether it is within {budget} is undecided{loss}: {settle} it.")


def _most_images(ranking: Ranking, run: RunData) -> Decision:
    ranked, confirmed = ranking.most_images, tuple(list_confirmations(ranking, THROUGHPUT, run))
    doubted = any(each.kind == WARNING for each in confirmed)
    shown = [("right", answers.describe_correctness(ranking, ranked.iloc[0], run))]
    over = find_confirmed_lead(ranking, THROUGHPUT, run) if len(ranked) > 1 else None
    if over is not None:
        shown.insert(0, ("real", answers.real_rate(ranking, over, run, doubted)))
    open_still = over is None or over.verdict in OPEN or doubted
    return Decision(WARNING if open_still else BEST, ranking.where, _describe_rate(ranking), tuple(shown), confirmed)


def _describe_rate(ranking: Ranking) -> str:
    best = ranking.most_images.iloc[0]
    text = f"most images per second with {ranking.configuration(best)} at batch {best['batch']}: "
    text += f"{significant(best[THROUGHPUT])}/s"
    line = results_ranking.configuration_of(best), best["size"], best["batch"]
    same = [
        s for s in results_ranking.find_saturation(ranking.group) if (s.configuration, s.size, s.best_batch) == line
    ]
    return text + (f"; {same[0].description}." if same else ".")
