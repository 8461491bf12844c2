"""What each ranking decides: a sentence on what wins and by how much, short answers, and the rest to fold out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isinf, isnan
from typing import TYPE_CHECKING, Any

from dyno.formatting import (
    UNCLEAR,
    bounded,
    counting,
    in_brackets,
    join_names,
    limits,
    points,
    ratio,
    show,
    significant,
)
from dyno.report.tables import frontier_table
from dyno.report.tables.trial_table import over_builds
from dyno.report.verdict.findings import (
    BEST,
    FAILURE,
    NOTE,
    WARNING,
    Decision,
    Figure,
    Finding,
    equivalent,
    ms,
    settled,
    spread,
)
from dyno.results import ranking as results_ranking
from dyno.results import stats
from dyno.results.blocks import log_ratios
from dyno.results.correctness import distance
from dyno.results.metrics.accuracy import OVER, UNDECIDED
from dyno.results.metrics.precision import NO, UNCONFIRMED, YES
from dyno.results.ranking import LATENCY, LEAST_ROUNDS, THROUGHPUT, Ranking, cpu_contention, winners
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.stats import EQUIVALENT, FASTER, MOST_ROUNDS, ONE_ROUND, Speedup
from dyno.results.trial_result import UNFINISHED, TrialResult, by_build
from dyno.table import missing
from dyno.worker.spec import LOOKS

if TYPE_CHECKING:
    import pandas as pd

RESUME = "the same `dyno run` again goes on, unless it still measures"
REASONS = "the reasons are below the table"
RAN_AS = {
    YES: "ran in the requested type",
    NO: "did not run in the requested type",
    UNCONFIRMED: "whether it ran in the requested type is not confirmed",
}
ENOUGH = 3  # rounds that a study has by default


def reference_name(ranking: Ranking, reference: TrialResult) -> str:
    """Return the reference's name in sentences."""
    return reference.configuration + (f" at size {reference.size}" if ranking.sizes else "")


def find_gain(ranking: Ranking, run: RunData) -> Speedup | None:
    """Return the winner's speed-up, as in its row; None where the winner is the reference, or has no reference.

    It is computed again where its reference has another size than the table's.
    """
    winner = ranking.fastest.iloc[0]
    reference = ranking.reference(winner)
    if reference is None or reference.id == winner["trial"]:
        return None
    if winner["reference"] == reference.id:
        limits = winner["speedup"], winner["speedup_low"], winner["speedup_high"]
        more = None if missing(winner["more_rounds"]) else int(winner["more_rounds"])
        builds = int(winner["builds"]) if over_builds(winner.to_dict()) else 0
        rejected = 0 if missing(winner["rounds_left_out"]) else int(winner["rounds_left_out"])
        left_out = {"rejected": rejected, "unfiltered": winner["speedup_all_rounds"]}
        return Speedup(*limits, winner["verdict"], winner["measured"], more=more, builds=builds, **left_out)
    return _compare_pair(winner, run.trials[winner["trial"]], reference, run)


def find_lead(ranking: Ranking, run: RunData) -> Speedup | None:
    """Return the winner's speed-up over the runner-up; None without one, or where that is the reference."""
    ranked = ranking.fastest
    if len(ranked) < 2:
        return None
    first, second = (run.trials[ranked.iloc[i]["trial"]] for i in (0, 1))
    reference = ranking.reference(ranked.iloc[0])
    if reference is not None and reference.id == second.id:
        return None
    return _compare_pair(ranked.iloc[0], first, second, run)


def _compare_pair(winner: pd.Series, own: TrialResult, other: TrialResult, run: RunData) -> Speedup:
    return results_ranking.estimate_speedup(own, other, str(winner["boundary"]), str(winner["clock"]), run.rule)


def describe_reality(
    ranking: Ranking,
    own: Speedup | None,
    over: Speedup | None,
    run: RunData,
    doubted: bool,
    rivals: Sequence[str] = (),
) -> str:
    """Describe whether the winner is the fastest beyond noise, how that was measured, and reasons for doubt.

    `doubted`: its confirmation is one of these reasons. `rivals` are configurations that may be as fast.
    """
    pairs = [each for each in (own, over) if each is not None]
    if not pairs:
        if run.budget:
            return f"nothing else is {'shown to be ' if awaiting_images(ranking) else ''}within the budget"
        return "there is nothing to compare it with"
    winner = ranking.fastest.iloc[0]
    how = f"{counting(int(winner['rounds']), 'round')}, measured {pairs[0].measured}"
    opening = _choose_opening(pairs, own, how)
    if rivals and opening.startswith("yes"):
        opening = opening.replace("yes", "one of the fastest", 1)
    parts = [opening]
    trials = [run.trials[winner["trial"]], ranking.reference(winner)]
    if over is not None:
        parts.append(_describe_lead(ranking.configuration(ranking.fastest.iloc[1]), over, run))
        trials.append(run.trials[ranking.fastest.iloc[1]["trial"]])
    if rivals:
        parts.append(f"not shown to be faster than {join_names(rivals)}")
    return "; ".join(
        [
            *parts,
            *_list_rejected(pairs),
            *_lower_median(ranking, run),
            *_describe_builds(trials, pairs),
            *_find_doubts(run, doubted),
        ]
    )


def real_rate(ranking: Ranking, over: Speedup, run: RunData, doubted: bool) -> str:
    """Describe as `real` does, for the most images per second, which are compared with the runner-up's."""
    best, second = (ranking.most_images.iloc[i] for i in (0, 1))
    opening = _choose_opening([over], None, counting(int(best["rounds"]), "round"))
    name = f"{ranking.configuration(second)} at batch {second['batch']}"
    trials = [run.trials[row["trial"]] for row in (best, second)]
    parts = [opening, _describe_lead(name, over, run), *_list_rejected([over])]
    return "; ".join([*parts, *_describe_builds(trials, [over]), *_find_doubts(run, doubted)])


def _list_rejected(pairs: Sequence[Speedup]) -> Iterator[str]:
    """Yield which pairs leave out disturbed rounds, with their ratio over all rounds."""
    for pair in pairs:
        if pair.rejected:
            were = "was" if pair.rejected == 1 else "were"
            yield (
                f"{counting(pair.rejected, 'round')} {were} disturbed and left out "
                f"({pair.value:.2f}x; {pair.unfiltered:.2f}x with all rounds)"
            )


def _lower_median(ranking: Ranking, run: RunData) -> Iterator[str]:
    """Explain why the table shows a lower latency than the winner's.

    Between rounds a machine changes its speed, so medians over different rounds tell less than a ratio within the same
    ones.
    """
    winner = ranking.fastest.iloc[0]
    lower = ranking.fastest[ranking.fastest[LATENCY] < winner[LATENCY]]
    if lower.empty:
        return
    row = lower.sort_values(LATENCY).iloc[0]
    pair = _compare_pair(winner, run.trials[winner["trial"]], run.trials[row["trial"]], run)
    if pair.measured != stats.TURNS:
        return
    rounds = f" over {counting(int(row['rounds']), 'round')}" if row["rounds"] != winner["rounds"] else ""
    shown = ratio(pair.value, pair.low, pair.high)
    compared = "the winner is ahead" if shown == UNCLEAR else f"the winner is {shown} as fast"
    yield f"{ranking.configuration(row)} has a lower median, {ms(row[LATENCY])}{rounds}, but in turns {compared}"


def _describe_builds(trials: Sequence[TrialResult | None], pairs: Sequence[Speedup]) -> Iterator[str]:
    """Yield whether the result holds for one build of an engine or for several, where builds differ from each other."""
    counts = [count for t in trials if t is not None and (count := results_ranking.list_builds(t))]
    if 1 in counts:
        yield "of one build: another build may differ"
    elif counts and all(pair.decided for pair in pairs):
        yield f"holds for builds, of which {min(counts)} were measured"
    elif counts:
        yield f"over {min(counts)} builds"


def _find_doubts(run: RunData, doubted: bool) -> Iterator[str]:
    contention = cpu_contention(run.records)
    if contention is not None:
        unequal = "" if contention.alone else ", which may slow engines unequally"
        yield f"{contention.disturbed} of {contention.jobs} jobs ran beside other programs{unequal}"
    if doubted:
        yield "not all of it held when measured again"


def _choose_opening(pairs: list[Speedup], own: Speedup | None, how: str) -> str:
    verdicts = {each.verdict for each in pairs}
    if verdicts == {stats.FASTER}:
        return f"yes, in {how}"
    if stats.ONE_ROUND in verdicts:
        return f"not known from {how}: it may be noise"
    if own is None:
        return how
    if own.verdict == stats.UNDECIDED:
        return f"undecided after {how}: {settled(own)}"
    return (
        f"{'no difference that matters' if own.verdict == stats.EQUIVALENT else 'against the reference yes'}, in {how}"
    )


def _describe_lead(name: str, over: Speedup, run: RunData) -> str:
    shown = ratio(over.value, over.low, over.high)
    if over.verdict == stats.FASTER:
        by = "" if shown == UNCLEAR else f", by {shown}"
        return f"ahead of the runner-up, {name}{by}"
    if over.verdict == stats.EQUIVALENT:
        return f"it is {equivalent(f'the runner-up, {name},', run.rule)} ({shown})"
    if over.verdict == stats.UNDECIDED:
        return f"whether it is faster than the runner-up, {name}, is undecided{in_brackets(shown)}: {settled(over)}"
    if over.verdict == stats.SLOWER:  # the rounds' latencies and the ratio within blocks may disagree
        return f"the runner-up, {name}, is faster where both measured in turns ({shown})"
    return f"the runner-up is {name} ({shown})"


def describe_correctness(ranking: Ranking, winner: pd.Series, run: RunData) -> str:
    """Describe whether the winner's outputs agree with its reference's, its accuracy, and the precision it ran in."""
    parts, trial = [], run.trials[winner["trial"]]
    compared = run.compared.get(winner["trial"])
    if compared is not None and winner["reference"] == winner["trial"] == compared.id:
        parts.append("it is what the others' outputs are compared with")
    elif winner["outputs"]:
        name = compared.configuration if compared else "the reference"
        parts.append(
            f"outputs agree with those of {name}, {distance(winner['output_error'], winner['labels_changed'])}"
        )
    else:
        parts.append("its outputs were not compared with any")
    if winner.get("outputs_doubt"):
        parts.append(f"{winner['outputs_doubt']}: give more with --compared or --data")
    if trial.facts.random_outputs:
        parts = [trial.oddity]
    elif trial.oddity:
        parts.append(trial.oddity)
    parts += [_format_accuracy(ranking, winner)] * (not isnan(winner.get(ranking.metric.column, float("nan"))))
    if winner["precision_ok"]:
        parts.append(RAN_AS[winner["precision_ok"]])
    return "; ".join(parts)


def _format_accuracy(ranking: Ranking, winner: pd.Series) -> str:
    text = f"{ranking.metric.label} {winner[ranking.metric.column]:.2f} %"
    low, change, high = (points(each / 100) for each in ranking.metric.change_in(winner))
    return text if isnan(ranking.metric.change_in(winner)[0]) else f"{text}, {change} points [{low}, {high}]"


def next_step(ranking: Ranking, own: Speedup | None, over: Speedup | None, run: RunData) -> str:
    """Describe how to decide an undecided result, with the command that writes the winner's file."""
    winner, pairs = ranking.fastest.iloc[0], [each for each in (own, over) if each is not None]
    steps = []
    if any(each.verdict == stats.ONE_ROUND for each in pairs):
        settings = run.records.settings
        asked = settings.get("rounds", 2 if settings.get("until") in LOOKS else 1)
        others = "the same command measures the other rounds"
        steps.append(others if asked > 1 else f"measure with --rounds {ENOUGH} or more")
    elif more := [each.more or 0 for each in pairs if each.verdict == stats.UNDECIDED]:
        steps.append(_more_rounds(max(more), max(each.builds for each in pairs), run))
    elif own is not None and own.verdict == stats.EQUIVALENT:
        steps.append("choose by something other than speed")
    id = f" {winner['trial']}" if len(list(winners(run))) > 1 else ""
    steps.append(f"take it: dyno export {shlex.quote(str(run.records.folder))}{id}")
    return "; ".join([*steps, *filter(None, [_undecided_budget(ranking, run)])])


def _more_rounds(more: int, builds: int, run: RunData) -> str:
    if more > MOST_ROUNDS:
        return "the difference is too small, or the machine too restless, for more rounds to settle it"
    if builds:
        return f"measure with --builds {builds + more} and another --out"
    if run.rule.first:
        return "the same command with more --minutes goes on"
    return "the same command without --rounds goes on until decided"


def awaiting_images(ranking: Ranking) -> bool:
    """Return whether a trial ahead of the winner may be within the budget, too: more images could make it win."""
    return bool((ranking.ahead["budget"] == UNDECIDED).any())


def is_faster(ranking: Ranking, row: pd.Series, run: RunData) -> str:
    """Return whether a row ahead of the winner is faster, or seems so, in words; "" without a winner."""
    if ranking.fastest.empty:
        return ""
    own, other = run.trials[row["trial"]], run.trials[ranking.fastest.iloc[0]["trial"]]
    return "is faster" if _compare_pair(row, own, other, run).verdict == stats.FASTER else "seems faster"


def _undecided_budget(ranking: Ranking, run: RunData) -> str:
    """Describe how many images would decide whether a faster trial is within the budget; "" where none is undecided."""
    rows = [row for _, row in ranking.ahead.iterrows() if row["budget"] == UNDECIDED]
    row, settle = next(((row, settle) for row in rows if (settle := more_images(row))), (None, ""))
    if row is None:
        return ""
    faster = is_faster(ranking, row, run)
    return f"{settle} whether {ranking.configuration(row)}{faster and f', which {faster},'} is within the budget"


def more_images(row: pd.Series) -> str:
    """Return the start of a sentence on the images that would decide a row under its budget; "" where none would."""
    more = row["more_images"]
    estimated = isinstance(more, (int, float)) and not isnan(more)
    return f"about {int(more):,} more images would settle" if estimated else ""


def wider_budget(ranking: Ranking, run: RunData) -> str:
    """Describe the next step where no trial is within the budget."""
    return _undecided_budget(ranking, run) or "allow more loss, or calibrate and quantise differently"


# The figures on a decision's card: how fast, how much faster, how sure, how accurate, at what cost.


def card_figures(ranking: Ranking, gain: Speedup | None, certainty: str, run: RunData) -> tuple[Figure, ...]:
    """Return the winner's figures.

    `gain` is its speed-up over its reference, None where it is the reference itself, and `certainty` how sure that is,
    in words.
    """
    winner = ranking.fastest.iloc[0]
    return (
        _make_latency_figure(winner),
        *_make_speedup_figure(ranking, winner, gain, run),
        _make_certainty_figure(winner, gain, certainty),
        *_make_accuracy_figure(ranking, winner),
        *_make_cost_figure(winner),
    )


def _make_latency_figure(winner: pd.Series) -> Figure:
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    below = [limits(low, high, ms).strip()] if bounded(low, high) else []
    rate = [] if missing(winner[THROUGHPUT]) else [f"{significant(winner[THROUGHPUT])} images/s"]
    return Figure("latency", ms(winner[LATENCY]), ", ".join([*below, f"batch {winner['batch']}", *rate]))


def _make_speedup_figure(ranking: Ranking, winner: pd.Series, gain: Speedup | None, run: RunData) -> Iterator[Figure]:
    reference = ranking.reference(winner)
    if gain is None or reference is None:
        return
    name = reference_name(ranking, reference)
    shown = ratio(gain.value, gain.low, gain.high)
    if gain.verdict == ONE_ROUND:
        yield Figure("speed-up", "unproven", f"over {name}: one round")
    elif shown == UNCLEAR or gain.verdict not in (FASTER, EQUIVALENT):
        yield Figure("speed-up", "undecided", f"against {name} ({shown})")
    elif not bounded(gain.low, gain.high):
        yield Figure("speed-up", shown, f"as fast as {name} (best estimate {significant(gain.value)}x)")
    else:
        value, _, interval = shown.partition(" ")
        yield Figure("speed-up", value, f"as fast as {name}{f' {interval}' if interval else ''}")


def _make_certainty_figure(winner: pd.Series, gain: Speedup | None, certainty: str) -> Figure:
    how = counting(int(winner["rounds"]), "round")
    return Figure("how sure", certainty, f"{how}, {gain.measured}" if gain else how)


def _make_accuracy_figure(ranking: Ranking, winner: pd.Series) -> Iterator[Figure]:
    value = winner.get(ranking.metric.column, float("nan"))
    if not isnan(value):
        low, change, high = (points(each / 100) for each in ranking.metric.change_in(winner))
        known = not isnan(ranking.metric.change_in(winner)[0])
        lost = f", {change} points [{low}, {high}] against the reference" if known else ""
        yield Figure("accuracy", f"{value:.2f} %", f"{ranking.metric.label}{lost}")
    elif winner["outputs"]:
        yield Figure("outputs", "agree", distance(winner["output_error"], winner["labels_changed"]))


def _make_cost_figure(winner: pd.Series) -> Iterator[Figure]:
    """Yield seconds to make it, and the size of its file and its memory, as far as each is known."""
    sizes: list[tuple[Any, str]] = [(winner["size_mb"], "MB file"), (winner["memory_mb"], "MB of memory")]
    below = ", ".join(f"{significant(value)} {what}" for value, what in sizes if not missing(value) and value)
    seconds = 0.0 if missing(winner["build_s"]) else float(winner["build_s"])
    if below or seconds:
        yield Figure("cost", f"{show(seconds, 'duration')} to make" if seconds else "nothing to make", below)


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
        shown, name = ratio(gain.value, gain.low, gain.high), reference_name(ranking, reference)
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
        return Decision(WARNING, ranking.where, text, (("next", RESUME),))
    return Decision(FAILURE, ranking.where, "no trial succeeded.", (("next", REASONS),))


def _decide_fastest(ranking: Ranking, run: RunData) -> Decision:
    ranked = ranking.fastest
    others = (*_left_out(ranking, run), *is_apart(ranking))
    if (nothing := list_failed(ranking)) is not None:
        return Decision(nothing.kind, nothing.where, nothing.text, nothing.answers, others)
    if ranked.empty and run.budget and results_ranking.list_usable(ranking.first)[LATENCY].notna().any():
        text = f"no trial is within {run.budget} with confidence."
        return Decision(FAILURE, ranking.where, text, (("next", wider_budget(ranking, run)),), others)
    if ranked.empty:
        return Decision(NOTE, ranking.where, "no latency was measured.", findings=others)
    winner = ranked.iloc[0]
    gain, ahead = find_gain(ranking, run), find_lead(ranking, run)
    confirmed = tuple(list_confirmations(ranking, LATENCY, run))
    doubted = any(each.kind == WARNING for each in confirmed)
    open_still = any(each is not None and each.verdict in OPEN for each in (gain, ahead)) or doubted
    rivals = [ranking.configuration(row) for _, row in results_ranking.find_rivals(ranked, run).iterrows()]
    open_still = open_still or bool(rivals) or awaiting_images(ranking)
    alone = gain is None and ahead is None and not run.budget
    return Decision(
        WARNING if open_still else NOTE if alone else BEST,
        ranking.where,
        _write_headline(ranking, winner, gain, run, rivals, alone),
        (
            ("real", describe_reality(ranking, gain, ahead, run, doubted, rivals)),
            ("right", describe_correctness(ranking, winner, run)),
            ("next", next_step(ranking, gain, ahead, run)),
        ),
        (
            *confirmed,
            *_describe_latency(ranking, winner),
            *_describe_accuracy(ranking, winner),
            *_describe_preparation(ranking, winner),
            *others,
        ),
        card_figures(ranking, gain, "open" if open_still else "not compared" if alone else "decided", run),
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
    name, shown = reference_name(ranking, reference), ratio(gain.value, gain.low, gain.high)
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
        faster = is_faster(ranking, row, run)
        subject = f"{name} {faster} ({latency})" if faster else f"{name} takes {latency}"
        change = metric.change_in(row)[1]
        loss = "" if isnan(change) else f" ({points(change / 100)} points)"
        if row["budget"] == OVER:
            yield Finding(NOTE, f"{subject} but loses more than {budget} allows{loss}.")
        elif row["budget"] == UNDECIDED:
            settle = more_images(row) or "more images would not settle"
            yield Finding(WARNING, f"{subject} but whether it is within {budget} is undecided{loss}: {settle} it.")


def _most_images(ranking: Ranking, run: RunData) -> Decision:
    ranked, confirmed = ranking.most_images, tuple(list_confirmations(ranking, THROUGHPUT, run))
    doubted = any(each.kind == WARNING for each in confirmed)
    shown = [("right", describe_correctness(ranking, ranked.iloc[0], run))]
    over = find_confirmed_lead(ranking, THROUGHPUT, run) if len(ranked) > 1 else None
    if over is not None:
        shown.insert(0, ("real", real_rate(ranking, over, run, doubted)))
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
