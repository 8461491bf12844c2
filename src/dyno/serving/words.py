"""What the figures of requests say, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dyno.formatting import counting, show, significant
from dyno.results import stats
from dyno.results.correctness import distance
from dyno.serving.figures import QUANTILES, RateMeasurement, ServingRun
from dyno.worker.serve import rates as serve_rates

COMPANY = ": other programs kept "  # of a warning for each rate


def of_run(served: Sequence[ServingRun]) -> list[str]:
    """Return the sentences of each trial, under its name where there are several."""
    said = []
    for each in served:
        named = [f"{each.trial.label}:"] if len(served) > 1 else []
        said += [*named, *list_sentences(each), *_describe_company(each), *_iter_warnings(each)]
    return said


def _describe_company(served: ServingRun) -> Iterator[str]:
    """Yield one sentence for all rates and rounds on how busy other programs kept the processors."""
    busy = [r.facts.others_busy for r in served.trial.good if COMPANY in " ".join(r.warnings)]
    if busy:
        most = max(max(each.values()) for each in busy)
        rounds = counting(len(served.trial.good), "round")
        yield f"Other programs kept up to {most:.1f} processors busy meanwhile, in {len(busy)} of {rounds}."


def _iter_warnings(served: ServingRun) -> Iterator[str]:
    yield from (f"{warning}." for warning in served.warnings if COMPANY not in warning)


def list_sentences(served: ServingRun) -> list[str]:
    """Describe a trial: wrong outputs, the highest rate that holds, where the time goes there, and rates that failed.

    Rates fail where they are too high, or measured for too short a time. The last sentence is on whether the outputs
    are right.
    """
    rates = [
        *_describe_highest(served),
        *_describe_waiting(served),
        *_describe_unstable(served),
        *_describe_short(served),
    ]
    return [*_at_server(served), *_describe_wrong(served), *rates, *_describe_right(served)]


def _at_server(served: ServingRun) -> Iterator[str]:
    if url := served.facts[0].endpoint:
        yield (
            f"Answered by {url}: times have the way there and back in them, and in which type and on which device it "
            "computes isn't known."
        )


def _describe_wrong(served: ServingRun) -> Iterator[str]:
    if (outputs := served.outputs).wrong:
        wrong = outputs.wrong[:1].upper() + outputs.wrong[1:]
        yield f"{wrong} against {outputs.against}; not ranked, whatever the rate."


def _describe_right(served: ServingRun) -> Iterator[str]:
    outputs = served.outputs
    if outputs.word and not outputs.wrong:
        yield f"Outputs agree with those of {outputs.against}, {distance(outputs.error, outputs.labels_changed)}."
    elif outputs.missing:
        yield f"Outputs are compared with none: {outputs.missing}."


def bound_of(served: ServingRun) -> str:
    """Return the bound, `p99 <= 20 ms`, or "" without one."""
    facts = served.facts[0]
    if not facts.bound_s:
        return ""
    return f"{_name_percentile(served.bounded)} <= {show(facts.bound_s, 'duration')}"


def _name_percentile(percentile: str) -> str:
    return f"p{100 * QUANTILES[percentile]:g}"


def _describe_highest(served: ServingRun) -> Iterator[str]:
    facts = served.facts[0]
    if not facts.bound_s:
        return
    bound = bound_of(served)
    if served.highest is None:
        yield from _explain_no_rate(served, bound)
        return
    share = served.highest.value / served.capacity.value
    how = " Of the rates that were asked for the highest."
    if facts.searched:
        how = f" Searched, to steps of {show(facts.resolution, 'percentage')}."
    if any(f.searched and f.highest is None for f in served.facts):
        how = " The search ended early, so a higher rate may hold."
    yield (
        f"{_format_rate(served.highest.value)} hold {bound}: {show(share, 'percentage')} of the "
        f"{_format_rate(served.capacity.value)} that full batches of {facts.most} allow.{how}"
    )


def _explain_no_rate(served: ServingRun, bound: str) -> Iterator[str]:
    facts, without = served.facts[0], served.by_round.count(0)
    once = any(t.step.verdict == serve_rates.HOLDS for t in served.tried)
    if facts.searched and once:
        of = f"{without} of {counting(len(served.facts), 'round')}"
        yield f"{of} ended without a rate that holds {bound} twice."
    else:
        yield f"{_nothing_holds(served, bound, once)}."
    if facts.lowest:
        yield (
            f"Below {_format_rate(facts.lowest)} the --duration brings fewer than the {facts.least:,} requests that "
            f"{_name_percentile(served.bounded)} needs, so no lower rate was tried; omit it."
        )


def _nothing_holds(served: ServingRun, bound: str, once: bool) -> str:
    """Describe that no rate holds, with the lowest rate's latency in its worst round, or that nothing is known."""
    least, several = min(t.step.rate for t in served.tried), len({t.step.rate for t in served.tried}) > 1
    found_there = [(t.percentile(served.bounded), t) for t in served.tried if t.step.rate == least]
    latency, lowest = max(found_there, key=lambda pair: pair[0].value if pair[0] else np.inf)
    if all(t.step.verdict == serve_rates.TOO_FEW for t in served.tried):
        return f"Whether {bound} holds can't be said of {'these rates' if several else 'this rate'}"
    name = _name_percentile(served.bounded)
    place = f"{_format_rate(lowest.step.rate)}{', the lowest,' if several else ''}"
    if lowest.step.verdict == serve_rates.TOO_FEW:
        return f"Whether a rate that was tried holds {bound} can't be said: at {place} too few requests came"
    found = f"{name} is {_format_duration(latency.value)}" if latency else f"{name} falls on requests without an answer"
    return f"No rate that was tried holds {bound}{' in every round' if once else ''}: at {place} {found}"


def _describe_waiting(served: ServingRun) -> Iterator[str]:
    there = served.there
    if there is None:
        return
    queued, computed = there.queued, there.computed
    yield (
        f"There a request waits {_format_duration(queued)} and is computed in {_format_duration(computed)} on average: "
        f"{show(queued / (queued + computed), 'percentage')} of its time it waits; a batch has "
        f"{significant(there.mean_batch)} requests."
    )
    found = there.percentile(served.bounded)
    if found and np.isfinite(found.high) and found.high > there.facts.bound_s:
        name = _name_percentile(served.bounded)
        yield f"The interval of that {name} reaches beyond the bound; a longer --duration narrows it."


def _describe_unstable(served: ServingRun) -> Iterator[str]:
    grown = [t for t in served.tried if t.step.unstable]
    if grown:
        lowest = min(grown, key=lambda t: t.step.rate)
        yield (
            f"At {_format_rate(lowest.step.rate)} more requests come than are "
            f"answered ({_format_rate(lowest.served)}): {lowest.backlog:,} waited at the end, "
            "and latency grows for as long as it lasts."
        )
    if refused := sum(t.refused for t in served.tried):
        facts = served.facts[0]
        why = ["found the queue full"] * bool(facts.queue) + ["got no answer of the server"] * bool(facts.endpoint)
        yield f"{counting(refused, 'request')} {' or '.join(why)} and count as beyond every bound."


def _describe_short(served: ServingRun) -> Iterator[str]:
    short = [t for t in served.tried if t.count < stats.samples_for(served.facts[0].percentile)]
    if short:
        fewest = min(short, key=lambda t: t.count)
        yield f"{_too_short(fewest, served)}."


def _too_short(tried: RateMeasurement, served: ServingRun) -> str:
    least = stats.samples_for(served.facts[0].percentile)
    return (
        f"{_format_rate(tried.step.rate)} came for too short a time: {counting(tried.count, 'request')}, and "
        f"{_name_percentile(served.bounded)} needs {least:,}, so "
        + (f"at least {least / tried.step.rate:,.0f} s; omit --duration" if not tried.facts.trace else "a longer trace")
    )


def _format_duration(value: float) -> str:
    return show(value, "duration")


def _format_rate(value: float) -> str:
    return f"{significant(value)} requests/s"
