"""The tidy table that everything else reads: a row per trial, plain numbers, empty where a column doesn't apply."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis import metrics, stats
from dyno.analysis.formatting import WIDEST, images_tested
from dyno.analysis.metrics import accuracy, speedups, work
from dyno.analysis.metrics.metric import in_percent
from dyno.analysis.metrics.precision import truth
from dyno.analysis.presentation.table import COUNT, TEXT, Row, Table, missing
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.ranking import correctness
from dyno.analysis.ranking.correctness import AGREE, WRONG, Correctness
from dyno.analysis.ranking.references import (
    INCOMPARABLE,
    OTHER_WEIGHTS,
    accuracy_references,
    compared_with,
    incomparable,
    references,
)
from dyno.analysis.records import gpu_remarks, remarks
from dyno.analysis.records.results import Results, TrialResult, by_build, clock_of, load
from dyno.analysis.records.rounds import LATENCIES, Round
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables.trial_columns import COLUMNS, FEW, LIMITS, PERCENTILES, PRINTED, STAGES, STATISTICS, few
from dyno.analysis.telemetry.energy import Meter
from dyno.worker.facts.engine import STORED
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

REFERENCE = "reference"
WHOLE = tuple(c.name for c in COLUMNS if c.kind == COUNT)
TEXTS = tuple(c.name for c in COLUMNS if c.kind == TEXT)


@dataclass(frozen=True)
class ComparisonBasis:
    """What a row is compared with: the reference trial (None: there is none), the accuracy budgets, if any, the clock
    of each boundary that all trials it competes with have (missing: the trial's own), the trial that its
    accuracy is compared with where that isn't the reference, and whether its outputs are the reference's."""

    reference: TrialResult | None
    budgets: tuple[accuracy.Budget, ...] = ()
    clocks: Mapping[str, str] = field(default_factory=dict)
    accuracy_reference: TrialResult | None = None
    outputs: Correctness | None = None


def read(
    results: Results | Path,
    reference: str | None = None,
    budget: Mapping[str, float] | None = None,
    equivalent: float | None = None,
) -> RunData:
    """Read a run folder, or take one already read, with its table: one row per trial, those of `trial_columns`.

    Times are in ms where the name says so (a latency is per batch, over the good rounds as in `stats.over_rounds`),
    accuracies and their changes in percent and percentage points, sizes in MB (1e6 bytes). `reference` as in
    `references.references`, `budget` as in `accuracy.budgets`; speeds that differ by up to `equivalent` percent count
    as equivalent. The default of each is the study's own. `latency_ms` with its limits is the latency over processes
    that `speedup` compares, at the `boundary` and by the `clock` named. UserError for an invalid reference or budget.
    """
    import pandas as pd

    results = results if isinstance(results, Results) else load(results)
    limits = accuracy.budgets(budget or results.settings.get("budget") or {})
    chosen = references(results, reference or results.settings.get("reference"))
    measures = accuracy_references(results, chosen)
    groups: dict[Any, list[TrialResult]] = defaultdict(list)
    for t in results.trials:
        groups[t.group].append(t)
    clocks = {group: {b: clock_of(b, *trials) for b in LATENCIES} for group, trials in groups.items()}
    single = {t.id for trials in groups.values() for t in trials if len(trials) == 1}  # with nothing to compare
    others = compared_with(results, chosen)
    checks = {t.id: correctness.check(t, others[t.id]) for t in results.trials if t.good and t.id in others}
    rows = [
        row(
            t,
            ComparisonBasis(chosen.get(t.id), limits, clocks[t.group], measures.get(t.id), checks.get(t.id)),
            compare=t.id not in single,
        )
        for t in results.trials
    ]
    rule = speedups.rule(results.settings, equivalent)
    _judge_families(results.trials, rows, chosen, rule)
    peaks = work.peaks(results)
    meter = Meter(results.folder)
    rows = [
        r | work.columns(t, r, results, peaks) | _read_energy(t, meter)
        for t, r in zip(results.trials, rows, strict=True)
    ]
    table = pd.DataFrame.from_records(rows, columns=[c.name for c in COLUMNS])
    kinds = dict.fromkeys(table.columns, float) | dict.fromkeys(WHOLE, "Int64") | dict.fromkeys(TEXTS, object)
    table = table.astype(kinds).copy()  # the copy defragments the frame, about which pandas warns
    if budget:
        _check_budget(limits, table)
    return RunData(results, table, limits, chosen, rule, others)


def _check_budget(limits: Sequence[accuracy.Budget], table: pd.DataFrame) -> None:
    """Refuse a budget whose metric no trial has; a study's own was checked before it ran."""
    for limit in limits:
        if table[metrics.known()[limit.metric].column].isna().all():
            raise UserError(f"no trial here was measured in {limit.metric}, which the budget {limit} is about")


def row(t: TrialResult, against: ComparisonBasis, compare: bool = True) -> dict[str, Any]:
    """Return one trial as a dict of COLUMNS; a column that doesn't apply is missing, None or NaN."""
    columns: dict[str, Any] = dict.fromkeys(TEXTS, "")
    columns |= {
        "model": t.model, "backend": t.backend, "precision": t.precision, "batch": t.batch, "size": t.size,
        "device": t.device, "status": t.status, "reason": t.reason, "trial": t.id, "runtime": t.runtime,
        "options": " ".join(f"{k}={v}" for k, v in t.options.items()), "rounds": len(t.good),
        "warnings": len(remarks.list_warnings(t)), "builds": speedups.builds(t) or None,
    }  # fmt: skip
    if t.placement:
        columns |= {"place": t.placement.place, "card": t.placement.card}
    if t.good:
        columns |= (
            _compute_latencies(t)
            | _read_values(t)
            | _compute_accuracy(t, against)
            | _compute_speed(t, against, compare)
        )
        columns |= _check_precision(t) | _read_gpu(t) | _read_evaluation(t)
        columns |= _judge_outputs(against, columns)
    return columns


def _judge_outputs(against: ComparisonBasis, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns on whether the outputs are correct; a row with wrong outputs has no speed-up.

    An accuracy within its budget on labelled images outweighs changed classes.
    """
    outputs = against.outputs
    if outputs is None:
        return {}
    accurate = (
        bool(against.budgets) and row.get("budget") == accuracy.WITHIN and not outputs.error > outputs.tolerance.limit
    )
    columns: dict[str, Any] = {
        "output_error": outputs.error,
        "answers_changed": math.nan if outputs.changed is None else 100 * outputs.changed,
        "labels_changed": 100 * outputs.labels_changed,
        "outputs": AGREE if outputs.ok or accurate else WRONG,
    }
    if columns["outputs"] == WRONG and not str(row["verdict"]).startswith(INCOMPARABLE):
        columns["verdict"] = f"{WRONG}: {outputs.reason}"
    return columns


def _check_precision(t: TrialResult) -> dict[str, Any]:
    types = truth(t)
    if types is None:
        return {}
    share = types.share if types.reported and t.precision not in STORED else None
    return {"ran_as": str(types), "asked_share": share, "precision_ok": types.answer}


def exit_code(table: pd.DataFrame, *, budget: bool = False) -> int:
    """Return the exit code of a study.

    0 good, 1 every trial with a budget is over it, 3 some trials did not finish (a skipped one was never started), gave
    wrong outputs, have no accuracy to be compared with the `budget`, or no trial ran.
    """
    if not set(table["status"]) <= {"ok", "skipped"} or "ok" not in set(table["status"]):
        return 3
    if ((table["outputs"] == WRONG) & (table["budget"] != accuracy.OVER)).any():
        return 3
    if budget and not all(table["budget"][table["status"] == "ok"]):
        return 3
    judged = [b for b, v in zip(table["budget"], table["verdict"], strict=True) if b and v != REFERENCE]
    return 1 if judged and all(b == accuracy.OVER for b in judged) else 0


def compared_boundary(t: TrialResult, reference: TrialResult | None = None) -> str:
    """Return the boundary at which a trial (and its reference) have latencies: model before all, "" without one."""
    return next((b for b in LATENCIES if t.medians(b) and (reference is None or reference.medians(b))), "")


def _compute_latencies(t: TrialResult) -> dict[str, float]:
    columns: dict[str, float] = {}
    for boundary in LATENCIES:
        if sampled := t.sampled("latency", boundary):
            rounds = [samples for _, samples in sampled]
            s = stats.over_rounds(rounds)
            columns |= {f"latency_{boundary}_ms_{name}": 1e3 * getattr(s, name) for name in STATISTICS}
            columns[f"latency_{boundary}_ms_trimmed_std"] = 1e3 * s.trimmed_std
            columns[f"samples_{boundary}"] = min(map(len, rounds))
            for name, q in PERCENTILES.items():
                interval = _compute_percentile(sampled, q)
                columns |= {f"latency_{boundary}_ms_{name}_{end}": 1e3 * getattr(interval, end) for end in LIMITS}
    return columns


def _compute_percentile(sampled: Sequence[tuple[Round, np.ndarray]], q: float) -> stats.Interval:
    """Compute a percentile over several processes with an interval as the latency has it; of a single one, its own."""
    if len(sampled) == 1:
        return stats.percentile_interval(sampled[0][1], q)
    return stats.center(by_build((r, stats.percentile_of(samples, q)) for r, samples in sampled))


def _read_values(t: TrialResult) -> dict[str, Any]:
    size = t.value("file_size")
    rate = stats.center(by_build((r, v) for r in t.good if (v := r.value("throughput", "throughput"))))
    return {
        "throughput_ips": t.value("throughput", "throughput"),
        "throughput_low": rate.low,
        "throughput_high": rate.high,
        "size_mb": _scale_value(t.artifact.bytes if size is None and t.artifact else size, 1e-6),
        "layers": t.count("layers"),
        "parameters": t.count("parameters"),
        "gpu_memory_mb": _scale_value(t.gpu.memory if t.gpu else None, 1e-6),
        "memory_mb": _scale_value(t.value("peak_memory"), 1e-6),
        "build_s": build_seconds(t),
        "route": t.made_by.onnx_route,
        "first_call_ms": _scale_value(t.value("first_call"), 1e3),
        "load_s": t.value("load"),
    }


def _read_gpu(t: TrialResult) -> dict[str, Any]:
    launch = gpu_remarks.launch(t) if t.device != "cpu" else None
    columns: dict[str, Any] = {"outside_gpu_ms": 1e3 * launch.outside} if launch else {}
    if t.gpu is None:
        return columns
    return columns | {
        "gpu_util": t.gpu.utilisation, "gpu_clock_mhz": t.gpu.clock, "gpu_power_w": t.gpu.power,
        "gpu_temperature_c": t.gpu.temperature, "throttle": t.gpu.throttle, "gpu_others": t.gpu.others,
        "throttled_samples": sum(span.hit for span in gpu_remarks.throttled(t)),
    }  # fmt: skip


def _read_energy(t: TrialResult, meter: Meter) -> dict[str, Any]:
    if not t.good:
        return {}
    found = meter.of(t)
    return {
        "energy_j": found.net.value, "energy_j_low": found.net.low, "energy_j_high": found.net.high,
        "energy_gross_j": found.gross, "idle_w": found.idle, "energy_missing": found.missing,
    }  # fmt: skip


def _read_evaluation(t: TrialResult) -> dict[str, Any]:
    """Return images per second of the whole evaluation, and the median time of an image in each stage."""
    columns: dict[str, Any] = {"pipeline_ips": t.value("pipeline")}
    for stage in STAGES:
        samples = t.samples(stage, "")
        columns[f"{stage}_ms"] = (
            1e3 * stats.summary(samples).median if samples.size else _scale_value(t.value(stage), 1e3)
        )
    return columns


def build_seconds(t: TrialResult) -> float | None:
    """Return the seconds of this trial's preparation: the whole chain of files, and compilation inside the process.

    Later rounds may hit the compiler's cache, so only rounds that compiled count, if there are any.
    """
    steps = [step.seconds for step in t.made_by.steps]
    chain = sum(steps) if steps else t.artifact.seconds if t.artifact else None
    compiled = [r for r in t.good if r.value("build") is not None]
    fresh = [r for r in compiled if not r.facts.build_cached] or compiled
    inside = max((v for r in fresh if (v := r.value("build")) is not None), default=None)
    return None if chain is None and inside is None else float(chain or 0) + float(inside or 0)


def _compute_accuracy(t: TrialResult, against: ComparisonBasis) -> dict[str, Any]:
    """Return each metric of the trial's task, its change against the reference, and the budget's decision."""
    scores = metrics.measured(t)
    if not scores:
        return {}
    columns: dict[str, Any] = {"images": scores[0][1].images, "set_aside": accuracy.set_aside(t)}
    for metric, value in scores:
        columns |= in_percent(metric.column, value.interval)
    reference = against.accuracy_reference or against.reference
    if reference is None or incomparable(t, reference) == OTHER_WEIGHTS:
        return columns
    changes = {m.name: (m, change) for m, _ in scores if (change := m.change(t, reference)) is not None}
    if not changes:
        return columns
    columns["budget_reference"] = reference.id
    if t is reference:
        same = {metric.diff: 0.0 for metric, _ in changes.values()}
        return columns | same | {"budget": accuracy.WITHIN if against.budgets else ""}
    for metric, change in changes.values():
        columns |= in_percent(metric.diff, change.difference)
    if decision := accuracy.decide_all({name: change for name, (_, change) in changes.items()}, against.budgets):
        columns |= {"budget": decision.verdict, "more_images": decision.more}
    return columns


def _compute_speed(t: TrialResult, against: ComparisonBasis, compare: bool) -> dict[str, Any]:
    reference = against.reference if compare else None
    boundary = compared_boundary(t, reference) or compared_boundary(t)
    clock = against.clocks.get(boundary) or clock_of(boundary, t)
    own = stats.center(t.medians(boundary, clock)) if boundary else None
    columns: dict[str, Any] = {"boundary": boundary, "clock": clock if boundary else ""}
    if own is None:
        return columns
    columns |= {"latency_ms": 1e3 * own.value, "latency_ms_low": 1e3 * own.low, "latency_ms_high": 1e3 * own.high}
    if reference is None or not reference.medians(boundary, clock):
        return columns
    columns["reference"] = reference.id
    if t is reference:
        return columns | {"speedup": 1.0, "verdict": REFERENCE}
    if why := incomparable(t, reference):
        return columns | {"verdict": f"{INCOMPARABLE}: {why}"}
    return columns


def _judge_families(
    trials: Sequence[TrialResult], rows: Sequence[Row], references: Mapping[str, TrialResult], rule: stats.Rule
) -> None:
    """Put speed-up and verdict into each row that may be compared with its reference.

    All rows of a reference are one family.
    """
    families: dict[str, list[tuple[Row, stats.Evidence]]] = defaultdict(list)
    for t, row in zip(trials, rows, strict=True):
        if row.get("reference") and not row["verdict"]:
            evidence = speedups.evidence(t, references[t.id], row["boundary"], row["clock"], rule)
            if evidence is not None:
                families[row["reference"]].append((row, evidence))
    latencies = {row["trial"]: row.get("latency_ms", math.nan) for row in rows}
    for family in families.values():
        for (row, _), s in zip(family, stats.decide_family([e for _, e in family], rule), strict=True):
            if not _fits_latencies(s, latencies[row["reference"]] / row["latency_ms"]):
                verdict = s.verdict if s.verdict == stats.ONE_ROUND else stats.UNDECIDED
                s = stats.Speedup(math.nan, math.nan, math.nan, verdict, s.measured)
            row |= {"speedup": s.value, "speedup_low": s.low, "speedup_high": s.high, "verdict": s.verdict,
                    "measured": s.measured, "p_value": s.p, "equivalent": 100 * rule.margin,
                    "more_rounds": s.more, "builds": s.builds or row.get("builds"),
                    "rounds_left_out": s.rejected or None, "speedup_all_rounds": s.unfiltered}  # fmt: skip


def _fits_latencies(s: stats.Speedup, ratio: float) -> bool:
    """Return whether a speed-up is within a factor of two of the ratio of the two latencies.

    One that isn't comes from blocks that other programs disturbed.
    """
    return not math.isfinite(s.value * ratio) or abs(math.log(s.value / ratio)) <= math.log(WIDEST)


def _scale_value(value: Any, factor: float) -> float:
    return math.nan if value is None else float(value) * factor


def _make_trials_table(run: RunData) -> Table:
    several = ("device",) if run.frame["device"].nunique() > 1 else ()
    rows = run.frame.to_dict("records")
    return TRIALS.of(COLUMNS, rows, group=("model", "size", "batch", *several), printed=PRINTED, below=below)


def below(rows: list[Row]) -> list[str]:
    """Return the notes below trials: images without accuracy, doubts about a percentile, and reasons of failures."""
    judged = [r for r in rows if not all(missing(r.get(m.column)) for m in metrics.known().values())]
    tested = [(r["images"], r["set_aside"]) for r in judged if not missing(r.get("set_aside")) and r["set_aside"]]
    failed = [r for r in rows if r["status"] != "ok"]
    notes = [f"accuracy is on {images_tested(*counts)}" for counts in dict.fromkeys(tested)]
    notes += [FEW] if any(few("p95", r.get("samples_model")) for r in rows) else []
    return [*notes, *(f"{r['backend']} {r['precision']} {r['status']}: {r['reason']}" for r in failed)]


TRIALS = TableKind(
    "trials",
    "Trials",
    "A row per trial: latency, throughput, speed-up over the reference, verdict, accuracy and its budget, file, build.",
    _make_trials_table,
    section="tables",
    place=1,
)
