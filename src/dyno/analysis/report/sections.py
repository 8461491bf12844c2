"""The parts of a report as plain data: what the template prints, computed from stored records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.analysis import stats
from dyno.analysis.formatting import UNBOUNDED, bounded, points, short, show, significant
from dyno.analysis.metrics import accuracy, agreement
from dyno.analysis.metrics.precision import truth
from dyno.analysis.ranking.frontier import SATURATED, saturation
from dyno.analysis.ranking.references import references
from dyno.analysis.records import gpu_remarks
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.records.rounds import GPU, HOST, LATENCIES, Round
from dyno.analysis.records.timeline import Summary
from dyno.analysis.tables.cells import Cell, Table, number, text
from dyno.analysis.tables.render import PRINTED, Column, grouped, notes
from dyno.analysis.tables.trial_table import build_seconds

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 60  # characters of the name of a layer, which names all nodes that it was fused from
MOST_DETAILS = 300  # trials with a section of their own, and pairs whose raw outputs are compared
STOPPED = {"interval": "narrow enough", "seconds": "time was up", "samples": "enough samples"}


def results_tables(
    frame: pd.DataFrame, by: str | None = None, printed: Sequence[Column] = PRINTED, heading: str = ""
) -> list[Table]:
    """The tables of `render`, for the page."""
    found = []
    for title, columns, rows in grouped(frame, by, printed):
        title = f"{heading}: {title}" if heading else title
        cells = [[Cell(c.cell(r), _key(r, c.sort), c.right) for c in columns] for r in rows]
        found.append(Table(title, [c.title for c in columns], cells, notes(rows)))
    return found


def _key(row: dict[str, Any], column: str) -> str:
    value = str(row[column])
    return "" if value in ("nan", "<NA>", "None") else value


def method(results: Results) -> list[tuple[str, str]]:
    """How the numbers were made, as terms and sentences."""
    trials = results.trials
    plans = [t.spec.get("plan") or {} for t in trials]
    threads = _each(t.spec.get("runtime", {}).get("threads") for t in trials)
    data = [d for t in trials if (d := t.facts.get("data"))] or [t.spec.get("data") or {} for t in trials]
    inputs = _each(f"{d.get('name')} ({d.get('split', '')}, {d.get('count', 0)} images)" for d in data)
    return [
        ("latency, model", "inputs already where the engine reads them, outputs left there; one batch at a time"),
        ("latency, all", "from host memory to host memory, copies included; one batch at a time"),
        *_gpu_method(trials),
        ("throughput", "batches queued so that copies and computing overlap, as far as the engine can"),
        ("rounds", f"{_each(p.get('rounds') for p in plans)}, each in a fresh process, in shuffled, interleaved order"),
        ("warm-up", f"until the median is steady, {_each(p.get('warmup_s') for p in plans)} s at most"),
        ("sampling ends", _stopping(plans, trials)),
        ("threads", f"{threads} for every backend, pinned to the same cores"),
        ("inputs", inputs),
        ("“faster”", "Welch's t interval of the log medians of the rounds, so the spread between processes decides"),
        (
            "accuracy",
            "Wilson's interval for one trial, Tango's score interval for the paired difference to the reference",
        ),
        ("trimmed mean", "without the fastest and the slowest 10 % of the samples"),
    ]


def _gpu_method(trials: list[TrialResult]) -> list[tuple[str, str]]:
    if all(t.device == "cpu" for t in trials):
        return []
    return [
        (
            "GPU’s clock",
            "latency, model is by CUDA events on the engine's own stream, from its first kernel to its last, gaps "
            "included; by the host's clock where a group has an engine without them; latency, all is the host's",
        ),
        (
            "GPU telemetry",
            "by NVML from outside the job, ten times a second; memory is the peak less what was used before the job; "
            "samples taken while the card was too hot or its supply gave out are dropped and counted",
        ),
    ]


def _stopping(plans: list[dict[str, Any]], trials: list[TrialResult]) -> str:
    ended = Counter(
        STOPPED.get(m["stopped"], m["stopped"])
        for t in trials for r in t.good for m in r.raw.get("measurements") or () if m.get("stopped")
    )  # fmt: skip
    counts = ", ".join(f"{n} × {why}" for why, n in ended.most_common())
    interval = _each(f"{100 * p['interval']:g} %" for p in plans if "interval" in p)
    limit = f"when the median is known to ±{interval} or after {_each(p.get('seconds') for p in plans)} s per boundary"
    if plans and all(p.get("min_samples") == p.get("max_samples") for p in plans):
        limit = f"after {_each(p.get('max_samples') for p in plans)} samples of each boundary, as was asked for"
    return limit + (f"; seen: {counts}" if counts else "")


def _each(values: Iterable[Any]) -> str:
    """The different values, in order, as one phrase."""
    return ", ".join(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values if v is not None))


def machine(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment as terms and values; nested tables become one row each."""
    return [(key.removesuffix("_bytes").replace("_", " "), _value(key, v)) for key, v in environment.items() if v]


def _value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_value(k, v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(v) for v in value)
    return show(float(value), "bytes") if key.endswith("_bytes") else str(value)


def saturation_table(frame: pd.DataFrame) -> Table | None:
    """Where throughput saturates with the batch, and the best batch (R37), for each way of running a model."""
    rows = [
        [
            text(f"{s.model} {s.way}"), number(float(s.size.split("x")[0]), s.size),
            number(s.batch, f"batch {s.batch}" if s.batch < s.largest else f"still rising at {s.largest}"),
            number(s.images_per_s), number(s.best_batch, str(s.best_batch)), number(s.best_images_per_s),
        ]
        for s in saturation(frame)
    ]  # fmt: skip
    head = ["trial", "size", f"{100 * SATURATED:.0f} % of the best at", "images/s there", "best batch", "best images/s"]
    return Table("Where throughput saturates", head, rows) if rows else None


def accuracy_table(results: Results, frame: pd.DataFrame) -> Table | None:
    """Top-1 and top-5 with intervals, what was gained and lost against the reference, and the budget decision."""
    rows, chosen = [], {t.id: t for t in results}
    for _, r in frame[frame["top1"].notna()].iterrows():
        t, reference = chosen[r["trial"]], chosen.get(r["reference"])
        pair = accuracy.paired(t, reference) if reference is not None and reference is not t else None
        rows.append([text(t.label), number(float(r["images"]), f"{r['images']:,}"), *_shares(r), *_change(r, pair)])
    head = ["trial", "images", "top-1 %", "95 % interval", "top-5 %", "gained", "lost", "change, points",
            "95 % interval", "budget", "images to settle"]  # fmt: skip
    return Table("Accuracy", head, rows) if rows else None


def _shares(r: pd.Series) -> list[Cell]:
    interval = Cell(f"{r['top1_low']:.2f} to {r['top1_high']:.2f}", repr(r["top1_low"]), True)
    return [number(r["top1"], f"{r['top1']:.2f}"), interval, number(r["top5"], f"{r['top5']:.2f}")]


def _change(r: pd.Series, pair: accuracy.Paired | None) -> list[Cell]:
    if pair is None:
        return [Cell("", "", True)] * 4 + [text(r["budget"]), Cell("", "", True)]
    d = pair.difference
    more = (
        Cell("", "", True)
        if str(r["more_images"]) == "<NA>"
        else number(float(r["more_images"]), f"{r['more_images']:,}")
    )
    spread = Cell(f"{points(d.low)} to {points(d.high)}", repr(d.low), True)
    counts = [number(pair.gained, str(pair.gained)), number(pair.lost, str(pair.lost))]
    return [*counts, number(d.value, points(d.value)), spread, text(r["budget"]), more]


def agreement_tables(results: Results) -> list[Table]:
    """Outputs against the reference's: isclose share and errors (R7, R23), and the ranks' table (R8)."""
    chosen = references(results, results.settings.get("reference"))
    values: list[list[Cell]] = []
    ranks: list[list[Cell]] = []
    for t in results.trials:
        other = chosen.get(t.id)
        if other is None or other is t or not t.good or len(values) >= MOST_DETAILS:
            continue
        if found := agreement.of(t, other):
            values.append([text(t.label), text(other.way), *_agreement_cells(found)])
        if rows := agreement.ranks(t.answers, other.answers):
            cells = [number(r.disagreement, f"{significant(r.mae, 2)} / {100 * r.disagreement:.2f} %") for r in rows]
            ranks.append([text(t.label), *cells])
    close = f"close, % (rtol {agreement.RTOL:g}, atol {agreement.ATOL:g})"
    head = ["trial", "against", "values", close, "max abs", "mean abs", "max rel", "not finite"]
    tables = [Table("Outputs against the reference", head, values)] if values else []
    if ranks:
        longest = max(map(len, ranks)) - 1
        padded = [row + [Cell("")] * (longest + 1 - len(row)) for row in ranks]
        title = "Ranks: mean absolute error of the score / inputs whose class at that rank differs"
        tables.append(Table(title, ["trial", *(f"rank {i + 1}" for i in range(longest))], padded))
    return tables


def _agreement_cells(a: agreement.Agreement) -> list[Cell]:
    errors = [number(v) for v in (a.max_abs, a.mean_abs, a.max_rel)]
    close = number(100 * a.close, f"{100 * a.close:.2f}")
    return [number(a.count, f"{a.count:,}"), close, *errors, number(a.nonfinite, str(a.nonfinite))]


def complaints(results: Results) -> list[tuple[str, str, str]]:
    """Failures first, then warnings: kind, trial, and one line."""
    bad = [(t.status, t.label, t.reason) for t in results if t.status != "ok"]
    warned = [("warning", t.label, " ".join(w.split())) for t in results for w in t.warnings()]
    return [*(("unreadable", "", p) for p in results.problems), *bad, *warned]


@dataclass(frozen=True)
class Detail:
    """One trial's own section: facts as terms and values, and a table of its rounds."""

    label: str
    id: str
    status: str
    facts: list[tuple[str, str]]
    rounds: Table


def details(results: Results) -> list[Detail]:
    """A section per trial, at most MOST_DETAILS."""
    return [Detail(t.label, t.id, t.status, list(_facts(t)), _rounds(t)) for t in results.trials[:MOST_DETAILS]]


def _facts(t: TrialResult) -> Iterator[tuple[str, str]]:
    if t.reason:
        yield "reason", t.reason
    found = truth(t)
    known: list[tuple[str, Any]] = [
        ("options", t.facts.get("options") or t.options),
        ("layers by type", str(found) if found else ""),
        ("precision", found.sentence if found else ""),
        ("nodes by provider", t.facts.get("nodes_by_provider")),
        ("threads", t.facts.get("threads")),
        ("slowest layers", _slowest(t)),
        ("notes", "; ".join(t.notes())),
        ("GPU meanwhile", _gpu_words(t)),
        ("made by", _steps(t)),
        ("ready after", show(build_seconds(t), "duration")),
        ("load", show(t.value("load"), "duration")),
        ("first call", show(t.value("first_call"), "duration")),
        ("peak memory", show(t.value("peak_memory"), "bytes")),
        ("weights sha256", str(t.facts.get("weights_sha256") or "")[:16]),
        ("inputs sha256", str(t.facts.get("inputs_sha256") or "")[:16]),
    ]
    yield from ((name, _value("", value)) for name, value in known if value)


def _steps(t: TrialResult) -> str:
    steps = (t.artifact.get("made_by") or {}).get("steps") or ()
    return " → ".join(
        f"{s.get('maker')}: {s.get('format')} {s.get('precision')} in {show(s.get('seconds'), 'duration')}"
        f" ({show(s.get('bytes'), 'bytes')})"
        for s in steps
    )


def _slowest(t: TrialResult) -> str:
    return "; ".join(
        f"{layer['share']:.0%} {short(layer['name'], LONGEST)} ({layer['operator']}, {layer['dtype']})"
        for layer in t.facts.get("slowest_layers") or ()
    )


def gpu_table(results: Results) -> Table | None:
    """What each trial did to its GPU, and what of its time lay outside the GPU's work."""
    rows = [_gpu_row(t, t.gpu) for t in results if t.gpu is not None]
    head = ["trial", "memory, MB", "SM utilisation, %", "SM clock, MHz", "lowest", "power, W", "hottest, °C",
            "clock limited by", "throttled samples", "others", "outside GPU, ms"]  # fmt: skip
    note = "While timing, but memory and temperature of the whole job. Memory is the peak less what was used before."
    return Table("GPU", head, rows, [note]) if rows else None


def _gpu_row(t: TrialResult, found: Summary) -> list[Cell]:
    hit = sum(each.hit for each in gpu_remarks.throttled(t))
    launch = gpu_remarks.launch(t)
    plain = [1e-6 * found.memory, found.utilisation, found.clock, found.clock_min, found.power, found.temperature]
    return [text(t.label), *(number(value, show(value, "count")) for value in plain), text(found.throttle),
            number(hit, f"{hit:,}"), number(found.others, str(found.others)),
            number(1e3 * launch.outside if launch else None)]  # fmt: skip


def _gpu_words(t: TrialResult) -> str:
    if t.gpu is None:
        return ""
    known = [(f"{show(t.gpu.memory, 'bytes')} of memory", t.gpu.memory), (f"busy for {t.gpu.utilisation:.0f} % of "
             "the timing", t.gpu.utilisation), (f"{t.gpu.clock:,.0f} MHz", t.gpu.clock),
             (f"{t.gpu.power:.0f} W", t.gpu.power), (f"{t.gpu.temperature:.0f} °C", t.gpu.temperature)]  # fmt: skip
    words = [each for each, value in known if value == value]
    return ", ".join([*words, *([f"clock limited by {t.gpu.throttle}"] if t.gpu.throttle else [])])


def _rounds(t: TrialResult) -> Table:
    rows = [
        [number(r.number, str(r.number)), text(r.status), text(boundary), text(clock), *_sampling(r, boundary, clock)]
        for r in t.rounds for boundary in LATENCIES for clock in (GPU, HOST)
        if r.measurement("latency", boundary, clock)
    ]  # fmt: skip
    head = [
        "round",
        "status",
        "boundary",
        "clock",
        "samples",
        "median",
        "95 % interval",
        "mean",
        "p99",
        "max",
        "ended because",
    ]
    return Table("", head, rows)


def _sampling(r: Round, boundary: str, clock: str) -> list[Cell]:
    samples = r.samples("latency", boundary, clock)
    stopped = str(r.measurement("latency", boundary, clock).get("stopped") or "")
    if not samples.size:
        return [Cell("", "", True)] * 6 + [text(STOPPED.get(stopped, stopped))]
    s, interval = stats.summary(samples), stats.median_interval(samples)
    spread = f"{show(interval.low, 'duration')} to {show(interval.high, 'duration')}"
    if interval.low == interval.low and not bounded(interval.low, interval.high):
        spread = UNBOUNDED
    times = [number(v, show(v, "duration")) for v in (s.mean, s.p99, s.max)]
    median = number(s.median, show(s.median, "duration", 4))
    return [number(s.count, f"{s.count:,}"), median, Cell(spread, repr(interval.low), True), *times,
            text(STOPPED.get(stopped, stopped))]  # fmt: skip
