"""Decision of each ranking: a sentence on the winner and its lead, short answers, and findings to unfold."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isinf, isnan
from typing import TYPE_CHECKING, Any

from dyno.formatting import (
    UNCLEAR_WORD,
    format_count,
    format_limits,
    format_number,
    format_points,
    format_ratio,
    in_brackets,
    is_bounded,
    join_names,
    name_items,
    show,
)
from dyno.report.tables import frontier_table
from dyno.report.tables.trial_table import name_equivalence, rounds_needed
from dyno.report.verdict.findings import BEST, FAILURE, NOTE, WARNING, Decision, Figure, Finding, format_ms
from dyno.results import blocks, remarks, stats, timeline
from dyno.results import limits as results_limits
from dyno.results import ranking as results_ranking
from dyno.results.correctness import name_distance
from dyno.results.metrics.accuracy import OVER, UNDECIDED
from dyno.results.metrics.precision import read_truth
from dyno.results.ranking import LATENCY, THROUGHPUT, Contest, Ranking, cpu_contention, list_winners
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.stats import EQUIVALENT, FASTER, MAX_ROUNDS, ONE_ROUND, Speedup
from dyno.results.trial_result import MEASURING_REASON, UNFINISHED, TrialResult, by_build
from dyno.table import is_missing
from dyno.worker.spec import ADAPTIVE_RULES

if TYPE_CHECKING:
    import pandas as pd

# Backends that support a precision not added by default: if one of them ran, the precision could be tried.
LOWERING_ADVICE = {
    "int8": {"onnxruntime", "openvino", "tensorrt", "tensorrt_rtx"},
    "bf16": {"pytorch", "compile", "aoti", "tensorrt", "tensorrt_rtx"},
}
RESUME_ADVICE = "the same `dyno run` continues"
REASONS_NOTE = "the reasons are below the table"
DEFAULT_ROUNDS = 3  # default number of rounds
MAX_NAMED = 4  # rows named in a sentence
DECIDED = "decided"
EXCLUDING_LIMITS = OVER, results_limits.UNMEASURED  # `limit` values that exclude a row from the choice
NO_GAIN = stats.SLOWER, stats.EQUIVALENT, stats.UNDECIDED
MIN_PRINTED_LEAD = 1.005  # a lower limit below this is printed as 1.00


@dataclass(frozen=True)
class Winner:
    """First row of a ranking by LATENCY or THROUGHPUT, with sentences on it, its reference and its rivals."""

    ranking: Ranking
    run: RunData
    speed: str = LATENCY

    @cached_property
    def contest(self) -> Contest:
        """The row against all rows behind it."""
        return results_ranking.compare_first(self.ranking.rank_by(self.speed), self.speed, self.run)

    @cached_property
    def row(self) -> pd.Series:
        """The winner's row of the table."""
        return self.ranking.rank_by(self.speed).iloc[0]

    @property
    def trial(self) -> TrialResult:
        return self.run.trials[self.row["trial"]]

    @property
    def reference(self) -> TrialResult | None:
        """Reference of the winner's speed-up, possibly itself."""
        return self.ranking.find_reference(self.row)

    @property
    def configuration(self) -> str:
        """The winner's name in sentences on one batch."""
        return self.ranking.name_row(self.row)

    @cached_property
    def names(self) -> list[str]:
        """Names of the winner and of its rivals."""
        return [self.name_row(row) for row in (self.row, *(row for row, _ in self.contest.rivals))]

    def name_row(self, row: pd.Series) -> str:
        """Return a row's name in a sentence, with its batch if batches compete."""
        return self.ranking.name_row(row) + (f" at batch {row['batch']}" if self.speed == THROUGHPUT else "")

    def name_reference(self, reference: TrialResult) -> str:
        """Return the reference's name in sentences."""
        return reference.configuration + (f" at size {reference.size}" if self.ranking.sizes else "")

    @cached_property
    def gain(self) -> Speedup | None:
        """Speed-up of the winner's latency, as in its row; None for the reference itself or without a reference.

        Recomputed if its reference has another size than the table's.
        """
        reference = self.reference
        if self.speed == THROUGHPUT or reference is None or reference.id == self.row["trial"]:
            return None
        if self.row["reference"] == reference.id:
            return results_ranking.read_speedup(self.row)
        return _compare_pair(self.row, self.trial, reference, self.run)

    @property
    def pairs(self) -> list[Speedup]:
        """Speed-ups over the reference and over each row behind the winner."""
        return [*([self.gain] if self.gain else []), *self.contest.leads]

    @property
    def main_pairs(self) -> list[Speedup]:
        """Speed-ups over the reference and over the runner-up."""
        return [*([self.gain] if self.gain else []), *self.contest.leads[:1]]

    @property
    def opponents(self) -> list[TrialResult]:
        """Distinct trials of the reference and of the runner-up, other than the winner."""
        trials = [self.reference, *(self.run.trials[id] for id in self.contest.ranked["trial"].iloc[1:2])]
        return [*{t.id: t for t in trials if t is not None and t is not self.trial}.values()]

    @cached_property
    def confirmed(self) -> tuple[Finding, ...]:
        """Findings of the winner's confirmation."""
        return tuple(self.list_confirmations())

    @cached_property
    def is_doubted(self) -> bool:
        """Whether the confirmation or the sustained load contradicts the winner."""
        is_overtaken = any(each.has_moved and each.value < 1 for _, each in self.find_sustained())
        return is_overtaken or any(each.kind == WARNING for each in self.confirmed)

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing to compare the winner with."""
        return self.speed == LATENCY and not self.pairs and not self.run.conditions

    @cached_property
    def badge(self) -> str:
        """Certainty of the decision, in one or two words."""
        if self.is_alone:
            return "not compared"
        is_tied = self.contest.is_tied or (self.gain is not None and self.gain.verdict == stats.EQUIVALENT)
        waits = self.speed == LATENCY and awaits_evidence(self.ranking)
        if self.is_doubted or waits or any(each.verdict not in (stats.FASTER, stats.EQUIVALENT) for each in self.pairs):
            return "open"
        if is_tied or self.contest.rivals:
            return "tie"
        if cpu_contention(self.run.records) is not None:
            return "busy machine"
        return "close" if any(each.low < MIN_PRINTED_LEAD for each in self.contest.leads) else DECIDED

    def describe_reality(self) -> str:
        """Describe whether the winner is fastest beyond noise, how that was measured, and reasons for doubt."""
        contest, gain, reference, run = self.contest, self.gain, self.reference, self.run
        if not self.pairs:
            if run.conditions and len(self.ranking.first) > 1:
                conditions = "the budget" if not run.limits else run.conditions
                return f"nothing else is {'shown to be ' if awaits_evidence(self.ranking) else ''}within {conditions}"
            return "there is nothing to compare it with"
        evidence = _format_rounds(int(self.row["rounds"]), max(each.rejected for each in self.main_pairs))
        evidence += f", measured {self.main_pairs[0].measured}" if self.speed == LATENCY else ""
        parts, trials = [self._choose_opening(evidence)], [self.trial, *([reference] if gain else [])]
        if contest.rivals and not contest.is_one_round:
            rivals = [f"{self.name_row(row)}{_format_lead(lead)}" for row, lead in contest.rivals]
            relation = "as fast as" if contest.is_tied else "not decided against"
            parts.append(f"{relation} {_join_first(rivals)}{self._format_needed()}")
        elif not contest.rivals and contest.leads:
            runner_up, lead = contest.ranked.iloc[1], contest.leads[0]
            # not repeating the headline's ratio
            if gain is None or reference is None or runner_up["trial"] != reference.id:
                ratio = format_ratio(lead.value, lead.low, lead.high)
                margin = "" if ratio == UNCLEAR_WORD else f", by {ratio}"
                parts.append(f"ahead of the runner-up, {self.name_row(runner_up)}{margin}")
                trials.append(run.trials[runner_up["trial"]])
        parts += _describe_builds(trials, self.main_pairs)
        parts += ["on a busy machine"] * (cpu_contention(run.records) is not None)
        return "; ".join([*parts, *(["not fully confirmed when measured again"] * self.is_doubted)])

    def _choose_opening(self, evidence: str) -> str:
        verdicts = {each.verdict for each in self.pairs}
        if verdicts == {stats.FASTER}:
            return f"yes, in {evidence}"
        if stats.ONE_ROUND in verdicts:
            return f"not known from {evidence}: it may be noise"
        if self.contest.is_tied:
            return f"no difference that matters, in {evidence}"
        if self.gain is not None and self.reference is not None and self.gain.verdict == stats.FASTER:
            return f"faster than {self.name_reference(self.reference)} in {evidence}"
        return f"undecided after {evidence}"

    def _format_needed(self) -> str:
        """Format the number of further rounds, or builds, that would decide the undecided pairs; "" without any."""
        undecided = [lead for _, lead in self.contest.rivals if lead.verdict == stats.UNDECIDED]
        if not undecided:
            return ""
        hardest_pair = max(undecided, key=_count_more)
        effort = rounds_needed(_count_more(hardest_pair), hardest_pair.builds > 0)
        return f": {effort} would settle it" if _count_more(hardest_pair) <= MAX_ROUNDS else f": it would take {effort}"

    def explain_lower_latency(self) -> Iterator[Finding]:
        """Explain why another row of the table has a lower latency than the winner.

        A machine's speed changes between rounds, so latencies from different rounds tell less than interleaved ratios.
        """
        lower_rows = self.ranking.fastest[self.ranking.fastest[LATENCY] < self.row[LATENCY]]
        if lower_rows.empty:
            return
        row = lower_rows.sort_values(LATENCY).iloc[0]
        pair = _compare_pair(self.row, self.trial, self.run.trials[row["trial"]], self.run)
        if pair.measured != stats.IN_TURNS:
            return
        rounds = f" over {format_count(int(row['rounds']), 'round')}" if row["rounds"] != self.row["rounds"] else ""
        ratio = format_ratio(pair.value, pair.low, pair.high)
        result = f"{self.configuration} is {'ahead' if ratio == UNCLEAR_WORD else f'{ratio} as fast'}"
        name = self.ranking.name_row(row)
        yield Finding(NOTE, f"{name} has a lower latency, {format_ms(row[LATENCY])}{rounds}, but in turns {result}.")

    def list_drifts(self) -> Iterator[Finding]:
        """Warn if the ratio to the reference or the runner-up changes by more than 2 % within every round."""
        for opponent in self.opponents:
            change = blocks.find_drift(self.trial, opponent, str(self.row["boundary"]), str(self.row["clock"]))
            if change and max(change.low, -change.high) > blocks.MIN_DRIFT:
                trend = "slower" if change.value > 0 else "faster"
                text = f"Within each round {self.configuration} gets {trend} against {self.name_reference(opponent)}, "
                text += f"by {abs(change.value):.0%} from the first block to the last"
                yield Finding(WARNING, f"{text}: one of them is not warm; give --warmup.")

    def describe_correctness(self) -> str:
        """Describe the agreement of the winner's outputs with its reference's, its accuracy, and its actual type."""
        parts, row, trial, metric = [], self.row, self.trial, self.ranking.metric
        counterpart = self.run.compared.get(row["trial"])
        if counterpart is not None and row["reference"] == row["trial"] == counterpart.id:
            parts.append("the others' outputs are compared with it")
        elif row["outputs"]:
            name, error = counterpart.configuration if counterpart else "the reference", _distance_of(row)
            doubt = row.get("outputs_doubt")
            parts.append(
                f"outputs are {error} from those of {name}" if doubt else f"outputs agree with those of {name}, {error}"
            )
        else:
            parts.append("its outputs were not compared with any")
        if row.get("outputs_doubt"):
            parts.append(f"{row['outputs_doubt']}; give more with --compared or --data")
        if trial.facts.random_outputs:
            parts = [trial.oddity]
        elif trial.oddity:
            parts.append(trial.oddity)
        if not isnan(accuracy := row.get(metric.column, math.nan)):
            parts.append(", ".join(filter(None, (f"{metric.label} {accuracy:.2f} %", self._format_change()))))
        if types := read_truth(trial):
            parts.append(types.text)
        return "; ".join(parts)

    def _format_change(self) -> str:
        """Format the change of accuracy against the reference; "" if unknown."""
        change = self.ranking.metric.change_in(self.row)
        low, value, high = (format_points(each / 100) for each in change)
        return "" if isnan(change[0]) else f"{value} points [{low}, {high}]"

    def advise(self) -> str:
        """Describe how to settle an undecided result, and the command that exports the winner's file."""
        contest, run, steps = self.contest, self.run, []
        if any(each.verdict == stats.ONE_ROUND for each in self.pairs):
            settings = run.records.settings
            planned_rounds = settings.get("rounds", 2 if settings.get("until") in ADAPTIVE_RULES else 1)
            continuation = "the same command measures the other rounds"
            steps.append(continuation if planned_rounds > 1 else f"measure with --rounds {DEFAULT_ROUNDS} or more")
        elif undecided_pairs := [each for each in self.pairs if each.verdict == stats.UNDECIDED]:
            is_automatic = any(each is pair for each in undecided_pairs for pair in self.main_pairs)
            rounds = int(self.row["rounds"])
            steps.append(_advise_on_rounds(max(undecided_pairs, key=_count_more), is_automatic, rounds, run))
        elif contest.is_tied or (self.gain is not None and self.gain.verdict == stats.EQUIVALENT):
            steps.append("choose by something other than speed")
        id = f" {self.row['trial']}" if len(list(list_winners(run))) > 1 else ""
        has_rivals = contest.rivals and not contest.is_one_round
        choice = f"take {self.configuration}, the first of them" if has_rivals else "take it"
        steps.append(f"{choice}: dyno export {shlex.quote(str(run.records.folder))}{id}")
        return "; ".join([*steps, *filter(None, [_advise_on_images(self.ranking, run)])])

    # Figures on a decision's card: latency, speed-up, certainty, accuracy, cost.

    def make_card_figures(self) -> tuple[Figure, ...]:
        rounds = format_count(int(self.row["rounds"]), "round")
        return (
            _make_latency_figure(self.row),
            *self._make_speedup_figure(),
            Figure("how sure", self.badge, f"{rounds}, {self.gain.measured}" if self.gain else rounds),
            *self._make_accuracy_figure(),
            *_make_cost_figure(self.row),
        )

    def _make_speedup_figure(self) -> Iterator[Figure]:
        gain = self.gain
        if gain is None or self.reference is None:
            return
        name, ratio = self.name_reference(self.reference), format_ratio(gain.value, gain.low, gain.high)
        if gain.verdict == ONE_ROUND:
            yield Figure("speed-up", "unproven", f"over {name}: one round")
        elif ratio == UNCLEAR_WORD or gain.verdict not in (FASTER, EQUIVALENT):
            yield Figure("speed-up", "undecided", f"against {name} ({ratio})")
        elif not is_bounded(gain.low, gain.high):
            yield Figure("speed-up", ratio, f"as fast as {name} (best estimate {format_number(gain.value)}x)")
        else:
            value, _, interval = ratio.partition(" ")
            yield Figure("speed-up", value, f"as fast as {name}{f' {interval}' if interval else ''}")

    def _make_accuracy_figure(self) -> Iterator[Figure]:
        metric, row = self.ranking.metric, self.row
        if not isnan(value := row.get(metric.column, math.nan)):
            change = self._format_change()
            change_text = f", {change} against the reference" if change else ""
            yield Figure("accuracy", f"{value:.2f} %", f"{metric.label}{change_text}")
        elif row["outputs"]:
            yield Figure("outputs", "unclear" if row.get("outputs_doubt") else "agree", _distance_of(row))

    # Confirmation by rounds after the selection, never mixed with the selecting rounds.

    def list_confirmations(self) -> Iterator[Finding]:
        """Yield the winner's confirmation, and disagreements with the selection."""
        row, trial, reference = self.row, self.trial, self.reference
        if not trial.confirmations:
            return
        if failed_round := next((r for r in trial.confirmations if not r.ok), None):
            reason = failed_round.record.reason or failed_round.status
            yield Finding(WARNING, f"{self.configuration} failed when it was measured again: {reason}.")
        costs = _list_costs(trial.confirmations, row, self.speed)
        if not costs:
            return
        count = sum(r.ok for r in trial.confirmations)
        processes = "one fresh process" if count == 1 else f"{count} fresh processes"
        text = f"Measured again after the selection, in {processes}: {_format_spread(costs, row, self.speed)}"
        gain = self._compute_gain(reference) if reference is not None and reference is not trial else None
        if gain is not None and reference is not None:
            ratio, name = format_ratio(gain.value, gain.low, gain.high), self.name_reference(reference)
            unit = "as fast as" if self.speed == LATENCY else f"the {name_items(row['size'])} per second of"
            text += f"; the ratio to {name} is {UNCLEAR_WORD}" if ratio == UNCLEAR_WORD else f", {ratio} {unit} {name}"
        yield Finding(NOTE, text + ".")
        yield from self._find_disagreements(costs, gain)

    def _find_disagreements(self, costs: list[float], gain: Speedup | None) -> Iterator[Finding]:
        row, ranked, name = self.row, self.contest.ranked, self.configuration  # warnings are read without the notes
        change = stats.decide_apart(costs, _list_costs(self.trial.good, row, self.speed))
        if change.verdict == stats.SLOWER:
            text = f"Measured again, {name} is slower than in the rounds that selected it"
            ratio = format_ratio(change.value, change.low, change.high)
            yield Finding(WARNING, f"{text} ({ratio}): chance favoured them, or the machine has changed since.")
        was_faster = self.speed == LATENCY and not self.ranking.sizes and row["verdict"] == stats.FASTER
        if gain is not None and gain.verdict in NO_GAIN and was_faster:
            yield Finding(WARNING, f"Measured again, {name} is not shown to be faster than the reference.")
        if not self.contest.leads:
            return
        first, second = (_keep_confirmations(self.run.trials[ranked.iloc[k]["trial"]]) for k in (0, 1))
        lead = stats.decide(results_ranking.compare_rows(first, second, row, ranked.iloc[1], self.speed, None))
        if lead.value < 1:
            is_real = lead.verdict == stats.SLOWER
            text = f"Measured again, the runner-up {self.ranking.name_row(ranked.iloc[1])} is ahead, "
            text += "and the difference is real" if is_real else "if not beyond noise"
            # The order of the two was undecided before.
            is_expected = not is_real and self.contest.leads[0].verdict != stats.FASTER
            yield Finding(NOTE if is_expected else WARNING, f"{text}: {format_ratio(lead.value, lead.low, lead.high)}.")

    def _compute_gain(self, reference: TrialResult) -> Speedup | None:
        reference_row = self.row.where(self.row.index != "batch", reference.batch)
        pair = _keep_confirmations(self.trial), _keep_confirmations(reference)
        gain = stats.decide(results_ranking.compare_rows(*pair, self.row, reference_row, self.speed, None))
        return None if math.isnan(gain.value) else gain

    def find_sustained(self) -> list[tuple[TrialResult, blocks.SustainedRatio]]:
        """Return the ratios to the reference and to the runner-up under sustained load, if measured."""
        boundary, clock = self._timing
        ratios = []
        for opponent in self.opponents:
            pair = (self.trial, opponent) if boundary == "throughput" else (opponent, self.trial)
            if (ratio := blocks.compare_sustained(*pair, boundary, clock, self.run.rule.margin)) is not None:
                ratios.append((opponent, ratio))
        return ratios

    @property
    def _timing(self) -> tuple[str, str]:
        """Boundary and clock of comparisons; for a throughput without sustained rounds, those of the latency."""
        if self.speed == THROUGHPUT and any(r.facts.blocks.get("throughput") for r in self.trial.sustained):
            return "throughput", ""
        return str(self.row["boundary"]), str(self.row["clock"])

    def list_sustained(self) -> Iterator[Finding]:
        """Yield each ratio under sustained load, as a warning if it differs from that in short turns."""
        boundary, _ = self._timing
        for opponent, ratio in self.find_sustained():
            begin, end = next(r.facts.blocks[boundary][0] for r in self.trial.sustained if r.facts.blocks.get(boundary))
            text = f"Running for {show(end - begin, 'duration')} without a break, {self.trial.configuration} is "
            text += f"{ratio.value:.2f}x as fast as {opponent.configuration} at batch {self.trial.batch}"
            if not ratio.has_moved:
                yield Finding(NOTE, f"{text} ({ratio.short:.2f}x in short turns).")
                continue
            clocks = " and ".join(filter(None, (_describe_clock(t, boundary) for t in (self.trial, opponent))))
            cause = f": {clocks}" if clocks else "; heat or a power limit slows one of them more"
            yield Finding(WARNING, f"{text}, not {ratio.short:.2f}x as in short turns{cause}.")

    def write_headline(self) -> str:
        """Describe the fastest trial and its speed-up in one sentence."""
        run, row, name = self.run, self.row, self.configuration
        time = f"{format_ms(row[LATENCY])} at batch {row['batch']}"
        if self.is_alone:
            return f"{name} takes {time}."
        limit = f" within {run.conditions}" if run.limits or (run.budget and row["budget"]) else ""
        if self.contest.is_one_round:
            return f"ahead{limit} after one round is {name}, {time}: one round proves nothing."
        if self.gain is not None and self.reference is not None:
            comparison = _format_gain(self.gain, self.name_reference(self.reference))
        else:
            comparison = ", the reference" if self.reference is not None else ""
        if not self.contest.rivals:
            return f"fastest{limit} is {name}, {time}{comparison}."
        return f"fastest{limit} is {name_set(self.names, self.contest, run)}; {name} takes {time}{comparison}."

    def describe_rate(self) -> str:
        """Describe the trial with the most images per second in one sentence."""
        row, (name, *_) = self.row, self.names
        rate = f"{format_number(row[THROUGHPUT])}/s"
        tie_text = f"{name_set(self.names, self.contest, self.run)}; {name} reaches {rate}"
        limit = f" within {self.run.conditions}" if self.run.limits else ""
        text = f"most {name_items(row['size'])} per second{limit} with "
        text += tie_text if self.contest.rivals else f"{name}: {rate}"
        key = results_ranking.configuration_of(row), row["size"], row["batch"]
        saturations = results_ranking.find_saturation(self.ranking.group)
        matches = [s for s in saturations if (s.configuration, s.size, s.best_batch) == key]
        return text + (f"; {matches[0].description}." if matches else ".")

    def describe_accuracy(self) -> Iterator[Finding]:
        """Yield the winner's accuracy, and the change against the reference."""
        metric, row, reference = self.ranking.metric, self.row, self.reference
        if metric.column not in row or isnan(row[metric.column]):
            return
        low, high = metric.interval(row)
        text = f"Its {metric.label} is {row[metric.column]:.2f} %"
        text += "" if isnan(low) else f" [{low:.2f}, {high:.2f}]"
        if not is_missing(row["images"]):
            text += f" on {format_count(int(row['images']), 'image')}"
            if not is_missing(row["set_aside"]) and row["set_aside"]:
                text += f" ({row['set_aside']:,} more were set aside for calibration)"
        if change := self._format_change():
            size_text = f" at size {reference.size}" if self.ranking.sizes and reference is not None else ""
            text += f", {change} against the reference{size_text} on the same images"
        yield Finding(NOTE, text + ".")

    def describe_preparation(self) -> Iterator[Finding]:
        """Yield the number of images after which the build time pays off against the reference."""
        reference = self.reference
        if reference is None or reference.id == self.row["trial"]:
            return
        payoff = frontier_table.break_even(self.row, self.trial, reference)
        if payoff is not None and payoff.extra > 0 and payoff.images is not None:
            clause = f"which pays off after about {format_number(payoff.images, 2)} images"
            clause += ", or never, as the gain is not proven" if isinf(payoff.high) else ""
            yield Finding(NOTE, f"Making it takes {show(payoff.extra, 'duration')}, {clause}.")


def _compare_pair(row: pd.Series, trial: TrialResult, other: TrialResult, run: RunData) -> Speedup:
    return results_ranking.estimate_speedup(trial, other, str(row["boundary"]), str(row["clock"]), run.rule)


def name_set(names: Sequence[str], contest: Contest, run: RunData) -> str:
    """Format the rows that may be the best: `one of A, B and C (undecided)`."""
    state = name_equivalence(100 * run.rule.margin).replace(EQUIVALENT, "equal") if contest.is_tied else stats.UNDECIDED
    return f"one of {_join_first(names)} ({state})"


def _join_first(names: Sequence[str]) -> str:
    """Join the first MAX_NAMED names, and append how many more there are."""
    rest = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return join_names([*names[:MAX_NAMED], *rest])


def _format_rounds(rounds: int, disturbed: int) -> str:
    return format_count(rounds, "round") + (f" ({disturbed} left out as disturbed)" if disturbed else "")


def _format_lead(lead: Speedup) -> str:
    ratio = in_brackets(format_ratio(lead.value, lead.low, lead.high))
    return f"{ratio}, which is faster where both measured in turns" if lead.verdict == stats.SLOWER else ratio


def _count_more(pair: Speedup) -> int:
    return MAX_ROUNDS + 1 if pair.more is None else pair.more


def list_rejected(pairs: Sequence[Speedup]) -> Iterator[Finding]:
    """Yield a finding for each pair with disturbed rounds left out, with its ratio over all rounds."""
    for pair in pairs:
        if pair.rejected:
            verb = "was" if pair.rejected == 1 else "were"
            yield Finding(
                NOTE,
                f"{format_count(pair.rejected, 'round')} {verb} disturbed and left out "
                f"({pair.value:.2f}x; {pair.unfiltered:.2f}x with all rounds).",
            )


def _describe_builds(trials: Sequence[TrialResult | None], pairs: Sequence[Speedup]) -> Iterator[str]:
    """Yield whether the result holds for one or several builds of an engine, if its builds differ."""
    counts = [count for t in trials if t is not None and (count := results_ranking.list_builds(t))]
    if 1 in counts:
        yield "of one build: another build may differ"
    elif counts and all(pair.decided for pair in pairs):
        yield f"holds for builds, of which {min(counts)} were measured"
    elif counts:
        yield f"over {min(counts)} builds"


def _distance_of(row: pd.Series) -> str:
    return name_distance(row["output_error"], row["labels_changed"])


def list_untried(run: RunData) -> str:
    """List precisions that the study's backends also support, each with the option that adds it.

    "" if the user chose backends or precisions, or gave a file in a lower precision.
    """
    settings, trials = run.records.settings, list(run.records)
    if any(settings.get(name) for name in ("backends", "precisions", "baseline")):
        return ""
    if any(t.spec.model.precision not in ("", "fp32") for t in trials):
        return ""
    data_option = "--data" if any(t.spec.dims.height for t in trials) else "--input with their range"
    options = {"int8": f"--precision fp32,int8 and {data_option}", "bf16": "--precision fp32,bf16"}
    if not (settings.get("data") or settings.get("calibration")):
        options["int8"] = "--data" if data_option == "--data" else options["int8"]
    if all(t.device.partition(":")[0] == "cpu" for t in trials):
        del options["bf16"]  # bf16 was tried where the processor supports it
    backends, precisions = {t.backend for t in trials}, {t.precision for t in trials}
    untried = [name for name in options if backends & LOWERING_ADVICE[name] and name not in precisions]
    return ", ".join(f"{name} (add {options[name]})" for name in untried)


def _advise_on_rounds(pair: Speedup, is_automatic: bool, rounds: int, run: RunData) -> str:
    """Describe how to get the rounds that would decide the pair.

    `is_automatic` means that a study adds rounds by itself: for the winner with its reference or its runner-up.
    """
    count = _count_more(pair)
    if count > MAX_ROUNDS:
        return "the difference is too small, or the machine too noisy, for more rounds to settle it"
    if pair.builds:
        return f"measure with --builds {pair.builds + count} and another --out"
    if not is_automatic:
        return f"measure with --rounds {rounds + count}"
    if run.rule.first:
        return "the same command with more --minutes continues"
    return "the same command without --rounds continues until decided"


def awaits_evidence(ranking: Ranking) -> bool:
    """Return whether a trial ahead of the winner may be within budget and limits: more evidence could decide."""
    states = [(row["budget"], read_limit(row)) for _, row in ranking.ahead.iterrows()]
    open_states = [each for each in states if each[0] != OVER and not each[1].startswith(EXCLUDING_LIMITS)]
    return any(budget == UNDECIDED or limit.startswith(UNDECIDED) for budget, limit in open_states)


def read_limit(row: pd.Series) -> str:
    """Return a row's outcome under the limits, from its column; "" without limits."""
    return str(row.get("limit") or "")


def describe_lead(ranking: Ranking, row: pd.Series, run: RunData) -> str:
    """Describe whether a row ahead of the winner is faster or seems so; "" without a winner."""
    if ranking.fastest.empty:
        return ""
    trial, winner = run.trials[row["trial"]], run.trials[ranking.fastest.iloc[0]["trial"]]
    return "is faster" if _compare_pair(row, trial, winner, run).verdict == stats.FASTER else "seems faster"


def _advise_on_images(ranking: Ranking, run: RunData) -> str:
    """Describe how many images would decide whether a faster trial is within the budget; "" if all are decided."""
    rows = [
        row
        for _, row in ranking.ahead.iterrows()
        if row["budget"] == UNDECIDED and not read_limit(row).startswith(EXCLUDING_LIMITS)
    ]
    row, advice = next(((row, advice) for row in rows if (advice := describe_missing_images(row))), (None, ""))
    if row is None:
        return ""
    lead = describe_lead(ranking, row, run)
    return f"{advice} whether {ranking.name_row(row)}{lead and f', which {lead},'} is within the budget"


def describe_missing_images(row: pd.Series) -> str:
    """Return the start of a sentence on the images that would decide a row's budget; "" if no number would."""
    count = row["more_images"]
    is_estimated = isinstance(count, (int, float)) and not isnan(count)
    return f"about {int(count):,} more images are needed to tell" if is_estimated else ""


def _make_latency_figure(winner: pd.Series) -> Figure:
    low, high = winner["latency_ms_low"], winner["latency_ms_high"]
    below = [format_limits(low, high, format_ms).strip()] if is_bounded(low, high) else []
    rate = (
        []
        if is_missing(winner[THROUGHPUT])
        else [f"{format_number(winner[THROUGHPUT])} {name_items(winner['size'])}/s"]
    )
    return Figure("latency", format_ms(winner[LATENCY]), ", ".join([*below, f"batch {winner['batch']}", *rate]))


def _make_cost_figure(winner: pd.Series) -> Iterator[Figure]:
    """Yield the preparation time, file size and memory, as far as known."""
    sizes: list[tuple[Any, str]] = [(winner["size_mb"], "MB file"), (winner["memory_mb"], "MB of memory")]
    below = ", ".join(f"{format_number(value)} {unit}" for value, unit in sizes if not is_missing(value) and value)
    seconds = 0.0 if is_missing(winner["build_s"]) else float(winner["build_s"])
    if below or seconds:
        yield Figure("cost", f"{show(seconds, 'duration')} to make" if seconds else "nothing to make", below)


def _describe_clock(trial: TrialResult, boundary: str) -> str:
    """Describe the GPU's clock and power under sustained load, and its clock in short turns; "" if unknown."""
    rounds = [r for r in trial.sustained if r.trace is not None and r.facts.blocks.get(boundary)]
    summaries = [timeline.summarise_timeline(r.trace, r.facts.blocks[boundary]) for r in rounds if r.trace is not None]
    sustained, baseline = timeline.join_timelines(summaries), trial.gpu
    if sustained is None or baseline is None or isnan(sustained.clock) or isnan(baseline.clock):
        return ""
    power = "" if isnan(sustained.power) else f", {sustained.power:.0f} W"
    return f"{trial.configuration} at {sustained.clock:.0f} MHz{power} (in turns {baseline.clock:.0f} MHz)"


def _list_costs(rounds: Sequence[Round], row: pd.Series, speed: str) -> list[float]:
    """Return the seconds of each successful round (or build), per batch for latency, per input for throughput."""
    good = [r for r in rounds if r.ok]
    if speed == THROUGHPUT:
        return results_ranking.image_costs(good, row)
    return by_build((r, m) for r in good if (m := r.median(row["boundary"], row["clock"])) is not None)


def _keep_confirmations(trial: TrialResult) -> TrialResult:
    return replace(trial, rounds=trial.confirmations, companions=[])


def _format_spread(costs: list[float], row: pd.Series, speed: str) -> str:
    if speed == THROUGHPUT:
        rate = stats.find_center([1 / cost for cost in costs])
        interval = format_limits(rate.low, rate.high, format_number)
        return f"{format_number(rate.value)} {name_items(row['size'])}/s{interval}"
    latency = stats.find_center([1e3 * cost for cost in costs])
    return f"{format_ms(latency.value)}{format_limits(latency.low, latency.high, format_ms)} at batch {row['batch']}"


def decide_run(ranking: Ranking, run: RunData) -> Iterator[Decision]:
    """Yield the decision on latency at the smallest batch, and with several batches that on images per second."""
    yield _decide_fastest(ranking, run)
    if len(ranking.most_images):
        yield _decide_most_images(Winner(ranking, run, THROUGHPUT))


def list_incomparable(ranking: Ranking) -> Iterator[Finding]:
    """Yield the trials that are not ranked because they are not comparable with their reference."""
    reasons: dict[str, list[str]] = {}
    for _, row in ranking.incomparable.iterrows():
        names = reasons.setdefault(str(row["verdict"]), [])
        if (name := ranking.name_row(row)) not in names:
            names.append(name)
    for verdict, names in reasons.items():
        yield Finding(WARNING, f"{ranking.scope}: {', '.join(names)} not ranked, {verdict}.")


def list_failed(ranking: Ranking, run: RunData) -> Decision | None:
    """Return a decision that reports that no trial of the ranking succeeded; None if any did."""
    if not results_ranking.list_usable(ranking.group).empty:
        return None
    waiting_count = int((ranking.group["status"] == UNFINISHED).sum())
    if waiting_count:
        text = f"no trial has succeeded yet; {waiting_count} of {len(ranking.group)} were not measured so far."
        owner = run.records.owner
        return Decision(
            WARNING,
            ranking.scope,
            text,
            (("next", f"wait: {MEASURING_REASON.format(owner)}" if owner else RESUME_ADVICE),),
        )
    text = "no trial was measured." if (ranking.group["status"] == "skipped").all() else "no trial succeeded."
    return Decision(FAILURE, ranking.scope, text, (("next", REASONS_NOTE),))


def _decide_fastest(ranking: Ranking, run: RunData) -> Decision:
    exclusions = (*_list_excluded(ranking, run), *list_incomparable(ranking))
    if (failure := list_failed(ranking, run)) is not None:
        return Decision(failure.kind, failure.where, failure.text, failure.answers, exclusions)
    is_measured = results_ranking.list_usable(ranking.first)[LATENCY].notna().any()
    if ranking.fastest.empty and run.conditions and is_measured:
        if run.limits and len(rows := results_ranking.keep_within_budget(ranking.first)):
            return _report_no_fit(ranking, rows, run, exclusions)
        text = f"no trial is within {run.budget} with confidence."
        step = _advise_on_images(ranking, run) or "allow more loss, or calibrate and quantise differently"
        return Decision(FAILURE, ranking.scope, text, (("next", step),), exclusions)
    if ranking.fastest.empty:
        return Decision(NOTE, ranking.scope, "no latency was measured.", findings=exclusions)
    winner = Winner(ranking, run)
    badge, untried = winner.badge, list_untried(run)
    return Decision(
        NOTE if winner.is_alone else BEST if badge == DECIDED else WARNING,
        ranking.scope,
        winner.write_headline(),
        (
            ("real", winner.describe_reality()),
            ("right", winner.describe_correctness()),
            ("next", winner.advise()),
            *([("not tried", untried)] if untried else []),
        ),
        (
            *winner.confirmed,
            *winner.list_sustained(),
            *list_rejected(winner.main_pairs),
            *winner.explain_lower_latency(),
            *winner.list_drifts(),
            *_describe_latency(winner.row),
            *winner.describe_accuracy(),
            *winner.describe_preparation(),
            *exclusions,
        ),
        winner.make_card_figures(),
        badge,
        winner.contest.candidates,
        "latency",
    )


def _report_no_fit(ranking: Ranking, rows: pd.DataFrame, run: RunData, exclusions: tuple[Finding, ...]) -> Decision:
    """Report that no trial at the smallest batch keeps the limits, the closest one, and the next step."""
    closest = results_limits.find_closest(rows, run.limits)
    assert closest is not None
    name = f"{ranking.name_row(closest)} at batch {closest['batch']}"
    text = f"no trial{_name_batch(ranking)} is within {run.conditions}; the closest is {name}: "
    text += results_limits.describe_misses(closest, run.limits)
    step = _advise_on_limits(closest, run)
    return Decision(FAILURE, ranking.scope, f"{text}.", (("next", step),), exclusions)


def _name_batch(ranking: Ranking) -> str:
    return f" at batch {ranking.first['batch'].iloc[0]}" if ranking.group["batch"].nunique() > 1 else ""


def _advise_on_limits(closest: pd.Series, run: RunData) -> str:
    """Describe the next step if no trial keeps the limits, from the closest row."""
    checks, settings = results_limits.check_limits(closest, run.limits), run.records.settings
    states = {check.state for check in checks}
    if OVER in states:
        return "allow more, or try other engines, precisions (--precision) or sizes (--size)"
    if results_limits.UNMEASURED in states:
        names = [check.limit.name for check in checks if check.state == results_limits.UNMEASURED]
        return f"omit the limit on {join_names(names)}, or measure it"
    if short := [check for check in checks if check.samples]:
        count = max(stats.samples_for(check.limit.quantity.percentile) for check in short)
        if "samples" in settings or "interval" in settings or settings.get("turns") is False:
            return f"measure with --samples {count} or more"
        seconds = float(settings.get("seconds", 2.0)) * count / max(1, min(check.samples for check in short))
        return f"measure longer, with --seconds {math.ceil(1.2 * seconds)}"
    return f"measure with --rounds {2 * int(closest['rounds'])} for a narrower interval"


def _format_gain(gain: Speedup, name: str) -> str:
    ratio = format_ratio(gain.value, gain.low, gain.high)
    if ratio == UNCLEAR_WORD:
        return f", undecided against {name}"
    if gain.verdict == ONE_ROUND:
        return f": {ratio} as fast as {name} in one round, which proves nothing"
    estimate = "" if is_bounded(gain.low, gain.high) else f" (best estimate {format_number(gain.value)}x)"
    return f": {ratio} as fast as {name}{estimate}"


def _describe_latency(winner: pd.Series) -> Iterator[Finding]:
    if interval := format_limits(winner["latency_ms_low"], winner["latency_ms_high"], format_ms):
        yield Finding(NOTE, f"Its latency is {format_ms(winner[LATENCY])}{interval}.")


def _list_excluded(ranking: Ranking, run: RunData) -> Iterator[Finding]:
    """Yield faster trials excluded by the budget or a limit."""
    budget, metric = run.budget, ranking.metric
    if not run.conditions:
        return
    for _, row in ranking.ahead.iterrows():
        latency, name = format_ms(row[LATENCY]), ranking.name_row(row)
        lead = describe_lead(ranking, row, run)
        subject = f"{name} {lead} ({latency})" if lead else f"{name} takes {latency}"
        change = metric.change_in(row)[1]
        loss = "" if isnan(change) else f" ({format_points(change / 100)} points)"
        misses = "" if ranking.fastest.empty else _describe_misses(row, run)
        if read_limit(row).startswith(EXCLUDING_LIMITS):
            yield from [Finding(NOTE, f"{subject} but {misses}.")] * bool(misses)
        elif row["budget"] == OVER:
            yield Finding(NOTE, f"{subject} but loses more than {budget} allows{loss}.")
        elif row["budget"] == UNDECIDED:
            advice = describe_missing_images(row).removesuffix(" to tell") or "more would not help"
            images = format_count(int(row["images"]), "image")
            text = f"{subject} but {images} can't tell whether it is within {budget}{loss}: {advice}."
            yield Finding(WARNING, text)
        elif misses:
            yield Finding(WARNING, f"{subject} but {misses}.")


def _describe_misses(row: pd.Series, run: RunData) -> str:
    """Describe how a row misses its limits, as the end of a sentence; "" if it keeps them."""
    misses = results_limits.describe_misses(row, run.limits)
    verb = "doesn't keep" if read_limit(row).startswith(OVER) else "is not shown to keep"
    return misses and f"{verb} its limits: {misses}"


def _list_limited(winner: Winner) -> Iterator[Finding]:
    """Yield trials with more images per second than the winner, excluded by a limit."""
    rows = results_ranking.rank_trials(results_ranking.keep_within_budget(winner.ranking.group), THROUGHPUT)
    for _, row in rows.iloc[: [*rows["trial"]].index(winner.row["trial"])].head(MAX_NAMED).iterrows():
        subject = f"{winner.name_row(row)} reaches {format_number(row[THROUGHPUT])}/s"
        yield Finding(NOTE, f"{subject} but {_describe_misses(row, winner.run)}.")


def _decide_most_images(winner: Winner) -> Decision:
    answers = [("right", winner.describe_correctness())]
    if winner.contest.leads:
        answers.insert(0, ("real", winner.describe_reality()))
    if bound := _describe_copies(winner.trial):
        answers.append(("bound", bound))
    kind, where = BEST if winner.badge == DECIDED else WARNING, winner.ranking.scope
    rejected = list_rejected(winner.main_pairs)
    findings = (*winner.confirmed, *winner.list_sustained(), *rejected, *_list_limited(winner))
    text, candidates = winner.describe_rate(), winner.contest.candidates
    return Decision(kind, where, text, tuple(answers), findings, (), winner.badge, candidates, "throughput")


def _describe_copies(trial: TrialResult) -> str:
    """Describe how copies bound the throughput and what helps; "" if they don't."""
    copies = remarks.describe_copies(trial)
    if copies is None or not copies.is_bound:
        return ""
    advice = "" if trial.options.get("input") == "uint8" else f" (images: {trial.backend}@input=uint8 copies a quarter)"
    return copies.sentence + advice
