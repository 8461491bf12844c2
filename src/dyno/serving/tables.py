"""Tables of requests: a row for each trial, and one for each rate tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dyno.formatting import format_count, format_number, show
from dyno.report.style import (
    EDGE,
    LINES,
    WIDTH,
    Chart,
    add_tooltip,
    apply_style,
    choose_color,
    choose_marker,
    make_logarithmic,
)
from dyno.report.tables import TableKind
from dyno.results import stats
from dyno.results.correctness import OUTPUTS_WRONG, name_distance
from dyno.results.run_data import RunData
from dyno.serving import figures
from dyno.serving.figures import CheckedRun, RateMeasurement, ServingRun
from dyno.table import (
    COUNT,
    LABEL_COLUMN,
    PERCENT,
    RATIO,
    TEXT,
    TRIAL_COLUMN,
    Column,
    Row,
    Table,
    compare_cells,
    duration_column,
    keep_printed,
    limit_cells,
    with_limits,
)
from dyno.video.words import describe_each
from dyno.worker.serving import rates as serve_rates
from dyno.worker.serving.options import PERCENTILES

# Sentences on the figures of requests.

OTHER_PROGRAMS_WARNING = ": other programs kept "  # start of a rate's warning


def describe_company(run: CheckedRun) -> Iterator[str]:
    """Yield a sentence on processors kept busy by other programs, over all rates and rounds; then warnings."""
    busy = [r.facts.others_busy for r in run.trial.good if OTHER_PROGRAMS_WARNING in " ".join(r.warnings)]
    if busy:
        max_busy = max(max(each.values()) for each in busy)
        rounds = format_count(len(run.trial.good), "round")
        yield f"Other programs kept up to {max_busy:.1f} processors busy meanwhile, in {len(busy)} of {rounds}."
    yield from (f"{warning}." for warning in run.warnings if OTHER_PROGRAMS_WARNING not in warning)


def list_sentences(run: ServingRun) -> list[str]:
    """Describe a trial: wrong outputs, the highest rate that holds, waiting and computing there, and failed rates.

    Rates fail if they are too high, or measured for too short a time. The last sentences are on correct outputs and on
    other programs.
    """
    parts = (_at_server, describe_wrong, _describe_highest, _describe_waiting, _describe_unstable, _describe_short,
             describe_right, describe_company)  # fmt: skip
    return [sentence for describe in parts for sentence in describe(run)]


def _at_server(run: ServingRun) -> Iterator[str]:
    if url := run.facts[0].endpoint:
        yield (f"Answered by {url}: times include the way there and back; its type and device aren't known.")


def describe_wrong(run: CheckedRun) -> Iterator[str]:
    if (outputs := run.outputs).fault:
        sentence = outputs.fault[:1].upper() + outputs.fault[1:]
        yield f"{sentence} against {outputs.against}; they are not ranked."


def describe_right(run: CheckedRun) -> Iterator[str]:
    outputs = run.outputs
    if outputs.word and not outputs.fault:
        yield f"Outputs agree with those of {outputs.against}, {name_distance(outputs.error, outputs.labels_changed)}."
    elif outputs.missing_reason:
        yield f"Outputs are compared with none: {outputs.missing_reason}."


def describe_bound(run: ServingRun) -> str:
    """Format the bound, `p99 <= 20 ms`; "" without a bound."""
    facts = run.facts[0]
    if not facts.bound_s:
        return ""
    return f"{_name_percentile(run.bounded)} <= {show(facts.bound_s, 'duration')}"


def _name_percentile(percentile: str) -> str:
    return f"p{100 * PERCENTILES[percentile]:g}"


def _describe_highest(run: ServingRun) -> Iterator[str]:
    facts = run.facts[0]
    if not facts.bound_s:
        return
    bound = describe_bound(run)
    if run.highest is None:
        yield from _explain_no_rate(run, bound)
        return
    share = run.highest.value / run.capacity.value
    note = " It is the highest of the requested rates."
    if facts.searched:
        note = f" Searched, to steps of {show(facts.resolution, 'percentage')}."
    if any(f.searched and f.highest is None for f in run.facts):
        note = " The search ended early, so a higher rate may hold."
    yield (
        f"{_format_rate(run.highest.value)} hold {bound}: {show(share, 'percentage')} of the "
        f"{_format_rate(run.capacity.value)} that full batches of {facts.most} allow.{note}"
    )


def _explain_no_rate(run: ServingRun, bound: str) -> Iterator[str]:
    facts, failed_rounds = run.facts[0], run.by_round.count(0)
    has_held = any(t.step.verdict == serve_rates.HOLDS for t in run.measurements)
    if facts.searched and has_held:
        rounds = f"{failed_rounds} of {format_count(len(run.facts), 'round')}"
        yield f"{rounds} ended without a rate that holds {bound} twice."
    else:
        yield f"{_nothing_holds(run, bound, has_held)}."
        if facts.most > 1 and 2 * facts.max_wait_s > facts.bound_s:
            yield f"A request waits up to {show(facts.max_wait_s, 'duration')} of that for others; shorten --max-wait."
    if facts.lowest and min(t.step.rate for t in run.measurements) <= 1.01 * facts.lowest:
        yield (
            f"Below {_format_rate(facts.lowest)} fewer than the {facts.least:,} requests that "
            f"{_name_percentile(run.bounded)} needs come in {show(facts.least / facts.lowest, 'duration')}, "
            "so no lower rate was tried; a longer --duration tries them."
        )


def _nothing_holds(run: ServingRun, bound: str, has_held: bool) -> str:
    """Describe that no rate holds, with the lowest rate's latency in its worst round, or that this is unknown."""
    min_rate, has_several = min(t.step.rate for t in run.measurements), len({t.step.rate for t in run.measurements}) > 1
    pairs = [(t.find_percentile(run.bounded), t) for t in run.measurements if t.step.rate == min_rate]
    latency, result = max(pairs, key=lambda pair: pair[0].value if pair[0] else np.inf)
    if all(t.step.verdict == serve_rates.TOO_FEW for t in run.measurements):
        return f"Whether {bound} holds is unknown for {'these rates' if has_several else 'this rate'}"
    name = _name_percentile(run.bounded)
    rate = f"{_format_rate(result.step.rate)}{', the lowest,' if has_several else ''}"
    if result.step.verdict == serve_rates.TOO_FEW:
        return f"Whether a rate that was tried holds {bound} is unknown: at {rate} too few requests came"
    text = f"{name} is {show(latency.value, 'duration')}" if latency else f"{name} falls on requests without an answer"
    return f"No rate that was tried holds {bound}{' in every round' if has_held else ''}: at {rate} {text}"


def _describe_waiting(run: ServingRun) -> Iterator[str]:
    result = run.at_highest
    if result is None:
        return
    queued, computed = result.queued, result.computed
    yield (
        f"There a request waits {show(queued, 'duration')} and is computed in {show(computed, 'duration')} on average: "
        f"{show(queued / (queued + computed), 'percentage')} of its time it waits; a batch has "
        f"{format_number(result.mean_batch)} requests."
    )
    interval = result.find_percentile(run.bounded)
    if interval and np.isfinite(interval.high) and interval.high > result.facts.bound_s:
        name = _name_percentile(run.bounded)
        yield f"The interval of that {name} reaches beyond the bound; a longer --duration narrows it."


def _describe_unstable(run: ServingRun) -> Iterator[str]:
    unstable_rates = [t for t in run.measurements if t.step.unstable]
    if unstable_rates:
        result = min(unstable_rates, key=lambda t: t.step.rate)
        yield (
            f"At {_format_rate(result.step.rate)} more requests come than are "
            f"answered ({_format_rate(result.served)}): {result.backlog:,} waited at the end, "
            "and latency grows for as long as it lasts."
        )
    if refused := sum(t.refused for t in run.measurements):
        facts = run.facts[0]
        reasons = ["found the queue full"] * bool(facts.queue) + ["got no answer from the server"] * bool(
            facts.endpoint
        )
        yield f"{format_count(refused, 'request')} {' or '.join(reasons)} and count as beyond every bound."


def _describe_short(run: ServingRun) -> Iterator[str]:
    minimum, result = stats.samples_for(run.facts[0].percentile), min(run.measurements, key=lambda t: t.count)
    if result.count < minimum:
        rate = result.step.rate
        advice = "a longer trace" if result.facts.trace else f"at least {minimum / rate:,.0f} s; omit --duration"
        yield (
            f"{_format_rate(rate)} came for too short a time: {format_count(result.count, 'request')}, and "
            f"{_name_percentile(run.bounded)} needs {minimum:,}, so {advice}."
        )


def _format_rate(value: float) -> str:
    return f"{format_number(value)} requests/s"


LATENCY_NOTE = (
    "Latency counts from the time at which a request was due, not from when it was sent, so neither a late request nor "
    "a late server delays later requests (no coordinated omission)."
)


def _make_serve_table(run: RunData) -> Table | None:
    runs = figures.list_served(run)
    if not runs:
        return None
    rows = [_make_row(serving_run) for serving_run in runs]
    if len(runs) > 1:
        gains = figures.list_speedups(runs, run.rule)
        bound = runs[0].facts[0].bound_s  # without a bound there is no highest rate to compare
        reference = figures.find_reference(runs) if bound else None
        rows = [
            row | ({} if serving_run.outputs.fault else compare_cells(gain, serving_run is reference))
            for row, gain, serving_run in zip(rows, gains, runs, strict=True)
        ]
    notes = [
        "highest rate: the highest that holds the bound; in a search it has held it twice, and one above that held it "
        "once doesn't count. full batches: what the engine answers when the largest batch is always full, without a "
        "bound. queue and compute: mean time until a request's batch begins, and of that batch, at the highest rate.",
        LATENCY_NOTE,
    ]
    return SERVE.build(SERVE_COLUMNS, rows, notes=tuple(notes), printed=keep_printed(SERVE_COLUMNS))


def _make_row(run: ServingRun) -> Row:
    result = run.at_highest
    outputs = run.outputs
    row: Row = {
        "label": run.trial.label, "trial": run.trial.id, "rounds": len(run.facts),
        "bound": describe_bound(run),
        "holds": "" if not run.facts[0].bound_s else "yes" if run.highest else "none",
        **limit_cells("rate", run.highest), **limit_cells("full_rate", run.capacity),
        "lanes": run.facts[0].lanes,
    }  # fmt: skip
    if outputs.word:
        row |= {"outputs": outputs.word, "output_error": outputs.error, "labels_changed": outputs.labels_changed}
    if outputs.fault:  # no other verdict
        row["verdict"] = outputs.fault
    return (
        row
        if result is None
        else row | limit_cells("latency_s", result.find_percentile(run.bounded)) | _time_cells(result)
    )


def _time_cells(result: RateMeasurement) -> Row:
    return {"mean_batch": result.mean_batch, "queue_s": result.queued, "compute_s": result.computed}


def _make_rates_table(run: RunData) -> Table | None:
    rows = [
        _rate_row(serving_run, result)
        for serving_run in figures.list_served(run)
        for result in sorted(serving_run.measurements, key=lambda t: (t.round, t.step.rate))
    ]
    if not rows:
        return None
    floors = ", ".join(f"{stats.samples_for(q):,} for p{100 * q:g}" for q in list(PERCENTILES.values())[1:])
    note = (
        f"Fewest requests for a percentile: {floors}; ten times as many for its interval. A percentile that falls on "
        "refused or unanswered requests has no value. Random requests begin with a warm-up that does not count; "
        "all requests of a trace count."
    )
    return RATES.build(
        RATE_COLUMNS, rows, group=("label",), notes=(note, LATENCY_NOTE), printed=keep_printed(RATE_COLUMNS)
    )


def _rate_row(run: ServingRun, result: RateMeasurement) -> Row:
    row: Row = {
        "label": run.trial.label, "trial": run.trial.id, "round": result.round + 1, "rate": result.step.rate,
        "served": result.served, "requests": result.count, **_time_cells(result), "refused": result.refused,
        "left": result.unanswered,
        "holds": result.step.verdict or ("unstable" if result.step.unstable else ""),
        "loadgen_s": result.step.loadgen_s or None,
    }  # fmt: skip
    for name in PERCENTILES:
        row |= limit_cells(f"{name}_s", result.find_percentile(name))
    return row


def _make_count_column(name: str, meaning: str) -> Column:
    """Return a column of a count that is hidden if 0."""
    return Column(name, meaning, kind=COUNT, cell=lambda row: f"{row[name]:,}" if row.get(name) else "", rank=2)


SERVE_COLUMNS = (
    LABEL_COLUMN,
    TRIAL_COLUMN,
    Column("rounds", "times that it was searched", kind=COUNT, rank=8),
    Column("bound", "that must hold", kind=TEXT, rank=3),
    Column("holds", "whether a rate that was tried holds it in every round", kind=TEXT, rank=2),
    *with_limits(Column("rate", "the highest that holds the bound", "requests/s", title="highest rate, requests/s")),
    *with_limits(duration_column("latency_s", "the bounded percentile there", "latency there")),
    Column("mean_batch", "requests per batch there", title="mean batch", rank=4),
    duration_column("queue_s", "mean time until a request's batch begins, there", rank=3),
    duration_column("compute_s", "mean time of a request's batch, there", rank=3),
    *with_limits(Column("full_rate", "with full batches, without a bound", "requests/s",
                        title="full batches, requests/s", rank=5)),
    Column("lanes", "batches at once", kind=COUNT, rank=7),
    Column("outputs", "agree with the reference's, or wrong outputs", kind=TEXT, rank=6),
    Column("output_error", "relative error of the outputs against the reference's", title="output error", rank=6),
    Column("labels_changed", "share of the outputs' labels (whole numbers, booleans) that differ", "%", PERCENT,
           title="labels that differ", rank=6),
    *with_limits(Column("speedup", "highest rate over the reference's", kind=RATIO, rank=1)),
    Column("verdict", "on the highest rate, against the reference", kind=TEXT, rank=1),
)  # fmt: skip
RATE_COLUMNS = (
    LABEL_COLUMN,
    TRIAL_COLUMN,
    Column("round", "of which it is", kind=COUNT, identity=True, rank=6),
    Column("rate", "that was asked for", "requests/s", title="asked, requests/s"),
    Column("served", "answers per second", "requests/s", title="served, requests/s", rank=2),
    Column("requests", "that count", kind=COUNT, rank=7),
    *(
        column
        for name, q in PERCENTILES.items()
        for column in with_limits(
            duration_column(
                f"{name}_s", "latency from when a request was due", f"p{100 * q:g}", rank=0 if q == 0.99 else 4
            )
        )
    ),
    duration_column("loadgen_s", "the bounded percentile in LoadGen's summary", "by LoadGen", rank=1),
    Column("mean_batch", "requests per batch", title="mean batch", rank=5),
    duration_column("queue_s", "mean time until a request's batch begins", rank=3),
    duration_column("compute_s", "mean time of a request's batch", rank=3),
    _make_count_column("refused", "requests that found the queue full, or got no answer from a server"),
    _make_count_column("left", "requests that were never answered"),
    Column("holds", "the bound: yes, no, unstable (more come than are answered), too few requests", kind=TEXT, rank=1),
)
SERVE = TableKind(
    "serve", "Requests", "The highest request rate within a latency bound, and where the time goes there.",
    _make_serve_table, "this run measured no requests; `dyno bench serve` does", "tables", 18,
    leads=True, sentences=lambda run: describe_each(figures.list_served(run), list_sentences),
)  # fmt: skip
RATES = TableKind(
    "serve-rates", "Rates of requests", "Each rate tried: latency, batches, queue and compute.",
    _make_rates_table, SERVE.nothing, "tables", 19, leads=True,
)  # fmt: skip


# Latency over the rate of requests: where an engine's queue begins to grow.

SERVING_HEIGHT = 3.8  # inches
MEDIAN_OPACITY = 0.35  # opacity of medians
MEDIAN_NAME = "p50"


def draw_latency_by_rate(run: RunData) -> Any:
    """Draw a line for each trial's bounded percentile and a pale one for its median; None without any.

    Each stable rate of each round is a point.
    """
    runs = [serving_run for serving_run in figures.list_served(run) if _find_points(serving_run, MEDIAN_NAME)]
    if not runs:
        return None
    with apply_style() as figure_class:
        figure = figure_class(figsize=(WIDTH, SERVING_HEIGHT), layout="constrained")
        axes = figure.subplots()
        for index, serving_run in enumerate(runs):
            kinds = [(e.trial.backend, e.trial.precision) for e in runs[: index + 1]]
            is_hollow = kinds.count(kinds[-1]) > 1  # same backend and precision as an earlier one
            if serving_run.bounded != MEDIAN_NAME:
                _draw_line(axes, serving_run, MEDIAN_NAME, MEDIAN_OPACITY, is_hollow)
            _draw_line(axes, serving_run, serving_run.bounded, 1.0, is_hollow)
        if bound := runs[0].facts[0].bound_s:
            axes.axhline(1e3 * bound, color=EDGE, linestyle="--", linewidth=1)
        axes.set(yscale="log", xlabel="requests/s", ylabel="latency, ms", xlim=(0, None))
        make_logarithmic(axes, "y", *axes.get_ylim())
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def _find_points(run: ServingRun, name: str) -> list[tuple[RateMeasurement, float]]:
    """Return the stable rates with a value of the percentile, in seconds, by ascending rate."""
    points = [(t, t.find_percentile(name)) for t in run.measurements if not t.step.unstable]
    return sorted(((t, p.value) for t, p in points if p), key=lambda pair: pair[0].step.rate)


def _draw_line(axes: Any, run: ServingRun, name: str, alpha: float, is_hollow: bool) -> None:
    points, trial = _find_points(run, name), run.trial
    style = {"color": choose_color(trial.backend), "alpha": alpha, "marker": choose_marker(trial.precision),
             "markersize": 4, "fillstyle": "none" if is_hollow else "full"}  # fmt: skip
    for round_index in sorted({t.round for t, _ in points}):
        series = [(t.step.rate, 1e3 * value) for t, value in points if t.round == round_index]
        suffix = f", {OUTPUTS_WRONG}" if run.outputs.fault else ""
        label = None if round_index else f"{trial.label}, {name}{suffix}"
        axes.plot(
            *zip(*series, strict=True), linestyle=LINES.get(trial.precision, "-"), label=label, linewidth=1.2, **style
        )
    for result, value in points:
        (point,) = axes.plot(result.step.rate, 1e3 * value, **style)
        add_tooltip(
            point, f"{trial.label}: {format_number(result.step.rate)} requests/s, {name} {show(value, 'duration')}"
        )


LATENCY_BY_RATE = Chart(
    "serve-latency",
    "Latency of requests against their rate: the bounded percentile, its median pale, the bound dashed. Rates at which "
    "the queue grew without end have no point.",
    draw_latency_by_rate,
    19,
)
