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

MOST_GROUPS = 8  # model x size pairs that get sentences of their own; the rest stands in the tables
SLIGHT = 1.1  # an interval that ends below it leaves no gain worth looking for
NO_GAIN = stats.SLOWER, stats.EQUIVALENT, stats.UNDECIDED
# What a lowered precision ought to be faster than, in the order of comparison.
WIDER = {
    **dict.fromkeys(("tf32", "fp16", "bf16"), ("fp32",)),
    **dict.fromkeys(("int8", "fp8"), ("fp32", "fp16", "bf16")),
}


def sentences(run: RunData) -> list[str]:
    """The verdict in plain sentences, most important first."""
    return [plain(f.text) for f in findings(run)]


def findings(run: RunData) -> list[Finding]:
    """The verdict: the fastest within the budget and how sure that is, then truth of precision, reasons, failures."""
    results = run.records
    every, crowd = rankings(run), cpu_contention(results)
    found = [f for contest in every[:MOST_GROUPS] for f in _contest(contest, run)]
    if crowd and crowd.mostly:  # whatever is said of an order would be said of the machine's load
        failed = [f for f in found if f.kind == FAILURE]
        apart = [f for contest in every[:MOST_GROUPS] for f in _apart(contest)]
        told = [*failed, *apart, *_truths(results), *_outcome(results, crowd)]
        return [*_wrong_outputs(run), Finding(WARNING, crowd.sentence), *told]
    if len(every) > MOST_GROUPS:
        found.append(Finding(NOTE, f"{len(every) - MOST_GROUPS} more models and sizes are in the tables."))
    return [
        *_wrong_outputs(run),
        *found,
        *mixed_precision.findings(run),
        *_truths(results),
        *_slow_precisions(run),
        *_outcome(results, crowd),
    ]


def _wrong_outputs(run: RunData) -> Iterator[Finding]:
    """Trials that compute something else than their reference, so that none of them was ranked."""
    trials, wrong = run.trials, run.frame[run.frame["outputs"] == WRONG]
    for (reference, verdict), rows in wrong.groupby(["reference", "verdict"], sort=False):
        held = [trials[id] for id in rows["trial"]]
        names = ", ".join(dict.fromkeys(t.way for t in held))
        against = f" against {trials[reference].way}" if reference in trials else ""
        text = f"{held[0].model}: {names} ({_places(held)}) gave {verdict}{against}; not ranked, whatever the speed."
        yield Finding(FAILURE, text)


def _contest(contest: Ranking, run: RunData) -> Iterator[Finding]:
    ranked, trials, budget = contest.fastest, run.trials, run.budget
    if frontier.usable(contest.group).empty:
        yield Finding(FAILURE, f"{contest.where}: no trial ended well.")
    elif ranked.empty and budget and frontier.usable(contest.first)[LATENCY].notna().any():
        yield Finding(FAILURE, f"{contest.where}: no trial is within {budget} for certain.")
    elif len(ranked):
        winner = ranked.iloc[0]
        yield Finding(BEST, _fastest(contest, winner, run))
        yield from _runner_up(contest, run)
        yield from confirmation.findings(contest, LATENCY, run)
        yield from _accuracy(contest, winner, trials)
        yield from _preparation(contest, winner, trials)
    yield from _left_out(contest, budget)
    yield from _apart(contest)
    yield from _most_images(contest)
    yield from confirmation.findings(contest, THROUGHPUT, run)


def _fastest(contest: Ranking, winner: pd.Series, run: RunData) -> str:
    limit = f" within the budget {run.budget}" if run.budget and winner["budget"] else ""
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    name, latency = contest.configuration(winner), f"{ms(winner[LATENCY])}{limits(low, high, ms)}"
    text = f"{contest.where}: fastest{limit} is {name}, {latency}"
    text += f" at batch {winner['batch']}"
    reference = contest.reference(winner, run.trials)
    if reference is None or reference.id == winner["trial"]:
        return text + "."
    gain = _gain(winner, reference, run)
    shown = ratio(gain.value, gain.low, gain.high)
    name = reference.way + (f" at size {reference.size}" if contest.sizes else "")
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


def _runner_up(contest: Ranking, run: RunData) -> Iterator[Finding]:
    ranked, trials = contest.fastest, run.trials
    if len(ranked) < 2:
        return
    first, second = (trials[ranked.iloc[i]["trial"]] for i in (0, 1))
    told = contest.reference(ranked.iloc[0], trials)
    if told is not None and told.id == second.id:
        return  # the winner was compared with it already
    name = contest.configuration(ranked.iloc[1])
    boundary = str(ranked.iloc[0]["boundary"])
    clock = str(ranked.iloc[0]["clock"])
    against = speedups.speedup(first, second, boundary, clock, run.rule)
    shown = ratio(against.value, against.low, against.high)
    if against.verdict == stats.FASTER:
        yield Finding(NOTE, f"The runner-up is {name}; the difference is real: {shown}.")
    elif against.verdict == stats.EQUIVALENT:
        yield Finding(NOTE, f"It is {equivalent(f'the runner-up, {name},', run.rule)} ({shown}).")
    elif against.verdict == stats.UNDECIDED:
        text = f"Whether it is faster than the runner-up, {name}, is undecided ({shown})"
        yield Finding(WARNING, f"{text}: {settled(against)}.")
    elif against.verdict == stats.SLOWER:  # the rounds' latencies and the ratio within blocks may disagree
        yield Finding(WARNING, f"The runner-up, {name}, is faster where both measured in turns ({shown}).")
    else:
        text = f"The runner-up is {name} ({shown}); with one round, significance can't be assessed."
        yield Finding(WARNING, text)


def _accuracy(contest: Ranking, winner: pd.Series, trials: dict[str, TrialResult]) -> Iterator[Finding]:
    metric = contest.metric
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
        reference = contest.reference(winner, trials)
        where = f" at size {reference.size}" if contest.sizes and reference is not None else ""
        text += f", {change} points [{lowest}, {highest}] against the reference{where} on the same images"
    yield Finding(NOTE, text + ".")


def _preparation(contest: Ranking, winner: pd.Series, trials: dict[str, TrialResult]) -> Iterator[Finding]:
    """After how many images the time to build pays off against the reference."""
    reference = contest.reference(winner, trials)
    if reference is None or reference.id == winner["trial"]:
        return
    found = breakeven.against(winner, trials[winner["trial"]], reference)
    if found is not None and found.extra > 0 and found.images is not None:
        words = f"which pays off after about {significant(found.images, 2)} images"
        words += ", or never, as the gain is not proven" if isinf(found.high) else ""
        yield Finding(NOTE, f"Making it takes {show(found.extra, 'duration')}, {words}.")


def _left_out(contest: Ranking, budget: str) -> Iterator[Finding]:
    """Faster trials that the budget kept from being the fastest."""
    if not budget:
        return
    ranked, metric = contest.fastest, contest.metric
    limit = ranked.iloc[0][LATENCY] if len(ranked) else float("inf")
    faster = frontier.ranked(frontier.usable(contest.first))
    for _, row in faster[faster[LATENCY] < limit].iterrows():
        taken, name = ms(row[LATENCY]), contest.configuration(row)
        what = f"{name} is faster ({taken})" if len(ranked) else f"{name} takes {taken}"
        change = metric.change_in(row)[1]
        loss = "" if isnan(change) else f" ({points(change / 100)} points)"
        if row["budget"] == OVER:
            yield Finding(NOTE, f"{what} but loses more than {budget} allows{loss}.")
        elif row["budget"] == UNDECIDED:
            more = row["more_images"]
            known = isinstance(more, (int, float)) and not isnan(more)
            settle = f"about {int(more):,} more images would settle it" if known else "more images would not settle it"
            yield Finding(WARNING, f"{what} but whether it is within {budget} is undecided{loss}: {settle}.")


def _apart(contest: Ranking) -> Iterator[Finding]:
    """Trials that could not be compared with their reference, so that none of them was the fastest."""
    reasons: dict[str, list[str]] = {}
    for _, row in contest.apart.iterrows():
        names = reasons.setdefault(str(row["verdict"]), [])
        if (name := contest.configuration(row)) not in names:
            names.append(name)
    for verdict, names in reasons.items():
        yield Finding(WARNING, f"{contest.where}: {', '.join(names)} took no part, {verdict}.")


def _most_images(contest: Ranking) -> Iterator[Finding]:
    ranked = contest.most_images
    if ranked.empty:
        return
    best = ranked.iloc[0]
    name = contest.configuration(best)
    text = f"{contest.where}: most images per second with {name} at batch {best['batch']}: "
    text += f"{significant(best[THROUGHPUT])}/s"
    line = frontier.configuration(best), best["size"], best["batch"]
    same = [s for s in frontier.saturation(contest.group) if (s.configuration, s.size, s.best_batch) == line]
    yield Finding(BEST, text + (f"; {same[0].description}." if same else "."))


def _truths(results: Results) -> Iterator[Finding]:
    known = [(t, found) for t in results if t.good and (found := truth(t)) is not None]
    wrong: dict[tuple[str, str], list[TrialResult]] = {}
    for t, found in known:
        if not found.ok:
            wrong.setdefault((t.model, found.sentence), []).append(t)
    told = [found for _, found in known if found.reported]
    if told:
        kept = sum(found.ok for found in told)
        yield Finding(NOTE, f"Precision: {kept} of {counting(len(told), 'trial')} ran in the type they were asked for.")
    for (_, sentence), trials in wrong.items():
        whose = f"{trials[0].model} " if len({t.model for t in results}) > 1 else ""
        found = truth(trials[0])
        is_wrong = " is not what it says" if found and found.reported else ""
        yield Finding(WARNING, f"{whose}{trials[0].way} ({_places(trials)}){is_wrong}: {sentence}.")


def _slow_precisions(run: RunData) -> Iterator[Finding]:
    """Lowered precisions that gain nothing over a wider one of the same backend, with the engine's own reasons.

    The wider one is fp32; where eight bits gain something over that, it is what sixteen bits there are.
    """
    results = run.records
    ran = {(t.group, t.variant, t.precision): t for t in results if t.good}
    found: dict[tuple[str, ...], list[tuple[TrialResult, stats.Speedup]]] = {}
    for t in ran.values():
        for wider in WIDER.get(t.precision, ()):
            other = ran.get((t.group, t.variant, wider))
            if other is not None and not incomparable(t, other) and (gain := _no_gain(t, other, run.rule)):
                found.setdefault((t.model, t.size, t.way, other.way), []).append((t, gain))
                break
    several = len({(t.model, t.size) for t in results}) > 1
    for (model, size, name, other_name), slow in list(found.items())[:MOST_GROUPS]:
        where = f"{model} at size {size}: " if several else ""
        yield Finding(WARNING, f"{where}{name} is {_not_faster(other_name, slow)}.")
    if len(found) > MOST_GROUPS:
        yield Finding(NOTE, f"{len(found) - MOST_GROUPS} more ways gain nothing by their precision; see the tables.")


def _not_faster(other: str, slow: list[tuple[TrialResult, stats.Speedup]]) -> str:
    slow = sorted(slow, key=lambda one: one[0].batch)
    gains = [gain for _, gain in slow]
    sure = all(gain.verdict in (stats.SLOWER, stats.ONE_ROUND) or gain.high <= 1 for gain in gains)
    shown = ratio(gains[0].value, gains[0].low, gains[0].high)
    shown += ", one round only, so unproven" if gains[0].verdict == stats.ONE_ROUND else ""
    reasons = list(dict.fromkeys("; ".join(t.reasons()) or _silence(gain) for t, gain in slow))
    at = f"at batch {slow[0][0].batch}, " if len(reasons) > 1 else ""
    word = "not faster" if sure else "not shown to be faster"
    return f"{word} than {other} ({_places([t for t, _ in slow])}: {shown}): {at}{reasons[0]}"


def _no_gain(t: TrialResult, wider: TrialResult, rule: stats.Rule) -> stats.Speedup | None:
    """The speed-up over the wider precision where it is none, or may be none."""
    clock = clock_of("model", t, wider)
    gain = speedups.speedup(t, wider, "model", clock, rule)
    none = gain.verdict in NO_GAIN or (gain.verdict == stats.ONE_ROUND and gain.value < 1)
    return gain if none else None


def _silence(gain: stats.Speedup) -> str:
    """Why nothing is gained where the engine says nothing."""
    if gain.verdict in (stats.SLOWER, stats.ONE_ROUND) or gain.high <= 1:
        return "the engine gives no reason"
    if gain.high < SLIGHT:
        return f"it gains {ceil(100 * (gain.high - 1))} % at most, and the engine gives no reason"
    return "the spread between processes hides any gain"


def _outcome(results: Results, crowd: Contention | None) -> Iterator[Finding]:
    count = Counter(t.status for t in results)
    bad = {status: n for status, n in count.items() if status not in ("ok", "skipped")}
    total = len(results.trials)
    if bad:
        each = ", ".join(f"{n} {status}" for status, n in bad.items())
        yield Finding(
            FAILURE, f"{sum(bad.values())} of {counting(total, 'trial')} did not finish: {each}; each has its reason."
        )
    if count["skipped"]:
        yield Finding(NOTE, f"{_of(count['skipped'], total, 'was', 'were')} skipped, each with its reason.")
    if crowd and not crowd.mostly:
        yield Finding(WARNING, crowd.sentence)
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
    """What the GPU's telemetry and its clock say against the numbers."""
    trials = [t for t in results if t.gpu is not None]
    every = counting(len(trials), "trial")
    if shared := [t for t in trials if gpu_remarks.others(t)]:
        yield Finding(
            WARNING,
            f"Others used the GPU during {len(shared)} of {every} (first: {shared[0].label}: "
            f"{gpu_remarks.others(shared[0])}): those times may be too long; measure again on a free GPU.",
        )
    if held := [(t, found) for t in trials if (found := gpu_remarks.throttled(t))]:
        hit, lost = (sum(getattr(f, name) for _, found in held for f in found) for name in ("hit", "dropped"))
        why = ", ".join(dict.fromkeys(f.why for _, found in held for f in found))
        yield Finding(
            WARNING,
            f"The GPU was throttled ({why}) during {len(held)} of {every}: {lost:,} of the {hit:,} "
            "samples taken meanwhile were dropped.",
        )
    yield from _launch_bound(results)
    mixed = {t.group for t in results if t.good and clock_of("model", t) == GPU} & {
        t.group for t in results if t.medians("model") and t.device != "cpu" and clock_of("model", t) != GPU
    }
    if mixed:
        yield Finding(NOTE, "Where an engine gave no GPU times, all of its group are compared by the host's clock.")


def _launch_bound(results: Results) -> Iterator[Finding]:
    """The ways of running that lose most of their time to launching, worst first."""
    known = [(t, found) for t in results if t.device != "cpu" and (found := gpu_remarks.launch(t)) and found.sentence]
    if known:
        t, found = max(known, key=lambda each: each[1].share)
        others = f"; {len(known) - 1} more trials say so too" if len(known) > 1 else ""
        yield Finding(NOTE, f"{t.label}: {found.sentence}{others}.")


def _of(count: int, total: int, one: str, several: str) -> str:
    return f"{count} of {counting(total, 'trial')} {one if count == 1 else several}"


def _places(trials: list[TrialResult]) -> str:
    batches = sorted({t.batch for t in trials})
    return f"batch {', '.join(map(str, batches))}"
