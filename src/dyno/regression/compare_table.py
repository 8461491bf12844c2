"""Comparison of two runs, trial by trial: speed, accuracy, outputs, status.

All pairs are one family: with 95 % confidence no pair of equal speeds is called faster or slower, however many pairs
there are. `tolerance` keeps small real slow-downs from failing a gate.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from dyno.formatting import clean_text, format_count
from dyno.regression.rules import (
    LESS_ACCURATE,
    SLOWER,
    STATUS,
    WRONG_OUTPUTS,
    GateRules,
    format_slowdown,
    smallest_slowdown,
)
from dyno.report.tables import TableKind, trial_table
from dyno.report.tables.trial_table import IDENTITY, pick
from dyno.results import metrics, ranking, remarks, stats
from dyno.results.blocks import find_apart_jobs, quiet_medians
from dyno.results.correctness import INCOMPARABLE, OTHER_WEIGHTS, OUTPUTS_WRONG, find_mismatch
from dyno.results.metrics import accuracy, agreement
from dyno.results.metrics.metric import Change, Metric, in_percent
from dyno.results.ranking import cpu_contention
from dyno.results.rounds import LATENCIES
from dyno.results.trial_result import Results, TrialResult, clock_of
from dyno.table import COUNT, FINE, PERCENT, POINTS, TEXT, Column, Row, Table, is_missing, with_limits
from dyno.worker.spec import UserError

TOLERATED, NO_CHANGE, LOST, GAINED = "slower, tolerated", "no change shown", "less accurate", "more accurate"
TWO_SESSIONS = "two sessions"
SAME_MEASUREMENT = "same measurement"
MISSING = "missing"  # status of a trial that is missing in B's run
VOLATILE_FACTS = ("load_average",)  # facts that change within minutes on one machine
MACHINE_FACTS = ("cpu", "cpu_flags", "cores", "machine", "gpu")  # facts that identify a machine
TOO_FEW_ROUNDS = "too few rounds for this spread"
Checked = Mapping[str, str]  # AGREE, "" (unchecked) or the verdict of wrong outputs, by trial id
MAX_DIFFERENCES = 6  # differences between machines in one line
COPIED_COLUMNS = ("model", "backend", "precision", "batch", "size", "device", "runtime", "options", "status", "reason",
                  "ran_as", "asked_share", "precision_ok", "builds")  # fmt: skip


def describe_outcome(row: Row) -> str:
    """Return a row's verdict; without one, its trial's status."""
    if row["verdict"]:
        return str(row["verdict"])
    return str(row["status"]) if row["status_a"] == row["status"] else f"{row['status']} (was {row['status_a']})"


def _metric_columns(metric: Metric) -> Iterator[Column]:
    for run in "ab":
        yield Column(f"{metric.column}_{run}", f"{metric.label} of {run.upper()}", "%", PERCENT)
    meaning = f"{metric.label} of B less A's on the same images"
    yield from with_limits(Column(metric.diff, meaning, "points", POINTS, "change, points", 2))


RATIO_SHOWN = Column("ratio", "latency of B over A's: above 1 is slower", kind=FINE, title="B / A", interval=True)
COLUMNS = (
    *pick(*IDENTITY),
    Column("status_a", "of A's trial", kind=TEXT),
    *pick("status", "reason", "boundary"),
    Column("latency_a_ms", "of A, over its processes", "ms", title="A ms", rank=1),
    Column("latency_b_ms", "of B, over its processes", "ms", title="B ms"),
    *with_limits(RATIO_SHOWN),
    Column("verdict", "slower, faster, undecided, two sessions, same measurement, wrong …", kind=TEXT,
           cell=describe_outcome),
    Column("p_value", "of no difference, adjusted for all pairs"),
    Column("measured", "in turns, one after the other, or in two sessions", kind=TEXT),
    Column("smallest", "smallest slow-down that would fail with 80 % power", "%", PERCENT, "catches from, %"),
    Column("undecided", "why the gate can't decide whether B is slower than allowed", kind=TEXT),
    Column("rounds_a", "of A that succeeded", kind=COUNT),
    Column("rounds_b", "of B that succeeded", kind=COUNT),
    Column("images", "that both answered", kind=COUNT),
    *(column for metric in metrics.list_metrics().values() for column in _metric_columns(metric)),
    Column("accuracy", "less accurate, more accurate or no change shown", kind=TEXT, rank=3),
    Column("close", "share of B's output values close to A's, 0 to 1", title="agree", rank=1,
           cell=lambda r: "" if is_missing(r["close"]) else f"{floor_percent(r['close'])} %"),
    Column("max_abs", "largest difference of outputs"),
    Column("failed", "conditions that the row breaks", kind=TEXT),
    Column("trial_a", "id of A's trial", kind=TEXT),
    Column("trial_b", "id of B's trial", kind=TEXT),
    *pick("ran_as", "asked_share", "precision_ok", "builds"),
    Column("outputs_a", "of A: agree with its reference's, or wrong outputs", kind=TEXT),
    Column("outputs", "of B: agree with its reference's, or wrong outputs", kind=TEXT),
)  # fmt: skip
PRINTED = (*IDENTITY, "latency_a_ms", "latency_b_ms", "ratio", "verdict",
           *(m.diff for m in metrics.list_metrics().values() if m.diff in m.printed_columns), "accuracy", "close",
           "failed")  # fmt: skip
COMPARE = TableKind("compare", "Two runs", "A row per trial that two runs share: ratio of latencies, accuracy, "
                    "agreement, and what became worse.", command="dyno compare A B")  # fmt: skip


def compare_runs(a: Results, b: Results, rules: GateRules | None = None) -> Table:
    """Compare each trial that both runs have, B against A: one row of COLUMNS per trial, in A's order.

    `ratio` is B's latency over A's (above 1 is slower) with the interval of `stats.decide_family`, from the spread
    between processes. `accuracy` and `top1_diff` (points) come from the images that both answered; `close` is the share
    of B's output values close to A's. A trial with wrong outputs in its own run (`outputs`, `outputs_a`) has no ratio;
    its verdict is the reason. `failed` names the conditions of the rules that the row breaks. The table's `notes` are
    possible explanations of a difference. Raises `UserError` if nothing can be compared.
    """
    rules = rules or GateRules()
    pairs = pair_trials(a, b)
    if not pairs:
        raise UserError(f"{a.folder} and {b.folder} share no trial; {_some_trials(a)} against {_some_trials(b)}")
    if not any(x.good for x, _ in pairs):
        raise UserError(f"nothing to compare: no trial of both runs succeeded in {a.folder}")
    table = _make_table(a, b, rules, (_check_outputs(a), _check_outputs(b)))
    refusals = [r["verdict"] for r in table.rows if r["verdict"].startswith(INCOMPARABLE)]
    if len(refusals) == len(table.rows):
        reason = Counter(verdict.partition(": ")[2] for verdict in refusals).most_common(1)[0][0]
        raise UserError(f"{a.folder} and {b.folder} can't be compared: {reason}")
    return table


def compare_sides(run: Results, rules: GateRules) -> Table:
    """Build the table of `compare` for the two sides of a comparison measured as one study.

    Outputs are compared with the other side's. Raises `UserError` for a run folder without a comparison.
    """
    a, b = (replace(run, trials=[t for t in run if t.side == side]) for side in "ab")
    if not pair_trials(a, b):
        raise UserError(f"{run.folder} holds no comparison; give two run folders, or a run and a model")
    return _make_table(a, b, rules, ({}, {} if rules.any_outputs else _check_outputs(run)))


def _make_table(a: Results, b: Results, rules: GateRules, checked: tuple[Checked, Checked]) -> Table:
    pairs = pair_trials(a, b)
    machine_diff = other_machine(a, b)
    outputs = [(checked[0].get(x.id, ""), checked[1].get(y.id, "")) for x, y in pairs]
    looks = 2 if rules.gate and any(x.side for x, _ in pairs) else 1  # failed trials are measured once more
    speeds = _compare_speeds(pairs, outputs, stats.Rule(rules.tolerance, looks=looks), known_sessions(a, b))
    accuracies = _compare_accuracies(pairs, rules.loss)
    rows = [_apply_gate(compare_trial(x, y, rules, checks, speed | accuracy), x, y, rules, machine_diff)
            for (x, y), checks, speed, accuracy in zip(pairs, outputs, speeds, accuracies, strict=True)]  # fmt: skip
    refused_rows = [r for r in rows if r["verdict"].startswith(INCOMPARABLE)]
    left_out = [
        f"{clean_text(y.label)} is {r['verdict']}" for (_, y), r in zip(pairs, rows, strict=True) if r in refused_rows
    ]
    paired_names = {_name_trial(t) for t in b} | {_name_trial(x) for x, _ in pairs}
    rows += [_make_missing_row(t, rules) for t in a if t.status == "ok" and _name_trial(t) not in paired_names]
    device_key = ("device",) if len({r["device"] for r in rows}) > 1 else ()
    return COMPARE.build(COLUMNS, rows, notes=(*_find_notes(a, b, pairs), *left_out), printed=PRINTED,
                      group=("model", "size", "batch", *device_key), below=trial_table.list_reasons)  # fmt: skip


def known_sessions(a: Results, b: Results) -> tuple[int, float]:
    """Return the number of stored self-tests of the runs' machine, and the spread of their log latencies.

    (0, 0.0) if the runs don't name the same machine.
    """
    tests = [run.self_test for run in (a, b) if run.self_test and run.self_test.machine]
    if len(tests) < 2 or tests[0].machine != tests[1].machine:
        return 0, 0.0
    return max((test.sessions, test.session_spread) for test in tests)


def other_machine(a: Results, b: Results) -> str:
    """Return the facts that distinguish the machines of two runs; "" if they seem to be the same."""
    before, after = _flatten_values(a.environment), _flatten_values(b.environment)
    names = [n for n in MACHINE_FACTS if before.get(n) and after.get(n) and before[n] != after[n]]
    return "; ".join(f"{n} {before[n]} against {after[n]}" for n in names)


def _apply_gate(
    row: dict[str, Any], a: TrialResult, b: TrialResult, rules: GateRules, machine_diff: str
) -> dict[str, Any]:
    """Return the row with the gate's decision, and the reason if undecided."""
    high = row["ratio_high"]
    if not rules.gate or STATUS in row["failed"]:
        return row
    conditions = [c for c in row["failed"].split(", ") if c and c != SLOWER]
    contention = cpu_contention([a, b]) if row["measured"] != stats.IN_TURNS else None
    if is_missing(row["ratio"]):
        reason = row["verdict"] or f"A is {row['status_a']}, B is {row['status']}"
    elif row["verdict"] == stats.ONE_ROUND:
        reason = "one round only, which can't show how much rounds differ; measure two rounds or more"
    elif row["verdict"] == SAME_MEASUREMENT:
        reason = "A and B are the same measurement; measure B itself"
    elif row["verdict"] == TWO_SESSIONS:
        reason = "A and B were measured in two sessions; measure both again side by side, with --remeasure"
    elif machine_diff:
        reason = f"A was measured on another machine ({machine_diff}); measure it again here with --remeasure"
    elif contention and contention.mostly:
        load_text = f"other programs kept up to {contention.processors:.1f} processors busy"
        reason = f"{load_text}, and it wasn't measured in turns"
    elif SLOWER not in row["failed"] and high >= 1 + rules.tolerance:
        reason = (
            f"{TOO_FEW_ROUNDS}: the interval reaches {format_slowdown(high - 1)}, and {100 * rules.tolerance:g} % "
            "are allowed"
        )
    else:
        return row
    return row | {"failed": ", ".join(conditions), "undecided": reason}


def _check_outputs(run: Results) -> Checked:
    """Return each trial's agreement with its run's reference: AGREE, the verdict of wrong outputs, or ""."""
    try:
        rows = trial_table.read_trials(run).frame.to_dict("records")
    except UserError:  # the study's reference failed: nothing was checked, and that trial's row has the reason
        return {}
    return {r["trial"]: r["verdict"] if r["outputs"] == OUTPUTS_WRONG else r["outputs"] for r in rows}


def pair_trials(a: Results, b: Results) -> list[tuple[TrialResult, TrialResult]]:
    """Return the trials of both runs, as (A's, B's), in A's order.

    Trials are paired by id. An id includes the plan and the data, so the remaining trials are paired by name, if it is
    unique in both runs.
    """
    ids = {t.id: t for t in b}
    a_ids = {t.id for t in a}
    left, right = defaultdict[str, list[TrialResult]](list), defaultdict[str, list[TrialResult]](list)
    for run, by_name in ((a, left), (b, right)):
        for t in run:
            if not (t.id in ids and t.id in a_ids):
                by_name[_name_trial(t)].append(t)
    pairs = []
    for t in a:
        name = _name_trial(t)
        if t.id in ids:
            pairs.append((t, ids[t.id]))
        elif len(left[name]) == len(right[name]) == 1:
            pairs.append((t, right[name][0]))
    return pairs


def _name_trial(t: TrialResult) -> str:
    return json.dumps([t.pair or t.configuration, t.group, t.spec.dims.shapes], sort_keys=True)


def _some_trials(run: Results) -> str:
    first, *rest = [clean_text(t.label) for t in run]
    return first + (f" and {len(rest)} more" if rest else "")


def compare_trial(
    a: TrialResult, b: TrialResult, rules: GateRules, checked: tuple[str, str], pair_columns: dict[str, Any]
) -> dict[str, Any]:
    """Compare a trial of A with its counterpart in B, as a dict of COLUMNS; unused columns are "", None or NaN.

    `checked` has the entries of `_check_outputs` for A and for B, `pair_columns` the columns of `_compare_speeds` and
    `_compare_accuracies` for the pair.
    """
    cells = trial_table.make_trial_row(b, trial_table.ComparisonBasis(None))
    columns: dict[str, Any] = {c.name: "" if c.kind == TEXT else None for c in COLUMNS} | {
        name: cells[name] for name in COPIED_COLUMNS if name in cells
    }
    if b.side:  # a pair belongs to both sides
        columns["options"] = columns["options"].removeprefix(f"side={b.side.upper()}").strip()
    rounds = {"rounds_a": len(a.good), "rounds_b": len(b.good)}
    columns |= {"status_a": a.status, "trial_a": a.id, "trial_b": b.id, **rounds}
    if reason := explain_refusal(a, b):
        return columns | {"verdict": f"{INCOMPARABLE}: {reason}"}
    columns |= pair_columns | _compare_outputs(*checked)
    if (values := agreement.read_agreement(b, a, rules.rtol, rules.atol)) is not None:
        columns |= {"close": values.close, "max_abs": values.max_abs}
    columns["failed"] = ", ".join(c for c in rules.fail_on if _has_failed(c, columns, rules, bool(a.good and b.good)))
    return columns


def _make_missing_row(a: TrialResult, rules: GateRules) -> dict[str, Any]:
    """Return the row of a trial missing in B's run: it fails, or is undecided under a gate."""
    cells = trial_table.make_trial_row(a, trial_table.ComparisonBasis(None))
    columns: dict[str, Any] = {c.name: "" if c.kind == TEXT else None for c in COLUMNS}
    columns |= {name: cells[name] for name in IDENTITY if name in cells} | {"device": cells["device"]}
    columns |= {"status_a": a.status, "status": MISSING, "reason": "B has no such trial", "trial_a": a.id}
    columns |= {"rounds_a": len(a.good), "rounds_b": 0}
    if STATUS in rules.fail_on:
        return columns | {"failed": STATUS}
    return columns | {"undecided": columns["reason"] if rules.gate else ""}


def explain_refusal(a: TrialResult, b: TrialResult) -> str:
    """Return why two trials can't be compared (different weights, data, inputs or boundaries); "" if they can."""
    weights = [t.facts.weights_sha256 for t in (a, b)]
    if not (all(weights) or a.side) and _identify_weights(a) != _identify_weights(b):
        return OTHER_WEIGHTS
    data = [(d.sha256, d.split if d.sha256 else d.seed) for d in (a.spec.data, b.spec.data)]
    if data[0] != data[1]:
        aside_counts = [accuracy.set_aside(t) for t in (a, b)]
        if a.good and b.good and aside_counts[0] != aside_counts[1] and accuracy.same_photographs(a, b):
            fewest, most = sorted(aside_counts)
            return f"different test images, {most:,} set aside for calibration in one run and {fewest:,} in the other"
        return "different data"
    if reason := find_mismatch(b, a):
        return reason
    boundaries = [", ".join(x for x in LATENCIES if t.medians(x)) or "none" for t in (a, b)]
    if a.good and b.good and boundaries[0] != boundaries[1] and not trial_table.compared_boundary(b, a):
        return f"different boundaries, latency of {boundaries[0]} against {boundaries[1]}"
    return ""


def _identify_weights(t: TrialResult) -> str:
    """Return an identifier of the weights before a run: hash of a checkpoint or file, else "pretrained" or the seed."""
    model = t.spec.model
    content = model.source_sha256 if model.file else ""
    return model.weights_sha256 or content or ("pretrained" if model.pretrained else f"seed {model.seed}")


def _compare_speeds(
    pairs: Sequence[tuple[TrialResult, TrialResult]],
    checked: Sequence[tuple[str, str]],
    rule: stats.Rule,
    sessions: tuple[int, float],
) -> list[dict[str, Any]]:
    """Return the columns on speed of each pair; comparable pairs are judged as one family.

    Pairs from two sessions are compared by the machine's spread between sessions, as `known_sessions` returns it.
    """
    rows: list[dict[str, Any]] = []
    family: list[stats.Evidence | None] = []
    fixed_verdicts: dict[int, str] = {}  # verdicts without an interval, by index of the pair
    for (a, b), outputs in zip(pairs, checked, strict=True):
        boundary = "" if explain_refusal(a, b) else trial_table.compared_boundary(b, a)
        clock = clock_of(boundary, a, b)
        medians = quiet_medians(a, boundary, clock), quiet_medians(b, boundary, clock)
        if not (boundary and all(medians)):
            rows.append({})
            family.append(None)
            continue
        latencies = {
            f"latency_{side}_ms": 1e3 * stats.find_center(m).value for side, m in zip("ab", medians, strict=True)
        }
        rows.append({"boundary": boundary, **latencies})
        has_wrong_outputs = any(output.startswith(OUTPUTS_WRONG) for output in outputs)
        # A's speed-up over B is the ratio of B's latency to A's.
        evidence = None if has_wrong_outputs else ranking.gather_evidence(a, b, boundary, clock)
        if evidence is not None and _list_times(a) & _list_times(b):
            evidence, fixed_verdicts[len(family)] = stats.between_sessions(evidence, 0, 0.0), SAME_MEASUREMENT
        elif evidence is not None and not evidence.single and _are_two_sessions(a, b):  # each is one observation
            evidence = stats.between_sessions(evidence, *sessions)
            fixed_verdicts |= {len(family): TWO_SESSIONS} if evidence.single else {}
        family.append(evidence)
    count = sum(1 for e in family if e is not None and not e.single)
    for index, (row, e, (s, verdict)) in enumerate(zip(rows, family, judge_family(family, rule), strict=True)):
        if e is not None:
            row |= {"ratio": s.value, "ratio_low": s.low, "ratio_high": s.high, "p_value": s.p,
                    "verdict": fixed_verdicts.get(index, verdict), "measured": s.measured}  # fmt: skip
            level = stats.ALPHA / max(count, 1) / rule.looks
            row["smallest"] = 100 * smallest_slowdown(e.error, e.freedom, level, rule.margin)
    return rows


def _list_times(t: TrialResult) -> set[tuple[str, float]]:
    """Return start and duration of each good round: a key that only copies of a round share."""
    return {(r.record.started, r.record.seconds) for r in t.good}


def _are_two_sessions(a: TrialResult, b: TrialResult) -> bool:
    """Return whether all rounds of one trial ended before the other's began, in another run.

    Rounds of one run share the machine's state, neighbours and temperature, so their spread tells nothing about another
    run: a session is the highest level (Kalibera and Jones 2013).
    """
    if a.run == b.run:
        return False
    windows = [_find_window(t) for t in (a, b)]
    if None in windows:
        return True
    first, second = sorted(window for window in windows if window)
    return first[1] < second[0]


def _find_window(t: TrialResult) -> tuple[float, float] | None:
    """Return the first start and the last end of the trial's good rounds, in seconds since 1970; None if unknown."""
    try:
        spans = [(datetime.fromisoformat(r.record.started).timestamp(), r.record.seconds) for r in t.good]
    except ValueError:
        return None
    return min(begin for begin, _ in spans), max(begin + seconds for begin, seconds in spans)


def judge_family(family: Sequence[stats.Evidence | None], rule: stats.Rule) -> list[tuple[stats.Speedup, str]]:
    """Return A's speed-up over B for each pair, and the verdict on B.

    "Slower" claims a ratio above 1 + the margin, so Holm's steps for it start from there.
    """
    shifted_family = [e and replace(e, difference=e.difference - rule.reach) for e in family]
    decisions = zip(stats.decide_family(family, rule), stats.decide_family(shifted_family, rule), strict=True)
    return [(speedup, _choose_verdict(speedup, shifted, rule.margin)) for speedup, shifted in decisions]


def _choose_verdict(speedup: stats.Speedup, shifted: stats.Speedup, margin: float) -> str:
    if speedup.verdict == stats.FASTER:
        return stats.SLOWER if speedup.low > 1 + margin and shifted.verdict == stats.FASTER else TOLERATED
    return stats.FASTER if speedup.verdict == stats.SLOWER else speedup.verdict


def _compare_outputs(a: str, b: str) -> dict[str, Any]:
    """Return the columns on outputs; wrong outputs replace the verdict on speed."""
    columns: dict[str, Any] = {"outputs_a": a.partition(":")[0], "outputs": b.partition(":")[0]}
    if OUTPUTS_WRONG not in columns.values():
        return columns
    return columns | {
        "verdict": b if columns["outputs"] == OUTPUTS_WRONG else f"{OUTPUTS_WRONG} in A: {a.partition(': ')[2]}"
    }


def _compare_accuracies(pairs: Sequence[tuple[TrialResult, TrialResult]], loss: float) -> list[dict[str, Any]]:
    """Return the columns on accuracy of each pair; comparable pairs are judged as one family."""
    rows: list[dict[str, Any]] = []
    changes: dict[int, Change] = {}  # changes by index of the row
    for a, b in pairs:
        rows.append({})
        for columns, change in () if explain_refusal(a, b) else _compare_accuracy(a, b):
            rows[-1] = {**columns, **rows[-1]}
            changes.setdefault(len(rows) - 1, change)
    verdicts = judge_accuracies([change.cautious for change in changes.values()], loss)
    for index, verdict in zip(changes, verdicts, strict=True):
        rows[index]["accuracy"] = verdict
    return rows


def judge_accuracies(changes: Sequence[stats.Interval], loss: float) -> list[str]:
    """Return the verdict on each change of accuracy, a share with its 95 % interval, as one family (Holm 1979).

    B is less accurate if its interval, stretched by Holm's steps, lies wholly below -`loss`, a share.
    """
    chances = [_find_chance(change, loss) for change in changes]
    verdicts = [NO_CHANGE] * len(changes)
    for k, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[index] > stats.ALPHA / (len(chances) - k):
            break
        verdicts[index] = LOST if changes[index].value < 0 else GAINED
    return verdicts


def _find_chance(change: stats.Interval, loss: float) -> float:
    """Return the two-sided p of a change below -`loss` or above 0, by stretching its 95 % interval.

    It is 1 for a value within these limits, or without an interval.
    """
    from scipy.special import ndtr, ndtri

    value = change.value
    excess, reach = (-loss - value, change.high - value) if value < 0 else (value, value - change.low)
    if not excess > 0 or math.isnan(reach):
        return 1.0
    return float(2 * ndtr(ndtri(stats.ALPHA / 2) * excess / reach)) if reach > 0 else 0.0


def _compare_accuracy(a: TrialResult, b: TrialResult) -> Iterator[tuple[dict[str, Any], Change]]:
    """Yield the columns and the change of each metric that both trials have; the first one is judged."""
    a_values = {metric.name: value for metric, value in metrics.list_measured(a)}
    for metric, b_value in metrics.list_measured(b):
        change = metric.change(b, a)
        if change is None or metric.name not in a_values:
            continue
        yield {
            "images": change.images, "judged_by": metric.diff,
            f"{metric.column}_a": 100 * a_values[metric.name].interval.value,
            f"{metric.column}_b": 100 * b_value.interval.value, **in_percent(metric.diff, change.difference),
        }, change  # fmt: skip


def _has_failed(condition: str, row: Row, rules: GateRules, both_ran: bool) -> bool:
    if condition == STATUS:
        return bool(row["status_a"] == "ok" and row["status"] != "ok")
    if condition == SLOWER:
        return bool(row["verdict"] == stats.SLOWER)
    if condition == LESS_ACCURATE:
        return bool(row["accuracy"] == LOST)
    if condition == WRONG_OUTPUTS:
        return bool(both_ran and row["outputs"] == OUTPUTS_WRONG and row["outputs_a"] != OUTPUTS_WRONG)
    # Missing outputs, or outputs of another shape, have no share and don't agree.
    return both_ran and not (row.get("close") or 0.0) >= rules.least


def _find_notes(a: Results, b: Results, pairs: list[tuple[TrialResult, TrialResult]]) -> Iterator[str]:
    changes = dict(_find_differences(a.environment, b.environment))
    for x, y in pairs:
        if x.good and y.good:
            changes |= _find_differences(x.good[0].record.system, y.good[0].record.system)
            changes |= _find_differences({"threads": x.facts.threads}, {"threads": y.facts.threads})
    if changes and a.folder != b.folder:
        differences = [f"{name} {before} against {after}" for name, (before, after) in changes.items()]
        rest = [f"{len(differences) - MAX_DIFFERENCES} more"] if len(differences) > MAX_DIFFERENCES else []
        text = "; ".join(differences[:MAX_DIFFERENCES] + rest)
        yield f"the machines or versions differ, which may explain the whole difference: {text}"
    if cores := find_apart_jobs(t for pair in pairs for t in pair):
        yield f"the {cores.clause}; this may explain the whole difference"
    if warning_count := sum(1 for pair in pairs if any(remarks.list_warnings(t) for t in pair)):
        trials = format_count(len(pairs), "trial")
        yield f"{warning_count} of {trials} with warnings that may explain a change; `dyno report` lists them"
    for name, run in (("A", a), ("B", b)):
        paired_ids = {t.id for pair in pairs for t in pair}
        if labels := [clean_text(t.label) for t in run if t.id not in paired_ids]:
            yield f"only in {name}: {labels[0]}" + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
    yield from (*a.problems, *b.problems)


def _find_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    left, right = _flatten_values(a), _flatten_values(b)
    names = [n for n in dict.fromkeys((*left, *right)) if n not in VOLATILE_FACTS and left.get(n) != right.get(n)]
    return {n: (left.get(n, "none"), right.get(n, "none")) for n in names}


def _flatten_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested tables by their innermost names, with values as one line of text; drop unknown values."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten_values(value)
        elif value not in (None, "", []):
            flat[name] = clean_text(" ".join(map(str, value)) if isinstance(value, list) else value)
    return flat


def floor_percent(share: float) -> str:
    """Format a share in percent to two places, rounded down so that only 1 reads as 100."""
    return f"{math.floor(1e4 * share + 1e-9) / 100:.2f}"
