"""The verdict in sentences: the start of every report and the end of a study's output."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from dyno.formatting import (
    clean_text,
    describe_time,
    format_count,
    format_ratio,
    format_size,
    join_names,
    read_indentation,
    shorten_text,
)
from dyno.report import self_test
from dyno.report.verdict import decisions
from dyno.report.verdict import findings as verdict_findings
from dyno.report.verdict.findings import FAILURE, NOTE, PROBLEMS_PART, WARNING, Decision, Finding, format_ms
from dyno.results import ranking as results_ranking
from dyno.results import remarks, stats
from dyno.results.blocks import find_apart_jobs
from dyno.results.correctness import OUTPUTS_WRONG, find_mismatch
from dyno.results.metrics.accuracy import has_accuracy, set_aside
from dyno.results.metrics.precision import NO, read_truth
from dyno.results.notes import read_dropped
from dyno.results.ranking import LATENCY, Contention, cpu_contention, list_winners, rank_goals
from dyno.results.rounds import GPU
from dyno.results.run_data import RunData
from dyno.results.trial_result import FILE_OPTION, MEASURING_REASON, UNFINISHED, Results, TrialResult, clock_of
from dyno.table import is_missing
from dyno.worker.facts.engine import WEIGHT_PRECISIONS

OTHER_PROGRAMS_NOTE = "the table's verdicts hold beside those programs, which may slow engines unequally"
OTHER_NETWORK = (
    " The files were taken for one network, since their inputs and outputs have the same shapes; "
    "if they are different networks, run one command for each."
)
MAX_GROUPS = 8  # models and sizes with sentences; the tables have all
MAX_REASONS, MAX_REASON_LENGTH = 2, 160  # failure reasons in one sentence, and characters of each
NOT_SHOWN = "not shown to be faster than {}"
MAX_RATIOS = 3  # batches with their ratio in one sentence
# Wider precisions for comparison with a lowered one, in order.
WIDER_TYPES = {
    **dict.fromkeys(("tf32", "fp16", "bf16"), ("fp32",)),
    **dict.fromkeys(("int8", "fp8", *WEIGHT_PRECISIONS), ("fp32", "fp16", "bf16")),
}


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run: rows with `wrong` outputs, a decision for each ranking, and `findings` on the whole run."""

    wrong: tuple[Finding, ...]
    decisions: tuple[Decision, ...]
    findings: tuple[Finding, ...]

    @property
    def sentences(self) -> list[str]:
        """All sentences but the next steps (they name a folder), most important first."""
        lines = [each.text for each in self.wrong]
        for decision in self.decisions:
            lines += [decision.sentence, *(f"{name}: {text}." for name, text in decision.answers if name != "next")]
            lines += [each.text for each in decision.findings]
        return [clean_text(line) for line in (*lines, *(each.text for each in self.findings))]

    @property
    def lines(self) -> list[str]:
        """All lines for a terminal: with next steps, without notes (the report has them), details last."""
        lines = [each.text for each in self.wrong]
        for decision in self.decisions:
            lines += [decision.sentence, *(f"  {name}: {text}" for name, text in decision.answers)]
        has_groups = len({decision.where for decision in self.decisions}) > 1
        for decision in self.decisions:
            prefix = f"{decision.where}: " if has_groups else ""
            lines += [prefix + each.text.removeprefix(prefix) for each in decision.findings if each.kind != NOTE]
        lines += [each.text for each in self.findings if each.kind != NOTE]
        findings = [*self.findings, *(each for decision in self.decisions for each in decision.findings)]
        notes = sum(each.kind == NOTE for each in findings)
        footer = [f"{format_count(notes, 'more note')} in the report."] if notes else []
        return [*(read_indentation(line) + clean_text(line) for line in lines), *footer]


@dataclass(frozen=True)
class ProvisionalAnswer:
    """Verdict of a running study: a sentence for each decision, and the `rows` of the first ranking, fastest first.

    Each row is configuration, median latency and speed-up as text.
    """

    sentences: list[str]
    rows: list[tuple[str, str, str]]


def answer_so_far(run: RunData) -> ProvisionalAnswer:
    """Return the answer from the rounds stored so far."""
    verdict = read_verdict(run)
    sentences = [each.text for each in verdict.wrong] + [each.sentence for each in verdict.decisions]
    if any(t.side for t in run.records):
        sentences = [*_describe_sides(run)]
    rows = []
    for ranking in rank_goals(run)[:1]:
        for _, row in ranking.rank_by(LATENCY).iterrows():
            is_reference = row["trial"] == row["reference"]
            ratio = (
                ""
                if is_missing(row["speedup"])
                else format_ratio(row["speedup"], row["speedup_low"], row["speedup_high"])
            )
            rows.append((ranking.name_row(row), format_ms(row[LATENCY]), "reference" if is_reference else ratio))
    return ProvisionalAnswer([clean_text(sentence) for sentence in sentences], rows)


def _describe_sides(run: RunData) -> Iterator[str]:
    """Yield a sentence for each pair of a comparison; its gate decides whether outputs matter."""
    for _, row in run.frame.iterrows():
        trial = run.trials[row["trial"]]
        if trial.side == "b" and trial.good and row["reference"] not in ("", row["trial"]):
            if is_missing(row["speedup"]):
                outcome = (
                    "B gives other outputs than A"
                    if str(row["verdict"]).startswith(OUTPUTS_WRONG)
                    else str(row["verdict"])
                )
            else:
                ratios = 1 / row[["speedup", "speedup_high", "speedup_low"]].astype(float)
                outcome = f"{describe_time(format_ratio(*ratios))} ({row['verdict']})"
            yield f"{trial.model} {trial.pair} b{trial.batch}: {outcome}."


def list_sentences(run: RunData) -> list[str]:
    """Return the verdict in plain sentences, most important first."""
    return read_verdict(run).sentences


def read_verdict(run: RunData) -> Verdict:
    """Build the verdict: the fastest within the budget with its evidence, then precision truth, reasons, failures."""
    results = run.records
    trials = [t for t in results if t.good]
    has_choice = len({(t.model, t.configuration) for t in trials}) > len({t.model for t in trials})
    all_rankings, contention = rank_goals(run), cpu_contention(results, compared=has_choice)
    rankings = all_rankings[:MAX_GROUPS]
    unscored = *verdict_findings.list_unscored_findings(run), *verdict_findings.list_empty_budgets(run)
    wrong = *_wrong_outputs(run), *unscored
    slow_findings: list[Finding] = []
    if contention and contention.mostly:  # the order would reflect the machine's load
        next_step = _describe_next_step(run)
        outcomes = [Decision(WARNING, "", contention.sentence, (("real", OTHER_PROGRAMS_NOTE), ("next", next_step)))]
        outcomes += [decision for ranking in rankings if (decision := decisions.list_failed(ranking, run)) is not None]
        findings = [finding for ranking in rankings for finding in decisions.list_incomparable(ranking)]
    else:
        outcomes = [decision for ranking in rankings for decision in decisions.decide_run(ranking, run)]
        count = len(all_rankings) - MAX_GROUPS
        findings = [Finding(NOTE, f"{count} more models and sizes are in the tables.")] if count > 0 else []
        findings += verdict_findings.list_precision_findings(run)
        slow_findings += _slow_precisions(run)
    findings = [
        *_list_fallbacks(results),
        *findings,
        *_check_precisions(results),
        *slow_findings,
        *_describe_outcome(results, contention),
    ]
    findings += [*verdict_findings.list_device_findings(results), *verdict_findings.list_route_findings(results)]
    return Verdict(wrong, tuple(outcomes), tuple(findings))


def _describe_next_step(run: RunData) -> str:
    """Describe the next step if the machine was too busy to name a winner."""
    step, folder = "measure again on a quiet machine", shlex.quote(str(run.records.folder))
    return f"{step}, or choose: dyno export {folder} BACKEND/PRECISION" if list(list_winners(run)) else step


def _wrong_outputs(run: RunData) -> Iterator[Finding]:
    """Yield the trials with wrong outputs, which are not ranked."""
    trials, wrong_rows = run.trials, run.frame[run.frame["outputs"] == OUTPUTS_WRONG]
    for (_, verdict), rows in wrong_rows.groupby(["reference", "verdict"], sort=False):
        group = [trials[id] for id in rows["trial"]]
        names = ", ".join(dict.fromkeys(t.configuration for t in group))
        verdict = f"{verdict} against {run.compared[group[0].id].configuration}"
        text = f"{group[0].model}: {names} ({_format_batches(group)}) gave {verdict}, so they are not ranked."
        has_files = any(t.form and t.form.option == FILE_OPTION for t in group)
        if has_files:
            text += OTHER_NETWORK
        elif first := next(filter(_has_layer_comparison, group), None):
            text += f" To find the layer: dyno diff MODEL {first.backend}/{first.precision} --layers."
        yield Finding(FAILURE, text)


def _has_layer_comparison(t: TrialResult) -> bool:
    """Return whether the engine ran an exported module, so that `dyno diff --layers` can compare its layers."""
    return bool(t.facts.opset)


def _check_precisions(results: Results) -> Iterator[Finding]:
    truths = [(t, types) for t in results if t.good and (types := read_truth(t)) is not None]
    mismatches: dict[tuple[str, str], list[TrialResult]] = {}
    for t, types in truths:
        if not types.ok:
            mismatches.setdefault((t.model, types.sentence), []).append(t)
    reported = [types for _, types in truths if types.reported]
    if reported:
        ok_count = sum(t.ok for t in reported)
        trial_count = format_count(len(reported), "trial")
        yield Finding(NOTE, f"Precision: {ok_count} of {trial_count} ran in the requested type.")
    for (_, sentence), trials in mismatches.items():
        model = f"{trials[0].model} " if len({t.model for t in results}) > 1 else ""
        types = read_truth(trials[0])
        clause = " did not run as requested" if types and types.answer == NO else ""
        yield Finding(WARNING, f"{model}{trials[0].configuration} ({_format_batches(trials)}){clause}: {sentence}.")


def _list_fallbacks(results: Results) -> Iterator[Finding]:
    """Yield the trials with most nodes on another provider than the requested one."""
    by_text: dict[str, list[TrialResult]] = {}
    for t in results:
        if t.good and t.facts.fallback:
            by_text.setdefault(f"{t.model} {t.configuration}: {t.facts.fallback}", []).append(t)
    for text, trials in by_text.items():
        yield Finding(WARNING, f"{text} ({_format_batches(trials)}).")


def _slow_precisions(run: RunData) -> Iterator[Finding]:
    """Yield lowered precisions without a gain over a wider one of the same backend, with the engine's own reasons.

    The wider one is fp32; eight-bit precisions that gain over it are compared with the sixteen-bit ones as well.
    """
    results, rows = run.records, {row["trial"]: row for row in run.frame.to_dict("records")}
    trials = {(t.group, t.variant, t.precision): t for t in results if t.good}
    groups: dict[tuple[str, ...], list[tuple[TrialResult, stats.Speedup]]] = {}
    for t in trials.values():
        for wider in WIDER_TYPES.get(t.precision, ()):
            reference = trials.get((t.group, t.variant, wider))
            if (
                reference is None
                or find_mismatch(t, reference)
                or any(results_ranking.is_speed_lost(rows[each.id]) for each in (t, reference))
            ):
                continue
            if gain := _no_gain(t, reference, rows[t.id], run.rule):
                groups.setdefault((t.model, t.size, t.configuration, reference.configuration), []).append((t, gain))
                break
    has_groups = len({(t.model, t.size) for t in results}) > 1
    unexplained: dict[str, list[_NoGain]] = {}
    for (model, size, name, other_name), gains in list(groups.items())[:MAX_GROUPS]:
        where = f"{model}{format_size(size, ' at size ')}: " if has_groups else ""
        comparison = _NoGain(name, other_name, _compare_batches(gains))
        if reason := _choose_reason(gains):
            yield Finding(WARNING, f"{where}{comparison.sentence}: {reason}.")
        else:
            unexplained.setdefault(where, []).append(comparison)
    for where, comparisons in unexplained.items():
        yield Finding(WARNING, f"{where}{_join_unexplained(comparisons)}.")
    if len(groups) > MAX_GROUPS:
        count = len(groups) - MAX_GROUPS
        yield Finding(NOTE, f"{count} more configurations gain nothing from their precision; see the tables.")


class _NoGain(NamedTuple):
    """A configuration that isn't faster than the `other_name`: ratios by batch as text, by relation."""

    name: str
    other_name: str
    relations: dict[str, str]

    @property
    def sentence(self) -> str:
        parts = [
            f"{relation.format('it' if k else self.other_name)} ({ratios})"
            for k, (relation, ratios) in enumerate(self.relations.items())
        ]
        return f"{self.name} is {' and '.join(parts)}"


def _compare_batches(gains: list[tuple[TrialResult, stats.Speedup]]) -> dict[str, str]:
    """Return the ratios of a lowered precision to the other one by relation, as text, in the order of batches."""
    ratios: dict[str, list[str]] = {}
    for t, gain in sorted(gains, key=lambda pair: pair[0].batch):
        ratio = format_ratio(gain.value, gain.low, gain.high)
        ratios.setdefault(_choose_relation(gain), []).append(f"batch {t.batch}: {ratio}")
    for texts in ratios.values():
        texts[MAX_RATIOS:] = [f"{len(texts) - MAX_RATIOS} more"] if len(texts) > MAX_RATIOS else []
    return {relation: "; ".join(texts) for relation, texts in ratios.items()}


def _choose_reason(gains: list[tuple[TrialResult, stats.Speedup]]) -> str:
    """Return the engine's first reason, with its batch if reasons differ; "" without any."""
    reasons = [(t.batch, "; ".join(remarks.list_reasons(t))) for t, _ in sorted(gains, key=lambda pair: pair[0].batch)]
    batch, reason = next(((batch, text) for batch, text in reasons if text), (0, ""))
    return f"at batch {batch}, {reason}" if reason and len({text for _, text in reasons}) > 1 else reason


def _join_unexplained(comparisons: list[_NoGain]) -> str:
    """Join findings into one sentence, with `nor` between those that are not shown to be faster."""
    unproven = [each for each in comparisons if [*each.relations] == [NOT_SHOWN]]
    first = [each.sentence for each in unproven[:1]]
    rest = [f"{each.name} than {each.other_name} ({each.relations[NOT_SHOWN]})" for each in unproven[1:]]
    parts = [", nor ".join([*first, *rest]), *(each.sentence for each in comparisons if each not in unproven)]
    engines = "engine reports" if len(comparisons) == 1 else "engines report"
    return f"{'; '.join(filter(None, parts))}; the {engines} no reason"


def _choose_relation(gain: stats.Speedup) -> str:
    if gain.verdict == stats.ONE_ROUND:
        return "behind {} after one round, which proves nothing"
    if gain.verdict == stats.EQUIVALENT:
        return "no faster than {}"
    return "slower than {}" if gain.verdict == stats.SLOWER or gain.high < 1 else NOT_SHOWN


def _no_gain(trial: TrialResult, wider: TrialResult, row: Mapping[str, Any], rule: stats.Rule) -> stats.Speedup | None:
    """Return the speed-up over the wider precision if it shows no gain, else None.

    It is taken from the trial's row if the row has the same reference, so that both agree.
    """
    if (row["reference"], row["boundary"]) == (wider.id, "model") and not is_missing(row["speedup"]):
        gain = stats.Speedup(row["speedup"], row["speedup_low"], row["speedup_high"], row["verdict"])
    else:
        gain = results_ranking.estimate_speedup(trial, wider, "model", clock_of("model", trial, wider), rule)
    has_no_gain = gain.verdict in decisions.NO_GAIN or (gain.verdict == stats.ONE_ROUND and gain.value < 1)
    return gain if has_no_gain else None


def _find_waiting_models(results: Results) -> Iterator[Finding]:
    """Warn of the study's models without trials: a stopped study plans one model after the other."""
    sources = list(dict.fromkeys(map(str, results.settings.get("models", ()))))
    started_sources = {t.spec.model.source for t in results}
    models = [source for source in sources if source not in started_sources]
    count = len(sources) - len(started_sources)
    if not started_sources or count < 1 or any(t.side for t in results):
        return
    names = f": {', '.join(models)}" if len(models) == count else ""  # a model may be stored under another path
    text = f"{count} of {format_count(len(sources), 'model')} {'was' if count == 1 else 'were'} not started"
    yield Finding(WARNING, f"{text}{names}; the same command continues.")


def _describe_failures(results: Results) -> Iterator[Finding]:
    """Yield the number of failed trials with reasons; trials in a precision added by Dyno are a separate note."""
    added = results.failed_additions
    added_ids = {t.id for t in added}
    failures = [t for t in results if t.id not in added_ids and t.status not in ("ok", "skipped", UNFINISHED)]
    if failures:
        counts = ", ".join(f"{n} {status}" for status, n in Counter(t.status for t in failures).items())
        yield Finding(
            FAILURE,
            f"{len(failures)} of {format_count(len(results), 'trial')} did not finish: {counts} "
            f"({_list_reasons(failures)}); "
            "the same command with --retry-failed measures them again.",
            PROBLEMS_PART,
        )
    if added:
        names, count = join_names(list(dict.fromkeys(t.precision for t in added))), format_count(len(added), "row")
        text = f"{count} in {names}, which Dyno added, failed ({_list_reasons(added)}); --precision names those to run."
        yield Finding(NOTE, text, PROBLEMS_PART)


def _describe_outcome(results: Results, contention: Contention | None) -> Iterator[Finding]:
    counts, total = Counter(t.status for t in results), len(results.trials)
    yield from _describe_failures(results)
    if 0 < counts[UNFINISHED] < total:  # if all are unfinished, the decisions report it
        yield Finding(WARNING, f"{_format_count(counts[UNFINISHED], total, 'was', 'were')} not measured so far.")
    yield from _find_waiting_models(results)
    dropped = read_dropped(results.folder)
    if results.owner:
        yield Finding(WARNING, f"This is the answer so far: {MEASURING_REASON.format(results.owner)}.")
    elif (short := [t for t in results if t.is_cut_short and t.id not in dropped.trials]) and not dropped.is_over:
        rounds = format_count(min(len(t.rounds) for t in short), "round")
        answer = f"Not all rounds are measured: this is the answer after {rounds}; the same command continues."
        yield Finding(WARNING, answer)
    elif trials := [t for t in results if t.is_cut_short]:
        rounds = format_count(min(len(t.rounds) for t in trials), "round")
        reason = "--minutes are over" if short else "a winner leads clearly, and the time went to the others"
        yield Finding(
            WARNING if short else NOTE,
            f"{_format_count(len(trials), total, 'has', 'have')} {rounds} only: {reason}; more --minutes or --until "
            "every-row measures further.",
        )
    if counts["skipped"]:
        yield Finding(
            NOTE,
            f"{_format_count(counts['skipped'], total, 'was', 'were')} skipped, each with its reason.",
            PROBLEMS_PART,
        )
    if contention and not contention.mostly:
        yield Finding(WARNING, contention.sentence)
    if jobs := find_apart_jobs(results):
        yield Finding(NOTE, f"The {jobs.clause}; blocks of the rarer case count as disturbed.")
    yield from verdict_findings.list_pixel_findings(results)
    yield from verdict_findings.list_weight_findings(results)
    yield from verdict_findings.list_label_findings(results)
    yield from _find_gpu_doubts(results)
    if n := max((set_aside(t) for t in results if set_aside(t) and has_accuracy(t)), default=0):
        yield Finding(
            WARNING,
            f"Accuracy is not on all images: {n:,} were set aside for calibration; --calibration DIR gives others.",
        )
    count = sum(1 for t in results if remarks.list_warnings(t))
    if count:
        yield Finding(
            WARNING, f"{_format_count(count, total, 'has', 'have')} warnings; the report lists them.", PROBLEMS_PART
        )
    for problem in results.problems:
        yield Finding(FAILURE, problem)


def _list_reasons(trials: Iterable[TrialResult]) -> str:
    """Join the distinct reasons of the first failed trials, shortened to fit a line."""
    by_reason: dict[str, TrialResult] = {}
    for t in trials:
        by_reason.setdefault(t.reason, t)
    first = [shorten_text(f"{t.configuration}: {reason}", MAX_REASON_LENGTH) for reason, t in by_reason.items()]
    rest = [f"{len(first) - MAX_REASONS} more in the report"] if len(first) > MAX_REASONS else []
    return "; ".join([*first[:MAX_REASONS], *rest])


def _find_gpu_doubts(results: Results) -> Iterator[Finding]:
    """Yield doubts about the numbers, from the GPU's telemetry and clocks."""
    trials = [t for t in results if t.gpu is not None]
    trial_count = format_count(len(trials), "trial")
    if shared_trials := [t for t in trials if remarks.describe_others(t)]:
        yield Finding(
            WARNING,
            f"Others used the GPU during {len(shared_trials)} of {trial_count} (first: {shared_trials[0].label}: "
            f"{remarks.describe_others(shared_trials[0])}): those times may be too long; measure again on a free GPU.",
        )
    if pairs := [(t, spans) for t in trials if (spans := remarks.describe_throttling(t))]:
        hit, lost = (sum(getattr(f, name) for _, spans in pairs for f in spans) for name in ("hit", "dropped"))
        reasons = ", ".join(dict.fromkeys(f.reason for _, spans in pairs for f in spans))
        yield Finding(
            WARNING,
            f"The GPU was throttled ({reasons}) during {len(pairs)} of {trial_count}: {lost:,} of the {hit:,} "
            "samples taken meanwhile were dropped.",
        )
    yield from _launch_bound(results)
    mixed_groups = {t.group for t in results if t.good and clock_of("model", t) == GPU} & {
        t.group for t in results if t.medians("model") and t.device != "cpu" and clock_of("model", t) != GPU
    }
    if mixed_groups:
        yield Finding(NOTE, "Where an engine gave no GPU times, its whole group is compared by the host's clock.")


def _launch_bound(results: Results) -> Iterator[Finding]:
    """Yield the trial that loses the largest share of its time to launching."""
    bound_trials = [
        (t, launch) for t in results if t.device != "cpu" and (launch := remarks.describe_launch(t)) and launch.sentence
    ]
    if bound_trials:
        t, launch = max(bound_trials, key=lambda pair: pair[1].share)
        rest = f"; {len(bound_trials) - 1} more trials are launch-bound" if len(bound_trials) > 1 else ""
        yield Finding(NOTE, f"{t.label}: {launch.sentence}{rest}.")


def _format_count(count: int, total: int, singular: str, plural: str) -> str:
    return f"{count} of {format_count(total, 'trial')} {singular if count == 1 else plural}"


def _format_batches(trials: list[TrialResult]) -> str:
    batches = sorted({t.batch for t in trials})
    return f"batch {', '.join(map(str, batches))}"


# Head of a run's tables in JSON: run, date, machine, study and verdict.


class DecisionDescription(TypedDict):
    """A decision as data: one candidate is the winner, of several each may be."""

    about: str
    by: str
    certainty: str
    candidates: list[str]
    text: str
    answers: dict[str, str]


class RunDescription(TypedDict):
    """The head of a run's tables in JSON."""

    run: str
    date: str | None
    machine: dict[str, Any]
    study: dict[str, Any]
    visible: str | None
    decisions: list[DecisionDescription]
    verdict: list[str]


def describe_run(run: RunData) -> RunDescription:
    """Return the run's name, date, machine, study, visible differences, decisions and verdict in sentences.

    `date` is the start of its first job (ISO 8601), `visible` the differences it can detect, None if unknown.
    """
    records = run.records
    return {
        "run": records.name,
        "date": read_start(records) or None,
        "machine": records.environment,
        "study": records.settings,
        "visible": self_test.of_run(records) or None,
        "decisions": [_describe_decision(each) for each in read_verdict(run).decisions],
        "verdict": list_sentences(run),
    }


def _describe_decision(decision: Decision) -> DecisionDescription:
    return {
        "about": decision.where,
        "by": decision.by,
        "certainty": decision.badge,
        "candidates": [*decision.candidates],
        "text": decision.text,
        "answers": dict(decision.answers),
    }


def read_start(results: Results) -> str:
    """Return the start of a run's first job (ISO 8601 with its offset); "" if no record has one."""
    return min((r.record.started for t in results for r in t.rounds if r.record.started), default="")
