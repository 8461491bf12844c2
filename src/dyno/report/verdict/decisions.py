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
    name_items,
    points,
    ratio,
    show,
    significant,
)
from dyno.report.tables import frontier_table
from dyno.report.tables.trial_table import rounds_needed, within
from dyno.report.verdict.findings import BEST, FAILURE, NOTE, WARNING, Decision, Figure, Finding, ms
from dyno.results import blocks, remarks, stats, timeline
from dyno.results import limits as results_limits
from dyno.results import ranking as results_ranking
from dyno.results.correctness import distance
from dyno.results.metrics.accuracy import OVER, UNDECIDED
from dyno.results.metrics.precision import truth
from dyno.results.ranking import LATENCY, THROUGHPUT, Contest, Ranking, cpu_contention, winners
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.stats import EQUIVALENT, FASTER, MOST_ROUNDS, ONE_ROUND, Speedup
from dyno.results.trial_result import MEASURING, UNFINISHED, TrialResult, by_build
from dyno.table import missing
from dyno.worker.spec import LOOKS

if TYPE_CHECKING:
    import pandas as pd

# Backends that run a precision which a study adds only where it can: where one of them ran, it could be tried.
LOWERING = {
    "int8": {"onnxruntime", "openvino", "tensorrt", "tensorrt_rtx"},
    "bf16": {"pytorch", "compile", "aoti", "tensorrt", "tensorrt_rtx"},
}
RESUME = "the same `dyno run` again goes on"
REASONS = "the reasons are below the table"
ENOUGH = 3  # rounds that a study has by default
MOST_NAMED = 4  # rows of a set that a sentence names
DECIDED = "decided"
EXCLUDED = OVER, results_limits.UNMEASURED  # how the `limit` of a row begins that can't be chosen


def name_reference(ranking: Ranking, reference: TrialResult) -> str:
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
        return results_ranking.read_speedup(winner)
    return _compare_pair(winner, run.trials[winner["trial"]], reference, run)


def _compare_pair(winner: pd.Series, own: TrialResult, other: TrialResult, run: RunData) -> Speedup:
    return results_ranking.estimate_speedup(own, other, str(winner["boundary"]), str(winner["clock"]), run.rule)


def name_row(ranking: Ranking, row: pd.Series, speed: str) -> str:
    """Return a row's name in a sentence, with its batch where batches compete."""
    return ranking.configuration(row) + (f" at batch {row['batch']}" if speed == THROUGHPUT else "")


def name_set(names: Sequence[str], contest: Contest, run: RunData) -> str:
    """Return the rows that may be the best as text: `one of A, B and C (undecided)`."""
    known = within(100 * run.rule.margin).replace(EQUIVALENT, "equal") if contest.is_tied else stats.UNDECIDED
    return f"one of {_join_first(names)} ({known})"


def _join_first(names: Sequence[str]) -> str:
    """Join the first MOST_NAMED names, and say how many more there are."""
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return join_names([*names[:MOST_NAMED], *more])


def describe_reality(
    ranking: Ranking, contest: Contest, gain: Speedup | None, run: RunData, doubted: bool, speed: str = LATENCY
) -> str:
    """Describe whether the winner is the fastest beyond noise, how that was measured, and reasons for doubt.

    `doubted`: its confirmation is one of these reasons.
    """
    if gain is None and not contest.leads:
        if run.conditions:
            what = "the budget" if not run.limits else run.conditions
            return f"nothing else is {'shown to be ' if awaits_evidence(ranking) else ''}within {what}"
        return "there is nothing to compare it with"
    winner, reference = contest.ranked.iloc[0], ranking.reference(contest.ranked.iloc[0])
    pairs = [*([gain] if gain else []), *contest.leads[:1]]
    how = _format_rounds(int(winner["rounds"]), max((each.rejected for each in pairs), default=0))
    how += f", measured {pairs[0].measured}" if speed == LATENCY else ""
    parts = [_choose_opening(contest, gain, how, "" if reference is None else name_reference(ranking, reference))]
    trials = [run.trials[winner["trial"]], *([reference] if gain else [])]
    if contest.rivals and not contest.is_one_round:
        rivals = [f"{name_row(ranking, row, speed)}{_format_lead(lead)}" for row, lead in contest.rivals]
        how_sure = "as fast as" if contest.is_tied else "not decided against"
        parts.append(f"{how_sure} {_join_first(rivals)}{_format_needed(contest)}")
    elif not contest.rivals and contest.leads:
        second, lead = contest.ranked.iloc[1], contest.leads[0]
        if gain is None or reference is None or second["trial"] != reference.id:  # else it is the headline's ratio
            shown = ratio(lead.value, lead.low, lead.high)
            by = "" if shown == UNCLEAR else f", by {shown}"
            parts.append(f"ahead of the runner-up, {name_row(ranking, second, speed)}{by}")
            trials.append(run.trials[second["trial"]])
    parts += _describe_builds(trials, pairs)
    parts += ["on a busy machine"] * (cpu_contention(run.records) is not None)
    return "; ".join([*parts, *(["not all of it held when measured again"] * doubted)])


def _format_rounds(rounds: int, disturbed: int) -> str:
    return counting(rounds, "round") + (f" ({disturbed} left out as disturbed)" if disturbed else "")


def _choose_opening(contest: Contest, gain: Speedup | None, how: str, reference: str) -> str:
    verdicts = {each.verdict for each in (gain, *contest.leads) if each is not None}
    if verdicts == {stats.FASTER}:
        return f"yes, in {how}"
    if stats.ONE_ROUND in verdicts:
        return f"not known from {how}: it may be noise"
    if contest.is_tied:
        return f"no difference that matters, in {how}"
    faster = gain is not None and gain.verdict == stats.FASTER
    return f"faster than {reference} in {how}" if faster else f"undecided after {how}"


def _format_lead(lead: Speedup) -> str:
    shown = in_brackets(ratio(lead.value, lead.low, lead.high))
    return f"{shown}, which is faster where both measured in turns" if lead.verdict == stats.SLOWER else shown


def _format_needed(contest: Contest) -> str:
    """Return how many more rounds, or builds, would decide the undecided pairs, as text; "" without any."""
    undecided = [lead for _, lead in contest.rivals if lead.verdict == stats.UNDECIDED]
    if not undecided:
        return ""
    hardest = max(undecided, key=_count_more)
    needed = rounds_needed(_count_more(hardest), hardest.builds > 0)
    return f": {needed} would settle it" if _count_more(hardest) <= MOST_ROUNDS else f": it would take {needed}"


def _count_more(pair: Speedup) -> int:
    return MOST_ROUNDS + 1 if pair.more is None else pair.more


def list_rejected(pairs: Sequence[Speedup]) -> Iterator[Finding]:
    """Yield which pairs leave out disturbed rounds, with their ratio over all rounds."""
    for pair in pairs:
        if pair.rejected:
            were = "was" if pair.rejected == 1 else "were"
            yield Finding(
                NOTE,
                f"{counting(pair.rejected, 'round')} {were} disturbed and left out "
                f"({pair.value:.2f}x; {pair.unfiltered:.2f}x with all rounds).",
            )


def explain_lower_latency(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    """Explain why the table shows a lower latency than the winner's.

    Between rounds a machine changes its speed, so latencies over different rounds tell less than a ratio within the
    same ones.
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
    compared = f"{ranking.configuration(winner)} is {'ahead' if shown == UNCLEAR else f'{shown} as fast'}"
    name = ranking.configuration(row)
    yield Finding(NOTE, f"{name} has a lower latency, {ms(row[LATENCY])}{rounds}, but in turns {compared}.")


def list_drifts(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    """Warn where the winner's ratio to its reference or the runner-up changes by more than 2 % within every round."""
    winner, *others = (run.trials[trial] for trial in ranking.fastest["trial"][:2])
    row = ranking.fastest.iloc[0]
    pairs = {other.id: other for other in (ranking.reference(row), *others) if other and other.id != winner.id}
    for other in pairs.values():
        change = blocks.find_drift(winner, other, str(row["boundary"]), str(row["clock"]))
        if change and max(change.low, -change.high) > blocks.DRIFT:
            how = "slower" if change.value > 0 else "faster"
            yield Finding(
                WARNING,
                f"Within each round {ranking.configuration(row)} gets {how} against {name_reference(ranking, other)}, "
                f"by {abs(change.value):.0%} from the first block to the last: one of them is not warm; give --warmup.",
            )


def _describe_builds(trials: Sequence[TrialResult | None], pairs: Sequence[Speedup]) -> Iterator[str]:
    """Yield whether the result holds for one build of an engine or for several, where builds differ from each other."""
    counts = [count for t in trials if t is not None and (count := results_ranking.list_builds(t))]
    if 1 in counts:
        yield "of one build: another build may differ"
    elif counts and all(pair.decided for pair in pairs):
        yield f"holds for builds, of which {min(counts)} were measured"
    elif counts:
        yield f"over {min(counts)} builds"


def describe_correctness(ranking: Ranking, winner: pd.Series, run: RunData) -> str:
    """Describe whether the winner's outputs agree with its reference's, its accuracy, and the precision it ran in."""
    parts, trial = [], run.trials[winner["trial"]]
    compared = run.compared.get(winner["trial"])
    if compared is not None and winner["reference"] == winner["trial"] == compared.id:
        parts.append("it is what the others' outputs are compared with")
    elif winner["outputs"]:
        name, off = compared.configuration if compared else "the reference", _distance_of(winner)
        doubt = winner.get("outputs_doubt")
        parts.append(
            f"outputs are {off} from those of {name}" if doubt else f"outputs agree with those of {name}, {off}"
        )
    else:
        parts.append("its outputs were not compared with any")
    if winner.get("outputs_doubt"):
        parts.append(f"{winner['outputs_doubt']}; give more with --compared or --data")
    if trial.facts.random_outputs:
        parts = [trial.oddity]
    elif trial.oddity:
        parts.append(trial.oddity)
    parts += [_format_accuracy(ranking, winner)] * (not isnan(winner.get(ranking.metric.column, float("nan"))))
    if ran := truth(trial):
        parts.append(ran.words)
    return "; ".join(parts)


def _distance_of(row: pd.Series) -> str:
    return distance(row["output_error"], row["labels_changed"])


def _format_accuracy(ranking: Ranking, winner: pd.Series) -> str:
    text = f"{ranking.metric.label} {winner[ranking.metric.column]:.2f} %"
    low, change, high = (points(each / 100) for each in ranking.metric.change_in(winner))
    return text if isnan(ranking.metric.change_in(winner)[0]) else f"{text}, {change} points [{low}, {high}]"


def advise(ranking: Ranking, contest: Contest, gain: Speedup | None, run: RunData) -> str:
    """Describe how to decide an undecided result, with the command that writes the winner's file."""
    winner, pairs = ranking.fastest.iloc[0], [*([gain] if gain else []), *contest.leads]
    steps = []
    if any(each.verdict == stats.ONE_ROUND for each in pairs):
        settings = run.records.settings
        asked = settings.get("rounds", 2 if settings.get("until") in LOOKS else 1)
        others = "the same command measures the other rounds"
        steps.append(others if asked > 1 else f"measure with --rounds {ENOUGH} or more")
    elif undecided := [each for each in pairs if each.verdict == stats.UNDECIDED]:
        goes_on = any(each is pair for each in undecided for pair in (gain, *contest.leads[:1]))
        steps.append(_advise_on_rounds(max(undecided, key=_count_more), goes_on, int(winner["rounds"]), run))
    elif contest.is_tied or (gain is not None and gain.verdict == stats.EQUIVALENT):
        steps.append("choose by something other than speed")
    id = f" {winner['trial']}" if len(list(winners(run))) > 1 else ""
    chosen = (
        f"take {ranking.configuration(winner)}, the first of them"
        if contest.rivals and not contest.is_one_round
        else "take it"
    )
    steps.append(f"{chosen}: dyno export {shlex.quote(str(run.records.folder))}{id}")
    return "; ".join([*steps, *filter(None, [_advise_on_images(ranking, run)])])


def list_untried(run: RunData) -> str:
    """List precisions that the study's backends could also run in, each with the option that adds it.

    Return "" where the user chose backends or precisions, or gave a file that is in a lower precision already.
    """
    settings, trials = run.records.settings, list(run.records)
    if any(settings.get(name) for name in ("backends", "precisions", "baseline")):
        return ""
    if any(t.spec["model"].get("precision", "") not in ("", "fp32") for t in trials):
        return ""
    values = "--data" if any(t.spec["dims"]["height"] for t in trials) else "--input with their range"
    added = {"int8": f"--precision fp32,int8 and {values}", "bf16": "--precision fp32,bf16"}
    if not (settings.get("data") or settings.get("calibration")):
        added["int8"] = "--data" if values == "--data" else added["int8"]
    if all(t.device.partition(":")[0] == "cpu" for t in trials):
        del added["bf16"]  # where the processor computes in it, it was tried
    used, tried = {t.backend for t in trials}, {t.precision for t in trials}
    untried = [name for name in added if used & LOWERING[name] and name not in tried]
    return ", ".join(f"{name} (add {added[name]})" for name in untried)


def _advise_on_rounds(pair: Speedup, goes_on: bool, rounds: int, run: RunData) -> str:
    """Describe how to get the rounds that would decide the pair; without `goes_on` a study itself gives none.

    Further rounds are for the winner with its reference and with its runner-up.
    """
    more = _count_more(pair)
    if more > MOST_ROUNDS:
        return "the difference is too small, or the machine too restless, for more rounds to settle it"
    if pair.builds:
        return f"measure with --builds {pair.builds + more} and another --out"
    if not goes_on:
        return f"measure with --rounds {rounds + more}"
    if run.rule.first:
        return "the same command with more --minutes goes on"
    return "the same command without --rounds goes on until decided"


def awaits_evidence(ranking: Ranking) -> bool:
    """Return whether a trial ahead of the winner may be within budget and limits, too: more evidence could decide."""
    states = [(row["budget"], read_limit(row)) for _, row in ranking.ahead.iterrows()]
    possible = [each for each in states if each[0] != OVER and not each[1].startswith(EXCLUDED)]
    return any(budget == UNDECIDED or limit.startswith(UNDECIDED) for budget, limit in possible)


def read_limit(row: pd.Series) -> str:
    """Return what a row came to under the limits, as its column has it; "" without limits."""
    return str(row.get("limit") or "")


def describe_lead(ranking: Ranking, row: pd.Series, run: RunData) -> str:
    """Return whether a row ahead of the winner is faster, or seems so, in words; "" without a winner."""
    if ranking.fastest.empty:
        return ""
    own, other = run.trials[row["trial"]], run.trials[ranking.fastest.iloc[0]["trial"]]
    return "is faster" if _compare_pair(row, own, other, run).verdict == stats.FASTER else "seems faster"


def _advise_on_images(ranking: Ranking, run: RunData) -> str:
    """Describe how many images would decide whether a faster trial is within the budget; "" where none is undecided."""
    rows = [
        row
        for _, row in ranking.ahead.iterrows()
        if row["budget"] == UNDECIDED and not read_limit(row).startswith(EXCLUDED)
    ]
    row, settle = next(((row, settle) for row in rows if (settle := describe_missing_images(row))), (None, ""))
    if row is None:
        return ""
    faster = describe_lead(ranking, row, run)
    return f"{settle} whether {ranking.configuration(row)}{faster and f', which {faster},'} is within the budget"


def describe_missing_images(row: pd.Series) -> str:
    """Return the start of a sentence on the images that would decide a row under its budget; "" where none would."""
    more = row["more_images"]
    estimated = isinstance(more, (int, float)) and not isnan(more)
    return f"about {int(more):,} more images are needed to tell" if estimated else ""


# The figures on a decision's card: how fast, how much faster, how sure, how accurate, at what cost.


def make_card_figures(ranking: Ranking, gain: Speedup | None, certainty: str) -> tuple[Figure, ...]:
    """Return the winner's figures.

    `gain` is its speed-up over its reference, None where it is the reference itself, and `certainty` how sure that is,
    in words.
    """
    winner = ranking.fastest.iloc[0]
    return (
        _make_latency_figure(winner),
        *_make_speedup_figure(ranking, winner, gain),
        _make_certainty_figure(winner, gain, certainty),
        *_make_accuracy_figure(ranking, winner),
        *_make_cost_figure(winner),
    )


def _make_latency_figure(winner: pd.Series) -> Figure:
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    below = [limits(low, high, ms).strip()] if bounded(low, high) else []
    rate = [] if missing(winner[THROUGHPUT]) else [f"{significant(winner[THROUGHPUT])} {name_items(winner['size'])}/s"]
    return Figure("latency", ms(winner[LATENCY]), ", ".join([*below, f"batch {winner['batch']}", *rate]))


def _make_speedup_figure(ranking: Ranking, winner: pd.Series, gain: Speedup | None) -> Iterator[Figure]:
    reference = ranking.reference(winner)
    if gain is None or reference is None:
        return
    name = name_reference(ranking, reference)
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
        yield Figure("outputs", "unclear" if winner.get("outputs_doubt") else "agree", _distance_of(winner))


def _make_cost_figure(winner: pd.Series) -> Iterator[Figure]:
    """Yield seconds to make it, and the size of its file and its memory, as far as each is known."""
    sizes: list[tuple[Any, str]] = [(winner["size_mb"], "MB file"), (winner["memory_mb"], "MB of memory")]
    below = ", ".join(f"{significant(value)} {what}" for value, what in sizes if not missing(value) and value)
    seconds = 0.0 if missing(winner["build_s"]) else float(winner["build_s"])
    if below or seconds:
        yield Figure("cost", f"{show(seconds, 'duration')} to make" if seconds else "nothing to make", below)


# The confirmation of winners by rounds after the selection, which are never mixed with the rounds that selected.

NO_GAIN = stats.SLOWER, stats.EQUIVALENT, stats.UNDECIDED


def list_confirmations(ranking: Ranking, contest: Contest, speed: str, run: RunData) -> Iterator[Finding]:
    """Yield the confirmation of the winner by LATENCY or THROUGHPUT, and whether it agrees with the selection."""
    ranked, trials = contest.ranked, run.trials
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
        shown, name = ratio(gain.value, gain.low, gain.high), name_reference(ranking, reference)
        unit = "as fast as" if speed == LATENCY else f"the {name_items(row['size'])} per second of"
        text += f"; the ratio to {name} is {UNCLEAR}" if shown == UNCLEAR else f", {shown} {unit} {name}"
    yield Finding(NOTE, text + ".")
    yield from _find_disagreements(ranking, contest, speed, trials, own, gain)


def _find_disagreements(
    ranking: Ranking,
    contest: Contest,
    speed: str,
    trials: Mapping[str, TrialResult],
    own: list[float],
    gain: stats.Speedup | None,
) -> Iterator[Finding]:
    ranked = contest.ranked
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
    if not contest.leads:
        return
    lead = contest.leads[0]
    first, second = (_keep_confirmations(trials[ranked.iloc[k]["trial"]]) for k in (0, 1))
    ahead = stats.decide(results_ranking.compare_rows(first, second, row, ranked.iloc[1], speed, None))
    if ahead.value < 1:
        is_real = ahead.verdict == stats.SLOWER
        other = ranking.configuration(ranked.iloc[1])
        text = f"Measured again, the runner-up {other} is ahead, "
        text += "and the difference is real" if is_real else "if not beyond noise"
        expected = not is_real and lead.verdict != stats.FASTER  # which of the two is faster was undecided before
        yield Finding(NOTE if expected else WARNING, f"{text}: {ratio(ahead.value, ahead.low, ahead.high)}.")


def find_sustained(
    ranking: Ranking, contest: Contest, speed: str, run: RunData
) -> list[tuple[TrialResult, blocks.SustainedRatio]]:
    """Return the winner's ratios to its reference and to the runner-up under sustained load, where it was measured."""
    winner, reference = run.trials[contest.ranked.iloc[0]["trial"]], ranking.reference(contest.ranked.iloc[0])
    others = [reference, *(run.trials[id] for id in contest.ranked["trial"].iloc[1:2])]
    boundary, clock = _find_timing(contest, speed, winner)
    found = []
    for other in {t.id: t for t in others if t is not None and t is not winner}.values():
        pair = (winner, other) if boundary == "throughput" else (other, winner)
        if (compared := blocks.compare_sustained(*pair, boundary, clock, run.rule.margin)) is not None:
            found.append((other, compared))
    return found


def is_overtaken(ranking: Ranking, contest: Contest, speed: str, run: RunData) -> bool:
    """Return whether the reference or the runner-up is faster than the winner under sustained load."""
    return any(each.has_moved and each.value < 1 for _, each in find_sustained(ranking, contest, speed, run))


def _find_timing(contest: Contest, speed: str, winner: TrialResult) -> tuple[str, str]:
    """Return the boundary and the clock that the winner is compared by; without a throughput those of its latency."""
    first = contest.ranked.iloc[0]
    has_throughput = any(r.facts.blocks.get("throughput") for r in winner.sustained)
    return (
        ("throughput", "") if speed == THROUGHPUT and has_throughput else (str(first["boundary"]), str(first["clock"]))
    )


def list_sustained(ranking: Ranking, contest: Contest, speed: str, run: RunData) -> Iterator[Finding]:
    """Yield each of these ratios, as a warning where it differs from that in short turns."""
    winner = run.trials[contest.ranked.iloc[0]["trial"]]
    boundary, _ = _find_timing(contest, speed, winner)
    for other, found in find_sustained(ranking, contest, speed, run):
        begin, end = next(r.facts.blocks[boundary][0] for r in winner.sustained if r.facts.blocks.get(boundary))
        what = f"Running for {show(end - begin, 'duration')} without a break, {winner.configuration} is "
        what += f"{found.value:.2f}x as fast as {other.configuration} at batch {winner.batch}"
        if not found.has_moved:
            yield Finding(NOTE, f"{what} ({found.usual:.2f}x in short turns).")
            continue
        clocks = " and ".join(filter(None, (_describe_clock(t, boundary) for t in (winner, other))))
        why = f": {clocks}" if clocks else "; heat or a power limit slows one of them more"
        yield Finding(WARNING, f"{what}, not {found.usual:.2f}x as in short turns{why}.")


def _describe_clock(trial: TrialResult, boundary: str) -> str:
    """Return the GPU's clock and power under sustained load, beside those in short turns; "" where unknown."""
    rounds = [r for r in trial.sustained if r.trace is not None and r.facts.blocks.get(boundary)]
    summaries = [timeline.summarise_timeline(r.trace, r.facts.blocks[boundary]) for r in rounds if r.trace is not None]
    now, usual = timeline.join_timelines(summaries), trial.gpu
    if now is None or usual is None or isnan(now.clock) or isnan(usual.clock):
        return ""
    power = "" if isnan(now.power) else f", {now.power:.0f} W"
    return f"{trial.configuration} at {now.clock:.0f} MHz{power} (in turns {usual.clock:.0f} MHz)"


def _list_costs(rounds: Sequence[Round], row: pd.Series, speed: str) -> list[float]:
    """Return the seconds of each successful round (or build): per batch, or per input where throughput is compared."""
    good = [r for r in rounds if r.ok]
    if speed == THROUGHPUT:
        return results_ranking.image_costs(good, row)
    return by_build((r, m) for r in good if (m := r.median(row["boundary"], row["clock"])) is not None)


def _keep_confirmations(trial: TrialResult) -> TrialResult:
    return replace(trial, rounds=trial.confirmations, companions=[])


def _compute_gain(winner: TrialResult, reference: TrialResult, row: pd.Series, speed: str) -> stats.Speedup | None:
    of_reference = row.where(row.index != "batch", reference.batch)
    again = _keep_confirmations(winner), _keep_confirmations(reference)
    gain = stats.decide(results_ranking.compare_rows(*again, row, of_reference, speed, None))
    return None if math.isnan(gain.value) else gain


def _format_spread(own: list[float], row: pd.Series, speed: str) -> str:
    if speed == THROUGHPUT:
        rate = stats.center([1 / cost for cost in own])
        return f"{significant(rate.value)} {name_items(row['size'])}/s{limits(rate.low, rate.high, significant)}"
    latency = stats.center([1e3 * cost for cost in own])
    return f"{ms(latency.value)}{limits(latency.low, latency.high, ms)} at batch {row['batch']}"


CLOSE = 1.005  # lower limit of a lead that is printed as 1.00


def choose_badge(contest: Contest, gain: Speedup | None, run: RunData, doubted: bool) -> str:
    """Return how sure a decision is, in one or two words."""
    pairs = [*([gain] if gain else []), *contest.leads]
    tied = contest.is_tied or (gain is not None and gain.verdict == stats.EQUIVALENT)
    if doubted or any(each.verdict not in (stats.FASTER, stats.EQUIVALENT) for each in pairs):
        return "open"
    if tied or contest.rivals:
        return "tie"
    if cpu_contention(run.records) is not None:
        return "busy machine"
    return "close" if any(each.low < CLOSE for each in contest.leads) else DECIDED


def decide_run(ranking: Ranking, run: RunData) -> Iterator[Decision]:
    """Yield the fastest at the smallest batch, and with several batches the most images per second."""
    yield _decide_fastest(ranking, run)
    if len(ranking.most_images):
        yield _decide_most_images(ranking, run)


def list_incomparable(ranking: Ranking) -> Iterator[Finding]:
    """Yield trials that could not be compared with their reference, so that they could not be the fastest."""
    reasons: dict[str, list[str]] = {}
    for _, row in ranking.apart.iterrows():
        names = reasons.setdefault(str(row["verdict"]), [])
        if (name := ranking.configuration(row)) not in names:
            names.append(name)
    for verdict, names in reasons.items():
        yield Finding(WARNING, f"{ranking.where}: {', '.join(names)} not ranked, {verdict}.")


def list_failed(ranking: Ranking, run: RunData) -> Decision | None:
    """Return a decision where no trial of the ranking succeeded; None where one did."""
    if not results_ranking.list_usable(ranking.group).empty:
        return None
    waiting = int((ranking.group["status"] == UNFINISHED).sum())
    if waiting:
        text = f"no trial has succeeded yet; {waiting} of {len(ranking.group)} were not measured so far."
        owner = run.records.owner
        return Decision(
            WARNING, ranking.where, text, (("next", f"wait: {MEASURING.format(owner)}" if owner else RESUME),)
        )
    return Decision(FAILURE, ranking.where, "no trial succeeded.", (("next", REASONS),))


def _decide_fastest(ranking: Ranking, run: RunData) -> Decision:
    ranked = ranking.fastest
    others = (*_list_excluded(ranking, run), *list_incomparable(ranking))
    if (nothing := list_failed(ranking, run)) is not None:
        return Decision(nothing.kind, nothing.where, nothing.text, nothing.answers, others)
    if ranked.empty and run.conditions and results_ranking.list_usable(ranking.first)[LATENCY].notna().any():
        if run.limits and len(within := results_ranking.keep_within_budget(ranking.first)):
            return _report_no_fit(ranking, within, run, others)
        text = f"no trial is within {run.budget} with confidence."
        step = _advise_on_images(ranking, run) or "allow more loss, or calibrate and quantise differently"
        return Decision(FAILURE, ranking.where, text, (("next", step),), others)
    if ranked.empty:
        return Decision(NOTE, ranking.where, "no latency was measured.", findings=others)
    winner = ranked.iloc[0]
    gain, contest = find_gain(ranking, run), results_ranking.compare_first(ranked, LATENCY, run)
    confirmed = tuple(list_confirmations(ranking, contest, LATENCY, run))
    doubted = is_overtaken(ranking, contest, LATENCY, run) or any(each.kind == WARNING for each in confirmed)
    alone = gain is None and not contest.leads and not run.conditions
    badge = choose_badge(contest, gain, run, doubted or awaits_evidence(ranking))
    badge = "not compared" if alone else badge
    return Decision(
        NOTE if alone else BEST if badge == DECIDED else WARNING,
        ranking.where,
        _write_headline(ranking, contest, gain, run, alone),
        (
            ("real", describe_reality(ranking, contest, gain, run, doubted)),
            ("right", describe_correctness(ranking, winner, run)),
            ("next", advise(ranking, contest, gain, run)),
            *([("not tried", untried)] if (untried := list_untried(run)) else []),
        ),
        (
            *confirmed,
            *list_sustained(ranking, contest, LATENCY, run),
            *list_rejected([*([gain] if gain else []), *contest.leads[:1]]),
            *explain_lower_latency(ranking, run),
            *list_drifts(ranking, run),
            *_describe_latency(winner),
            *_describe_accuracy(ranking, winner),
            *_describe_preparation(ranking, winner),
            *others,
        ),
        make_card_figures(ranking, gain, badge),
        badge,
        contest.candidates,
        "latency",
    )


def _report_no_fit(ranking: Ranking, within: pd.DataFrame, run: RunData, others: tuple[Finding, ...]) -> Decision:
    """Report that no trial at the smallest batch keeps the limits, which comes closest, and what to do next."""
    closest = results_limits.find_closest(within, run.limits)
    assert closest is not None
    name = f"{ranking.configuration(closest)} at batch {closest['batch']}"
    text = f"no trial{_name_batch(ranking)} is within {run.conditions}; the closest is {name}: "
    text += results_limits.describe_misses(closest, run.limits)
    step = _advise_on_limits(closest, run)
    return Decision(FAILURE, ranking.where, f"{text}.", (("next", step),), others)


def _name_batch(ranking: Ranking) -> str:
    return f" at batch {ranking.first['batch'].iloc[0]}" if ranking.group["batch"].nunique() > 1 else ""


def _advise_on_limits(closest: pd.Series, run: RunData) -> str:
    """Describe the next step where no trial keeps the limits, from the closest row."""
    checks, settings = results_limits.check_limits(closest, run.limits), run.records.settings
    states = {check.state for check in checks}
    if OVER in states:
        return "allow more, or try other engines, precisions (--precision) or sizes (--size)"
    if results_limits.UNMEASURED in states:
        names = [check.limit.name for check in checks if check.state == results_limits.UNMEASURED]
        return f"omit the limit on {join_names(names)}, or measure it"
    if short := [check for check in checks if check.samples]:
        needed = max(stats.samples_for(check.limit.quantity.percentile) for check in short)
        if "samples" in settings or "interval" in settings or settings.get("turns") is False:
            return f"measure with --samples {needed} or more"
        seconds = float(settings.get("seconds", 2.0)) * needed / max(1, min(check.samples for check in short))
        return f"measure longer, with --seconds {math.ceil(1.2 * seconds)}"
    return f"measure with --rounds {2 * int(closest['rounds'])} for a narrower interval"


def _write_headline(ranking: Ranking, contest: Contest, gain: Speedup | None, run: RunData, alone: bool) -> str:
    winner = contest.ranked.iloc[0]
    name, time = ranking.configuration(winner), f"{ms(winner[LATENCY])} at batch {winner['batch']}"
    if alone:
        return f"{name} takes {time}."
    limit = f" within {run.conditions}" if run.limits or (run.budget and winner["budget"]) else ""
    if contest.is_one_round:
        return f"ahead{limit} after one round is {name}, {time}: one round proves nothing."
    reference = ranking.reference(winner)
    if gain is not None and reference is not None:
        against = _format_gain(gain, name_reference(ranking, reference))
    else:
        against = ", the reference" if reference is not None else ""
    if not contest.rivals:
        return f"fastest{limit} is {name}, {time}{against}."
    names = [name, *(ranking.configuration(row) for row, _ in contest.rivals)]
    return f"fastest{limit} is {name_set(names, contest, run)}; {name} takes {time}{against}."


def _format_gain(gain: Speedup, name: str) -> str:
    shown = ratio(gain.value, gain.low, gain.high)
    if shown == UNCLEAR:
        return f", undecided against {name}"
    best = "" if bounded(gain.low, gain.high) else f" (best estimate {significant(gain.value)}x)"
    return f": {shown} as fast as {name}{best}"


def _describe_latency(winner: pd.Series) -> Iterator[Finding]:
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


def _list_excluded(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    """Yield faster trials that the budget or a limit kept from being the fastest."""
    budget, metric = run.budget, ranking.metric
    if not run.conditions:
        return
    for _, row in ranking.ahead.iterrows():
        latency, name = ms(row[LATENCY]), ranking.configuration(row)
        faster = describe_lead(ranking, row, run)
        subject = f"{name} {faster} ({latency})" if faster else f"{name} takes {latency}"
        change = metric.change_in(row)[1]
        loss = "" if isnan(change) else f" ({points(change / 100)} points)"
        misses = "" if ranking.fastest.empty else _describe_misses(row, run)
        if read_limit(row).startswith(EXCLUDED):
            yield from [Finding(NOTE, f"{subject} but {misses}.")] * bool(misses)
        elif row["budget"] == OVER:
            yield Finding(NOTE, f"{subject} but loses more than {budget} allows{loss}.")
        elif row["budget"] == UNDECIDED:
            needed = describe_missing_images(row).removesuffix(" to tell") or "more would not help"
            text = (
                f"{subject} but {row['images']:,.0f} images can't tell whether it is within {budget}{loss}: {needed}."
            )
            yield Finding(WARNING, text)
        elif misses:
            yield Finding(WARNING, f"{subject} but {misses}.")


def _describe_misses(row: pd.Series, run: RunData) -> str:
    """Return how far a row is from keeping its limits, as the end of a sentence; "" where it keeps them."""
    misses = results_limits.describe_misses(row, run.limits)
    how = "doesn't keep" if read_limit(row).startswith(OVER) else "is not shown to keep"
    return misses and f"{how} its limits: {misses}"


def _list_limited(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    """Yield trials with more images per second than the best, which a limit kept from it."""
    best = ranking.most_images.iloc[0]
    rows = results_ranking.rank_trials(results_ranking.keep_within_budget(ranking.group), THROUGHPUT)
    for _, row in rows.iloc[: [*rows["trial"]].index(best["trial"])].head(MOST_NAMED).iterrows():
        reached = f"{name_row(ranking, row, THROUGHPUT)} reaches {significant(row[THROUGHPUT])}/s"
        yield Finding(NOTE, f"{reached} but {_describe_misses(row, run)}.")


def _decide_most_images(ranking: Ranking, run: RunData) -> Decision:
    contest = results_ranking.compare_first(ranking.most_images, THROUGHPUT, run)
    confirmed = tuple(list_confirmations(ranking, contest, THROUGHPUT, run))
    doubted = is_overtaken(ranking, contest, THROUGHPUT, run) or any(each.kind == WARNING for each in confirmed)
    shown = [("right", describe_correctness(ranking, contest.ranked.iloc[0], run))]
    if contest.leads:
        shown.insert(0, ("real", describe_reality(ranking, contest, None, run, doubted, THROUGHPUT)))
    if bound := _describe_copies(run.trials[contest.ranked.iloc[0]["trial"]]):
        shown.append(("bound", bound))
    badge = choose_badge(contest, None, run, doubted)
    kind = BEST if badge == DECIDED else WARNING
    sustained = list_sustained(ranking, contest, THROUGHPUT, run)
    findings = (*confirmed, *sustained, *list_rejected(contest.leads[:1]), *_list_limited(ranking, run))
    text = _describe_rate(ranking, contest, run)
    return Decision(kind, ranking.where, text, tuple(shown), findings, (), badge, contest.candidates, "throughput")


def _describe_copies(best: TrialResult) -> str:
    """Return how copies bound the throughput and what helps; "" where they don't."""
    copies = remarks.describe_copies(best)
    if copies is None or not copies.is_bound:
        return ""
    advice = "" if best.options.get("input") == "uint8" else f" (images: {best.backend}@input=uint8 copies a quarter)"
    return copies.sentence + advice


def _describe_rate(ranking: Ranking, contest: Contest, run: RunData) -> str:
    best = contest.ranked.iloc[0]
    name, rate = name_row(ranking, best, THROUGHPUT), f"{significant(best[THROUGHPUT])}/s"
    names = [name, *(name_row(ranking, row, THROUGHPUT) for row, _ in contest.rivals)]
    text = f"{name_set(names, contest, run)}; {name} reaches {rate}" if contest.rivals else f"{name}: {rate}"
    limit = f" within {run.conditions}" if run.limits else ""
    text = f"most {name_items(best['size'])} per second{limit} with {text}"
    line = results_ranking.configuration_of(best), best["size"], best["batch"]
    same = [
        s for s in results_ranking.find_saturation(ranking.group) if (s.configuration, s.size, s.best_batch) == line
    ]
    return text + (f"; {same[0].description}." if same else ".")
