"""How a run was measured, how its verdicts were decided, and which configuration its latencies are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dyno.analysis.formatting import counting
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.self_test import words
from dyno.analysis.stats import ALONE, TURNS, Rule
from dyno.analysis.tables.gpu_table import STOPPED
from dyno.worker.facts.job import AnsweredImages

INTERVALS = {
    TURNS: "Student's t interval of the rounds' log ratios, paired, each the median over blocks",
    ALONE: "Welch's t interval of the log medians of the rounds, so the spread between processes decides",
}
Terms = list[tuple[str, str]]


def terms(run: RunData) -> Terms:
    """Return terms and sentences: first how verdicts were decided, then the quantities measured and the method."""
    results = run.records
    trials = results.trials
    plans = [t.spec.get("plan") or {} for t in trials]
    return [
        *_explain_decision(run, plans),
        ("level: a latency is of", _explain_level(results, plans)),
        ("latency, model", "inputs already where the engine reads them, outputs left there; one batch at a time"),
        ("latency, all", "from host memory to host memory, copies included; one batch at a time"),
        *_gpu_method(trials),
        ("throughput", "batches queued so that copies and computing overlap, as far as the engine can"),
        ("warm-up", f"until the median is steady, {_join_distinct(p.get('warmup_s') for p in plans)} s at most"),
        ("sampling ends", _explain_stopping(plans, trials)),
        ("inputs", _format_inputs(trials)),
        (
            "accuracy",
            "Wilson's interval for one trial, Tango's score interval for the paired difference to the reference",
        ),
        ("visible differences", words.of_run(results) or words.HINT),
        ("trimmed mean", "without the fastest and the slowest 10 % of the samples"),
    ]


def _explain_decision(run: RunData, plans: list[dict[str, Any]]) -> Terms:
    """Explain the verdicts on speed: the pairs, the interval, the margin, the family, and the looks."""
    rows = run.frame[run.frame["measured"] != ""]
    judged = rows[rows["p_value"].notna()]
    pairs = Counter(rows["measured"])
    rounds = int(run.frame["rounds"].max()) if len(run.frame) else 0
    return [
        ("rounds", f"{rounds}, each in a fresh process, in shuffled order"),
        *_of_builds(run),
        *([("reference", _join_distinct(t.configuration for t in run.references.values()))] if pairs else []),
        ("compared", _explain_pairs(pairs, _join_distinct(p["block_s"] for p in plans if p.get("blocks")))),
        *([("interval", "; ".join(_explain_interval(how, pairs) for how in pairs))] if len(judged) else []),
        ("equivalent", f"the whole interval is within ±{100 * run.rule.margin:g} %"),
        ("family", _explain_family(judged.groupby("reference").size().max() if len(judged) else 0)),
        ("looks", _explain_looks(run.rule, rounds)),
    ]


def _of_builds(run: RunData) -> Terms:
    """Return a term on the builds over the rounds of engines that are tuned by timing; empty without such engines."""
    most = int(run.frame["builds"].fillna(0).max()) if len(run.frame) else 0
    if most < 2:
        return [("builds", "one of each engine that is tuned by timing: another build may differ")] * most
    return [
        ("builds", f"{most} of each engine that is tuned by timing; a build is one observation, the mean of its rounds")
    ]


def _explain_pairs(pairs: Counter[str], block: str) -> str:
    in_turns, apart = pairs[TURNS], pairs[ALONE]
    how = f"in turns: alive together, one runs a block of {block} s while the others are frozen"
    if not pairs:
        return "nothing: no two trials here have a speed-up"
    if not in_turns:
        return "one after the other, so what the machine did between two of them is in their ratio"
    return f"{how}; {counting(apart, 'pair')} one after the other" if apart else how


def _explain_interval(how: str, pairs: Counter[str]) -> str:
    return f"of pairs {how}, {INTERVALS[how]}" if len(pairs) > 1 else INTERVALS[how]


def _explain_family(most: int) -> str:
    alone = "winner and runner-up, and confirmations, are judged each at 5 %"
    if most < 2:
        return f"one row at most is judged against a reference, so there is nothing to correct for; {alone}"
    return (
        f"up to {most} rows against one reference are judged together (Holm): the chance that any pair of equal speeds "
        f"is called faster or slower is at most 5 %; {alone}"
    )


def _explain_looks(rule: Rule, rounds: int) -> str:
    if not rule.first:
        return "one, after the last round: their number was fixed beforehand"
    looks = max(1, rounds - rule.first + 1)
    return (
        f"until decided: {looks}, after round {rule.first} and each further one; look k may spend 1 / (k (k + 1)) of "
        "the error, so looking often makes no difference out of noise"
    )


def _explain_level(results: Results, plans: list[dict[str, Any]]) -> str:
    """Describe the configuration that a latency is a claim about."""
    trials = results.trials
    threads = _join_distinct(t.spec.get("runtime", {}).get("threads") for t in trials)
    devices = _join_distinct(t.device for t in trials)
    company = "alone from start to end"
    if any(plan.get("blocks") for plan in plans):
        company = "in blocks after those of other processes, whose caches it finds: a loop alone may be faster"
    return (
        f"a row's backend, options, precision, batch and size on {devices} of this machine as it was, with {threads} "
        f"threads pinned to the same cores for all, warm, one process running at a time, {company}; a speed-up is of "
        "two rows of one model, size, batch and device"
    )


def _format_inputs(trials: list[TrialResult]) -> str:
    data_specs = [t.spec.get("data") or {} for t in trials]
    data = [d for t in trials if (d := t.facts.data)] or [
        AnsweredImages(str(d.get("name", "")), str(d.get("split", "")), int(d.get("count", 0))) for d in data_specs
    ]
    return _join_distinct(f"{d.name} ({d.split}, {d.count} images)" for d in data)


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
            "by NVML from outside the job, ten times a second; memory is the peak less what was used before the job; "
            "samples taken while the GPU was throttled by heat or power are dropped and counted",
        ),
    ]


def _explain_stopping(plans: list[dict[str, Any]], trials: list[TrialResult]) -> str:
    ended = Counter(
        STOPPED.get(m.stopped, m.stopped)
        for t in trials for r in t.good for m in r.record.measurements if m.stopped
    )  # fmt: skip
    counts = ", ".join(f"{n} × {reason}" for reason, n in ended.most_common())
    interval = _join_distinct(f"{100 * p['interval']:g} %" for p in plans if "interval" in p)
    seconds = _join_distinct(p.get("seconds") for p in plans)
    limit = f"when the median is known to ±{interval} or after {seconds} s per boundary"
    if plans and all(p.get("min_samples") == p.get("max_samples") for p in plans):
        limit = f"after {_join_distinct(p.get('max_samples') for p in plans)} samples of each boundary, as requested"
    if plans and all(p.get("blocks") for p in plans):
        limit = f"after {_join_distinct(p['blocks'] for p in plans)} blocks per boundary, the same number for all"
    return limit + (f"; seen: {counts}" if counts else "")


def _join_distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values if v is not None))
