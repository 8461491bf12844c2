"""The short answers below a decision: is the difference real, is the winner right, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from math import isnan
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
from dyno.report.tables.trial_table import over_builds
from dyno.report.verdict.findings import Figure, equivalent, ms, settled
from dyno.results import ranking as results_ranking
from dyno.results import stats
from dyno.results.correctness import distance
from dyno.results.metrics.accuracy import UNDECIDED
from dyno.results.metrics.precision import NO, UNCONFIRMED, YES
from dyno.results.ranking import LATENCY, THROUGHPUT, Ranking, cpu_contention, winners
from dyno.results.run_data import RunData
from dyno.results.stats import EQUIVALENT, FASTER, MOST_ROUNDS, ONE_ROUND, Speedup
from dyno.results.trial_result import TrialResult
from dyno.table import missing
from dyno.worker.spec import LOOKS

if TYPE_CHECKING:
    import pandas as pd

UNFINISHED = "the same `dyno run` again goes on, unless it still measures"
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
            *_left_out(pairs),
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
    parts = [opening, _describe_lead(name, over, run), *_left_out([over])]
    return "; ".join([*parts, *_describe_builds(trials, [over]), *_find_doubts(run, doubted)])


def _left_out(pairs: Sequence[Speedup]) -> Iterator[str]:
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
        parts.append(f"{winner['outputs_doubt']}: give more with --inputs or --data")
    if trial.facts.random_outputs:
        parts = [trial.oddity]
    elif trial.oddity:
        parts.append(trial.oddity)
    parts += [_describe_accuracy(ranking, winner)] * (not isnan(winner.get(ranking.metric.column, float("nan"))))
    if winner["precision_ok"]:
        parts.append(RAN_AS[winner["precision_ok"]])
    return "; ".join(parts)


def _describe_accuracy(ranking: Ranking, winner: pd.Series) -> str:
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
    steps.append(f"take it: dyno take {shlex.quote(str(run.records.folder))}{id}")
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
