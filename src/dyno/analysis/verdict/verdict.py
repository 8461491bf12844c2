"""What the numbers say, in sentences: the first thing in every report and the last thing a study prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil, isinf, isnan
from typing import TYPE_CHECKING

from dyno.analysis import stats
from dyno.analysis.formatting import counting, limits, plain, points, show, significant
from dyno.analysis.metrics import speedups
from dyno.analysis.metrics.accuracy import OVER, UNDECIDED, judged, set_aside
from dyno.analysis.metrics.precision import truth
from dyno.analysis.presentation.table import missing
from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.contention import Contention, cpu_contention
from dyno.analysis.ranking.correctness import WRONG
from dyno.analysis.ranking.frontier import LATENCY, THROUGHPUT
from dyno.analysis.ranking.rankings import Ranking, rankings
from dyno.analysis.ranking.references import incomparable
from dyno.analysis.records import gpu_remarks
from dyno.analysis.records.results import Results, TrialResult, clock_of
from dyno.analysis.records.rounds import GPU
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables import breakeven
from dyno.analysis.verdict import confirmation, mixed_precision
from dyno.analysis.verdict.findings import BEST, FAILURE, NOTE, WARNING, Finding, equivalent, ms, ratio, settled

if TYPE_CHECKING:
    import pandas as pd

MOST_GROUPS = 8  # models and sizes that get sentences; the tables have all
SLIGHT = 1.1  # an interval that ends below it leaves no gain worth pursuing
NO_GAIN = stats.SLOWER, stats.EQUIVALENT, stats.UNDECIDED
# Wider precisions that a lowered one should be faster than, in the order of comparison.
WIDER = {
    **dict.fromkeys(("tf32", "fp16", "bf16"), ("fp32",)),
    **dict.fromkeys(("int8", "fp8"), ("fp32", "fp16", "bf16")),
}


def sentences(run: RunData) -> list[str]:
    """The verdict in plain sentences, most important first."""
    return [plain(f.text) for f in findings(run)]


def findings(run: RunData) -> list[Finding]:
    """The verdict: the fastest within the budget with its evidence, then precision truth, reasons, failures."""
    results = run.records
    all_rankings, contention = rankings(run), cpu_contention(results)
    ranked = [f for ranking in all_rankings[:MOST_GROUPS] for f in _ranking_findings(ranking, run)]
    if contention and contention.mostly:  # an order would be that of the machine's load
        failed = [f for f in ranked if f.kind == FAILURE]
        apart = [f for ranking in all_rankings[:MOST_GROUPS] for f in _apart(ranking)]
        others = [*failed, *apart, *_truths(results), *_outcome(results, contention)]
        return [*_wrong_outputs(run), Finding(WARNING, contention.sentence), *others]
    if len(all_rankings) > MOST_GROUPS:
        ranked.append(Finding(NOTE, f"{len(all_rankings) - MOST_GROUPS} more models and sizes are in the tables."))
    return [
        *_wrong_outputs(run),
        *ranked,
        *mixed_precision.findings(run),
        *_truths(results),
        *_slow_precisions(run),
        *_outcome(results, contention),
    ]


def _wrong_outputs(run: RunData) -> Iterator[Finding]:
    """Trials with other outputs than their reference, which are not ranked."""
    trials, wrong = run.trials, run.frame[run.frame["outputs"] == WRONG]
    for (reference, verdict), rows in wrong.groupby(["reference", "verdict"], sort=False):
        group = [trials[id] for id in rows["trial"]]
        names = ", ".join(dict.fromkeys(t.configuration for t in group))
        against = f" against {trials[reference].configuration}" if reference in trials else ""
        text = f"{group[0].model}: {names} ({_places(group)}) gave {verdict}{against}; not ranked, whatever the speed."
        yield Finding(FAILURE, text)


def _ranking_findings(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    ranked, trials, budget = ranking.fastest, run.trials, run.budget
    if frontier.usable(ranking.group).empty:
        yield Finding(FAILURE, f"{ranking.where}: no trial succeeded.")
    elif ranked.empty and budget and frontier.usable(ranking.first)[LATENCY].notna().any():
        yield Finding(FAILURE, f"{ranking.where}: no trial is within {budget} with confidence.")
    elif len(ranked):
        winner = ranked.iloc[0]
        yield Finding(BEST, _fastest(ranking, winner, run))
        yield from _runner_up(ranking, run)
        yield from confirmation.findings(ranking, LATENCY, run)
        yield from _accuracy(ranking, winner, trials)
        yield from _preparation(ranking, winner, trials)
    yield from _left_out(ranking, budget)
    yield from _apart(ranking)
    yield from _most_images(ranking)
    yield from confirmation.findings(ranking, THROUGHPUT, run)


def _fastest(ranking: Ranking, winner: pd.Series, run: RunData) -> str:
    limit = f" within the budget {run.budget}" if run.budget and winner["budget"] else ""
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    name, latency = ranking.configuration(winner), f"{ms(winner[LATENCY])}{limits(low, high, ms)}"
    text = f"{ranking.where}: fastest{limit} is {name}, {latency}"
    text += f" at batch {winner['batch']}"
    reference = ranking.reference(winner, run.trials)
    if reference is None or reference.id == winner["trial"]:
        return text + "."
    gain = _gain(winner, reference, run)
    shown = ratio(gain.value, gain.low, gain.high)
    name = reference.configuration + (f" at size {reference.size}" if ranking.sizes else "")
    if gain.verdict == stats.EQUIVALENT:
        return f"{text}; it is {equivalent(name, run.rule)} ({shown})."
    if gain.verdict == stats.UNDECIDED:
        return f"{text}; whether it is faster than {name} is undecided ({shown}): {settled(gain)}."
    sure = " (one round only, so unproven)" if gain.verdict == stats.ONE_ROUND else ""
    return f"{text}: {shown} as fast as {name}{sure}."


def _gain(winner: pd.Series, reference: TrialResult, run: RunData) -> stats.Speedup:
    """The row's speed-up; computed again where its reference is of another size than the table's."""
    if winner["reference"] == reference.id:
        limits = winner["speedup"], winner["speedup_low"], winner["speedup_high"]
        more = None if missing(winner["more_rounds"]) else int(winner["more_rounds"])
        return stats.Speedup(*limits, winner["verdict"], more=more)
    boundary, clock = str(winner["boundary"]), str(winner["clock"])
    return speedups.speedup(run.trials[winner["trial"]], reference, boundary, clock, run.rule)


def _runner_up(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    ranked, trials = ranking.fastest, run.trials
    if len(ranked) < 2:
        return
    first, second = (trials[ranked.iloc[i]["trial"]] for i in (0, 1))
    reference = ranking.reference(ranked.iloc[0], trials)
    if reference is not None and reference.id == second.id:
        return  # the winner was compared with it above
    name = ranking.configuration(ranked.iloc[1])
    boundary = str(ranked.iloc[0]["boundary"])
    clock = str(ranked.iloc[0]["clock"])
    gain = speedups.speedup(first, second, boundary, clock, run.rule)
    shown = ratio(gain.value, gain.low, gain.high)
    if gain.verdict == stats.FASTER:
        yield Finding(NOTE, f"The runner-up is {name}; the difference is real: {shown}.")
    elif gain.verdict == stats.EQUIVALENT:
        yield Finding(NOTE, f"It is {equivalent(f'the runner-up, {name},', run.rule)} ({shown}).")
    elif gain.verdict == stats.UNDECIDED:
        text = f"Whether it is faster than the runner-up, {name}, is undecided ({shown})"
        yield Finding(WARNING, f"{text}: {settled(gain)}.")
    elif gain.verdict == stats.SLOWER:  # the rounds' latencies and the ratio within blocks may disagree
        yield Finding(WARNING, f"The runner-up, {name}, is faster where both measured in turns ({shown}).")
    else:
        text = f"The runner-up is {name} ({shown}); with one round, significance can't be assessed."
        yield Finding(WARNING, text)


def _accuracy(ranking: Ranking, winner: pd.Series, trials: dict[str, TrialResult]) -> Iterator[Finding]:
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
        reference = ranking.reference(winner, trials)
        where = f" at size {reference.size}" if ranking.sizes and reference is not None else ""
        text += f", {change} points [{lowest}, {highest}] against the reference{where} on the same images"
    yield Finding(NOTE, text + ".")


def _preparation(ranking: Ranking, winner: pd.Series, trials: dict[str, TrialResult]) -> Iterator[Finding]:
    """After how many images the time to build pays off against the reference."""
    reference = ranking.reference(winner, trials)
    if reference is None or reference.id == winner["trial"]:
        return
    payoff = breakeven.against(winner, trials[winner["trial"]], reference)
    if payoff is not None and payoff.extra > 0 and payoff.images is not None:
        when = f"which pays off after about {significant(payoff.images, 2)} images"
        when += ", or never, as the gain is not proven" if isinf(payoff.high) else ""
        yield Finding(NOTE, f"Making it takes {show(payoff.extra, 'duration')}, {when}.")


def _left_out(ranking: Ranking, budget: str) -> Iterator[Finding]:
    """Faster trials that the budget kept from being the fastest."""
    if not budget:
        return
    ranked, metric = ranking.fastest, ranking.metric
    limit = ranked.iloc[0][LATENCY] if len(ranked) else float("inf")
    faster = frontier.ranked(frontier.usable(ranking.first))
    for _, row in faster[faster[LATENCY] < limit].iterrows():
        latency, name = ms(row[LATENCY]), ranking.configuration(row)
        subject = f"{name} is faster ({latency})" if len(ranked) else f"{name} takes {latency}"
        change = metric.change_in(row)[1]
        loss = "" if isnan(change) else f" ({points(change / 100)} points)"
        if row["budget"] == OVER:
            yield Finding(NOTE, f"{subject} but loses more than {budget} allows{loss}.")
        elif row["budget"] == UNDECIDED:
            more = row["more_images"]
            estimated = isinstance(more, (int, float)) and not isnan(more)
            settle = f"about {int(more):,} more images would" if estimated else "more images would not"
            yield Finding(
                WARNING, f"{subject} but whether it is within {budget} is undecided{loss}: {settle} settle it."
            )


def _apart(ranking: Ranking) -> Iterator[Finding]:
    """Trials that could not be compared with their reference, so that none of them was the fastest."""
    reasons: dict[str, list[str]] = {}
    for _, row in ranking.apart.iterrows():
        names = reasons.setdefault(str(row["verdict"]), [])
        if (name := ranking.configuration(row)) not in names:
            names.append(name)
    for verdict, names in reasons.items():
        yield Finding(WARNING, f"{ranking.where}: {', '.join(names)} not ranked, {verdict}.")


def _most_images(ranking: Ranking) -> Iterator[Finding]:
    ranked = ranking.most_images
    if ranked.empty:
        return
    best = ranked.iloc[0]
    name = ranking.configuration(best)
    text = f"{ranking.where}: most images per second with {name} at batch {best['batch']}: "
    text += f"{significant(best[THROUGHPUT])}/s"
    line = frontier.configuration(best), best["size"], best["batch"]
    same = [s for s in frontier.saturation(ranking.group) if (s.configuration, s.size, s.best_batch) == line]
    yield Finding(BEST, text + (f"; {same[0].description}." if same else "."))


def _truths(results: Results) -> Iterator[Finding]:
    known = [(t, found) for t in results if t.good and (found := truth(t)) is not None]
    wrong: dict[tuple[str, str], list[TrialResult]] = {}
    for t, found in known:
        if not found.ok:
            wrong.setdefault((t.model, found.sentence), []).append(t)
    reported = [found for _, found in known if found.reported]
    if reported:
        as_requested = sum(t.ok for t in reported)
        trials_reported = counting(len(reported), "trial")
        yield Finding(NOTE, f"Precision: {as_requested} of {trials_reported} ran in the requested type.")
    for (_, sentence), trials in wrong.items():
        model = f"{trials[0].model} " if len({t.model for t in results}) > 1 else ""
        found = truth(trials[0])
        is_wrong = " did not run as requested" if found and found.reported else ""
        yield Finding(WARNING, f"{model}{trials[0].configuration} ({_places(trials)}){is_wrong}: {sentence}.")


def _slow_precisions(run: RunData) -> Iterator[Finding]:
    """Lowered precisions that gain nothing over a wider one of the same backend, with the engine's own reasons.

    The wider one is fp32; for eight bits that gain something over it, the sixteen-bit ones as well.
    """
    results = run.records
    ran = {(t.group, t.variant, t.precision): t for t in results if t.good}
    groups: dict[tuple[str, ...], list[tuple[TrialResult, stats.Speedup]]] = {}
    for t in ran.values():
        for wider in WIDER.get(t.precision, ()):
            other = ran.get((t.group, t.variant, wider))
            if other is not None and not incomparable(t, other) and (gain := _no_gain(t, other, run.rule)):
                groups.setdefault((t.model, t.size, t.configuration, other.configuration), []).append((t, gain))
                break
    several = len({(t.model, t.size) for t in results}) > 1
    for (model, size, name, other_name), slow in list(groups.items())[:MOST_GROUPS]:
        where = f"{model} at size {size}: " if several else ""
        yield Finding(WARNING, f"{where}{name} is {_not_faster(other_name, slow)}.")
    if len(groups) > MOST_GROUPS:
        more = len(groups) - MOST_GROUPS
        yield Finding(NOTE, f"{more} more configurations gain nothing from their precision; see the tables.")


def _not_faster(other: str, slow: list[tuple[TrialResult, stats.Speedup]]) -> str:
    slow = sorted(slow, key=lambda pair: pair[0].batch)
    gains = [gain for _, gain in slow]
    sure = all(gain.verdict in (stats.SLOWER, stats.ONE_ROUND) or gain.high <= 1 for gain in gains)
    shown = ratio(gains[0].value, gains[0].low, gains[0].high)
    shown += ", one round only, so unproven" if gains[0].verdict == stats.ONE_ROUND else ""
    reasons = list(dict.fromkeys("; ".join(t.reasons()) or _silence(gain) for t, gain in slow))
    at = f"at batch {slow[0][0].batch}, " if len(reasons) > 1 else ""
    word = "not faster" if sure else "not shown to be faster"
    return f"{word} than {other} ({_places([t for t, _ in slow])}: {shown}): {at}{reasons[0]}"


def _no_gain(t: TrialResult, wider: TrialResult, rule: stats.Rule) -> stats.Speedup | None:
    """The speed-up over the wider precision, where it shows no gain; else None."""
    clock = clock_of("model", t, wider)
    gain = speedups.speedup(t, wider, "model", clock, rule)
    none = gain.verdict in NO_GAIN or (gain.verdict == stats.ONE_ROUND and gain.value < 1)
    return gain if none else None


def _silence(gain: stats.Speedup) -> str:
    """Why nothing is gained, where the engine gives no reason."""
    if gain.verdict in (stats.SLOWER, stats.ONE_ROUND) or gain.high <= 1:
        return "the engine gives no reason"
    if gain.high < SLIGHT:
        return f"it gains {ceil(100 * (gain.high - 1))} % at most, and the engine gives no reason"
    return "the spread between processes hides any gain"


def _outcome(results: Results, contention: Contention | None) -> Iterator[Finding]:
    count = Counter(t.status for t in results)
    failed = {status: n for status, n in count.items() if status not in ("ok", "skipped")}
    total = len(results.trials)
    if failed:
        counts = ", ".join(f"{n} {status}" for status, n in failed.items())
        yield Finding(
            FAILURE,
            f"{sum(failed.values())} of {counting(total, 'trial')} did not finish: {counts}; each has its reason.",
        )
    if count["skipped"]:
        yield Finding(NOTE, f"{_of(count['skipped'], total, 'was', 'were')} skipped, each with its reason.")
    if contention and not contention.mostly:
        yield Finding(WARNING, contention.sentence)
    yield from _gpu(results)
    if aside := max((set_aside(t) for t in results if set_aside(t) and judged(t)), default=0):
        yield Finding(
            WARNING,
            f"Accuracy is not on all images: {aside:,} were set aside for calibration; --calibration DIR gives others.",
        )
    warned = sum(1 for t in results if t.warnings())
    if warned:
        yield Finding(WARNING, f"{_of(warned, total, 'has', 'have')} warnings; the report lists them.")
    for problem in results.problems:
        yield Finding(FAILURE, problem)


def _gpu(results: Results) -> Iterator[Finding]:
    """What in the GPU's telemetry and clocks casts doubt on the numbers."""
    trials = [t for t in results if t.gpu is not None]
    of_trials = counting(len(trials), "trial")
    if shared := [t for t in trials if gpu_remarks.others(t)]:
        yield Finding(
            WARNING,
            f"Others used the GPU during {len(shared)} of {of_trials} (first: {shared[0].label}: "
            f"{gpu_remarks.others(shared[0])}): those times may be too long; measure again on a free GPU.",
        )
    if throttled := [(t, found) for t in trials if (found := gpu_remarks.throttled(t))]:
        hit, lost = (sum(getattr(f, name) for _, found in throttled for f in found) for name in ("hit", "dropped"))
        why = ", ".join(dict.fromkeys(f.why for _, found in throttled for f in found))
        yield Finding(
            WARNING,
            f"The GPU was throttled ({why}) during {len(throttled)} of {of_trials}: {lost:,} of the {hit:,} "
            "samples taken meanwhile were dropped.",
        )
    yield from _launch_bound(results)
    mixed = {t.group for t in results if t.good and clock_of("model", t) == GPU} & {
        t.group for t in results if t.medians("model") and t.device != "cpu" and clock_of("model", t) != GPU
    }
    if mixed:
        yield Finding(NOTE, "Where an engine gave no GPU times, all of its group are compared by the host's clock.")


def _launch_bound(results: Results) -> Iterator[Finding]:
    """The trial that loses the largest share of its time to launching."""
    bound = [
        (t, launch) for t in results if t.device != "cpu" and (launch := gpu_remarks.launch(t)) and launch.sentence
    ]
    if bound:
        t, launch = max(bound, key=lambda pair: pair[1].share)
        others = f"; {len(bound) - 1} more trials are launch-bound" if len(bound) > 1 else ""
        yield Finding(NOTE, f"{t.label}: {launch.sentence}{others}.")


def _of(count: int, total: int, one: str, several: str) -> str:
    return f"{count} of {counting(total, 'trial')} {one if count == 1 else several}"


def _places(trials: list[TrialResult]) -> str:
    batches = sorted({t.batch for t in trials})
    return f"batch {', '.join(map(str, batches))}"
