"""Requests of an application: seconds by stage, the model's share, and the possible gain from a faster engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dyno.formatting import format_limits, format_number, show
from dyno.report.tables import TableKind
from dyno.results import stats
from dyno.results.files import read_npz
from dyno.results.run_data import RunData
from dyno.results.stats import Interval
from dyno.serving.figures import CheckedRun, find_reference, list_outputs, list_speedups
from dyno.serving.tables import describe_company, describe_right, describe_wrong
from dyno.table import (
    COUNT,
    LABEL_COLUMN,
    PERCENT,
    RATIO,
    TEXT,
    TRIAL_COLUMN,
    Column,
    Row,
    Table,
    compare_cells,
    duration_column,
    keep_printed,
    limit_cells,
    limits_of,
    with_limits,
)
from dyno.video.words import describe_each
from dyno.worker.facts.job import APPLICATION_STAGES, ApplicationFacts

ARRAYS_FILE = "application.npz"
PREPROCESS, MODEL, POSTPROCESS, WHOLE = APPLICATION_STAGES
TRIMMED_SHARE = 0.25  # share of passes cut at each end: disturbed ones are among the longest
MIN_GAP_SHARE = 0.05  # smallest share of a request between stages to mention


@dataclass(frozen=True)
class ApplicationRun(CheckedRun):
    """A trial as the network of an application; `rounds` holds each round's mean seconds per request, by stage."""

    facts: ApplicationFacts
    rounds: tuple[Mapping[str, float], ...]

    @property
    def seconds(self) -> list[float]:
        return [each[WHOLE] for each in self.rounds]

    def find_stage(self, name: str) -> Interval:
        """Return a stage's seconds: the geometric mean of the rounds with its 95 % interval."""
        return stats.find_center([each[name] for each in self.rounds])

    @property
    def between(self) -> float:
        """Seconds of a request outside all stages."""
        return max(0.0, self.find_stage(WHOLE).value - sum(self.find_stage(n).value for n in APPLICATION_STAGES[:-1]))

    @cached_property
    def _outside_share(self) -> Interval:
        """Share of a request outside the model, by rounds."""
        return stats.find_center([1 - each[MODEL] / each[WHOLE] for each in self.rounds])

    @property
    def share(self) -> Interval:
        """The model's share of a request."""
        low, high = 1 - self._outside_share.high, 1 - self._outside_share.low
        return Interval(1 - self._outside_share.value, float(np.maximum(0.0, low)), high)

    @property
    def limit(self) -> Interval:
        """Speed-up of a request with a model that takes no time (Amdahl 1967)."""
        return Interval(
            1 / self._outside_share.value,
            float(np.maximum(1.0, 1 / self._outside_share.high)),
            1 / self._outside_share.low,
        )


def list_applications(run: RunData) -> list[ApplicationRun]:
    """Return each trial that answered an application's requests, in the order of the trials."""
    runs = []
    for trial in run.records:
        rounds = [r for r in trial.good if r.facts.application and (r.folder / ARRAYS_FILE).is_file()]
        if rounds and (facts := rounds[0].facts.application):
            runs.append(
                ApplicationRun(trial, facts, tuple(_average_stages(read_npz(r.folder / ARRAYS_FILE)) for r in rounds))
            )
    outputs = list_outputs(run) if runs else {}
    return [replace(each, outputs=outputs[each.trial.id]) for each in runs]


def _average_stages(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the mean seconds of each stage over the middle passes; `arrays` are [requests, passes].

    All stages use the same passes, so that they add up to the whole.
    """
    order = np.argsort(arrays[WHOLE].sum(axis=0), kind="stable")
    cut = int(TRIMMED_SHARE * len(order))
    passes = order[cut : len(order) - cut]
    return {name: float(arrays[name][:, passes].mean()) for name in APPLICATION_STAGES}


# Table of an application, and sentences on it.


def list_sentences(run: ApplicationRun) -> list[str]:
    """Describe the model's share and the gain's limit, the longest stage, the time between stages, and doubts."""
    parts = (describe_wrong, _describe_share, _describe_longest, _describe_between, describe_right, describe_company)
    return [sentence for describe in parts for sentence in describe(run)]


def _describe_share(run: ApplicationRun) -> Iterator[str]:
    seconds, total = (show(run.find_stage(name).value, "duration") for name in (MODEL, WHOLE))
    share = _format_limited(run.share, lambda value: format_number(100 * value))
    gain = _format_limited(run.limit, lambda value: f"{value:.2f}")
    yield (
        f"The model is {share} % of a request ({seconds} of {total}): a faster engine makes a request at most {gain} "
        "times as fast."
    )


def _format_limited(interval: Interval, format: Callable[[float], str]) -> str:
    return format(interval.value) + format_limits(interval.low, interval.high, format)


def _describe_longest(run: ApplicationRun) -> Iterator[str]:
    total = run.find_stage(WHOLE).value
    shares = {name: run.find_stage(name).value / total for name in APPLICATION_STAGES[:-1]}
    stage = max(shares, key=lambda name: shares[name])
    if stage != MODEL:
        yield (
            f"The longest stage is {stage}, {show(shares[stage], 'percentage')}: twice as fast, it would make a "
            f"request {1 / (1 - shares[stage] / 2):.2f}x as fast."
        )


def _describe_between(run: ApplicationRun) -> Iterator[str]:
    share = run.between / run.find_stage(WHOLE).value
    if share > MIN_GAP_SHARE:
        yield (
            f"{show(share, 'percentage')} of a request is in no stage: predict's own code, and Dyno's, which hands "
            "tensors to the engine and back."
        )


def _make_application_table(run: RunData) -> Table | None:
    runs = list_applications(run)
    if not runs:
        return None
    rows = [_make_row(app_run) for app_run in runs]
    if len(runs) > 1:
        gains, reference = list_speedups(runs, run.rule), find_reference(runs)
        rows = [
            row | ({} if app_run.outputs.fault else compare_cells(gain, app_run is reference))
            for row, gain, app_run in zip(rows, gains, runs, strict=True)
        ]
    note = (
        "Requests are answered one at a time, from the start of preprocess to the end of postprocess; the stages and "
        "other add up to it. model: the engine, from host memory to host memory. at most: a request's speed-up with a "
        "model that takes no time, 1 / (1 - share). Means over requests, without the fastest and the slowest quarter "
        "of passes."
    )
    return APPLICATION.build(COLUMNS, rows, notes=(note,), printed=keep_printed(COLUMNS))


def _make_row(run: ApplicationRun) -> Row:
    outputs = run.outputs
    row: Row = {
        "label": run.trial.label, "trial": run.trial.id, "rounds": len(run.rounds), "requests": run.facts.requests,
        **limit_cells("request_s", run.find_stage(WHOLE)),
        **{key: v for n in APPLICATION_STAGES[:-1] for key, v in limit_cells(f"{n}_s", run.find_stage(n)).items()},
        "other_s": run.between, **limit_cells("share", run.share, 100), **limit_cells("limit", run.limit),
    }  # fmt: skip
    if outputs.word:
        row |= {"outputs": outputs.word, "output_error": outputs.error, "labels_changed": outputs.labels_changed}
    return row | ({"verdict": outputs.fault} if outputs.fault else {})


def _make_stage_columns(name: str, meaning: str, rank: int) -> tuple[Column, ...]:
    """Return the columns of a stage's seconds and their limits; only the value is printed."""
    return replace(duration_column(f"{name}_s", meaning, rank=rank), interval=False), *limits_of(f"{name}_s", "s")


COLUMNS = (
    LABEL_COLUMN,
    TRIAL_COLUMN,
    Column("rounds", "processes in which they were answered", kind=COUNT, rank=8),
    Column("requests", "different ones, answered in turn", kind=COUNT, rank=7),
    *with_limits(duration_column("request_s", "mean time of a request", "request")),
    *_make_stage_columns(PREPROCESS, "mean time of preprocess", 3),
    *_make_stage_columns(MODEL, "mean time of the network in a request", 2),
    *_make_stage_columns(POSTPROCESS, "mean time of postprocess", 3),
    duration_column("other_s", "mean time of a request outside every stage", rank=4),
    *with_limits(Column("share", "of a request that is the model", "%", PERCENT, title="model, % of request")),
    *with_limits(Column("limit", "a request's speed-up with a model that takes no time", kind=RATIO, title="at most")),
    Column("outputs", "agree with the reference's, or wrong outputs", kind=TEXT, rank=6),
    Column("output_error", "relative error of the outputs against the reference's", title="output error", rank=6),
    Column("labels_changed", "share of the outputs' labels (whole numbers, booleans) that differ", "%", PERCENT,
           title="labels that differ", rank=6),
    *with_limits(Column("speedup", "the reference's request over this one's", kind=RATIO, rank=1)),
    Column("verdict", "on the request, against the reference", kind=TEXT, rank=1),
)  # fmt: skip
APPLICATION = TableKind(
    "app", "Application", "A request of an application by stage, and how much of it a faster engine can save.",
    _make_application_table, "this run measured no application; `dyno bench app` does", "tables", 17,
    leads=True, sentences=lambda run: describe_each(list_applications(run), list_sentences),
)  # fmt: skip
