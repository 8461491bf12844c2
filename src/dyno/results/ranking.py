"""Rankings: which trials are compared for speed, and their order; the verdict reports it and a study confirms it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, cmp_to_key
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.formatting import format_count, format_number, format_size, name_items
from dyno.results import stats
from dyno.results.blocks import are_quiet, average_rounds, block_ratios, list_quiet_rounds, log_ratios
from dyno.results.correctness import INCOMPARABLE, OUTPUTS_WRONG
from dyno.results.metrics import choose_metric
from dyno.results.metrics.accuracy import WITHIN
from dyno.results.metrics.metric import Metric
from dyno.results.metrics.precision import name_precision
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.stats import IN_TURNS
from dyno.results.trial_result import TrialResult, by_build
from dyno.table import Row, is_missing
from dyno.worker.spec import ADAPTIVE_RULES, DEFAULT_ROUNDS, EVERY_ROW

if TYPE_CHECKING:
    import pandas as pd

# What is worth choosing: the frontier of accuracy and speed, the fastest within the budget, and saturation.

LATENCY, THROUGHPUT = "latency_ms", "throughput_ips"
RANKED_BY = (
    "trial", "reference", "measured", "boundary", "clock", "status", "outputs", "verdict", "budget", "limit", LATENCY,
    "speedup",
)  # fmt: skip
ROW_INDEX = "#place"  # column with a row's index
SATURATION_SHARE = 0.95  # share of the best throughput from which larger batches gain little (R37)
SERIES = ("model", "size", "device", "backend", "precision", "runtime", "options")


@dataclass(frozen=True)
class Saturation:
    """How the throughput of one configuration grows with the batch: where it reaches 95 % of its best."""

    model: str
    configuration: str
    size: str
    batch: int
    images_per_s: float
    best_batch: int
    best_images_per_s: float
    largest: int

    @property
    def description(self) -> str:
        """The batch at which throughput saturates, as text."""
        if self.batch == self.largest:
            return f"throughput still rises at batch {self.largest}, the largest tried"
        if self.batch == self.best_batch:
            return f"throughput is highest at batch {self.batch}, of up to {self.largest}"
        share = f"{100 * self.images_per_s / self.best_images_per_s:.0f} %"
        best = f"{format_number(self.best_images_per_s)} {name_items(self.size)}/s at batch {self.best_batch}"
        return f"throughput saturates at batch {self.batch} ({share} of the best, {best})"


def mark_usable(row: Any) -> Any:
    """Return whether a row, or each one of a frame, could be chosen: every round succeeded, and no check found wrong
    outputs."""
    return (row["status"] == "ok") & (row["outputs"] != OUTPUTS_WRONG)


def list_usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that could be chosen."""
    return frame[mark_usable(frame)]


def read_throughput(frame: pd.DataFrame) -> pd.Series:
    """Return images per second as measured; where it was not, batch / latency, which is a lower bound for it."""
    return frame[THROUGHPUT].fillna(read_fps(frame))


def read_fps(frame: pd.DataFrame) -> pd.Series:
    """Return images per second of one batch after another: batch / median latency (R34)."""
    return frame["batch"].astype(float) * 1e3 / frame[LATENCY]


def find_pareto(frame: pd.DataFrame, speed: str, quality: str = "top1") -> pd.DataFrame:
    """Return the rows that no other row beats at both: fastest first, accuracy strictly rising.

    `speed` is LATENCY (less is better) or THROUGHPUT (more is better). Rows without either number are left out.
    """
    rows = list_usable(frame).dropna(subset=[speed, quality])
    rows = rows.sort_values([speed, quality], ascending=[speed != THROUGHPUT, False], kind="stable")
    best, positions = -math.inf, []
    for position, value in enumerate(rows[quality]):
        if value > best:
            best = value
            positions.append(position)
    return rows.iloc[positions]


def keep_within_budget(frame: pd.DataFrame) -> pd.DataFrame:
    """Return usable rows that are within the accuracy budget with confidence; all of them where there is no budget."""
    return _pick(frame, _keep_within_budget)


def keep_eligible(frame: pd.DataFrame) -> pd.DataFrame:
    """Return usable rows that are within the accuracy budget and the limits, if any, with confidence."""
    return _pick(frame, _keep_eligible)


def rank_trials(frame: pd.DataFrame, speed: str = LATENCY) -> pd.DataFrame:
    """Return the rows that have the speed, fastest first.

    Rows that were all measured in turns with one reference are sorted by their speed-ups, not by latencies, which the
    machine's own changes of speed affect.
    """
    if speed == LATENCY:
        return _pick(frame, _rank_by_latency)
    rates = frame.assign(**{THROUGHPUT: read_throughput(frame)}).dropna(subset=[THROUGHPUT])
    return rates.sort_values(THROUGHPUT, ascending=False, kind="stable")


def sort_rows(frame: pd.DataFrame, trials: Mapping[str, TrialResult]) -> pd.DataFrame:
    """Return the rows that have a latency, fastest first.

    Of two that measured in turns, the ratio of one to the other decides, over undisturbed rounds if there is one: by
    their ratios to a reference whose latency jumps, either may seem ahead.
    """
    return _pick(frame, lambda rows: _sort_rows(rows, trials))


def order_frame(group: pd.DataFrame, trials: Mapping[str, TrialResult]) -> pd.DataFrame:
    """Return the rows of a group in the order of `order_group`."""
    return _pick(group, lambda rows: order_group(rows, trials))


def order_group(rows: Sequence[Row], trials: Mapping[str, TrialResult]) -> list[Row]:
    """Return all rows of one model, size, batch and device in the order of tables and charts.

    Those that may win come first, fastest first; then those that a check, the budget or a limit
    excludes; then those without a latency.
    """
    comparable = [row for row in rows if not row["verdict"].startswith(INCOMPARABLE)]
    ordered = _sort_rows(_keep_eligible(comparable), trials)
    for choose in (_rank_by_latency, list):
        placed = {row["trial"] for row in ordered}
        ordered += choose([row for row in rows if row["trial"] not in placed])
    return ordered


# Rows as plain values: of the many small groups of a large study, each operation of pandas costs more than the rest.


def _pick(frame: pd.DataFrame, choose: Callable[[Sequence[Row]], list[Row]]) -> pd.DataFrame:
    """Return those of a frame's rows that `choose` returns, in its order."""
    rows = frame[[name for name in RANKED_BY if name in frame]].to_dict("records")
    return frame.iloc[[row[ROW_INDEX] for row in choose([row | {ROW_INDEX: k} for k, row in enumerate(rows)])]]


def _keep_within_budget(rows: Sequence[Row]) -> list[Row]:
    usable = [row for row in rows if mark_usable(row)]
    return [row for row in usable if row["budget"] == WITHIN] if any(row["budget"] for row in usable) else usable


def _keep_eligible(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _keep_within_budget(rows) if row.get("limit", WITHIN) == WITHIN]


def _rank_by_latency(rows: Sequence[Row]) -> list[Row]:
    timed = [row for row in rows if not is_missing(row[LATENCY])]
    if _is_in_turns(timed):
        return sorted(timed, key=lambda row: -row["speedup"])
    return sorted(timed, key=itemgetter(LATENCY))


def _is_in_turns(rows: Sequence[Row]) -> bool:
    """Return whether every row is the reference or was measured in turns with it."""
    return len({row["reference"] for row in rows}) == 1 and all(
        not is_missing(row["speedup"]) and (row["measured"] == IN_TURNS or row["trial"] == row["reference"])
        for row in rows
    )


def _sort_rows(rows: Sequence[Row], trials: Mapping[str, TrialResult]) -> list[Row]:
    ordered = _rank_by_latency(rows)

    def compare_pair(a: Row, b: Row) -> int:
        sets = block_ratios(trials[a["trial"]], trials[b["trial"]], a["boundary"], a["clock"])
        ratios = average_rounds([each for each in sets if each.is_quiet] or sets)
        return int(np.sign(np.mean(ratios))) if ratios else 0

    if not _is_in_turns(ordered):
        return ordered
    return sorted(ordered, key=cmp_to_key(compare_pair))


def find_saturation(frame: pd.DataFrame) -> list[Saturation]:
    """Return the smallest batch reaching SATURATED of the best throughput, per configuration with several batches."""
    saturations = []
    rows = list_usable(frame).assign(ips=read_throughput(list_usable(frame))).dropna(subset=["ips"])
    for key, series in rows.groupby(list(SERIES), sort=False):
        ordered = series.sort_values("batch")
        is_measured = ordered[THROUGHPUT].notna()
        if ordered["batch"].nunique() < 2 or is_measured.any() != is_measured.all():  # a bound is no rate
            continue
        best = ordered.loc[ordered["ips"].idxmax()]
        first = ordered[ordered["ips"] >= SATURATION_SHARE * best["ips"]].iloc[0]
        identity = dict(zip(SERIES, key, strict=True))
        saturations.append(
            Saturation(
                model=str(identity["model"]),
                configuration=configuration_of(first),
                size=str(identity["size"]),
                batch=int(first["batch"]),
                images_per_s=float(first["ips"]),
                best_batch=int(best["batch"]),
                best_images_per_s=float(best["ips"]),
                largest=int(ordered["batch"].max()),
            )
        )
    return saturations


def describe_configuration(row: pd.Series) -> str:
    """Return the same as `configuration` for a sentence, with the precision that it really ran in."""
    return configuration_of(row).removesuffix(str(row["precision"])) + name_precision(row)


def configuration_of(row: pd.Series) -> str:
    """Return backend with its options, and precision: a row's name within its group."""
    options = f"@{str(row['options']).replace(' ', '@')}" if row["options"] else ""
    runtime = f"@runtime={row['runtime']}" if row["runtime"] != "main" else ""
    return f"{row['backend']}{options}{runtime} {row['precision']}"


COMPARED_PLACES = 2  # the winner and its runner-up


@dataclass(frozen=True)
class Ranking:
    """Trials of one model on one device, at one size, or at every size where an accuracy budget covers all sizes.

    `apart` holds those that can't be compared with their reference: with other weights it is another model.
    `metric` is the accuracy that is shown, and `trials` are the run's, by id.
    """

    where: str
    group: pd.DataFrame
    apart: pd.DataFrame
    sizes: bool
    metric: Metric
    trials: Mapping[str, TrialResult] = field(repr=False)

    @property
    def first(self) -> pd.DataFrame:
        """Trials at the smallest batch, where the lowest latency wins."""
        return self.group[self.group["batch"] == self.group["batch"].min()]

    @cached_property
    def fastest(self) -> pd.DataFrame:
        """Trials within the budget and the limits at the smallest batch, fastest first."""
        return sort_rows(keep_eligible(self.first), self.trials)

    @cached_property
    def ahead(self) -> pd.DataFrame:
        """Trials at the smallest batch that are faster than the first of `fastest`, in the same order."""
        rows, fastest = sort_rows(list_usable(self.first), self.trials), self.fastest
        if fastest.empty:
            return rows
        return rows.iloc[: [*rows["trial"]].index(fastest.iloc[0]["trial"])]

    @property
    def most_images(self) -> pd.DataFrame:
        """Trials within budget and limits by images per second, most first; empty with one batch: see `fastest`."""
        ranked = rank_trials(keep_eligible(self.group), THROUGHPUT)
        return ranked if self.group["batch"].nunique() > 1 else ranked.iloc[:0]

    def rank_by(self, speed: str) -> pd.DataFrame:
        """Return the ranking by LATENCY or THROUGHPUT."""
        return self.fastest if speed == LATENCY else self.most_images

    def find_reference(self, row: pd.Series) -> TrialResult | None:
        """Return the reference of a row's speed-up: that of its size, or of the first size where all sizes compete."""
        return self.trials.get(row["budget_reference"] if self.sizes else row["reference"])

    def name_row(self, row: pd.Series) -> str:
        """Return a row's name in the ranking, with the precision it ran in where that isn't the requested one."""
        return describe_configuration(row) + (f" at size {row['size']}" if self.sizes else "")


def rank_goals(run: RunData) -> list[Ranking]:
    """Return every ranking of a run, in the table's order."""
    all_rankings = []
    for _, models in run.frame.groupby(["model", "device"], sort=False):
        name, sizes = models["model"].iloc[0], models["size"].unique()
        if run.budgets and len(sizes) > 1:
            all_rankings.append(_make_ranking(str(name), models, run, True))
            continue
        for size in sizes:
            where = f"{name}{format_size(size, ' at size ')}"
            all_rankings.append(_make_ranking(where, models[models["size"] == size], run, False))
    return all_rankings


def _make_ranking(where: str, rows: pd.DataFrame, run: RunData, sizes: bool) -> Ranking:
    apart = rows["verdict"].str.startswith(INCOMPARABLE)
    return Ranking(where, rows[~apart], rows[apart], sizes, choose_metric(rows[~apart], run.budget_metrics), run.trials)


def is_within_limits(run: RunData) -> bool:
    """Return whether every ranking with a trial that could be chosen has one within the budget and the limits."""
    rankings = [ranking for ranking in rank_goals(run) if len(list_usable(ranking.group))]
    return all(len(ranking.fastest) or len(ranking.most_images) for ranking in rankings)


def list_winners(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the model and size of each ranking that has a winner, and the winner's id."""
    for ranking in rank_goals(run):
        ordered = ranking.fastest
        if len(ordered):
            yield ranking.where, str(ordered.iloc[0]["trial"])


def list_finalists(run: RunData) -> dict[str, set[str]]:
    """Return the ids of the trials to confirm, each with the boundaries that it is to be timed at.

    They are each winner, its runner-up, and the reference of its speed-up.
    """
    found: dict[str, set[str]] = {}
    for ranking in rank_goals(run):
        for speed in (LATENCY, THROUGHPUT):
            ordered = ranking.rank_by(speed)
            chosen = [str(id) for id in ordered["trial"].iloc[:COMPARED_PLACES]]
            if len(ordered) and (reference := ranking.find_reference(ordered.iloc[0])) is not None:
                chosen.append(reference.id)
            if len(set(chosen)) > 1:  # a single trial was not selected by chance
                boundary = "throughput" if speed == THROUGHPUT else str(ordered.iloc[0]["boundary"])
                for id in chosen:
                    found.setdefault(id, set()).add(boundary)
    return found


# CPU contention: other programs' load while a study was measured, and whether a ranking can still be trusted.


@dataclass(frozen=True)
class Contention:
    """The number of timed jobs, of disturbed ones, of those that did not measure in turns, the most processors that
    other programs kept busy, and whether any configurations are compared: a lone one has no rank to lose."""

    jobs: int
    disturbed: int
    alone: int
    processors: float
    compared: bool = True

    @property
    def mostly(self) -> bool:
        """Whether most jobs were disturbed one at a time: the others are too few to rank engines by.

        In turns what disturbs one job disturbs those that it is compared with, so their ratios stand.
        """
        return self.compared and self.alone > self.jobs / 2

    @property
    def sentence(self) -> str:
        """The effect on the measured times, as a sentence."""
        during = f"during {self.disturbed} of {format_count(self.jobs, 'job')}"
        busy = f"other programs kept up to {self.processors:.1f} processors busy {during}"
        if self.mostly:
            return f"No winner is named: {busy}, and on a quiet machine the order may be another."
        if not self.compared:
            doubt = "those latencies may differ from a quiet machine's; measure again on one"
        elif not self.alone:
            doubt = (
                "rankings were measured interleaved and hold under this load, which may slow engines unequally; "
                "absolute latencies may differ from a quiet machine's"
            )
        else:
            doubt = "those latencies and their order may differ from a quiet machine's; measure again on one"
        return f"{busy.capitalize()}: {doubt}."


MIN_DISTURBED_SHARE = 0.1  # smaller shares of disturbed jobs are outweighed by the rest


def cpu_contention(results: Iterable[TrialResult], compared: bool = True) -> Contention | None:
    """Return the contention that the records show, or None where it can't matter.

    It matters where it disturbed at least a tenth of the timed jobs, or at least half of one trial's rounds. The trials
    are `compared` with each other, or are of one configuration alone.
    """
    timed = [t.good for t in results]
    over = [[r for r in rounds if _measure_excess(r) > 0] for rounds in timed]
    jobs, disturbed = sum(map(len, timed)), [r for rounds in over for r in rounds]
    few = len(disturbed) < MIN_DISTURBED_SHARE * jobs
    if not disturbed or (few and all(2 * len(bad) < len(all_) for bad, all_ in zip(over, timed, strict=True) if bad)):
        return None
    most = max(max(r.facts.others_busy.values()) for r in disturbed)
    return Contention(jobs, len(disturbed), sum(not r.turns for r in disturbed), most, compared)


def _measure_excess(r: Round) -> float:
    """Return the processors that other programs kept busy, beyond those that a quiet machine may."""
    limit = r.facts.contention_threshold
    return 0.0 if limit is None else max(r.facts.others_busy.values(), default=0.0) - limit


# How many times faster one trial is than another: paired where they measured in turns, else between processes.

MIN_ROUNDS = 2  # shared rounds needed for a spread


def make_rule(settings: Mapping[str, Any], equivalent: float | None = None) -> stats.Rule:
    """Return the rule that decides the pairs of a study, from its settings; `equivalent` (percent) overrides theirs."""
    percent = settings.get("equivalent") if equivalent is None else equivalent
    margin = stats.Rule.margin if percent is None else float(percent) / 100
    return stats.Rule(
        margin, int(settings.get("rounds", DEFAULT_ROUNDS)) if settings.get("until") in ADAPTIVE_RULES else 0
    )


def gather_evidence(
    own: TrialResult, reference: TrialResult, boundary: str, clock: str = "", rule: stats.Rule | None = None
) -> stats.Evidence | None:
    """Collect the evidence from the rounds of both trials at the boundary, by that clock.

    Where both measured in turns in two rounds or more it is `stats.pair_evidence`, else `stats.collect_evidence`; where
    rounds go through builds of either engine, a build is one observation, the mean of its rounds. Where rounds went on
    until decided, only the rounds that both have count: further rounds of others must not change a decision.
    """
    sets = block_ratios(reference, own, boundary, clock)
    paired = average_rounds(sets)
    are_rounds = max(list_builds(own), list_builds(reference)) < 2
    unfiltered = log_ratios(reference, own, boundary, clock, keep_disturbed=True)
    both = own.round_medians(boundary, clock).keys() & reference.round_medians(boundary, clock).keys()
    medians = []
    for t, rounds in zip((own, reference), list_quiet_rounds((own, reference), boundary), strict=True):
        quiet = {r.folder.name for r in rounds}
        medians.append(t.medians(boundary, clock, quiet & both if rule is not None and rule.first else quiet))
    if len(paired) >= MIN_ROUNDS or (paired and min(map(len, medians)) < MIN_ROUNDS):
        found = stats.pair_evidence(paired, are_rounds)
        if found is not None:
            left_out = len(unfiltered) - len(paired)
            mean = float(np.mean(unfiltered))
            undisturbed = are_quiet(sets) and all(each.has_delays for each in sets)
            found = replace(found, disturbed=left_out, unfiltered=mean, undisturbed=undisturbed)
    else:
        found = stats.collect_evidence(medians[0], medians[1], are_rounds)
    return found and of_rounds(found, own, reference, len(both))


def of_rounds(compared: stats.Evidence, own: TrialResult, reference: TrialResult, rounds: int) -> stats.Evidence:
    """Add the number of rounds, and of the builds behind them, to the evidence on two trials."""
    # It was looked at after every round: those, too, that gave it no ratio, or another of a build.
    over = max(list_builds(own), list_builds(reference))
    return replace(compared, seen=rounds, builds=over if over > 1 else 0)


def list_builds(t: TrialResult) -> int:
    """Return the number of builds of its engine that were measured, 0 where every build would be the same file."""
    return len({r.build for r in t.good} - {0}) or t.builds


def estimate_speedup(
    own: TrialResult, reference: TrialResult, boundary: str, clock: str = "", rule: stats.Rule | None = None
) -> stats.Speedup:
    """Compute reference latency over the own one at the boundary, by that clock, with its interval and verdict.

    For a pair that is compared by itself, not as one of a family.
    """
    return stats.decide(gather_evidence(own, reference, boundary, clock, rule), rule)


def compare_rows(
    own: TrialResult, other: TrialResult, row: pd.Series, of_other: pd.Series, speed: str, rule: stats.Rule | None
) -> stats.Evidence | None:
    """Collect the evidence on how much faster a trial is, by LATENCY or THROUGHPUT; `row` and `of_other` are the rows.

    Where throughput was not measured, it is that of one batch after another.
    """
    if speed == LATENCY:
        return gather_evidence(own, other, str(row["boundary"]), str(row["clock"]), rule)
    logs, are_rounds = log_ratios(own, other, "throughput"), max(list_builds(own), list_builds(other)) < 2
    if len(logs) >= MIN_ROUNDS:
        found = stats.pair_evidence(logs, are_rounds)
    else:
        has_throughput = all(t.value("throughput", "throughput") is not None for t in (own, other))
        rounds = list_quiet_rounds((own, other), "throughput" if has_throughput else str(row["boundary"]))
        found = stats.collect_evidence(image_costs(rounds[0], row), image_costs(rounds[1], of_other), are_rounds)
    return found and of_rounds(found, own, other, min(len(own.good), len(other.good)))


def image_costs(rounds: Iterable[Round], row: pd.Series) -> list[float]:
    """Return the seconds of an image in each of the rounds, or in each build."""
    rounds = list(rounds)
    if rates := [(r, v) for r in rounds if (v := r.value("throughput", "throughput"))]:
        return by_build((r, 1 / rate) for r, rate in rates)
    medians = [(r, m) for r in rounds if (m := r.median(str(row["boundary"]), str(row["clock"]))) is not None]
    return by_build((r, m / float(row["batch"])) for r, m in medians)


@dataclass(frozen=True)
class Contest:
    """A ranking's first row, and the speed-up of that row over each further one, with its evidence.

    A claim to be the fastest is a claim against each row, so they are one family (multiple comparisons with the best,
    Hsu 1981; here by Holm's procedure). A pair that the table decides keeps the table's verdict.
    """

    ranked: pd.DataFrame
    leads: tuple[stats.Speedup, ...] = ()
    evidence: tuple[stats.Evidence | None, ...] = ()

    @cached_property
    def rivals(self) -> list[tuple[pd.Series, stats.Speedup]]:
        """The rows that may be the fastest as well, each with the first row's speed-up over it."""
        further = (row for _, row in self.ranked.iloc[1:].iterrows())
        return [(row, lead) for row, lead in zip(further, self.leads, strict=True) if lead.verdict != stats.FASTER]

    @property
    def candidates(self) -> tuple[str, ...]:
        """The ids of the first row's trial and of those that may be the fastest as well."""
        return tuple(str(row["trial"]) for row in (self.ranked.iloc[0], *(row for row, _ in self.rivals)))

    @property
    def is_one_round(self) -> bool:
        """Whether every pair has one round alone, which proves nothing."""
        return bool(self.leads) and all(lead.verdict == stats.ONE_ROUND for lead in self.leads)

    @property
    def is_tied(self) -> bool:
        """Whether every rival is as fast for practical purposes."""
        return bool(self.rivals) and all(lead.verdict == stats.EQUIVALENT for _, lead in self.rivals)


def compare_first(ranked: pd.DataFrame, speed: str, run: RunData) -> Contest:
    """Compare the first row of a ranking by LATENCY or THROUGHPUT with every other one."""
    if ranked.empty:
        return Contest(ranked)
    first, *others = (row for _, row in ranked.iterrows())
    own = run.trials[first["trial"]]
    family = [compare_rows(own, run.trials[row["trial"]], first, row, speed, run.rule) for row in others]
    found = stats.decide_family(family, run.rule)
    if speed == LATENCY:
        found = [_read_lead(first, row) or lead for row, lead in zip(others, found, strict=True)]
    return Contest(ranked, tuple(found), tuple(family))


def _read_lead(first: pd.Series, row: pd.Series) -> stats.Speedup | None:
    """Return the first row's speed-up over another as the table has it; None where neither is the other's reference."""
    if first["reference"] == row["trial"]:
        return read_speedup(first)
    return read_speedup(row).inverse if row["reference"] == first["trial"] else None


def is_speed_lost(row: Mapping[str, Any]) -> bool:
    """Return whether the row has no speed-up, as blocks that other programs disturbed contradict its latency."""
    return row["verdict"] in (stats.ONE_ROUND, stats.UNDECIDED) and is_missing(row["speedup"])


def read_speedup(row: pd.Series) -> stats.Speedup:
    """Return a row's speed-up over its reference, with its verdict."""
    return stats.Speedup(
        row["speedup"],
        row["speedup_low"],
        row["speedup_high"],
        row["verdict"],
        row["measured"],
        more=None if is_missing(row["more_rounds"]) else int(row["more_rounds"]),
        builds=0 if is_missing(row["builds"]) or row["builds"] < 2 else int(row["builds"]),
        rejected=0 if is_missing(row["rounds_left_out"]) else int(row["rounds_left_out"]),
        unfiltered=row["speedup_all_rounds"],
    )


# What further rounds are for: trials that may be chosen, then pairs that matter and that are undecided.


MAX_NARROW_RATIO = 1.15  # ratio of interval end to speed-up; narrower intervals get no further rounds
MAX_NARROW_FACTOR = 3  # limit of rounds for narrowing, as a multiple of the planned rounds
CLEAR_LEAD = 1.5  # lead over a trial, proven faster, that removes it from contention


def list_contenders(run: RunData) -> set[str]:
    """Return the ids of the trials that further rounds are for where they are too long to measure all.

    They are the finalists, and the trials that no winner leads clearly (CLEAR). Until every row is decided, and in a
    comparison, where each row is a question, they are all.
    """
    if run.records.settings.get("until") == EVERY_ROW or any(trial.side for trial in run.trials.values()):
        return {*run.trials}
    found = {*list_finalists(run)}
    for ranking in rank_goals(run):
        contest = compare_first(ranking.rank_by(LATENCY), LATENCY, run)
        others = zip((str(row["trial"]) for _, row in contest.ranked.iloc[1:].iterrows()), contest.leads, strict=True)
        found |= {id for id, lead in others if not (lead.verdict == stats.FASTER and lead.value >= CLEAR_LEAD)}
    return found


@dataclass(frozen=True)
class UndecidedPair:
    """Two trials, by their ids, and the boundary at which it is undecided which of them is faster; `more` rounds are
    likely to decide it. Where that is `decided`, the interval of their ratio is wide."""

    trials: frozenset[str]
    boundary: str
    more: int
    decided: bool = False


def list_pending(run: RunData) -> list[UndecidedPair]:
    """Return the pairs that another round is for: each winner with its reference, its runner-up, and rivals that lost
    rounds to other programs. Where the reference is decided, it is also for a narrow interval of the speed-up.

    Until every row is decided, and in a comparison, where each row is a question, it is each trial with its reference.
    A pair with a failed trial is left out. Where `@rounds=` set a backend's number of rounds, only lost ones are made
    up for.
    """
    rows = run.frame[run.frame["status"] == "ok"]
    good, ranked = set(rows["trial"]), [ranking.rank_by(LATENCY) for ranking in rank_goals(run)]
    asked = {str(winners["trial"].iloc[0]) for winners in ranked if len(winners)}
    if run.records.settings.get("until") == EVERY_ROW or any(run.trials[id].side for id in good):
        asked = good
    pairs = [
        UndecidedPair(
            frozenset((row["trial"], row["reference"])), str(row["boundary"]), _count_rounds(row["more_rounds"])
        )
        for row in rows[rows["verdict"] == stats.UNDECIDED].to_dict("records")
        if row["trial"] in asked and _shares_rounds(run, row["trial"], row["reference"])
    ]
    for winners in ranked:
        pairs += [*_find_close_pairs(winners, run), *_find_wide_pair(winners, run)]
    return [pair for pair in dict.fromkeys(pairs) if pair.trials <= good]


def _find_close_pairs(ranked: pd.DataFrame, run: RunData) -> Iterator[UndecidedPair]:
    """Yield the undecided pairs of the winner with rivals of its group: the runner-up, and those short of rounds.

    Other rivals get no further rounds: `--until every-row` is for them.
    """
    contest = compare_first(ranked, LATENCY, run)
    for place, (lead, found) in enumerate(zip(contest.leads, contest.evidence, strict=True), 1):
        winner, rival = ranked.iloc[0], ranked.iloc[place]
        both = run.trials[winner["trial"]], run.trials[rival["trial"]]
        if both[0].group != both[1].group or lead.verdict != stats.UNDECIDED:
            continue
        shares = _shares_rounds(run, winner["trial"], rival["trial"])
        planned = run.rule.first if shares else min(result.planned_rounds for result in both)
        if _is_short(found, planned) or (place < COMPARED_PLACES and shares):
            pair = frozenset((str(winner["trial"]), str(rival["trial"])))
            yield UndecidedPair(
                pair, str(winner["boundary"]), _count_rounds(lead.more) if place < COMPARED_PLACES else 1
            )


def _find_wide_pair(ranked: pd.DataFrame, run: RunData) -> Iterator[UndecidedPair]:
    """Yield the winner and its reference if one is faster but the interval of how much is wide.

    Rounds are added for that up to MOST_FOR_NARROW times the planned number. An interval that allows for looking after
    every round allows for stopping when it is narrow.
    """
    if ranked.empty:
        return
    winner, gain = ranked.iloc[0], read_speedup(ranked.iloc[0])
    id, reference, boundary = (str(winner[name]) for name in ("trial", "reference", "boundary"))
    if gain.verdict not in (stats.FASTER, stats.SLOWER) or not _shares_rounds(run, id, reference):
        return
    is_wide = max(gain.high / gain.value, gain.value / gain.low) > MAX_NARROW_RATIO
    found = gather_evidence(run.trials[id], run.trials[reference], boundary, str(winner["clock"]), run.rule)
    if is_wide and found is not None and found.looked < MAX_NARROW_FACTOR * run.rule.first:
        yield UndecidedPair(frozenset((id, reference)), boundary, 1, decided=True)


def _shares_rounds(run: RunData, *ids: str) -> bool:
    """Return whether the trials have the study's number of rounds, not one set for their backend (`@rounds=`)."""
    own = run.records.settings.get("rounds", DEFAULT_ROUNDS)
    return all(run.trials[id].planned_rounds in (0, own) for id in ids)


def _is_short(found: stats.Evidence | None, planned: int) -> bool:
    """Return whether a pair lost rounds to other programs and has fewer left than planned.

    They are made up for, as often as there were rounds planned. Which rounds are lost doesn't depend on latencies.
    """
    return found is not None and found.disturbed > 0 and found.rounds < planned and found.looked < 2 * planned


def _count_rounds(more: float | None) -> int:
    """Return the number of further rounds, one more than MOST_ROUNDS where it isn't known."""
    return stats.MAX_ROUNDS + 1 if more is None or math.isnan(more) else int(more)
