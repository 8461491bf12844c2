"""Parts of a report as plain data for the template, computed only from stored records."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.formatting import format_count, format_moment, shorten_text, show
from dyno.report import self_test
from dyno.report.export import page_part
from dyno.report.tables.gpu_table import ROUND_COLUMNS, ROUNDS, STOP_REASONS, list_doubts, rounds_of
from dyno.report.tables.trial_table import build_seconds
from dyno.report.verdict.verdict import read_start
from dyno.results import remarks
from dyno.results.metrics.precision import read_truth
from dyno.results.run_data import RunData
from dyno.results.stats import IN_TURNS, ONE_AFTER_ANOTHER, Rule
from dyno.results.trial_result import Results, TrialResult
from dyno.worker.facts.job import AnsweredImages
from dyno.worker.spec import DataSpec, Plan

NUMBERS = re.compile(r"\d+([.,]\d+)*")
MAX_LAYER_NAME_LENGTH = 60  # characters of a layer's name; fused layers join the names of all their nodes
MAX_DETAILS = 300  # trials with their own section


def describe_machine(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the environment as terms and values; each nested table becomes one row."""
    return [
        (key.removesuffix("_bytes").replace("_", " "), _format_value(key, v)) for key, v in environment.items() if v
    ]


def _format_value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format_value(k, v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(v) for v in value)
    return show(float(value), "bytes") if key.endswith("_bytes") else str(value)


def about_run(results: Results) -> list[str]:
    """Return date, hardware, Dyno version and number of trials; "" for unknown facts."""
    environment = results.environment
    cores = environment.get("cores")
    return [
        format_moment(read_start(results)),
        str(environment.get("cpu") or ""),
        format_count(int(cores), "core") if cores else "",
        str(environment.get("gpu") or ""),
        f"Dyno {version}" if (version := (environment.get("versions") or {}).get("inference-dyno")) else "",
        format_count(len(results.trials), "trial"),
    ]


@dataclass(frozen=True)
class ExplanationSection:
    """One explained pair: both names, with chart, tables, sentences and graphs as HTML, or why it can't be read."""

    title: str
    html: Any
    problem: str = ""


@dataclass(frozen=True)
class Complaint:
    """A problem of one or several trials: kind, trial labels, and one line."""

    kind: str
    trials: list[str]
    text: str


def list_complaints(results: Results) -> list[Complaint]:
    """Return unreadable files, failures and warnings, grouped by cause, most frequent warnings first.

    Texts that differ only in numbers are one cause, shown with the first one's numbers.
    """
    failures = [(t.status, t.label, t.reason) for t in results if t.status != "ok"]
    warnings = [("warning", t.label, " ".join(w.split())) for t in results for w in remarks.list_warnings(t)]
    by_cause: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for kind, label, text in (*(("unreadable", "", p) for p in results.problems), *failures, *warnings):
        by_cause.setdefault((kind, NUMBERS.sub("#", text)), []).append((label, text))
    causes = [_make_complaint(kind, group) for (kind, _), group in by_cause.items()]
    return sorted(causes, key=lambda each: (each.kind == "warning", -len(each.trials) * (each.kind == "warning")))


def _make_complaint(kind: str, group: list[tuple[str, str]]) -> Complaint:
    labels = list(dict.fromkeys(label for label, _ in group))
    suffix = "; other trials in other numbers" if len({text for _, text in group}) > 1 else ""
    return Complaint(kind, [label for label in labels if label], group[0][1] + suffix)


@dataclass(frozen=True)
class Detail:
    """Section of one trial: its folder relative to the page, facts as terms and values, and an HTML table of rounds."""

    label: str
    id: str
    status: str
    folder: str
    facts: list[tuple[str, str]]
    rounds: Any


def list_details(results: Results, page: Path) -> list[Detail]:
    """Return a section per trial, at most MAX_DETAILS; links are relative to the page's folder, `page`."""
    from markupsafe import Markup

    trial_details = []
    for t in results.trials[:MAX_DETAILS]:
        table = ROUNDS.build(
            [c for c in ROUND_COLUMNS if c.name not in ("label", "trial")], rounds_of(t), below=list_doubts
        )
        parts = [Markup(page_part(table, part, heading="")) for part in table.parts()]
        trial_folder = t.rounds[0].folder.parent if t.rounds else results.folder / "trials" / t.id
        folder = Path(os.path.relpath(trial_folder, page)).as_posix()
        trial_details.append(Detail(t.label, t.id, t.status, folder, list(_list_facts(t)), Markup("").join(parts)))
    return trial_details


def _list_facts(trial: TrialResult) -> Iterator[tuple[str, str]]:
    if trial.reason:
        yield "reason", trial.reason
    types = read_truth(trial)
    facts: list[tuple[str, Any]] = [
        ("options", trial.facts.options or trial.options),
        ("layers by type", str(types) if types else ""),
        ("precision", types.sentence if types else ""),
        ("nodes by provider", trial.facts.nodes_by_provider),
        ("threads", trial.facts.threads),
        ("slowest layers", _format_slowest(trial)),
        ("notes", "; ".join(remarks.list_notes(trial))),
        ("GPU meanwhile", _describe_gpu(trial)),
        ("made by", _format_steps(trial)),
        ("ready after", show(build_seconds(trial), "duration")),
        ("import", show(trial.value("import"), "duration")),
        ("load", show(trial.value("load"), "duration")),
        ("first call", show(trial.value("first_call"), "duration")),
        ("peak memory", show(trial.value("peak_memory"), "bytes")),
        ("weights sha256", trial.facts.weights_sha256[:16]),
        ("inputs sha256", trial.facts.inputs_sha256[:16]),
    ]
    yield from ((name, _format_value("", value)) for name, value in facts if value)


def _format_steps(t: TrialResult) -> str:
    return " → ".join(
        f"{s.maker}: {s.format} {s.precision} in {show(s.seconds, 'duration')} ({show(s.bytes, 'bytes')})"
        for s in t.made_by.steps
    )


def _format_slowest(t: TrialResult) -> str:
    return "; ".join(
        f"{layer.share:.0%} {shorten_text(layer.name, MAX_LAYER_NAME_LENGTH)} ({layer.operator}, {layer.dtype})"
        for layer in t.facts.slowest_layers
    )


def _describe_gpu(t: TrialResult) -> str:
    if t.gpu is None:
        return ""
    values = [(f"{show(t.gpu.memory, 'bytes')} of memory", t.gpu.memory), (f"busy for {t.gpu.utilisation:.0f} % of "
             "the timing", t.gpu.utilisation), (f"{t.gpu.clock:,.0f} MHz", t.gpu.clock),
             (f"{t.gpu.power:.0f} W", t.gpu.power), (f"{t.gpu.temperature:.0f} °C", t.gpu.temperature)]  # fmt: skip
    parts = [text for text, value in values if value == value]
    return ", ".join([*parts, *([f"clock limited by {t.gpu.throttle}"] if t.gpu.throttle else [])])


# Method of a run: how it was measured and decided, and what its latencies stand for.

INTERVALS = {
    IN_TURNS: "Student's t interval of the rounds' log ratios, paired, each the median over blocks",
    ONE_AFTER_ANOTHER: "Welch's t interval of the log medians of the rounds, so the spread between processes decides",
}
Terms = list[tuple[str, str]]


def list_terms(run: RunData) -> Terms:
    """Return terms and sentences: the decisions first, then measured quantities and the method."""
    results = run.records
    trials = results.trials
    plans = [t.spec.plan for t in trials]
    return [
        *_explain_decision(run, plans),
        ("level: a latency is of", _explain_level(results, plans)),
        ("latency, model", "inputs already where the engine reads them, outputs left there; one batch at a time"),
        ("latency, all", "from host memory to host memory, copies included; one batch at a time"),
        *_gpu_method(trials),
        ("throughput", "batches queued so that copies and computing overlap, as far as the engine can"),
        ("warm-up", f"until the median is steady, {_join_distinct(p.warmup_s for p in plans)} s at most"),
        ("sampling ends", _explain_stopping(plans, trials)),
        ("inputs", _format_inputs(trials)),
        (
            "accuracy",
            "Wilson's interval for one trial, Tango's score interval for the paired difference to the reference",
        ),
        ("visible differences", self_test.of_run(results) or self_test.SELF_TEST_HINT),
        ("trimmed mean", "without the fastest and the slowest 10 % of the samples"),
    ]


def _explain_decision(run: RunData, plans: Sequence[Plan]) -> Terms:
    """Explain the verdicts on speed: pairs, interval, margin, family, and looks."""
    rows = run.frame[run.frame["measured"] != ""]
    judged_rows = rows[rows["p_value"].notna()]
    pairs = Counter(rows["measured"])
    rounds = int(run.frame["rounds"].max()) if len(run.frame) else 0
    return [
        ("rounds", f"{rounds}, each in a fresh process, in shuffled order"),
        *_of_builds(run),
        *([("reference", _join_distinct(t.configuration for t in run.references.values()))] if pairs else []),
        ("compared", _explain_pairs(pairs, _join_distinct(p.block_s for p in plans if p.blocks))),
        *([("interval", "; ".join(_explain_interval(order, pairs) for order in pairs))] if len(judged_rows) else []),
        ("equivalent", f"the whole interval is within ±{100 * run.rule.margin:g} %"),
        ("family", _explain_family(judged_rows.groupby("reference").size().max() if len(judged_rows) else 0)),
        ("looks", _explain_looks(run.rule, rounds)),
    ]


def _of_builds(run: RunData) -> Terms:
    """Return a term on the builds of engines tuned by timing; empty without such engines."""
    builds = int(run.frame["builds"].fillna(0).max()) if len(run.frame) else 0
    if builds < 2:
        return [("builds", "one of each engine tuned by timing: another build may differ")] * builds
    return [("builds", f"{builds} of each engine tuned by timing; a build is one observation, the mean of its rounds")]


def _explain_pairs(pairs: Counter[str], block: str) -> str:
    turns_count, apart_count = pairs[IN_TURNS], pairs[ONE_AFTER_ANOTHER]
    method = f"in turns: alive together, one runs a block of {block} s while the others are frozen"
    method += ", so each works a part of the time"
    if not pairs:
        return "nothing: no two trials here have a speed-up"
    if not turns_count:
        return "one after the other, so changes of the machine between two of them are in their ratio"
    return f"{method}; {format_count(apart_count, 'pair')} one after the other" if apart_count else method


def _explain_interval(order: str, pairs: Counter[str]) -> str:
    return f"of pairs {order}, {INTERVALS[order]}" if len(pairs) > 1 else INTERVALS[order]


def _explain_family(max_rows: int) -> str:
    exception = "winner and runner-up, and confirmations, are judged each at 5 %"
    if max_rows < 2:
        return f"one row at most is judged against a reference, so there is nothing to correct for; {exception}"
    return (
        f"up to {max_rows} rows against one reference are judged together (Holm): the chance that any pair of equal "
        f"speeds is called faster or slower is at most 5 %; {exception}"
    )


def _explain_looks(rule: Rule, rounds: int) -> str:
    if not rule.first:
        return "one, after the last round: the number of rounds was fixed beforehand"
    looks = max(1, rounds - rule.first + 1)
    return (
        f"until decided: {looks}, after round {rule.first} and each further one; the looks share the chance of an "
        f"error, so frequent looks don't turn noise into a difference"
    )


def _explain_level(results: Results, plans: Sequence[Plan]) -> str:
    """Describe the configuration that a latency stands for."""
    trials = results.trials
    threads = _join_distinct(t.spec.runtime.threads for t in trials)
    devices = _join_distinct(t.device for t in trials)
    context = "alone from start to end"
    if any(plan.blocks for plan in plans):
        context = "in blocks after those of other processes, which fill the caches: a loop alone may be faster"
    return (
        f"a row's backend, options, precision, batch and size on {devices} of this machine as it was, with {threads} "
        f"threads pinned to the same cores for all, warm, one process running at a time, {context}; a speed-up is of "
        "two rows of one model, size, batch and device"
    )


def _format_inputs(trials: list[TrialResult]) -> str:
    answered_data = [t.facts.data for t in trials if t.facts.data]
    data: Sequence[AnsweredImages | DataSpec] = answered_data or [t.spec.data for t in trials]
    return _join_distinct(f"{d.name} ({d.split}, {format_count(d.count, 'image')})" for d in data)


def _gpu_method(trials: list[TrialResult]) -> Terms:
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
            "by NVML from outside the job, ten times a second; memory is the peak above the level before the job; "
            "samples taken while the GPU was throttled by heat or power are dropped and counted",
        ),
    ]


def _explain_stopping(plans: Sequence[Plan], trials: list[TrialResult]) -> str:
    reason_counts = Counter(
        STOP_REASONS.get(m.stopped, m.stopped)
        for t in trials for r in t.good for m in r.record.measurements if m.stopped
    )  # fmt: skip
    counts = ", ".join(f"{n} × {reason}" for reason, n in reason_counts.most_common())
    interval = _join_distinct(f"{100 * p.interval:g} %" for p in plans)
    seconds = _join_distinct(p.seconds for p in plans)
    limit = f"when the median is known to ±{interval} or after {seconds} s per boundary"
    if plans and all(p.min_samples == p.max_samples for p in plans):
        limit = f"after {_join_distinct(p.max_samples for p in plans)} samples of each boundary, as requested"
    if plans and all(p.blocks for p in plans):
        limit = f"after {_join_distinct(p.blocks for p in plans)} blocks per boundary, the same number for all"
    return limit + (f"; seen: {counts}" if counts else "")


def _join_distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values if v is not None))
