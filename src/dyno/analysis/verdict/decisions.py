"""What each ranking decides: a sentence on what wins and by how much, short answers, and the rest to fold out."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf, isnan
from typing import TYPE_CHECKING

from dyno.analysis import stats
from dyno.analysis.formatting import bounded, in_brackets, limits, points, ratio, show, significant
from dyno.analysis.metrics.accuracy import OVER, UNDECIDED
from dyno.analysis.presentation.table import missing
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.ranking.rankings import Ranking
from dyno.analysis.records.results import UNFINISHED
from dyno.analysis.records.run_data import RunData
from dyno.analysis.stats import Speedup
from dyno.analysis.tables import breakeven
from dyno.analysis.verdict import answers, card, confirmation
from dyno.analysis.verdict.findings import BEST, FAILURE, NOTE, WARNING, Decision, Finding, equivalent, ms

if TYPE_CHECKING:
    import pandas as pd

OPEN = stats.UNDECIDED, stats.ONE_ROUND, stats.SLOWER  # verdicts on a winner that leave it unproven


def decisions(ranking: Ranking, run: RunData) -> Iterator[Decision]:
    """Yield the fastest at the smallest batch, and with several batches the most images per second."""
    yield _decide_fastest(ranking, run)
    if len(ranking.most_images):
        yield _most_images(ranking, run)


def apart(ranking: Ranking) -> Iterator[Finding]:
    """Yield trials that could not be compared with their reference, so that they could not be the fastest."""
    reasons: dict[str, list[str]] = {}
    for _, row in ranking.apart.iterrows():
        names = reasons.setdefault(str(row["verdict"]), [])
        if (name := ranking.configuration(row)) not in names:
            names.append(name)
    for verdict, names in reasons.items():
        yield Finding(WARNING, f"{ranking.where}: {', '.join(names)} not ranked, {verdict}.")


def failed(ranking: Ranking) -> Decision | None:
    """Return a decision where no trial of the ranking succeeded; None where one did."""
    if not frontier.usable(ranking.group).empty:
        return None
    waiting = int((ranking.group["status"] == UNFINISHED).sum())
    if waiting:
        text = f"no trial has succeeded yet; {waiting} of {len(ranking.group)} were not measured so far."
        return Decision(WARNING, ranking.where, text, (("next", answers.UNFINISHED),))
    return Decision(FAILURE, ranking.where, "no trial succeeded.", (("next", answers.REASONS),))


def _decide_fastest(ranking: Ranking, run: RunData) -> Decision:
    ranked = ranking.fastest
    others = (*_left_out(ranking, run), *apart(ranking))
    if (nothing := failed(ranking)) is not None:
        return Decision(nothing.kind, nothing.where, nothing.text, nothing.answers, others)
    if ranked.empty and run.budget and frontier.usable(ranking.first)[LATENCY].notna().any():
        text = f"no trial is within {run.budget} with confidence."
        return Decision(FAILURE, ranking.where, text, (("next", answers.wider_budget(ranking, run)),), others)
    if ranked.empty:
        return Decision(NOTE, ranking.where, "no latency was measured.", findings=others)
    winner = ranked.iloc[0]
    gain, ahead = answers.gain(ranking, run), answers.ahead(ranking, run)
    confirmed = tuple(confirmation.findings(ranking, LATENCY, run))
    doubted = any(each.kind == WARNING for each in confirmed)
    open_still = any(each is not None and each.verdict in OPEN for each in (gain, ahead)) or doubted
    open_still = open_still or answers.awaiting_images(ranking)
    alone = gain is None and ahead is None and not run.budget
    return Decision(
        WARNING if open_still else NOTE if alone else BEST,
        ranking.where,
        _describe_alone(ranking, winner) if alone else _write_headline(ranking, winner, gain, run),
        (
            ("real", answers.real(ranking, gain, ahead, run, doubted)),
            ("right", answers.right(ranking, winner, run)),
            ("next", answers.next_step(ranking, gain, ahead, run)),
        ),
        (
            *confirmed,
            *_describe_latency(ranking, winner),
            *_describe_accuracy(ranking, winner),
            *_describe_preparation(ranking, winner),
            *others,
        ),
        card.figures(ranking, gain, "open" if open_still else "not compared" if alone else "decided", run),
    )


def _describe_alone(ranking: Ranking, winner: pd.Series) -> str:
    return f"{ranking.configuration(winner)} takes {ms(winner[LATENCY])} at batch {winner['batch']}."


def _write_headline(ranking: Ranking, winner: pd.Series, gain: Speedup | None, run: RunData) -> str:
    limit = f" within the budget {run.budget}" if run.budget and winner["budget"] else ""
    text = f"fastest{limit} is {ranking.configuration(winner)}, {ms(winner[LATENCY])} at batch {winner['batch']}"
    reference = ranking.reference(winner)
    if gain is None or reference is None:
        return f"{text}, the reference." if reference is not None else f"{text}."
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
    return f"{text}: {shown} as fast as {name}{best}."


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
    payoff = breakeven.against(winner, ranking.trials[winner["trial"]], reference)
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
    ranked, confirmed = ranking.most_images, tuple(confirmation.findings(ranking, THROUGHPUT, run))
    doubted = any(each.kind == WARNING for each in confirmed)
    shown = [("right", answers.right(ranking, ranked.iloc[0], run))]
    over = confirmation.ahead(ranking, THROUGHPUT, run) if len(ranked) > 1 else None
    if over is not None:
        shown.insert(0, ("real", answers.real_rate(ranking, over, run, doubted)))
    open_still = over is None or over.verdict in OPEN or doubted
    return Decision(WARNING if open_still else BEST, ranking.where, _describe_rate(ranking), tuple(shown), confirmed)


def _describe_rate(ranking: Ranking) -> str:
    best = ranking.most_images.iloc[0]
    text = f"most images per second with {ranking.configuration(best)} at batch {best['batch']}: "
    text += f"{significant(best[THROUGHPUT])}/s"
    line = frontier.configuration(best), best["size"], best["batch"]
    same = [s for s in frontier.saturation(ranking.group) if (s.configuration, s.size, s.best_batch) == line]
    return text + (f"; {same[0].description}." if same else ".")
