"""The parts of a report as plain data: what the template prints, computed from stored records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dyno.analysis.formatting import short, show
from dyno.analysis.metrics.precision import truth
from dyno.analysis.presentation.export import page_part
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.self_test import words
from dyno.analysis.tables.gpu_table import ROUND_COLUMNS, ROUNDS, STOPPED, doubts, rounds_of
from dyno.analysis.tables.trial_table import build_seconds
from dyno.worker.facts.job import Answered

ONE_AFTER_ANOTHER = "Welch's t interval of the log medians of the rounds, so the spread between processes decides"
IN_TURNS = (
    "of what measured in turns, Student's t interval of the rounds' log ratios, each the median over blocks; of other "
    "pairs, Welch's of the log medians of the rounds"
)
LONGEST = 60  # characters of the name of a layer, which names all nodes that it was fused from
MOST_DETAILS = 300  # trials with a section of their own


def method(results: Results) -> list[tuple[str, str]]:
    """How the numbers were made, as terms and sentences."""
    trials = results.trials
    plans = [t.spec.get("plan") or {} for t in trials]
    threads = _distinct(t.spec.get("runtime", {}).get("threads") for t in trials)
    data_specs = [t.spec.get("data") or {} for t in trials]
    data = [d for t in trials if (d := t.facts.data)] or [
        Answered(str(d.get("name", "")), str(d.get("split", "")), int(d.get("count", 0))) for d in data_specs
    ]
    inputs = _distinct(f"{d.name} ({d.split}, {d.count} images)" for d in data)
    return [
        ("latency, model", "inputs already where the engine reads them, outputs left there; one batch at a time"),
        ("latency, all", "from host memory to host memory, copies included; one batch at a time"),
        *_gpu_method(trials),
        ("throughput", "batches queued so that copies and computing overlap, as far as the engine can"),
        (
            "rounds",
            f"{_distinct(p.get('rounds') for p in plans)}, each in a fresh process, in shuffled, interleaved order",
        ),
        ("warm-up", f"until the median is steady, {_distinct(p.get('warmup_s') for p in plans)} s at most"),
        ("sampling ends", _stopping(plans, trials)),
        ("threads", f"{threads} for every backend, pinned to the same cores"),
        ("inputs", inputs),
        ("“faster”", IN_TURNS if any(plan.get("blocks") for plan in plans) else ONE_AFTER_ANOTHER),
        (
            "accuracy",
            "Wilson's interval for one trial, Tango's score interval for the paired difference to the reference",
        ),
        ("visible differences", words.of_run(results) or words.HINT),
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
            "samples taken while the GPU was throttled by heat or power are dropped and counted",
        ),
    ]


def _stopping(plans: list[dict[str, Any]], trials: list[TrialResult]) -> str:
    ended = Counter(
        STOPPED.get(m.stopped, m.stopped)
        for t in trials for r in t.good for m in r.record.measurements if m.stopped
    )  # fmt: skip
    counts = ", ".join(f"{n} × {reason}" for reason, n in ended.most_common())
    interval = _distinct(f"{100 * p['interval']:g} %" for p in plans if "interval" in p)
    limit = (
        f"when the median is known to ±{interval} or after {_distinct(p.get('seconds') for p in plans)} s per boundary"
    )
    if plans and all(p.get("min_samples") == p.get("max_samples") for p in plans):
        limit = f"after {_distinct(p.get('max_samples') for p in plans)} samples of each boundary, as requested"
    return limit + (f"; seen: {counts}" if counts else "")


def _distinct(values: Iterable[Any]) -> str:
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


def complaints(results: Results) -> list[tuple[str, str, str]]:
    """Failures first, then warnings: kind, trial, and one line."""
    failed = [(t.status, t.label, t.reason) for t in results if t.status != "ok"]
    warnings = [("warning", t.label, " ".join(w.split())) for t in results for w in t.warnings()]
    return [*(("unreadable", "", p) for p in results.problems), *failed, *warnings]


@dataclass(frozen=True)
class Detail:
    """One trial's own section: facts as terms and values, and a table of its rounds as HTML."""

    label: str
    id: str
    status: str
    facts: list[tuple[str, str]]
    rounds: Any


def details(results: Results) -> list[Detail]:
    """A section per trial, at most MOST_DETAILS."""
    from markupsafe import Markup

    trial_details = []
    for t in results.trials[:MOST_DETAILS]:
        table = ROUNDS.of([c for c in ROUND_COLUMNS if c.name not in ("label", "trial")], rounds_of(t), below=doubts)
        parts = [Markup(page_part(table, part, heading="")) for part in table.parts()]
        trial_details.append(Detail(t.label, t.id, t.status, list(_facts(t)), Markup("").join(parts)))
    return trial_details


def _facts(t: TrialResult) -> Iterator[tuple[str, str]]:
    if t.reason:
        yield "reason", t.reason
    types = truth(t)
    facts: list[tuple[str, Any]] = [
        ("options", t.facts.options or t.options),
        ("layers by type", str(types) if types else ""),
        ("precision", types.sentence if types else ""),
        ("nodes by provider", t.facts.nodes_by_provider),
        ("threads", t.facts.threads),
        ("slowest layers", _slowest(t)),
        ("notes", "; ".join(t.notes())),
        ("GPU meanwhile", _gpu(t)),
        ("made by", _steps(t)),
        ("ready after", show(build_seconds(t), "duration")),
        ("load", show(t.value("load"), "duration")),
        ("first call", show(t.value("first_call"), "duration")),
        ("peak memory", show(t.value("peak_memory"), "bytes")),
        ("weights sha256", t.facts.weights_sha256[:16]),
        ("inputs sha256", t.facts.inputs_sha256[:16]),
    ]
    yield from ((name, _value("", value)) for name, value in facts if value)


def _steps(t: TrialResult) -> str:
    return " → ".join(
        f"{s.maker}: {s.format} {s.precision} in {show(s.seconds, 'duration')} ({show(s.bytes, 'bytes')})"
        for s in t.made_by.steps
    )


def _slowest(t: TrialResult) -> str:
    return "; ".join(
        f"{layer.share:.0%} {short(layer.name, LONGEST)} ({layer.operator}, {layer.dtype})"
        for layer in t.facts.slowest_layers
    )


def _gpu(t: TrialResult) -> str:
    if t.gpu is None:
        return ""
    values = [(f"{show(t.gpu.memory, 'bytes')} of memory", t.gpu.memory), (f"busy for {t.gpu.utilisation:.0f} % of "
             "the timing", t.gpu.utilisation), (f"{t.gpu.clock:,.0f} MHz", t.gpu.clock),
             (f"{t.gpu.power:.0f} W", t.gpu.power), (f"{t.gpu.temperature:.0f} °C", t.gpu.temperature)]  # fmt: skip
    parts = [text for text, value in values if value == value]
    return ", ".join([*parts, *([f"clock limited by {t.gpu.throttle}"] if t.gpu.throttle else [])])
