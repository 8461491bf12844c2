"""What the numbers say, in sentences: the first thing in every report and the last thing a study prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from dyno.analysis import frontier, gpu_words, stats
from dyno.analysis.accuracy import OVER, UNDECIDED
from dyno.analysis.formatting import plain, points, show, significant
from dyno.analysis.frontier import LATENCY, THROUGHPUT, way
from dyno.analysis.precision import truth
from dyno.analysis.results import Results, TrialResult, clock_of
from dyno.analysis.rounds import GPU

if TYPE_CHECKING:
    import pandas as pd

CROWDED = 0.2  # processors that others may keep busy, as in the worker's own warning
MOST_GROUPS = 8  # model x size pairs that get sentences of their own; the rest stands in the tables
BEST, NOTE, WARNING, FAILURE = "best", "note", "warning", "failure"
SILENT = {stats.SLOWER: "the engine gives no reason", stats.SAME: "the spread between processes hides any gain"}
LOWERED = ("fp16", "bf16", "int8", "fp8")


@dataclass(frozen=True)
class Finding:
    """One sentence and what kind it is: best, note, warning or failure."""

    kind: str
    text: str


def sentences(results: Results, frame: pd.DataFrame) -> list[str]:
    """The verdict in plain sentences, most important first."""
    return [plain(f.text) for f in findings(results, frame)]


def findings(results: Results, frame: pd.DataFrame) -> list[Finding]:
    """The verdict: the fastest within the budget and how sure that is, then truth of precision, reasons, failures."""
    trials = {t.id: t for t in results.trials}
    groups = list(frame.groupby(["model", "size", "device"], sort=False))
    found = [f for _, group in groups[:MOST_GROUPS] for f in _group(group, trials, str(frame.attrs.get("budget", "")))]
    if len(groups) > MOST_GROUPS:
        found.append(Finding(NOTE, f"{len(groups) - MOST_GROUPS} more models and sizes are in the tables."))
    return [*found, *_truths(results), *_slow_precisions(results), *_outcome(results)]


def _group(group: pd.DataFrame, trials: dict[str, TrialResult], budget: str) -> Iterator[Finding]:
    where = f"{group['model'].iloc[0]} at size {group['size'].iloc[0]}"
    first = group[group["batch"] == group["batch"].min()]
    ranked = frontier.ranked(frontier.within(first))
    if frontier.usable(group).empty:
        yield Finding(FAILURE, f"{where}: no trial ended well.")
    elif ranked.empty and budget and frontier.usable(first)[LATENCY].notna().any():
        yield Finding(FAILURE, f"{where}: no trial is within {budget} for certain.")
    elif len(ranked):
        winner = ranked.iloc[0]
        yield Finding(BEST, _fastest(where, winner, trials, budget))
        yield from _runner_up(ranked, trials)
        yield from _accuracy(winner)
        yield from _preparation(winner, trials)
    yield from _left_out(first, ranked, budget)
    yield from _most_images(where, group)


def _fastest(where: str, winner: pd.Series, trials: dict[str, TrialResult], budget: str) -> str:
    limit = f" within the budget {budget}" if budget and winner["budget"] else ""
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    spread = "" if isnan(low) else f" [{_ms(low)}, {_ms(high)}]"
    text = f"{where}: fastest{limit} is {way(winner)}, {_ms(winner[LATENCY])}{spread} at batch {winner['batch']}"
    reference = trials.get(winner["reference"])
    if reference is None or reference.id == winner["trial"]:
        return text + "."
    if winner["verdict"] == stats.SAME:
        return f"{text}; it is not distinguishable from {reference.way} ({_row_ratio(winner)})."
    sure = " (one round only, so unproven)" if winner["verdict"] == stats.ONE_ROUND else ""
    return f"{text}: {_row_ratio(winner)} as fast as {reference.way}{sure}."


def _runner_up(ranked: pd.DataFrame, trials: dict[str, TrialResult]) -> Iterator[Finding]:
    if len(ranked) < 2:
        return
    first, second = (trials[ranked.iloc[i]["trial"]] for i in (0, 1))
    boundary = str(ranked.iloc[0]["boundary"])
    clock = str(ranked.iloc[0]["clock"])
    against = stats.speedup(first.medians(boundary, clock), second.medians(boundary, clock))
    ratio = _ratio(against.value, against.low, against.high)
    if against.verdict == stats.FASTER:
        yield Finding(NOTE, f"The runner-up is {second.way}; the difference is real: {ratio}.")
    elif against.verdict == stats.SAME:
        yield Finding(WARNING, f"It is not distinguishable from the runner-up, {second.way} ({ratio}).")
    else:
        text = f"The runner-up is {second.way} ({ratio}); with one round only, nobody knows whether that is real."
        yield Finding(WARNING, text)


def _accuracy(winner: pd.Series) -> Iterator[Finding]:
    metric, name, word = ("map", "map50_95", "mAP50-95") if isnan(winner["top1"]) else ("top1", "top1", "top-1")
    if isnan(winner[name]):
        return
    text = (
        f"Its {word} is {winner[name]:.2f} % [{winner[f'{metric}_low']:.2f}, {winner[f'{metric}_high']:.2f}] "
        f"on {winner['images']:,} images"
    )
    if not isnan(winner[f"{metric}_diff_low"]):
        low, value, high = (points(winner[f"{metric}_diff{x}"] / 100) for x in ("_low", "", "_high"))
        text += f", {value} points [{low}, {high}] against the reference on the same images"
    yield Finding(NOTE, text + ".")


def _preparation(winner: pd.Series, trials: dict[str, TrialResult]) -> Iterator[Finding]:
    """After how many images the time to build pays off against the reference."""
    from dyno.analysis.tables import build_seconds

    reference = trials.get(winner["reference"])
    if reference is None or reference.id == winner["trial"] or not winner["speedup"] > 1:
        return
    extra = (build_seconds(trials[winner["trial"]]) or 0.0) - (build_seconds(reference) or 0.0)
    gain = winner[LATENCY] * 1e-3 * (winner["speedup"] - 1) / float(winner["batch"])
    if extra > 0:
        images = significant(extra / gain, 2)
        yield Finding(NOTE, f"Making it takes {show(extra, 'duration')}, which pays off after about {images} images.")


def _left_out(first: pd.DataFrame, ranked: pd.DataFrame, budget: str) -> Iterator[Finding]:
    """Faster trials that the budget kept from being the fastest."""
    if not budget:
        return
    limit = ranked.iloc[0][LATENCY] if len(ranked) else float("inf")
    faster = frontier.ranked(frontier.usable(first))
    for _, row in faster[faster[LATENCY] < limit].iterrows():
        what = f"{way(row)} is faster ({_ms(row[LATENCY])})" if len(ranked) else f"{way(row)} takes {_ms(row[LATENCY])}"
        if row["budget"] == OVER:
            yield Finding(NOTE, f"{what} but loses more than {budget} allows ({_loss(row)} points).")
        elif row["budget"] == UNDECIDED:
            more, loss = row["more_images"], _loss(row)
            known = isinstance(more, (int, float)) and not isnan(more)
            settle = f"about {int(more):,} more images would settle it" if known else "more images would not settle it"
            yield Finding(WARNING, f"{what} but whether it is within {budget} is undecided ({loss} points): {settle}.")


def _loss(row: pd.Series) -> str:
    return points(row["map_diff" if isnan(row["top1_diff"]) else "top1_diff"] / 100)


def _most_images(where: str, group: pd.DataFrame) -> Iterator[Finding]:
    ranked = frontier.ranked(frontier.within(group), THROUGHPUT)
    if ranked.empty or group["batch"].nunique() < 2:
        return
    best = ranked.iloc[0]
    text = (
        f"{where}: most images per second with {way(best)} at batch {best['batch']}: {significant(best[THROUGHPUT])}/s"
    )
    same = [s for s in frontier.saturation(group) if s.way == way(best) and s.best_batch == best["batch"]]
    yield Finding(BEST, text + (f"; {same[0].words}." if same else "."))


def _truths(results: Results) -> Iterator[Finding]:
    known = [(t, found) for t in results if t.good and (found := truth(t)) is not None]
    wrong: dict[str, list[TrialResult]] = {}
    for t, found in known:
        if not found.ok:
            wrong.setdefault(found.sentence, []).append(t)
    kept = len(known) - sum(map(len, wrong.values()))
    if known:
        yield Finding(NOTE, f"Precision: {kept} of {len(known)} trials ran in the type they were asked for.")
    for sentence, trials in wrong.items():
        yield Finding(WARNING, f"{trials[0].way} ({_places(trials)}) is not what it says: {sentence}.")


def _slow_precisions(results: Results) -> Iterator[Finding]:
    """Lowered precisions that gain nothing over fp32 of the same backend, with the engine's own reasons."""
    plain = {(t.group, t.variant): t for t in results if t.precision == "fp32" and t.good}
    found: dict[tuple[str, str], list[tuple[TrialResult, stats.Speedup]]] = {}
    for t in results:
        other = plain.get((t.group, t.variant))
        if t.precision not in LOWERED or not t.good or other is None:
            continue
        clock = clock_of("model", t, other)
        gain = stats.speedup(t.medians("model", clock), other.medians("model", clock))
        if gain.verdict in (stats.SLOWER, stats.SAME):
            why = "; ".join(t.notes()) or SILENT[gain.verdict]
            found.setdefault((t.way, why), []).append((t, gain))
    for (name, why), slow in found.items():
        ratio = _ratio(slow[0][1].value, slow[0][1].low, slow[0][1].high)
        places = _places([t for t, _ in slow])
        sure = all(gain.verdict == stats.SLOWER or gain.high <= 1 for _, gain in slow)
        word = "not faster" if sure else "not shown to be faster"
        yield Finding(WARNING, f"{name} is {word} than {slow[0][0].variant} fp32 ({places}: {ratio}): {why}.")


def _outcome(results: Results) -> Iterator[Finding]:
    count = Counter(t.status for t in results)
    bad = {status: n for status, n in count.items() if status not in ("ok", "skipped")}
    total = len(results.trials)
    if bad:
        each = ", ".join(f"{n} {status}" for status, n in bad.items())
        yield Finding(FAILURE, f"{sum(bad.values())} of {total} trials did not finish: {each}; each has its reason.")
    if count["skipped"]:
        yield Finding(NOTE, f"{count['skipped']} of {total} trials were skipped, each with its reason.")
    yield from _crowded(results)
    yield from _gpu(results)
    warned = sum(1 for t in results if t.warnings())
    if warned:
        yield Finding(WARNING, f"{warned} of {total} trials have warnings; the report lists them.")
    for problem in results.problems:
        yield Finding(FAILURE, problem)


def _crowded(results: Results) -> Iterator[Finding]:
    """Timings taken while other programs used the processors are of the machine's load as much as of the engine."""
    busy = [max((r.facts.get("others_busy") or {"": 0.0}).values()) for t in results for r in t.good]
    over = [processors for processors in busy if processors > CROWDED]
    if over:
        yield Finding(
            WARNING,
            f"Other programs kept up to {max(over):.1f} processors busy during {len(over)} of {len(busy)} timings: "
            "those latencies are too long and their order may be wrong; measure again on a quiet machine.",
        )


def _gpu(results: Results) -> Iterator[Finding]:
    """What the GPU's telemetry and its clock say against the numbers."""
    trials = [t for t in results if t.gpu is not None]
    if shared := [t for t in trials if gpu_words.others(t)]:
        yield Finding(
            WARNING,
            f"Others used the GPU during {len(shared)} of {len(trials)} trials (first: {shared[0].label}: "
            f"{gpu_words.others(shared[0])}): those times may be too long; measure again on a free GPU.",
        )
    if held := [(t, found) for t in trials if (found := gpu_words.throttled(t))]:
        hit, lost = (sum(getattr(f, name) for _, found in held for f in found) for name in ("hit", "dropped"))
        why = ", ".join(dict.fromkeys(f.why for _, found in held for f in found))
        yield Finding(
            WARNING,
            f"The GPU was throttled ({why}) during {len(held)} of {len(trials)} trials: {lost:,} of the {hit:,} "
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
    known = [(t, found) for t in results if t.device != "cpu" and (found := gpu_words.launch(t)) and found.sentence]
    if known:
        t, found = max(known, key=lambda each: each[1].share)
        others = f"; {len(known) - 1} more trials say so too" if len(known) > 1 else ""
        yield Finding(NOTE, f"{t.label}: {found.sentence}{others}.")


def _places(trials: list[TrialResult]) -> str:
    batches = sorted({t.batch for t in trials})
    return f"batch {', '.join(map(str, batches))}"


def _ms(value: float) -> str:
    return show(value * 1e-3, "duration")


def _row_ratio(row: pd.Series) -> str:
    return _ratio(row["speedup"], row["speedup_low"], row["speedup_high"])


def _ratio(value: float, low: float, high: float) -> str:
    return f"{value:.2f}x" if isnan(low) else f"{value:.2f}x [{low:.2f}, {high:.2f}]"
