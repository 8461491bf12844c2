"""Rankings: comparable trials in order of speed, for the verdict and for confirmation rounds."""

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
from dyno.worker.option_values import check_positive
from dyno.worker.spec import ADAPTIVE_RULES, DEFAULT_ROUNDS, EVERY_ROW

if TYPE_CHECKING:
    import pandas as pd

# Candidates: the Pareto frontier of accuracy and speed, the fastest within the budget, and saturation.

LATENCY, THROUGHPUT = "latency_ms", "throughput_ips"
RANKED_BY = (
    "trial", "reference", "measured", "boundary", "clock", "status", "outputs", "verdict", "budget", "limit", LATENCY,
    "speedup",
)  # fmt: skip
ROW_INDEX = "#place"  # temporary column: index of the row in its frame
SATURATION_SHARE = 0.95  # share of the best throughput; larger batches gain little beyond it (R37)
SERIES = ("model", "size", "device", "backend", "precision", "runtime", "options")


@dataclass(frozen=True)
class Saturation:
    """Throughput of one configuration over the batch sizes, and the batch that reaches SATURATION_SHARE of the best."""

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
        """Sentence on the batch at which throughput saturates."""
        if self.batch == self.largest:
            return f"throughput still rises at batch {self.largest}, the largest tried"
        if self.batch == self.best_batch:
            return f"throughput is highest at batch {self.batch}, of up to {self.largest}"
        share = f"{100 * self.images_per_s / self.best_images_per_s:.0f} %"
        best = f"{format_number(self.best_images_per_s)} {name_items(self.size)}/s at batch {self.best_batch}"
        return f"throughput saturates at batch {self.batch} ({share} of the best, {best})"


def mark_usable(row: Any) -> Any:
    """Return whether every round of a row, or of each row of a frame, succeeded and no check found wrong outputs."""
    return (row["status"] == "ok") & (row["outputs"] != OUTPUTS_WRONG)


def list_usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `mark_usable`."""
    return frame[mark_usable(frame)]


def read_throughput(frame: pd.DataFrame) -> pd.Series:
    """Return images per second as measured, else batch / latency, a lower bound."""
    return frame[THROUGHPUT].fillna(read_fps(frame))


def read_fps(frame: pd.DataFrame) -> pd.Series:
    """Return images per second of consecutive batches: batch / median latency (R34)."""
    return frame["batch"].astype(float) * 1e3 / frame[LATENCY]


def find_pareto(frame: pd.DataFrame, speed: str, quality: str = "top1") -> pd.DataFrame:
    """Return the Pareto frontier of speed and accuracy: fastest first, accuracy strictly rising.

    `speed` is LATENCY (less is better) or THROUGHPUT (more is better). Rows that lack either number are left out.
    """
    rows = list_usable(frame).dropna(subset=[speed, quality])
    rows = rows.sort_values([speed, quality], ascending=[speed != THROUGHPUT, False], kind="stable")
    values = rows[quality].astype(float)
    return rows[(values > values.cummax().shift(fill_value=-math.inf)).to_numpy()]


def keep_within_budget(frame: pd.DataFrame) -> pd.DataFrame:
    """Return usable rows within the accuracy budget with confidence; without a budget, all usable rows."""
    return _pick(frame, _keep_within_budget)


def keep_eligible(frame: pd.DataFrame) -> pd.DataFrame:
    """Return usable rows that are within the accuracy budget and the limits, if any, with confidence."""
    return _pick(frame, _keep_eligible)


def rank_trials(frame: pd.DataFrame, speed: str = LATENCY) -> pd.DataFrame:
    """Return the rows that have a value of `speed`, fastest first.

    If every row was measured interleaved with one common reference, speed-ups decide the order, because latencies
    follow changes of the machine's speed.
    """
    if speed == LATENCY:
        return _pick(frame, _rank_by_latency)
    rates = frame.assign(**{THROUGHPUT: read_throughput(frame)}).dropna(subset=[THROUGHPUT])
    return rates.sort_values(THROUGHPUT, ascending=False, kind="stable")


def sort_rows(frame: pd.DataFrame, trials: Mapping[str, TrialResult]) -> pd.DataFrame:
    """Return the rows that have a latency, fastest first.

    For two interleaved trials, their direct ratio decides, from undisturbed rounds if possible. Ratios to a common
    reference could favour either one when the reference's latency jumps.
    """
    return _pick(frame, lambda rows: _sort_rows(rows, trials))


def order_frame(group: pd.DataFrame, trials: Mapping[str, TrialResult]) -> pd.DataFrame:
    """Return the rows of a group, sorted by `order_group`."""
    return _pick(group, lambda rows: order_group(rows, trials))


def order_group(rows: Sequence[Row], trials: Mapping[str, TrialResult]) -> list[Row]:
    """Return all rows of one model, size, batch and device in the order of tables and charts.

    First come possible winners, fastest first; then rows excluded by a check, the budget or a limit; then rows without
    a latency.
    """
    comparable = [row for row in rows if not row["verdict"].startswith(INCOMPARABLE)]
    ordered = _sort_rows(_keep_eligible(comparable), trials)
    for choose in (_rank_by_latency, list):
        ranked_ids = {row["trial"] for row in ordered}
        ordered += choose([row for row in rows if row["trial"] not in ranked_ids])
    return ordered


# Rows as plain values: on the many small groups of a large study, each pandas operation is slow.


def _pick(frame: pd.DataFrame, choose: Callable[[Sequence[Row]], list[Row]]) -> pd.DataFrame:
    """Return the rows of a frame that `choose` returns, in its order."""
    rows = frame[[name for name in RANKED_BY if name in frame]].to_dict("records")
    return frame.iloc[[row[ROW_INDEX] for row in choose([row | {ROW_INDEX: k} for k, row in enumerate(rows)])]]


def _keep_within_budget(rows: Sequence[Row]) -> list[Row]:
    usable = [row for row in rows if mark_usable(row)]
    return [row for row in usable if row["budget"] == WITHIN] if any(row["budget"] for row in usable) else usable


def _keep_eligible(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _keep_within_budget(rows) if row.get("limit", WITHIN) == WITHIN]


def _rank_by_latency(rows: Sequence[Row]) -> list[Row]:
    timed_rows = [row for row in rows if not is_missing(row[LATENCY])]
    if _is_in_turns(timed_rows):
        return sorted(timed_rows, key=lambda row: -row["speedup"])
    return sorted(timed_rows, key=itemgetter(LATENCY))


def _is_in_turns(rows: Sequence[Row]) -> bool:
    """Return whether every row is the reference or was measured interleaved with it."""
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
    """Return the smallest batch near the best throughput, per configuration with several batches."""
    saturations = []
    rows = list_usable(frame).assign(ips=read_throughput(list_usable(frame))).dropna(subset=["ips"])
    for key, series in rows.groupby(list(SERIES), sort=False):
        ordered = series.sort_values("batch")
        is_measured = ordered[THROUGHPUT].notna()
        if ordered["batch"].nunique() < 2 or is_measured.any() != is_measured.all():  # batch / latency is only a bound
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
    """Return `configuration_of` a row for a sentence, with the precision that actually ran."""
    return configuration_of(row).removesuffix(str(row["precision"])) + name_precision(row)


def configuration_of(row: pd.Series) -> str:
    """Return backend, options and precision: a row's name within its group."""
    options = f"@{str(row['options']).replace(' ', '@')}" if row["options"] else ""
    runtime = f"@runtime={row['runtime']}" if row["runtime"] != "main" else ""
    return f"{row['backend']}{options}{runtime} {row['precision']}"


COMPARED_PLACES = 2  # the winner and its runner-up


@dataclass(frozen=True)
class Ranking:
    """Trials of one model on one device, at one size, or at all sizes if an accuracy budget covers them.

    `incomparable` holds trials that are incomparable with their reference (other weights make another model). `metric`
    is the accuracy shown. `trials` maps ids to the run's trials.
    """

    scope: str
    group: pd.DataFrame
    incomparable: pd.DataFrame
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
        """Trials at the smallest batch that are faster than the first row of `fastest`, in the same order."""
        rows, fastest = sort_rows(list_usable(self.first), self.trials), self.fastest
        if fastest.empty:
            return rows
        return rows.iloc[: [*rows["trial"]].index(fastest.iloc[0]["trial"])]

    @property
    def most_images(self) -> pd.DataFrame:
        """Trials within budget and limits by images per second, highest first; empty if there is only one batch."""
        ranked = rank_trials(keep_eligible(self.group), THROUGHPUT)
        return ranked if self.group["batch"].nunique() > 1 else ranked.iloc[:0]

    def rank_by(self, speed: str) -> pd.DataFrame:
        """Return the ranking by LATENCY or THROUGHPUT."""
        return self.fastest if speed == LATENCY else self.most_images

    def find_reference(self, row: pd.Series) -> TrialResult | None:
        """Return the reference of a row's speed-up; if all sizes compete, the one at the first size."""
        return self.trials.get(row["budget_reference"] if self.sizes else row["reference"])

    def name_row(self, row: pd.Series) -> str:
        """Return a row's name in the ranking, with the precision that actually ran."""
        return describe_configuration(row) + (f" at size {row['size']}" if self.sizes else "")


def rank_goals(run: RunData) -> list[Ranking]:
    """Return all rankings of a run, in the order of the table."""
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
    mask = rows["verdict"].str.startswith(INCOMPARABLE)
    return Ranking(where, rows[~mask], rows[mask], sizes, choose_metric(rows[~mask], run.budget_metrics), run.trials)


def is_within_limits(run: RunData) -> bool:
    """Return whether every ranking with usable trials has a trial within the budget and the limits."""
    rankings = [ranking for ranking in rank_goals(run) if len(list_usable(ranking.group))]
    return all(len(ranking.fastest) or len(ranking.most_images) for ranking in rankings)


def list_winners(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the model with its size and the winner's id, for each ranking that has a winner."""
    for ranking in rank_goals(run):
        ordered = ranking.fastest
        if len(ordered):
            yield ranking.scope, str(ordered.iloc[0]["trial"])


def list_finalists(run: RunData) -> dict[str, set[str]]:
    """Return the ids of the trials to confirm, with the boundaries to time each at.

    Finalists are each winner, its runner-up, and the reference of its speed-up.
    """
    finalists: dict[str, set[str]] = {}
    for ranking in rank_goals(run):
        for speed in (LATENCY, THROUGHPUT):
            ordered = ranking.rank_by(speed)
            ids = [str(id) for id in ordered["trial"].iloc[:COMPARED_PLACES]]
            if len(ordered) and (reference := ranking.find_reference(ordered.iloc[0])) is not None:
                ids.append(reference.id)
            if len(set(ids)) > 1:  # a single trial was not selected by chance
                boundary = "throughput" if speed == THROUGHPUT else str(ordered.iloc[0]["boundary"])
                for id in ids:
                    finalists.setdefault(id, set()).add(boundary)
    return finalists


# CPU contention: load by other programs during a study, and its effect on the rankings.


@dataclass(frozen=True)
class Contention:
    """Counts of timed jobs, of disturbed jobs, and of disturbed jobs that ran uninterleaved (`alone`).

    `processors`: the most that other programs kept busy; `compared`: False for one configuration, which has no rank.
    """

    jobs: int
    disturbed: int
    alone: int
    processors: float
    compared: bool = True

    @property
    def mostly(self) -> bool:
        """Whether most jobs were disturbed and uninterleaved, so that too few are left to rank engines by.

        A disturbance of interleaved jobs hits all compared engines, so their ratios stand.
        """
        return self.compared and self.alone > self.jobs / 2

    @property
    def sentence(self) -> str:
        """Sentence on the effect on measured times."""
        during = f"during {self.disturbed} of {format_count(self.jobs, 'job')}"
        busy = f"other programs kept up to {self.processors:.1f} processors busy {during}"
        if self.mostly:
            return f"No winner is named: {busy}, and on a quiet machine the order may differ."
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


MIN_DISTURBED_SHARE = 0.1  # smaller shares of disturbed jobs can't change a result


def cpu_contention(results: Iterable[TrialResult], compared: bool = True) -> Contention | None:
    """Return the contention that the records show, or None if it is negligible.

    Contention matters if it disturbed at least a tenth of the timed jobs, or at least half of one trial's rounds.
    `compared` tells whether the trials are compared with each other.
    """
    good_rounds = [t.good for t in results]
    busy_rounds = [[r for r in rounds if _measure_excess(r) > 0] for rounds in good_rounds]
    jobs, disturbed = sum(map(len, good_rounds)), [r for rounds in busy_rounds for r in rounds]
    is_rare = len(disturbed) < MIN_DISTURBED_SHARE * jobs
    if not disturbed or (
        is_rare and all(2 * len(busy) < len(good) for busy, good in zip(busy_rounds, good_rounds, strict=True) if busy)
    ):
        return None
    processors = max(max(r.facts.others_busy.values()) for r in disturbed)
    return Contention(jobs, len(disturbed), sum(not r.turns for r in disturbed), processors, compared)


def _measure_excess(r: Round) -> float:
    """Return the processors kept busy by other programs beyond the round's contention threshold, at least 0."""
    limit = r.facts.contention_threshold
    return 0.0 if limit is None else max(r.facts.others_busy.values(), default=0.0) - limit


# Speed-up of one trial over another: paired if they were interleaved, else between processes.

MIN_ROUNDS = 2  # shared rounds needed for a spread


def make_rule(settings: Mapping[str, Any], equivalent: float | None = None) -> stats.Rule:
    """Return the study's decision rule from its settings; `equivalent` (percent) overrides theirs."""
    percent = settings.get("equivalent") if equivalent is None else equivalent
    if percent is not None:
        check_positive("equivalent", float(percent))
    margin = stats.Rule.margin if percent is None else float(percent) / 100
    return stats.Rule(
        margin, int(settings.get("rounds", DEFAULT_ROUNDS)) if settings.get("until") in ADAPTIVE_RULES else 0
    )


def gather_evidence(
    trial: TrialResult, reference: TrialResult, boundary: str, clock: str = "", rule: stats.Rule | None = None
) -> stats.Evidence | None:
    """Collect the evidence from the rounds of both trials at the boundary, by that clock.

    It is `stats.pair_evidence` for two or more interleaved rounds, else `stats.collect_evidence`. If rounds go through
    builds of either engine, one observation is a build: the mean of its rounds. In an adaptive study, unpaired
    comparisons use only rounds that both trials have, so that further rounds of other trials change no decision.
    """
    sets = block_ratios(reference, trial, boundary, clock)
    pair_ratios = average_rounds(sets)
    are_rounds = max(list_builds(trial), list_builds(reference)) < 2
    all_ratios = log_ratios(reference, trial, boundary, clock, keep_disturbed=True)
    shared_rounds = trial.round_medians(boundary, clock).keys() & reference.round_medians(boundary, clock).keys()
    medians = []
    for t, rounds in zip((trial, reference), list_quiet_rounds((trial, reference), boundary), strict=True):
        names = {r.folder.name for r in rounds}
        medians.append(t.medians(boundary, clock, names & shared_rounds if rule is not None and rule.first else names))
    if len(pair_ratios) >= MIN_ROUNDS or (pair_ratios and min(map(len, medians)) < MIN_ROUNDS):
        evidence = stats.pair_evidence(pair_ratios, are_rounds)
        if evidence is not None:
            disturbed = len(all_ratios) - len(pair_ratios)
            mean = float(np.mean(all_ratios))
            is_undisturbed = are_quiet(sets) and all(each.has_delays for each in sets)
            evidence = replace(evidence, disturbed=disturbed, unfiltered=mean, undisturbed=is_undisturbed)
    else:
        evidence = stats.collect_evidence(medians[0], medians[1], are_rounds)
    return evidence and of_rounds(evidence, trial, reference, len(shared_rounds))


def of_rounds(evidence: stats.Evidence, trial: TrialResult, reference: TrialResult, round_count: int) -> stats.Evidence:
    """Add the number of rounds and of engine builds to the evidence on two trials."""
    # All shared rounds count as looks at the data, also rounds without a ratio or of a repeated build.
    builds = max(list_builds(trial), list_builds(reference))
    return replace(evidence, rounds_seen=round_count, builds=builds if builds > 1 else 0)


def list_builds(trial: TrialResult) -> int:
    """Return the number of measured builds of the trial's engine, 0 if every build would be the same file."""
    return len({r.build for r in trial.good} - {0}) or trial.builds


def estimate_speedup(
    trial: TrialResult, reference: TrialResult, boundary: str, clock: str = "", rule: stats.Rule | None = None
) -> stats.Speedup:
    """Compute the speed-up, reference latency / own latency, at the boundary, with its interval and verdict.

    For a single pair, not one of a family.
    """
    return stats.decide(gather_evidence(trial, reference, boundary, clock, rule), rule)


def compare_rows(
    trial: TrialResult, other: TrialResult, row: pd.Series, other_row: pd.Series, speed: str, rule: stats.Rule | None
) -> stats.Evidence | None:
    """Collect the evidence on the speed-up of `trial` over `other`, by LATENCY or THROUGHPUT.

    `row` and `other_row` are their table rows. If throughput was not measured, it is that of consecutive batches.
    """
    if speed == LATENCY:
        return gather_evidence(trial, other, str(row["boundary"]), str(row["clock"]), rule)
    ratios, are_rounds = log_ratios(trial, other, "throughput"), max(list_builds(trial), list_builds(other)) < 2
    if len(ratios) >= MIN_ROUNDS:
        evidence = stats.pair_evidence(ratios, are_rounds)
    else:
        has_throughput = all(t.value("throughput", "throughput") is not None for t in (trial, other))
        rounds = list_quiet_rounds((trial, other), "throughput" if has_throughput else str(row["boundary"]))
        evidence = stats.collect_evidence(image_costs(rounds[0], row), image_costs(rounds[1], other_row), are_rounds)
    return evidence and of_rounds(evidence, trial, other, min(len(trial.good), len(other.good)))


def image_costs(rounds: Iterable[Round], row: pd.Series) -> list[float]:
    """Return the seconds per image of each round, or of each build."""
    rounds = list(rounds)
    if rates := [(r, v) for r in rounds if (v := r.value("throughput", "throughput"))]:
        return by_build((r, 1 / rate) for r, rate in rates)
    medians = [(r, m) for r in rounds if (m := r.median(str(row["boundary"]), str(row["clock"]))) is not None]
    return by_build((r, m / float(row["batch"])) for r, m in medians)


@dataclass(frozen=True)
class Contest:
    """First row of a ranking, with its speed-up over each further row and the evidence.

    Being the fastest is a claim against every row, so the comparisons form one family (multiple comparisons with the
    best, Hsu 1981; here by Holm's procedure). Pairs that the table decides keep the table's verdict.
    """

    ranked: pd.DataFrame
    leads: tuple[stats.Speedup, ...] = ()
    evidence: tuple[stats.Evidence | None, ...] = ()

    @cached_property
    def rivals(self) -> list[tuple[pd.Series, stats.Speedup]]:
        """Rows that may be as fast as the first, each with the first row's speed-up over it."""
        further_rows = (row for _, row in self.ranked.iloc[1:].iterrows())
        return [(row, lead) for row, lead in zip(further_rows, self.leads, strict=True) if lead.verdict != stats.FASTER]

    @property
    def candidates(self) -> tuple[str, ...]:
        """Ids of the first row's trial and of its rivals."""
        return tuple(str(row["trial"]) for row in (self.ranked.iloc[0], *(row for row, _ in self.rivals)))

    @property
    def is_one_round(self) -> bool:
        """Whether every pair has a single round, which proves nothing."""
        return bool(self.leads) and all(lead.verdict == stats.ONE_ROUND for lead in self.leads)

    @property
    def is_tied(self) -> bool:
        """Whether the first row is practically as fast as every rival."""
        return bool(self.rivals) and all(lead.verdict == stats.EQUIVALENT for _, lead in self.rivals)


def compare_first(ranked: pd.DataFrame, speed: str, run: RunData) -> Contest:
    """Compare the first row of a ranking by LATENCY or THROUGHPUT with all further rows."""
    if ranked.empty:
        return Contest(ranked)
    first, *further_rows = (row for _, row in ranked.iterrows())
    first_trial = run.trials[first["trial"]]
    family = [compare_rows(first_trial, run.trials[row["trial"]], first, row, speed, run.rule) for row in further_rows]
    leads = stats.decide_family(family, run.rule)
    if speed == LATENCY:
        leads = [_read_lead(first, row) or lead for row, lead in zip(further_rows, leads, strict=True)]
    return Contest(ranked, tuple(leads), tuple(family))


def _read_lead(first: pd.Series, row: pd.Series) -> stats.Speedup | None:
    """Return the first row's speed-up over `row` as the table has it; None if neither is the other's reference."""
    if first["reference"] == row["trial"]:
        return read_speedup(first)
    return read_speedup(row).inverse if row["reference"] == first["trial"] else None


def is_speed_lost(row: Mapping[str, Any]) -> bool:
    """Return whether a row lacks a speed-up because disturbed blocks contradict its latency."""
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


# Further rounds: for possible winners first, then for pairs that matter and are undecided.


MAX_NARROW_RATIO = 1.15  # ratio of interval end to speed-up; narrower intervals get no further rounds
MAX_NARROW_FACTOR = 3  # limit of rounds for narrowing, as a multiple of the planned rounds
CLEAR_LEAD = 1.5  # lead over a trial, proven faster, that removes it from contention


def list_contenders(run: RunData) -> set[str]:
    """Return the ids of the trials that get further rounds if there is no time for all.

    They are the finalists, and trials that the winner doesn't beat by CLEAR_LEAD. With `--until every-row` and in a
    comparison they are all trials, because every row is a question.
    """
    if run.records.settings.get("until") == EVERY_ROW or any(trial.side for trial in run.trials.values()):
        return {*run.trials}
    contenders = {*list_finalists(run)}
    for ranking in rank_goals(run):
        contest = compare_first(ranking.rank_by(LATENCY), LATENCY, run)
        leads = zip((str(row["trial"]) for _, row in contest.ranked.iloc[1:].iterrows()), contest.leads, strict=True)
        contenders |= {id for id, lead in leads if not (lead.verdict == stats.FASTER and lead.value >= CLEAR_LEAD)}
    return contenders


@dataclass(frozen=True)
class UndecidedPair:
    """Ids of two trials, and the boundary at which their order is undecided.

    `more` rounds are likely to decide it. If `decided`, the order is known but the interval of the ratio is wide.
    """

    trials: frozenset[str]
    boundary: str
    more: int
    decided: bool = False


def list_pending(run: RunData) -> list[UndecidedPair]:
    """Return the pairs that need another round.

    They are each winner with its reference, its runner-up, and rivals that lost rounds to other programs. A decided
    reference stays pending while the interval of the speed-up is wide. With `--until every-row`, and in a comparison,
    every trial is paired with its reference. Pairs with a failed trial are left out. For a backend with its own number
    of rounds (`@rounds=`), only lost rounds are repeated.
    """
    rows = run.frame[run.frame["status"] == "ok"]
    good_ids, rankings = set(rows["trial"]), [ranking.rank_by(LATENCY) for ranking in rank_goals(run)]
    relevant_ids = {str(winners["trial"].iloc[0]) for winners in rankings if len(winners)}
    if run.records.settings.get("until") == EVERY_ROW or any(run.trials[id].side for id in good_ids):
        relevant_ids = good_ids
    pairs = [
        UndecidedPair(
            frozenset((row["trial"], row["reference"])), str(row["boundary"]), _count_rounds(row["more_rounds"])
        )
        for row in rows[rows["verdict"] == stats.UNDECIDED].to_dict("records")
        if row["trial"] in relevant_ids and _shares_rounds(run, row["trial"], row["reference"])
    ]
    for winners in rankings:
        pairs += [*_find_close_pairs(winners, run), *_find_wide_pair(winners, run)]
    return [pair for pair in dict.fromkeys(pairs) if pair.trials <= good_ids]


def _find_close_pairs(ranked: pd.DataFrame, run: RunData) -> Iterator[UndecidedPair]:
    """Yield the winner's undecided pairs: with the runner-up, and with rivals of its group that are short of rounds.

    Other rivals get further rounds only with `--until every-row`.
    """
    contest = compare_first(ranked, LATENCY, run)
    for index, (lead, evidence) in enumerate(zip(contest.leads, contest.evidence, strict=True), 1):
        winner, rival = ranked.iloc[0], ranked.iloc[index]
        trials = run.trials[winner["trial"]], run.trials[rival["trial"]]
        if trials[0].group != trials[1].group or lead.verdict != stats.UNDECIDED:
            continue
        has_study_rounds = _shares_rounds(run, winner["trial"], rival["trial"])
        target = run.rule.first if has_study_rounds else min(result.planned_rounds for result in trials)
        if _is_short(evidence, target) or (index < COMPARED_PLACES and has_study_rounds):
            pair = frozenset((str(winner["trial"]), str(rival["trial"])))
            yield UndecidedPair(
                pair, str(winner["boundary"]), _count_rounds(lead.more) if index < COMPARED_PLACES else 1
            )


def _find_wide_pair(ranked: pd.DataFrame, run: RunData) -> Iterator[UndecidedPair]:
    """Yield the winner and its reference if the order is decided but the interval of the speed-up is wide.

    The limit is MAX_NARROW_FACTOR times the planned rounds. The interval is valid after every round, so stopping when
    it is narrow is allowed.
    """
    if ranked.empty:
        return
    winner, speedup = ranked.iloc[0], read_speedup(ranked.iloc[0])
    id, reference, boundary = (str(winner[name]) for name in ("trial", "reference", "boundary"))
    if speedup.verdict not in (stats.FASTER, stats.SLOWER) or not _shares_rounds(run, id, reference):
        return
    is_wide = max(speedup.high / speedup.value, speedup.value / speedup.low) > MAX_NARROW_RATIO
    evidence = gather_evidence(run.trials[id], run.trials[reference], boundary, str(winner["clock"]), run.rule)
    if is_wide and evidence is not None and evidence.looks < MAX_NARROW_FACTOR * run.rule.first:
        yield UndecidedPair(frozenset((id, reference)), boundary, 1, decided=True)


def _shares_rounds(run: RunData, *ids: str) -> bool:
    """Return whether the trials have the study's number of rounds, not their backend's (`@rounds=`)."""
    study_rounds = run.records.settings.get("rounds", DEFAULT_ROUNDS)
    return all(run.trials[id].planned_rounds in (0, study_rounds) for id in ids)


def _is_short(evidence: stats.Evidence | None, target: int) -> bool:
    """Return whether a pair lost rounds to other programs and has fewer left than planned.

    Lost rounds are repeated up to the planned number. Their selection doesn't depend on latencies.
    """
    return evidence is not None and evidence.disturbed > 0 and evidence.rounds < target and evidence.looks < 2 * target


def _count_rounds(more: float | None) -> int:
    """Return the number of further rounds, stats.MAX_ROUNDS + 1 if unknown."""
    return stats.MAX_ROUNDS + 1 if more is None or math.isnan(more) else int(more)
